"""Log-probabilities of labels from logits that are all there: of preferences without a reference,
and of completions as TRL's trainers of rollouts took them before their fused head."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.expr import Size, minimum
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.ops.elementwise import cast, copy, scale
from napkinmath.ops.index import constant, slice_of
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.nodes import (
    freed,
    gradients_of,
    made,
    meanwhile,
    node,
    passed,
    result,
    same_storage,
    workspaces,
)

ROWS_OF_ENTROPY = 128  # trl 1.8 trainer/utils.py entropy_from_logits chunk_size


def label_log_probabilities(t: Tape, logits: Value) -> Value:
    """One log-probability a sequence, from one kernel that keeps the logits and two numbers a
    token.

    Source: trl 1.16 trainer/utils.py selective_log_softmax, which on a GPU is
    kernels/logprob_entropy.py _LogProbEntropyFunction.
    """
    *batch, length, vocabulary = logits.axes
    tokens = (*batch, length - 1)
    scored = slice_of(t, logits, (*tokens, vocabulary))
    labels = constant(t, "labels to score", tokens, INT64, Role.LOGITS)
    out = result(t, "log-probabilities", tokens, FP32, (scored,), Role.LOGITS)
    names = ("entropy", "normalizer", "expected logit")
    entropy, normalizer, expected = workspaces(t, tokens, FP32, names, Role.LOGITS)
    gradients = gradients_of(t, (scored,))
    for gradient in gradients:
        assert gradient.tensor is not None
        gradient.tensor.role = Role.LOGITS
    kept = (normalizer, expected)
    t.append(
        "log-probabilities of the labels",
        (scored,),
        (out,),
        forward=(*made(out.tensor, entropy, *kept), *freed(entropy)),
        saves=(scored.tensor, labels.tensor, *kept),
        costs=(Move(traffic(scored)),),
        backward=made(*(g.tensor for g in gradients)),
        gradients=gradients,
        backward_costs=(Move(2 * traffic(scored)),),
    )
    t.touch(labels.tensor, *kept)
    return t.op("mean of the loss", (out,), (1,), FP32, gradients=(LIKE,), role=Role.LOGITS)


def chosen_cross_entropy(t: Tape, logits: Value) -> Value:
    """Cross-entropy of the first half of the batch, over a contiguous copy without the last
    position."""
    sequences, length, vocabulary = logits.axes
    chosen = slice_of(t, logits, (sequences // 2, length, vocabulary))
    with t.scope() as frame:
        shifted = slice_of(t, chosen, (sequences // 2, length - 1, vocabulary))
        flat = copy(t, shifted, name="shifted logits", role=Role.LOGITS)
        frame.local(flat)
        return cross_entropy(t, flat, upcast=False)


def whole_log_probabilities(t: Tape, logits: Value) -> Value:
    """The log-probabilities of all labels by log_softmax of all positions but the last: of several
    sequences these do not lie in rows, and torch copies them first.

    Source: OpenRLHF v0.5.0 models/utils.py log_probs_from_logits; torch
    aten/src/ATen/native/cuda/SoftMax.cu host_softmax. Forwards of transformers before 4.46 make
    logits fp32.
    """
    *batch, length, vocabulary = logits.axes
    upcasts = t.policy.stack.model.is_transformers_before((4, 46))
    with t.scope() as frame:
        frame.local(logits)
        if upcasts and logits.dtype is not FP32:
            logits = cast(t, logits, FP32, role=Role.LOGITS)
            frame.local(logits)
        scored = slice_of(t, logits, (*batch, length - 1, vocabulary))
        if t.at_least("b", 2):
            scored = copy(t, scored, name="logits in rows", role=Role.LOGITS)
            frame.local(scored)
        return cross_entropy(t, scored, upcast=False)


def completion_log_probabilities(t: Tape, logits: Value, tokens: Size) -> Value:
    """The log-probabilities of the last `tokens` labels, from logits of one position more.

    Source: trl 0.15 to 1.9 trainer/grpo_trainer.py _get_per_token_logps (and _and_entropies), which
    cuts the last position off, divides by the temperature and takes the sequences one by one
    (trainer/utils.py selective_log_softmax).
    """
    sequences, length, vocabulary = logits.axes
    axes, but_last = (sequences, tokens, vocabulary), (sequences, length - 1, vocabulary)
    stack = t.policy.stack
    with t.scope() as frame:
        if stack.loss.temperature == "in place":
            frame.local(logits)
            chosen = slice_of(t, divided_in_place(t, logits, axes), axes)
        elif not stack.loss.temperature:
            frame.local(logits)
            chosen = slice_of(t, slice_of(t, logits, but_last), axes)
        else:
            chosen = scale(t, slice_of(t, slice_of(t, logits, but_last), axes))
            chosen.tensor.role = Role.LOGITS
            frame.local(chosen)
        rows = _sequences(t, chosen)
        found = _normalized(t, rows) if logits.dtype is FP32 else _softmax_of_sequences(t, rows)
        if logits.dtype is FP32:
            found = _less(t, _gathered(t, chosen), found)
        if stack.loss.reads_entropy and chosen.requires_grad:
            _entropy(t, chosen)
        return t.op("mean of the loss", (found,), (1,), FP32, gradients=(LIKE,), role=Role.LOGITS)


def shifted_log_probabilities(t: Tape, logits: Value) -> Value:
    """The log-probabilities of all labels from logits (b, s, v): an fp32 copy of them, one shifted by
    a token, one divided by the temperature. The first and the last wait until the entropy is there.

    Source: prime-rl 6e054f2f trainer/rl/train.py, trainer/rl/loss.py shift_logits,
    selective_log_softmax, compute_entropy (without gradients).
    """
    with t.scope() as frame:
        wide = cast(t, logits, FP32, role=Role.LOGITS)
        shifted = copy(t, wide, name="shifted logits", role=Role.LOGITS)
        frame.local(wide)
        divided = scale(t, shifted)
        divided.tensor.role = Role.LOGITS
        frame.local(divided)
        found = _less(t, _gathered(t, divided), _normalized(t, _sequences(t, divided)))
        if divided.requires_grad:
            names = ("probabilities", "their products with the logits")
            t.append(
                "entropy",
                (wide, divided),
                (),
                forward=meanwhile(*workspaces(t, divided.axes, FP32, names, Role.LOGITS)),
                costs=(Move(10 * traffic(divided)),),
            )
        return t.op("mean of the loss", (found,), (1,), FP32, gradients=(LIKE,), role=Role.LOGITS)


def divided_in_place(t: Tape, logits: Value, axes: tuple[Size, ...]) -> Value:
    """`view.div_()` of a part of the logits. Backward their gradient is copied, that of the part
    too, divided, and written back (torch csrc/autograd/functions/tensor.cpp CopySlices::apply)."""
    out = same_storage(logits)
    part = Value(logits.tensor, axes, logits.dtype)
    names = ("gradient of the divided part", "the same, divided")
    again = workspaces(t, axes, logits.dtype, names, Role.LOGITS)
    gradients = gradients_of(t, (logits,))
    t.append(
        "div_",
        (logits,),
        (out,),
        forward=(),
        costs=(Move(2 * traffic(part)),),
        backward=(*made(*(g.tensor for g in gradients)), *meanwhile(*again)),
        gradients=gradients,
        backward_costs=(Move(2 * traffic(logits) + 6 * traffic(part), 4),),
    )
    return out


def _sequences(t: Tape, x: Value) -> Value:
    """The sequences of a batch one by one: views, whose gradients are stacked."""
    out = same_storage(x)
    node(t, "unbind", (x,), (out,), backward_costs=(Move(2 * traffic(x)),))
    return out


def _normalized(t: Tape, x: Value) -> Value:
    """`torch.logsumexp` of each sequence; the gradients of all are there before they are stacked.

    Source: torch aten/src/ATen/native/ReduceOps.cpp logsumexp_out_impl, FunctionsManual.cpp
    logsumexp_backward.
    """
    _, tokens, vocabulary = x.axes
    one = (tokens, vocabulary)
    exponentials = workspaces(t, one, x.dtype, ("exponentials of a sequence",), Role.LOGITS)
    names = ("differences of a sequence", "exponentials of a sequence")
    again = workspaces(t, one, x.dtype, names, Role.LOGITS)
    out = result(t, "logsumexp", x.axes[:-1], FP32, (x,), Role.LOGITS)
    gradients = _as_logits(gradients_of(t, (x,)))
    t.append(
        "logsumexp of each sequence",
        (x,),
        (out,),
        forward=(*meanwhile(*exponentials), *made(out.tensor)),
        saves=(x.tensor, out.tensor),
        costs=(Move(6 * traffic(x)),),
        backward=(*made(*again, *(g.tensor for g in gradients)), *freed(*again)),
        gradients=gradients,
        backward_costs=(Move(6 * traffic(x)),),
    )
    return out


def _gathered(t: Tape, x: Value) -> Value:
    """`torch.gather` of the labels' logits; the gradient is written into zeros."""
    labels = constant(t, "labels to score", x.axes[:-1], INT64, Role.LOGITS)
    out = t.op(
        "gather",
        (x,),
        x.axes[:-1],
        x.dtype,
        saves=(labels,),
        gradients=(LIKE,),
        backward_costs=(Move(traffic(x)),),
        role=Role.LOGITS,
    )
    _as_logits(t.ops[-1].gradients)
    t.touch(labels.tensor)
    return out


