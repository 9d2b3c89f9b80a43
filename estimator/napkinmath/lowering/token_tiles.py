"""A module over tiles of the tokens, each of which is run again in the backward: what is wide in it
exists for one tile at a time.

Two tiles are recorded; the first stands for all but the last. Sources: arXiv 2506.13996 (ALST);
kernels/napkinmath_kernels/checkpoint/tiled.py, which torch 2.13 utils/checkpoint.py runs. DeepSpeed's
and axolotl's autograd function (runtime/sequence_parallel/ulysses_sp.py TiledMLP) holds the same
tensors while a tile runs; it adds up gradients in `.grad` itself.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.expr import Size, ceil_div, maximum, product
from napkinmath.config.train_config import AUTO_TILES
from napkinmath.ir.costs import Move, Repeated, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Block, Gradient, Op, Role, Tensor, Value, Work
from napkinmath.lowering.forward import forward_events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napkinmath.ir.costs import Cost
    from napkinmath.ir.tape import Tape

    Function = Callable[[Tape, Value], Value]


def in_tiles(t: Tape, x: Value, function: Function) -> Value:
    """function(x) over the configured number of tiles of x (..., tokens, hidden)."""
    if t.policy.stack.runs_own_modules:
        raise InputError(
            "--mlp-tiles wraps the MLPs of transformers, which this stack does not run; drop it"
        )
    count = _num_tiles(t, x)
    if count == 1 or not (t.at_least("s", 2) or t.at_least("b", 2)):  # one token is one tile
        return function(t, x)
    rows, width = product(x.axes[:-1]), x.axes[-1]
    step = ceil_div(rows, count)
    count = ceil_div(rows, step)  # where tiles do not divide the rows there may be fewer
    middle = (step * (count - 2), width)
    held = t.tensor("outputs of the other tiles", middle, x.dtype)
    tiles = _split(t, x, (step, rows - step * (count - 1)))
    made: list[Value] = []
    for index, tile in enumerate(tiles):
        start = len(t.ops)
        _saves_input(t, tile)
        with t.scope():
            made.append(function(t, tile))
        if index == 0:
            _runs_again(t, start, count - 1)
            t.append(held.name, (), (), forward=((ALLOC, held),))
        else:
            _runs_again(t, start, 1, is_last=True)
    return _joined(t, x, made, held)


def _num_tiles(t: Tape, x: Value) -> Size:
    tiles = t.policy.config.mlp_tiles
    if tiles != AUTO_TILES:
        return max(1, tiles)
    width, length = t.known(x.axes[-1]), x.axes[-2]
    if isinstance(length, int):
        return max(1, -(-length // width))
    return ceil_div(length, width) if t.at_least("s", width + 1) else 1


def _split(t: Tape, x: Value, sizes: Sequence[Size]) -> list[Value]:
    """Views of the rows; their gradients are put together in a new one."""
    tiles = [Value(x.tensor, (size, x.axes[-1]), x.dtype, x.requires_grad) for size in sizes]
    if x.requires_grad:
        back = t.gradient_of(x)
        t.append(
            "split",
            (x,),
            tiles,
            forward=(),
            backward=((ALLOC, back),),
            gradients=(Gradient(x, back),),
            backward_costs=(Move(2 * traffic(x)),),
        )
    return tiles


def _saves_input(t: Tape, tile: Value) -> None:
    """A checkpoint saves its input before it runs (torch/utils/checkpoint.py _NoopSaveInputs)."""
    t.append("checkpoint", (tile,), (tile,), forward=(), saves=(tile.tensor,))
    t.ops[-1].gradients = (Gradient(tile, None),) if tile.requires_grad else ()


def _joined(t: Tape, x: Value, made: Sequence[Value], held: Tensor) -> Value:
    """torch.cat of the tiles' outputs; each tile's gradient is a view."""
    dtype, needs = made[0].dtype, any(one.requires_grad for one in made)
    tensor = t.tensor("output", x.axes, dtype)
    out = Value(tensor, x.axes, dtype, needs)
    t.append(
        "cat",
        made,
        (out,),
        forward=((ALLOC, tensor), (FREE, held)),
        gradients=[Gradient(one, None) for one in made if one.requires_grad],
        costs=(Move(2 * traffic(out)),),
    )
    return out


def _runs_again(t: Tape, start: int, times: Size, *, is_last: bool = False) -> None:
    """The operations from `start` on keep nothing and are run again, `times` over, when the first
    node of their backward asks for what it saved (torch 2.13 utils/checkpoint.py unpack_hook).

    The last tile's backward is the first.
    """
    ops, input_holder = t.ops[start:], None
    given = ops[0].inputs[0]
    if any(op.saves for op in ops[1:]):
        last = max(index for index, op in enumerate(ops) if op.saves and op.gradients)
        again, costs = _made_again(t, ops, start)
        _frees_when_read(ops, {tensor for kind, tensor in again if kind == ALLOC})
        outputs = ops[last].outputs
        trigger = Op(
            "checkpoint, made again",
            ops[last].module,
            outputs,
            outputs,
            forward=(),
            saves=(),
            costs=(),
            backward=tuple(again),
            gradients=tuple(Gradient(out, None, at) for at, out in enumerate(outputs)),
            backward_costs=tuple(Repeated(cost, times, again=True) for cost in costs),
        )
        if not is_last:
            ends = _input_holder(t, ops, trigger)
            input_holder = ends or ops[0]
            if ends is None:
                more = _gradients(t, given, 1)
                trigger.backward = ((ALLOC, more), *again, (FREE, more))
            waiting = _gradients(t, given, times - 1 if ends else times - 2)
            trigger.backward = ((ALLOC, waiting), *trigger.backward)
            ops[0].backward = ((FREE, waiting),)
        _insert(t, start + last + 1, trigger)
    _repeat(ops, times)
    for op in ops if input_holder else ops[1:]:
        op.saves = ()
    if input_holder is not None:
        input_holder.saves = (given.tensor,)


def _input_holder(t: Tape, ops: Sequence[Op], trigger: Op) -> Op | None:
    """The operation whose backward is the last to hold the tiles' input. A checkpoint holds its input
    until all that it saved has been read.

    A layer's checkpoint around it gives its copy away once. Then the input goes as soon as the last
    tile has been made again, unless something saved it. Of more than two tiles (None), the most is
    held while the last one is made again or in the backward of the one before, which has one
    gradient less beside it.
    """
    if not t.policy.recomputes or t.policy.reentrant:
        return next(op for op in ops[1:] if op.saves)
    given = ops[0].inputs[0]
    reader = next((op for op in ops[1:] if given.tensor in op.saves), None)
    count = t.policy.config.mlp_tiles
    if reader is not None or count == 2:
        return reader or trigger
    many = count > 2 or t.at_least("s", 2 * t.known(given.axes[-1]) + 1)
    return None if many else trigger


def _gradients(t: Tape, tile: Value, times: Size) -> Tensor:
    """The gradients of so many other tiles, where they need any."""
    rows = maximum(times, 0) * tile.axes[0] if tile.requires_grad else 0
    axes = (rows, tile.axes[-1])
    name, role = "gradients of the other tiles", Role.ACTIVATION_GRADIENTS
    return t.tensor(name, axes, tile.dtype, role)


def _insert(t: Tape, index: int, op: Op) -> None:
    """An operation in front of others that are recorded already."""
    t.ops.insert(index, op)
    for uses in (t.last_use, t.graph_use):
        uses.update({tensor: at + 1 for tensor, at in uses.items() if at >= index})


def _repeat(ops: Sequence[Op], times: Size) -> None:
    for op in ops if times != 1 else ():
        op.costs = tuple(Repeated(cost, times) for cost in op.costs)
        op.backward_costs = tuple(Repeated(cost, times) for cost in op.backward_costs)


def _made_again(
    t: Tape, ops: Sequence[Op], start: int
) -> tuple[list[tuple[str, Tensor]], list[Cost]]:
    """The steps and costs of a recomputation that keeps what the backward reads: autocast's copies
    of weights too, which the forward had from the first tile."""
    ends = {tensor: max(0, at - start) for tensor, at in t.last_use.items() if at >= start}
    block = Block("tile", list(ops), [], None, None, (), ends, {})
    forward = forward_events(block, keep=True, holds_input=True, stop_early=True)
    steps: list[tuple[str, Tensor]] = []
    costs: list[Cost] = []
    for kind, what in forward.events:
        if isinstance(what, Tensor):
            steps.append((kind, what))
        elif isinstance(what, Work):
            costs.extend(what.costs)
    made = {tensor for kind, tensor in steps if kind == ALLOC}
    fresh = [tensor for tensor in _casts(t, ops) if tensor not in made]
    return [*((ALLOC, tensor) for tensor in fresh), *steps], costs


def _casts(t: Tape, ops: Sequence[Op]) -> list[Tensor]:
    """Autocast's copies of weights that these operations read: made anew for each tile."""
    known = {value.tensor for value in t.casts.values()}
    return list(dict.fromkeys(s for op in ops for s in op.saves if s in known))


def _frees_when_read(ops: Sequence[Op], made: set[Tensor]) -> None:
    """What was made again goes with the backward of the first operation that saved it, unless that
    writes a gradient over it, which is handed on."""
    seen: set[Tensor] = set()
    for op in ops:
        over = {gradient.tensor for gradient in op.gradients}
        mine = [s for s in op.saves if s in made and s not in seen and s not in over]
        seen.update(mine)
        op.backward = (*op.backward, *((FREE, tensor) for tensor in dict.fromkeys(mine)))
