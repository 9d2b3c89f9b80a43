"""A frozen input embedding in host memory: a batch's rows are gathered there and copied to the
device, so the table takes none of the device's memory.

A step copies its token ids to the host, which waits for the device once, and tokens x hidden values
back. Head and table must be two tensors: a head that shares the table needs it on the device. DDP
and FSDP want all parameters on one kind of device, so this is for one GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import KernelInputError

_FALLBACK = 'patch(..., embeddings="keep")'


@dataclass(eq=False)
class HostEmbedding:
    """Forward of an embedding whose table lies on the host; results are where the ids are."""

    module: Any

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.module.weight.detach()
        if ids.is_meta:  # no values to gather by
            rows = ids.new_empty((*ids.shape, table.shape[1]), dtype=table.dtype)
        elif ids.device == table.device:
            rows = F.embedding(ids, table)
        else:
            shape = (ids.numel(), table.shape[1])
            rows = torch.empty(shape, dtype=table.dtype, pin_memory=ids.is_cuda)
            torch.index_select(table, 0, ids.reshape(-1).to(table.device), out=rows)
            rows = rows.to(ids.device, non_blocking=True).view(*ids.shape, -1)
        scale = getattr(self.module, "embed_scale", None)  # Gemma 3 multiplies inside
        return rows if scale is None else rows * scale.to(device=rows.device, dtype=rows.dtype)


def refusal(model: Any) -> str:
    """Why a model's input embedding stays where it is; '' for none."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(embedding, "weight", None)
    if not isinstance(embedding, torch.nn.Embedding) or weight is None:
        return f"an input embedding that is {type(embedding).__name__}"
    if weight.requires_grad:
        return "an input embedding that is trained"
    if head is not None and getattr(head, "weight", None) is weight:
        return "an input embedding that the head shares"
    return ""


def move_to_host(model: Any) -> tuple[Any, Any]:
    """(the embedding, what brings it back); `model.to` leaves it on the host from now on."""
    given = refusal(model)
    if given:
        raise KernelInputError("patch", given, "a frozen table of its own", _FALLBACK)
    embedding = model.get_input_embeddings()
    device = embedding.weight.device
    embedding.weight = _on(embedding.weight.detach(), "cpu")
    embedding._apply = lambda *_, **__: embedding
    return embedding, functools.partial(_bring_back, embedding, device)


def _bring_back(embedding: Any, device: torch.device) -> None:
    embedding.__dict__.pop("_apply", None)
    embedding.weight = _on(embedding.weight.detach(), device)


def _on(values: torch.Tensor, device: Any) -> torch.nn.Parameter:
    """A frozen table of these values; where there are none (meta), of as many."""
    empty = values.is_meta or torch.device(device).type == "meta"
    moved = torch.empty_like(values, device=device) if empty else values.to(device)
    return torch.nn.Parameter(moved, requires_grad=False)
