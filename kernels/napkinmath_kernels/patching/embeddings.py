"""A frozen input embedding in less of the device's memory: on the host, where a batch's rows are
gathered and from where they are copied, or in int8 with a scale a row.

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
from ..ops.eight_bit import ScaledWeight, look_up_8bit, quantize_8bit
from ..ops.nf4 import dequantize

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


@dataclass(eq=False)
class EightBitEmbedding:
    """Forward of an embedding whose table is int8; rows come in the type that the table had."""

    module: Any
    dtype: torch.dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows = look_up_8bit(_table(self.module, self.dtype), ids)
        scale = getattr(self.module, "embed_scale", None)  # Gemma 3 multiplies inside
        return rows if scale is None else rows * scale.to(device=rows.device, dtype=rows.dtype)


def _table(embedding: Any, dtype: torch.dtype) -> ScaledWeight:
    values, scales = embedding.weight.detach(), embedding.weight_scales
    return ScaledWeight(values, scales.float(), dtype, (1, values.shape[1]))


def quantize_in_place(model: Any) -> tuple[Any, torch.dtype, Any]:
    """(the embedding, the type that its table had, what decodes the table again: int8 values, not
    those from before)."""
    given = refusal(model)
    if given:
        raise KernelInputError("patch", given, "a frozen table of its own", _FALLBACK)
    embedding = model.get_input_embeddings()
    dtype = embedding.weight.dtype
    stored = quantize_8bit(embedding.weight.detach(), "int8")
    embedding.weight = torch.nn.Parameter(stored.values, requires_grad=False)
    embedding.register_buffer("weight_scales", stored.scales, persistent=False)
    return embedding, dtype, functools.partial(_decode, embedding, dtype)


def _decode(embedding: Any, dtype: torch.dtype) -> None:
    values = dequantize(_table(embedding, dtype))
    embedding.weight = torch.nn.Parameter(values, requires_grad=False)
    del embedding._buffers["weight_scales"]


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
