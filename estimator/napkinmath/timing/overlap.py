"""Streams: kernels of a step on a compute stream and a communication stream, with what waits for
what.

Parameters gathered in a forward are asked for while the unit before runs and waited for before
their own; those gathered in a backward are asked for where they stand and waited for in the next
unit. Reductions start when their gradients are there; the reduction after waits for them, and so
does the optimizer. Collectives over one link share a stream, as one communicator's do; those within
a node and those between nodes are of different communicators and run at once. While one runs the
kernels beside it have fewer SMs. Communication time is what a step would be shorter by without any:
waiting, and what kernels lose beside collectives. Sources: torch 2.13
distributed/fsdp/_fully_shard/_fsdp_param_group.py, nn/parallel/distributed.py;
csrc/distributed/c10d/ProcessGroupNCCL.cpp (a stream for each communicator).
"""

from __future__ import annotations

from napkinmath.ir.ledger import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napkinmath.ir.order import Order
    from napkinmath.ir.timeline import TimelineSegment

    # Of a segment: seconds, seconds by what they are spent on, and the state after it, relative to
    # its end.
    Spent = dict[Phase, dict[str, float]]
    Seen = dict[tuple[float, ...], tuple[int, Spent]]
    State = tuple[float, float, float, float, float]
    Played = tuple[float, dict[str, float], State]

COMMUNICATION = "communication"
# a collective that runs beside the others; what they wait for it is communication time
COMMUNICATION_STREAM = "communication stream"
COPY_STREAM = (  # the same for copies between host and device, whose waiting is host link time
    "copy stream"
)
# Kernels on GPUs of another group, which this one's do not wait for.
ASIDE = "aside"
REDUCTIONS = ("reduce-scatter", "all-reduce", "reduce")
# SMs that a collective's channels take from kernels beside it: NCCL opens up to 24 channels on A100
# (108 SMs) and H100 (132), one block each.
_OCCUPIED_SHARE = 0.15
_SETTLED_S = 1e-9  # states closer than this are the same
_UNSETTLED = 64
_IDLE = (0.0, 0.0, 0.0, 0.0, 0.0)  # all streams start now


def parts_of(phases: Iterable[Phase]) -> list[list[Phase]]:
    """Rollouts, what is before the update, and the update: the host waits for the device after
    each, and runs ahead within.

    The trainer reads what was generated before it goes on (trl 1.16 grpo_trainer.py
    _generate_and_score_completions); the loop reads the loss (transformers 4 trainer.py
    logging_nan_inf_filter, GradScaler.step's found_inf).
    """
    parts: dict[Phase, list[Phase]] = {}
    for phase in dict.fromkeys(phases):
        alone = phase in (Phase.ROLLOUT, Phase.STEP)
        parts.setdefault(phase if alone else Phase.BACKWARD, []).append(phase)
    return list(parts.values())


def seconds_by_phase(segments: Order[TimelineSegment]) -> dict[Phase, dict[str, float]]:
    """Device seconds of each phase by what they are spent on; copies beside the kernels are listed,
    not waited for."""
    streams = _Streams()
    for times, row in segments.rows:
        streams.play_row(row, times)
    return streams.spent


