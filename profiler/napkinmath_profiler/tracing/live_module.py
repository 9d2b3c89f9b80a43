"""A module and a step of one's own: what `trace` may be given, and what is said where it cannot be
traced."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from napkinmath_profiler.tracing.trace_errors import TraceError

Builder = Callable[[], Any]
OptimizerBuilder = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def built(model: nn.Module | Builder) -> nn.Module:
    """The module, or what a function builds on the meta device, where it takes no memory. Raises
    TraceError with the place where the builder fails."""
    if isinstance(model, nn.Module):
        return model
    name = getattr(model, "__name__", "the builder")
    try:
        with torch.device("meta"):
            made = model()
    except Exception as error:
        raise TraceError(
            f"{name}() raises {type(error).__name__} on the meta device: {error} ({_place(error)});"
            " leave out what reads weights or values there, or pass the module itself"
        ) from error
    if not isinstance(made, nn.Module):
        raise TraceError(f"{name}() returns a {type(made).__name__}; return the torch.nn.Module")
    return made


def optimizer_over(
    model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerBuilder | None
) -> torch.optim.Optimizer | None:
    """The optimizer, or what a function makes over the parameters that are trained."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    return optimizer([p for p in model.parameters() if p.requires_grad])


def takes_model(step: Callable[..., Any]) -> bool:
    """Whether a step is called with (model, optimizer), or with nothing; raises TraceError for any
    other number of arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [p for p in inspect.signature(step).parameters.values() if p.kind in kinds]
    needed = [p.name for p in given if p.default is inspect.Parameter.empty]
    if len(needed) == 1 or len(needed) > 2:
        raise TraceError(
            f"step= takes ({', '.join(needed)}); it is called with (model, optimizer) or with"
            " nothing: bind the rest, as in step=lambda model, optimizer: train(model, optimizer,"
            " batch)"
        )
    return len(given) >= 2


def run_step(
    step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """One call with (model, optimizer); says so where the step asks for an optimizer that was not
    given."""
    try:
        step(model, optimizer)
    except AttributeError as error:
        if optimizer is None and "'NoneType' object" in str(error):
            raise TraceError(
                f"step= uses an optimizer and got none ({_place(error)}); pass optimizer=, such as"
                " optimizer=torch.optim.AdamW"
            ) from error
        raise


def _place(error: BaseException) -> str:
    """File and line of the innermost call that is no library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"
