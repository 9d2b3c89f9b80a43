"""The divergence of a student's distribution from a teacher's over the vocabulary, of both models'
hidden states and heads, without the logits of either: what distillation's losses are made of.

    z = softcap(logit_scale h W^T) / temperature,     s, t = softmax of the student's, the teacher's
    beta 0:  KL(t || s)            forward KL                d / dz = s - t
    beta 1:  KL(s || t)            reverse KL                d / dz = s (log s - log t - KL)
    between: beta KL(t || m) + (1 - beta) KL(s || m), m = beta t + (1 - beta) s
                                   generalized JSD           d / dz = (1 - beta) s (log s - log m - KL(s || m))

Rows that the mask leaves out are dropped before the first product. A chunk holds a piece of both
models' logits; its kernel turns the student's into their gradient in place, and the products with
it follow at once. So the forward keeps d hidden (T x h, in its type) and of a trained head d weight
(v x h), and the backward multiplies them by the upstream gradient, as `linear_cross_entropy` does.
The teacher has no gradient. A student's head may have a LoRA adapter: its output is added to each
chunk of logits, and the adapted head is never made. FLOPs 2 T v (2 h + h') (2 T v (3 h + h') with a
trained head) for hidden sizes h and h'. See `costs.linear_divergence`. Sources: Agarwal et al. 2024
(arXiv 2306.13649) equation 1; trl 1.16 experimental/gkd/gkd_trainer.py generalized_jsd_loss, whose
beta this is.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..backend import runs_triton
from .cross_entropy import (
    NO_CUDA_GRAPH,
    check_adapter,
    keep_gradients,
    kept_gradients,
    loss_divisor,
)
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

OP = "linear_divergence"
FALLBACK = "torch.nn.functional.kl_div of log_softmax of both logits"


class Divergence(NamedTuple):
    """The loss, a scalar of fp32 with a gradient; and the student's entropy in nats, summed over
    the rows that count, where it was asked for."""

    loss: torch.Tensor
    entropy: torch.Tensor | None


class Shaping(NamedTuple):
    """What stands between a product with a head and a softmax: of the student, of the teacher."""

    scales: tuple[float, float]
    softcaps: tuple[float, float]
    inverse_temperature: float


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _scores(
    logits: torch.Tensor, scale: float, softcap: float, inverse_temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, d score / d logit)."""
    bent = _compute(logits) * scale
    slope = torch.full_like(bent, scale * inverse_temperature)
    if softcap > 0:
        bent = softcap * torch.tanh(bent / softcap)
        slope *= 1 - (bent / softcap).square()
    return bent * inverse_temperature, slope


