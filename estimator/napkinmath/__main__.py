"""`python -m napkinmath` is `estimate`."""

from __future__ import annotations

from napkinmath.cli.main import entry

if __name__ == "__main__":
    entry()
