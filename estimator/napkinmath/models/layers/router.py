"""Routers of mixtures of experts: scores, the chosen experts, and the losses that balance them."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.dtypes import BOOL, FP32, INT64
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import b, e, h, s, topk
from napkinmath.ir.tape import Scope, Tape
from napkinmath.ops import routing
from napkinmath.ops.elementwise import add, cast, scale, sigmoid, softmax
from napkinmath.ops.index import concatenate, constant
from napkinmath.ops.matmul import dense_linear, linear

TOKENS = b * s


class Scoring(str, Enum):
    """How a router turns logits into the weights of the chosen experts."""

    SOFTMAX = "softmax over all experts, then top-k"
    CHOSEN = "top-k of the logits, then softmax over the chosen"
    SOFTMAX_BIASED = "softmax, top-k with a correction bias, gathered"
    SIGMOID = "sigmoid, top-k with a correction bias, gathered"
    SIGMOID_CHOSEN = "top-k of the logits, then sigmoid"
    SPARSE_MIXER = "sparse mixer: two masked softmaxes with sampled choices (Phi-3.5-MoE)"


class Router(Record):
    """Scores every expert for every token and picks `topk` of them; its logits are tokens x
    experts."""

    scoring: Scoring = Scoring.SOFTMAX
    name: str = "gate"
    bias: bool = False
    bias_outside: bool = False
    """The correction bias belongs to the block around the router (MiniMax)."""
    fp32: bool = False
    """The product itself runs in fp32 on casts of x and of the weight (DeepSeek)."""
    fp32_scores: bool = True
    """Scores are computed in fp32."""
    normalized: bool = False
    """The weights of a token's experts are divided by their sum."""
    rescaled: bool = False
    """The weights are multiplied by a constant."""
    cast_back: bool = False
    """The weights are returned in the type of the hidden states."""
    groups: int = 0
    """Experts are first narrowed down to the best of this many groups; 0 is no grouping."""
    chosen_groups: int = 0
    """Groups in which all of a token's experts lie; 0 is any."""
    adapted_as: tuple[str, ...] = ()
    """Module names of transformers 4 that PEFT translates into an adapter on the router's
    parameter."""
    correction_bias: bool = False
    """A buffer of one fp32 number an expert is added for the choice (not for the weight)."""
    linear: str = ""
    """Name of the linear module within the router that has its weight, which PEFT adapts as any
    other (Hunyuan)."""
    kept_fp32: bool = False
    """The weight is fp32 whatever the model is loaded in, the bias a parameter that is never trained,
    and autocast is switched off around the product (ERNIE 4.5)."""

    @property
    def limit(self) -> tuple[int, int] | None:
        """(groups of experts, those in which a token's lie) where that is fewer."""
        return (self.groups, self.chosen_groups) if self.chosen_groups else None

    def record(self, t: Tape, x: Value, caller: Scope) -> tuple[Value, Value]:
        """Weights and indices, of axes (tokens, topk), for x of axes (tokens, h). The caller holds
        the logits too, which routers of transformers 5 return (models/mixtral `_, weights, indices
        = self.gate(...)`)."""
        with t.scope(self.name) as frame:
            if self.linear:
                logits = self._of_module(t, frame, x)
                weights, indices = self._choose(t, frame, logits)
                weights = cast(t, weights, logits.dtype)
                frame.local(weights, indices)
                return weights, indices
            weight = self._weight(t)
            bias = t.weight("bias", (e,), kind="router").value if self.bias else None
            source = x.dtype
            if self.fp32:
                x, weight = cast(t, x, FP32), cast(t, weight, FP32)
            logits = dense_linear(
                t, x, weight, bias, label="router logits", outside_autocast=self.kept_fp32
            )
            frame.local(logits)
            if not t.policy.stack.model.is_transformers_before((5, 0)):
                caller.local(logits)
            weights, indices = self._choose(t, frame, logits)
            if self.cast_back:
                weights = cast(t, weights, source if self.fp32 else logits.dtype)
            frame.local(weights, indices)
            return weights, indices

    def _of_module(self, t: Tape, frame: Scope, x: Value) -> Value:
        """The logits of a router whose weight lies in an fp32 linear module."""
        wide = cast(t, x, FP32)
        frame.local(wide)
        with t.scope(self.linear):
            weight = t.weight("weight", (e, h), kind="linear", dtype=FP32)
        logits = linear(t, wide, self.linear, e, weight=weight)
        frame.local(logits)
        return logits

    def _weight(self, t: Tape) -> Value:
        weight = t.weight("weight", (e, h), kind="router", dtype=FP32 if self.kept_fp32 else None)
        if t.policy.adapts_parameter(self.adapted_as, weight.path):
            from napkinmath.lowering.expert_adapters import adapted_matrix

            return adapted_matrix(t, weight)
        return weight.value

    def _choose(self, t: Tape, frame: Scope, logits: Value) -> tuple[Value, Value]:
        if self.scoring in (Scoring.CHOSEN, Scoring.SIGMOID_CHOSEN):
            values, indices = routing.top_k(
                t, cast(t, logits, FP32) if self.fp32_scores else logits, topk
            )
            if self.scoring is Scoring.SIGMOID_CHOSEN:
                return sigmoid(t, values), indices
            return softmax(t, values, dtype=values.dtype), indices  # a type that the call names
        if self.scoring is Scoring.SPARSE_MIXER:
            return self._sparse_mixer(t, frame, logits)
        wide = cast(t, logits, FP32) if self.fp32_scores else logits
        if self.scoring in (Scoring.SIGMOID, Scoring.SOFTMAX_BIASED):
            weights, indices = self._chosen_apart(
                t, frame, sigmoid(t, wide) if self.scoring is Scoring.SIGMOID else softmax(t, wide)
            )
        else:
            scores = softmax(t, wide)
            frame.local(scores)
            if self.groups > 1:
                scores = self._grouped(t, frame, scores)
            weights, indices = routing.top_k(t, scores, topk)
        if self.normalized:
            weights = routing.divide_rows_(t, weights, routing.row_sum(t, weights))
        if self.rescaled:
            weights = scale(t, weights)
        return weights, indices

    def _sparse_mixer(self, t: Tape, frame: Scope, logits: Value) -> tuple[Value, Value]:
        """One choice after the other: scores far from the best are masked out, a softmax, a sampled
        expert, its weight gathered.

        Source: transformers 5.23 models/phimoe/modeling_phimoe.py sparsemixer, PhimoeMultiplier.
        """
        multipliers: list[Value] = []
        rows = logits.axes[0]
        one = (rows, 1)
        for _ in range(2):
            far = constant(t, "far from the best", logits.axes, BOOL)
            gates = t.op(
                "masked_fill",
                (logits, far),
                logits.axes,
                logits.dtype,
                saves=(far,),
                gradients=("like", None),
            )
            scores, chosen = softmax(t, gates), constant(t, "sampled expert", one, INT64)
            weight = t.op(
                "multiplier",
                (scores, chosen),
                one,
                scores.dtype,
                saves=(scores, chosen),
                gradients=("like", None),
            )
            frame.local(far, gates, scores, chosen, weight)
            multipliers.append(weight)
        weights = concatenate(t, (multipliers[0], multipliers[1]), (rows, topk))
        return weights, constant(t, "chosen experts", (rows, topk), INT64)

    def _chosen_apart(self, t: Tape, frame: Scope, scores: Value) -> tuple[Value, Value]:
        """Experts chosen by their scores and a bias, weighed by the scores alone."""
        frame.local(scores)
        choice = Value(scores.tensor, scores.axes, scores.dtype)
        if self.correction_bias:
            wide = t.policy.parameter_dtype("buffer") if self.bias_outside else FP32
            kind = "statistics" if self.kept_fp32 else "buffer"
            buffer = t.weight(
                "e_score_correction_bias", (e,), kind=kind, dtype=wide, buffer=not self.kept_fp32
            ).value
            choice = add(t, choice, Value(buffer.tensor, choice.axes, FP32))
            frame.local(choice)
        if self.groups > 1:
            choice = self._grouped(t, frame, choice)
        indices = constant(t, "top-k indices", (scores.axes[0], topk), INT64)
        return routing.gather(t, scores, indices), indices

    def _grouped(self, t: Tape, frame: Scope, scores: Value) -> Value:
        """Scores of experts outside the best groups masked out: two masks of tokens x experts, and
        the masked copy."""
        mask = constant(t, "group mask", scores.axes, FP32)
        frame.local(mask)
        inverse = constant(t, "inverted group mask", scores.axes, BOOL)
        return t.op(
            "masked_fill",
            (scores, inverse),
            scores.axes,
            scores.dtype,
            saves=(inverse,),
            gradients=("like", None),
        )
