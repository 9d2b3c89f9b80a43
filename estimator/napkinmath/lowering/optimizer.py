"""The end of the step: master weights, the optimizer's states and temporaries, zero_grad.

Clipping and loss scaling are in lowering/clipping.py, what offload moves to the host in
lowering/host_optimizer.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Bindings, Size, minimum
from napkinmath.catalog.optimizer_states import PAGED, Optimizer, State, Temporary
from napkinmath.catalog.optimizers import applied_to, find_optimizer
from napkinmath.ir.costs import Collective
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Weight, Work
from napkinmath.ir.step import Run, Segment, Update, by_block, segments
from napkinmath.lowering.clipping import lower_clipping
from napkinmath.lowering.gradient_buffers import main_gradient
from napkinmath.lowering.optimizer_traffic import update_costs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


def chosen_optimizer(policy: Policy) -> Optimizer:
    """The configured optimizer, or the stack's own."""
    name = policy.config.optimizer
    row = find_optimizer(policy.stack.optimizer.default if name == "auto" else name)
    if not policy.stack.optimizer.widens_moments:
        return row
    from napkinmath.catalog.te_adam import before_fused_widening

    return before_fused_widening(row)


def lower_update(runs: list[Run], policy: Policy, sizes: dict[str, int]) -> Update:
    """Segments of clipping, first and later optimizer steps, and zero_grad; `sizes` are the
    model's, for rules that turn on them."""
    row = chosen_optimizer(policy)
    owners = [run for run in runs if run.trained]
    if policy.config.offload.optimizer:
        from napkinmath.lowering.host_optimizer import lower_host_update

        return lower_host_update(row, owners, policy)
    states = States(row, policy, sizes)

    def masters(run: Run) -> list[Event]:
        return [(ALLOC, t) for w in run.trained for t in states.masters(w)]

    def own(run: Run) -> list[Event]:
        return [(ALLOC, t) for w in run.trained for t in states.of(run, w)]

    made = segments("states", Phase.STEP, owners, by_block(own))
    return Update(
        row,
        load=segments("master weights", Phase.LOAD, owners, by_block(masters)),
        clip=[] if updates_in_backward(row, policy) else lower_clipping(owners, policy),
        states=made + states.shared_segment(owners),
        work=_copies_summed(owners, policy) + _work(row, owners, policy),
        zero=segments("zero_grad", Phase.STEP, runs, by_block(gradients_freed)),
    )


def gradients_freed(run: Run) -> list[Event]:
    """zero_grad(set_to_none) of a run."""
    return [(FREE, t) for t in run.block.gradients]


# ---------------------------------------------------------------- states


class States:
    """Makes the persistent tensors of an optimizer: masters, states of each parameter, tables that
    all share."""

    def __init__(self, row: Optimizer, policy: Policy, sizes: dict[str, int]) -> None:
        self.row, self.policy, self.sizes = row, policy, sizes
        self.shared: dict[str, Tensor] = {}

    def masters(self, weight: Weight) -> list[Tensor]:
        """The fp32 copy that a half-precision parameter is updated through, and its gradient's
        buffer."""
        stack, stored = self.policy.stack, weight.tensor.dtype
        own = applied_to(self.row, weight.axes, weight.kind).master_of(stored)
        narrow = stored is not FP32
        master = FP32 if own is None and narrow and stack.optimizer.master_weights else own
        buffers = main_gradient(weight, self.policy)
        if not master:
            return buffers
        name, axes, path = f"master of {weight.tensor.name}", weight.axes, weight.path
        return [Tensor(name, axes, master, Role.MASTER, path, stack.source), *buffers]

    def of(self, run: Run, weight: Weight) -> list[Tensor]:
        """The states of one parameter; sizes that decide its form are the model's."""
        row = applied_to(self.row, weight.axes, weight.kind)
        known = self._known(run, weight.elements)
        found: list[Tensor] = []
        for state in row.states:
            count = state.elements(weight.axes) if state.elements else weight.elements
            present = _present(state, weight.elements, known)
            if state.shared:
                if present != 0 and state.name not in self.shared:
                    self.shared[state.name] = self._tensor(state, state.name, weight, count, "")
            elif present != 0 and count != 0:
                paged = row.paged and state.pageable and (known is None or known >= PAGED)
                name, size = f"{state.name} of {weight.tensor.name}", count * present
                found.append(self._tensor(state, name, weight, size, weight.path, paged=paged))
        return found

    def _tensor(
        self,
        state: State,
        name: str,
        weight: Weight,
        count: Size,
        module: str,
        *,
        paged: bool = False,
    ) -> Tensor:
        """A state of so many elements, in its own type or that of what is updated."""
        updated = FP32 if self.policy.stack.optimizer.master_weights else weight.tensor.dtype
        source = applied_to(self.row, weight.axes, weight.kind).source
        dtype, role = state.dtype or updated, Role.OPTIMIZER
        return Tensor(name, (count,), dtype, role, module, source, host=paged, managed=paged)

    def shared_segment(self, owners: list[Run]) -> list[Segment]:
        """Tables that all parameters share, made once; call after `of` has seen every parameter."""
        events: list[Event] = [(ALLOC, tensor) for tensor in self.shared.values()]
        return [Segment("shared tables", Phase.STEP, events)] if events else []

    def _known(self, run: Run, count: Size) -> int | None:
        try:
            return int(Bindings({**self.sizes, **dict(run.stage.symbols)})(count))
        except KeyError:
            return None


