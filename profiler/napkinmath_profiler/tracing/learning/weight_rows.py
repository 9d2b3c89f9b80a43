"""The weights of a recorded model as rows of data: path, kind, type, extents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from napkinmath.lowering.linears import TASK_HEAD, TOKEN_HEAD, bias_kind
from napkinmath.models.tasks import ANSWERS, CAUSAL, SEQUENCE, TOKENS
from torch import nn

from napkinmath_profiler.tracing.learning.rows import Shape, dtype_name, linear_kind

SCORE_MODULES = {
    SEQUENCE: ("classifier", "score"),
    TOKENS: ("classifier", "score"),
    ANSWERS: ("qa_outputs",),
}


@dataclass(frozen=True, slots=True)
class Landmarks:
    """Paths of the repeated layers, of the head over a vocabulary and of a decoder's layers behind
    those of an encoder ('' where there is none), and the task whose class it is."""

    layers: str
    head: str
    task: str
    decoder: str = ""
    stages: tuple[str, ...] = ()
    """Paths of the layers of each stage, where layers stand in stages."""

    @property
    def stacks(self) -> list[str]:
        """Paths of lists of layers, in the order in which they run."""
        return [path for path in (self.layers, self.decoder, *self.stages) if path]


class WeightRows:
    """Those of one model; `tied` is the name of the embedding that its head shares, '' where none
    is."""

    def __init__(self, model: nn.Module, marks: Landmarks) -> None:
        self.head, self.task = marks.head, marks.task
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        kinds = {x.dtype for x in self.parameters.values()}
        self.dtype = torch.bfloat16 if torch.bfloat16 in kinds else torch.float32
        self.tied = self._tied_weight(model)
        self.left_whole = set[str](getattr(model, "_keep_in_fp32_modules", None) or ())

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by name."""
        yield from self.parameters.items()
        yield from self.buffers.items()

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer of a name."""
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def linear_kind(self, owner: str) -> str:
        """The kind of a linear's weight, by which adapters and quantizers choose."""
        found = linear_kind(self.modules.get(owner))
        whole = found == "linear" and owner.rpartition(".")[2] in self.left_whole
        return "unquantized linear" if whole else found

    def _tied_weight(self, model: nn.Module) -> str:
        if not self.head or self.task == CAUSAL:
            return ""
        shared = getattr(model.get_submodule(self.head), "weight", None)
        return next((name for name, x in self.parameters.items() if x is shared), "")

    def row(self, name: str, path: str, tensor: torch.Tensor) -> list[Any]:
        """[path, kind, type (none: the model's), whether it is a buffer, extents]."""
        buffer = name in self.buffers
        dtype = "" if tensor.dtype is self.dtype and not buffer else dtype_name(tensor.dtype)
        shape = tuple(tensor.shape)
        if type(self.modules.get(name.rpartition(".")[0])).__name__ == "Conv1D":
            shape = shape[::-1]
        return [path, self._kind(path, name, tensor), dtype, int(buffer), Shape(shape)]

    def _kind(self, path: str, name: str, tensor: torch.Tensor) -> str:
        owner, _, leaf = name.rpartition(".")
        module = self.modules.get(owner)
        if name in self.parameters and not tensor.requires_grad:
            return "statistics"
        scored = score_kind(owner, self.task)
        if scored:
            return bias_kind(scored) if leaf == "bias" else scored
        if self.task != CAUSAL and self.head and path == f"{self.head}.weight":
            return "head"
        if isinstance(module, nn.Embedding):
            return "embedding"
        if leaf == "bias":
            return "bias"
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            return self.linear_kind(owner)
        if tensor.dim() == 3 and "experts" in owner.rpartition(".")[2].lower():
            return "experts"
        if "conv" in type(module).__name__.lower():
            return "conv"
        if "norm" in type(module).__name__.lower():
            return "norm"
        return "other"


def score_kind(owner: str, task: str) -> str:
    """The kind of a module that PEFT trains whole beside adapters under a task's type (peft 0.21
    peft_model.py, `classifier_module_names` and `qa_module_names`); '' for another."""
    names = SCORE_MODULES.get(task, ())
    if not any(part.endswith(names) for part in owner.split(".") if names):
        return ""
    return TASK_HEAD if task == SEQUENCE else TOKEN_HEAD
