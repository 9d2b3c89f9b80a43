"""The exit of a language model: final norm, language-model head and loss."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size, minimum, product
from napkinmath.config.train_config import Loss
from napkinmath.config.workload_config import Head
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Role, Value, Weight
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import v
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.elementwise import cast, copy, scale, tanh
from napkinmath.ops.index import slice_of
from napkinmath.ops.loss import (
    compiled_cross_entropy,
    cross_entropy,
    cross_entropy_in_place,
    output_chunks_cross_entropy,
)
from napkinmath.ops.matmul import linear

KEEPS_SOME_LOGITS = (4, 45)
"""Version of transformers since which Llama's kin feed `hidden_states[:, -num_logits_to_keep:, :]`
to the head."""


class CausalLmHead(Part):
    """Norm, head and next-token loss."""

    norm: Norm | None = Norm()
    norm_name: str = "model.norm"
    tied_to: str = ""
    """Path of the embedding whose weight the head shares."""
    bias: bool = False
    name: str = "lm_head"
    scaled: bool = False
    """Logits are multiplied or divided by a number (Granite, Cohere)."""
    hidden_scaled: bool = False
    """What it reads is divided by a number first (MiniCPM 3)."""
    capped: bool = False
    """Logits pass through a tanh (Gemma 2)."""
    project_out: Size = 0
    """Width to which a linear narrows the hidden states before the head (OPT 350M)."""
    project_name: str = ""
    upcast: bool = False
    """The model's own forward makes the logits fp32 (Llama 3.2 Vision's text alone)."""
    shared_loss_since: tuple[int, int] = (4, 46)
    """Version of transformers since which this model's loss is loss_utils.ForCausalLMLoss; before,
    its own forward computed it."""
    own_loss_upcasts: bool = True
    """Its own loss made an fp32 copy of the logits first (Llama's kin; GPT-2's kin did not)."""

    gets_no_labels: bool = False
    """The trainer reads the logits itself, in fp32, so that no patched loss of the model runs."""

    sliced: bool = False
    """The model's own forward cuts the logits to the labels' length (BLIP-2)."""
    own_loss_shifts: bool = False
    """Its own loss reads a copy of the shifted logits in versions too in which others' labels are
    shifted."""

    @property
    def registered_early(self) -> str:
        return self.project_name

    @property
    def task(self) -> str:
        return "causal-lm"

    def logits(self, t: Tape, x: Value, kept: Size = 0) -> Value:
        """What the model returns where it is given no labels; `kept` positions at the end alone."""
        hidden = self.hidden(t, x)
        with t.scope() as frame:
            frame.local(hidden)
            if kept:
                hidden = last_positions(t, hidden, kept)
                frame.local(hidden)
            found = linear(
                t,
                hidden,
                self.name,
                v,
                bias=self.bias,
                kind="head",
                role=Role.LOGITS,
                weight=self._tied(t, hidden),
            )
            if self.scaled or self.capped:
                found = self._rescaled(t, found)
            return cast(t, found, FP32, role=Role.LOGITS) if self.upcast else found

    def without_labels(self) -> Part:
        return self.replace(gets_no_labels=True)

    def unread_logits(self, t: Tape, hidden: Value) -> None:
        """The head's logits and their fp32 copy, which no loss reads."""
        axes = (*hidden.axes[:-1], v)
        width = self.weight(t, hidden).axes[-1]
        logits = t.tensor("unread logits", axes, hidden.dtype, Role.LOGITS)
        wide = t.tensor("unread logits in fp32", axes, FP32, Role.LOGITS)
        rows = product(hidden.axes[:-1])
        t.append(
            "language-model head",
            (hidden,),
            (),
            forward=((ALLOC, logits), (ALLOC, wide), (FREE, wide), (FREE, logits)),
            costs=(
                Gemm(rows, v, width, hidden.dtype),
                Move(3 * traffic(Value(logits, axes, hidden.dtype))),
            ),
        )

    def ending_in(self, head: Head) -> Part:
        from napkinmath.models.layers.workload_heads import other_head

        return other_head(self, head)

    def hidden(self, t: Tape, x: Value) -> Value:
        """What the head reads: the last hidden states normed, and narrowed where it is
        narrower."""
        with t.scope() as frame:
            frame.local(x)
            hidden = self.norm.record(t, x, self.norm_name) if self.norm else x
            hidden = scale(t, hidden) if self.hidden_scaled else hidden
            return (
                linear(t, hidden, self.project_name, self.project_out)
                if self.project_out
                else hidden
            )

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        hidden = self.hidden(t, x)
        stack = t.policy.stack
        with t.scope() as frame:
            frame.local(hidden)
            if t.policy.config.loss is Loss.CHUNKED and stack.loss.chunks:
                logits = linear(
                    t,
                    hidden,
                    self.name,
                    v,
                    bias=self.bias,
                    kind="head",
                    role=Role.LOGITS,
                    weight=self._tied(t, hidden),
                )
                head = next(w for w in t.weights if w.kind == "head")
                return output_chunks_cross_entropy(t, logits, head.value, stack.loss.chunks)
            if t.policy.config.loss is not Loss.HF:
                if t.policy.tensor is not None:
                    hidden = t.policy.tensor.enter(t, hidden)
                weight = self.weight(t, hidden)
                if t.policy.config.loss is Loss.CHUNKED:
                    return self.log_probabilities(t, hidden, weight)
                from napkinmath.models.layers.patched import liger_loss

                return liger_loss(t, hidden, weight)
            patched = t.policy.patches("loss") and not self.gets_no_labels
            if patched and (loss := self._patched(t, hidden)) is not None:
                return loss
            if (
                stack.loss.slices_whole
                and self.own_loss_upcasts
                and stack.model.transformers >= KEEPS_SOME_LOGITS
            ):
                for _ in hidden.axes:
                    hidden = slice_of(t, hidden, hidden.axes)
            logits = linear(
                t,
                hidden,
                self.name,
                v,
                bias=self.bias,
                kind="head",
                role=Role.LOGITS,
                weight=self._tied(t, hidden),
            )
            if _is_compiled(t, logits):
                frame.local(logits)
                return self._compiled(t, logits, shared)
            if self.scaled or self.capped:
                logits = self._rescaled(t, logits)
            if self.sliced:
                logits = slice_of(t, logits, logits.axes)
            own = stack.model.transformers < self.shared_loss_since
            widens = self.gets_no_labels or stack.loss.returns_fp32
            if self.upcast or (own and self.own_loss_upcasts) or widens:
                logits = cast(t, logits, FP32, role=Role.LOGITS)
            frame.local(logits)
            if t.policy.holds_logits and not stack.loss.shift_copy:
                shared["returned logits"] = logits
            loss = self._loss(t, logits, shared, own=own)
            returned_as_fp32(t, logits)
        return loss

    def _compiled(self, t: Tape, logits: Value, shared: dict[str, Value]) -> Value:
        """The loss inside the compiled forward, which returns the logits too."""
        if t.policy.holds_logits:
            shared["returned logits"] = logits
        loss = compiled_cross_entropy(t, logits)
        returned_as_fp32(t, logits)
        return loss

    def log_probabilities(self, t: Tape, hidden: Value, weight: Value, tokens: Size = 0) -> Value:
        """The labels' log-probabilities by TRL's function, or by ours on a head that it takes; of
        `tokens` labels at the end alone."""
        from napkinmath.ops.chunked_loss import chunked_log_probabilities

        patch = t.policy.patch
        if patch is None or patch.name != "napkinmath" or self.bias:
            return chunked_log_probabilities(t, hidden, weight, tokens)
        if t.policy.autocast is None and hidden.dtype is not weight.dtype:
            return chunked_log_probabilities(t, hidden, weight, tokens)
        from napkinmath.models.layers.patched import patched_log_probabilities

        return chunked_log_probabilities(t, hidden, weight, tokens, patched_log_probabilities)

    def _patched(self, t: Tape, hidden: Value) -> Value | None:
        """Head and loss in one patched operation, where the head is one that it takes."""
        from napkinmath.models.layers.patched import patched_loss, takes_adapted_head

        if self.bias or self.scaled or not t.policy.training:
            return None
        adapted = self.is_adapted(t)
        if adapted and not takes_adapted_head(t):
            return None
        return patched_loss(t, hidden, self.weight(t, hidden), self.name if adapted else "")

    def is_adapted(self, t: Tape) -> bool:
        """Whether an adapter sits on the head."""
        with t.scope(self.name):
            return t.policy.targets(t.module, "head")

    def plain_weight(self, t: Tape, hidden: Value) -> Value | None:
        """The weight of a head that every patched operation takes, trained or not; None for one with
        a bias or an adapter, and out of training."""
        if self.bias or self.scaled or not t.policy.training or self.is_adapted(t):
            return None
        return self.weight(t, hidden)

    def _loss(self, t: Tape, logits: Value, shared: dict[str, Value], *, own: bool) -> Value:
        """The loss function: its locals die when it returns. A class's own copies the logits that
        it shifts in every era (transformers models/qwen2_audio)."""
        stack = t.policy.stack
        chain = stack.loss.cross_entropy == "chain"
        shifts = stack.loss.shift_copy or (own and self.own_loss_shifts and chain)
        with t.scope() as frame:
            if not own and not stack.loss.narrow:
                logits = cast(t, logits, FP32, role=Role.LOGITS)
                frame.local(logits)
            if shifts:
                *batch, length, vocabulary = logits.axes
                shifted = slice_of(t, logits, (*batch, length - 1, vocabulary))
                if stack.loss.slices_whole:
                    shifted = slice_of(t, shifted, shifted.axes)
                if t.at_least("b", 2):
                    shifted = copy(t, shifted, name="shifted logits", role=Role.LOGITS)
                logits = shifted  # of one sequence they lie in a row already
                frame.local(logits)
                if t.policy.holds_logits and stack.loss.shift_copy:
                    shared["returned logits"] = logits
            if stack.loss.cross_entropy == "in place":
                return cross_entropy_in_place(t, logits)
            if stack.loss.cross_entropy != "chain":
                from napkinmath.lowering.parallel.vocabulary import vocabulary_loss

                wide = cast(t, logits, FP32, role=Role.LOGITS)
                return vocabulary_loss(t, wide, 1)
            return cross_entropy(t, logits, upcast=False, shifted=not shifts)

    def _rescaled(self, t: Tape, logits: Value) -> Value:
        steps = ((scale,) if self.scaled else ()) + ((scale, tanh, scale) if self.capped else ())
        for step in steps:
            with t.scope() as frame:
                frame.local(logits)
                logits = step(t, logits)
                logits.tensor.role = Role.LOGITS
        return logits

    def weight(self, t: Tape, hidden: Value) -> Value:
        """The head's weight, for an operation that multiplies by it itself."""
        axes = (v, hidden.axes[-1])
        with t.scope(self.name):
            return t.weight("weight", axes, kind="head", tied_to=self.tied_to).value

    def _tied(self, t: Tape, hidden: Value) -> Weight | None:
        if not self.tied_to:
            return None
        with t.scope(self.name):
            return t.weight("weight", (v, hidden.axes[-1]), kind="head", tied_to=self.tied_to)


