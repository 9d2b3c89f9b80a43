"""The kernel that `scaled_dot_product_attention` picks."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.config.train_config import Attention

MAX_FLASH_HEAD = 256
MAX_CUDNN_HEAD, MAX_CUDNN_HEAD_ON_HOPPER = 128, 256


def sdpa_kernel(
    choice: Attention,
    dtype: DType,
    head_size: int,
    masked: bool,
    grouped: bool,
    cudnn_heads: int,
) -> str:
    """The kernel on CUDA for these inputs, where `choice` is asked for.

    Flash takes no mask, pads the size of a head to 8 and ends at 256; cuDNN's takes masks, and heads
    of up to `cudnn_heads`; the efficient kernel takes aligned sizes.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp check_head_dim_size_flash,
    can_use_cudnn_attention (check_attn_mask_shape, where flash has check_for_attn_mask),
    check_cudnn_tensor_shapes, check_head_dim_size_mem_efficient.
    """
    if choice is Attention.CUDNN and (head_size > cudnn_heads or head_size % 8 or dtype is FP32):
        choice = Attention.FLASH
    flash = choice in (Attention.FLASH, Attention.FLASH2, Attention.FLASH3)
    if flash and (dtype is FP32 or masked or head_size > MAX_FLASH_HEAD):
        choice = Attention.EFFICIENT
    aligned = head_size % (4 if dtype is FP32 else 8) == 0
    if choice is Attention.EFFICIENT and ((grouped and not masked) or not aligned):
        return "math"
    return "flash" if flash and choice is not Attention.EFFICIENT else choice.value


def casts_back(choice: Attention, dtype: DType, quantized: bool) -> bool:
    """Whether flash-attn, given fp32 by a quantized model, gets the type of loading instead.

    Source: transformers 5.23 integrations/flash_attention.py get_target_dtype.
    """
    return choice in (Attention.FLASH2, Attention.FLASH3) and dtype is FP32 and quantized
