"""What each change of a plan is worth: the plan with that knob alone put back."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.estimate import estimate
from napkinmath.inputs.asked import training_of
from napkinmath.inputs.method_options import ADAPTER_OPTIONS, QUANT_OPTIONS
from napkinmath.planning.plan import Candidate
from napkinmath.planning.space import Space

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Trade(Record):
    """One change of a plan: bytes the peak would grow by without it (negative: shrink), and the
    speed the plan has of that without it."""

    flag: str
    saved_bytes: int
    speed_ratio: float | None


def trades(space: Space, best: Candidate) -> tuple[Trade, ...]:
    """What each knob that the plan turns is worth: the plan with that knob alone put back."""
    found: list[Trade] = []
    options = dict(best.options)
    defaults = {
        **{name: known[0] for name, known in space.knobs},
        "bs": space.batches[0],
        "rank": space.ranks[0],
    }
    for flag in best.changes:
        name = (
            "method"
            if flag.lstrip("-") == str(options.get("method"))
            else flag.split()[0].lstrip("-").removeprefix("no-").replace("-", "_")
        )
        back = _put_back(options, name, defaults.get(name))
        try:
            config = training_of(space.spec, {**back, "grad_accum": options.get("grad_accum", 1)})
            other = estimate(
                space.spec,
                config,
                hardware=best.machine.hardware,
                efficiency=best.machine.efficiency,
                allocator=space.allocator,
            )
        except InputError:
            continue
        own = best.estimate.priced_time  # without measured layers, which the other has not
        ratio = (
            own.tokens_per_s / other.time.tokens_per_s
            if other.time is not None and own is not None
            else None
        )
        found.append(
            Trade(
                flag=flag,
                saved_bytes=other.peak.nbytes - best.estimate.peak.nbytes,
                speed_ratio=ratio,
            )
        )
    return tuple(found)


def _put_back(options: Mapping[str, object], name: str, default: object) -> dict[str, object]:
    back = {key: value for key, value in options.items() if key != name}
    if default is not None:
        back[name] = default
    if name == "method" and default in (None, "full"):
        back = {
            key: value
            for key, value in back.items()
            if key not in (*ADAPTER_OPTIONS, "quant", *QUANT_OPTIONS)
        }
    return back
