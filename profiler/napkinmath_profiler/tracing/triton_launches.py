"""Triton kernels launched on meta tensors: the launch does nothing, since what a kernel reads and
writes was allocated before it."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

# Every class whose `run` a launch can end in: compiled, autotuned (which would time the kernel),
# under heuristics, interpreted.
LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
    ("triton.runtime.autotuner", "Heuristics"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
)


@contextmanager
def triton_launches(counts: Counter[str]) -> Generator[None]:
    """Inside the block a launch with a meta tensor among its arguments is counted and not made."""
    with ExitStack() as stack:
        for module, name in LAUNCHERS:
            launcher = _launcher(module, name)
            if launcher is not None:
                stack.enter_context(
                    mock.patch.object(launcher, "run", _skipping(launcher.run, counts))
                )
        yield


def _launcher(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _skipping(run: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(
            isinstance(a, torch.Tensor) and a.device.type == "meta"
            for a in (*args, *kwargs.values())
        ):
            counts["triton launches"] += 1
            return None
        return run(self, *args, **kwargs)

    return launch
