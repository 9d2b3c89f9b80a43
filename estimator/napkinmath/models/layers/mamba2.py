"""Mamba 2's state-space duality: transformers' chunked form in torch, and mamba_ssm's fused kernel.

Sources: transformers 5.23 models/mamba2/modeling_mamba2.py mamba2_chunk_scan, segment_sum,
MambaRMSNormGated; mamba_ssm ops/triton/ssd_combined.py MambaSplitConv1dScanCombinedFn (it saves the
projection's output, the scan's output and the norm's row factors, and recomputes the rest).
Megatron-LM core/ssm/mamba_mixer.py ssm_training calls it without norm and output projection.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.base.expr import Size, ceil_div
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, Grows, convolution_state
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Role, Tensor, Value
from napkinmath.ir.symbols import b, h, s
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.models.layers.chunked_scan import contract, pad, segment_decays, step_sizes
from napkinmath.models.layers.mamba import outer
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.convolution import causal_convolution
from napkinmath.ops.elementwise import add, cast, copy, mul, neg, rsqrt, scale, shift, silu, unary
from napkinmath.ops.index import chunk, constant, slice_of
from napkinmath.ops.matmul import linear
from napkinmath.ops.nodes import autograd_function, result, workspaces
from napkinmath.ops.norm import mean_square
from napkinmath.ops.routing import weigh_rows


class Mamba2Mixer(Record):
    """One projection to gate, hidden, B, C and steps; convolution; chunked scan; gated norm;
    projection back."""

    heads: Size
    size: int
    state: int
    groups: Size = 1
    chunk: int = 256
    kernel: int = 4
    bias: bool = False
    conv_bias: bool = True
    norm_groups: Size = 1
    """Groups that the gated norm treats apart."""
    fused: bool = True
    """The library can run the whole mixer as one kernel."""
    scope: str = "mixer"
    adapted: bool = False
    """PEFT adapts out_proj (it refuses to for the model types it knows as Mamba)."""
    multiplied: bool = False
    """The input is multiplied by a number, the projection's output by a buffer of them (Falcon
    H1)."""
    normed: bool = True
    """A gated norm ends the scan; else the gate alone (Falcon H1)."""
    output_bias: bool | None = None
    """The last projection's; None as the first one's."""

    @property
    def inner(self) -> Size:
        """Width of the hidden states in the mixer."""
        return self.heads * self.size

    @property
    def convolved(self) -> Size:
        """Channels of the convolution: hidden states, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The last inputs of its convolution, and the scan's state in fp32."""
        return (
            convolution_state(self.convolved, self.kernel),
            Cached(
                name="scan state",
                axes=(self.heads, self.size, self.state),
                grows=Grows.NOT,
                dtype=FP32,
            ),
        )

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Mixes x of axes (b, s, h)."""
        with t.scope(self.scope) as frame:
            frame.local(x)
            whole = self._projected(t, x)
            frame.local(whole)
            decay = neg(
                t,
                unary(
                    t, "exp", cast(t, t.weight("A_log", (self.heads,)).value, FP32), saves="output"
                ),
            )
            skip, step_bias = (
                t.weight("D", (self.heads,)).value,
                t.weight("dt_bias", (self.heads,)).value,
            )
            if t.policy.stack.model.scan_kernels and self.fused:
                return self._kernel(t, whole, decay, skip, step_bias)
            gate, mixed, steps = chunk(t, whole, (self.inner, self.convolved, self.heads), "split")
            mixed = causal_convolution(
                t,
                t.view(mixed, (b, self.convolved, s)),
                "conv1d",
                self.convolved,
                self.kernel,
                bias=self.conv_bias,
            )
            mixed = t.view(mixed, (b, s, self.convolved))
            hidden, inputs, outputs = chunk(
                t, mixed, (self.inner, self.groups * self.state, self.groups * self.state), "split"
            )
            frame.local(decay, mixed)
            scanned = self._scan(
                t,
                t.view(hidden, (b, s, self.heads, self.size)),
                steps,
                step_bias,
                decay,
                inputs,
                outputs,
                skip,
            )
            frame.local(scanned)
            scanned = t.view(scanned, (b, s, self.inner))
            gated = (
                self._gated_norm(t, scanned, gate)
                if self.normed
                else mul(t, scanned, silu(t, gate))
            )
            normed = cast(t, gated, x.dtype)
            frame.local(normed)
            return linear(
                t,
                normed,
                "out_proj",
                h,
                bias=self.biased_output,
                kind="linear" if self.adapted else "linear without adapter",
            )

    @property
    def biased_output(self) -> bool:
        """Whether the last projection has a bias."""
        return self.bias if self.output_bias is None else self.output_bias

    def _projected(self, t: Tape, x: Value) -> Value:
        """Gate, hidden states, B, C and steps, of axes (b, s, all of them)."""
        width = self.inner + self.convolved + self.heads
        if not self.multiplied:
            return linear(t, x, "in_proj", width, bias=self.bias)
        with t.scope() as frame:
            scaled = scale(t, x)
            frame.local(scaled)
            factors = t.weight("mup_vector", (1, 1, width), buffer=True).value
            return mul(t, linear(t, scaled, "in_proj", width, bias=self.bias), factors)

    def _gated_norm(self, t: Tape, x: Value, gate: Value) -> Value:
        with t.scope("norm") as frame:
            weight = t.weight("weight", (self.inner,), kind="norm").value
            gated = mul(t, x, silu(t, cast(t, gate, FP32)))
            grouped = t.view(
                gated, (b, s, self.norm_groups, ceil_div(self.inner, self.norm_groups))
            )
            frame.local(gated)
            normed = weigh_rows(t, grouped, rsqrt(t, shift(t, mean_square(t, grouped))))
            frame.local(normed)
            return mul(t, t.view(normed, (b, s, self.inner)), weight)

    def _scan(
        self,
        t: Tape,
        x: Value,
        steps: Value,
        step_bias: Value,
        decay: Value,
        inputs: Value,
        outputs: Value,
        skip: Value,
    ) -> Value:
        """The scan in chunks of `chunk` tokens, all in fp32; returns (b, s, heads, size)."""
        chunks = ceil_div(s, self.chunk)
        padded = chunks * self.chunk
        rows: tuple[Size, ...] = (b, padded, self.heads, self.size)
        wide_rows: tuple[Size, ...] = (b, padded, self.heads, self.state)
        square: tuple[Size, ...] = (b, self.heads, chunks, self.chunk, self.chunk)
        per_score = (b * chunks * self.heads, self.chunk, self.chunk, self.state)
        per_row = (b * chunks * self.heads, self.chunk, self.size, self.chunk)
        per_chunk: tuple[Size, ...] = (b, chunks, self.heads, self.size, self.state)
        # einsum copies what lies heads inside tokens. The hidden states lie tokens innermost, as
        # the convolution leaves them: those of one chunk are a batch as they are.
        many = t.at_least("s", self.chunk + 1)
        lone = not many and not t.at_least("b", 2)
        with t.scope() as frame:
            step = step_sizes(t, steps, step_bias)
            wide = cast(t, x, FP32)
            keys, queries = (self._spread(t, v) for v in (inputs, outputs))
            residual = outer(t, "D x", (skip, pad(t, wide, rows)), rows)
            frame.local(step, residual)
            driven = outer(t, "x dt", (wide, cast(t, step, FP32)), wide.axes)
            decays = outer(t, "A dt", (decay, cast(t, step, FP32)), (b, s, self.heads))
            driven, decays = pad(t, driven, rows), pad(t, decays, (b, padded, self.heads))
            keys, queries = pad(t, keys, wide_rows), pad(t, queries, wide_rows)
            summed = unary(t, "cumsum", decays, saves="nothing")
            frame.local(driven, decays, keys, queries, summed)
            within = segment_decays(t, decays, square)
            scores = contract(t, "C B", queries, keys, per_score, square, dense=(lone, lone))
            masked = mul(t, scores, within)
            frame.local(within, scores, masked)
            diagonal = contract(t, "M x", masked, driven, per_row, rows, dense=(True, not many))
            fading = unary(t, "exp", shift(t, summed), saves="output")
            faded = outer(t, "B decay", (keys, fading), wide_rows)
            frame.local(diagonal, fading, faded)
            states = contract(
                t,
                "B x",
                faded,
                driven,
                (per_row[0], self.size, self.state, self.chunk),
                per_chunk,
                dense=(lone, not many),
            )
            before = self._behind_zeros(t, states, chunks)
            frame.local(before)
            carried = self._carry(t, decays, before, chunks)
            frame.local(carried)
            starts = slice_of(t, carried, per_chunk)
            frame.release(before)
            rising = unary(t, "exp", summed, saves="output")
            reached = contract(
                t,
                "C states",
                queries,
                starts,
                (per_row[0], self.chunk, self.size, self.state),
                rows,
                dense=(lone, not many),
            )
            off = outer(t, "C states decay", (reached, rising), rows)
            frame.local(rising, reached, off)
            total = copy(t, add(t, diagonal, off))
            out = add(t, total, residual)
            t.touch(total.tensor)
            frame.local(out)
            return slice_of(t, out, (b, s, self.heads, self.size))

    def _behind_zeros(self, t: Tape, states: Value, chunks: Size) -> Value:
        """The states of all chunks behind that of none."""
        return t.op(
            "cat",
            (states,),
            (b, chunks + 1, self.heads, self.size, self.state),
            states.dtype,
            gradients=(PASS,),
            costs=(Move(2 * traffic(states)),),
        )

    def _spread(self, t: Tape, x: Value) -> Value:
        """B or C in fp32, repeated for every head of its group."""
        wide = cast(t, x, FP32)
        axes = (b, s, self.heads, self.state)
        return t.op(
            "repeat_interleave",
            (wide,),
            axes,
            FP32,
            gradients=(LIKE,),
            costs=(Move(2 * traffic(Value(wide.tensor, axes, FP32))),),
        )

    def _carry(self, t: Tape, decays: Value, before: Value, chunks: Size) -> Value:
        """States at the starts of chunks from the states that each chunk adds: a product over pairs
        of chunks."""
        pairs = (b, self.heads, chunks + 1, chunks + 1)
        weights = constant(t, "decays between chunks", pairs, FP32)
        dense = copy(t, before) if t.at_least("b", 2) else before
        cost = Gemm(chunks + 1, self.size * self.state, chunks + 1, before.dtype, b * self.heads)
        out = t.op(
            "carry",
            (dense, weights, decays),
            before.axes,
            before.dtype,
            saves=(weights, dense),
            gradients=(LIKE, None, None),
            costs=(cost,),
            backward_costs=(cost, cost),
        )
        t.touch(before.tensor)
        return out

    def _kernel(self, t: Tape, whole: Value, decay: Value, skip: Value, step_bias: Value) -> Value:
        """mamba_split_conv1d_scan_combined: everything after the first projection as one autograd
        function; norm and out_proj follow on their own where the library has them so."""
        if t.policy.stack.model.scan_projects:
            return self._scanned(t, whole, decay, skip, step_bias, projects=True)
        with t.scope() as frame:
            out = self._scanned(t, whole, decay, skip, step_bias, projects=False)
            frame.local(out)
            normed = Norm().record(t, out, "norm") if self.normed else out
            return linear(t, normed, "out_proj", h, bias=self.biased_output)

    def _scanned(
        self, t: Tape, whole: Value, decay: Value, skip: Value, step_bias: Value, *, projects: bool
    ) -> Value:
        weights = self._inner_weights(t, projects=projects)
        inputs = (whole, decay, skip, step_bias, *weights)
        dtype, chunks = whole.dtype, ceil_div(s, self.chunk)
        passing = self._passing(t, dtype, projects=projects)
        saved = [t.tensor("scan output", (b, s, self.inner), dtype, Role.ACTIVATIONS)]
        if projects:
            rows = (b, s, self.norm_groups)
            saved.append(t.tensor("row factors of the norm", rows, FP32, Role.ACTIVATIONS))
        out = result(t, "output", (b, s, h if projects else self.inner), dtype, inputs)
        projection = (Gemm(b * s, h, self.inner, dtype),) if projects else ()
        autograd_function(
            t,
            "mamba2_split_conv1d_scan",
            inputs,
            out,
            new=(*passing, *saved, out.tensor),
            passing=passing,
            saved=saved,
            saves=(whole.tensor, *saved, decay.tensor, *(w.tensor for w in weights)),
            again=self._made_again(t, dtype, passing),
            costs=(
                Move(6 * traffic(whole), 8),
                Gemm(self.chunk, self.chunk, self.state, dtype, b * chunks * self.groups),
                Gemm(self.chunk, self.size, self.chunk, dtype, b * chunks * self.heads),
                *projection,
            ),
        )
        return out

    def _inner_weights(self, t: Tape, *, projects: bool) -> list[Value]:
        axes: dict[str, tuple[Size, ...]] = {"conv1d.weight": (self.convolved, 1, self.kernel)}
        axes |= {"norm.weight": (self.inner,)} if self.normed and projects else {}
        axes |= {"out_proj.weight": (h, self.inner)} if projects else {}
        axes |= {"conv1d.bias": (self.convolved,)} if self.conv_bias else {}
        axes |= {"out_proj.bias": (h,)} if self.biased_output and projects else {}
        return [t.weight(name, shape, kind="scan").value for name, shape in axes.items()]

    @property
    def _states(self) -> tuple[Size, ...]:
        """Axes of the states at the starts of chunks."""
        return (b, ceil_div(s, self.chunk), self.heads, self.size, self.state)

    def _passing(self, t: Tape, dtype: DType, *, projects: bool) -> list[Tensor]:
        """What lives while the forward runs, in the order in which it is made."""
        chunks = ceil_div(s, self.chunk)
        sums = (2, b, self.heads, chunks, self.chunk)
        pairs = (b, chunks, self.groups, self.chunk, self.chunk)
        return [
            t.tensor("convolved", (b, self.convolved, s), dtype, Role.WORKSPACE),
            t.tensor("steps and their sums", sums, FP32, Role.WORKSPACE),
            t.tensor("states", self._states, FP32, Role.WORKSPACE),
            t.tensor("C B", pairs, FP32, Role.WORKSPACE),
            *workspaces(t, (b, s, self.inner), dtype, ("normed",) if projects else ()),
        ]

    def _made_again(self, t: Tape, dtype: DType, passing: list[Tensor]) -> list[Tensor]:
        """What lives while the backward runs: all of it made again but what was normed."""
        again = [t.tensor(x.name, x.axes, x.dtype, Role.WORKSPACE) for x in passing[:4]]
        rows = ("scan output again", "grad of scan output")
        return [
            *again,
            *workspaces(t, (b, s, self.inner), dtype, rows),
            t.tensor("grad of convolved", (b, self.convolved, s), dtype, Role.WORKSPACE),
            t.tensor("grads of states", (2, *self._states), FP32, Role.WORKSPACE),
        ]
