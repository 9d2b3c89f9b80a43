"""The update in host memory of parameters that are stored there (FSDP's CPUOffloadPolicy,
ZeRO-Infinity)."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Update
from napkinmath.lowering.data_parallel.holders import collectives, part_of, split_bytes
from napkinmath.lowering.optimizer import applied_to, chosen_optimizer, segments, trained

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


def update_on_host(owned: list[Run], policy: Policy) -> Update:
    """States beside the parameters, in their type; nothing of it is on the device, and the
    arithmetic there is not priced."""
    row = chosen_optimizer(policy)

    def states(run: Run) -> list[Tensor]:
        return [
            Tensor(
                f"{s.name} of {w.tensor.name}",
                w.axes,
                s.dtype or FP32,
                Role.OPTIMIZER,
                w.path,
                row.source,
                host=True,
            )
            for w in trained(run)
            for s in applied_to(row, w).states
            if s.elements is None and not s.below
        ]

    return Update(
        row,
        load=[],
        clip=[],
        work=[],
        states=segments(
            "states on the host", Phase.STEP, owned, lambda run: [(ALLOC, t) for t in states(run)]
        ),
        zero=segments(
            "zero_grad", Phase.STEP, owned, lambda run: [(FREE, t) for t in run.block.gradients]
        ),
    )


def partitions_updated_on_host(
    owned: list[Run], runs: list[Run], policy: Policy, *, gradients: bool = True
) -> Update:
    """ZeRO-Offload: states and fp32 gradients of the partitions on the host, new 16-bit parameters
    copied back and gathered.

    Sources: DeepSpeed 0.19 runtime/zero/stage_1_and_2.py initialize_optimizer_states,
    param_buffer_of_bit16_for_cpu_offload_groups.
    """
    row = chosen_optimizer(policy)
    pinned, parallel = policy.config.offload.pinned, policy.config.parallel

    def kept(run: Run) -> list[Tensor]:
        return [
            t
            for w in trained(run)
            for t in (
                Tensor(
                    "fp32 gradients on the host", w.axes, FP32, Role.GRADIENTS, w.path, host=True
                ),
                *(
                    [
                        Tensor(
                            "16-bit copy on the host", w.axes, BF16, Role.WEIGHTS, w.path, host=True
                        )
                    ]
                    if gradients
                    else []
                ),
            )
        ]

    def states(run: Run) -> list[Tensor]:
        return [
            Tensor(
                f"{s.name} of the partition",
                w.axes,
                FP32,
                Role.OPTIMIZER,
                w.path,
                row.source,
                host=True,
            )
            for w in trained(run)
            for s in row.states
            if s.elements is None and not s.below
        ]

    def back(run: Run) -> list[Event]:
        if not trained(run):
            return []
        moved = split_bytes((weight.tensor for weight in trained(run)), parallel)
        dense, spread = part_of(moved, parallel)
        copy = HostCopy(dense + spread, to_host=False, pinned=pinned)
        gathers = (
            collectives("all-gather", moved, parallel, "shard", overlaps=False) if gradients else []
        )
        return [(RUN, Work(None, (copy, *gathers), False))]

    on_device = not policy.config.offload.parameters
    return Update(
        row,
        clip=[],
        zero=[],
        load=segments(
            "host copies", Phase.LOAD, owned, lambda run: [(ALLOC, t) for t in kept(run)]
        ),
        states=segments(
            "states on the host", Phase.STEP, owned, lambda run: [(ALLOC, t) for t in states(run)]
        ),
        work=segments("updated parameters", Phase.STEP, runs, back) if on_device else [],
    )
