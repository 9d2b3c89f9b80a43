"""Mixture-of-experts feed-forward: routers, experts held as 3-D parameters, and the block that
joins them with shared experts."""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value, Weight
from napkinmath.ir.symbols import e, fe, topk
from napkinmath.ir.tape import Scope, Tape
from napkinmath.lowering.packed_parameters import whole_parameter
from napkinmath.models.layers.mlp import ACTIVATIONS
from napkinmath.models.layers.router import TOKENS, Router
from napkinmath.ops import routing
from napkinmath.ops.elementwise import add, add_, cast, mul, scale, sigmoid
from napkinmath.ops.index import chunk, constant, slice_of
from napkinmath.ops.matmul import linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from napkinmath.ir.recording import SplitTensors

    class FeedForward(Protocol):
        """Any feed-forward that reads hidden states and returns what is added to them."""

        def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value: ...


class ExpertWeights:
    """One expert parameter as recorded: its weight, bias, low-rank factors if adapted, output width,
    and how many projections share it."""

    __slots__ = ("bias", "factors", "fused", "outputs", "weight")

    def __init__(
        self,
        weight: Weight,
        bias: Value | None,
        factors: tuple[Value, Value] | None,
        outputs: Size,
        fused: int,
    ) -> None:
        self.weight, self.bias, self.factors = weight, bias, factors
        self.outputs, self.fused = outputs, fused


