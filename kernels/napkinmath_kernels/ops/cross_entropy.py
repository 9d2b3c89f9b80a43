"""The loss of a language model's head without its logits: chunks of rows, gradients computed in the
forward.

    s = softcap tanh(h W^T / softcap)                                      (softcap 0: s = h W^T)
    loss_i = (1 - e) (lse(s_i) - s_i[t_i]) + e (lse(s_i) - mean(s_i)) + z lse(s_i)^2
    loss = sum of loss_i over targets that are not ignore_index / (their number, `num_items`, or 1)

Rows whose target is ignored are dropped before the first GEMM. A chunk holds `chunk_bytes` of
logits; its kernel turns them into their gradient in place, and two GEMMs (three with a trained
head) use them at once. So the forward keeps d hidden (T x h, hidden's dtype) and, for a trained
head only, d weight (v x h), and the backward multiplies them by the upstream gradient. Temporaries:
one chunk of logits; fp32 sums of d weight when there is more than one chunk; copies of the kept
rows if any is ignored. In fp16 a mean's gradients, of the order of 1 / T, are held T times as large
until the backward: they would lose their digits, or all, before a GradScaler can lift them. The
upstream gradient multiplies in fp32. A head may have a LoRA adapter: its output is added to each
chunk of logits, and the adapted head is never made. No valid target at all gives loss 0 and zero gradients. FLOPs
4 T h v (6 T h v with a trained head). See `costs.linear_cross_entropy`. Sources: Hsu et al. 2024
(arXiv 2410.10989) for gradients in the forward; Wijmans et al. 2024 (arXiv 2411.09009) for
filtering.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..backend import runs_triton
from ..errors import KernelInputError
from .head_chunks import (
    DEFAULT_CHUNK_BYTES,
    HeadTerms,
    ProjectedAdapter,
    adapter_term,
    fake_results,
    gradient_lift,
    logits_buffer,
    rows_per_chunk,
)
from .linear_group import LoraAdapter

FALLBACK = "torch.nn.functional.cross_entropy"
#: Counting the valid targets waits for the GPU: torch.compile leaves the op out of its CUDA graphs.
NO_CUDA_GRAPH = (torch.Tag.cudagraph_unsafe,)


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def reference_chunk(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    scale: torch.Tensor,
    softcap: float,
    smoothing: float,
    z_weight: float,
    gradient: bool,
) -> None:
    """Writes the rows' losses and, if `gradient`, replaces the logits by scale times their
    gradient; in plain torch."""
    wide = _compute(logits)
    bent = torch.tanh(wide / softcap) if softcap > 0 else None
    capped = wide if bent is None else softcap * bent
    log_sum = torch.logsumexp(capped, -1)
    chosen = capped.gather(1, targets[:, None]).squeeze(1)
    smoothed = (
        smoothing * capped.mean(-1) if smoothing else 0.0
    )  # 0 times the mean of a masked vocabulary would be NaN
    losses.copy_(log_sum - (1 - smoothing) * chosen - smoothed + z_weight * log_sum.square())
    if not gradient:
        return
    slope = (
        torch.softmax(capped, -1) * (1 + 2 * z_weight * log_sum)[:, None]
        - smoothing / logits.shape[1]
    )
    slope.scatter_add_(
        1, targets[:, None], slope.new_full((1, 1), smoothing - 1).expand(targets.shape[0], 1)
    )
    if bent is not None:
        slope *= 1 - bent.square()
    logits.copy_(slope * scale)


def _run_chunk(*arguments: Any) -> None:
    if runs_triton("linear_cross_entropy", arguments[0]):
        from ..triton_kernels.cross_entropy import cross_entropy_of_chunk

        cross_entropy_of_chunk(*arguments)
    else:
        reference_chunk(*arguments)


def keep_valid(
    op: str, targets: torch.Tensor, vocabulary: int, ignore_index: int
) -> tuple[int, torch.Tensor | None]:
    """(number of valid targets, their indices or None if all are); one synchronisation with the
    GPU."""
    valid = targets != ignore_index
    # no values to count: as in a language model's batch, whose last label has no next token, one is
    # ignored
    if targets.is_meta:
        return targets.shape[0] - 1, torch.nonzero_static(valid, size=targets.shape[0] - 1).squeeze(
            1
        )
    outside = valid & ((targets < 0) | (targets >= vocabulary))
    num_valid, num_outside = torch.stack((valid.sum(), outside.sum())).tolist()
    if num_outside:
        worst = targets[outside][0].item()
        accepted = f"0 to {vocabulary - 1}, or ignore_index={ignore_index}"
        raise KernelInputError(
            op,
            f"target {worst}",
            accepted,
            "check the tokenizer against the head's vocabulary",
        )
    if num_valid == targets.shape[0]:
        return num_valid, None
    return num_valid, torch.nonzero_static(valid, size=num_valid).squeeze(1)


def _divisor(
    num_items: torch.Tensor | None, count: int, hidden: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What the sum of the losses is divided by, on hidden's device; 1 for a batch without a valid
    target, whose loss is 0 and not 0 / 0."""
    divisor = torch.tensor(count, device=hidden.device) if num_items is None else num_items
    divisor = divisor.to(hidden.device, dtype)
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("napkinmath::linear_cross_entropy", mutates_args=(), tags=NO_CUDA_GRAPH)
def _linear_cross_entropy_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    low: torch.Tensor,
    low_weight: torch.Tensor,
    targets: torch.Tensor,
    num_items: torch.Tensor | None,
    mean: bool,
    ignore_index: int,
    softcap: float,
    smoothing: float,
    z_weight: float,
    chunk_bytes: int,
    has: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, d hidden, d weight, d low, d low_weight); what `has` does not ask for is empty. `low`
    (T x r) and `low_weight` (v x r) are an adapter's, or empty."""
    vocabulary = weight.shape[0]
    num_valid, kept = keep_valid("linear_cross_entropy", targets, vocabulary, ignore_index)
    statistics = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    step = rows_per_chunk(max(1, num_valid), vocabulary, hidden.element_size(), chunk_bytes)
    lift = gradient_lift(hidden, weight, mean or num_items is not None, has[1] or has[3])
    tensors = (hidden, weight, low, low_weight)
    terms = HeadTerms(tensors, kept, -(-num_valid // step), lift, has)
    labels = targets if kept is None else targets.index_select(0, kept)
    divisor = _divisor(num_items, max(1, num_valid) if mean else 1, hidden, statistics)
    scale = divisor.reciprocal() if lift == 1.0 else lift / divisor
    losses = torch.empty((num_valid,), dtype=statistics, device=hidden.device)
    buffer = logits_buffer(hidden, step, vocabulary)
    options = (scale, softcap, smoothing, z_weight, any(has))
    for first in range(0, num_valid, step):
        last = min(first + step, num_valid)
        logits = terms.logits(first, last, buffer[: last - first])
        _run_chunk(logits, labels[first:last], losses[first:last], *options)
        terms.add(logits, first, last)
    found = terms.results()
    loss = (losses.sum(dtype=torch.float64) / divisor).to(statistics)
    return loss, found[0], found[1], found[2], found[3]


@_linear_cross_entropy_op.register_fake
def _(*given: Any) -> Five:
    hidden, has = given[0], given[-1]
    wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    found = fake_results(given[:4], has, hidden)
    return hidden.new_empty((), dtype=wide), found[0], found[1], found[2], found[3]


@torch.library.custom_op("napkinmath::scale_gradient", mutates_args=())
def scale_gradient_op(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x times a factor of one element, computed in fp32 and rounded once to the type of x."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x * factor
    if not runs_triton("linear_cross_entropy", x):
        return (x.float() * factor).to(x.dtype)
    from ..triton_kernels.cross_entropy import scale

    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale(x, factor.float(), out)
    return out


@scale_gradient_op.register_fake
def _(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def keep_gradients(
    ctx: Any, inputs: tuple[Any, ...], gradients: tuple[torch.Tensor, ...], is_mean: bool
) -> None:
    """Saves what a forward has made: gradients of hidden, weight, low and low_weight."""
    hidden, weight = inputs[:2]
    ctx.has = inputs[-1]
    ctx.lift = gradient_lift(hidden, weight, is_mean, ctx.has[1] or ctx.has[3])
    ctx.save_for_backward(*(x for x, has in zip(gradients, ctx.has, strict=True) if has))
    ctx.set_materialize_grads(False)


def kept_gradients(
    op: str, fallback: str, ctx: Any, upstream: torch.Tensor
) -> list[torch.Tensor | None]:
    """Those gradients times the loss's own."""
    checks.refuse_second_derivative(op, fallback)  # what is saved would pass for a constant
    saved = iter(ctx.saved_tensors)
    of_rows = upstream if ctx.lift == 1.0 else upstream / ctx.lift
    factors = (of_rows, upstream, of_rows, upstream)  # d weight was brought down in fp32
    return [
        scale_gradient_op(next(saved), factor) if has else None
        for has, factor in zip(ctx.has, factors, strict=True)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    num_items, mean = inputs[5:7]
    keep_gradients(ctx, inputs, output[1:], mean or num_items is not None)
    ctx.mark_non_differentiable(*output[1:])


def _autograd(ctx: Any, upstream: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    if upstream is None:
        return (None,) * 13
    return (*kept_gradients("linear_cross_entropy", FALLBACK, ctx, upstream), *(None,) * 9)


_linear_cross_entropy_op.register_autograd(_autograd, setup_context=_setup)


def check_head(op: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Raises KernelInputError for what is no head: types, shapes, devices."""
    checks.require_tensors(op, FALLBACK, hidden=hidden, weight=weight, targets=targets)
    checks.require_dtype(op, "hidden", hidden, FALLBACK)
    checks.require_dtype(op, "weight", weight, FALLBACK)
    has_values = hidden.dim() >= 2 and hidden.shape[-1] > 0 and weight.shape[:1] != (0,)
    sizes = f"hidden of shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    checks.require(
        has_values,
        op,
        sizes,
        "(..., hidden_size) and (vocabulary, hidden_size), neither empty",
        FALLBACK,
    )
    shapes = f"weight of shape {tuple(weight.shape)} for hidden {tuple(hidden.shape)}"
    checks.require(
        weight.dim() == 2 and weight.shape[1] == hidden.shape[-1],
        op,
        shapes,
        f"(vocabulary, {hidden.shape[-1]})",
        FALLBACK,
    )
    checks.require_shape(op, "targets", targets, tuple(hidden.shape[:-1]), FALLBACK)
    checks.require(
        targets.dtype is torch.int64, op, f"targets of {targets.dtype}", "int64", "targets.long()"
    )
    checks.require_same_device(op, FALLBACK, hidden=hidden, weight=weight, targets=targets)


def check_adapter(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    adapter: LoraAdapter | ProjectedAdapter | None,
) -> None:
    """Raises KernelInputError for an adapter that does not fit its head."""
    if adapter is None:
        return
    if isinstance(adapter, ProjectedAdapter):
        given = {"low": adapter.low, "b": adapter.b}
        first, shape = "low", (*hidden.shape[:-1], adapter.low.shape[-1])
        rank = adapter.low.shape[-1]
    else:
        given = {"lora_a": adapter.a, "lora_b": adapter.b}
        rank = adapter.a.shape[0]
        first, shape = "lora_a", (rank, weight.shape[1])
    checks.require_tensors(op, FALLBACK, **given)
    for name, x in given.items():
        checks.require_dtype(op, name, x, FALLBACK)
    checks.require_shape(op, first, given[first], shape, FALLBACK)
    checks.require_shape(op, "lora_b", adapter.b, (weight.shape[0], rank), FALLBACK)
    checks.require_same_device(op, FALLBACK, hidden=hidden, **given)


def _check_options(
    reduction: str,
    ignore_index: int,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    chunk_bytes: int,
) -> None:
    op = "linear_cross_entropy"
    for name, value in (
        ("softcap", softcap),
        ("label_smoothing", label_smoothing),
        ("z_loss", z_loss),
    ):
        checks.require(
            checks.is_number(value), op, f"{name} {value!r}", "a finite number", FALLBACK
        )
    for name, value in (("ignore_index", ignore_index), ("chunk_bytes", chunk_bytes)):
        checks.require(checks.is_whole(value), op, f"{name} {value!r}", "an int", FALLBACK)
    checks.require(
        reduction in ("mean", "sum"),
        op,
        f"reduction {reduction!r}",
        "'mean' or 'sum'",
        f"{FALLBACK}(reduction='none')",
    )
    checks.require(softcap >= 0, op, f"softcap {softcap}", "0 (none) or a positive cap", FALLBACK)
    checks.require(
        0 <= label_smoothing < 1,
        op,
        f"label_smoothing {label_smoothing}",
        "0 up to, not including, 1",
        FALLBACK,
    )
    checks.require(z_loss >= 0, op, f"z_loss {z_loss}", "0 or a positive weight", FALLBACK)
    checks.require(
        chunk_bytes > 0, op, f"chunk_bytes {chunk_bytes}", "a positive number of bytes", FALLBACK
    )


def loss_divisor(op: str, num_items: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """`num_items` as a scalar on hidden's device; a tensor's value is not looked at, which would
    wait for the GPU."""
    if num_items is None:
        return None
    accepted = "None, a positive number, or a tensor of one that requires no gradient"
    if isinstance(num_items, torch.Tensor):
        fits = num_items.numel() == 1 and not num_items.requires_grad
        shown = (
            f"num_items of shape {tuple(num_items.shape)}, requires_grad={num_items.requires_grad}"
        )
        checks.require(fits, op, shown, accepted, FALLBACK)
        return num_items.reshape(()).to(hidden.device)
    fits = checks.is_number(num_items) and num_items > 0
    checks.require(fits, op, f"num_items {num_items!r}", accepted, FALLBACK)
    return torch.as_tensor(num_items, device=hidden.device)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | torch.Tensor | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    adapter: LoraAdapter | ProjectedAdapter | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> torch.Tensor:
    """cross_entropy(softcap(hidden @ weight.T), targets), an fp32 scalar, without holding the
    logits.

    hidden (..., h) bf16, fp16 or fp32; weight (v, h), computed in hidden's dtype; targets (...)
    int64. `num_items` divides the sum in place of the number of valid targets, as HF's trainers ask
    with gradient accumulation. `adapter` is a LoRA on the head: its product is added to each chunk
    of logits. Raises KernelInputError, also for targets outside the vocabulary.
    """
    check_head("linear_cross_entropy", hidden, weight, targets)
    _check_options(reduction, ignore_index, softcap, label_smoothing, z_loss, chunk_bytes)
    check_adapter("linear_cross_entropy", hidden, weight, adapter)
    divisor = loss_divisor("linear_cross_entropy", num_items, hidden)
    hidden = to_autocast_dtype(hidden)
    rows = hidden.reshape(-1, hidden.shape[-1])
    tensors = (rows, weight, *adapter_term(rows, adapter))
    recording = torch.is_grad_enabled()
    return _linear_cross_entropy_op(
        *tensors,
        targets.reshape(-1),
        divisor,
        reduction == "mean",
        ignore_index,
        float(softcap),
        float(label_smoothing),
        float(z_loss),
        chunk_bytes,
        [recording and x.requires_grad for x in tensors],
    )[0]


class LinearCrossEntropy(torch.nn.Module):
    """A language-model head fused with its loss; `weight` (vocabulary, hidden) may be shared with
    the embedding."""

    def __init__(self, weight: torch.nn.Parameter, **options: Any) -> None:
        super().__init__()
        self.weight = weight
        self.options = options

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See `linear_cross_entropy`."""
        return linear_cross_entropy(hidden, self.weight, targets, **self.options)
