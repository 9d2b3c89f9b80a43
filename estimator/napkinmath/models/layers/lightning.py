"""Lightning attention (MiniMax Text-01 and M1): linear attention by blocks of tokens, with a decay
for each head.

transformers loops over the blocks in Python. The first blocks alike are one operation here; the
last two are recorded as they run, because what lives in a block is largest at the last. Source:
transformers 5.23 models/minimax/modeling_minimax.py MiniMaxLightningAttention.forward,
MiniMaxDecoderLayer.forward.
"""

from __future__ import annotations

from napkinmath.base.dtypes import DType
from napkinmath.base.expr import Size, ceil_div
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, Grows
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Tensor, Value, allocs, frees
from napkinmath.ir.symbols import a, b, dh, h, s
from napkinmath.ir.tape import Scope, Tape
from napkinmath.models.layers.activations import activate
from napkinmath.models.layers.decoder import AttentionLayer
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.elementwise import add, copy, mul, promote, scale, sigmoid
from napkinmath.ops.index import chunk, concatenate, constant, slice_of
from napkinmath.ops.matmul import bmm, linear
from napkinmath.ops.whole_scores import dense_operand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.models.layers.decoder import Sublayer

STATE: tuple[Size, ...] = (b, a, dh, dh)


class LightningAttention(Record):
    """Products within a block of tokens, and with the state that the blocks before have left."""

    block: int = 256
    activation: str = "silu"
    norm: Norm = Norm()

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The state of each head, whatever the length."""
        return (Cached(name="state", axes=(a, dh, dh), grows=Grows.NOT),)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Mixes x of axes (b, s, h)."""
        with t.scope("self_attn") as frame:
            frame.local(x)
            decays = self._decays(t)
            packed = activate(t, linear(t, x, "qkv_proj", 3 * a * dh), self.activation)
            frame.local(packed)
            heads = chunk(t, t.view(packed, (b, s, a, 3 * dh)), (dh, dh, dh), "split")
            q, key, value = (t.view(part, (b, a, s, dh)) for part in heads)
            out = copy(t, self._blocks(t, frame, q, key, value, decays), (b, s, a * dh), "reshape")
            with t.scope() as inner:
                inner.local(out)
                normed = self.norm.record(t, out, "norm")
            gate = sigmoid(t, linear(t, x, "output_gate", a * dh))
            gated = mul(t, gate, normed)
            frame.local(gated)
            return linear(t, gated, "out_proj", h)

    def _decays(self, t: Tape) -> dict[str, Value]:
        """Buffers: the rate of each head, and what it makes of the positions of a block."""
        dtype = t.policy.loaded_dtype
        axes: dict[str, tuple[Size, ...]] = {
            "slope_rate": (a, 1, 1),
            "query_decay": (a, self.block, 1),
            "key_decay": (a, self.block, 1),
            "diagonal_decay": (1, a, self.block, self.block),
        }
        return {
            name: t.weight(name, shape, dtype=dtype, buffer=True).value
            for name, shape in axes.items()
        }

    def _blocks(
        self,
        t: Tape,
        frame: Scope,
        q: Value,
        key: Value,
        value: Value,
        decays: dict[str, Value],
    ) -> Value:
        """The outputs of all blocks, of axes (b, a, s, dh)."""
        outputs: list[Value] = []
        count = ceil_div(s, self.block)
        if t.at_least("s", 2 * self.block + 1):
            earlier, state = self._earlier(t, q, key, value, count - 2)
            outputs.append(earlier)
        else:
            state = constant(t, "state before the first block", STATE, value.dtype)
        frame.local(state)
        held: list[Value] = []
        if t.at_least("s", self.block + 1):
            state, held = self._one(t, frame, (q, key, value), state, decays, outputs, self.block)
        rest = s - (count - 1) * self.block
        self._one(t, frame, (q, key, value), state, decays, outputs, rest, before=held)
        return concatenate(t, tuple(outputs), (b, a, s, dh))

    def _one(
        self,
        t: Tape,
        frame: Scope,
        whole: tuple[Value, Value, Value],
        state: Value,
        decays: dict[str, Value],
        outputs: list[Value],
        length: Size,
        before: list[Value] | None = None,
    ) -> tuple[Value, list[Value]]:
        """One block; `before` are the locals of the block before, which its own names replace.
        Returns the state after it and its locals."""
        last = before is not None
        rows: tuple[Size, ...] = (b, a, length, dh)
        square: tuple[Size, ...] = (b, a, length, length)
        heads, olds = b * a, list(before or ())
        q, key, value = (slice_of(t, x, rows) for x in whole)
        fading = constant(t, "decay of a block", (a, 1, 1), decays["slope_rate"].dtype)
        frame.local(fading)

        def named(new: Value) -> Value:
            frame.local(new)
            if olds:
                frame.release(olds.pop(0))
            return new

        scores = named(
            bmm(t, _dense(t, q), _dense(t, key), heads, length, length, dh, square, name="q k^T")
        )
        weights = mul(t, scores, _part(decays["diagonal_decay"], (a, length, length)))
        inside = named(
            _summand(
                t, bmm(t, weights, _dense(t, value), heads, length, dh, length, rows, name="inside")
            )
        )
        faded = mul(t, q, _part(decays["query_decay"], (a, length, 1)))
        read = named(
            _summand(
                t, bmm(t, _dense(t, faded), state, heads, length, dh, dh, rows, name="q state")
            )
        )
        out = add(t, read, inside)
        outputs.append(out)
        if last:  # nothing reads the state after it
            frame.local(out)
            key, value, state = (Value(x.tensor, x.axes, x.dtype) for x in (key, value, state))
        kept = _dense(t, mul(t, key, _part(decays["key_decay"], (a, length, 1))))
        taken = _dense(t, value)
        if last:
            frame.graph(kept, taken)
        added = named(bmm(t, kept, taken, heads, dh, dh, length, STATE, name="k^T v"))
        after = add(t, mul(t, state, fading), added)
        frame.local(after)
        frame.release(state)
        return after, [scores, inside, read, added]

    def _earlier(
        self, t: Tape, q: Value, key: Value, value: Value, count: Size
    ) -> tuple[Value, Value]:
        """All blocks but the last two, of which there are `count`: their outputs and the state
        after them."""
        long = count * self.block
        rows: tuple[Size, ...] = (b, a, long, dh)
        one: tuple[Size, ...] = (b, a, self.block, dh)
        square: tuple[Size, ...] = (b, a, self.block, self.block)
        parts = tuple(slice_of(t, x, rows) for x in (q, key, value))
        wide = promote(q.dtype, t.policy.loaded_dtype)
        dtype, factor = t.policy.autocast or q.dtype, t.policy.autocast or wide
        operands = ("queries", "keys", "values", "values again") if t.at_least("b", 2) else ()
        saves = [
            *(t.tensor(f"{name} of blocks", rows, dtype) for name in operands),
            t.tensor("decayed scores", (count, *square), factor),
            t.tensor("decayed queries", (b, a, long - self.block, dh), factor),
            t.tensor("decayed keys", rows, factor),
            t.tensor("state before each block", (count, *STATE), factor),
        ]
        needs = any(x.requires_grad for x in parts)
        out = Value(t.tensor("outputs of blocks", rows, factor), rows, factor, needs)
        state = Value(t.tensor("state", STATE, wide), STATE, wide, needs)
        work = _work(t, "", square, one, dtype)
        gemms = (
            Gemm(self.block, self.block, dh, dtype, 2 * b * a * count),
            Gemm(self.block, dh, dh, dtype, 2 * b * a * count),
        )
        moves = Move(12 * traffic(out), 12)
        kept = saves if needs else ()
        forward = (*allocs(*kept, out.tensor, *work, state.tensor), *frees(*work))
        gradients = [
            Gradient(x, t.tensor(f"grad of {x.tensor.name}", one, dtype, Role.WORKSPACE))
            for x in parts
            if x.requires_grad
        ]
        again = _work(t, "grad of ", square, one, dtype)
        made = allocs(*(g.tensor for g in gradients if g.tensor is not None))
        t.append(
            "lightning attention of earlier blocks",
            parts,
            (out, state),
            forward=forward,
            saves=(*saves, *(() if operands else (x.tensor for x in parts))),
            costs=(*gemms, moves),
            backward=(*allocs(*again), *made, *frees(*again)) if needs else (),
            gradients=gradients,
            backward_costs=(*gemms, *gemms, moves, moves) if needs else (),
        )
        t.touch(*kept)
        return out, state


