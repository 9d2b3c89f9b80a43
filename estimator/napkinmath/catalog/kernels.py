"""Patched operations, a row each: what it saves, what it needs for a while, its FLOPs and the bytes
it moves, as formulas over sizes.

The rows of `napkinmath` are those of kernels/napkinmath_kernels/costs.py and are held to the
running operations by tests/lowering/test_kernel_rows.py. Bytes are of requested tensors. One
multiply-add is 2 FLOP; an element-wise operation counts 1 for each arithmetic operation on a value.
Traffic is what must cross the memory bus once. Temporaries are the most alive at once beyond
inputs, results and saved tensors.
"""

from __future__ import annotations

from napkinmath.base.cuda import DEFAULT_PROCESSORS
from napkinmath.base.dtypes import FP32, DType
from napkinmath.base.expr import Size, minimum
from napkinmath.base.record import Record
from napkinmath.catalog.kernel_cost import KernelCost, Saved, stored_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


def rms_norm(
    rows: Size,
    hidden: Size,
    dtype: DType,
    *,
    residual: bool = False,
    trains_weight: bool = True,
    processors: int = DEFAULT_PROCESSORS,
    weight_dtype: DType | None = None,
) -> KernelCost:
    """x (or x + residual, which is a result) and the row's 1/rms in fp32; with a trained weight the
    backward leaves partial sums."""
    item, values = stored_bytes(dtype), rows * hidden
    saved = (
        Saved(
            name="x + residual" if residual else "x", axes=(rows, hidden), dtype=dtype, is_new=False
        ),
        Saved(name="weight", axes=(hidden,), dtype=weight_dtype or dtype, is_new=False),
        Saved(name="rstd", axes=(rows,), dtype=FP32, is_new=True),
    )
    partial = minimum(rows, 2 * processors) * hidden * 4 if trains_weight else 0
    rounding = hidden * 4 if trains_weight and (weight_dtype or dtype) is not FP32 else 0
    return KernelCost(
        saved=saved,
        forward_flops=(5 if residual else 4) * values,
        backward_flops=(9 + 2 * trains_weight + residual) * values,
        forward_moved=(4 if residual else 2) * values * item + hidden * item + rows * 4,
        backward_moved=(4 if residual else 3) * values * item
        + (1 + trains_weight) * hidden * item
        + rows * 4
        + 2 * partial,
        backward_temporary=partial + rounding,
    )


def layer_norm(
    rows: Size,
    hidden: Size,
    dtype: DType,
    *,
    trains_parameters: bool = True,
    processors: int = DEFAULT_PROCESSORS,
) -> KernelCost:
    """With a bias: x, and the row's mean and 1/deviation in fp32."""
    item, values = stored_bytes(dtype), rows * hidden
    saved = (
        Saved(name="x", axes=(rows, hidden), dtype=dtype, is_new=False),
        Saved(name="weight", axes=(hidden,), dtype=dtype, is_new=False),
        Saved(name="mean", axes=(rows,), dtype=FP32, is_new=True),
        Saved(name="rstd", axes=(rows,), dtype=FP32, is_new=True),
    )
    partial = 2 * minimum(rows, 2 * processors) * hidden * 4 if trains_parameters else 0
    sums = (
        (2 * hidden * 4 if dtype is not FP32 else 0) + 2 * hidden * item if trains_parameters else 0
    )
    return KernelCost(
        saved=saved,
        forward_flops=7 * values,
        backward_flops=(11 + 4 * trains_parameters) * values,
        forward_moved=2 * values * item + 2 * hidden * item + rows * 8,
        backward_moved=3 * values * item
        + (1 + 2 * trains_parameters) * hidden * item
        + rows * 8
        + 2 * partial,
        backward_temporary=partial + sums,
    )


