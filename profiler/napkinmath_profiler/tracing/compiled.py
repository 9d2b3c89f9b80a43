"""``torch.compile`` without a GPU: real Dynamo and AOTAutograd, the saved tensors of the min-cut
partitioner.

Inductor's decompositions and partitioner decide what a compiled step keeps for its backward; the
graphs are then run op by op, so temporaries inside one are those of unfused code, an upper bound.
Dynamo compiles nothing under a dispatch mode, so the tracker steps aside while the compiled module
is called and comes back inside each graph.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from napkinmath_profiler.tracing.storage_tracker import StorageTracker

STACK_KEYS = ("nn_module_stack", "fwd_nn_module_stack")


def compiled(model: nn.Module) -> Callable[..., Any]:
    """``model``'s call as ``torch.compile`` would make it; works under an active tracker and
    without one."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=lambda graph, _: _run_by_node(graph, is_backward=False),
        bw_compiler=lambda graph, _: _run_by_node(graph, is_backward=True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    # transformers warns once within the loss, where Dynamo would break the graph
    warns = {getattr(logging.Logger, "warning_once", logging.Logger.warning)}
    unbroken = torch._dynamo.config.patch(ignore_logging_functions=warns)
    call = torch.compile(model, backend=backend, dynamic=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        tracker = StorageTracker.active
        with (
            nullcontext() if tracker is None else tracker.paths.unfollowed(),
            _disable_current_modes(),
            unbroken,
        ):
            return call(*args, **kwargs)

    return forward


def _run_by_node(graph: fx.GraphModule, is_backward: bool) -> Callable[[list[Any]], Any]:
    """The graph as a boxed function: it may free each argument at its last use."""
    interpreter = _NodeByNode(graph, is_backward)

    def run(arguments: list[Any]) -> Any:
        tracker = StorageTracker.active
        in_mode = tracker is None or _get_current_dispatch_mode() is tracker
        with nullcontext() if tracker is None or in_mode else tracker:
            try:
                return interpreter.boxed_run(arguments)
            finally:
                interpreter.env = {}
                if tracker is not None:
                    tracker.paths.module = ""

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _NodeByNode(fx.Interpreter):
    """Runs a graph, telling the tracker the module each node came from."""

    def __init__(self, graph: fx.GraphModule, is_backward: bool) -> None:
        super().__init__(graph)
        self._is_backward = is_backward
        self._modules = {node: _module_of(node) for node in graph.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        tracker = StorageTracker.active
        if tracker is None:
            return super().run_node(n)
        if self._is_backward:
            tracker.paths.module = self._modules[n]
            return super().run_node(n)
        with tracker.paths.inside(self._modules[n]):
            return super().run_node(n)


def _module_of(node: fx.Node) -> str:
    """``model.layers.3`` out of ``L['self']._modules['model'].layers['3']`` in the node's innermost
    module."""
    for key in STACK_KEYS:
        stack = node.meta.get(key)
        if stack:
            path = re.sub(r"^L\['[^']*'\]", "", str(list(stack.values())[-1][0]))
            path = (
                re.sub(r"_modules\['([^']*)'\]", r"\1", path).replace("['", ".").replace("']", "")
            )
            return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")
    return ""
