"""Moved to `napkinmath_profiler.cli.oom`; this path, named by a notebook of 0.1, ends with 0.3.0."""

import warnings

from napkinmath_profiler.cli.oom import explain as explain

warnings.warn(str(__doc__), DeprecationWarning, stacklevel=2)