class Experts(Record):
    """All experts of a layer as two (or one gated) 3-D parameters, run by grouped products over
    rows sorted by expert.

    The default of transformers 5 on CUDA of compute capability 8.0 up
    (`experts_implementation="grouped_mm"`). bitsandbytes does not quantize 3-D parameters; PEFT
    adapts them only for the model types whose old linears it translates. Source: transformers 5.23
    integrations/moe.py grouped_mm_experts_forward.
    """

    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    transposed: bool = False
    """Weights are (inputs, outputs), as in GPT-OSS."""
    clamped: bool = False
    """GPT-OSS's gate: interleaved halves, both clamped, x * sigmoid(alpha x) * (up + 1)."""
    width: Size = fe
    adapted_as: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Module names of transformers 4 that PEFT translates into adapters on the first and on the
    second parameter."""
    modules: tuple[str, str, str] | None = None
    """Linears (gate, up, down) of the modules that transformers 4 held the experts as; None where
    it held parameters too."""
    looped: bool = False
    """Transformers 4 held them as parameters too and ran one expert after the other (models/
    granitemoe/modeling_granitemoe.py GraniteMoeParallelExperts.forward)."""
    name: str = "experts"

    def record(
        self,
        t: Tape,
        x: Value,
        weights: Value,
        indices: Value,
        limit: tuple[int, int] | None = None,
    ) -> Value:
        """The weighted sum of each token's experts; x is (tokens, h), weights and indices are
        (tokens, topk). `limit` is the router's."""
        tokens = x.axes[0]
        rows = tokens * topk
        if t.policy.stack.model.fused_experts:
            from napkinmath.models.layers.fused_experts import run_fused

            return run_fused(self, t, x, weights, limit)
        if self.modules is not None and t.policy.stack.model.is_transformers_before((5, 0)):
            from napkinmath.models.layers.expert_modules import (
                experts_by_module,
                runs_experts_as_modules,
            )

            if runs_experts_as_modules(t):
                return experts_by_module(t, x, weights, self.modules, self.width, self.activation)
        split = t.policy.experts
        with t.scope(self.name) as frame:
            frame.local(x, weights, indices)
            if split is None:
                return self._grouped(t, x, weights, indices, tokens, topk, e)
            received, order = split.dispatch(t, frame, x, indices, rows, e)
            arrived = split.arrived(rows)
            ones, one = (
                constant(t, "weights of received rows", (arrived, 1), x.dtype),
                constant(t, "expert of each received row", (arrived, 1), INT64),
            )
            frame.local(ones, one)
            out = self._grouped(t, received, ones, one, arrived, 1, split.experts(e))
            return cast(t, split.combine(t, out, weights, order, rows, tokens), x.dtype)

    def _grouped(
        self,
        t: Tape,
        x: Value,
        weights: Value,
        indices: Value,
        tokens: Size,
        choices: Size,
        count: Size,
    ) -> Value:
        """The experts held here over rows sorted by expert; `tokens` rows with `choices` of `count`
        experts each."""
        rows = tokens * choices
        with t.scope() as frame:
            frame.local(x, weights, indices)
            stacks = self.stacks(t, frame, x.axes[-1], count)
            experts, permutation = routing.sort_by_expert(t, Value(indices.tensor, (rows,), INT64))
            of_token = constant(t, "token of each row", (rows,), INT64)
            chosen = routing.take_rows(t, x, of_token, "rows by expert")
            flat = t.view(weights, (rows,))
            row_weights = routing.take_rows(t, flat, permutation, "routing weights by expert")
            narrow, counts, offsets = routing.group_offsets(t, experts, count)
            frame.local(experts, permutation, chosen, row_weights, narrow, counts, offsets)
            bias = self.bias_of_rows(t, stacks[0], experts)
            up = self.product(t, frame, chosen, stacks[0], offsets, bias, count)
            middle = self._gate(t, up) if self.gated else ACTIVATIONS[self.activation](t, up)
            t.touch(up.tensor)
            bias = self._next_bias(t, frame, stacks[1], experts, bias)
            down = self.product(t, frame, middle, stacks[1], offsets, bias, count)
            weighted = routing.weigh_rows(t, down, t.view(row_weights, (rows, 1)))
            inverse = constant(t, "inverse permutation", (rows,), INT64)
            frame.local(down, inverse)
            ordered = routing.take_rows(t, weighted, inverse, "output by token")
            frame.local(ordered)
            summed = routing.sum_over_choices(t, ordered, tokens, choices)
            frame.local(summed)
            return cast(t, summed, x.dtype)

    def _next_bias(
        self, t: Tape, frame: Scope, stack: ExpertWeights, experts: Value, last: Value | None
    ) -> Value | None:
        """The second product's rows of bias: the function holds them in the name that held the
        first's (transformers 5.23 integrations/moe.py grouped_mm_experts_forward)."""
        bias = self.bias_of_rows(t, stack, experts)
        if bias is not None and last is not None:
            t.touch(last.tensor)
            frame.local(bias)
        return bias

    def stacks(
        self, t: Tape, frame: Scope, inputs: Size, count: Size = e
    ) -> tuple[ExpertWeights, ExpertWeights]:
        """The two expert parameters with their biases and, where PEFT adapts them, low-rank factors
        (the second's are made first)."""
        outputs = (2 if self.gated else 1) * self.width
        shapes = (
            ("gate_up_proj" if self.gated else "up_proj", inputs, outputs),
            ("down_proj", self.width, inputs),
        )
        stacks: list[ExpertWeights] = []
        for (name, rows, columns), names in zip(
            reversed(shapes), reversed(self.adapted_as), strict=True
        ):
            weight = t.weight(
                name,
                (count, rows, columns) if self.transposed else (count, columns, rows),
                kind="experts",
            )
            bias = (
                t.weight(f"{name}_bias", (count, columns), kind="bias").value if self.bias else None
            )
            factors = None
            if ranks := t.policy.adapts_parameter(names, weight.path):
                from napkinmath.lowering.expert_adapters import adapted_experts

                factors = adapted_experts(t, frame, weight, fused=ranks, transposed=self.transposed)
            stacks.append(ExpertWeights(weight, bias, factors, columns, ranks))
        return stacks[1], stacks[0]

    def bias_of_rows(self, t: Tape, stack: ExpertWeights, experts: Value) -> Value | None:
        """The bias of each row's expert; `experts` are the rows' numbers."""
        if stack.bias is None:
            return None
        return routing.take_rows(t, stack.bias, experts, "bias of each row")

    def product(
        self,
        t: Tape,
        frame: Scope,
        x: Value,
        stack: ExpertWeights,
        offsets: Value,
        bias: Value | None,
        count: Size,
    ) -> Value:
        """One of the two grouped products of rows sorted by expert."""
        if stack.factors is not None:
            from napkinmath.lowering import expert_adapters

            if expert_adapters.runs_thin(t):
                given = (stack.weight, stack.factors, offsets, stack.outputs)
                thin = expert_adapters.thin_products(t, x, *given, fused=stack.fused)
                return thin if bias is None else self._with_bias(t, thin, bias)
            weight = expert_adapters.fold(t, stack.weight, *stack.factors)
        else:
            weight = whole_parameter(t, frame, stack.weight)
        model = t.policy.stack.model
        looped = self.looped and model.is_transformers_before((5, 0)) and not model.fused_experts
        by_torch = not looped and not model.fused_experts
        out = routing.grouped_mm(t, x, weight, offsets, stack.outputs, count, by_torch=by_torch)
        if looped:
            routing.one_by_one(t, weight, t.known(count))
        elif model.experts_apart:
            from napkinmath.models.layers.expert_host import one_product_each

            one_product_each(t, t.known(count), trained=weight.requires_grad)
        return out if bias is None else self._with_bias(t, out, bias)

    def _with_bias(self, t: Tape, out: Value, bias: Value) -> Value:
        t.touch(bias.tensor)
        return add_(t, out, bias)

    def _gate(self, t: Tape, both: Value) -> Value:
        if self.clamped:
            return _clamped_gate(t, both, self.width)
        with t.scope() as frame:
            gate, up = chunk(t, both, (self.width, self.width))
            frame.local(both)
            if t.policy.patches("gate"):
                from napkinmath.models.layers.patched import patched_gate

                return patched_gate(t, gate, up, joint=True)
            return mul(t, ACTIVATIONS[self.activation](t, gate), up)


