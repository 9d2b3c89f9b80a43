"""Log-probabilities of labels under a language model's head without its logits: what the losses of
preferences (DPO, KTO, ORPO, SimPO), of policies (GRPO, RLOO) and likelihoods are made of.

    z = softcap(logit_scale h W^T) / temperature,      log p_i = z_i[t_i] - lse(z_i)

d log p_i / d h_i needs nothing of the loss, which multiplies each row by a number. So with a frozen
head the forward computes it at once, by chunks of rows as `linear_cross_entropy` does: 4 T h v
FLOPs, the rows' gradients kept (T x h), and a backward that scales rows. Computing logits again in
the backward, as TRL's and others' chunked heads do, takes 6 T h v. A trained head's gradient is a
sum over rows of those numbers: its backward makes the logits again, chunk by chunk (8 T h v), and
hidden states are kept in place of gradients. Without gradients, as for a reference, one product is
made and nothing kept. See `costs.linear_log_probabilities`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..backend import runs_triton
from .cross_entropy import NO_CUDA_GRAPH, check_head, keep_valid
from .head_chunks import DEFAULT_CHUNK_BYTES, WeightGradient, logits_buffer, rows_per_chunk

OP = "linear_log_probabilities"
FALLBACK = "torch.log_softmax of the logits, and gather"
#: ignore_index of the op where every target is scored.
SCORE_ALL = -(2**62)
Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TokenLikelihoods(NamedTuple):
    """Of each target, in its shape: fp32 log-probabilities, which alone have a gradient, and where
    they were asked for entropy, mean logit, and whether the target is the likeliest (the first of
    several). Zero where a target is ignored."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    mean_logits: torch.Tensor | None
    is_top1: torch.Tensor | None


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _reference_chunk(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_probs: torch.Tensor,
    statistics: Statistics | None,
    upstream: torch.Tensor | None,
    factor: float,
    softcap: float,
    inverse_temperature: float,
    gradient: bool,
) -> None:
    """The kernel in plain torch."""
    bent = _compute(logits) * factor
    slope = torch.full_like(bent, factor * inverse_temperature)
    if softcap > 0:
        bent = softcap * torch.tanh(bent / softcap)
        slope *= 1 - (bent / softcap).square()
    z = bent * inverse_temperature
    every = torch.log_softmax(z, -1)
    log_probs.copy_(every.gather(1, targets[:, None]).squeeze(1))
    share = every.exp()
    if statistics is not None:
        entropy, mean, top = statistics
        # a masked word adds 0, and not 0 times -inf
        entropy.copy_(-torch.where(share > 0, share * every, 0.0).sum(-1))
        mean.copy_(z.mean(-1))
        top.copy_(z.argmax(-1) == targets)
    if gradient:
        found = -share
        found.scatter_add_(1, targets[:, None], torch.ones_like(share[:, :1]))
        found *= slope
        logits.copy_(found if upstream is None else found * upstream[:, None])


def _run_chunk(*arguments: Any) -> None:
    if runs_triton(OP, arguments[0]):
        from ..triton_kernels.log_probabilities import log_probabilities_of_chunk

        log_probabilities_of_chunk(*arguments)
    else:
        _reference_chunk(*arguments)


