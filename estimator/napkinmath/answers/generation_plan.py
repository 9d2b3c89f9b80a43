"""Over how many GPUs, and in which format, inference is cheapest: an engine's tensor-parallel sizes
of one machine, each with every format that it serves there."""

from __future__ import annotations

from napkinmath.answers.figures import Verdict
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.generation import BatchSpeed, Generation


class Placed(Record):
    """A placement, and its speed with as many sequences as it runs."""

    generation: Generation
    speed: BatchSpeed

    @property
    def rate(self) -> float:
        """Tokens/s of one GPU: the more, the less a token costs."""
        return self.speed.tokens_per_s / self.generation.config.ranks


def fitting(g: Generation) -> list[Generation]:
    """Every format over every number of GPUs that holds the sequences asked for, the fewest GPUs of a
    format first."""
    others = [g, *g.formats()]
    if g.config.quantization and all(o.config.quantization for o in others):
        others.append(g.in_format(""))
    return [o for one in others for o in one.placements() if o.verdict is Verdict.FITS]


def planned(g: Generation, price: float | None, token_s: float | None) -> list[Placed]:
    """Those that fit, the cheapest token first; of each as many sequences as keep `token_s` between
    two tokens, where that is given."""
    found: list[Placed] = []
    for one in fitting(g):
        most = one.running_sequences if token_s is None else one.within(token_s)
        most = min(most, g.config.sequences or most)
        if most:
            found.append(Placed(generation=one, speed=one.speed(most, price)))
    return sorted(found, key=lambda placed: -placed.rate)
