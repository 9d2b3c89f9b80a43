"""The update in host memory of parameters that are stored there (FSDP's CPUOffloadPolicy,
ZeRO-Infinity)."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32
from napkinmath.catalog.optimizers import applied_to
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Update, segments
from napkinmath.lowering.data_parallel.holders import collectives, part_of, split_bytes
from napkinmath.lowering.optimizer import chosen_optimizer, gradients_freed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.lowering.policy import Policy


def update_on_host(owned: list[Run], policy: Policy) -> Update:
    """States beside the parameters, in their type; nothing of it is on the device, and the
    arithmetic there is not priced."""
    row = chosen_optimizer(policy)

    def states(run: Run) -> list[Event]:
        found = ((w, s) for w in run.trained for s in applied_to(row, w.axes, w.kind).states)
        return [
            (ALLOC, _state(f"{s.name} of {w.tensor.name}", w, s.dtype or FP32, row.source))
            for w, s in found
            if s.elements is None and not s.below
        ]

    return Update(
        row,
        load=[],
        clip=[],
        work=[],
        states=segments("states on the host", Phase.STEP, owned, states),
        zero=segments("zero_grad", Phase.STEP, owned, gradients_freed),
    )


def _state(name: str, weight: Weight, dtype: DType, source: str) -> Tensor:
    return Tensor(name, weight.axes, dtype, Role.OPTIMIZER, weight.path, source, host=True)


def partitions_updated_on_host(
    owned: list[Run], runs: list[Run], policy: Policy, *, gradients: bool = True
) -> Update:
    """ZeRO-Offload: states and fp32 gradients of the partitions on the host, new 16-bit parameters
    copied back and gathered.

    Sources: DeepSpeed 0.19 runtime/zero/stage_1_and_2.py initialize_optimizer_states,
    param_buffer_of_bit16_for_cpu_offload_groups.
    """
    row = chosen_optimizer(policy)

    def states(run: Run) -> list[Event]:
        found = ((w, s) for w in run.trained for s in row.states)
        return [
            (ALLOC, _state(f"{s.name} of the partition", w, FP32, row.source))
            for w, s in found
            if s.elements is None and not s.below
        ]

    def back(run: Run) -> list[Event]:
        return _copied_back(run, policy, gathers=gradients)

    on_device = not policy.config.offload.parameters
    return Update(
        row,
        clip=[],
        zero=[],
        load=segments("host copies", Phase.LOAD, owned, lambda run: _kept(run, whole=gradients)),
        states=segments("states on the host", Phase.STEP, owned, states),
        work=segments("updated parameters", Phase.STEP, runs, back) if on_device else [],
    )


def _kept(run: Run, *, whole: bool) -> list[Event]:
    """fp32 gradients on the host, and 16-bit copies of `whole` parameters."""
    kinds = [("fp32 gradients on the host", FP32, Role.GRADIENTS)]
    if whole:
        kinds.append(("16-bit copy on the host", BF16, Role.WEIGHTS))
    return [
        (ALLOC, Tensor(name, w.axes, dtype, role, w.path, host=True))
        for w in run.trained
        for name, dtype, role in kinds
    ]


def _copied_back(run: Run, policy: Policy, *, gathers: bool) -> list[Event]:
    """New 16-bit parameters on their way to the device, and to the other ranks."""
    if not run.trained:
        return []
    parallel = policy.config.parallel
    moved = split_bytes((weight.tensor for weight in run.trained), parallel)
    dense, spread = part_of(moved, parallel)
    costs: list[Cost] = [
        HostCopy(dense + spread, to_host=False, pinned=policy.config.offload.pinned)
    ]
    if gathers:
        costs += collectives("all-gather", moved, parallel, "shard", overlaps=False)
    return [(RUN, Work(None, costs, False))]
