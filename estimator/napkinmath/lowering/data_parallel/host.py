"""The update in host memory of parameters that are stored there (FSDP's CPUOffloadPolicy,
ZeRO-Infinity)."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32
from napkinmath.base.expr import Size, ceil_div
from napkinmath.catalog.optimizers import applied_to
from napkinmath.ir.costs import Disk, HostCopy, HostPass
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Update, segments
from napkinmath.lowering.data_parallel.flat import master_dtype
from napkinmath.lowering.data_parallel.holders import collectives, part_of, split_bytes
from napkinmath.lowering.optimizer import chosen_optimizer, gradients_freed
from napkinmath.lowering.optimizer_traffic import num_states, update_costs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.catalog.optimizer_states import Optimizer
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.lowering.policy import Policy


def update_on_host(owned: list[Run], policy: Policy) -> Update:
    """States beside the parameters, in their type; nothing of it is on the device.

    The update's kernels are those of the device, run by torch's threads: one a rank under torchrun
    (torch distributed/run.py), all cores where the tool shares them out.
    """
    row = chosen_optimizer(policy)
    one_core = policy.config.parallel.world_size > 1 and not policy.stack.loop.shares_cores

    def updated(run: Run) -> list[Event]:
        costs = [cost for w in run.trained for cost in update_costs(row, w, policy.stack)]
        touched = sum((cost.moved for cost in costs), start=0)
        return [(RUN, Work(None, (HostPass(touched, one_core=one_core),), False))] if costs else []

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
        work=segments("update on the host", Phase.STEP, owned, updated),
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
    row, master = chosen_optimizer(policy), master_dtype(policy.config.parallel)
    kept = master if policy.config.parallel.zero.narrow_states else FP32

    def states(run: Run) -> list[Event]:
        found = ((w, s) for w in run.trained for s in row.states)
        return [
            (ALLOC, _state(f"{s.name} of the partition", w, kept, row.source))
            for w, s in found
            if s.elements is None and not s.below
        ]

    def passes(run: Run) -> list[Event]:
        return _passes(run, row, policy)

    def back(run: Run) -> list[Event]:
        return _copied_back(run, policy, gathers=gradients)

    on_device = not policy.config.offload.parameters
    update = segments("update on the host", Phase.STEP, owned, passes)
    return Update(
        row,
        clip=[],
        zero=[],
        load=segments(
            "host copies", Phase.LOAD, owned, lambda run: _kept(run, master, whole=gradients)
        ),
        states=segments("states on the host", Phase.STEP, owned, states),
        work=update + (segments("updated parameters", Phase.STEP, runs, back) if on_device else []),
    )


def _passes(run: Run, row: Optimizer, policy: Policy) -> list[Event]:
    """CPUAdam's pass over the partition, one that scales and clips gradients, and one that casts
    the parameter; the states come from NVMe and go back there where they lie on it.

    Sources: DeepSpeed ops/adam/cpu_adam.py, runtime/zero/stage_1_and_2.py unscale_and_clip_grads,
    stage3.py _prepare_sub_group, _release_sub_group (optimizer_swap_utils.py: states, master and
    gradient).
    """
    elements: Size = sum((w.elements for w in run.trained), start=0)
    if not run.trained:
        return []
    parallel = policy.config.parallel
    master = master_dtype(parallel)
    states = num_states(row) * (master if parallel.zero.narrow_states else FP32).bits
    # The update reads the gradient, and reads and writes the master and the states; clipping reads
    # and writes the gradient; the cast reads the master.
    bits = 6 * master.bits + 2 * states + BF16.bits
    costs: list[Cost] = [HostPass(ceil_div(elements * bits, 8))]
    if "optimizer" in parallel.nvme:
        swapped = ceil_div(elements * (2 * master.bits + states), 8)
        costs.append(Disk(swapped, swapped))
    return [(RUN, Work(None, costs, False))]


def _kept(run: Run, master: DType, *, whole: bool) -> list[Event]:
    """Gradients on the host in the masters' type, and 16-bit copies of `whole` parameters."""
    kinds = [(f"{master} gradients on the host", master, Role.GRADIENTS)]
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