def _clamped_gate(t: Tape, both: Value, width: Size) -> Value:
    """Source: transformers 5.23 models/gpt_oss/modeling_gpt_oss.py GptOssExperts._apply_gate."""
    from napkinmath.ops.elementwise import shift, unary

    half = (*both.axes[:-1], width)
    with t.scope() as frame:
        frame.local(both)
        gate, up = slice_of(t, both, half), slice_of(t, both, half)
        gate = unary(t, "clamp", gate)
        up = unary(t, "clamp", up)
        frame.local(gate, up)
        glu = mul(t, gate, sigmoid(t, scale(t, gate)))
        frame.local(glu)
        return mul(t, shift(t, up), glu)


class SharedExpert(Record):
    """A feed-forward that every token visits, added to the routed experts; optionally weighed by a
    sigmoid gate."""

    mlp: FeedForward
    gated: bool = False
    first: bool = False
    """Run before the routed experts (Qwen) rather than after them (DeepSeek)."""

    def weigh(self, t: Tape, x: Value, out: Value) -> Value:
        """The output times sigmoid(x · w), where gated."""
        if not self.gated:
            return out
        return mul(t, sigmoid(t, linear(t, x, "shared_expert_gate", 1)), out)


class MixtureOfExperts(Record):
    """Router, routed experts and shared experts of one layer."""

    router: Router = Router()
    experts: Experts = Experts()
    shared: SharedExpert | None = None
    shared_outside: bool = False
    """The shared expert is a module beside the block (Granite 4)."""
    latent: int = 0
    """The experts work on a narrower projection of the hidden states (Nemotron 3); 0 is none."""
    scope: str = "mlp"

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Feed-forward of x of axes (b, s, h)."""
        if self.shared_outside and self.shared is not None:
            with t.scope() as frame:
                routed = self.replace(shared=None).record(t, x, shared)
                frame.local(x, routed)
                return add(t, routed, self.shared.mlp.record(t, x, shared))
        with t.scope(self.scope) as frame:
            frame.local(x)
            split = t.policy.tensor
            if split is not None:
                return self._split(t, x, split, shared)
            flat = t.view(x, (TOKENS, x.axes[-1]))
            common = (
                self.shared.mlp.record(t, flat, shared)
                if self.shared is not None and self.shared.first
                else None
            )
            weights, indices = self.router.record(t, flat, frame)
            frame.local(weights, indices)
            out = self._routed(t, flat, weights, indices)
            if self.shared is None:
                return t.view(out, x.axes)
            if common is None:
                common = self.shared.mlp.record(t, x, shared)
                out = t.view(out, x.axes)
            else:
                common = self.shared.weigh(t, flat, common)
            return t.view(add(t, out, common), x.axes)

    def _split(self, t: Tape, x: Value, split: SplitTensors, shared: dict[str, Value]) -> Value:
        """Every tensor-parallel rank runs all experts on its share of their width, on all tokens,
        and the parts are summed; or routes the tokens that it has."""
        with t.scope() as frame:
            own = t.policy.experts is not None and t.policy.experts.own_tokens
            whole = x if own else split.whole_sequence(t, x)
            rows = (whole.axes[0] * whole.axes[1], x.axes[-1])
            flat = t.view(whole, rows)
            weights, indices = self.router.record(t, flat, frame)
            frame.local(weights, indices)
            read = flat if own else t.view(split.enter(t, whole), rows)
            out = t.view(self._routed(t, read, weights, indices), whole.axes)
            if not own:
                out = split.leave(t, out)
            if self.shared is None:
                return out
            common = self.shared.mlp.record(t, x, shared)
            return add(t, out, self.shared.weigh(t, x, common) if self.shared.first else common)

    def _routed(self, t: Tape, x: Value, weights: Value, indices: Value) -> Value:
        narrow = linear(t, x, "fc1_latent_proj", self.latent) if self.latent else x
        out = self.experts.record(t, narrow, weights, indices, self.router.limit)
        return linear(t, out, "fc2_latent_proj", x.axes[-1]) if self.latent else out
