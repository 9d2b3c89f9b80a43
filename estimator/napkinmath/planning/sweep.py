"""sweep, Sweeper: the same rules with numpy arrays bound to batch, sequence and rank: hundreds of
thousands of configurations a second.

A step's structure (which tensors exist, in which order) hardly depends on these three. It is therefore
recorded with the symbols left open, once between any two sizes at which the library runs other
operations. Every event is then one addition of arrays. Anything else that varies is a new
structure: one call a combination.
"""

from __future__ import annotations

import numpy as np

from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Bindings, symbol
from napkinmath.base.record import Record
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import EngineRun, HostCopy
from napkinmath.ir.ledger import ALLOC, Phase, Tensor
from napkinmath.ir.step import side
from napkinmath.lowering.build import build_step
from napkinmath.lowering.choices import resolve
from napkinmath.lowering.optimizer import chosen_optimizer
from napkinmath.memory.simulate import run_order
from napkinmath.models.read import read_teacher
from napkinmath.planning.alike_segments import Alike, moves, works
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.grouped import host_waits
from napkinmath.timing.issuing import issue_s, part_s, waited_s
from napkinmath.timing.overlap import parts_of
from napkinmath.timing.paging import paging_s
from napkinmath.timing.schedule import Clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import ArrayLike, NDArray

    from napkinmath.base.expr import Size
    from napkinmath.config.hardware import Hardware
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.order import Order
    from napkinmath.ir.step import Segment, Step
    from napkinmath.timing.efficiency import Efficiency
    from napkinmath.timing.schedule import Clock

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    _Spent = tuple[Floats | float, Floats | float, Floats | float, Floats | float, Floats | float]

CHUNK = 8192  # configurations evaluated together: one array of them fits the second-level cache
PHASES = tuple(Phase)


class SweepResult(Record):
    """Arrays of one shape: peak bytes as the formulas give them (each tensor rounded to 512 B),
    winning phase, and speed."""

    requested: Ints
    winner: Ints
    """Index into `PHASES` of the phase that sets the peak."""
    seconds: Floats | None = None
    tokens_per_s: Floats | None = None


def sweep(
    spec: ModelSpec,
    config: TrainConfig,
    *,
    micro_batch_size: ArrayLike | None = None,
    sequence_length: ArrayLike | None = None,
    rank: ArrayLike | None = None,
    hardware: Hardware | None = None,
) -> SweepResult:
    """Peak memory (and speed, given hardware with known rates) of every combination of the
    broadcast arrays.

    The figures are those of `estimate(...)` for each combination: requested bytes equal
    `estimate(...).peak.nbytes`.
    """
    ranks = (config.adapter.rank if config.adapter is not None else 1) if rank is None else rank
    return Sweeper(spec, config, hardware)(
        config.micro_batch_size if micro_batch_size is None else micro_batch_size,
        config.sequence_length if sequence_length is None else sequence_length,
        ranks,
    )


