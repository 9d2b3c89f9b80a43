"""Rows of stacks that only published tables need: one source's recipe, or the libraries of a few
months.

`--stack` does not know them. They are among napkinmath's from the moment this package is imported.
"""

from __future__ import annotations

from napkinmath.catalog.stacks import STACKS
from napkinmath.ir.stack import (
    AttentionCode,
    EngineCode,
    LoopCode,
    LossCode,
    ModelCode,
    OptimizerCode,
    QuantizerCode,
    Stack,
)


def _with_foak(row: Stack) -> Stack:
    """The same libraries with fms-acceleration's fused operations and kernels."""
    return row.replace(
        name=f"{row.name}-foak",
        meaning=(
            f"{row.meaning}, with unsloth's loss, norm, rotary and adapter kernels patched in by"
            " fms-acceleration"
        ),
        source=(
            f"{row.source}; foundation-model-stack/fms-acceleration plugins/fused-ops-and-kernels,"
            " configs/fast_*.yaml"
        ),
        model=row.model.replace(rms_norm="in place"),
        attention=row.attention.replace(rotary="in place"),
        loss=row.loss.replace(cross_entropy="in place"),
        quantizer=row.quantizer.replace(fused_adapters=True, unpacks_words=True),
    )


def _with_scattermoe(row: Stack) -> Stack:
    """The same libraries with fms-acceleration's experts."""
    return row.replace(
        name=f"{row.name}-scattermoe",
        meaning=f"{row.meaning}, with ScatterMoE's kernels for experts",
        source=(
            f"{row.source}; foundation-model-stack/fms-acceleration plugins/accelerated-moe,"
            " khd/kernels/scattermoe (rows are gathered and summed within the products)"
        ),
        model=row.model.replace(fused_experts=True),
    )


def _with_trl(row: Stack) -> Stack:
    """The same libraries with TRL preparing the quantized model."""
    return row.replace(
        name=f"{row.name}-trl",
        meaning=f"{row.meaning}, quantized models prepared by TRL",
        source=f"{row.source}; trl 0.11 to 0.13 trainer/utils.py peft_module_casting_to_bf16",
        quantizer=row.quantizer.replace(half_embeddings=True),
    )


_HF_445, _HF_448 = STACKS["hf-4.45"], STACKS["hf-4.48"]
_HF_444 = _HF_445.replace(name="hf-4.44", model=_HF_445.model.replace(transformers=(4, 44)))
_HF_432 = _HF_445.model.replace(transformers=(4, 32))
_LITGPT, _DEEPSPEED = STACKS["litgpt"], STACKS["deepspeed"]
_DEEPSPEED_2023 = _HF_445.replace(
    name="deepspeed-2023",
    meaning="transformers 4.30 to 4.37 with its Trainer under DeepSpeed",
    source=(
        "transformers 4.32 trainer.py; DeepSpeed 0.10 runtime/zero/stage_1_and_2.py"
        " ipg_buffer: two of reduce_bucket_size 2e8 with overlap_comm"
    ),
    model=_HF_432,
    loss=_HF_445.loss.replace(outputs_to_fp32=False),
    optimizer=OptimizerCode(master_weights=True, casts_gradients=True),
    engine=EngineCode(bucket_bytes=2 * 200_000_000 * 2, nccl=(2, 18)),
)

