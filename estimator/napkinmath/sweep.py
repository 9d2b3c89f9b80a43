"""sweep: the same rules with numpy arrays bound to batch, sequence and rank: hundreds of thousands of configurations a second.

A step's structure (which tensors exist, in which order) hardly depends on these three, so it is recorded with the symbols left open,
once between any two sizes at which the library runs other operations; every event is then one addition of arrays. Anything else
that varies is a new structure: one call a combination.
"""

from __future__ import annotations

import numpy as np

from napkinmath.costs import HostCopy
from napkinmath.expr import Bindings, symbol
from napkinmath.ledger import ALLOC, Phase, Tensor, Work
from napkinmath.record import Record
from napkinmath.simulate import run_order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import ArrayLike, NDArray

    from napkinmath.hardware import Hardware
    from napkinmath.model_spec import ModelSpec
    from napkinmath.schedule import Clock
    from napkinmath.step import Segment, Step
    from napkinmath.train_config import TrainConfig

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

CHUNK = 8192  # configurations evaluated together: one array of them fits the second-level cache
PHASES = tuple(Phase)


class SweepResult(Record):
    """Arrays of one shape: peak bytes as the formulas give them (each tensor rounded to 512 B), winning phase, and speed."""

    requested: Ints
    winner: Ints
    """Index into `PHASES` of the phase that sets the peak."""
    seconds: Floats | None = None
    tokens_per_s: Floats | None = None


def sweep(spec: ModelSpec, config: TrainConfig, *, micro_batch_size: ArrayLike | None = None, sequence_length: ArrayLike | None = None, rank: ArrayLike | None = None, hardware: Hardware | None = None) -> SweepResult:  # fmt: skip
    """Peak memory (and speed, given hardware with known rates) of every combination of the broadcast arrays.

    The figures are those of `estimate(...)` for each combination: requested bytes equal `estimate(...).peak.nbytes`.
    """
    ranks = (config.adapter.rank if config.adapter is not None else 1) if rank is None else rank
    b, s, r = np.broadcast_arrays(
        _positive("micro_batch_size", config.micro_batch_size if micro_batch_size is None else micro_batch_size),
        _positive("sequence_length", config.sequence_length if sequence_length is None else sequence_length),
        _positive("rank", ranks),
    )
    b_flat, s_flat, r_flat = b.ravel(), s.ravel(), r.ravel()
    requested: Ints = np.empty(b.size, np.int64)
    winner: Ints = np.empty(b.size, np.int64)
    seconds: Floats = np.empty(b.size, np.float64)
    timed = False
    left = np.arange(b.size)
    while left.size:
        step, clock, alike = _structure(spec, config, hardware, b_flat[left], s_flat[left])
        timed = clock is not None
        here, left = left[alike], left[~alike]
        for i in range(0, here.size, CHUNK):
            cells = here[i : i + CHUNK]
            _evaluate(step, clock, (b_flat[cells], s_flat[cells], r_flat[cells]), cells, requested, winner, seconds)
    found = SweepResult(requested=np.reshape(requested, b.shape), winner=np.reshape(winner, b.shape))
    if not timed:
        return found
    seconds = np.reshape(seconds, b.shape)
    return found.replace(seconds=seconds, tokens_per_s=b * s * config.gradient_accumulation_steps / seconds)


def _structure(spec: ModelSpec, config: TrainConfig, hardware: Hardware | None, b: Ints, s: Ints) -> tuple[Step, Clock | None, Bools]:
    """The step of the first cell with its sizes left open, and which cells share it.

    A record notes the sizes at which the library would have run other operations (`Policy.thresholds`: a batch of 2, an attention
    window); it holds for the cells on the same side of all of them.
    """
    from napkinmath.lowering.choices import resolve
    from napkinmath.step import build_step

    first = config.replace(micro_batch_size=int(b[0]), sequence_length=int(s[0]))
    if config.adapter is not None:
        first = first.replace(adapter=config.adapter.replace(rank=symbol("r")))
    policy = resolve(spec, first, hardware)
    step = build_step(spec, policy)
    alike = np.ones(b.shape, np.bool_)
    for name, values in (("b", b), ("s", s)):
        for threshold in policy.thresholds.get(name, ()):
            alike &= (values >= threshold) == (values[0] >= threshold)
    return step, _clock(step, hardware), alike