class Sweeper:
    """One configuration whose batch, length and rank stay open; what was recorded for some sizes is
    kept for the next call.

    `efficiency` replaces the hardware's default speeds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: TrainConfig,
        hardware: Hardware | None = None,
        efficiency: Efficiency | None = None,
    ) -> None:
        self.spec, self.config, self.hardware = spec, config, hardware
        self._speed = efficiency or _default_speed(hardware)
        self._structures: list[_Structure] = []

    def __call__(
        self,
        micro_batch_size: ArrayLike | Size,
        sequence_length: ArrayLike | Size,
        rank: ArrayLike | Size = 1,
    ) -> SweepResult:
        """The figures of every combination of the broadcast arrays."""
        b, s, r = np.broadcast_arrays(
            _positive("micro_batch_size", micro_batch_size),
            _positive("sequence_length", sequence_length),
            _positive("rank", rank),
        )
        b_flat, s_flat, r_flat = b.ravel(), s.ravel(), r.ravel()
        requested: Ints = np.empty(b.size, np.int64)
        winner: Ints = np.empty(b.size, np.int64)
        seconds: Floats = np.empty(b.size, np.float64)
        left = np.arange(b.size)
        while left.size:
            structure, alike = self._structure(b_flat[left], s_flat[left], r_flat[left])
            here, left = left[alike], left[~alike]
            for i in range(0, here.size, CHUNK):
                cells = here[i : i + CHUNK]
                _evaluate(
                    structure,
                    (b_flat[cells], s_flat[cells], r_flat[cells]),
                    cells,
                    requested,
                    winner,
                    seconds,
                )
        found = SweepResult(
            requested=np.reshape(requested, b.shape), winner=np.reshape(winner, b.shape)
        )
        if self._speed is None:
            return found
        seconds = np.reshape(seconds, b.shape)
        return found.replace(
            seconds=seconds,
            tokens_per_s=b
            * s
            * self.config.gradient_accumulation_steps
            * self.config.workload.texts
            / seconds,
        )

    def _structure(self, b: Ints, s: Ints, r: Ints) -> tuple[_Structure, Bools]:
        """The step of the first cell with its sizes left open, and which cells share it."""
        for known in self._structures:
            if known.covers(b[:1], s[:1], r[:1])[0]:
                return known, known.covers(b, s, r)
        made = _recorded(
            self.spec, self.config, self.hardware, self._speed, (int(b[0]), int(s[0]), int(r[0]))
        )
        self._structures.append(made)
        return made, made.covers(b, s, r)


class _Structure:
    """A step recorded at some sizes, with the sizes at which the library would have run other
    operations.

    `Step.thresholds` notes those (a batch of 2, an attention window): the record holds for the
    cells on the same side of all of them. Where a parameter's size decides (its states are paged,
    an engine cuts it or fills buckets with it), it holds for one rank.
    """

    __slots__ = ("clock", "hardware", "own", "sizes", "step", "turns_on_rank")

    def __init__(
        self,
        step: Step,
        clock: Clock | None,
        hardware: Hardware | None,
        sizes: tuple[int, int, int],
        *,
        turns_on_rank: bool,
    ) -> None:
        self.step, self.clock, self.hardware, self.sizes, self.turns_on_rank = (
            step,
            clock,
            hardware,
            sizes,
            turns_on_rank,
        )
        self.own = self._side(*sizes[:2])

    def covers(self, b: Ints, s: Ints, r: Ints) -> Bools:
        """Which cells the record holds for."""
        alike = r == self.sizes[2] if self.turns_on_rank else np.ones(b.shape, np.bool_)
        for values, own in zip(self._side(b, s), self.own, strict=True):
            alike &= values == own
        return alike

    def _side(self, b: Ints | int, s: Ints | int) -> tuple[Any, ...]:
        parts = self.step.policy.config.parallel.context_parallel_size
        return side(self.step.thresholds, {"b": b, "s": s // parts})


def _recorded(
    spec: ModelSpec,
    config: TrainConfig,
    hardware: Hardware | None,
    speed: Efficiency | None,
    sizes: tuple[int, int, int],
) -> _Structure:
    first = config.replace(micro_batch_size=sizes[0], sequence_length=sizes[1])
    one_rank, teacher = False, read_teacher(config)
    if config.adapter is not None:
        one_rank = config.parallel.data_parallel is not DataParallel.NONE
        one_rank = one_rank or chosen_optimizer(resolve(spec, first, hardware)).paged
        first = first.replace(
            adapter=config.adapter.replace(rank=sizes[2] if one_rank else symbol("r"))
        )
    policy = resolve(spec, first, hardware, teacher=teacher)
    step = build_step(spec, policy)
    return _Structure(
        step,
        Clock(speed, policy) if speed is not None else None,
        hardware,
        sizes,
        turns_on_rank=one_rank,
    )


def _positive(name: str, values: Any) -> Ints:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or (array < 1).any():
        raise InputError(
            f"{name} {shown(values)} holds something else than positive whole numbers; use 1 or"
            " more"
        )
    return array.astype(np.int64)


def _default_speed(hardware: Hardware | None) -> Efficiency | None:
    if hardware is None or not hardware.gpu.dense_flops or not hardware.gpu.bandwidth_bytes_per_s:
        return None

    return default_efficiency(hardware.gpu)


class _Profile:
    """One segment over all configurations: highest live bytes within a repetition, and its net
    change."""

    __slots__ = ("high", "net")

    def __init__(self, high: Ints, net: Ints) -> None:
        self.high, self.net = high, net


def _evaluate(
    structure: _Structure,
    sizes: tuple[Ints, Ints, Ints],
    cells: Ints,
    requested: Ints,
    winners: Ints,
    times: Floats,
) -> None:
    step, clock = structure.step, structure.clock
    b, s, r = sizes
    s = s // step.policy.config.parallel.context_parallel_size
    target = step.policy.config.batch.target_length
    top = Bindings({**step.symbols, "b": b, "s": s, "st": target or s, "r": r})
    scopes: dict[tuple[tuple[str, Size], ...], Bindings] = {(): top}
    order, starts = run_order(step)
    profiles = Alike(lambda segment: tuple(moves(segment)))
    base: Any = np.zeros_like(b)
    peak, winner = np.full_like(b, -1), np.zeros_like(b)

    def go_through(row: Sequence[Segment]) -> None:
        nonlocal base, peak
        for segment in row:
            bind = scopes.get(segment.symbols)
            if bind is None:
                bind = scopes[segment.symbols] = top.extended(dict(segment.symbols))
            profile = profiles.of(segment, lambda segment, bind=bind: _profile(segment, bind, b))
            highest = base + profile.high + (segment.repeat - 1) * np.maximum(profile.net, 0)
            higher = highest > peak
            peak = np.where(higher, highest, peak)
            winner[higher] = PHASES.index(segment.phase)
            base = base + segment.repeat * profile.net

    for turns, row in order.rows:  # the highest of a row is its first or its last time
        begun = base
        go_through(row)
        if turns > 1:
            base = base + (turns - 2) * (base - begun)
            go_through(row)
    requested[cells], winners[cells] = peak, winner
    if clock is not None:
        times[cells] = _seconds(order[starts[-1] :], scopes, clock)
        if structure.hardware is not None and (managed := _managed(order, scopes)) is not None:
            times[cells] += paging_s(managed, peak, structure.hardware, clock.speed)


def _managed(
    order: Order[Segment], scopes: dict[tuple[tuple[str, Size], ...], Bindings]
) -> Ints | int | None:
    """Bytes of unified memory, which a step never gives back; None where it has none."""
    found: Ints | int | None = None
    for times, segment in order.counted():
        for action, payload in segment.events:
            if action == ALLOC and isinstance(payload, Tensor) and payload.managed:
                nbytes = scopes[segment.symbols](payload.host_bytes)
                found = (0 if found is None else found) + times * segment.repeat * nbytes
    return found


def _profile(segment: Segment, bind: Bindings, like: Ints) -> _Profile:
    live, high = np.zeros_like(like), np.zeros_like(like)
    rising = False
    for action, requested in moves(segment):
        if action == ALLOC:
            live += bind(requested)
            rising = True
        else:
            if rising:
                np.maximum(high, live, out=high)
                rising = False
            live -= bind(requested)
    if rising:
        np.maximum(high, live, out=high)
    return _Profile(high, live)


def _seconds(
    segments: Order[Segment], scopes: dict[tuple[tuple[str, Size], ...], Bindings], clock: Clock
) -> Floats:
    """Seconds of the steady step: the longer of the device's and the host's sum in each part
    (StepTime.seconds)."""
    known = Alike(lambda segment: tuple(id(work) for work in works(segment)))
    aside: Floats | float = 0.0  # of other GPUs, beside the whole step
    device: dict[Phase, Floats | float] = {}
    copies: dict[Phase, Floats | float] = {}  # on a stream beside the computation
    host: dict[Phase, Floats | float] = {}
    for times, segment in segments.counted():
        if segment.phase is Phase.SAVE:
            continue
        bind = scopes[segment.symbols]
        spent: _Spent = known.of(
            segment, lambda segment, bind=bind: _segment_seconds(segment, bind, clock)
        )
        seconds, beside, issued, waited, elsewhere = spent
        number = times * segment.repeat
        aside = aside + number * elsewhere
        device[segment.phase] = device.get(segment.phase, 0.0) + number * seconds
        copies[segment.phase] = copies.get(segment.phase, 0.0) + number * beside
        host[segment.phase] = host.get(segment.phase, 0.0) + number * (issued + waited)
    busy = {phase: np.maximum(device[phase], copies[phase]) for phase in device}
    found: Floats = np.zeros(1)
    for part in parts_of(busy):
        found = found + part_s(
            [busy[phase] for phase in part],
            [host[phase] for phase in part],
            clock.policy.config.gradient_accumulation_steps,
            np.maximum,
        )
    return np.maximum(found, aside)


def _segment_seconds(segment: Segment, bind: Bindings, clock: Clock) -> _Spent:
    """(seconds of computation, seconds of copies beside it, seconds that the host issues, seconds
    that it waits, seconds of other GPUs) of one repetition."""
    queue: list[tuple[Any, Any, bool]] = []
    each = {own: issue_s(segment.phase, own, clock.speed) for own in (False, True)}
    total: Floats | float = 0.0
    beside: Floats | float = 0.0
    aside: Floats | float = 0.0
    issued: Floats | float = 0.0
    for work in works(segment):
        for cost in work.costs:
            seconds, count = clock.seconds(cost, bind)
            if isinstance(cost, HostCopy) and cost.overlaps:
                beside = beside + seconds
            elif isinstance(cost, EngineRun) and cost.is_aside:
                aside = aside + seconds
            else:
                total = total + seconds
            own = count * each[work.backward]
            issued = issued + own
            queue.append((seconds, own, host_waits(cost, clock.speed.gpu)))
    waited = waited_s(queue, np.maximum) if any(waits for *_, waits in queue) else 0.0
    return total, beside, issued, waited, aside
