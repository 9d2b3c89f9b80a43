"""Seconds of an engine's rollouts in a step: prompts read in chunks, then a token of each running
sequence after the other, as many at once as the cache holds."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.config.cluster import Cluster
from napkinmath.timing.collectives import network_of
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.serving import EngineClock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.base.expr import Bindings
    from napkinmath.ir.costs import EngineRun
    from napkinmath.lowering.rollout.plan import EnginePlan
    from napkinmath.timing.efficiency import Efficiency


def engine_run_s(cost: EngineRun, bind: Bindings, speed: Efficiency) -> Any:
    """Seconds of a step's rollouts; sizes may be arrays of a sweep."""
    plan: Any = cost.plan
    clock = _clock(plan, speed)
    sizes = tuple(bind(size) for size in (cost.rows, cost.prompt, cost.tokens))
    if all(isinstance(size, int) for size in sizes):
        return _seconds(plan, clock, *sizes)
    import numpy  # only a sweep binds arrays, and then numpy is loaded already

    each = numpy.frompyfunc(lambda *some: _seconds(plan, clock, *map(int, some)), 3, 1)
    return numpy.asarray(each(*sizes), dtype=float)


def _clock(plan: EnginePlan, speed: Efficiency) -> EngineClock:
    """Of the engine's own GPUs where it has some, else of the policy's."""
    own = default_efficiency(plan.hardware.gpu) if plan.apart else speed
    cluster = Cluster(hardware=plan.hardware, gpus_per_node=plan.model.ranks)
    return EngineClock(plan.model, plan.engine, own, cluster)


def _seconds(plan: EnginePlan, clock: EngineClock, rows: int, prompt: int, tokens: int) -> float:
    """All sequences of an engine are under way until they end; where the cache holds fewer, the
    others take their places."""
    sequences = max(1, round(rows * plan.sequences_for_each))
    at_once = min(sequences, plan.fitting(prompt + tokens), plan.sequences)
    if at_once < 1:
        raise InputError(
            f"--rollout-memory {plan.share:g} holds the cache of no sequence of"
            f" {prompt + tokens:,} tokens; raise it"
        )
    together = max(1, min(at_once, plan.prefill_tokens // prompt))
    if prompt <= plan.prefill_tokens:
        read = sequences / together * clock.prefill(prompt, prompts=together).seconds
    else:
        chunks = prompt / plan.prefill_tokens
        read = sequences * chunks * clock.prefill(plan.prefill_tokens, prompt // 2).seconds
    wrote = sequences / at_once * tokens * clock.decode(at_once, prompt + tokens // 2).seconds
    return read + wrote + _sent_s(plan)


def _sent_s(plan: EnginePlan) -> float:
    """The policy's weights on their way to GPUs apart: a broadcast over one GPU's share of the
    network."""
    if not plan.apart:
        return 0.0
    nodes = Cluster(hardware=plan.hardware, num_nodes=2)
    return plan.weight_bytes * plan.model.ranks / network_of(nodes).bytes_per_s
