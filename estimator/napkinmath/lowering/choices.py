"""resolve: settles what 'auto' means for a model, a configuration and a GPU, and makes the Policy
that the step is recorded under."""

from __future__ import annotations

from napkinmath.base.cuda import DEFAULT_PROCESSORS
from napkinmath.base.dtypes import BF16, BF16_CHECKPOINT, CHECKPOINT, CHECKPOINT_TF32
from napkinmath.catalog.attention_support import FLASH_ATTENTION, FLEX_ATTENTION, SDPA
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import (
    AdapterKind,
    Attention,
    Kernels,
    Precision,
    TrainConfig,
)
from napkinmath.lowering.attention_kernel import MAX_CUDNN_HEAD, MAX_CUDNN_HEAD_ON_HOPPER
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.precision import PRECISIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.config.hardware import Hardware
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.stack import Stack

_PEFT_DEFAULT = ("peft-default",)  # what --targets says
_FIRST_FLASH = 8  # major compute capability


def resolve(
    spec: ModelSpec,
    config: TrainConfig,
    hardware: Hardware | None,
    *,
    teacher: ModelSpec | None = None,
) -> Policy:
    """The policy of a configuration; `teacher` is the model that its workload names.

    Raises InputError where model, method and hardware contradict each other.
    """
    config = settle_adapter(spec, settle_attention(spec, settle_batch(spec, config, hardware)))
    patch, gpu = None, hardware.gpu if hardware is not None else None
    if config.kernels is not Kernels.HF:
        from napkinmath.lowering.patching import settle_patch

        patch, config = settle_patch(spec, config)
    elif config.offload.embeddings or config.quantization is not None:
        from napkinmath.lowering.patching import embedding_options, refuse_embeddings

        for option in embedding_options(config):
            raise refuse_embeddings(option)
    stack, rollout = _with_its_masters(find_stack(config.stack), config), None
    if config.workload.has_engine:
        from napkinmath.lowering.rollout.plan import engine_plan

        rollout = engine_plan(spec, config, hardware)
    return Policy(
        config,
        stack,
        sdpa_choice=sdpa_choice(config, hardware, stack),
        cudnn_heads=cudnn_heads(hardware, stack),
        patch=patch,
        processors=(gpu.num_sms if gpu is not None else 0) or DEFAULT_PROCESSORS,
        teacher=teacher,
        rollout=rollout,
        product_workspace_bytes=gpu.cublas_workspace_bytes if gpu is not None else 0,
    )


def as_loaded(
    stored_type: str, model_type: str, config: TrainConfig, given: Mapping[str, object]
) -> TrainConfig:
    """The training with fp32 parameters where the checkpoint has them, the trainer keeps its type
    and what is given says nothing else; its adapter on the modules that the model's type decides."""
    if config.adapter is not None and config.adapter.targets == _PEFT_DEFAULT:
        from napkinmath.catalog.lora_targets import targets_of

        config = config.replace(adapter=config.adapter.replace(targets=targets_of(model_type)))
    if given.get("precision") in (CHECKPOINT, CHECKPOINT_TF32) and "arch" not in given:
        keeps = find_stack(config.stack).loop.keeps_stored_type
        kind = Precision.FP16 if stored_type == "fp16" else Precision.BF16
        wide = stored_type == "fp32" or not keeps
        plain = Precision.FP32 if given["precision"] == CHECKPOINT else Precision.TF32
        return config.replace(precision=plain if wide else kind)
    if (
        stored_type != "fp32"
        or "arch" in given  # numbers have no checkpoint
        or given.get("precision", BF16_CHECKPOINT) != BF16_CHECKPOINT
        or config.precision is not Precision.BF16_AUTOCAST
        or not find_stack(config.stack).loop.keeps_stored_type
    ):
        return config
    return config.replace(precision=Precision.BF16_AMP)


def settle_adapter(spec: ModelSpec, config: TrainConfig) -> TrainConfig:
    """The modules that IA3 scales where none are named; InputError for methods whose step is not
    recorded."""
    adapter = config.adapter
    if adapter is None:
        return config
    if adapter.kind in (AdapterKind.PROMPT, AdapterKind.PREFIX):
        from napkinmath.lowering.virtual_tokens import settle_virtual_tokens

        return settle_virtual_tokens(spec, config, adapter)
    if adapter.kind is AdapterKind.IA3 and adapter.targets == ("all-linear",):
        from napkinmath.lowering.ia3 import default_targets

        return config.replace(adapter=adapter.replace(targets=default_targets(spec.family)))
    return config


def settle_batch(
    spec: ModelSpec, config: TrainConfig, hardware: Hardware | None = None
) -> TrainConfig:
    """Sequences of several lengths: cut to the sequence length; padded, the longest is the one that
    the peak is of.

    Packed sequences go through flash-attn where nothing else is named, as TRL asks (trl
    trainer/sft_trainer.py padding_free), whose kernels take the ends of the sequences. SDPA is
    given a mask of them, also where the model's class refuses flash-attn, or the GPU has none.
    """
    batch, length = config.batch, config.sequence_length
    if batch.lengths and isinstance(length, int):
        batch = batch.replace(lengths=tuple(min(one, length) for one in batch.lengths))
        config = config.replace(
            batch=batch, sequence_length=length if batch.packing else max(batch.lengths)
        )
    before_flash = 0 < _capability(hardware) < _FIRST_FLASH
    if batch.packing and config.attention is Attention.AUTO and not before_flash:
        packed = config.replace(attention=Attention.FLASH2)
        config = config if refused_attention(spec, packed) else packed
    return config