def _of(share: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
    """share times gap, where a word without a share adds 0."""
    return torch.where(share > 0, share * gap, 0.0)


def _reference_chunk(
    logits: torch.Tensor,
    taught: torch.Tensor,
    losses: torch.Tensor,
    entropies: torch.Tensor | None,
    scale: torch.Tensor,
    beta: float,
    shaping: Shaping,
    gradient: bool,
) -> None:
    """The kernel in plain torch."""
    (scale_own, scale_taught), (cap_own, cap_taught), cold = shaping
    z, slope = _scores(logits, scale_own, cap_own, cold)
    y, _ = _scores(taught, scale_taught, cap_taught, cold)
    z, y = (x - x.amax(-1, keepdim=True) for x in (z, y))
    rest, taught_rest = (x.exp().sum(-1, keepdim=True).log() for x in (z, y))
    own = z - rest
    share, teacher = own.exp(), (y - taught_rest).exp()
    # of the two log-probabilities, less their own roundings
    lead = (y - z) - (taught_rest - rest)
    if entropies is not None:
        entropies.copy_(-_of(share, own).sum(-1))
    if beta == 0:
        losses.copy_(_of(teacher, lead).sum(-1))
        found = share - teacher
    else:
        gaps, more, weight = -_of(share, lead), 0.0, 1.0
        if beta < 1:
            small, behind = torch.exp(-lead.abs()), lead <= 0
            mixed = torch.log(
                torch.where(behind, 1 - beta + beta * small, beta + (1 - beta) * small)
            )
            gaps, weight = _of(share, -mixed - torch.where(behind, 0.0, lead)), 1 - beta
            more = beta * _of(teacher, -mixed + torch.where(behind, lead, 0.0)).sum(-1)
        divergence = gaps.sum(-1)
        found = weight * (gaps - share * divergence[:, None])
        losses.copy_(weight * divergence + more)
    if gradient:
        logits.copy_(found * slope * scale)


def _run_chunk(*arguments: Any) -> None:
    if runs_triton(OP, arguments[0]):
        from ..triton_kernels.divergence import divergence_of_chunk

        divergence_of_chunk(*arguments)
    else:
        _reference_chunk(*arguments)


def _keep(mask: torch.Tensor | None, num_rows: int) -> tuple[int, torch.Tensor | None]:
    """(number of rows that count, their indices or None if all do); one synchronisation with the
    GPU."""
    if mask is None:
        return num_rows, None
    # no values to count: as in a batch of a language model, one label is ignored
    count = num_rows - 1 if mask.is_meta else int(mask.sum().item())
    if count == num_rows:
        return num_rows, None
    return count, torch.nonzero_static(mask, size=count).squeeze(1)


Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("napkinmath::linear_divergence", mutates_args=(), tags=NO_CUDA_GRAPH)
def _divergence_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    low: torch.Tensor,
    low_weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor,
    mask: torch.Tensor | None,
    num_items: torch.Tensor | None,
    mean: bool,
    beta: float,
    scales: list[float],
    softcaps: list[float],
    inverse_temperature: float,
    chunk_bytes: int,
    entropy: bool,
    has: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, entropy, d hidden, d weight, d low, d low_weight); what is not asked for is empty.
    `low` (T x r) and `low_weight` (v x r) are an adapter's, or empty."""
    num_rows, vocabulary = hidden.shape[0], weight.shape[0]
    count, kept = _keep(mask, num_rows)
    wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    divisor = num_items
    if divisor is None:
        divisor = torch.tensor(max(1, count) if mean else 1, device=hidden.device)
    divisor = divisor.to(hidden.device, wide)
    divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    lift = gradient_lift(hidden, weight, mean or num_items is not None, has[1] or has[3])
    scale = divisor.reciprocal() if lift == 1.0 else lift / divisor
    item = max(hidden.element_size(), teacher.element_size())
    step = rows_per_chunk(max(1, count), vocabulary, item, chunk_bytes // 2)
    terms = HeadTerms((hidden, weight, low, low_weight), kept, -(-count // step), lift, has)
    taught_rows = teacher if kept is None else teacher.index_select(0, kept)
    taught_head = teacher_weight.to(teacher.dtype)
    losses = torch.empty((count,), dtype=wide, device=hidden.device)
    entropies = torch.empty((count,), dtype=wide, device=hidden.device) if entropy else None
    buffer, taught_buffer = (logits_buffer(x, step, vocabulary) for x in (hidden, teacher))
    shaping = Shaping((scales[0], scales[1]), (softcaps[0], softcaps[1]), inverse_temperature)
    for first in range(0, count, step):
        last = min(first + step, count)
        logits = terms.logits(first, last, buffer[: last - first])
        taught = taught_buffer[: last - first]
        torch.mm(taught_rows[first:last], taught_head.t(), out=taught)
        some = None if entropies is None else entropies[first:last]
        _run_chunk(logits, taught, losses[first:last], some, scale, beta, shaping, any(has))
        terms.add(logits, first, last)
    found = terms.results()
    total = hidden.new_empty(0) if entropies is None else entropies.sum()
    loss = (losses.sum(dtype=torch.float64) / divisor).to(wide)
    return loss, total, found[0], found[1], found[2], found[3]


@_divergence_op.register_fake
def _(hidden: torch.Tensor, *given: Any) -> Six:
    entropy, has = given[-2:]
    wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    loss, total = (hidden.new_empty((), dtype=wide) for _ in range(2))
    found = fake_results((hidden, *given[:3]), has, hidden)
    total = total if entropy else hidden.new_empty(0)
    return loss, total, found[0], found[1], found[2], found[3]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    num_items, mean = inputs[7:9]
    keep_gradients(ctx, inputs, output[2:], mean or num_items is not None)
    ctx.mark_non_differentiable(*output[1:])


def _autograd(ctx: Any, upstream: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    if upstream is None:
        return (None,) * 16
    return (*kept_gradients(OP, FALLBACK, ctx, upstream), *(None,) * 12)


_divergence_op.register_autograd(_autograd, setup_context=_setup)


def _check_tensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor,
    mask: torch.Tensor | None,
    adapter: LoraAdapter | ProjectedAdapter | None,
) -> None:
    given = {
        "hidden": hidden,
        "weight": weight,
        "teacher_hidden": teacher,
        "teacher_weight": teacher_weight,
    }
    checks.require_tensors(OP, FALLBACK, **given)
    for name, x in given.items():
        checks.require_dtype(OP, name, x, FALLBACK)
    for name, x, head in (("hidden", hidden, weight), ("teacher_hidden", teacher, teacher_weight)):
        fits = x.dim() >= 2 and head.dim() == 2 and x.shape[-1] == head.shape[1] > 0
        shown = f"{name} of shape {tuple(x.shape)}, its weight {tuple(head.shape)}"
        checks.require(
            fits, OP, shown, "(..., hidden_size) and (vocabulary, hidden_size)", FALLBACK
        )
    checks.require_shape(
        OP, "teacher_hidden's rows", teacher[..., 0], tuple(hidden.shape[:-1]), FALLBACK
    )
    words = f"heads of {weight.shape[0]} and {teacher_weight.shape[0]} words"
    accepted = "one vocabulary of both models, not empty"
    checks.require(0 < weight.shape[0] == teacher_weight.shape[0], OP, words, accepted, FALLBACK)
    if mask is not None:
        checks.require_tensors(OP, FALLBACK, mask=mask)
        checks.require_shape(OP, "mask", mask, tuple(hidden.shape[:-1]), FALLBACK)
    check_adapter(OP, hidden, weight, adapter)
    checks.require_same_device(OP, FALLBACK, **given, mask=mask)
    frozen = not (
        teacher_weight.requires_grad and torch.is_grad_enabled() and teacher.requires_grad
    )
    checks.require(frozen, OP, "a teacher with a gradient", "teacher_hidden.detach()", FALLBACK)


def _check_options(
    beta: float,
    temperature: float,
    reduction: str,
    scales: tuple[float, float],
    softcaps: tuple[float, float],
    chunk_bytes: int,
) -> None:
    fits = checks.is_number(beta) and 0 <= beta <= 1
    checks.require(fits, OP, f"beta {beta!r}", "0 (forward KL) to 1 (reverse KL)", FALLBACK)
    for name, value in (("temperature", temperature), *(("logit_scale", x) for x in scales)):
        fits = checks.is_number(value) and value > 0
        checks.require(fits, OP, f"{name} {value!r}", "a positive finite number", FALLBACK)
    for value in softcaps:
        fits = checks.is_number(value) and value >= 0
        checks.require(fits, OP, f"softcap {value!r}", "0 (none) or a positive cap", FALLBACK)
    fits = reduction in ("mean", "sum")
    checks.require(fits, OP, f"reduction {reduction!r}", "'mean' or 'sum'", FALLBACK)
    fits = checks.is_whole(chunk_bytes) and chunk_bytes > 0
    accepted = "a positive number of bytes"
    checks.require(fits, OP, f"chunk_bytes {chunk_bytes!r}", accepted, FALLBACK)


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float = 0.0,
    adapter: LoraAdapter | ProjectedAdapter | None = None,
    entropy: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Divergence:
    """Forward KL (`beta` 0), reverse KL (1) or generalized JSD (between) of a student and a teacher,
    over the rows where `mask` is not 0, without the logits of either.

    hidden (..., h) and teacher_hidden (..., h') bf16, fp16 or fp32; weight (v, h) and
    teacher_weight (v, h'), each computed in its hidden states' dtype; mask (...) of any type.
    Gradients go to hidden, to weight and to `adapter`, the LoRA of the student's head. `num_items`
    divides the sum in place of the number of rows. `chunk_bytes` is of both models' logits
    together. Raises KernelInputError.
    """
    _check_tensors(hidden, weight, teacher_hidden, teacher_weight, mask, adapter)
    scales, softcaps = (logit_scale, teacher_logit_scale), (softcap, teacher_softcap)
    _check_options(beta, temperature, reduction, scales, softcaps, chunk_bytes)
    divisor = loss_divisor(OP, num_items, hidden)
    hidden, teacher_hidden = to_autocast_dtype(hidden), to_autocast_dtype(teacher_hidden.detach())
    rows = hidden.reshape(-1, hidden.shape[-1])
    tensors = (rows, weight, *adapter_term(rows, adapter))
    recording = torch.is_grad_enabled()
    loss, total, *_ = _divergence_op(
        *tensors,
        teacher_hidden.reshape(-1, teacher_hidden.shape[-1]),
        teacher_weight.detach(),
        None if mask is None else mask.reshape(-1) != 0,
        divisor,
        reduction == "mean",
        float(beta),
        [float(x) for x in scales],
        [float(x) for x in softcaps],
        1.0 / float(temperature),
        chunk_bytes,
        entropy,
        [recording and x.requires_grad for x in tensors],
    )
    return Divergence(loss, total if entropy else None)