PUBLISHED: dict[str, Stack] = {
    row.name: row
    for row in (
        _HF_445.replace(
            name="hf-2023-torch2.0",
            meaning="transformers 4.30 to 4.37 with its Trainer on torch 2.0",
            source=(
                "transformers 4.32 trainer.py; peft 0.5; accelerate 0.21; torch 2.0 optim/adamw.py"
            ),
            model=_HF_432,
            optimizer=OptimizerCode(default="adamw-foreach-2.0"),
            quantizer=_HF_445.quantizer.replace(keeps_input=True),
        ),
        _DEEPSPEED_2023,
        _DEEPSPEED_2023.replace(
            name="deepspeed-2023-zero3",
            meaning="transformers 4.30 to 4.37 with its Trainer under DeepSpeed's ZeRO stage 3",
            source=(
                "transformers 4.32 trainer.py; DeepSpeed 0.10 runtime/zero/parameter_offload.py"
                " _register_hooks_recursively"
            ),
            engine=_DEEPSPEED_2023.engine.replace(parameter_hooks=True),
        ),
        _HF_445.replace(
            name="hf-2024-fsdp",
            meaning=(
                "transformers 4.38 to 4.45 with its Trainer, checkpointing switched on in"
                " accelerate's FSDP settings"
            ),
            source=(
                "accelerate 0.33 accelerator.py prepare_model (activation_checkpointing:"
                " apply_activation_checkpointing)"
            ),
            loop=LoopCode(checkpoints_within=True),
        ),
        _HF_445.replace(
            name="hf-2024-loop",
            meaning=(
                "a plain loop over transformers 4.38 whose variable keeps the outputs, with torch's"
                " own FSDP and checkpointing"
            ),
            source="AnswerDotAI/fsdp_qlora of March 2024 train.py fsdp_main",
            loss=_HF_445.loss.replace(outputs_to_fp32=False, holds_logits=True),
            loop=LoopCode(checkpoints_within=True),
        ),
        _DEEPSPEED.replace(
            name="internevo",
            meaning="InternEvo's hybrid ZeRO and FSDP under torch 2.0",
            source=(
                "InternEvo 7776693 internlm/solver/optimizer/hybrid_zero_optim.py, fsdp_optimizer.py;"
                " internlm/train/training_internlm.py (torch.optim.AdamW; FSDP's use_orig_params"
                " came with torch 2.0)"
            ),
            optimizer=_DEEPSPEED.optimizer.replace(default="adamw-foreach-2.0"),
            engine=EngineCode(nccl=(2, 14)),
        ),
        STACKS["megatron-deepspeed"].replace(
            name="megatron-deepspeed-2021",
            meaning=(
                "BLOOM's fork of Megatron-DeepSpeed, whose loss writes over its fp32 logits, with"
                " DeepSpeed 0.5 and torch 1.10"
            ),
            source=(
                "bigscience-workshop/Megatron-DeepSpeed 8387ae17 megatron/mpu/cross_entropy.py"
                " (vocab_parallel_logits.sub_); DeepSpeed 7a132a9f4 (0.5.8)"
            ),
            loss=LossCode(cross_entropy="vocabulary"),
            engine=STACKS["megatron-deepspeed"].engine.replace(nccl=(2, 10), deepspeed=(0, 5)),
        ),
        STACKS["torchtitan"].replace(
            name="torchtitan-2024",
            meaning="torchtitan until April 2025, which compiles its layers alone",
            source="torchtitan of 2024 parallelisms/parallelize_llama.py apply_compile",
            attention=STACKS["torchtitan"].attention.replace(sdpa_cudnn_from=0),
            loss=STACKS["hf-bare-layers"].loss,
        ),
        STACKS["torchtitan"].replace(
            name="torchtitan-2025",
            meaning="torchtitan of May to October 2025, whose SDPA tries cuDNN first on B200 alone",
            source="torchtitan 3b85aa31f models/attention.py init_backend (has_cuda_capability(10, 0))",
            attention=STACKS["torchtitan"].attention.replace(sdpa_cudnn_from=10),
        ),
        STACKS["hf-bare-layers"].replace(
            name="prime-rl-2025",
            meaning="prime-rl until March 2026, whose loop keeps the outputs of a supervised step",
            source=(
                "prime-rl trainer/sft/train.py train: `del logits` leaves `out`, which holds them in"
                " fp32; gone with 447cafede (2026-03-10)"
            ),
            loss=STACKS["hf-bare-layers"].loss.replace(holds_logits=True, returns_fp32=True),
        ),
        STACKS["nemo"].replace(
            name="nemo-all-to-all",
            meaning=(
                "Megatron-Bridge's recipe of Moonlight: tokens sent for each of their experts,"
                " tensor-parallel collectives that wait"
            ),
            source=(
                "Megatron-Bridge recipes/moonlight/h100/moonlight_16b.py"
                " moonlight_16b_pretrain_8gpu_h100_bf16_config (moe_token_dispatcher_type alltoall,"
                " CommOverlapConfig tp_comm_overlap False)"
            ),
            optimizer=STACKS["nemo"].optimizer.replace(widens_moments=True),
            engine=STACKS["nemo"].engine.replace(
                hides_tensor_collectives=False, sends_tokens_once=False
            ),
        ),
        Stack(
            name="litgpt-2023",
            meaning="lit-gpt's fine-tuning scripts of 2023, which run the longest sample first",
            source="lit-gpt of October 2023 finetune/lora.py train, get_batch(longest_seq_ix)",
            model=_LITGPT.model,
            optimizer=_LITGPT.optimizer,
            quantizer=_LITGPT.quantizer,
            engine=_LITGPT.engine,
        ),
        Stack(
            name="torchtune-2024-04",
            meaning="torchtune's single-device recipes of April 2024",
            source="torchtune 0.0.1 recipes/lora_finetune_single_device.py",
            model=ModelCode(transformers=(0, 0)),
            optimizer=OptimizerCode(default="adamw-foreach"),
            loss=LossCode(
                shift_copy=True, slices_whole=True, holds_logits=True, outside_compiler=True
            ),
            quantizer=QuantizerCode(searches=True),
        ),
        _HF_448.replace(
            name="hf-transformer-engine",
            meaning="transformers 4.4x whose layers are Transformer Engine's",
            source=(
                "Transformer Engine docs/examples/te_llama/te_llama.py TELlamaDecoderLayer; accelerate"
                " utils/transformer_engine.py convert_model"
            ),
            model=_HF_448.model.replace(
                rms_norm="fused",
                cached_fp8=True,
                fused_gate=True,
                joined_projections=True,
                streams=True,
            ),
            attention=AttentionCode(rotary="fused", prefers_cudnn=True, own=True),
        ),
        STACKS["hf-2022"].replace(
            name="apex-o2",
            meaning="a loop of before torch's autocast, whose model Apex made 16-bit (opt_level O2)",
            source=(
                "apex amp/frontend.py O2 (cast_model_type float16, master_weights True), amp/_initialize.py,"
                " optimizers/fused_adam.py"
            ),
            optimizer=OptimizerCode(master_weights=True, casts_gradients=True),
        ),
        _HF_444,
        *(
            change(row)
            for row in (_HF_444, _HF_445, _HF_448)
            for change in (_with_foak, _with_scattermoe, _with_trl)
        ),
    )
}


def add_to_catalog() -> None:
    """Makes the rows known to `find_stack`, and so to every TrainConfig that names one."""
    STACKS.update(PUBLISHED)
