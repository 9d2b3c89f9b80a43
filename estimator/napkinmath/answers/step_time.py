"""The time of an estimate's steady step: its kernels one after the other, or the stages of a
pipeline, or micro-steps of several lengths, and the pages that it waits for."""

from __future__ import annotations

from napkinmath.base.expr import Bindings
from napkinmath.timing.flops import hardware_flops, model_flops
from napkinmath.timing.schedule import Clock, StepTime, phase_times

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.hardware import Hardware
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.lowering.policy import Policy
    from napkinmath.timing.efficiency import Efficiency
    from napkinmath.timing.schedule import PhaseTime


def clock_on(
    cluster: Cluster | None, parallel: ParallelConfig, speed: Efficiency, policy: Policy
) -> Clock:
    """The clock of one rank, with the cluster's network where there is one."""
    if cluster is None or cluster.num_gpus == 1:
        return Clock(speed, policy)
    from napkinmath.timing.collectives import MeshNetwork

    ranks = min(cluster.gpus_per_node, parallel.world_size)
    return Clock(speed, policy, MeshNetwork(cluster, parallel), ranks)


def step_time(e: Estimate, speed: Efficiency, hardware: Hardware) -> StepTime:
    """The steady step's time as its operations add up."""
    config, start = e.config, e.timeline.step_starts[-1]
    clock = clock_on(e.cluster, config.parallel, speed, e.ranks.policy)
    peak, bubble = _peak_flops_per_s(e, hardware), 0.0
    if e.lengths_change and config.parallel.pipeline_parallel_size == 1:
        from napkinmath.timing.varied_time import varied_time

        phases, tokens, needed, done = varied_time(e.step, e.timeline, clock, start)
    else:
        phases, bubble = _phases(e, clock, start)
        tokens, needed, done = _tokens(e), model_flops(e.step), hardware_flops(e.timeline, start)
    return StepTime(
        phases=_paced(phases, config.parallel.world_size),
        micro_steps=config.gradient_accumulation_steps,
        bubble_s=bubble,
        paging_s=_paging_s(e, speed, hardware),
        tokens=tokens,
        model_flops=needed,
        hardware_flops=done,
        peak_flops_per_s=peak,
    )


def _phases(e: Estimate, clock: Clock, start: int) -> tuple[tuple[PhaseTime, ...], float]:
    """(phases, seconds of waiting for other pipeline stages)."""
    if e.config.parallel.pipeline_parallel_size == 1:
        return phase_times(e.timeline, clock.speed, first_segment=start), 0.0
    from napkinmath.timing.pipeline_time import pipeline_time

    return pipeline_time(e.ranks, clock)


def _paced(phases: tuple[PhaseTime, ...], ranks: int) -> tuple[PhaseTime, ...]:
    """At the pace of the slowest of several ranks."""
    if ranks == 1:
        return phases
    from napkinmath.timing.stragglers import at_the_slowest_pace

    return at_the_slowest_pace(phases, ranks)


def _tokens(e: Estimate) -> int:
    """Tokens of all micro-steps; of padded lengths those that are not padding."""
    config, bind = e.config, Bindings(e.step.symbols)
    lengths = () if config.batch.packing else e.step.policy.config.batch.lengths
    filled = sum(lengths) / (len(lengths) * max(lengths)) if lengths else 1.0
    return (
        round(bind(config.micro_batch_size * config.sequence_length) * filled)
        * config.gradient_accumulation_steps
        * config.workload.texts
    )


def _paging_s(e: Estimate, speed: Efficiency, hardware: Hardware) -> float:
    if not e.managed_bytes:
        return 0.0
    from napkinmath.timing.paging import paging_s

    return paging_s(e.managed_bytes, e.peak.nbytes, hardware, speed)


def _peak_flops_per_s(e: Estimate, hardware: Hardware) -> float:
    """The datasheet's dense peak of the type that products are computed in."""
    policy = e.step.policy
    rule = policy.rule
    stored = policy.compute_dtype if e.config.quantization else rule.parameters
    return hardware.gpu.dense_flops_per_s(rule.gemm or rule.autocast or stored)
