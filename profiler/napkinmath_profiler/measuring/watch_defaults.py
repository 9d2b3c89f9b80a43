"""Defaults of watching, apart from what needs torch."""

from __future__ import annotations

DEFAULT_REPORT = "napkinmath-out-of-memory.txt"
