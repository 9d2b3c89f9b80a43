"""Training kernels for QLoRA, attention, losses, norms and checkpointing: Triton on a GPU, torch on
a CPU.

    from napkinmath_kernels import patch, unpatch
    print(patch(model))                  # a Hugging Face llama, mistral, qwen2/3, gemma2/3, phi3 or mixtral, with PEFT on top or not

Names are loaded when first used; torch comes with the first op, Triton with the first launch.
Nothing is patched by importing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "backend": ("Backend", "use_backend"),
    "checkpoint": (
        "HostStore",
        "LayerOption",
        "OffloadCheckpoint",
        "CheckpointPlan",
        "Recompute",
        "TiledMLP",
        "checkpoint_layers",
        "plan_layers",
    ),
    "ops.cross_entropy": ("LinearCrossEntropy", "linear_cross_entropy"),
    "ops.divergence": ("Divergence", "linear_divergence"),
    "ops.eight_bit": ("ScaledWeight", "look_up_8bit", "quantize_8bit"),
    "errors": ("KernelInputError",),
    "ops.expert_linear": ("ExpertAdapter", "expert_linear"),
    "ops.flash_attention": ("FlashAttention", "flash_attention"),
    "ops.gated": ("GatedActivation", "geglu", "swiglu"),
    "ops.layer_norm": ("LayerNorm", "layer_norm"),
    "ops.nf4": ("QuantizedWeight", "dequantize", "quantize"),
    "ops.log_probabilities": ("TokenLikelihoods", "linear_log_probabilities"),
    "patching": ("PatchReport", "patch", "unpatch"),
    "ops.linear_group": ("FrozenLinear", "LinearGroup", "LoraAdapter"),
    "ops.qlora": (
        "QLoRALinear",
        "QLoRAQKV",
        "qlora_linear",
        "qlora_linears",
    ),
    "ops.qlora_mlp": ("QLoRAMLP", "qlora_mlp"),
    "ops.rms_norm": ("RMSNorm", "rms_norm"),
    "ops.rope": ("RotaryEmbedding", "rope"),
    "weight_buffer": ("WeightBuffer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
