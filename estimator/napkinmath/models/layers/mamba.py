"""Mamba's selective scan: transformers' torch loop over time, and mamba_ssm's fused kernel.

`ModelCode.scan_kernels` says whether the kernels (mamba_ssm, causal_conv1d) are installed. Sources:
transformers 5.23 models/mamba/modeling_mamba.py MambaMixer, mamba_selective_scan; mamba_ssm
ops/selective_scan_interface.py MambaInnerFn.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.base.expr import Size, ceil_div
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, Grows, convolution_state
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.symbols import b, h, s
from napkinmath.ir.tape import LIKE, PASS, REDUCE, Tape
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.convolution import causal_convolution
from napkinmath.ops.elementwise import add, cast, copy, mul, neg, silu, unary
from napkinmath.ops.index import chunk
from napkinmath.ops.matmul import linear
from napkinmath.ops.nodes import autograd_function, result, workspaces

# tokens between the states that selective_scan_cuda keeps (csrc/selective_scan/selective_scan.cpp)
KERNEL_CHUNK = 2048


class MambaMixer(Record):
    """Projection to hidden and gate, short causal convolution, scan with input-dependent steps,
    projection back."""

    inner: Size
    state: int
    rank: int
    kernel: int = 4
    bias: bool = False
    conv_bias: bool = True
    norm: Norm | None = None
    """Norm of the steps, B and C (Jamba, Falcon Mamba)."""
    norm_names: tuple[str, ...] = ()
    """Names of their weights; none where they have no weights (Falcon Mamba)."""
    scope: str = "mixer"
    adapted: bool = False
    """PEFT adapts out_proj (it refuses to for the model types it knows as Mamba)."""

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The last inputs of its convolution, and the scan's state in fp32."""
        return (
            convolution_state(self.inner, self.kernel),
            Cached(name="scan state", axes=(self.inner, self.state), grows=Grows.NOT, dtype=FP32),
        )

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Mixes x of axes (b, s, h)."""
        with t.scope(self.scope) as frame:
            frame.local(x)
            both = linear(t, x, "in_proj", 2 * self.inner, bias=self.bias)
            frame.local(both)
            log = t.weight("A_log", (self.inner, self.state)).value
            decay = neg(t, unary(t, "exp", cast(t, log, FP32), saves="output"))
            skip = t.weight("D", (self.inner,)).value
            frame.local(decay)
            if t.policy.stack.model.scan_kernels and self.norm is None:
                return self._fused(t, both, decay, skip)
            hidden, gate = chunk(t, both, (self.inner, self.inner))
            hidden, gate = (t.view(v, (b, self.inner, s), "transpose") for v in (hidden, gate))
            hidden = causal_convolution(
                t, hidden, "conv1d", self.inner, self.kernel, bias=self.conv_bias
            )
            frame.local(hidden)
            steps, inputs, outputs = self._coefficients(t, hidden)
            frame.local(steps, inputs, outputs)
            scanned = self._scan(t, hidden, steps, decay, inputs, outputs, skip, gate)
            narrow = cast(t, scanned, x.dtype)
            frame.local(narrow)
            return linear(
                t,
                copy(t, narrow, (b, s, self.inner)),
                "out_proj",
                h,
                bias=self.bias,
                kind="linear" if self.adapted else "linear without adapter",
            )

    def _coefficients(self, t: Tape, hidden: Value) -> tuple[Value, Value, Value]:
        """Steps before their bias (b, d, s), B and C (b, s, n)."""
        with t.scope():
            rows = copy(t, hidden, (b, s, self.inner))
            low = linear(t, rows, "x_proj", self.rank + 2 * self.state)
            step, inputs, outputs = chunk(t, low, (self.rank, self.state, self.state), "split")
            if self.norm is not None and self.norm_names:
                step, inputs, outputs = (
                    self.norm.record(t, v, name)
                    for v, name in zip((step, inputs, outputs), self.norm_names, strict=True)
                )
            elif self.norm is not None:
                step, inputs, outputs = (plain_rms(t, v) for v in (step, inputs, outputs))
            with t.scope("dt_proj"):
                weight = t.weight("weight", (self.inner, self.rank), kind="scan step").value
                bias = t.weight("bias", (self.inner,), kind="bias").value
            axes = (b, self.inner, s)
            cost = Gemm(b * s, self.inner, self.rank, step.dtype)
            spread = t.op(
                "steps",
                (weight, step),
                axes,
                step.dtype,
                saves=(step, weight),
                gradients=(LIKE, LIKE),
                costs=(cost,),
                backward_costs=(cost, cost),
            )
            biased = t.op(
                "add bias",
                (spread, bias),
                axes,
                step.dtype,
                gradients=(PASS, LIKE),
                costs=(Move(2 * traffic(spread)),),
            )
            return unary(t, "softplus", biased), inputs, outputs

    def _scan(
        self,
        t: Tape,
        hidden: Value,
        steps: Value,
        decay: Value,
        inputs: Value,
        outputs: Value,
        skip: Value,
        gate: Value,
    ) -> Value:
        states: tuple[Size, ...] = (b, self.inner, s, self.state)
        with t.scope() as frame:
            product = outer(t, "A dt", (decay, steps), states)
            decays = unary(t, "exp", product, saves="output")
            wide_inputs = cast(t, inputs, FP32)
            increments = outer(t, "dt B", (steps, wide_inputs), states)
            wide_hidden = cast(t, hidden, FP32)
            driven = outer(t, "dt B u", (increments, wide_hidden), states)
            frame.local(decays, increments, driven)
            out = recurrence(t, decays, driven, outputs, hidden, self.inner, self.state)
            kept = outer(t, "u D", (hidden, cast(t, skip, FP32)), (b, self.inner, s))
            frame.local(out)
            total = add(t, out, kept)
            frame.local(total)
            return mul(t, total, silu(t, gate))

    def _fused(self, t: Tape, both: Value, decay: Value, skip: Value) -> Value:
        """mamba_inner_fn: one autograd function from the first projection's output to the last's;
        x_proj, dt_proj and out_proj run inside it."""
        weights = self._inner_weights(t)
        inputs = (both, decay, skip, *weights)
        dtype, row = both.dtype, (b, self.inner, s)
        saved = self._kept(t, dtype)
        passing = workspaces(t, row, dtype, ("convolved", "steps", "gated output"))
        out = result(t, "output", (b, s, h), dtype, inputs)
        autograd_function(
            t,
            "mamba_inner",
            inputs,
            out,
            new=(*saved, *passing, out.tensor),
            passing=passing,
            saved=saved,
            saves=(*saved, decay.tensor, skip.tensor, *(w.tensor for w in weights)),
            again=self._made_again(t, dtype),
            costs=(
                Gemm(b * s, self.rank + 2 * self.state, self.inner, dtype),
                Gemm(b * s, self.inner, self.rank, dtype),
                Gemm(b * s, h, self.inner, dtype),
                Move(10 * traffic(both), 3),
            ),
        )
        return out

    def _inner_weights(self, t: Tape) -> list[Value]:
        axes: dict[str, tuple[Size, ...]] = {
            "conv1d.weight": (self.inner, 1, self.kernel),
            "x_proj.weight": (self.rank + 2 * self.state, self.inner),
            "dt_proj.weight": (self.inner, self.rank),
            "dt_proj.bias": (self.inner,),
            "out_proj.weight": (h, self.inner),
        }
        axes |= {"conv1d.bias": (self.inner,)} if self.conv_bias else {}
        axes |= {"out_proj.bias": (h,)} if self.bias else {}
        return [t.weight(name, shape, kind="scan").value for name, shape in axes.items()]

    @property
    def _narrow(self) -> tuple[Size, ...]:
        return (b, 1, self.state, s)

    def _kept(self, t: Tape, dtype: DType) -> list[Tensor]:
        """What the whole function keeps for its backward, in the order in which it is made."""
        shapes: dict[str, tuple[Size, ...]] = {
            "hidden and gate, contiguous": (b, 2 * self.inner, s),
            "steps, B and C": (b * s, self.rank + 2 * self.state),
            "B": self._narrow,
            "C": self._narrow,
            "scan output": (b, self.inner, s),
        }
        states = (b, self.inner, ceil_div(s, KERNEL_CHUNK), 2 * self.state)
        return [
            *(t.tensor(name, axes, dtype, Role.ACTIVATIONS) for name, axes in shapes.items()),
            t.tensor("states of each chunk", states, FP32, Role.ACTIVATIONS),
        ]

    def _made_again(self, t: Tape, dtype: DType) -> list[Tensor]:
        """What lives while its backward runs, beside the gradients."""
        rows = (
            "convolved again",
            "steps again",
            "grad of scan output",
            "grad of convolved",
            "grad of steps",
            "gated output again",
        )
        low = (b * s, self.rank + 2 * self.state)
        return [
            *workspaces(t, (b, self.inner, s), dtype, rows),
            *workspaces(t, self._narrow, FP32, ("grad of B", "grad of C")),
            *workspaces(t, low, dtype, ("grad of steps, B and C",)),
        ]


def outer(t: Tape, name: str, factors: tuple[Value, Value], axes: tuple[Size, ...]) -> Value:
    """A product in fp32 of two tensors broadcast to `axes`: keeps both; each gradient is a full
    product, summed where broadcast."""
    x, y = factors
    saves = (y if x.requires_grad else None, x if y.requires_grad else None)
    moved = traffic(Value(x.tensor, axes, FP32))
    how = tuple(LIKE if v.axes == axes and v.dtype is FP32 else REDUCE for v in factors)
    return t.op(
        name,
        factors,
        axes,
        FP32,
        saves=saves,
        gradients=how,
        costs=(Move(moved),),
        backward_costs=(Move(4 * moved, 2),),
    )


def recurrence(
    t: Tape, decays: Value, driven: Value, outputs: Value, hidden: Value, inner: Size, state: int
) -> Value:
    """The loop over time: state = decay · state + input, output = state · C, one small tensor a
    step, stacked at the end.

    Every step keeps its state in fp32 and in the model's type. Backward of a step's slices makes
    zeros as large as all the decays and all the inputs, and adds them to the gradients gathered so
    far.
    """
    row, axes = (b, inner, s), (s, b, inner, state)
    states, narrow = (
        t.tensor("states of every step", axes, FP32),
        t.tensor("states of every step in the model's type", axes, hidden.dtype),
    )
    each = t.tensor("outputs of every step", row, hidden.dtype, Role.WORKSPACE)
    out = Value(
        t.tensor("stacked outputs", row, hidden.dtype),
        row,
        hidden.dtype,
        any(v.requires_grad for v in (decays, driven, outputs)),
    )
    saves = (
        [states, *([narrow] if outputs.requires_grad else []), outputs.tensor, decays.tensor]
        if out.requires_grad
        else []
    )
    passing = [each] + [x for x in (states, narrow) if x not in saves]
    forward = (
        (ALLOC, states),
        (ALLOC, narrow),
        (ALLOC, each),
        (ALLOC, out.tensor),
        *((FREE, x) for x in passing),
    )
    cost = Move(4 * traffic(decays), 4 * state)
    if not out.requires_grad:
        t.append("scan", (decays, driven, outputs), (out,), forward=forward, costs=(cost,))
        return out
    gradients = [
        Gradient(v, t.gradient_of(v)) for v in (decays, driven, outputs) if v.requires_grad
    ]
    zeros = [t.tensor("zeros of one step's slice", decays.axes, FP32, Role.WORKSPACE)]
    backward = (
        *((ALLOC, g.tensor) for g in gradients if g.tensor),
        *((ALLOC, z) for z in zeros),
        *((FREE, z) for z in zeros),
    )
    t.append(
        "scan",
        (decays, driven, outputs),
        (out,),
        forward=forward,
        saves=saves,
        costs=(cost,),
        backward=backward,
        gradients=gradients,
        backward_costs=(cost, cost, cost),
    )
    for tensor in saves:
        t.touch(tensor)
    return out


def plain_rms(t: Tape, x: Value) -> Value:
    """An RMS norm without weights in fp32, cast back (Falcon Mamba)."""
    from napkinmath.models.layers.llama4 import l2_norm

    return l2_norm(t, x)