class _Chunks:
    """The rows that are scored, and the loop over chunks of their logits in one buffer."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        ignore_index: int,
        chunk_bytes: int,
    ) -> None:
        self.kept: torch.Tensor | None = None
        self.num_rows = targets.shape[0]
        if ignore_index != SCORE_ALL:
            self.num_rows, self.kept = keep_valid(OP, targets, weight.shape[0], ignore_index)
        self.rows = hidden if self.kept is None else hidden.index_select(0, self.kept)
        self.targets = targets if self.kept is None else targets.index_select(0, self.kept)
        self.head = weight.to(hidden.dtype)
        vocabulary = weight.shape[0]
        self.step = rows_per_chunk(
            max(1, self.num_rows), vocabulary, hidden.element_size(), chunk_bytes
        )
        self._buffer = logits_buffer(hidden, self.step, vocabulary)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First row and end of each chunk."""
        count = self.num_rows
        return [(first, min(first + self.step, count)) for first in range(0, count, self.step)]

    def logits(self, first: int, last: int) -> torch.Tensor:
        """Those of some rows, in the buffer."""
        return torch.mm(self.rows[first:last], self.head.t(), out=self._buffer[: last - first])

    def spread(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """What was computed of the scored rows among zeros for the others."""
        if self.kept is None:
            return x
        zeros = torch.zeros((length, *x.shape[1:]), dtype=x.dtype, device=x.device)
        return zeros.index_copy_(0, self.kept, x)


def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    factor: float,
    softcap: float,
    inverse_temperature: float,
    chunk_bytes: int,
    statistics: bool,
    keeps_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chunks = _Chunks(hidden, weight, targets, ignore_index, chunk_bytes)
    count, wide = chunks.num_rows, _statistics_dtype(hidden)
    log_probs = torch.empty((count,), dtype=wide, device=hidden.device)
    found = (
        tuple(
            torch.empty((count,), dtype=t, device=hidden.device) for t in (wide, wide, torch.bool)
        )
        if statistics
        else None
    )
    gradients = (
        torch.empty((count, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
        if keeps_gradient
        else None
    )
    for first, last in chunks.bounds:
        logits = chunks.logits(first, last)
        _run_chunk(
            logits,
            chunks.targets[first:last],
            log_probs[first:last],
            None if found is None else tuple(x[first:last] for x in found),
            None,
            factor,
            softcap,
            inverse_temperature,
            keeps_gradient,
        )
        if gradients is not None:
            torch.mm(logits, chunks.head, out=gradients[first:last])
    length = targets.shape[0]
    nothing = hidden.new_empty(0)
    spread = [chunks.spread(x, length) for x in (log_probs, *(found or ()))]
    spread += [nothing.clone() for _ in range(4 - len(spread))]
    kept = nothing if gradients is None else chunks.spread(gradients, length)
    return spread[0], spread[1], spread[2], spread[3], kept


def _statistics_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype is torch.float64 else torch.float32


@torch.library.custom_op(
    "napkinmath::linear_log_probabilities", mutates_args=(), tags=NO_CUDA_GRAPH
)
def _log_probabilities_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    factor: float,
    softcap: float,
    inverse_temperature: float,
    chunk_bytes: int,
    statistics: bool,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(
        hidden,
        weight,
        targets,
        ignore_index,
        factor,
        softcap,
        inverse_temperature,
        chunk_bytes,
        statistics,
        hidden_gradient and not weight_gradient,
    )


@_log_probabilities_op.register_fake
def _(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    statistics, hidden_gradient, weight_gradient = options[-3:]
    wide, shape = _statistics_dtype(hidden), targets.shape
    more = shape if statistics else (0,)
    keeps = hidden_gradient and not weight_gradient
    return (
        hidden.new_empty(shape, dtype=wide),
        hidden.new_empty(more, dtype=wide if statistics else hidden.dtype),
        hidden.new_empty(more, dtype=wide if statistics else hidden.dtype),
        hidden.new_empty(more, dtype=torch.bool if statistics else hidden.dtype),
        hidden.new_empty(hidden.shape if keeps else (0,)),
    )


@torch.library.custom_op(
    "napkinmath::linear_log_probabilities_backward", mutates_args=(), tags=NO_CUDA_GRAPH
)
def _backward_op(
    upstream: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    factor: float,
    softcap: float,
    inverse_temperature: float,
    chunk_bytes: int,
    hidden_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d hidden, or nothing; d weight) of a trained head: each chunk of logits is made again."""
    chunks = _Chunks(hidden, weight, targets, ignore_index, chunk_bytes)
    given = upstream if chunks.kept is None else upstream.index_select(0, chunks.kept)
    given = given.contiguous()
    d_rows = torch.empty_like(chunks.rows) if hidden_gradient else None
    sums = WeightGradient(weight, hidden.dtype, len(chunks.bounds), 1.0)
    scratch = torch.empty((chunks.step,), dtype=_statistics_dtype(hidden), device=hidden.device)
    for first, last in chunks.bounds:
        logits = chunks.logits(first, last)
        _run_chunk(
            logits,
            chunks.targets[first:last],
            scratch[: last - first],
            None,
            given[first:last],
            factor,
            softcap,
            inverse_temperature,
            True,
        )
        if d_rows is not None:
            torch.mm(logits, chunks.head, out=d_rows[first:last])
        sums.add(logits, chunks.rows[first:last])
    d_hidden = hidden.new_empty(0) if d_rows is None else chunks.spread(d_rows, targets.shape[0])
    return d_hidden, sums.result()


@_backward_op.register_fake
def _(
    upstream: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden.new_empty(hidden.shape if options[-1] else (0,)), weight.new_empty(weight.shape)


@torch.library.custom_op("napkinmath::scale_rows", mutates_args=())
def _scale_rows_op(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x (rows, columns) times a factor (rows,) each, in fp32, rounded once."""
    if not runs_triton(OP, x) or x.dtype is torch.float64:
        return (_compute(x) * factors[:, None]).to(x.dtype)
    from ..triton_kernels.log_probabilities import scale_rows

    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale_rows(x, factors.float().contiguous(), out)
    return out


@_scale_rows_op.register_fake
def _(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, targets, *options = inputs
    ctx.options, ctx.has = tuple(options[:5]), tuple(options[-2:])
    kept = (hidden, weight, targets) if ctx.has[1] else (output[4],)
    ctx.save_for_backward(*kept)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, upstream: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    rest = (None,) * 9
    if upstream is None:
        return (None, None, *rest)
    checks.refuse_second_derivative(OP, FALLBACK)  # what is saved would pass for a constant
    if not ctx.has[1]:
        return (_scale_rows_op(ctx.saved_tensors[0], upstream), None, *rest)
    d_hidden, d_weight = _backward_op(upstream, *ctx.saved_tensors, *ctx.options, ctx.has[0])
    return (d_hidden if ctx.has[0] else None, d_weight, *rest)


_log_probabilities_op.register_autograd(_autograd, setup_context=_setup)


def _check_options(
    ignore_index: int | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    chunk_bytes: int,
) -> None:
    for name, value in (("temperature", temperature), ("logit_scale", logit_scale)):
        fits = checks.is_number(value) and value > 0
        checks.require(fits, OP, f"{name} {value!r}", "a positive finite number", FALLBACK)
    fits = checks.is_number(softcap) and softcap >= 0
    checks.require(fits, OP, f"softcap {softcap!r}", "0 (none) or a positive cap", FALLBACK)
    fits = ignore_index is None or checks.is_whole(ignore_index)
    checks.require(fits, OP, f"ignore_index {ignore_index!r}", "an int, or None", FALLBACK)
    fits = checks.is_whole(chunk_bytes) and chunk_bytes > 0
    accepted = "a positive number of bytes"
    checks.require(fits, OP, f"chunk_bytes {chunk_bytes!r}", accepted, FALLBACK)


def linear_log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int | None = -100,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    statistics: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> TokenLikelihoods:
    """Log-probabilities of the targets under softmax(softcap(logit_scale hidden @ weight.T) /
    temperature), without holding the logits.

    hidden (..., h) bf16, fp16 or fp32; weight (v, h), computed in hidden's dtype; targets (...)
    int64. `ignore_index=None` scores every target, and gives NaN for one outside the vocabulary.
    `statistics` adds entropy, mean logit and top-1, without gradients. Raises KernelInputError.
    """
    check_head(OP, hidden, weight, targets)
    _check_options(ignore_index, temperature, logit_scale, softcap, chunk_bytes)
    hidden = to_autocast_dtype(hidden)
    recording = torch.is_grad_enabled()
    shape = targets.shape
    log_probs, *more, _ = _log_probabilities_op(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        targets.reshape(-1),
        SCORE_ALL if ignore_index is None else ignore_index,
        float(logit_scale),
        float(softcap),
        1.0 / float(temperature),
        chunk_bytes,
        statistics,
        recording and hidden.requires_grad,
        recording and weight.requires_grad,
    )
    if not statistics:
        return TokenLikelihoods(log_probs.view(shape), None, None, None)
    entropy, mean, top = (x.view(shape) for x in more)
    return TokenLikelihoods(log_probs.view(shape), entropy, mean, top)
