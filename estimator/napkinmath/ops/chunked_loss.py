"""TRL's chunked log-probabilities: head and loss over tiles of tokens and vocabulary, logits made
again in the backward.

Source: trl 1.16 kernels/chunked_logprob.py ChunkedLogProbFunction, trainer/utils.py
add_fused_lm_head.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64, DType
from napkinmath.base.expr import Size, ceil_div, minimum, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Steps, Tensor, Value
from napkinmath.ir.tape import Tape
from napkinmath.ops.index import constant, slice_of
from napkinmath.ops.nodes import freed, gradients_of, made, result, workspaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Projection = Callable[[Tape, Value, Value, Value, Size], Value]
    """Log-probabilities (rows,) from hidden states (rows, h), weight (v, h) and targets (rows,)."""

TOKENS_A_TILE = 4096  # kernels/chunked_logprob.py TOKEN_CHUNK_SIZE
WORDS_A_TILE = 32768  # trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE
_EAGER_WORDS_A_TILE = 8192  # prime-rl trainer/models/layers/lm_head.py vocab_chunk_size
# Running statistics of each token: maximum, two sums and a sum of squares of exponentials, sum of
# logits, maximum before the target, its logit.
NUM_STATISTICS = 7
# log-probability, entropy, whether the target is the likeliest: put back into the batch's shape
NUM_OUTPUTS = 3


def chunked_log_probabilities(
    t: Tape, hidden: Value, w: Value, tokens: Size = 0, project: Projection | None = None
) -> Value:
    """The loss of every position but the last, from hidden states (..., s, h) and the head's weight
    (v, h); `project` takes the place of TRL's function. Of `tokens` labels alone the others are
    masked out."""
    *batch, length, _ = hidden.axes
    scored = (*batch, length - 1)
    rows = product((*batch, minimum(tokens, length - 1))) if tokens else product(scored)
    mask = constant(t, "labels to score", scored, BOOL, Role.LOGITS)
    with t.scope() as frame:
        frame.local(mask)
        chosen = _selected(t, slice_of(t, hidden, (*scored, hidden.axes[-1])), mask, rows)
        frame.local(chosen)
        targets = _positions_then(t, "targets to score", (rows,), INT64, scored)
        return _loss(t, (project or _projected)(t, chosen, w, targets, rows), mask)


def _loss(t: Tape, log_probabilities: Value, mask: Value) -> Value:
    """The outputs put back into the batch's shape, and the loss of those that the mask chose."""
    (rows,), scored = log_probabilities.axes, mask.axes
    names = [f"output {i + 1} in the batch's shape" for i in range(NUM_OUTPUTS)]
    outputs = workspaces(t, scored, FP32, names, Role.LOGITS)
    out = result(t, "loss", (1,), FP32, (log_probabilities,), Role.LOGITS)
    gradient = t.tensor("gradient of the log-probabilities", (rows,), FP32, Role.LOGITS)
    t.append(
        "loss of the scored labels",
        (log_probabilities,),
        (out,),
        forward=made(*outputs, out.tensor),
        saves=(mask.tensor,),
        costs=(Move(6 * 4 * rows),),
        backward=made(gradient),
        gradients=(Gradient(log_probabilities, gradient),) if out.requires_grad else (),
        backward_costs=(Move(8 * rows),),
    )
    t.touch(*outputs)
    return out


def _positions_then(
    t: Tape, name: str, axes: tuple[Size, ...], dtype: DType, scored: tuple[Size, ...]
) -> Value:
    """Something gathered by a mask: a table of positions, an int64 a dimension, lives meanwhile."""
    table = t.tensor("positions of a mask", (len(scored), product(scored)), INT64, Role.WORKSPACE)
    made = t.tensor(name, axes, dtype, Role.LOGITS)
    out = Value(made, axes, dtype)
    t.append(
        name,
        (),
        (out,),
        forward=((ALLOC, table), (ALLOC, made), (FREE, table)),
        costs=(Move(2 * traffic(out)),),
    )
    return out


def _selected(t: Tape, x: Value, mask: Value, rows: Size) -> Value:
    """x[mask]; its gradient is put into zeros as large as x."""
    name, axes = "hidden states of scored labels", (rows, x.axes[-1])
    out = _positions_then(t, name, axes, x.dtype, mask.axes)
    op = t.ops[-1]
    out = Value(out.tensor, axes, x.dtype, x.requires_grad)
    op.inputs, op.outputs = (x,), (out,)
    t.touch(x.tensor)
    if x.requires_grad:
        back = t.gradient_of(x)
        op.saves, op.backward, op.gradients = (mask.tensor,), ((ALLOC, back),), (Gradient(x, back),)
        op.backward_costs = (Move(3 * traffic(x)),)
    return out


