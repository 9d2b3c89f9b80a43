"""What a compiler makes of a layer's chains of pointwise operations and norms: one kernel each.

Operations between two products (or attentions, or collectives) that feed each other read what
comes from outside once and write what others read or the backward keeps. What is kept is what the
layer's own rules say; this pass changes time alone. Source: torch _inductor/scheduler.py fuse_nodes
(pointwise with pointwise, and with the reductions of norms; products and attention are extern
kernels).
"""

from __future__ import annotations

from napkinmath.ir.costs import Move, traffic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Block, Op, Tensor, Value


def fuse_chains(block: Block) -> None:
    """Gives the chains of a recorded layer the traffic and launches of one kernel each."""
    for chain in _chains(block.ops):
        if sum(bool(op.costs) for op in chain) > 1:
            _fuse(chain, block)


def _chains(ops: list[Op]) -> list[list[Op]]:
    """Runs of operations without anything else between them, cut where one reads nothing that the
    run has made."""
    found: list[list[Op]] = []
    current: list[Op] = []
    made: set[Tensor] = set()
    for op in ops:
        if not _is_pointwise(op):
            current, made = [], set()
            continue
        if not any(value.tensor in made for value in op.inputs):
            current, made = [], set()
            found.append(current)
        current.append(op)
        made.update(value.tensor for value in op.outputs)
    return found


def _is_pointwise(op: Op) -> bool:
    """Whether an operation only moves bytes, forward and backward, or makes a view."""
    return bool(op.outputs) and all(
        isinstance(cost, Move) and not cost.waits for cost in (*op.costs, *op.backward_costs)
    )


def _fuse(chain: list[Op], block: Block) -> None:
    own = {value.tensor: value for op in chain for value in op.outputs}
    given = {value.tensor: value for op in chain for value in op.inputs if value.tensor not in own}
    left = {tensor: own[tensor] for tensor in _read_elsewhere(chain, block) if tensor in own}
    kept = {tensor for op in chain for tensor in op.saves}
    made: dict[Tensor, Value] = {
        gradient.of.tensor: gradient.of
        for op in chain
        for gradient in op.gradients
        if gradient.tensor is not None and gradient.of.tensor not in own
    }
    forward, saved = traffic(*given.values(), *left.values()), _nbytes(kept)
    forward = forward + _nbytes(kept - left.keys() - given.keys())
    backward = traffic(*left.values(), *made.values()) + saved
    runs_back = any(op.backward_costs for op in chain)
    for op in chain:
        op.costs, op.backward_costs = (), ()
    chain[-1].costs = (Move(forward),)
    chain[0].backward_costs = (Move(backward),) if runs_back else ()


def _read_elsewhere(chain: list[Op], block: Block) -> set[Tensor]:
    """Tensors that operations outside a chain read or keep, or that leave the layer."""
    inside = set(map(id, chain))
    found = {
        tensor
        for op in block.ops
        if id(op) not in inside
        for tensor in (*(value.tensor for value in op.inputs), *op.saves)
    }
    found.update(value.tensor for value in block.externals)
    if block.output is not None:
        found.add(block.output.tensor)
    return found


def _nbytes(tensors: set[Tensor]) -> Size:
    total: Size = 0
    for tensor in sorted(tensors, key=lambda t: t.name):
        total = total + tensor.nbytes
    return total
