"""Normalisations: transformers' eager RMSNorm chain, torch's fused RMSNorm, LayerNorm."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.tape import LIKE, PASS, REDUCE, Tape
from napkinmath.ops.elementwise import cast, mul, power, promote, rsqrt, shift, square
from napkinmath.ops.nodes import freed, gradients_of, made, passed, result


def mean_square(t: Tape, x: Value) -> Value:
    """`x.pow(2).mean(-1, keepdim=True)`: the backward of the mean expands the row gradient to the
    full shape."""
    squares = square(t, x)
    return row_mean(t, squares, squares.dtype)


def row_mean(t: Tape, x: Value, dtype: DType) -> Value:
    """The mean over the last axis, which is kept, in `dtype`."""
    cost = Move(traffic(Value(x.tensor, x.axes, dtype)))
    return t.op(
        "mean",
        (x,),
        (*x.axes[:-1], 1),
        dtype,
        gradients=(LIKE,),
        costs=(cost,),
        backward_costs=(cost,),
    )


def rms_norm_eager(
    t: Tape,
    x: Value,
    *,
    name: str,
    width: Size | None = None,
    scale_in_fp32: bool = False,
    cast_last: bool = False,
) -> Value:
    """transformers' LlamaRMSNorm: cast to fp32, x * rsqrt(mean(x^2) + eps), cast back, times the
    weight.

    `scale_in_fp32` is Gemma's form, (1 + weight) in fp32 and the cast last; `cast_last` is
    GPT-OSS's, weight * x in fp32 and the cast last. Source: transformers 5.23
    models/llama/modeling_llama.py LlamaRMSNorm.forward and models/gemma/modeling_gemma.py
    GemmaRMSNorm.forward.
    """
    with t.scope(name) as frame:
        weight = t.weight("weight", (x.axes[-1] if width is None else width,), kind="norm").value
        wide = cast(t, x, FP32)
        frame.local(wide)
        variance = mean_square(t, wide)
        frame.local(variance)
        normed = row_scale(t, wide, rsqrt(t, shift(t, variance)))
        if scale_in_fp32:
            return cast(t, mul(t, normed, shift(t, cast(t, weight, FP32))), x.dtype)
        frame.local(normed)
        frame.release(wide)
        if cast_last:
            return cast(t, mul(t, weight, normed), x.dtype)
        return mul(t, weight, cast(t, normed, x.dtype))


def row_scale(t: Tape, x: Value, rows: Value) -> Value:
    """x times one factor a row; the factor's gradient is a full product summed over the row. That
    of a narrower x is cast after the product."""
    dtype = promote(x.dtype, rows.dtype)
    return t.op(
        "mul rows",
        (x, rows),
        x.axes,
        dtype,
        saves=(rows if x.requires_grad else None, x if rows.requires_grad else None),
        gradients=(LIKE if x.dtype is dtype else REDUCE, REDUCE),
        costs=(Move(traffic(x) + traffic(Value(x.tensor, x.axes, dtype))),),
        backward_costs=(Move(6 * traffic(x), 3),),
    )


def rms_norm_power(t: Tape, x: Value, *, name: str, affine: bool = True) -> Value:
    """Gemma 4's and Gemma 3n's RMSNorm in fp32: x * (mean(x^2) + eps) ** -0.5, times the weight in
    fp32, cast back.

    Source: transformers 5.23 models/gemma4/modeling_gemma4.py Gemma4RMSNorm.forward.
    """
    with t.scope(name):
        wide = cast(t, x, FP32)
        with t.scope() as frame:
            frame.local(wide)
            variance = shift(t, mean_square(t, wide))
            frame.local(variance)
            normed = row_scale(t, wide, power(t, variance))
        if affine:
            weight = t.weight("weight", (x.axes[-1],), kind="norm").value
            normed = mul(t, normed, cast(t, weight, FP32))
        return cast(t, normed, x.dtype)


def layer_norm_eager(t: Tape, x: Value, *, name: str, axes: tuple[Size, ...]) -> Value:
    """Cohere's LayerNorm in fp32: the mean is subtracted twice, once for the variance
    (models/cohere CohereLayerNorm.forward)."""
    with t.scope(name) as frame:
        weight = t.weight("weight", axes, kind="norm").value
        wide = cast(t, x, FP32)
        frame.local(wide)
        mean = row_mean(t, wide, FP32)
        frame.local(mean)
        variance = mean_square(t, subtract_rows(t, wide, mean))
        frame.local(variance)
        normed = row_scale(t, subtract_rows(t, wide, mean), rsqrt(t, shift(t, variance)))
        frame.release(wide)
        frame.local(normed)
        return cast(t, mul(t, cast(t, weight, FP32), normed), x.dtype)


def subtract_rows(t: Tape, x: Value, rows: Value) -> Value:
    """x less one number of each row."""
    return t.op(
        "sub rows",
        (x, rows),
        x.axes,
        x.dtype,
        gradients=(PASS, REDUCE),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(3 * traffic(x), 2),),
    )


def layer_norm_plain(t: Tape, x: Value, *, name: str) -> Value:
    """OLMo's LayerNorm: no parameters, fp32 inside (models/olmo OlmoLayerNorm.forward)."""
    return cast(
        t,
        _fused(
            t,
            cast(t, x, FP32),
            name=name,
            op="layer_norm",
            statistics=("mean", "rstd"),
            bias=False,
            affine=False,
            width=None,
        ),
        x.dtype,
    )


