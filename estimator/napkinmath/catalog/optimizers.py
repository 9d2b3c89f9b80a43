"""Optimizers, one row each: what they keep for every trained parameter, and what exists only during
the step."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32, INT64, UINT8
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.expr import Size, maximum, minimum
from napkinmath.catalog.optimizer_states import (
    SMALL,
    Optimizer,
    Product,
    State,
    Temporary,
    blocks_of_128,
    blocks_of_256,
    columns,
    double,
    double_blocks_of_256,
    gram,
    half,
    low_rank,
    matrix_rows,
    newton_schulz,
    projected,
    projected_back,
    projector,
    rows,
    scalar,
    table,
    table_of_16,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Axes = tuple[Size, ...]


def _eight_bit(
    name: str,
    number: int,
    elements: Callable[[Axes], Size] | None = None,
    scales: Callable[[Axes], Size] = blocks_of_256,
) -> tuple[State, ...]:
    """A bitsandbytes state: 8 bits with scales and a shared map, or 32 bits for a small
    parameter."""
    return (
        State(name=name, dtype=UINT8, elements=elements, at_least=SMALL, pageable=True),
        State(name=name, dtype=FP32, elements=elements, below=SMALL),
        State(name=f"absmax{number}", dtype=FP32, elements=scales, at_least=SMALL),
        State(name=f"qmap{number}", dtype=FP32, elements=table, shared=True, at_least=SMALL),
    )


def _four_bit(name: str, number: int) -> tuple[State, ...]:
    """A torchao state: two elements a byte with scales and a map of its own, or the parameter's own
    type for a small one (and for one that is no multiple of 128, which is priced as in 4 bits)."""
    return (
        State(name=name, dtype=UINT8, elements=half, at_least=SMALL),
        State(name=name, below=SMALL),
        State(name=f"absmax{number}", dtype=FP32, elements=blocks_of_128, at_least=SMALL),
        State(name=f"qmap{number}", dtype=FP32, elements=table_of_16, at_least=SMALL),
    )


def _wide(name: str, elements: Callable[[Axes], Size] | None = None) -> State:
    return State(name=name, dtype=FP32, elements=elements, pageable=True)


def _mean(state: str) -> tuple[str, ...]:
    """The moving mean of the squared update over an axis: reduced, scaled, added."""
    return ("= update", f"{state} = {state}", f"{state} = {state}")


_ADAM = (State(name="exp_avg"), State(name="exp_avg_sq"))
_STEP = State(name="step", dtype=FP32, elements=scalar)
_ADAM_8BIT = (*_eight_bit("state1", 1), *_eight_bit("state2", 2))
_ADAM_32BIT = (_wide("state1"), _wide("state2"))
_ADEMAMIX_8BIT = (*_eight_bit("state1", 1, double, double_blocks_of_256), *_eight_bit("state2", 2))
_ADEMAMIX_32BIT = (_wide("state1", double), _wide("state2"))
_ROOT = (Temporary(name="root"), Temporary(name="denominator"), "root")
_WIDE = (
    Temporary(name="wide gradient", dtype=FP32, cast_of="gradient"),
    Temporary(name="wide weight", dtype=FP32, cast_of="weight"),
)
_ADAM_KERNELS = (
    "weight = weight",
    "exp_avg = exp_avg, gradient",
    "exp_avg_sq = exp_avg_sq",
    "exp_avg_sq = exp_avg_sq, gradient",
    "root = exp_avg_sq",
    "denominator = root",
    "denominator = denominator",
    "weight = weight, exp_avg, denominator",
)
_LOW_RANK_ADAM = (
    "exp_avg = exp_avg",
    "exp_avg = exp_avg, projected",
    "exp_avg_sq = exp_avg_sq",
    "exp_avg_sq = exp_avg_sq, projected",
    "denominator = exp_avg_sq",
    "denominator = denominator",
    "step = exp_avg, denominator",
)
_ADAM_MOMENTS = (
    "exp_avg = exp_avg",
    "exp_avg = exp_avg, gradient",
    "exp_avg_sq = exp_avg_sq",
    "exp_avg_sq = exp_avg_sq, gradient",
)
# no decay unless it is given; the first moment in two kernels
_ANY_PRECISION = (*_ADAM_MOMENTS, *_ADAM_KERNELS[4:7])
_FACTORED_UPDATE = (  # of Adafactor, AdaLomo and CAME: squared, added to, then of the factors
    Temporary(name="square", dtype=FP32),
    Temporary(name="update", dtype=FP32),
    "square",
    Temporary(name="update", dtype=FP32),
)
_FACTORED_KERNELS = (
    "square = wide gradient",
    "update = square",
    *_mean("exp_avg_sq_row"),
    *_mean("exp_avg_sq_col"),
    *("exp_avg_sq_row = exp_avg_sq_row",) * 3,
    "exp_avg_sq_col = exp_avg_sq_col",
    "update = exp_avg_sq_row, exp_avg_sq_col",
    "update = update, wide gradient",
    "= update",
)
_SCHEDULE_FREE = (State(name="z"), State(name="exp_avg_sq"))
_SCHEDULE_FREE_KERNELS = (
    *_ADAM_MOMENTS[2:],
    "denominator = exp_avg_sq",
    *("denominator = denominator",) * 2,
    "gradient = gradient, denominator",
    "weight = weight, z",
    "weight = weight, gradient",
    "z = z, gradient",
)
_TORCH = "torch 2.13 optim/"
_BNB = "bitsandbytes 0.50 optim/optimizer.py"
_GALORE = (
    State(name="exp_avg", elements=low_rank(128)),
    State(name="exp_avg_sq", elements=low_rank(128)),
    State(name="projector", elements=projector(128)),
)


def _factored(axes: Axes) -> list[Size]:
    """1 for each side of a matrix that SOAP keeps a factor of, 0 for one above
    `max_precond_dim`."""
    return [1 - minimum(1, side // 10_001) for side in axes] if len(axes) > 1 else []


def _factors(axes: Axes) -> Size:
    """Elements of one square matrix for each factored side."""
    return sum(kept * side * side for kept, side in zip(_factored(axes), axes, strict=False))


def _wide_factors(axes: Axes) -> Size:
    """Both the factors and their eigenvectors."""
    return 2 * _factors(axes)


def _largest_factor(axes: Axes) -> Size:
    """Elements of the largest square matrix."""
    found: Size = 0
    for kept, side in zip(_factored(axes), axes, strict=False):
        found = maximum(found, kept * side * side)
    return found


def _side_product(side: int, gram: bool) -> Product:
    """A product over one side of a matrix: times its eigenvectors, or the gradient's outer
    product."""

    def sides(axes: Axes) -> tuple[Size, Size, Size] | None:
        own, other = axes[side], axes[1 - side]
        if _factored(axes)[side] == 0:
            return None
        return (own, own, other) if gram else (other, own, own)

    return Product(sides=sides, times=1 if gram else 4)


OPTIMIZERS: dict[str, Optimizer] = {
    row.name: row
    for row in (
        Optimizer(
            name="sgd",
            meaning="SGD without momentum",
            source=_TORCH + "sgd.py",
        ),
        Optimizer(
            name="momentum",
            meaning="SGD with momentum",
            source=_TORCH + "sgd.py _multi_tensor_sgd",
            states=(State(name="momentum_buffer"),),
            kernels=(
                "momentum_buffer = momentum_buffer",
                "momentum_buffer = momentum_buffer, gradient",
                "weight = weight, momentum_buffer",
            ),
            multi_tensor=True,
        ),
        Optimizer(
            name="adamw",
            meaning="AdamW, for-loop implementation",
            source=_TORCH + "adam.py _single_tensor_adam",
            states=_ADAM,
            script=_ROOT,
            kernels=_ADAM_KERNELS,
        ),
        Optimizer(
            name="adamw-foreach",
            meaning="AdamW, foreach implementation",
            source=_TORCH + "adam.py _multi_tensor_adam: exp_avg_sq_sqrt",
            states=_ADAM,
            foreach=("root",),
            kernels=(*_ADAM_KERNELS[:5], *("root = root",) * 2, "weight = weight, exp_avg, root"),
            multi_tensor=True,
        ),
        Optimizer(
            name="adamw-foreach-2.0",
            meaning="AdamW, foreach implementation of torch 2.0",
            source="torch 2.0 optim/adamw.py _multi_tensor_adamw: exp_avg_sq_sqrt and denom",
            states=_ADAM,
            foreach=("root", "denominator"),
            kernels=(
                "weight = weight",
                *_ANY_PRECISION[:5],
                "root = root",
                "denominator = root",
                "weight = weight, exp_avg, denominator",
            ),
            multi_tensor=True,
        ),
        Optimizer(
            name="adamw-fused",
            meaning="AdamW, fused implementation",
            source=_TORCH + "adam.py _fused_adam",
            states=(*_ADAM, _STEP),
        ),
        Optimizer(
            name="adamw-te",
            meaning="Transformer Engine's FusedAdam; `adamw-te:exp_avg=bf16,master=remainders` and"
            " such name the types of its states and of its own master weights",
            source="Transformer Engine 2 pytorch/optimizers/fused_adam.py FusedAdam",
            states=(State(name="exp_avg", dtype=FP32), State(name="exp_avg_sq", dtype=FP32)),
            multi_tensor=True,
            foreach_dtype=FP32,
        ),
        Optimizer(
            name="adagrad",
            meaning="Adagrad, foreach implementation",
            source=_TORCH + "adagrad.py _multi_tensor_adagrad: std, numerator",
            states=(State(name="sum"),),
            foreach=("std", "numerator"),
            kernels=(
                "sum = sum, gradient",
                "std = sum",
                "std = std",
                "numerator = gradient",
                "weight = weight, numerator, std",
            ),
            multi_tensor=True,
        ),
        Optimizer(
            name="rmsprop",
            meaning="RMSprop, foreach implementation",
            source=_TORCH + "rmsprop.py _multi_tensor_rmsprop: avg",
            states=(State(name="square_avg"),),
            foreach=("avg",),
            kernels=(
                "square_avg = square_avg",
                "square_avg = square_avg, gradient",
                "avg = square_avg",
                "avg = avg",
                "weight = weight, gradient, avg",
            ),
            multi_tensor=True,
        ),
        Optimizer(
            name="adamw-8bit",
            meaning="bitsandbytes AdamW with 8-bit states",
            source=_BNB,
            states=_ADAM_8BIT,
        ),
        Optimizer(
            name="adamw-bnb",
            meaning="bitsandbytes AdamW with 32-bit states",
            source=_BNB,
            states=_ADAM_32BIT,
        ),
        Optimizer(
            name="adamw-8bit-torchao",
            meaning="torchao AdamW with 8-bit states, its step compiled for each parameter",
            source=(
                "torchao 0.6 prototype/low_bit_optim/adam.py single_param_adam, quant_utils.py"
                " quantize_8bit_with_qmap"
            ),
            states=_ADAM_8BIT,
            kernels=(
                "new exp_avg, absmax1 = gradient, state1, absmax1",
                "new exp_avg_sq, absmax2 = gradient, state2, absmax2",
                "state1 = new exp_avg, absmax1",
                "state2, weight = new exp_avg_sq, absmax2, new exp_avg, weight",
            ),
            script=(
                Temporary(name="new exp_avg", dtype=FP32),
                Temporary(name="new exp_avg_sq", dtype=FP32),
                Temporary(name="scaled blocks", dtype=FP32),
                Temporary(name="codes", dtype=UINT8),
            ),
        ),
        Optimizer(
            name="adamw-4bit-torchao",
            meaning="torchao AdamW with 4-bit states, its step compiled for each parameter",
            source=(
                "torchao 0.18 optim/adam.py, subclass_4bit.py; kernels and buffers of the code that"
                " torch 2.13 inductor generates for its step on the CPU, where a buffer lives until"
                " its last kernel"
            ),
            states=(*_four_bit("state1", 1), *_four_bit("state2", 2)),
            kernels=(
                "high, low = state1",
                "unpacked 1 = high, low",
                "high, low = state2",
                "unpacked 2 = high, low",
                "weight = weight, unpacked 1, absmax1, gradient, unpacked 2, absmax2",
                "= unpacked 1, absmax1, gradient, unpacked 2, absmax2",
                "scaled 1, scaled 2 = unpacked 1, absmax1, gradient, unpacked 2, absmax2",
                "codes = scaled 1",
                "state1 = codes, scaled 1",
                "codes = scaled 2",
                "state2 = codes, scaled 2",
            ),
            script=(
                Temporary(name="high", dtype=UINT8, elements=half),
                Temporary(name="low", dtype=UINT8, elements=half),
                Temporary(name="unpacked 1", dtype=UINT8),
                Temporary(name="unpacked 2", dtype=UINT8),
                "high",
                "low",
                Temporary(name="scaled 1", dtype=FP32),
                Temporary(name="scaled 2", dtype=FP32),
                Temporary(name="codes", dtype=INT64),
                "codes",
                "scaled 1",
                Temporary(name="codes", dtype=INT64),
            ),
        ),
        Optimizer(
            name="paged-adamw-8bit",
            meaning="bitsandbytes 8-bit AdamW, states in paged memory",
            source=_BNB,
            states=_ADAM_8BIT,
            paged=True,
        ),
        Optimizer(
            name="paged-adamw",
            meaning="bitsandbytes AdamW, 32-bit states in paged memory",
            source=_BNB,
            states=_ADAM_32BIT,
            paged=True,
        ),
        Optimizer(
            name="ademamix",
            meaning="bitsandbytes AdEMAMix, three moments in 32 bits",
            source="bitsandbytes 0.50 optim/ademamix.py",
            states=_ADEMAMIX_32BIT,
        ),
        Optimizer(
            name="ademamix-8bit",
            meaning="bitsandbytes AdEMAMix, three moments in 8 bits",
            source="bitsandbytes 0.50 optim/ademamix.py",
            states=_ADEMAMIX_8BIT,
        ),
        Optimizer(
            name="paged-ademamix",
            meaning="bitsandbytes AdEMAMix in paged memory",
            source="bitsandbytes 0.50 optim/ademamix.py",
            states=_ADEMAMIX_32BIT,
            paged=True,
        ),
        Optimizer(
            name="paged-ademamix-8bit",
            meaning="bitsandbytes 8-bit AdEMAMix in paged memory",
            source="bitsandbytes 0.50 optim/ademamix.py",
            states=_ADEMAMIX_8BIT,
            paged=True,
        ),
        Optimizer(
            name="adafactor",
            meaning="Adafactor with factored second moment, no momentum",
            source="transformers 5.23 optimization.py Adafactor.step",
            states=(
                State(name="exp_avg_sq_row", dtype=FP32, elements=rows),
                State(name="exp_avg_sq_col", dtype=FP32, elements=columns),
                State(name="RMS", dtype=FP32, elements=scalar),
            ),
            script=(
                *_WIDE,
                *_FACTORED_UPDATE,
                Temporary(name="negative", dtype=FP32),
                "negative",
                "wide gradient",
            ),
            kernels=(
                "wide gradient = gradient",
                "wide weight = weight",
                "= wide weight",
                *_FACTORED_KERNELS,
                *("update = update",) * 2,
                "negative = update",
                "wide weight = wide weight, negative",
                "weight = wide weight",
            ),
        ),
        Optimizer(
            name="lion",
            meaning="Lion, one momentum",
            source="arXiv 2302.06675; lion-pytorch 0.2.5 lion_pytorch.py update_fn",
            states=(State(name="exp_avg"),),
            script=(Temporary(name="scaled"), Temporary(name="update"), "scaled"),
            kernels=(
                "weight = weight",
                "scaled = exp_avg",
                "scaled = scaled",
                "update = scaled, gradient",
                "update = update",
                "weight = weight, update",
                "exp_avg = exp_avg",
                "exp_avg = exp_avg, gradient",
            ),
        ),
        Optimizer(
            name="lion-bnb",
            meaning="bitsandbytes Lion with a 32-bit momentum",
            source=_BNB,
            states=(_wide("state1"),),
        ),
        Optimizer(
            name="lion-8bit",
            meaning="bitsandbytes Lion with an 8-bit momentum",
            source=_BNB,
            states=_eight_bit("state1", 1),
        ),
        Optimizer(
            name="paged-lion",
            meaning="bitsandbytes Lion, 32-bit momentum in paged memory",
            source=_BNB,
            states=(_wide("state1"),),
            paged=True,
        ),
        Optimizer(
            name="paged-lion-8bit",
            meaning="bitsandbytes 8-bit Lion in paged memory",
            source=_BNB,
            states=_eight_bit("state1", 1),
            paged=True,
        ),
        Optimizer(
            name="rmsprop-bnb",
            meaning="bitsandbytes RMSprop with a 32-bit state",
            source=_BNB,
            states=(_wide("state1"),),
        ),
        Optimizer(
            name="rmsprop-8bit",
            meaning="bitsandbytes RMSprop with an 8-bit state",
            source=_BNB,
            states=_eight_bit("state1", 1),
        ),
        Optimizer(
            name="muon",
            meaning=(
                "Muon on matrices (momentum, five Newton-Schulz steps in bf16), AdamW elsewhere"
            ),
            source=_TORCH + "_muon.py _single_tensor_muon, _zeropower_via_newtonschulz",
            states=(State(name="momentum_buffer"),),
            matrix_only=True,
            products=newton_schulz(5),
            kernels=(
                "momentum_buffer = momentum_buffer, gradient",
                "update = gradient, momentum_buffer",
                "orthogonal = update",
                "= orthogonal",
                "orthogonal = orthogonal",
                "weight = weight",
                "weight = weight, orthogonal",
            ),
            script=(
                Temporary(name="update"),
                Temporary(name="orthogonal", dtype=BF16, cast_of="update"),
                Temporary(name="gram", dtype=BF16, elements=gram),
                Temporary(name="gram update", dtype=BF16, elements=gram),
                Temporary(name="orthogonal", dtype=BF16),
                Temporary(name="gram", dtype=BF16, elements=gram),
                Temporary(name="gram update", dtype=BF16, elements=gram),
                Temporary(name="orthogonal", dtype=BF16),
                "gram",
                "gram update",
                "update",
            ),
        ),
        Optimizer(
            name="galore",
            meaning="GaLore: Adam moments in a rank-128 projection",
            source=(
                "arXiv 2403.03507; galore-torch 1.0 adamw.py GaLoreAdamW.step, galore_projector.py"
                " project, project_back; its SVD every 200 steps is in the memory, not in the time"
            ),
            states=_GALORE,
            products=(projected(128), projected_back(128)),
            kernels=(*_LOW_RANK_ADAM, "scaled = projected back", "weight = weight, scaled"),
            script=(
                Temporary(name="matrix", dtype=FP32, cast_of="gradient"),
                Temporary(name="left vectors", dtype=FP32),
                Temporary(name="right vectors", dtype=FP32, elements=gram),
                "matrix",
                "left vectors",
                "right vectors",
                Temporary(name="projected", elements=low_rank(128)),
                Temporary(name="denominator", elements=low_rank(128)),
                Temporary(name="step", elements=low_rank(128)),
                Temporary(name="projected back"),
                Temporary(name="scaled"),
                "projected back",
            ),
        ),
        Optimizer(
            name="soap",
            meaning=(
                "SOAP: Adam in the eigenbasis of Shampoo's factors, of sides up to 10,000; vectors"
                " as Adam"
            ),
            source=(
                "arXiv 2409.11321; nikhilvyas/SOAP a1e5535 soap.py step, update_preconditioner,"
                " get_orthogonal_matrix_QR; the QR every 10 steps is in the memory, not in the time"
            ),
            states=(  # the factors are of torch's default type: it has to be the parameters'
                *_ADAM,
                State(name="GG", elements=_factors),
                State(name="Q", elements=_factors),
            ),
            products=tuple(_side_product(side, gram) for side in (0, 1) for gram in (False, True)),
            kernels=(
                "exp_avg = exp_avg",
                "exp_avg = exp_avg, grad_projected",
                "exp_avg_sq = exp_avg_sq",
                "square = grad_projected",
                "exp_avg_sq = exp_avg_sq, square",
                "denom = exp_avg_sq",
                "denom = denom",
                "quotient = exp_avg, denom",
                "weight = weight, norm_grad",
                "weight = weight",
                "GG = GG, outer_product",
            ),
            script=(
                Temporary(name="half"),
                Temporary(name="grad_projected"),
                "half",
                Temporary(name="square"),
                "square",
                Temporary(name="denom"),
                Temporary(name="quotient"),
                Temporary(name="half"),
                "quotient",
                Temporary(name="norm_grad"),
                "half",
                Temporary(name="half"),  # update_preconditioner: exp_avg out of the old basis
                Temporary(name="rotated"),
                "half",
                "rotated",
                Temporary(name="outer_product", elements=_factors),
                Temporary(name="factors", dtype=FP32, elements=_wide_factors, cast_of="gradient"),
                Temporary(name="m o", dtype=FP32, elements=_largest_factor),
                Temporary(name="est_eig", dtype=FP32, elements=_largest_factor),
                "m o",
                "est_eig",
                Temporary(name="sorted exp_avg_sq"),
                Temporary(name="sorted exp_avg_sq"),
                Temporary(name="sorted Q", dtype=FP32, elements=_largest_factor),
                Temporary(name="power_iter", dtype=FP32, elements=_largest_factor),
                Temporary(name="new Q", dtype=FP32, elements=_factors),
                Temporary(name="R", dtype=FP32, elements=_largest_factor),
                *("R", "power_iter", "sorted Q", "factors", "sorted exp_avg_sq", "new Q"),
                Temporary(name="half"),  # exp_avg into the new basis
                Temporary(name="rotated"),
                *("half", "rotated", "outer_product"),
            ),
        ),
        Optimizer(
            name="apollo",
            meaning="APOLLO: Adam moments in a rank-256 random projection made from a seed",
            source=(
                "arXiv 2412.05270; apollo-torch 1.0.3 apollo.py APOLLOAdamW.step,"
                " random_projector.py project"
            ),
            products=(projected(256),),
            kernels=(
                *_LOW_RANK_ADAM,
                "= step",
                "= projected",
                "scaled gradient = gradient",
                "= scaled gradient",
                *("scaled gradient = scaled gradient",) * 2,
                "weight = weight, scaled gradient",
            ),
            states=(
                State(name="exp_avg", elements=low_rank(256)),
                State(name="exp_avg_sq", elements=low_rank(256)),
            ),
            script=(
                Temporary(name="projection", elements=projector(256)),
                Temporary(name="projected", elements=low_rank(256)),
                "projection",
                Temporary(name="denominator", elements=low_rank(256)),
                Temporary(name="step", elements=low_rank(256)),
                Temporary(name="scaled gradient"),
                Temporary(name="scaled gradient"),
            ),
        ),
        Optimizer(
            name="lomo",
            meaning="LOMO: SGD fused into the backward, no states, no stored gradients",
            source="arXiv 2306.09782; lomo-optim 0.1.1 lomo.py Lomo.fuse_update",
            script=_WIDE,
            kernels=(
                "wide gradient = gradient",
                "wide weight = weight",
                "wide weight = wide weight, wide gradient",
                "weight = wide weight",
            ),
            in_backward=True,
        ),
        Optimizer(
            name="adalomo",
            meaning="AdaLomo: Adafactor's second moment, fused into the backward",
            source="arXiv 2310.10195; lomo-optim 0.1.1 adalomo.py AdaLomo.fuse_update",
            states=(
                State(name="exp_avg_sq_row", dtype=FP32, elements=rows),
                State(name="exp_avg_sq_col", dtype=FP32, elements=columns),
            ),
            script=(
                _WIDE[0],
                *_FACTORED_UPDATE,
                _WIDE[1],
            ),
            kernels=(
                "wide gradient = gradient",
                "wide gradient = wide gradient",
                *_FACTORED_KERNELS,
                "update = update",
                "wide weight = weight",
                "= wide weight",
                "wide weight = wide weight, update",
                "weight = wide weight",
            ),
            in_backward=True,
        ),
        Optimizer(
            name="came",
            meaning="CAME: Adafactor with a momentum and factors of its own error, in fp32",
            source="arXiv 2307.02047; came-pytorch 0.1.3 CAME.py CAME.step",
            states=(
                State(name="exp_avg", dtype=FP32),
                State(name="exp_avg_sq_row", dtype=FP32, elements=rows),
                State(name="exp_avg_sq_col", dtype=FP32, elements=columns),
                State(name="exp_avg_res_row", dtype=FP32, elements=matrix_rows),
                State(name="exp_avg_res_col", dtype=FP32, elements=columns),
            ),
            script=(
                _WIDE[0],
                *_FACTORED_UPDATE,
                Temporary(name="difference", dtype=FP32),
                Temporary(name="error", dtype=FP32),
                "difference",
                Temporary(name="error", dtype=FP32),
                Temporary(name="update", dtype=FP32),
                Temporary(name="negative", dtype=FP32),
                "negative",
            ),
            kernels=(
                "wide gradient = gradient",
                "= weight",
                *_FACTORED_KERNELS,
                "update = update",
                "exp_avg = exp_avg",
                "exp_avg = exp_avg, update",
                "difference = update, exp_avg",
                "error = difference",
                "error = error",
                *("= error", "exp_avg_res_row = exp_avg_res_row") * 2,
                *("exp_avg_res_row = exp_avg_res_row",) * 3,
                "exp_avg_res_col = exp_avg_res_col",
                "update = exp_avg_res_row, exp_avg_res_col",
                "update = update, exp_avg",
                "update = update",
                "negative = update",
                "weight = weight, negative",
            ),
        ),
        Optimizer(
            name="prodigy",
            meaning="Prodigy: Adam that finds its learning rate; the first weights and `s` beside"
            " the moments (of weights that begin as zeros the package keeps no copy; it is counted)",
            source="arXiv 2306.06101; prodigyopt 1.1.2 prodigy.py Prodigy.step",
            states=(State(name="s"), State(name="p0"), *_ADAM),
            script=(
                Temporary(name="difference"),
                "difference",
                Temporary(name="absolute"),
                "absolute",
                Temporary(name="denominator"),
                Temporary(name="denominator"),
            ),
            kernels=(
                "difference = p0, weight",
                "= gradient, difference",
                *_ADAM_MOMENTS,
                "s = s",
                "s = s, gradient",
                "absolute = s",
                "= absolute",
                "denominator = exp_avg_sq",
                "denominator = denominator",
                "weight = weight, exp_avg, denominator",
            ),
        ),
        *(  # RAdam's first steps, without the second moment, are not priced
            Optimizer(
                name=f"schedule-free-{kind.lower()}",
                meaning=f"schedule-free {kind}: the point `z` instead of a momentum",
                source=f"arXiv 2405.15682; schedulefree 1.4.1 {kind.lower()}_schedulefree.py",
                states=_SCHEDULE_FREE,
                foreach=("denominator",),
                kernels=_SCHEDULE_FREE_KERNELS,
                multi_tensor=True,
            )
            for kind in ("AdamW", "RAdam")
        ),
        Optimizer(
            name="schedule-free-sgd",
            meaning="schedule-free SGD: the point `z` alone",
            source="schedulefree 1.4.1 sgd_schedulefree.py, foreach",
            states=_SCHEDULE_FREE[:1],
            kernels=_SCHEDULE_FREE_KERNELS[-3:],
            multi_tensor=True,
        ),
        Optimizer(
            name="anyprecision-adamw",
            meaning="AdamW with states and Kahan compensation in the parameter's type",
            source="torchdistx optimizers/anyprecision_optimizer.py",
            states=(*_ADAM, State(name="compensation")),
            kernels=(
                *_ANY_PRECISION,
                "compensation = compensation, exp_avg, denominator",
                "before = weight",
                "weight = weight, compensation",
                "before = before, weight",
                "compensation = compensation, before",
            ),
            script=(*_ROOT, Temporary(name="before")),
        ),
        Optimizer(
            name="anyprecision-adamw-fp32",
            meaning="the Trainer's adamw_anyprecision: fp32 moments, no compensation",
            source=(
                "transformers 5.23 trainer_optimizer.py; torchdistx"
                " optimizers/anyprecision_optimizer.py"
            ),
            states=(State(name="exp_avg", dtype=FP32), State(name="exp_avg_sq", dtype=FP32)),
            kernels=(*_ANY_PRECISION, "weight = weight, exp_avg, denominator"),
            script=(
                Temporary(name="root", dtype=FP32),
                Temporary(name="denominator", dtype=FP32),
                "root",
            ),
        ),
    )
}
ALIASES = {
    "adamw_torch": "adamw-foreach",
    "adamw_torch_fused": "adamw-fused",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit-torchao",
    "adamw_torch_4bit": "adamw-4bit-torchao",
    "paged_adamw_8bit": "paged-adamw-8bit",
    "paged_adamw_32bit": "paged-adamw",
    "adam": "adamw",
    "sgd-momentum": "momentum",
    "adamw-loop": "adamw",
    "adamw_hf": "adamw",
    "lion_32bit": "lion-bnb",
    "lion_8bit": "lion-8bit",
    "paged_lion_32bit": "paged-lion",
    "paged_lion_8bit": "paged-lion-8bit",
    "galore_adamw": "galore",
    "apollo_adamw": "apollo",
    "adamw_anyprecision": "anyprecision-adamw-fp32",
    "ademamix_8bit": "ademamix-8bit",
    "paged_ademamix_32bit": "paged-ademamix",
    "paged_ademamix_8bit": "paged-ademamix-8bit",
    "came_pytorch": "came",
    "rmsprop_bnb": "rmsprop-bnb",
    "rmsprop_bnb_8bit": "rmsprop-8bit",
    "rmsprop_bnb_32bit": "rmsprop-bnb",
}


def find_optimizer(name: str) -> Optimizer:
    """The row of that name or of the Trainer's `optim` string, with `-` or `_` between its words;
    raises InputError with the nearest names."""
    wanted = name.lower()
    if wanted.partition(":")[0] == "adamw-te":
        from napkinmath.catalog.te_adam import te_adam

        return te_adam(OPTIMIZERS["adamw-te"], wanted.partition(":")[2])
    spelt = wanted, wanted.replace("-", "_"), wanted.replace("_", "-")
    row = next((OPTIMIZERS[n] for n in (ALIASES.get(n, n) for n in spelt) if n in OPTIMIZERS), None)
    if row is None:
        raise InputError(
            f"optimizer {shown(name)} is unknown; use one of"
            f" {', '.join(OPTIMIZERS)}{suggest(name, [*OPTIMIZERS, *ALIASES])}"
        )
    return row


def applied_to(row: Optimizer, axes: Axes, kind: str) -> Optimizer:
    """The optimizer itself, or its fallback for a weight that is no hidden matrix."""
    if row.matrix_only and (len(axes) != 2 or kind in ("embedding", "head")):
        return find_optimizer(row.fallback)
    return row