def settle_attention(spec: ModelSpec, config: TrainConfig) -> TrainConfig:
    """Whole scores where nothing is named and the stack's release has no SDPA for this model."""
    if config.attention is not Attention.AUTO or config.kernels is not Kernels.HF:
        return config
    stack = find_stack(config.stack)
    has_modules = stack.attention.own or not stack.model.runs_transformers
    if has_modules or stack.model.transformers >= spec.sdpa_since:
        return config
    return config.replace(attention=Attention.EAGER)


def refused_attention(spec: ModelSpec, config: TrainConfig) -> str:
    """The word of `attn_implementation` by which the run asks for its attention, where the class of
    transformers refuses it; '' where it runs, and where the library has modules of its own."""
    stack, wanted = find_stack(config.stack), config.attention
    if stack.attention.own or stack.model.transformers < (5, 0):
        return ""
    if wanted in (Attention.AUTO, Attention.EAGER):
        return ""
    if wanted in (Attention.FLASH1, Attention.FLASH2, Attention.FLASH3):
        word = FLASH_ATTENTION
    else:
        word = FLEX_ATTENTION if wanted is Attention.FLEX else SDPA
    return word if word in spec.refused_attention else ""


# Hopper and Blackwell of data centres, with cuDNN above 9.15 as in the wheels for CUDA 13 that torch
# has installed since 2.11 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
# check_prefer_cudnn_attention); wheels for CUDA 12 keep FlashAttention 2.
_CUDNN_FIRST = (9, 10)


def is_of_today(stack: Stack) -> bool:
    """Whether a stack attends by transformers 5, whose releases stand beside torch 2.10 to 2.13."""
    return not stack.attention.own and stack.model.transformers >= (5, 0)


def sdpa_choice(config: TrainConfig, hardware: Hardware | None, stack: Stack) -> Attention:
    """The fused kernel that attention runs on: what was named, else cuDNN's or FlashAttention where
    the GPU has it, else memory-efficient.

    PyTorch's flash kernels need compute capability 8.0; Volta and Turing run the memory-efficient
    ones, which take no bf16 there, and math is what is left
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp check_sm_version,
    less_than_sm80_mem_efficient_dtypes).
    """
    named = {
        Attention.MATH,
        Attention.EFFICIENT,
        Attention.FLASH,
        Attention.FLASH2,
        Attention.FLASH3,
        Attention.FLEX,
        Attention.CUDNN,
    }
    if config.attention in named:
        return config.attention
    major = _capability(hardware)
    if stack.attention.prefers_cudnn and major >= 9 and config.attention is Attention.AUTO:
        return Attention.CUDNN
    unnamed = config.attention in (Attention.AUTO, Attention.SDPA)
    first = stack.attention.sdpa_cudnn_from
    if unnamed and first and major >= first:
        return Attention.CUDNN
    if unnamed and major in _CUDNN_FIRST and is_of_today(stack):
        return Attention.CUDNN
    if 0 < major < _FIRST_FLASH:
        rule = PRECISIONS[config.precision]
        in_bf16 = (rule.autocast or rule.parameters) is BF16
        return Attention.MATH if in_bf16 else Attention.EFFICIENT
    return Attention.FLASH


def cudnn_heads(hardware: Hardware | None, stack: Stack) -> int:
    """The largest head of cuDNN's kernel with its backward: 256 on Hopper alone, by Transformer
    Engine since cuDNN 9.5, by torch since 9.10, else 128.

    Source: Transformer Engine common/fused_attn/fused_attn.cpp nvte_get_fused_attn_backend; torch
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp check_cudnn_tensor_shapes.
    """
    by_engine = stack.attention.prefers_cudnn and not stack.attention.narrow_cudnn
    wide = by_engine or stack.attention.sdpa_cudnn_from or is_of_today(stack)
    return MAX_CUDNN_HEAD_ON_HOPPER if wide and _capability(hardware) == 9 else MAX_CUDNN_HEAD


def _with_its_masters(stack: Stack, config: TrainConfig) -> Stack:
    """The stack; where ZeRO's masters have 16 bits, its optimizer makes no fp32 ones of them."""
    if config.parallel.zero.master_dtype == "fp32" or not stack.optimizer.master_weights:
        return stack
    own = stack.optimizer.replace(master_weights=False, casts_gradients=False)
    return stack.replace(optimizer=own)


def _capability(hardware: Hardware | None) -> int:
    """The major compute capability of an NVIDIA GPU; 0 where it is not known or another's."""
    if hardware is None or hardware.gpu.vendor != "nvidia":
        return 0
    return int((hardware.gpu.compute_capability or "0").split(".")[0])
