"""The pre-flight check: live model, optimizer and batch read as they are, priced, and judged before
the first step."""

from napkinmath_profiler.preflight.check import Preflight, preflight

__all__ = ["Preflight", "preflight"]
