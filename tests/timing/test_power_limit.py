"""--power-limit: the clock of products follows the board's watts, nothing else does."""

from __future__ import annotations

import pytest
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_gpu
from napkinmath.estimate import Estimate
from napkinmath.inputs.jobs import priced
from napkinmath.timing.efficiency import default_efficiency

LONG = {"model": "llama-7b", "gpu": "H100", "bs": 4, "ctx": 2048}


def of(options: dict[str, object]) -> Estimate:
    (found,) = priced({**LONG, **options}, [])
    return found


def test_a_limit_slows_products_as_a_chip_sold_at_that_power() -> None:
    h100, limited = find_gpu("H100"), find_gpu("H100").replace(power_limit_w=500.0)
    sold = find_gpu("H100-SXM5-96GB-HBM2e")  # the same chip at 500 W, with slower memory
    rates = [default_efficiency(gpu).matmul_rate("bf16") for gpu in (h100, limited, sold)]
    assert rates[1] == rates[2] < rates[0]
    assert (
        default_efficiency(limited).stream_bytes_per_s
        == default_efficiency(h100).stream_bytes_per_s
    )


def test_a_step_is_slower_and_needs_the_same_memory() -> None:
    free, held = of({}), of({"power_limit": 400})
    assert free.time is not None and held.time is not None
    assert free.time.seconds * 1.1 < held.time.seconds < free.time.seconds * (700 / 400) ** 0.55
    assert free.memory.reserved == held.memory.reserved


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"power_limit": 900}, "from 175 to 700"),
        ({"power_limit": 250, "gpu": "p100"}, "not known"),
        ({"power_limit": 500, "calibration": "x.json"}, "drop one of the two"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        of(options)
