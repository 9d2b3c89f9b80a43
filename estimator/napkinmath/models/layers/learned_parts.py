"""Parts of learned models: entrance, layers and exits whose operations are data of a form."""

from __future__ import annotations

from napkinmath.base.dtypes import INT64, find_dtype
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.config.train_config import Attention, Loss, RecomputeKind
from napkinmath.config.workload_config import Head
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import DECODER_TOKENS, Part
from napkinmath.ir.tape import Tape
from napkinmath.lowering.untrained import leave_untrained
from napkinmath.models.layers.attend import runs_eager
from napkinmath.models.layers.embedding import packed_positions
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.learned_composites import INPUT_IDS
from napkinmath.models.layers.learned_replay import (
    LearnedReplay,
    gradients_lie_by_heads,
)
from napkinmath.models.layers.learned_sizes import size_of
from napkinmath.models.layers.learned_types import variant_of
from napkinmath.models.layers.score_head import EmbeddingHead, mean_of
from napkinmath.models.tasks import CAUSAL, FEATURES, PICTURED
from napkinmath.ops.index import model_input

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.base.expr import Size
    from napkinmath.ir.recording import RecordingPolicy

_FORMS: dict[str, Mapping[str, Any]] = {}  # by digest, which parts carry instead of the data

LEARNED_SINCE = (5, 0)
"""First version of transformers whose classes run as those that were recorded."""


class LearnedPart(Part):
    """A block of a learned form: `piece` is 'entrance', 'end', 'middle', 'exit', 'after' or the number of a layer's
    kind."""

    digest: str
    piece: str

    def block(self, t: Tape, shared: dict[str, Value]) -> Mapping[str, Any]:
        """The block's data as the policy's variant has it."""
        return block_of(self.digest, self.piece, t, shared)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        return self.recorded(t, x, shared)

    def recorded(
        self, t: Tape, x: Value | None, shared: dict[str, Value], **how: Any
    ) -> Value | None:
        """The whole block; weights that its backward does not reach are not trained."""
        out = self.replay(t, shared, **how).run(x)
        leave_untrained(t, (out, *shared.values()))
        return out

    def replay(self, t: Tape, shared: dict[str, Value], **how: Any) -> LearnedReplay:
        """The block, ready to be recorded."""
        moved = _FORMS[self.digest]["moved"]
        return LearnedReplay(
            t, self.block(t, shared), shared, eager_only=self.eager_only, moved=moved, **how
        )

    @property
    def cached(self) -> tuple[Any, ...]:
        raise InputError(
            "generation of a learned architecture is not priced: its form was recorded without a"
            " cache"
        )

    @property
    def eager_only(self) -> bool:
        """Whether the class has no attention but transformers' own operations."""
        return _FORMS[self.digest]["eager_only"]


