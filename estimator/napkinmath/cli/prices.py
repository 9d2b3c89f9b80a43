"""--price: money for one hour of a GPU."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.catalog.gpus import find_gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def price_of_name(name: str) -> str:
    """The catalogued name of a GPU in --price NAME=P."""
    return find_gpu(name).name


def price_of(gpu: str, prices: Sequence[str]) -> float | None:
    """The price of a GPU's hour: of its name, or the one given without a name."""
    found: float | None = None
    for text in prices:
        name, _, amount = text.rpartition("=")
        price = values.price(amount, f"--price {name}".strip())
        if not name or price_of_name(name) == gpu.partition(" MIG ")[0]:
            found = price
    return found
