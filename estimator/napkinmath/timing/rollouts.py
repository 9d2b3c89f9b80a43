"""Seconds of an engine's rollouts in a step: prompts read in chunks, then a token of each running
sequence after the other, as many at once as the cache holds, until the longest has ended."""

from __future__ import annotations

from heapq import heappop, heappush

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.config.cluster import Cluster
from napkinmath.timing.collectives import network_of
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.serving import EngineClock, engine_cluster

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.base.expr import Bindings
    from napkinmath.ir.costs import EngineRun
    from napkinmath.lowering.rollout.plan import EnginePlan
    from napkinmath.timing.efficiency import Efficiency

_STEPS_AN_OCTAVE = 8  # sizes between two powers of two that are priced


class RolloutTime(Record):
    """The rollouts of one step, of the engine that ends last."""

    sequences: int
    at_once: int
    prompts_s: float
    tokens_s: float
    sent_s: float
    """The policy's weights on their way to GPUs of the engines' own."""
    tail_s: float = 0.0
    """At the end, while fewer than half of the sequences at once still run."""
    waits_s: float = 0.0
    """An engine with the usual lengths waits so long for the one with the longest."""

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return self.prompts_s + self.tokens_s + self.sent_s


def engine_run_s(cost: EngineRun, bind: Bindings, speed: Efficiency) -> Any:
    """Seconds of a step's rollouts; sizes may be arrays of a sweep."""
    plan: Any = cost.plan
    clock = clock_of(plan, speed)
    sizes = tuple(bind(size) for size in (cost.rows, cost.prompt, cost.tokens))
    if all(isinstance(size, int) for size in sizes):
        return rollout_time(plan, clock, *sizes).seconds
    import numpy  # only a sweep binds arrays, and then numpy is loaded already

    each = numpy.frompyfunc(lambda *some: rollout_time(plan, clock, *map(int, some)).seconds, 3, 1)
    return numpy.asarray(each(*sizes), dtype=float)


def engine_time(cost: EngineRun, bind: Bindings, speed: Efficiency) -> RolloutTime:
    """The parts of a step's rollouts, where sizes are numbers."""
    plan: Any = cost.plan
    sizes = (int(bind(size)) for size in (cost.rows, cost.prompt, cost.tokens))
    return rollout_time(plan, clock_of(plan, speed), *sizes)


def clock_of(plan: EnginePlan, speed: Efficiency) -> EngineClock:
    """Of the engine's own GPUs where it has some, else of the policy's."""
    own = default_efficiency(plan.hardware.gpu) if plan.apart else speed
    cluster = engine_cluster(plan.hardware, plan.model.ranks)
    host_s = (0.0, 0.0) if plan.apart else plan.trainer.host_s
    return EngineClock(plan.model, plan.engine, own, cluster, draft=plan.draft, host_s=host_s)