class LearnedEntrance(LearnedPart):
    """What runs before the first layer: embeddings, masks, tables."""

    padded: bool = False
    """The token embedding has a padding index."""
    positions: int = 0
    """Rows of a table of learned positions."""
    limit: int = 0
    """Length up to which the form was recorded: above, `limit_field` changes the operations."""
    limit_field: str = ""

    labels: tuple[Size, ...] = ()
    """Shape of the labels under the head of another task; else as the form has them."""

    @property
    def virtual_tokens(self) -> str:
        return DECODER_TOKENS if _FORMS[self.digest]["task"] == CAUSAL else ""

    def labelled(self, axes: tuple[Size, ...]) -> Part:
        return self.replace(labels=axes)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        _refuse_unseen(t, _FORMS[self.digest])
        if self.limit and t.at_least("s", self.limit + 1):
            raise InputError(
                f"sequences longer than {self.limit_field}={self.limit} run other operations, which"
                f" the learned form does not have; take --ctx {self.limit}, or `estimate trace`"
            )
        types = _FORMS[self.digest].get("input types", {})
        for name, axes in _FORMS[self.digest]["inputs"].items():
            sizes = tuple(size_of(n) for n in axes)
            found = self.labels if self.labels and name != INPUT_IDS else sizes
            dtype = find_dtype(types[name]) if types.get(name) else INT64
            if name in types and not types[name]:  # as the model's first parameter
                dtype = t.policy.parameter_dtype("conv")
            shared[name] = model_input(t, name, found, dtype)
        packed_positions(t, shared)
        return self.recorded(t, x, shared, padded=self.padded)

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        form = _FORMS[self.digest]
        if form.get("no embedding"):  # transformers finds none to put its hook on
            return False
        images = form["task"] in PICTURED
        return policy.pixels_require_grad if images else policy.inputs_require_grad

    def output_is_held(self, *, training: bool) -> bool:
        """What a first stage embeds itself has a name that its layers' results take."""
        form = _FORMS[self.digest]
        if "stages" not in form:
            return True
        modes = next(iter(form["variants"].values()))
        maker = next(iter(modes.values()))["entrance"]["ops"][-1][1]
        return not maker.startswith(f"{form['stages'][0]['path'].rpartition('.')[0]}.")

    @property
    def longest_sequence(self) -> int:
        return self.positions

    def example(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """Axes of what one of a batch is, the first input of a model that reads no text."""
        axes = next(iter(_FORMS[self.digest]["inputs"].values()))
        return tuple(Bindings(symbols)(size_of(n)) for n in axes[1:])

    @property
    def embeds_a_tuple(self) -> str:
        """The path of an embedding of patches that returns more than a tensor; '' without one."""
        return str(_FORMS[self.digest].get("embeds a tuple", ""))


class LearnedHead(CausalLmHead):
    """What follows the layers, the head over the vocabulary, and the loss."""

    digest: str

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        if 0 not in block_of(self.digest, "exit", t, {})["outlives"]:
            return super().record(t, x, shared)
        with t.scope() as frame:  # the head reads a view of them, which the model's forward holds
            frame.local(x)
            loss = super().record(t, x, shared)
        t.outliving = [one for one in t.outliving if one is not x.tensor]
        return loss

    def hidden(self, t: Tape, x: Value) -> Value:
        found = LearnedReplay(t, block_of(self.digest, "exit", t, {}), {}).run(x)
        assert found is not None
        return found

    def _rescaled(self, t: Tape, logits: Value) -> Value:
        found = LearnedReplay(t, block_of(self.digest, "after", t, {}), {}).run(logits)
        assert found is not None
        found.tensor.role = Role.LOGITS
        return found


class LearnedExit(LearnedPart):
    """What follows the layers, loss included, of a task other than the next token."""

    tied_to: str = ""
    """Path of the embedding whose weight the head shares."""

    @property
    def task(self) -> str:
        return str(_FORMS[self.digest]["task"])

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        if t.policy.config.loss is not Loss.HF:
            raise InputError(
                f"--loss {t.policy.config.loss.value} of a learned {self.task} head is not priced;"
                " leave it out"
            )
        found = self.recorded(t, x, shared, tied_to=self.tied_to)
        if self.task != FEATURES:
            return found
        assert found is not None
        with t.scope() as frame:  # the mean stands for a loss that others compute
            frame.local(found)
            return mean_of(t, found)

    def hidden(self, t: Tape, x: Value) -> Value:
        """The last hidden states, beside a pooler's output that nobody reads."""
        block = self.block(t, {})
        return LearnedReplay(t, {**block, "output": block["hidden"]}, {}).run(x) or x

    def ending_in(self, head: Head) -> Part | None:
        pools = head is Head.EMBEDDINGS and self.task == FEATURES
        return EmbeddingHead(exit=self) if pools else None


def _refuse_unseen(t: Tape, form: Mapping[str, Any]) -> None:
    """Raises InputError for what changes a model's operations and was not recorded, and for what
    the form does not agree with the trace on."""
    config, stack = t.policy.config, t.policy.stack
    asked = {
        "packed sequences behind a mask": t.policy.masks_packed,
        f"--stack {config.stack}": stack.model.transformers < LEARNED_SINCE,
        "torch.compile": config.compile,
        "selective checkpointing": config.recompute.kind is RecomputeKind.SELECTIVE,
        "context parallelism": config.parallel.context_parallel_size > 1,
        "expert parallelism": config.parallel.expert_parallel_size > 1,
    }
    if form["task"] != CAUSAL:
        asked["tensor parallelism"] = config.parallel.tensor_parallel_size > 1
    for what, is_asked in asked.items():
        if is_asked:
            raise InputError(
                f"{what} of a learned architecture is not priced: its operations were recorded"
                " without; leave it out, or use `estimate trace`"
            )

    off = {
        "quantized weights": config.quantization is not None,
        "eager attention": config.attention is Attention.EAGER,
        "autocast": t.policy.autocast is not None,
        "checkpointing": config.recompute.kind is not RecomputeKind.NONE,
        "adapters": config.adapter is not None,
    }
    for what in form.get("refuses", ()):
        if off[what]:
            raise InputError(
                f"{what} of learned {form['model_type']} is not priced: its form does not agree"
                " with the trace there; leave it out, or use `estimate trace`"
            )


def keep_form(form: Mapping[str, Any]) -> str:
    """Remembers a form for its parts; returns the digest that they carry."""
    digest = str(form["digest"])
    _FORMS[digest] = form
    return digest


def block_of(digest: str, piece: str, t: Tape, shared: dict[str, Value]) -> Mapping[str, Any]:
    """The data of a piece under the policy's types and its attention's gradients."""
    form = _FORMS[digest]
    modes = form["variants"][variant_of(t.policy, form)]
    if runs_eager(t, form["eager_only"]):
        return _piece(_by_batch(modes, "eager", t), piece)
    rows = _piece(_by_batch(modes, "rows", t), piece)
    if "heads" in modes and gradients_lie_by_heads(t, rows, shared):
        return _piece(_by_batch(modes, "heads", t), piece)
    return rows


def _by_batch(modes: Mapping[str, Any], mode: str, t: Tape) -> Mapping[str, Any]:
    """The form of a mode; a batch of one row may have one of its own."""
    own = modes.get(f"single {mode}")
    return modes[mode] if own is None or t.at_least("b", 2) else own


def _piece(form: Mapping[str, Any], piece: str) -> Mapping[str, Any]:
    name, _, number = piece.rpartition(" ")  # 'between 1', or a layer's kind alone
    return form[name or "layers"][int(number)] if number.isdecimal() else form[piece]
