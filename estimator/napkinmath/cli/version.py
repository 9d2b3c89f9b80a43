"""`estimate version`: the version, and the Python it runs on."""

from __future__ import annotations

import sys

from napkinmath.cli.flag_rows import DEBUG
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Prints one line."""
    from napkinmath import __version__

    Parser("estimate version", "Print the version.", (("output", (DEBUG,)),)).parse(argv)
    print(f"napkinmath {__version__} (Python {'.'.join(map(str, sys.version_info[:3]))})")
    return 0