def _less(t: Tape, x: Value, y: Value) -> Value:
    """x less y, two numbers of each token."""
    out = result(t, "log-probabilities", x.axes, x.dtype, (x, y), Role.LOGITS)
    kept = passed(x) if x.requires_grad else ()
    of_y = gradients_of(t, (y,))
    t.append(
        "sub",
        (x, y),
        (out,),
        forward=made(out.tensor),
        backward=made(*(g.tensor for g in of_y)),
        gradients=(*kept, *of_y),
    )
    return out


def _softmax_of_sequences(t: Tape, x: Value) -> Value:
    """log_softmax of each sequence in its 16-bit type, and the labels' entries of it."""
    sequences, tokens, vocabulary = x.axes
    names = ("log-probabilities of each sequence",)
    if x.requires_grad:
        (kept,) = workspaces(t, x.axes, x.dtype, names, Role.LOGITS)
    else:  # a loop's variable is made anew before the old one goes
        axes = (minimum(sequences, 2) * tokens, vocabulary)
        (kept,) = workspaces(t, axes, x.dtype, names, Role.LOGITS)
    (zeros,) = workspaces(t, (tokens, vocabulary), x.dtype, ("zeros of a sequence",), Role.LOGITS)
    out = result(t, "log-probabilities", x.axes[:-1], x.dtype, (x,), Role.LOGITS)
    gradients = _as_logits(gradients_of(t, (x,)))
    t.append(
        "log_softmax of each sequence",
        (x,),
        (out,),
        forward=(*made(kept, out.tensor), *(() if x.requires_grad else freed(kept))),
        saves=(kept,),
        costs=(Move(2 * traffic(x)),),
        backward=(*made(zeros, *(g.tensor for g in gradients)), *freed(zeros)),
        gradients=gradients,
        backward_costs=(Move(4 * traffic(x)),),
    )
    if x.requires_grad:
        t.touch(kept)
    return out


def _entropy(t: Tape, x: Value) -> None:
    """Entropy without gradients: of a copy where a part of each sequence is read."""
    sequences, tokens, vocabulary = x.axes
    in_part = t.policy.stack.loss.temperature == "in place"
    whole = (minimum(sequences - 1, 1) * sequences * tokens, vocabulary)
    copied = workspaces(t, whole, x.dtype, ("completion's logits, copied",), Role.LOGITS)
    rows = (minimum(sequences * tokens, ROWS_OF_ENTROPY), vocabulary)
    names = ("log-probabilities of some rows", "their exponentials", "their products")
    some = workspaces(t, rows, x.dtype, names, Role.LOGITS)
    t.append(
        "entropy",
        (),
        (),
        forward=meanwhile(*(copied if in_part else ()), *some),
        costs=(Move((10 if in_part else 8) * traffic(x)),),
    )


def _as_logits(gradients: tuple[Gradient, ...]) -> tuple[Gradient, ...]:
    for gradient in gradients:
        if gradient.tensor is not None:
            gradient.tensor.role = Role.LOGITS
    return gradients
