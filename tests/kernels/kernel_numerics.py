"""How kernel results are believed: against float64, next to plain PyTorch at the same dtype, with
poisoned memory around them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch

# : Ours may be this many times as far from float64 as plain PyTorch at the same dtype (the rule of
# flash-attention's tests).
WORST_RATIO = 2.0
# : Below this many values the norm of torch's own error is a matter of luck, down to zero, and the
# floor is a whole eps.
FEW_VALUES = 32
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Outputs = list[torch.Tensor]
Function = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """||actual - exact|| / ||exact||, in float64."""
    scale = exact.double().norm().item()
    return (actual.double() - exact.double()).norm().item() / (scale if scale > 0 else 1.0)


def outputs_and_gradients(
    function: Function, inputs: Sequence[torch.Tensor | None], seed: int = 7
) -> tuple[list[str], Outputs]:
    """Runs forward and backward; names and values of every output and of every gradient of an input
    that requires one."""
    leaves = [
        (
            x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
            if x is not None
            else None
        )
        for x in inputs
    ]
    result = function(*leaves)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    generator = torch.Generator().manual_seed(seed)
    upstream = [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outputs
    ]
    wanted = [
        (f"gradient {i}", leaf)
        for i, leaf in enumerate(leaves)
        if leaf is not None and leaf.requires_grad
    ]
    gradients = torch.autograd.grad(outputs, [leaf for _, leaf in wanted], upstream)
    names = [f"output {i}" for i in range(len(outputs))] + [name for name, _ in wanted]
    return names, [out.detach() for out in outputs] + list(gradients)


def _as_double(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def assert_no_worse_than_torch(
    ours: Function,
    plain: Function,
    inputs: Sequence[torch.Tensor | None],
    exact: Function | None = None,
    roundings: int = 1,
) -> dict[str, tuple[float, float]]:
    """Holds every output and gradient of `ours` to WORST_RATIO times the error of `plain`, both
    against `exact` in float64.

    The floor of eps / 2 is what rounding the exact result once to that dtype may cost. A chain of
    elementwise operations rounds several times, and on some processors plain torch's happen to
    cancel: `roundings` of them. Returns name -> (our error, plain's).
    """
    names, mine = outputs_and_gradients(ours, inputs)
    _, theirs = outputs_and_gradients(plain, inputs)
    _, truth = outputs_and_gradients(exact or plain, [_as_double(x) for x in inputs])
    found: dict[str, tuple[float, float]] = {}
    for name, own, other, reference in zip(names, mine, theirs, truth, strict=True):
        assert own.dtype is other.dtype and own.shape == other.shape, (
            f"{name}: {own.dtype} {tuple(own.shape)} is not {other.dtype} {tuple(other.shape)}"
        )
        error, plain_error = relative_error(own, reference), relative_error(other, reference)
        assert math.isfinite(error), f"{name}: error is {error}"
        floor = max(roundings, 1 + (own.numel() < FEW_VALUES)) * torch.finfo(own.dtype).eps / 2
        limit = WORST_RATIO * max(plain_error, floor)
        assert error <= limit, (
            f"{name} {tuple(own.shape)} {own.dtype}: error {error:.3e}, plain torch"
            f" {plain_error:.3e}, limit {limit:.3e}"
        )
        found[name] = (error, plain_error)
    return found


BORDER = 64


def _packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Every buffer made inside comes out of a larger one, filled with NaN (all ones for integers),
    borders included.

    On leaving, the borders must be as they were: a write out of bounds is caught here, a read out
    of bounds or a value that was never written shows as NaN in a result.
    """
    made: list[tuple[torch.Tensor, int]] = []
    plain_empty, plain_like = torch.empty, torch.empty_like

    def poison(
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        length = math.prod(shape)
        buffer = plain_empty((length + 2 * BORDER,), dtype=dtype, device=device)
        buffer.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)
        made.append((buffer, length))
        inner = plain_empty((0,), dtype=dtype, device=device)
        return inner.set_(
            buffer.untyped_storage(), BORDER, tuple(shape), _packed_strides(shape)
        )  # not a view: autograd minds views as outputs

    def empty(
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: object,
    ) -> torch.Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return poison(shape, dtype or torch.get_default_dtype(), device or torch.device("cpu"))  # type: ignore[arg-type]

    def empty_like(x: torch.Tensor, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
        return poison(x.shape, dtype or x.dtype, x.device, plain_like(x, device="meta").stride())

    def empty_strided(
        shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return poison(shape, dtype, device, strides)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(torch, "empty_strided", empty_strided),
    ):
        yield
    assert made, "nothing was allocated through torch.empty: the test would prove nothing"
    for buffer, length in made:
        for border in (buffer[:BORDER], buffer[BORDER + length :]):
            untouched = (
                border.isnan()
                if border.is_floating_point()
                else border == torch.iinfo(border.dtype).max
            )
            assert bool(untouched.all()), f"a kernel wrote outside a buffer of {length} values"


def inside_poison(x: torch.Tensor) -> torch.Tensor:
    """The same values at the same shape, with NaN (or the largest integer) before and after them in
    memory."""
    fill = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    buffer = torch.full((x.numel() + 2 * BORDER,), fill, dtype=x.dtype, device=x.device)
    inner = buffer[BORDER : BORDER + x.numel()].view(x.shape)
    inner.copy_(x)
    return inner.detach().requires_grad_(x.requires_grad)


def non_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The same values in every second row of a wider buffer of NaN: neither dimension is packed."""
    wide = torch.full(
        (*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] + 3),
        float("nan"),
        dtype=x.dtype,
        device=x.device,
    )
    view = wide[..., ::2, : x.shape[-1]]
    view.copy_(x)
    return view.detach().requires_grad_(x.requires_grad)
