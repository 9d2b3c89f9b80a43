"""Head and loss of litgpt's fine-tuning: logits by chunks of tokens, returned as fp32 and kept by
the loop until the next step.

Source: litgpt 0.4 lora.py GPT.forward (lm_head_chunk_size), utils.py chunked_cross_entropy,
finetune/lora.py fit; lightning fabric plugins/precision/half.py HalfPrecision.convert_output.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32, INT64, DType
from napkinmath.base.expr import Size, maximum, minimum
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value, Weight
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import b, dh, h, s, v
from napkinmath.ir.tape import Tape
from napkinmath.lowering.held_outputs import RETURNED
from napkinmath.lowering.quantized import unpacked
from napkinmath.models.layers.fused_qkv import fp32_tables
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.elementwise import copy, scale, tanh
from napkinmath.ops.index import embedding, model_input, slice_of
from napkinmath.ops.matmul import linear

CHUNK = 128  # tokens of a sequence whose logits are made, and whose loss is taken, together
PREVIOUS = "logits of the step before"


class LoopEmbedding(Part):
    """Token embedding of a loop whose variable `logits` still holds those of the step before."""

    rotary_size: int = 0
    scaled: bool = False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = shared["input_ids"] = model_input(t, "input ids", (b, s), INT64)
        shared["labels"] = model_input(t, "labels", (b, s), INT64)
        if t.policy.stack.loop.holds_last_step:
            held = t.tensor(PREVIOUS, (b, s, v), FP32, Role.LOGITS)
            shared[PREVIOUS] = Value(held, held.axes, FP32)
            t.append(PREVIOUS, (), (shared[PREVIOUS],), forward=((ALLOC, held),))
        fp32_tables(t, shared, self.rotary_size or dh)
        out = embedding(t, ids, "wte", v, h)
        return scale(t, out) if self.scaled else out


class ChunkedHead(Part):
    """Final norm, head, and a loss over chunks of tokens."""

    norm: Norm = Norm()
    bias: bool = False
    capped: bool = False
    """Logits pass through a tanh (Gemma 2)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = self.norm.record(t, x, "transformer.ln_f")
            logits = linear(t, hidden, "lm_head", v, bias=self.bias, role=Role.LOGITS)
            if (
                self.capped and t.policy.adapter is None
            ):  # the path by chunks returns them as they are
                logits = scale(t, tanh(t, scale(t, logits)))
            frame.local(logits)
            returned = _returned(t, logits)
        if PREVIOUS in shared:
            t.append("logits bound anew", (), (), forward=((FREE, shared.pop(PREVIOUS).tensor),))
        shared["returned logits"] = returned
        return self._loss(t, returned)

    def _loss(self, t: Tape, logits: Value) -> Value:
        head = next(w for w in t.weights if w.path.endswith("lm_head.weight"))
        if t.policy.adapter is not None:  # the head itself ran in chunks
            return chunked_loss(t, logits, head)
        with (
            t.scope() as frame
        ):  # logits[..., :-1, :] reshaped: a copy, then split into chunks of rows
            flat = copy(
                t, slice_of(t, logits, logits.axes), name="shifted logits", role=Role.LOGITS
            )
            frame.local(flat)
            return chunked_loss(t, flat, None)


def _returned(t: Tape, logits: Value) -> Value:
    """The fp32 copy that the precision plugin makes of every output; the gradient comes back a
    chunk at a time."""
    tensor = t.tensor(RETURNED, logits.axes, FP32, Role.LOGITS)
    out = Value(tensor, logits.axes, FP32, logits.requires_grad)
    whole = t.policy.adapter is None
    grad = (
        t.gradient_of(logits) if whole else _chunk(t, "gradient of a chunk", logits, logits.dtype)
    )
    grad.role = Role.LOGITS
    moved = traffic(logits, out)
    t.append(
        "to fp32",
        (logits,),
        (out,),
        forward=((ALLOC, tensor),),
        backward=((ALLOC, grad),),
        gradients=(Gradient(logits, grad),),
        costs=(Move(moved),),
        backward_costs=(Move(moved),),
    )
    return out


def chunked_loss(t: Tape, logits: Value, head: Weight | None) -> Value:
    """Cross-entropy of each chunk of tokens: log-probabilities of all chunks stay, gradients are
    made chunk by chunk.

    With `head` the gradient of a chunk goes through the head before the next chunk is begun, so
    that a packed head is unpacked while all other log-probabilities are still there. Without it the
    chunks' gradients are joined into one of the whole.
    """
    last = _chunk(t, "log-probabilities of a chunk", logits, FP32)
    others = t.tensor(
        "log-probabilities of the other chunks",
        (*logits.axes[:-2], maximum(s - CHUNK, 0), v),
        FP32,
        Role.LOGITS,
    )
    losses = t.tensor("loss of each token", (b, s), FP32, Role.LOGITS)
    out = Value(losses, (b, s), FP32, logits.requires_grad)
    first, second = (
        _chunk(t, name, logits, FP32)
        for name in ("gradient of log-probabilities", "gradient of a chunk")
    )
    steps: list[tuple[str, Tensor]] = [(ALLOC, first), (ALLOC, second), (FREE, first), (FREE, last)]
    if head is not None:
        half = _chunk(t, "gradient of a chunk in 16 bits", logits, BF16)
        dense = (
            unpacked(t, t.policy.format, head, t.policy.compute_dtype)
            if head.constants and t.policy.format is not None
            else []
        )
        steps += [
            (ALLOC, half),
            (FREE, second),
            *((ALLOC, x) for x in dense),
            *((FREE, x) for x in dense),
            (FREE, half),
            (FREE, others),
        ]
        grad = _chunk(t, "gradient of a chunk in fp32", logits, FP32)
        steps.append((ALLOC, grad))
    else:
        parts = t.tensor("gradients of all chunks", logits.axes, FP32, Role.LOGITS)
        grad = t.gradient_of(logits)
        steps += [(FREE, second), (FREE, others), (ALLOC, parts), (ALLOC, grad), (FREE, parts)]
        grad.role = Role.LOGITS
    moved = traffic(logits)
    forward = ((ALLOC, others), (ALLOC, last), (ALLOC, losses))
    if not logits.requires_grad:
        forward = (*forward, (FREE, others), (FREE, last))
    t.append(
        "cross_entropy by chunks",
        (logits,),
        (out,),
        forward=forward,
        backward=tuple(steps),
        gradients=(Gradient(logits, grad),),
        costs=(Move(2 * moved),),
        backward_costs=(Move(4 * moved),),
    )
    return t.op("mean of losses", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)


def _chunk(t: Tape, name: str, x: Value, dtype: DType) -> Tensor:
    axes: tuple[Size, ...] = (b, minimum(s, CHUNK), v)
    return Tensor(name, axes, dtype, Role.LOGITS, t.module)
