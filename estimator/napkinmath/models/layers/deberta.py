"""DeBERTa V2 and V3: attention whose scores add content-to-position and position-to-content
products; transformers has it eager only.

Source: transformers 5.23 models/deberta_v2/modeling_deberta_v2.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import a, b, dh, h, s, v
from napkinmath.ir.tape import LIKE, Scope, Tape
from napkinmath.models.layers.embedding import Entrance
from napkinmath.ops.elementwise import add, add_, add_broadcast, copy, dropout, mul, scale, softmax
from napkinmath.ops.index import constant, embedding, input_leaf, model_input
from napkinmath.ops.matmul import bmm, linear
from napkinmath.ops.norm import layer_norm
from napkinmath.ops.routing import gather


class DebertaEmbedding(Entrance):
    """Token (and position and segment) embeddings, LayerNorm, the padding mask, dropout; then what
    all layers share."""

    reach: int
    """Positions that the model can number."""
    positions: int = 0
    segments: int = 0
    distances: int
    """Rows of the table of relative positions."""
    normed: bool = True
    """The table goes through a LayerNorm first."""
    dropout: float = 0.1

    @property
    def longest_sequence(self) -> int:
        return self.positions

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = shared["input_ids"] = model_input(t, "input ids", (b, s), INT64)
        shared["labels"] = model_input(t, "labels", self.labels, INT64)
        shared["padding"] = padding = constant(t, "attention mask", (b, s, 1), FP32)
        with t.scope("embeddings") as frame:
            t.weight("position_ids", (1, self.reach), dtype=INT64, buffer=True)
            total = input_leaf(t, embedding(t, ids, "word_embeddings", v, h, padded=True))
            frame.local(total)
            if self.positions:
                places = embedding(
                    t,
                    constant(t, "position ids", (1, s), INT64),
                    "position_embeddings",
                    self.positions,
                    h,
                )
                total = add_broadcast(t, total, places)
            if self.segments:
                segments = constant(t, "token type ids", (b, s), INT64)
                total = add(
                    t, total, embedding(t, segments, "token_type_embeddings", self.segments, h)
                )
            normed = layer_norm(t, total, name="LayerNorm")
            mask = (
                constant(t, "mask in the model's type", (b, s, 1), normed.dtype)
                if normed.dtype is not FP32
                else padding
            )
            out = dropout(t, mul(t, normed, mask), self.dropout)
        shared["pairs"] = constant(t, "mask of pairs", (b, 1, s, s), FP32)
        self._distances(t, shared)
        return out

    def _distances(self, t: Tape, shared: dict[str, Value]) -> None:
        """Bucketed distance of every pair as int64, with the steps of make_log_bucket_position; the
        table of relative positions."""
        with t.scope() as frame:
            steps = [
                constant(t, f"relative positions, step {i + 1}", (s, s), INT64) for i in range(3)
            ]
            frame.local(*steps)
            logs = [
                constant(t, f"logarithmic positions, step {i + 1}", (s, s), FP32) for i in range(3)
            ]
            frame.local(*logs)
            shared["distances"] = constant(t, "relative positions", (1, 1, s, s), INT64)
        with t.scope("encoder"):
            with t.scope("rel_embeddings"):
                table = t.weight("weight", (self.distances, h), kind="embedding").value
            if table.requires_grad and not self.normed:
                raise InputError(
                    "config field norm_rel_ebd names no layer_norm: a trained table that layers read"
                    " as it is is not priced; add --lora, or `estimate trace --model PATH` runs it"
                )
            shared["distance table"] = (
                layer_norm(t, table, name="LayerNorm") if self.normed else table
            )


class DisentangledAttention(Record):
    """DisentangledSelfAttention, before the output projection."""

    shared_keys: bool = True
    """Relative positions go through the query and key projections of the tokens."""
    types: tuple[str, ...] = ("p2c", "c2p")
    distances: int
    dropout: float = 0.1
    table_dropout: float = 0.1

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h); returns (b, s, a · dh)."""
        names = (
            ("query_proj", "key_proj") if self.shared_keys else ("pos_query_proj", "pos_key_proj")
        )
        table, count, scores = shared["distance table"], self.distances, (b, a, s, s)
        with t.scope() as frame:
            frame.local(x)
            q, key, value = (
                self._heads(t, x, name) for name in ("query_proj", "key_proj", "value_proj")
            )
            frame.local(q, key, value)
            weights = bmm(t, q, scale(t, key), b * a, s, s, dh, scores, name="q k^T")
            frame.local(weights)
            table = dropout(t, table, self.table_dropout)
            frame.local(table)
            with t.scope() as inner:
                bias: Value | None = None
                row = t.view(table, (1, count, h))
                made: dict[str, Value] = {}
                for kind, name in (("p2c", names[0]), ("c2p", names[1])):
                    if kind in self.types:
                        made[kind] = self._table_heads(t, row, name)
                        inner.local(made[kind])
                for kind, side in (("c2p", q), ("p2c", key)):
                    if kind in self.types:
                        picked = self._positions(t, inner, side, made[kind], shared)
                        bias = (
                            add_(t, bias, scale(t, picked))
                            if bias is not None
                            else scale(t, scale(t, picked))
                        )
                        inner.local(bias)
            if bias is not None:
                frame.local(bias)
                products, weights = weights, add(t, weights, bias)
                frame.release(products)
            mask = t.op("to", (shared["pairs"],), (b, 1, s, s), BOOL, label="mask of pairs as bool")
            frame.local(mask)
            blocked = constant(t, "masked pairs", (b, 1, s, s), BOOL)
            weights = t.op(
                "masked_fill",
                (weights, blocked),
                scores,
                weights.dtype,
                saves=(blocked,),
                gradients=(LIKE, None),
                costs=(Move(2 * traffic(weights)),),
                backward_costs=(Move(2 * traffic(weights)),),
            )
            frame.local(weights)
            scored, weights = weights, softmax(t, weights)
            weights = dropout(t, weights, self.dropout)
            frame.local(weights)
            t.touch(scored.tensor)
            out = bmm(t, weights, value, b * a, s, dh, s, (b, a, s, dh), name="scores v")
            return t.view(copy(t, out), (b, s, a * dh))

    def _heads(self, t: Tape, x: Value, name: str) -> Value:
        projected = linear(t, x, name, a * dh, bias=True)
        return copy(t, t.view(t.view(projected, (b, s, a, dh)), (b, a, s, dh)))

    def _table_heads(self, t: Tape, row: Value, name: str) -> Value:
        """The table projected, laid out by head, repeated for every sequence."""
        projected = linear(t, row, name, a * dh, bias=True)
        one = copy(t, t.view(projected, (1, a, self.distances, dh)))
        return t.op(
            "repeat",
            (one,),
            (b, a, self.distances, dh),
            one.dtype,
            gradients=(LIKE,),
            costs=(
                Move(
                    traffic(one) + traffic(Value(one.tensor, (b, a, self.distances, dh), one.dtype))
                ),
            ),
            backward_costs=(
                Move(traffic(Value(one.tensor, (b, a, self.distances, dh), one.dtype))),
            ),
        )

    def _positions(
        self, t: Tape, frame: Scope, side: Value, table: Value, shared: dict[str, Value]
    ) -> Value:
        """Products with every distance, of which each pair picks its own; the picks, int64 of s²,
        are kept."""
        products = bmm(
            t,
            side,
            table,
            b * a,
            s,
            self.distances,
            dh,
            (b, a, s, self.distances),
            name="relative scores",
        )
        distances = shared["distances"]
        moved = constant(t, "distances from zero", distances.axes, INT64)
        t.touch(distances.tensor)
        picks = constant(t, "picked distances", distances.axes, INT64)
        t.touch(moved.tensor)
        frame.local(picks, products)
        picked = gather(t, products, Value(picks.tensor, (b, a, s, s), INT64))
        frame.release(products)
        frame.local(picked)
        return picked
