"""Command lines of `estimate links`."""

from __future__ import annotations

from random import Random

from fuzz_doors.door import Case, Door
from fuzz_doors.draw import GPUS, argument, often

_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send"),
)
_SIZES = ("1", "1KiB", "3MB", "4GiB", "0", "1e9", "64TiB")


def make(rng: Random) -> Case:
    """Some GPUs and up to six flags."""
    gpus = f"{rng.choice((1, 2, 4, 8, 12, 16, 64, 1000))}x{rng.choice(GPUS)}"
    flags = {
        "--nodes": ("1", "2", "4", "8"),
        "--network": ("400", "ib-ndr", "roce:200", "4xib-hdr", "100"),
        "--collective": _COLLECTIVES,
        "--ranks": ("1", "2", "3", "8", "16"),
        "--stride": ("1", "2", "8"),
        "--from": _SIZES,
        "--to": _SIZES,
    }
    lines: list[tuple[str, ...]] = [often(rng, 0.95, "--gpus", argument(rng, gpus))]
    for name in rng.sample(list(flags), rng.randrange(5)):
        lines.append((name, argument(rng, *flags[name])))
    lines.append(often(rng, 0.5, "--json"))
    rng.shuffle(lines)
    return Case(("links", *(word.replace("\x00", "") for line in lines for word in line)))


DOOR = Door("links", make)