def _positive(name: str, values: Any) -> Ints:
    from napkinmath.errors import InputError, shown

    array = np.asarray(values)
    if array.dtype.kind not in "iu" or (array < 1).any():
        raise InputError(f"{name} {shown(values)} holds something else than positive whole numbers; use 1 or more")
    return array.astype(np.int64)


def _clock(step: Step, hardware: Hardware | None) -> Clock | None:
    if hardware is None or not hardware.gpu.dense_flops or not hardware.gpu.bandwidth_bytes_per_s:
        return None
    from napkinmath.efficiency import default_efficiency
    from napkinmath.schedule import Clock

    return Clock(default_efficiency(hardware.gpu), step.policy)


class _Profile:
    """One segment over all configurations: highest live bytes within a repetition, and its net change."""

    __slots__ = ("high", "net")

    def __init__(self, high: Ints, net: Ints) -> None:
        self.high, self.net = high, net


def _evaluate(
    step: Step, clock: Clock | None, sizes: tuple[Ints, Ints, Ints], cells: Ints, requested: Ints, winners: Ints, times: Floats
) -> None:
    b, s, r = sizes
    target = step.policy.config.batch.target_length
    top = Bindings({**step.symbols, "b": b, "s": s, "st": target or s, "r": r})
    scopes: dict[tuple[tuple[str, int], ...], Bindings] = {(): top}
    order, starts = run_order(step)
    profiles: dict[int, _Profile] = {}
    base, peak, winner = np.zeros_like(b), np.full_like(b, -1), np.zeros_like(b)
    for segment in order:
        bind = scopes.setdefault(segment.symbols, top.extended(dict(segment.symbols)))
        profile = profiles.get(id(segment)) or profiles.setdefault(id(segment), _profile(segment, bind, b))
        highest = base + profile.high + (segment.repeat - 1) * np.maximum(profile.net, 0)
        higher = highest > peak
        peak = np.where(higher, highest, peak)
        winner[higher] = PHASES.index(segment.phase)
        base = base + segment.repeat * profile.net
    requested[cells], winners[cells] = peak, winner
    if clock is not None:
        times[cells] = _seconds(order[starts[-1] :], scopes, clock)


def _profile(segment: Segment, bind: Bindings, like: Ints) -> _Profile:
    live, high = np.zeros_like(like), np.zeros_like(like)
    rising = False
    for action, payload in segment.events:
        if not isinstance(payload, Tensor):
            continue
        if action == ALLOC:
            live += bind(payload.requested)
            rising = True
        else:
            if rising:
                np.maximum(high, live, out=high)
                rising = False
            live -= bind(payload.requested)
    if rising:
        np.maximum(high, live, out=high)
    return _Profile(high, live)


def _seconds(segments: list[Segment], scopes: dict[tuple[tuple[str, int], ...], Bindings], clock: Clock) -> Floats:
    """Seconds of the steady step: the longer of the device's and the host's sum."""
    from napkinmath.efficiency import dispatch_s

    known: dict[int, tuple[Floats | float, Floats | float, int]] = {}
    device: dict[Phase, Floats | float] = {}
    copies: dict[Phase, Floats | float] = {}  # on a stream beside the computation
    host = 0.0
    for segment in segments:
        if segment.phase is Phase.SAVE:
            continue
        if id(segment) not in known:
            known[id(segment)] = _segment_seconds(segment, scopes[segment.symbols], clock)
        seconds, beside, launches = known[id(segment)]
        device[segment.phase] = device.get(segment.phase, 0.0) + segment.repeat * seconds
        copies[segment.phase] = copies.get(segment.phase, 0.0) + segment.repeat * beside
        host += dispatch_s(segment.repeat * launches, segment.phase is Phase.BACKWARD, clock.speed)
    return np.maximum(sum(np.maximum(device[phase], copies[phase]) for phase in device), host)


def _segment_seconds(segment: Segment, bind: Bindings, clock: Clock) -> tuple[Floats | float, Floats | float, int]:
    """(seconds of computation, seconds of copies beside it, launches) of one repetition."""
    total: Floats | float = 0.0
    beside: Floats | float = 0.0
    launches = 0
    for _, payload in segment.events:
        if isinstance(payload, Work):
            for cost in payload.costs:
                seconds, count = clock.seconds(cost, bind)
                if isinstance(cost, HostCopy) and cost.overlaps:
                    beside = beside + seconds
                else:
                    total = total + seconds
                launches += count
    return total, beside, launches