class _Streams:
    """Where the streams stand, in seconds relative to the compute stream, and what has been
    spent."""

    def __init__(self) -> None:
        self.spent: dict[Phase, dict[str, float]] = {}
        self.state = _IDLE
        self.phase: Phase | None = None
        self.known: dict[tuple[int, tuple[float, ...]], Played] = {}
        self.simple: dict[int, bool] = {}

    def play_row(self, row: Sequence[TimelineSegment], times: int) -> None:
        """Runs a row so many times; once a state comes again, so does what was spent since.

        States that have not come again after _UNSETTLED times are taken as settled.
        """
        seen: Seen = {}
        last: tuple[int, Spent] = 0, {}
        done = 0
        while done < times:
            for segment in row:
                self.play(segment)
            done += 1
            if times == 1:
                return
            state = _rounded(self.state)
            now = {phase: dict(parts) for phase, parts in self.spent.items()}
            if state in seen or done == _UNSETTLED:
                since, spent = seen.get(state) or last
                whole = (times - done) // (done - since)
                self._spend_again(spent, whole)
                done += whole * (done - since)
                seen = {}
            last = seen[state] = done, now

    def _spend_again(self, before: dict[Phase, dict[str, float]], times: int) -> None:
        """Adds what has been spent since `before` so many times more."""
        for phase, parts in self.spent.items():
            had = before.get(phase, {})
            for bound, seconds in list(parts.items()):
                parts[bound] = seconds + times * (seconds - had.get(bound, 0.0))

    def play(self, segment: TimelineSegment) -> None:
        """Runs all repetitions; once two leave the same state the others do too."""
        self._enter(segment.phase)
        spent = self.spent.setdefault(segment.phase, {})
        left = segment.repeat
        while left:
            before = self.state
            _, parts, self.state = self._played(segment)
            alike = left if _alike(before, self.state) else 1
            for bound, seconds in parts.items():
                spent[bound] = spent.get(bound, 0.0) + seconds * alike
            left -= alike

    def _enter(self, phase: Phase) -> None:
        """Clipping and the optimizer wait for every reduction; the time belongs to the backward."""
        if (
            self.phase is not None
            and phase is not self.phase
            and phase not in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
        ):
            waited = max(self.state[0], self.state[1], self.state[4], 0.0)
            if waited:
                spent = self.spent[self.phase]
                spent[COMMUNICATION] = spent.get(COMMUNICATION, 0.0) + waited
            self.state = _IDLE
        self.phase = phase

    def _played(self, segment: TimelineSegment) -> Played:
        state = (
            self.state
            if self._communicates(segment) or max(self.state[0], self.state[1], self.state[4]) > 0
            else _IDLE
        )
        key = (id(segment), _rounded(state))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = _run(segment, state)
        return found

    def _communicates(self, segment: TimelineSegment) -> bool:
        found = self.simple.get(id(segment))
        if found is None:
            found = self.simple[id(segment)] = any(
                k.bound in (COMMUNICATION_STREAM, COMMUNICATION) for k in segment.kernels
            )
        return found


def _rounded(state: tuple[float, ...]) -> tuple[float, ...]:
    """A state as it is found again: states within _SETTLED_S have the same."""
    return tuple(round(value / _SETTLED_S) for value in state)


def _alike(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two states are the same."""
    return all(abs(a - b) < _SETTLED_S for a, b in zip(one, other, strict=True))


def _run(segment: TimelineSegment, state: State) -> Played:
    """One repetition. The state has five times relative to now. The communication stream within the
    node is free at the first, that between nodes at the last. Between them: when this segment's
    parameters are gathered, when the last one's kernels began, the end of the last reduction."""
    near, gathered, asked, reduced, far = state
    free = {False: near, True: far}
    now = 0.0
    parts: dict[str, float] = {}
    backward = segment.phase is Phase.BACKWARD
    needed, started = gathered, -1.0
    for kernel in segment.kernels:
        if kernel.bound in (COPY_STREAM, ASIDE):
            parts[kernel.bound] = parts.get(kernel.bound, 0.0) + kernel.seconds
            continue
        if kernel.bound == COMMUNICATION and not kernel.seconds:
            continue  # other kernels hide all of it
        link = kernel.between_nodes
        if kernel.bound == COMMUNICATION_STREAM:
            if kernel.name in REDUCTIONS:
                now = _wait(now, reduced, parts)
                free[link] = reduced = max(free[link], now) + kernel.seconds
            elif backward:
                free[link] = gathered = max(free[link], now) + kernel.seconds
            else:
                start = max(free[link], min(asked, now))
                free[link] = needed = start + kernel.seconds
                hidden = min(needed, now) - start
                now = _wait(
                    now, now + hidden * _OCCUPIED_SHARE, parts
                )  # the unit before was slower for it
            continue
        now = _wait(now, needed, parts)
        started = now if started < 0 else started
        if kernel.bound == COMMUNICATION:
            now = _wait(now, free[link], parts)
            end = free[link] = now + kernel.seconds
        else:
            end = _beside(now, kernel.seconds, max(free.values()))
        parts[kernel.bound] = parts.get(kernel.bound, 0.0) + kernel.seconds
        now = _wait(now + kernel.seconds, end, parts)
    gathered = gathered if backward else needed
    asked = (started if started >= 0 else min(asked, now)) - now
    # What is over long ago makes no difference any more; written so, states that act alike are
    # alike.
    near, far = (max(until - now, asked) for until in (free[False], free[True]))
    return now, parts, (near, max(gathered - now, 0.0), asked, max(reduced - now, 0.0), far)


def _wait(now: float, until: float, parts: dict[str, float]) -> float:
    if until > now:
        parts[COMMUNICATION] = parts.get(COMMUNICATION, 0.0) + until - now
        return until
    return now


def _beside(now: float, seconds: float, busy_until: float) -> float:
    """When a kernel ends that shares the GPU with a collective until then."""
    if busy_until <= now:
        return now + seconds
    done = (busy_until - now) * (1 - _OCCUPIED_SHARE)
    return now + seconds / (1 - _OCCUPIED_SHARE) if done >= seconds else busy_until + seconds - done