def rope(
    batch: Size,
    q_heads: Size,
    k_heads: Size,
    tokens: Size,
    size: Size,
    dtype: DType,
    table_dtype: DType = FP32,
) -> KernelCost:
    """Queries and keys in one launch: cos and sin, which every layer shares."""
    table = (1, tokens, size)
    values = batch * (q_heads + k_heads) * tokens * size
    moved = 2 * values * stored_bytes(dtype) + 2 * tokens * size * stored_bytes(table_dtype)
    saved = tuple(
        Saved(name=name, axes=table, dtype=table_dtype, is_new=False) for name in ("cos", "sin")
    )
    return KernelCost(
        saved=saved,
        forward_flops=3 * values,
        backward_flops=3 * values,
        forward_moved=moved,
        backward_moved=moved,
    )


def gated(rows: Size, width: Size, dtype: DType) -> KernelCost:
    """act(gate) * up: gate and up."""
    values = rows * width
    saved = tuple(
        Saved(name=name, axes=(rows, width), dtype=dtype, is_new=False) for name in ("gate", "up")
    )
    item = stored_bytes(dtype)
    return KernelCost(
        saved=saved,
        forward_flops=6 * values,
        backward_flops=12 * values,
        forward_moved=3 * values * item,
        backward_moved=5 * values * item,
    )


def flash_attention(
    batch: Size, heads: Size, kv_heads: Size, queries: Size, keys: Size, size: Size, dtype: DType
) -> KernelCost:
    """q, k, v, o and the log-sum-exp; the backward computes the scores in both of its kernels: 7
    products against the forward's 2."""
    item = stored_bytes(dtype)
    q_bytes, kv_bytes = batch * heads * queries * size * item, batch * kv_heads * keys * size * item
    statistics = batch * heads * queries * 4
    one = 2 * batch * heads * queries * keys * size
    saved = (
        Saved(name="q", axes=(batch, heads, queries, size), dtype=dtype, is_new=False),
        Saved(name="k", axes=(batch, kv_heads, keys, size), dtype=dtype, is_new=False),
        Saved(name="v", axes=(batch, kv_heads, keys, size), dtype=dtype, is_new=False),
        Saved(name="o", axes=(batch, heads, queries, size), dtype=dtype, is_new=False),
        Saved(name="log-sum-exp", axes=(batch, heads, queries), dtype=FP32, is_new=True),
    )
    return KernelCost(
        saved=saved,
        forward_flops=2 * one,
        backward_flops=7 * one + 2 * batch * heads * queries * size,
        forward_moved=2 * q_bytes + 2 * kv_bytes + statistics,
        backward_moved=7 * q_bytes + 6 * kv_bytes + 6 * statistics,
        backward_temporary=statistics,
    )


LIBRARY_PARTS = ("norm", "rope", "gate", "loss")
ADAPTER_PARTS = ("qkv", "o", "mlp")
"""Queries, keys and values with their LoRA adapters as one operation; the output projection; the
feed-forward."""

LIGER_SWITCHES = {
    "rms_norm": "norm",
    "rope": "rope",
    "swiglu": "gate",
    "geglu": "gate",
    "fused_linear_cross_entropy": "loss",
}
"""Keywords of Liger's functions that are on by themselves (liger-kernel 0.8.5
transformers/monkey_patch.py) and the operation of each."""