def _projected(t: Tape, x: Value, w: Value, targets: Value, rows: Size) -> Value:
    """The autograd function: statistics tile by tile forward, tiles made again and turned into
    gradients in fp32 backward."""
    vocabulary, width = w.axes
    computed = x.dtype if t.policy.autocast is None else t.policy.autocast
    out = result(t, "log-probabilities", (rows,), FP32, (x, w), Role.LOGITS)
    names = ("log of the sum of exponentials", "entropy")
    normalizer, entropy = workspaces(t, (rows,), FP32, names, Role.LOGITS)
    names = [f"statistic {i + 1} of each token" for i in range(NUM_STATISTICS)]
    statistics = workspaces(t, (rows,), FP32, names, Role.LOGITS)
    tile = _tile(t, rows, computed, x, w, keeps_last_weights=False)
    outputs = made(normalizer, out.tensor, entropy)
    gradients, backward = _gradients(t, rows, computed, x, w)
    product = Gemm(rows, vocabulary, width, computed)
    forward, back = _folding(t, rows, vocabulary, computed.bits // 8)
    products = [Gemm(rows, width, vocabulary, computed)] * x.requires_grad
    products += [Gemm(vocabulary, width, rows, computed, of_weight=True)] * w.requires_grad
    t.append(
        "chunked_log_probabilities",
        (x, w),
        (out,),
        forward=(*made(*statistics, *tile), *outputs, *freed(*statistics, *tile)),
        saves=(x.tensor, targets.tensor, normalizer, entropy),
        costs=(product, forward),
        backward=backward,
        gradients=gradients,
        backward_costs=(product, back, *products),
    )
    t.touch(targets.tensor, normalizer, entropy)
    return out


def _folding(t: Tape, rows: Size, vocabulary: Size, narrow: int) -> tuple[Move, Move]:
    """What turns tiles of 16-bit logits, `narrow` bytes each, into statistics and into gradients:
    a kernel that reads each once, or torch's operations.

    Those are a cast, the temperature, maximum, difference, exponential, its sum, product with the
    logits and the product's sum; backward a cast, the temperature twice, difference, exponential,
    product with the gradient and two casts (prime-rl trainer/models/layers/lm_head.py).
    """
    logits = rows * vocabulary
    if not t.policy.stack.loss.eager_tiles:
        return Move(narrow * logits), Move(2 * narrow * logits)
    tiles = ceil_div(vocabulary, _EAGER_WORDS_A_TILE)
    return (
        Move((52 + narrow) * logits, 8 * tiles),
        Move((52 + 3 * narrow) * logits, 8 * tiles),
    )


def _gradients(
    t: Tape, rows: Size, computed: DType, x: Value, w: Value
) -> tuple[tuple[Gradient, ...], Steps]:
    """Gradients are summed in fp32 over the tiles, then cast."""
    gradients = gradients_of(t, (x, w))
    sums: list[Tensor] = []
    narrowed: list[Tensor] = []
    for g in gradients:
        assert g.tensor is not None
        if g.of.dtype is FP32:
            sums.append(g.tensor)
        else:
            sums.append(t.tensor(f"{g.tensor.name} in fp32", g.of.axes, FP32, g.tensor.role))
            narrowed.append(g.tensor)
    tile = _tile(t, rows, computed, x, w, keeps_last_weights=True)
    wide = [x for x, g in zip(sums, gradients, strict=True) if x is not g.tensor]
    return gradients, (*made(*sums, *tile, *narrowed), *freed(*wide, *tile))


def _tile(
    t: Tape, rows: Size, computed: DType, x: Value, w: Value, *, keeps_last_weights: bool
) -> list[Tensor]:
    """What the loop over tiles makes, and lets go at its end: logits of a tile, and casts of the
    hidden states and weights in it.

    A loop's variable is made anew before the old one goes, so two casts of one kind live where
    there are two tiles.
    """
    vocabulary, width = w.axes
    axes = (minimum(rows, TOKENS_A_TILE), WORDS_A_TILE)
    made = [t.tensor("logits of a tile", axes, computed, Role.LOGITS)]
    if x.dtype is not computed:
        name = "hidden states of a tile"
        made += _in_turn(t, name, rows, TOKENS_A_TILE, width, computed, both=True)
    if w.dtype is not computed:
        name, both = "weights of a tile", keeps_last_weights
        made += _in_turn(t, name, vocabulary, WORDS_A_TILE, width, computed, both=both)
    return made


def _in_turn(
    t: Tape, name: str, count: Size, tile: int, width: Size, dtype: DType, *, both: bool
) -> list[Tensor]:
    first = minimum(count, tile)
    made = [t.tensor(f"{name} in {dtype.name}", (first, width), dtype, Role.WORKSPACE)]
    if both:
        made.append(
            t.tensor(
                f"next {name} in {dtype.name}",
                (minimum(count, 2 * tile) - first, width),
                dtype,
                Role.WORKSPACE,
            )
        )
    return made