def last_positions(t: Tape, hidden: Value, kept: Size) -> Value:
    """`hidden[:, -kept:, :]`, which a linear reads as rows: a copy where there are several
    sequences."""
    sequences, length, width = hidden.axes
    part = slice_of(t, hidden, (sequences, minimum(kept, length), width))
    return copy(t, part, name="hidden states of the last positions")


def _is_compiled(t: Tape, logits: Value) -> bool:
    """Whether a compiler sees the loss: not where ranks hold parts of the vocabulary."""
    config, split = t.policy.config, t.policy.tensor
    whole = split is None or not split.splits_loss(logits)
    return config.compile and whole and not t.policy.stack.loss.outside_compiler


def returned_as_fp32(t: Tape, logits: Value) -> None:
    """accelerate's copy of 16-bit logits that an autocast forward returns, where the stack makes
    it."""
    copies = t.policy.stack.loss.outputs_to_fp32 and t.policy.autocast is not None
    if copies and logits.dtype is not FP32:
        wide_outputs(t, logits)


def wide_outputs(t: Tape, logits: Value) -> None:
    """accelerate's fp32 copy of what an autocast forward returns, gone before the backward
    (utils/operations.py convert_outputs_to_fp32)."""
    made = t.tensor("returned logits in fp32", logits.axes, FP32, Role.LOGITS)
    t.append(
        "outputs to fp32",
        (logits,),
        (),
        forward=((ALLOC, made), (FREE, made)),
        costs=(Move(3 * traffic(logits)),),
    )
