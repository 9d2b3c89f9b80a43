"""Measured speeds: files of them, this machine, and a step's time read off its measured layers."""

from __future__ import annotations

TYPE_CHECKING = False


if not TYPE_CHECKING:

    def __getattr__(name):
        """Names of 0.1 that are elsewhere now."""
        import napkinmath

        return napkinmath.moved_name(__name__, name)
