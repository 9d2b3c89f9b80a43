"""Megatron-LM's engines: gradients are added to fp32 buffers that live through the run, and those
are what ranks sum.

DistributedDataParallel all-reduces the buffers; the distributed optimizer (`--zero 1` of that
stack) reduce-scatters them, updates a rank's part of the fp32 masters and gathers the new 16-bit
parameters: 6 + 12/d bytes a parameter. Sources: Megatron-LM
core/distributed/param_and_grad_buffer.py _ParamAndGradBucketGroup.start_grad_sync,
core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Work
from napkinmath.lowering.data_parallel.flat import master_of, trained_weights
from napkinmath.lowering.data_parallel.holders import collectives, is_spread, with_every_run
from napkinmath.lowering.data_parallel.stored import shadow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.ledger import Event, Value
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Run, Segment, Step
    from napkinmath.lowering.policy import Policy

MicroSteps = list[tuple[int, "list[Segment]"]]


def keeps_main_gradients(policy: Policy) -> bool:
    """Whether gradients end in fp32 buffers: of the stack that has them, under its own engines."""
    kind = policy.config.parallel.data_parallel
    return (
        policy.stack.main_gradients
        and not policy.config.offload.optimizer
        and (not policy.shards or kind is DataParallel.ZERO1)
    )


def summed_in_buffers(
    micro_steps: MicroSteps, runs: list[Run], parallel: ParallelConfig, kind: str
) -> MicroSteps:
    """Micro-steps of which the last one's backward sums each run's buffer while the one before it
    runs."""
    by_name = {run.name: run for run in runs}
    axis = "shard" if kind == "reduce-scatter" else "data"
    *earlier, (times, last) = micro_steps
    if times > 1:
        earlier.append((times - 1, last))
    found: list[Segment] = []
    for segment in with_every_run(last, runs):
        run = by_name.get(segment.name)
        costs = (
            collectives(kind, _fp32_bytes(run, parallel), parallel, axis)
            if run is not None and segment.phase is Phase.BACKWARD
            else []
        )
        found.append(
            segment.copy(
                events=[*segment.events, (RUN, Work(None, costs, True))], repeat=segment.repeat
            )
            if costs
            else segment
        )
    return [*earlier, (1, found)]


def _fp32_bytes(run: Run, parallel: ParallelConfig) -> tuple[Size, Size]:
    dense: Size = 0
    spread: Size = 0
    for weight in trained_weights(run):
        if is_spread(weight.path, parallel):
            spread = spread + 4 * weight.elements
        else:
            dense = dense + 4 * weight.elements
    return dense, spread


def distributed_optimizer_step(
    spec: ModelSpec,
    policy: Policy,
    runs: list[Run],
    shared: dict[str, Value],
    turns: MicroSteps | None = None,
) -> Step:
    """One rank's step; `turns` are those of a pipeline's rank."""
    from napkinmath.ir.step import Step, lower_micro_step
    from napkinmath.lowering.data_parallel.saving import save_partitions
    from napkinmath.lowering.lifecycle import load_segments
    from napkinmath.lowering.optimizer import lower_update, segments

    parallel, steps = policy.config.parallel, policy.config.gradient_accumulation_steps
    masters = [master_of(run, parallel) for run in runs]
    owned = [
        shadow(run, [master] if master is not None else [], [])
        for run, master in zip(runs, masters, strict=True)
    ]
    if turns is None:
        turns = [(1, lower_micro_step(runs, shared, policy, accumulate=False))]
        if steps > 1:
            turns.append((steps - 1, lower_micro_step(runs, shared, policy, accumulate=True)))
    micro_steps = summed_in_buffers(turns, runs, parallel, "reduce-scatter")

    def buffers(run: Run) -> list[Event]:
        return [
            (
                ALLOC,
                Tensor(
                    f"main gradient of {w.tensor.name}",
                    w.axes,
                    FP32,
                    Role.GRADIENTS,
                    w.path,
                    policy.stack.source,
                ),
            )
            for w in trained_weights(run)
        ]

    load = load_segments(runs, policy) + segments("gradient buffers", Phase.LOAD, runs, buffers)
    load += segments(
        "fp32 partition",
        Phase.LOAD,
        owned,
        lambda run: [(ALLOC, w.tensor) for w in run.block.weights],
    )
    update = lower_update(owned, policy, dict(spec.symbols))
    update.work = update.work + segments(
        "new parameters", Phase.STEP, runs, lambda run: _gathered(run, parallel)
    )
    return Step(
        spec, policy, runs, load + update.load, micro_steps, update, save_partitions(owned, policy)
    )


def _gathered(run: Run, parallel: ParallelConfig) -> list[Event]:
    """Every rank's updated part, cast to 16 bits, reaches all others."""
    dense, spread = _fp32_bytes(run, parallel)
    if not trained_weights(run):
        return []
    costs = collectives("all-gather", (dense // 2, spread // 2), parallel, "shard", overlaps=False)
    return [(RUN, Work(None, (Move((dense + spread) // parallel.shard_degree), *costs), False))]