def rollout_time(
    plan: EnginePlan, clock: EngineClock, rows: int, prompt: int, tokens: int
) -> RolloutTime:
    """The rollouts of one engine, `rows` for each rank of the policy. A prompt is read once for its
    group. Raises InputError where the cache holds no sequence."""
    sequences = max(1, round(rows * plan.sequences_for_each))
    slow, usual = _completions(plan, sequences, prompt, tokens)
    mean = sum(slow) // len(slow)
    flows = plan.trainer.flows(plan.staleness)
    under_way = sequences * plan.staleness if flows else sequences
    at_once = min(under_way, plan.fitting(prompt + mean, prompt), plan.sequences)
    if at_once < 1:
        raise InputError(
            f"--rollout-memory {plan.share:g} holds the cache of no sequence of"
            f" {prompt + tokens:,} tokens; raise it"
        )
    if flows:
        return _flowing(plan, clock, (sequences, at_once), prompt, sum(usual) / len(usual))
    written = _Written(clock, prompt, at_once)
    took, tail = written.seconds(slow)
    return RolloutTime(
        sequences=sequences,
        at_once=at_once,
        prompts_s=_read_s(plan, clock, -(-sequences // plan.group), prompt, at_once),
        tokens_s=took,
        sent_s=_sent_s(plan),
        tail_s=tail,
        waits_s=took - written.seconds(usual)[0] if usual != slow else 0.0,
    )


def _flowing(
    plan: EnginePlan, clock: EngineClock, counts: tuple[int, int], prompt: int, mean: float
) -> RolloutTime:
    """An engine that does not wait for the end of a step: its places are always taken, by sequences
    of as many steps as they may be behind. What a step needs of it is its share of the time."""
    sequences, at_once = counts
    token = clock.token_s(at_once, prompt + round(mean) // 2)
    return RolloutTime(
        sequences=sequences,
        at_once=at_once,
        prompts_s=_read_s(plan, clock, -(-sequences // plan.group), prompt, at_once),
        tokens_s=sequences / at_once * mean * token,
        sent_s=_sent_s(plan),
    )


def _completions(
    plan: EnginePlan, count: int, prompt: int, tokens: int
) -> tuple[list[int], list[int]]:
    """Tokens of `count` completions: of the engine with the longest of all engines', and of a usual
    one. The sample's quantiles, in an order that mixes short and long."""
    if not plan.lengths:
        all_alike = [tokens] * count
        return all_alike, all_alike
    sample = [min(max(1, length - prompt), tokens) for length in plan.lengths]

    def quantile(share: float) -> int:
        return sample[min(int(share * len(sample)), len(sample) - 1)]

    usual = [quantile((i * _stride(count) % count + 0.5) / count) for i in range(count)]
    slow = list(usual)
    slow[slow.index(max(slow))] = quantile(1 - 0.5 / (count * plan.engines))
    return slow, usual


def _stride(count: int) -> int:
    """A step that visits all of `count` places far from each other: near the golden section."""
    from math import gcd

    step = max(1, round(count * 0.618))
    while gcd(step, count) > 1:
        step += 1
    return step


class _Written:
    """Decoding of sequences that take each other's places, `at_once` at a time."""

    def __init__(self, clock: EngineClock, prompt: int, at_once: int) -> None:
        self.clock, self.prompt, self.at_once = clock, prompt, at_once
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, completions: list[int]) -> tuple[float, float]:
        """(all, at the end with fewer than half of the places taken)."""
        ends: list[tuple[int, int]] = []
        now = started = spent = tail = 0
        waiting = list(reversed(completions))
        while waiting or ends:
            while waiting and len(ends) < self.at_once:
                heappush(ends, (now + waiting.pop(), now))
                started += now
            running, until = len(ends), ends[0][0]
            written = (now + until) // 2 - started // running
            took = (until - now) * self._token_s(running, self.prompt + written)
            spent += took
            tail += took if not waiting and 2 * running < self.at_once else 0.0
            now = until
            while ends and ends[0][0] == now:
                started -= heappop(ends)[1]
        return float(spent), float(tail)

    def _token_s(self, running: int, context: int) -> float:
        key = _near(running), _near(context)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.clock.token_s(*key)
        return found


def _near(size: int) -> int:
    """The closest size that is priced: all small ones, _STEPS_AN_OCTAVE between powers of two."""
    step = max(1, (1 << max(size, 1).bit_length() - 1) // _STEPS_AN_OCTAVE)
    return max(1, round(size / step) * step)


def _read_s(plan: EnginePlan, clock: EngineClock, prompts: int, prompt: int, at_once: int) -> float:
    """The prompts, as many together as a forward takes."""
    if prompt <= plan.prefill_tokens:
        together = max(1, min(at_once, prompts, plan.prefill_tokens // prompt))
        return prompts / together * clock.prefill(prompt, prompts=together).seconds
    chunks = prompt / plan.prefill_tokens
    return prompts * chunks * clock.prefill(plan.prefill_tokens, prompt // 2).seconds


def _sent_s(plan: EnginePlan) -> float:
    """The policy's weights on their way to GPUs apart: a broadcast over one GPU's share of the
    network."""
    if not plan.apart:
        return 0.0
    nodes = Cluster(hardware=plan.hardware, num_nodes=2)
    return plan.weight_bytes * plan.model.ranks / network_of(nodes).bytes_per_s