def _present(state: State, elements: Size, known: int | None) -> Size:
    """1 where a parameter of that size has the state, else 0; an expression where its size is
    open."""
    if not state.at_least and not state.below:
        return 1
    limit = state.at_least or state.below
    large: Size = minimum(1, elements // limit) if known is None else int(known >= limit)
    return large if state.at_least else 1 - large


# ---------------------------------------------------------------- the update


def _copies_summed(owners: list[Run], policy: Policy) -> list[Segment]:
    """The gradients of a stage that several ranks of a pipeline hold, summed over them."""
    parallel = policy.config.parallel
    copies = parallel.pipeline_schedule.record.copies
    if copies == 1 or parallel.pipeline_parallel_size == 1:
        return []

    def summed(run: Run) -> list[Event]:
        return [
            (
                RUN,
                Work(None, (Collective("all-reduce", size, ranks=copies, axis="pipeline"),), True),
            )
            for size in (weight.tensor.nbytes for weight in run.trained)
        ]

    return segments("gradients of both copies", Phase.STEP, owners, summed)


def _work(row: Optimizer, owners: list[Run], policy: Policy) -> list[Segment]:
    if updates_in_backward(row, policy):
        return []

    def events(run: Run) -> list[Event]:
        return update_events(row, run.trained, policy)

    update = (
        _foreach(row, owners, policy)
        if row.foreach_copies
        else segments("update", Phase.STEP, owners, by_block(events))
    )
    if row.master is not None:
        return update
    if policy.keeps_main_gradients and policy.main_gradient_dtype is not FP32:
        return _beside_fp32_gradients(update, owners)
    return _through_fp32(update, owners) if policy.stack.optimizer.casts_gradients else update


def _beside_fp32_gradients(update: list[Segment], owners: list[Run]) -> list[Segment]:
    """main_grad.float(): buffers of 16 bits are widened for the update, of a rank's part
    (Megatron-LM core/optimizer/distrib_optimizer.py _copy_model_grads_to_main_grads)."""
    wide = {
        id(run): [
            Tensor(f"fp32 gradient of {w.tensor.name}", w.axes, FP32, Role.GRADIENTS, w.path)
            for w in run.trained
        ]
        for run in owners
    }
    return [
        *_moved("fp32 gradients", ALLOC, wide, owners),
        *update,
        *_moved("fp32 gradients released", FREE, wide, owners),
    ]


def _through_fp32(update: list[Segment], owners: list[Run]) -> list[Segment]:
    """flatten_dense_tensors_aligned(averaged_gradients).to(fp32): the flat 16-bit copy lives until
    the cast is done."""

    def copies(name: str, dtype: DType | None) -> dict[int, list[Tensor]]:
        return {
            id(run): [
                Tensor(
                    f"{name} of {w.tensor.name}",
                    w.axes,
                    dtype or w.tensor.dtype,
                    Role.GRADIENTS,
                    w.path,
                )
                for w in run.trained
                if w.tensor.dtype is not FP32
            ]
            for run in owners
        }

    flat, wide = copies("flattened gradient", None), copies("fp32 gradient", FP32)
    return [
        *_moved("flattened gradients", ALLOC, flat, owners),
        *_moved("fp32 gradients", ALLOC, wide, owners),
        *_moved("flattened gradients released", FREE, flat, owners),
        *update,
        *_moved("fp32 gradients released", FREE, wide, owners),
    ]


def _moved(
    name: str, action: str, tensors: dict[int, list[Tensor]], owners: list[Run]
) -> list[Segment]:
    """The allocation, or the end, of each run's tensors."""
    return segments(name, Phase.STEP, owners, lambda run: [(action, t) for t in tensors[id(run)]])


def updates_in_backward(row: Optimizer, policy: Policy) -> bool:
    """Whether each parameter is updated by a hook as its gradient is made."""
    return row.in_backward or policy.config.optimizer_in_backward


def _is_spread(weight: Weight, parallel: ParallelConfig) -> bool:
    from napkinmath.lowering.data_parallel.holders import is_spread

    return is_spread(weight.path, parallel)


def _foreach(row: Optimizer, owners: list[Run], policy: Policy) -> list[Segment]:
    """What is updated of one type at a time (fp32 masters where there are some); a type's
    temporaries live until the next type's are made (a rebound variable). Where spread experts have
    an optimizer of their own, it makes its temporaries after the other's are gone."""
    masters, sums = policy.stack.optimizer.master_weights, _sums(policy)
    parallel = policy.config.parallel
    chains = policy.stack.optimizer.chains_experts and parallel.spreads_experts

    def group(weight: Weight) -> tuple[bool, DType]:
        return chains and _is_spread(weight, parallel), row.foreach_dtype or (
            FP32 if masters else weight.tensor.dtype
        )

    made: list[Segment] = []
    last: list[Segment] = []
    chained = False
    for apart, dtype in sorted(
        dict.fromkeys(group(w) for run in owners for w in run.trained), key=lambda key: key[0]
    ):
        if apart and not chained:
            made, last, chained = made + last, [], True
        own = {id(run): [w for w in run.trained if group(w) == (apart, dtype)] for run in owners}
        held = {
            key: [
                Tensor("foreach temporary", w.axes, dtype, Role.WORKSPACE, w.path)
                for w in weights
                for _ in range(row.foreach_copies)
            ]
            for key, weights in own.items()
        }
        works = {
            key: [Work(None, update_costs(row, w, policy.stack, sums), False) for w in weights]
            for key, weights in own.items()
        }
        made += _moved("foreach temporaries", ALLOC, held, owners)
        made += last
        made += [
            run.segment(
                f"update of {run.name}", Phase.STEP, [(RUN, work) for work in works[id(run)]]
            )
            for run in owners
            if works[id(run)]
        ]
        last = _moved("foreach temporaries released", FREE, held, owners)
    return made + last


def update_events(row: Optimizer, weights: list[Weight], policy: Policy) -> list[Event]:
    """The update of parameters one after the other, with the temporaries of each; the last one's
    variables die at the end."""
    events: list[Event] = []
    bound: dict[str, Tensor] = {}
    for weight in weights:
        applied = applied_to(row, weight.axes, weight.kind)
        for line in applied.script:
            if isinstance(line, str):
                if line in bound:
                    events.append((FREE, bound.pop(line)))
                continue
            made = _temporary(line, weight)
            if made is None:
                continue
            events.append((ALLOC, made))
            if line.name in bound:
                events.append((FREE, bound[line.name]))
            bound[line.name] = made
        events.append(
            (RUN, Work(None, update_costs(row, weight, policy.stack, _sums(policy)), False))
        )
    return events + [(FREE, tensor) for tensor in bound.values()]


def _sums(policy: Policy) -> DType | None:
    """The type of the buffers that the update reads gradients from; None without buffers."""
    return policy.main_gradient_dtype if policy.keeps_main_gradients else None


def _temporary(line: Temporary, weight: Weight) -> Tensor | None:
    if line.cast_of and line.dtype is weight.tensor.dtype:
        return None
    axes = (line.elements(weight.axes),) if line.elements else weight.axes
    return Tensor(
        f"{line.name} of the step",
        axes,
        line.dtype or weight.tensor.dtype,
        Role.WORKSPACE,
        weight.path,
    )