def _work(
    t: Tape, prefix: str, square: tuple[Size, ...], one: tuple[Size, ...], dtype: DType
) -> list[Tensor]:
    """What lives while a block runs."""
    return [
        t.tensor(f"{prefix}scores of a block", square, dtype, Role.WORKSPACE),
        *(
            t.tensor(f"{prefix}{name} of a block", one, dtype, Role.WORKSPACE)
            for name in ("inner product", "product with the state")
        ),
    ]


def _dense(t: Tape, x: Value) -> Value:
    return dense_operand(t, x, dense=False)


def _summand(t: Tape, product: Value) -> Value:
    """A product that is part of the output: its gradient, a slice of the whole's, is copied as an
    operand is."""
    copies = t.at_least("b", 2)
    return t.view(product, product.axes, copies_gradient=True) if copies else product


def _part(buffer: Value, axes: tuple[Size, ...]) -> Value:
    """A slice of a buffer."""
    return Value(buffer.tensor, axes, buffer.dtype)


class NormedResidualLayer(AttentionLayer):
    """norm(x), then that plus attention of it; norm of the sum, then that plus feed-forward of it:
    both sides multiplied by numbers of the config (MiniMax)."""

    mlp: Sublayer
    norm: Norm = Norm()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            tables = (shared[name].tensor for name in ("cos", "sin") if name in shared)
            t.touch(*tables)  # an argument of every layer, which its checkpoint holds
            middle = self._half(t, x, self.attention, "input_layernorm", shared)
            return self._half(t, middle, self.mlp, "post_attention_layernorm", shared)

    def _half(
        self, t: Tape, x: Value, part: Sublayer, name: str, shared: dict[str, Value]
    ) -> Value:
        with t.scope() as frame:
            normed = self.norm.record(t, x, name)
            frame.local(normed)
            out = part.record(t, normed, shared)
            frame.local(out)
            return add(t, scale(t, normed), scale(t, out))
