"""The entrance of models with position embeddings: learned, or a table of sines."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, INT64
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import DECODER_TOKENS
from napkinmath.ir.symbols import b, h, s, v
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.models.layers.embedding import (
    FEATURES,
    Entrance,
    behind_virtual_tokens,
    token_ids,
    with_features,
)
from napkinmath.models.layers.masks import causal_masks
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.elementwise import dropout, scale
from napkinmath.ops.index import constant, embedding, input_leaf
from napkinmath.ops.matmul import linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.recording import RecordingPolicy


class PositionedEmbedding(Entrance):
    """Token embeddings plus position embeddings, both held until the model's forward returns."""

    name: str = "wte"
    position_name: str = "wpe"
    rows: int
    """Rows of the position table."""
    offset: int = 0
    """Rows before that of the first token (OPT)."""
    sines: bool = False
    """The table is a buffer of sines rather than learned."""
    per_sequence: bool = False
    """Positions are counted for each sequence from its mask (OPT)."""
    scaled: bool = False
    """The embedding module multiplies by sqrt(h)."""
    width: Size = 0
    """Width of the token embedding where a linear named project_in widens it (OPT 350M)."""
    norm: Norm | None = None
    norm_name: str = ""
    padded: bool = False
    dropout: float = 0.0
    masked: bool = False
    """The layers run eager only."""
    triangle: bool = False
    """A causal triangle of bools over all positions is kept as a buffer (GPTBigCode)."""
    around_images: bool = False
    """Features of images, which are there already, take the places of their tokens before positions
    are added (BLIP-2)."""

    @property
    def longest_sequence(self) -> int:
        return 0 if self.sines else self.rows - self.offset

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return not self.around_images and policy.inputs_require_grad

    def output_is_held(self, *, training: bool) -> bool:
        return False  # both terms of the sum are, which `record` publishes

    @property
    def virtual_tokens(self) -> str:
        return DECODER_TOKENS if self.labels == (b, s) else ""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = token_ids(t, shared, self.labels)
        if self.triangle:
            t.weight("bias", (self.rows, self.rows), dtype=BOOL, buffer=True)
        out = embedding(t, ids, self.name, v, self.width or h, padded=self.padded)
        if self.scaled:
            out = scale(t, out)
        out = input_leaf(t, out, of_pixels=self.around_images)
        out = behind_virtual_tokens(t, out, shared)
        if self.around_images:
            out = with_features(t, out, shared[FEATURES])
        causal_masks(t, shared, out.dtype, eager_only=self.masked)
        positions = self._positions(t, shared)
        if not self.sines:
            shared["position embeddings"] = Value(positions.tensor, positions.axes, positions.dtype)
        if self.width:
            out = linear(t, out, "project_in", h)
        shared["token embeddings"] = Value(out.tensor, out.axes, out.dtype)
        total = add_positions(t, out, positions)
        return dropout(t, total, self.dropout)

    def _positions(self, t: Tape, shared: dict[str, Value]) -> Value:
        ids = shared["position ids"]
        if self.per_sequence:
            ids = constant(t, "positions by mask", (b, s), INT64)
        if not self.sines:
            return embedding(t, ids, self.position_name, self.rows, h)
        with t.scope(self.position_name):
            table = t.weight("weights", (self.rows, h), dtype=t.policy.loaded_dtype, buffer=True)
            return constant(t, "positions", (1, s, h), table.tensor.dtype)


def add_positions(t: Tape, x: Value, positions: Value) -> Value:
    """x + positions, the same for every sequence unless they have a batch axis of their own; their
    gradient is summed over the batch."""
    summed = positions.axes[0] == 1 and t.at_least("b", 2)
    return t.op(
        "add",
        (x, positions),
        x.axes,
        x.dtype,
        gradients=(PASS, LIKE if summed else PASS),
        costs=(Move(3 * traffic(x)),),
        backward_costs=(Move(traffic(x)),) if summed else (),
    )
