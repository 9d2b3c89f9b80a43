"""Which calls may go straight to a `torch.autograd.Function`.

A `custom_op` with lists of tensors costs more host time than the launches it makes. Only those who
look at ops by name need it: torch.compile, fake and meta tensors, selective checkpointing and every
other dispatch mode, tensor subclasses, and the transforms of torch.func.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

DISPATCH = "__torch_dispatch__"
PLAIN = getattr(torch.Tensor, DISPATCH)


def runs_eagerly(tensors: Iterable[torch.Tensor]) -> bool:
    """True if nothing but autograd watches a call on these tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 - without stubs
    if functorch.peek_interpreter_stack() is not None:
        return False
    return all(
        not tensor.is_meta and getattr(type(tensor), DISPATCH) is PLAIN for tensor in tensors
    )
