"""Buffers that CUDA kernels allocate inside one op: invisible on meta, alive together with the op's
outputs.

Each entry names its source; the sizes are what those sources request from PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Workspaces = list[tuple[str, int]]
FEW_INDICES = 3072  # aten/src/ATen/native/cuda/Embedding.cu: no sort up to this many indices
FOREACH_NORM_PARTIALS = "foreach norm partials"
FOREACH_CHUNK_ELEMENTS = 65536  # aten/src/ATen/native/cuda/MultiTensorApply.cuh: kChunkSize


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flash_attention_backward(args: tuple[Any, ...], out: Any) -> Workspaces:
    """Row sums, the float32 accumulator of dq and, with grouped heads, dk and dv per query head.

    Shapes: query (b, a, s, d). Source: flash_attn/flash_api.cpp mha_bwd.
    """
    query, key = args[1], args[2]
    batch, heads, rows, size = query.shape
    key_heads, key_rows = key.shape[1], key.shape[2]
    padded_rows, padded_size = _up(rows, 128), _up(size, 32 if size <= 128 else 64)
    found = [
        ("flash softmax_d", batch * heads * padded_rows * 4),
        ("flash dq_accum", batch * padded_rows * heads * padded_size * 4),
    ]
    if key_heads != heads:
        found += [
            (f"flash {n}_expanded", batch * key_rows * heads * size * query.element_size())
            for n in ("dk", "dv")
        ]
    return found


def efficient_attention_backward(args: tuple[Any, ...], out: Any) -> Workspaces:
    """Row sums and the float32 staging of dq in tiles, each with a lock.

    Source: attention_backward.cu (delta, workspace) and mem_eff_attention/kernel_backward.h
    (GradQTempStorage, workspace_elements_gq) for compute capability 8.0 and 9.0, where dk and dv
    stay in registers.
    """
    query = args[1]
    batch, heads, rows, size = query.shape
    tile = 64 if size <= 64 else 128
    tile_bytes = tile * tile * 4 + 16
    tiles = -(-rows // tile) * -(-size // tile)
    return [
        ("efficient delta", batch * heads * rows * 4),
        ("efficient dq staging", batch * heads * tiles * tile_bytes),
    ]


def embedding_backward(args: tuple[Any, ...], out: Any) -> Workspaces:
    """Sorted indices, segment tables and one float32 row of partial sums per index.

    Source: Embedding.cu embedding_dense_backward_cuda and EmbeddingBackwardKernel.cu
    embedding_backward_cuda_kernel.
    """
    grad, indices, _, padding_idx = args[:4]
    count = indices.numel()
    if count <= FEW_INDICES and padding_idx < 0:
        return []
    index_bytes = count * indices.element_size()
    tables = (
        "sorted indices",
        "original indices",
        "segment offsets",
        "partials per segment",
        "partial offsets",
        "partial segments",
    )
    accumulate_bytes = max(4, grad.element_size())
    return [(f"embedding {name}", index_bytes) for name in tables] + [
        ("embedding partial sums", count * grad.shape[-1] * accumulate_bytes)
    ]


def foreach_norm(args: tuple[Any, ...], out: Any) -> Workspaces:
    """One partial norm per tensor and chunk. Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu
    foreach_tensor_norm_cuda."""
    tensors = args[0]
    if not tensors:
        return []
    max_chunks = max(-(-t.numel() // FOREACH_CHUNK_ELEMENTS) for t in tensors)
    return [(FOREACH_NORM_PARTIALS, len(tensors) * max_chunks * max(4, tensors[0].element_size()))]


def masked_scatter(args: tuple[Any, ...], out: Any) -> Workspaces:
    """The mask in full and an int64 prefix sum over it (torch IndexKernel.cpp
    masked_scatter__cuda)."""
    return [("mask in full", out.numel()), ("prefix sums of the mask", 8 * out.numel())]


def softmax_backward(args: tuple[Any, ...], out: Any) -> Workspaces:
    """The product of gradient and output, before the kernel. Source:
    aten/src/ATen/native/cuda/SoftMax.cu softmax_backward_cuda_out."""
    output = args[1]
    return [("gradient * softmax", output.numel() * output.element_size())]


WORKSPACES: dict[Any, Callable[[tuple[Any, ...], Any], Workspaces]] = {
    aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
    aten.embedding_dense_backward.default: embedding_backward,
    aten._foreach_norm.Scalar: foreach_norm,
    aten.masked_scatter.default: masked_scatter,
    aten._softmax_backward_data.default: softmax_backward,
}