class KernelSet(Record):
    """Whose operations replace the library's, and in which families of models."""

    name: str
    meaning: str
    source: str
    families: tuple[str, ...]
    """Families whose classes the patch knows."""
    fresh_norms: tuple[str, ...] = ()
    """Families whose norms write their gradient beside the incoming one where others overwrite
    it."""
    norm_in_place: bool = False
    rope: str = "new"
    """'new' returns new tensors; 'in place' turns them where they lie, both ways; 'in place
    forward' only forward."""
    gate_in_place: bool = False
    """The gradients of gate and up overwrite them."""
    copies_halves: bool = False
    """Gate and up are copied out of a joint projection first."""
    parts: tuple[str, ...] = LIBRARY_PARTS
    """The operations that it replaces where nothing else is said; 'gate' is act(gate) * up where it
    is no part of a larger one."""
    switches: tuple[str, ...] = ()
    """The operations of which any may be chosen (`--kernel-parts`); () where all or none run."""
    adapters_only: bool = False
    """Patches a model with LoRA adapters and no other."""
    input_in_place: bool = False
    """The gradient of what adapted projections read overwrites it."""
    own_copies: bool = False
    """Adapters are kept in the products' type, beside what dropout left of their input, and each
    product decodes its weight anew: no buffer for them lives on."""
    hosts_embeddings: bool = False
    """Moves a frozen input embedding to host memory where it is asked to."""
    defers_logits: bool = False
    """A trainer's own loss of the model's logits does not make them."""
    adapted_head: str = ""
    """What its loss does with LoRA on the head: 'run' multiplies by it, 'skipped' reads the base's
    weight alone; '' makes the logits."""
    repeats_keys: bool = False
    """Hands repeated heads to xformers' kernel where the GPU has no FlashAttention."""
    norm_processors: int = 1
    """Rows of fp32 partial sums of a norm weight's gradient, for each processor of the GPU."""

    @property
    def adapters(self) -> bool:
        """Whether adapted projections run as operations of its own."""
        return any(part in ADAPTER_PARTS for part in self.parts)


_OURS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
)

_LIGER = KernelSet(
    name="liger",
    meaning="Liger's norm, rotary, gate and fused linear cross-entropy",
    source=(
        "liger-kernel 0.8.5 transformers/monkey_patch.py, ops/rms_norm.py, ops/rope.py,"
        " ops/swiglu.py, ops/fused_linear_cross_entropy.py"
    ),
    families=(
        "llama",
        "smollm3",
        "mistral",
        "ministral",
        "gemma",
        "gemma2",
        "gemma3_text",
        "qwen2",
        "qwen3",
        "phi3",
    ),
    fresh_norms=("gemma2", "gemma3_text"),
    norm_in_place=True,
    switches=LIBRARY_PARTS,
    rope="in place",
    gate_in_place=True,
    copies_halves=True,
    adapted_head="skipped",  # transformers/model/llama.py lce_maybe_trainable_lm_head
)

KERNEL_SETS: dict[str, KernelSet] = {
    row.name: row
    for row in (
        KernelSet(
            name="napkinmath",
            meaning="napkinmath_kernels.patch(model)",
            source="kernels/napkinmath_kernels/patching/patch.py",
            families=_OURS,
            parts=(*LIBRARY_PARTS, *ADAPTER_PARTS),
            hosts_embeddings=True,
            defers_logits=True,
            adapted_head="run",
            norm_processors=2,
        ),
        _LIGER,
        _LIGER.replace(
            name="axolotl",
            meaning="axolotl's adapter operations, and Liger's where they are named",
            source="axolotl 0.19 kernels/lora.py LoRA_QKV, LoRA_O, LoRA_MLP, kernels/quantize.py",
            # whose attention is written as monkeypatch/lora_kernels.py QKV_PATCHES replaces it
            families=tuple(name for name in _LIGER.families if name != "phi3"),
            parts=ADAPTER_PARTS,
            switches=(*LIBRARY_PARTS, *ADAPTER_PARTS),
            adapters_only=True,
            own_copies=True,
        ),
        KernelSet(
            name="unsloth",
            meaning="unsloth's norm, rotary, adapter and loss operations",
            source=(
                "unsloth 2026.10 kernels/fast_lora.py, rms_layernorm.py, rope_embedding.py,"
                " models/llama.py, utils/attention_dispatch.py; unsloth_zoo"
                " fused_losses/fused_linear.py"
            ),
            families=("llama", "mistral", "qwen2", "qwen3", "gemma"),
            fresh_norms=("gemma",),
            norm_in_place=True,
            rope="in place forward",
            parts=("norm", "rope", "loss", *ADAPTER_PARTS),
            adapters_only=True,
            input_in_place=True,
            repeats_keys=True,
        ),
    )
}
