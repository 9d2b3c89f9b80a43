"""What the host does for a layer of experts under Megatron-Core besides the kernels that are
recorded: small operations of its router and dispatcher, reading how many rows travel where, and one
product after the other for the experts.

Counted in Megatron-LM d98e8a64: core/transformer/moe/moe_utils.py topk_routing_with_score_function,
token_dispatcher.py MoEAlltoAllTokenDispatcher (preprocess, _maybe_dtoh_and_synchronize) and
MoEFlexTokenDispatcher; Transformer Engine pytorch/permutation.py (make_row_id_map, make_chunk_sort_map)
and pytorch/module/grouped_linear.py. Losses that balance the experts are not counted: they are the
recipe's.
"""

from __future__ import annotations

from napkinmath.ir.costs import Dispatch, Move

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.recording import SplitExperts
    from napkinmath.ir.tape import Tape

# Kernels forward and backward. The router makes two tensors of tokens x experts, probabilities and a
# map of booleans, each by zeros, casts and a scatter. Rows are counted for each expert, summed for
# each rank, gathered, copied to the host in five pieces; their probabilities travel by an exchange of
# their own; permutations and sorts have kernels that make their maps.
_ROUTED = (7, 5)
_HERE = (6, 2)
_EXCHANGED = (16, 3)
_SENT_ONCE = (8, 3)
# A weight's gradient is handed to the buffer's hook, parameter by parameter (Megatron-LM
# core/distributed/distributed_data_parallel.py _make_backward_post_hook).
_HOOKS_OF_A_WEIGHT = 1
_INT64_BYTES = 8


def routed(t: Tape, split: SplitExperts | None, count: Size) -> None:
    """Adds what router and dispatcher do to the operation recorded last; the host reads the rows of
    each of `count` experts before it goes on."""
    if not t.policy.stack.model.experts_apart:
        return
    forward, backward = _HERE if split is None else _SENT_ONCE if split.once else _EXCHANGED
    op = t.ops[-1]
    read = Move(_INT64_BYTES * count, waits=True)
    op.costs = (*op.costs, Dispatch(_ROUTED[0] + forward), read)
    op.backward_costs = (*op.backward_costs, Dispatch(_ROUTED[1] + backward))


def one_product_each(t: Tape, experts: int, *, trained: bool) -> None:
    """Makes the grouped product recorded last one for each of the experts held here."""
    if not t.policy.stack.model.experts_apart:
        return
    op = t.ops[-1]
    op.costs = (*op.costs, Dispatch(experts - 1))
    further = len(op.backward_costs) * (experts - 1) + _HOOKS_OF_A_WEIGHT * experts * trained
    if op.backward_costs:
        op.backward_costs = (*op.backward_costs, Dispatch(further))