def layer_norm_one_plus(t: Tape, x: Value, *, name: str) -> Value:
    """Nemotron's LayerNorm: (1 + weight) made anew, autocast off inside (models/nemotron
    NemotronLayerNorm1P.forward)."""
    with t.scope(name):
        weight, bias = (t.weight(n, (x.axes[-1],), kind="norm").value for n in ("weight", "bias"))
        values = [x, shift(t, weight), bias]
        if t.policy.autocast is not None:
            values = [cast(t, v, t.policy.autocast) for v in values]
        return _normalize(t, values[0], values[1:], op="layer_norm", statistics=("mean", "rstd"))


def layer_norm(
    t: Tape,
    x: Value,
    *,
    name: str,
    bias: bool = True,
    affine: bool = True,
    width: Size | None = None,
) -> Value:
    """`nn.LayerNorm`: one kernel; keeps x and two fp32 statistics a row. Autocast runs and returns
    it in fp32."""
    return _fused(
        t,
        x,
        name=name,
        op="layer_norm",
        statistics=("mean", "rstd"),
        bias=bias,
        affine=affine,
        width=width,
    )


def rms_norm_fused(t: Tape, x: Value, *, name: str, width: Size | None = None) -> Value:
    """`F.rms_norm` as one kernel; keeps x and one fp32 statistic a row."""
    return _fused(
        t, x, name=name, op="rms_norm", statistics=("rstd",), bias=False, affine=True, width=width
    )


def _fused(
    t: Tape,
    x: Value,
    *,
    name: str,
    op: str,
    statistics: tuple[str, ...],
    bias: bool,
    affine: bool,
    width: Size | None,
) -> Value:
    with t.scope(name):
        axis = (width if width is not None else x.axes[-1],)
        parameters = [t.weight("weight", axis, kind="norm").value] if affine else []
        if bias and affine:
            parameters.append(t.weight("bias", axis, kind="norm").value)
        if t.policy.autocast is not None:
            x, parameters = cast(t, x, FP32), [cast(t, p, FP32) for p in parameters]
        return _normalize(t, x, parameters, op=op, statistics=statistics)


def _normalize(
    t: Tape, x: Value, parameters: list[Value], *, op: str, statistics: tuple[str, ...]
) -> Value:
    with t.scope():
        rows = tuple(t.tensor(s, (*x.axes[:-1], 1), FP32) for s in statistics)
        values = [x, *parameters]
        out, gradients = result(t, op, x.axes, x.dtype, values), gradients_of(t, values)
        # one kernel reads the gradient and x and writes x's; the parameters' reads both again (ATen
        # native/cuda/layer_norm_kernel.cu LayerNormBackwardKernelImplInternal)
        trained = any(p.requires_grad for p in parameters)
        passes = 3 * x.requires_grad + 2 * trained
        kernels = int(x.requires_grad) + int(trained)
        t.append(
            op,
            values,
            (out,),
            forward=(*made(out.tensor, *rows), *(() if out.requires_grad else freed(*rows))),
            saves=(x.tensor, *rows),
            costs=(Move(2 * traffic(x)),),
            backward=made(*(g.tensor for g in gradients)),
            gradients=gradients,
            backward_costs=(Move(passes * traffic(x), kernels),) if passes else (),
        )
        t.touch(*rows)
        return out


def rms_norm_in_place(t: Tape, x: Value, *, name: str, width: Size | None = None) -> Value:
    """unsloth's RMSNorm kernel: keeps x and one fp32 statistic a row; the gradient overwrites the
    incoming one, the weight gets none.

    Source: unsloth kernels/rms_layernorm.py Fast_RMS_Layernorm, as carried by fms-acceleration.
    """
    with t.scope(name):
        weight = t.weight("weight", (x.axes[-1] if width is None else width,), kind="norm")
        weight.trainable = False
        rows = t.tensor("rstd", (*x.axes[:-1], 1), FP32)
        out = result(t, "rms_norm", x.axes, x.dtype, (x,))
        t.append(
            "rms_norm in place",
            (x, weight.value),
            (out,),
            forward=made(out.tensor, rows),
            saves=(x.tensor, rows),
            costs=(Move(2 * traffic(x)),),
            gradients=passed(x),
            backward_costs=(Move(3 * traffic(x)),),
        )
        t.touch(rows)
        return out
