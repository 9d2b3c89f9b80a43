"""Stacks: whose training code runs, and when, a row each (ir/stack.py has the fields)."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.catalog.trainer_stacks import (
    FOREACH,
    HF,
    HF_445,
    LLAMA_FACTORY,
    OF_LOOPS,
    OF_NANOTRON,
    OF_THE_TRAINER,
    OF_TRL,
    READS_POSITIONS,
    SHIFTED,
    over_megatron,
)
from napkinmath.config.train_config import Kernels
from napkinmath.ir.stack import (
    AttentionCode,
    EngineCode,
    LoopCode,
    LossCode,
    ModelCode,
    OptimizerCode,
    QuantizerCode,
    Releases,
    Stack,
)

_KERNELS = {kernels.value for kernels in Kernels}
_MEGATRON_MODEL = ModelCode(
    rms_norm="fused",
    fused_gate=True,
    fused_experts=True,
    joined_projections=True,
    narrow_adapters=True,
    scan_kernels=True,
    scan_projects=False,
)
_MEGATRON_ATTENTION = AttentionCode(own=True, fused_softmax=True)
_MEGATRON_ENGINE = EngineCode(tensor_style="megatron", own_stages=True)

# The host under Megatron-Core: 46 us a kernel, forward and backward (12 elsewhere, and more a layer), and 1.2 ms
# a checkpoint. From NVIDIA's own tests on one DGX H100 (Megatron-LM d98e8a64
# tests/functional_tests/test_cases/gpt, iteration-time of the golden values): GPT with 12 layers of
# 512, whose kernels take 14 to 32 ms. Steps of 2 and 4 micro-batches on 2 and 4 tensor ranks take 107
# and 192 ms, so a micro-batch takes 42.5, with 294 kernels forward and 628 backward; with full
# recomputation a step takes 26 ms more. BERT's 24 layers of 1,024 take 109 ms a micro-batch on 4 tensor
# ranks, where as many of these would take 85. The tests run deterministic algorithms.
_MEGATRON_ISSUE = (3.83, 3.83)
_MEGATRON_CHECKPOINT = (10, 17)
# Megatron-LM's older layers, which no part of NVIDIA's tests runs, are priced at every loop's pace; a
# checkpoint (with the tracker's generators) at the 1.2 ms of those tests over 1.7, which is as much
# longer as that host takes a layer. So layers of 1,024 take 3.4 ms a micro-step, 3.3 measured
# (VIA-Research/vTrain ground truth, DGX A100).
_MEGATRON_LM_CHECKPOINT = (23, 38)
_MEGATRON = Stack(
    name="megatron",
    meaning=(
        "mixed precision with fp32 masters and fp32 gradient buffers: 18 bytes a parameter,"
        " 6 + 12/d with --zero 1, 2 less with --reduce-dtype bf16"
    ),
    source=(
        "Megatron-LM optimizer/optimizer.py Float16OptimizerWithFloat16Params,"
        " distributed/param_and_grad_buffer.py; arguments.py: transformer_impl"
        " transformer_engine, apply_rope_fusion and gradient_accumulation_fusion by default"
    ),
    tools=("megatron-lm", "megatron-core"),
    model=_MEGATRON_MODEL.replace(cached_fp8=True, streams=True, experts_apart=True),
    attention=_MEGATRON_ATTENTION.replace(rotary="fused", prefers_cudnn=True),
    loss=LossCode(cross_entropy="vocabulary"),
    optimizer=OptimizerCode(
        master_weights=True, main_gradients=True, fused_accumulation=True, chains_experts=True
    ),
    engine=_MEGATRON_ENGINE.replace(narrow_ring=True),
    loop=LoopCode(
        issue=_MEGATRON_ISSUE, layer_dispatches=(0, 0), checkpoint_dispatches=_MEGATRON_CHECKPOINT
    ),
)

_MEGATRON_DEEPSPEED = Stack(
    name="megatron-deepspeed",
    meaning=(
        "Megatron-LM's layers under DeepSpeed's ZeRO: 16-bit gradients, fp32 masters in partitions"
    ),
    source=(
        "Megatron-DeepSpeed megatron/training.py setup_model_and_optimizer,"
        " core/tensor_parallel/cross_entropy.py; DeepSpeed runtime/zero/stage_1_and_2.py"
    ),
    tools=("gpt-neox",),
    model=_MEGATRON_MODEL,
    attention=_MEGATRON_ATTENTION,
    loss=LossCode(cross_entropy="vocabulary", copies_logits=True),
    optimizer=OptimizerCode(master_weights=True),
    engine=_MEGATRON_ENGINE.replace(nccl=(2, 18), keeps_stage_outputs=True),
    loop=LoopCode(checkpoint_dispatches=_MEGATRON_LM_CHECKPOINT),
)

STACKS: dict[str, Stack] = {
    row.name: row
    for row in (
        HF,
        LLAMA_FACTORY,
        Stack(
            name="hf-bare",
            meaning=(
                "a bare loop over transformers 5: torch's AdamW, outputs dropped before the"
                " backward"
            ),
            source="transformers 5.23",
            attention=READS_POSITIONS,
            quantizer=HF.quantizer,
            optimizer=FOREACH,
        ),
        Stack(
            name="diffusers",
            meaning="diffusers' examples: torch's AdamW over a denoiser, checkpoints not reentrant",
            source=(
                "diffusers 0.42 examples/text_to_image/train_text_to_image_lora_sdxl.py,"
                " examples/dreambooth/train_dreambooth_lora_flux.py, models/modeling_utils.py"
                " enable_gradient_checkpointing"
            ),
            draws=True,
            optimizer=FOREACH,
        ),
        Stack(
            name="sd-scripts",
            meaning="sd-scripts and musubi-tuner: diffusers' step, with adapters that cast no input",
            source=(
                "kohya-ss/sd-scripts networks/lora.py; kohya-ss/musubi-tuner networks/lora.py"
                " LoRAModule.forward"
            ),
            tools=("musubi-tuner",),
            draws=True,
            model=ModelCode(bare_adapters=True),
            optimizer=FOREACH,
        ),
        Stack(
            name="hf-bare-fp32",
            meaning="hf-bare over fp32 parameters, which FSDP gathers in 16 bits",
            source=(
                "OLMo olmo/config.py FSDPPrecision.mixed, configs/official-1124;"
                " llm-foundry 0.22 with composer's MixedPrecision.DEFAULT"
            ),
            tools=("olmo", "llm-foundry"),
            attention=READS_POSITIONS,
            optimizer=FOREACH,
            loop=LoopCode(fp32_parameters=True),
        ),
        Stack(
            name="hf-bare-layers",
            meaning="hf-bare with --compile on the layers alone, as prime-rl has it",
            source=(
                "prime-rl trainer/model.py apply_compile, torchtitan until April 2025"
                " (parallelize_llama.py apply_compile)"
            ),
            tools=("prime-rl",),
            attention=READS_POSITIONS,
            optimizer=FOREACH,
            loss=LossCode(outside_compiler=True, eager_tiles=True),
            loop=LoopCode(fp32_parameters=True),
        ),
        Stack(
            name="automodel",
            meaning=(
                "NeMo AutoModel's own models: Transformer Engine's norms and attention, tokens reach"
                " experts by DeepEP"
            ),
            source=(
                "NeMo AutoModel components/models/common/utils.py BackendConfig,"
                " components/moe/experts.py GroupedExpertsDeepEP"
            ),
            model=ModelCode(
                rms_norm="fused", fused_experts=True, narrow_adapters=True, scan_kernels=True
            ),
            attention=AttentionCode(own=True, prefers_cudnn=True),
            optimizer=FOREACH,
            engine=EngineCode(sends_tokens_once=True),
        ),
        Stack(
            name="torchtitan",
            meaning=(
                "torchtitan 0.2: a bare loop whose layers repeat keys and values per query head, and"
                " whose SDPA tries cuDNN's kernel first"
            ),
            source=(
                "torchtitan 0.2 train.py, models/llama3/model/model.py Attention.forward,"
                " models/attention.py ScaledDotProductAttentionWrapper (since 6a3a9da95, October 2025),"
                " config/job_config.py Training (dtype float32, mixed_precision_reduce float32),"
                " Optimizer (implementation fused)"
            ),
            attention=AttentionCode(own=True, repeats_keys=True, sdpa_cudnn_from=9),
            loop=LoopCode(fp32_parameters=True),
        ),
        _MEGATRON,
        _MEGATRON.replace(
            name="megatron-unfused",
            meaning=(
                "megatron without gradient_accumulation_fusion: a weight's gradient is made in its"
                " own type, then added to the buffer"
            ),
            tools=("megatron-swift",),
            optimizer=_MEGATRON.optimizer.replace(fused_accumulation=False),
        ),
        _MEGATRON.replace(
            name="megatron-2025",
            meaning="megatron with Transformer Engine 2.3 to 2.12, which widens bf16 moments",
            source="Transformer Engine v2.12 pytorch/optimizers/fused_adam.py get_unscaled_state",
            tools=(),
            optimizer=_MEGATRON.optimizer.replace(widens_moments=True),
        ),
        _MEGATRON.replace(
            name="megatron-2024",
            meaning="Megatron-LM before core 0.8 of August 2024, whose loss copies its logits",
            source=(
                "Megatron-LM core_v0.6.0 core/tensor_parallel/cross_entropy.py,"
                " training/utils.py average_losses_across_data_parallel_group;"
                " nvcr.io/nvidia/pytorch:24.02-py3 (NCCL 2.19)"
            ),
            tools=(),
            attention=_MEGATRON.attention.replace(narrow_cudnn=True),
            loss=_MEGATRON.loss.replace(copies_logits=True),
            engine=_MEGATRON.engine.replace(nccl=(2, 19), averages_apart=True),
        ),
        _MEGATRON.replace(
            name="nemo",
            meaning=(
                "NeMo and Megatron-Bridge as their performance recipes run: megatron with fused loss,"
                " overlapped tensor ranks, gradients summed in bf16, FP8 weights without a copy, tokens"
                " sent once to a rank of experts"
            ),
            source=(
                f"{_MEGATRON.source}; Megatron-Bridge recipes/llama (cross_entropy_fusion_impl te,"
                " CommOverlapConfig tp_comm_overlap, DistributedDataParallelConfig"
                " overlap_param_gather, use_distributed_optimizer; NeMo collections/llm/recipes"
                " turn it off under adapters), scripts/performance/configs/llama"
                " (grad_reduce_in_fp32 False), deepseek, qwen (moe_token_dispatcher_type flex),"
                " training/mixed_precision.py (fp8_param_gather True)"
            ),
            tools=("megatron-bridge",),
            model=_MEGATRON.model.replace(fp8_weights_alone=True),
            optimizer=_MEGATRON.optimizer.replace(main_gradient_dtype="bf16"),
            loss=LossCode(cross_entropy="in place", narrow=True),
            engine=_MEGATRON.engine.replace(
                hides_tensor_collectives=True,
                shares_optimizer=True,
                gathers_in_forward=True,
                sends_tokens_once=True,
            ),
        ),
        *over_megatron(_MEGATRON),
        _MEGATRON_DEEPSPEED,
        _MEGATRON_DEEPSPEED.replace(
            name="megatron-deepspeed-engine",
            meaning=(
                "megatron-deepspeed under DeepSpeed's plain engine (no_pipeline_parallel): no stage"
                " keeps earlier logits"
            ),
            tools=(),
            engine=_MEGATRON_DEEPSPEED.engine.replace(keeps_stage_outputs=False),
        ),
        Stack(
            name="deepspeed",
            meaning="mixed precision with fp32 masters: 2 + 2 + 4 + 8 = 16 bytes a parameter",
            source="DeepSpeed runtime/zero/stage_1_and_2.py (ZeRO, arXiv 1910.02054)",
            attention=READS_POSITIONS,
            optimizer=OptimizerCode(master_weights=True, casts_gradients=True),
        ),
        Stack(
            name="hf-2022",
            meaning="transformers 4.1x to 4.2x with its Trainer on torch 1.x",
            source=(
                "transformers 4.18 trainer.py, optimization.py AdamW; torch 1.11 optim/optimizer.py"
                " zero_grad"
            ),
            model=ModelCode(transformers=(4, 18)),
            attention=AttentionCode(softmax_keeps_input=True),
            loss=SHIFTED,
            optimizer=OptimizerCode(default="adamw", keeps_gradients=True),
            quantizer=QuantizerCode(int8_by_columns=True),
            loop=LoopCode(reentrant_checkpointing=True),
            engine=EngineCode(nccl=(2, 10)),
        ),
        HF_445.replace(
            name="hf-2023",
            releases=Releases(library="transformers", first=(4, 30), last=(4, 35)),
            meaning="transformers 4.30 to 4.35 with its Trainer",
            source="transformers 4.32 trainer.py; peft 0.5; accelerate 0.21",
            model=ModelCode(transformers=(4, 32), scan_kernels=True),
            quantizer=QuantizerCode(int8_by_columns=True, keeps_input=True),
            engine=EngineCode(nccl=(2, 18)),
        ),
        HF_445.replace(
            name="hf-2024",
            releases=Releases(),
            meaning="transformers 4.3x to 4.45 with its Trainer",
        ),
        *OF_LOOPS,
        *OF_NANOTRON,
        Stack(
            name="torch-loop",
            meaning="a model and a loop of one's own: its loss reads 16-bit logits as they are",
            source="nanoGPT 3adf61e model.py GPT.forward, train.py; torch nn/functional.py cross_entropy",
            tools=("nanogpt",),
            model=ModelCode(fused_gelu=True),
            attention=AttentionCode(own=True),
            loss=LossCode(narrow=True),
            loop=LoopCode(fp32_parameters=True),  # of a model that nothing loads
        ),
        Stack(
            name="litgpt",
            meaning="litgpt's fine-tuning scripts of 2023 to 2024",
            source="litgpt 0.4 finetune/lora.py, lora.py, model.py; bitsandbytes 0.42",
            model=ModelCode(transformers=(0, 0), library="litgpt", narrow_adapters=True),
            optimizer=FOREACH,
            loss=LossCode(outside_compiler=True),
            quantizer=QuantizerCode(int8_by_columns=True, keeps_input=True, unpacks_by_half=True),
            loop=LoopCode(holds_last_step=True),
            engine=EngineCode(flat_adapters=True, nccl=(2, 19)),
        ),
        Stack(
            name="torchtune",
            meaning="torchtune's single-device recipes since late 2024",
            source=(
                "torchtune 0.4 recipes/full_finetune_single_device.py, modules/transformer.py,"
                " modules/peft/lora.py"
            ),
            model=ModelCode(transformers=(0, 0), narrow_adapters=True),
            # training/_compile.py compile_loss: what it makes of a plain loss is dropped
            loss=LossCode(chunks=8, outside_compiler=True),
            quantizer=QuantizerCode(shards_constants=True),
            loop=LoopCode(shares_cores=True),
            engine=EngineCode(nccl=(2, 21)),
        ),
        *OF_THE_TRAINER,
        *OF_TRL,
    )
}


_TOOLS = [tool for row in STACKS.values() for tool in row.tools]
_BY_TOOL = {tool.replace("-", ""): row.name for row in STACKS.values() for tool in row.tools}


def find_stack(name: str) -> Stack:
    """The row of that name, or of a trainer that runs it; raises InputError with the nearest
    names."""
    tool = name.lower().replace("_", "").replace("-", "")
    row = STACKS.get(name) or STACKS.get(_BY_TOOL.get(tool, "")) or _of_release(name)
    if row is None:
        kernels = f"; its kernels are --kernels {name}" if name in _KERNELS else ""
        undated = ", ".join(known for known in STACKS if not any(map(str.isdigit, known)))
        raise InputError(
            f"stack {shown(name)} is unknown{kernels}{suggest(name, [*STACKS, *_TOOLS])}; use one"
            f" of {undated}, one of a release such as {OF_THE_TRAINER[-1].name}, or a trainer's name"
        )
    return row


def _of_release(name: str) -> Stack | None:
    """The row of a library's release, written 'trl-0.16' or 'trl==0.16.1'."""
    library, _, version = name.lower().replace("==", "-").rpartition("-")
    numbers = version.split(".")
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers[:2]):
        return None
    asked = (int(numbers[0]), int(numbers[1]))
    found = (
        row
        for row in STACKS.values()
        if row.releases.library == library and row.releases.first <= asked <= row.releases.last
    )
    return next(found, None)


def latest_before(version: tuple[int, int]) -> Stack:
    """The stack of the newest transformers before a version."""
    known = (row for row in STACKS.values() if row.model.is_transformers_before(version))
    plain = (row for row in known if row.releases.library != "trl")
    return max(plain, key=lambda stack: stack.model.transformers)
