"""What divides a number of ranks."""

from __future__ import annotations


def divisors(number: int) -> str:
    """'1, 2, 4 or 8': what divides a number of ranks, for messages."""
    found = [str(i) for i in range(1, min(number, 4096) + 1) if number % i == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is not above the limit."""
    return next(i for i in range(min(number, limit), 0, -1) if number % i == 0)
