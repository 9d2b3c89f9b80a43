"""Which calls may go straight to a `torch.autograd.Function`, and the short way there.

A `custom_op` costs more host time than the launches it makes, with lists of tensors most of all.
Only those who look at ops by name need it: torch.compile, fake and meta tensors, selective
checkpointing and every other dispatch mode, tensor subclasses, and the transforms of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

DISPATCH = "__torch_dispatch__"
PLAIN = getattr(torch.Tensor, DISPATCH)
_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 - without stubs
_C: Any = torch._C


def _below_autograd() -> Any:
    """The dispatch keys that an op's implementation is below of: autograd, views, autocast."""
    keys = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
    for name in ("AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"):
        keys = keys | _C.DispatchKeySet(getattr(_C.DispatchKey, name))
    return keys


_BELOW_AUTOGRAD = _below_autograd()


def below_autograd() -> Any:
    """A context in which torch's ops run as they do inside an op's implementation: no graph, no
    views' bookkeeping, no autocast."""
    return _C._ExcludeDispatchKeyGuard(_BELOW_AUTOGRAD)


def is_unwatched() -> bool:
    """True if no compiler, dispatch mode or transform looks at the ops that are called now."""
    return not (
        torch.compiler.is_compiling()
        or _C._len_torch_dispatch_stack() > 0
        or _functorch.peek_interpreter_stack() is not None
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor that holds values and whose class does not look at ops."""
    kind = type(tensor)
    ordinary = kind is torch.Tensor or kind is torch.nn.Parameter
    return (ordinary or getattr(kind, DISPATCH) is PLAIN) and not tensor.is_meta


def runs_eagerly(tensors: Iterable[torch.Tensor]) -> bool:
    """True if nothing but autograd watches a call on these tensors."""
    return is_unwatched() and all(map(is_plain, tensors))


def _are_eager(arguments: tuple[Any, ...]) -> bool:
    if not is_unwatched():
        return False
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and not is_plain(argument):
            return False
    return True


def run(op: Any, *arguments: Any) -> Any:
    """What a custom op without a gradient gives: its body where nothing watches, else itself.

    Lists of tensors among the arguments are not looked into.
    """
    if _are_eager(arguments):
        with below_autograd():
            return op._init_fn(*arguments)
    return op(*arguments)


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without what it does for torch.func, which `is_unwatched` has ruled out."""
    base: Any = super(torch.autograd.Function, function)
    return base.apply


def short_way(
    op: Any, setup: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Gives a custom op its gradient, and returns the call of it: through an autograd.Function of
    the same body and formulas where nothing watches.

    The op's arguments are tensors, numbers and None, no lists.
    """
    op.register_autograd(backward, setup_context=setup)
    body = op._init_fn

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with below_autograd():
                output = body(*inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    apply = direct(Direct)

    def call(*inputs: Any) -> Any:
        return apply(*inputs) if _are_eager(inputs) else op(*inputs)

    return call
