"""Saving under sharding: every rank writes its shard, or whole parameters are gathered for rank 0 to
write from host memory (`--full-state-dict`).

FSDP 2 gathers one parameter after the other. FSDP 1 unshards a unit at a time, in the type that is
stored, and holds its root's whole; then it gathers the optimizer's states of each unit. ZeRO 3
gathers the 16-bit parameters of one module at a time (`gather_16bit_weights_on_model_save`).
Sources: torch 2.13 distributed/checkpoint/state_dict.py get_model_state_dict (full_state_dict,
cpu_offload); distributed/fsdp/_state_dict_utils.py _full_pre_state_dict_hook, _optim_utils.py
_allgather_orig_param_states; accelerate 1.14 utils/fsdp_utils.py save_fsdp_model,
save_fsdp_optimizer (rank0_only, offload_to_cpu); DeepSpeed 0.19 runtime/engine.py
_zero3_consolidated_16bit_state_dict.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment
from napkinmath.lowering.data_parallel.holders import collectives, split_bytes
from napkinmath.lowering.data_parallel.stored import stored_dtype
from napkinmath.lowering.lifecycle import save_segments
from napkinmath.lowering.optimizer import chosen_optimizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.lowering.policy import Policy


def save_sharded(runs: list[Run], owned: list[Run], policy: Policy) -> list[Segment]:
    """The segments of saving what was trained."""
    parallel = policy.config.parallel
    if not parallel.full_state_dict:
        return save_segments(owned, policy)
    if parallel.data_parallel is DataParallel.FSDP1:
        return _units_gathered(runs, policy)
    return _segments(runs, lambda run: _one_by_one(run, policy))


def _segments(runs: list[Run], events_of: Callable[[Run], list[Event]]) -> list[Segment]:
    found = [(run, events_of(run)) for run in runs]
    return [
        run.segment(f"saving {run.name}", Phase.SAVE, events) for run, events in found if events
    ]


def _one_by_one(run: Run, policy: Policy) -> list[Event]:
    """Each parameter gathered whole, copied to the host and dropped."""
    found: list[Event] = []
    for weight in run.trained:
        whole = [_whole(weight, policy)]
        found += [(ALLOC, whole[0]), *_to_host(whole, policy), (FREE, whole[0])]
    return found


def _units_gathered(runs: list[Run], policy: Policy) -> list[Segment]:
    """The root's parameters stay while each unit within it is whole; then the states of each."""
    parameters = {id(run): [_whole(w, policy) for w in run.trained] for run in runs}
    states = {id(run): _whole_states(run, policy) for run in runs}
    layers = [run for run in runs if run.stage.checkpointed or run.stage.count > 1]
    root = [run for run in runs if run not in layers]

    def held(run: Run) -> list[Event]:
        own = parameters[id(run)]
        return [*((ALLOC, t) for t in own), *_to_host(own, policy)] if own else []

    def gone(tensors: list[Tensor]) -> list[Event]:
        return [(FREE, t) for t in tensors]

    def unit(tensors: list[Tensor]) -> list[Event]:
        made: list[Event] = [(ALLOC, t) for t in tensors]
        return [*made, *_to_host(tensors, policy), *gone(tensors)] if tensors else []

    return [
        *_segments(root, held),
        *_segments(layers, lambda run: unit(parameters[id(run)])),
        *_segments(root, lambda run: gone(parameters[id(run)])),
        *_segments(runs, lambda run: unit(states[id(run)])),
    ]


def _whole(weight: Weight, policy: Policy) -> Tensor:
    name, kind = f"whole {weight.tensor.name}", policy.config.parallel.data_parallel
    dtype = weight.tensor.dtype if kind.is_zero else stored_dtype(weight, policy)
    return Tensor(name, weight.axes, dtype, Role.WEIGHTS, weight.path)


def _whole_states(run: Run, policy: Policy) -> list[Tensor]:
    """The optimizer's states of a run as long as its parameters, in their types."""
    row, masters = chosen_optimizer(policy), policy.stack.optimizer.master_weights
    return [
        Tensor(
            f"whole {state.name} of {w.tensor.name}",
            w.axes,
            state.dtype or (FP32 if masters else stored_dtype(w, policy)),
            Role.OPTIMIZER,
            w.path,
        )
        for w in run.trained
        for state in row.states
        if state.elements is None and not state.below and not state.shared
    ]


def _to_host(tensors: list[Tensor], policy: Policy) -> list[Event]:
    """The gather of these tensors, and their copy to the host."""
    parallel = policy.config.parallel
    gathers = collectives(
        "all-gather", split_bytes(tensors, parallel), parallel, "shard", overlaps=False
    )
    copies = [HostCopy(t.nbytes, to_host=True, pinned=False) for t in tensors]
    return [(RUN, Work(None, gathers, False)), (RUN, Work(None, copies, False))]
