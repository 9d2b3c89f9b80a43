"""Stacks of transformers' Trainer and of TRL over it, by their releases; of loops over transformers,
LLaMA-Factory and nanotron; of trainers of rollouts over Megatron."""

from __future__ import annotations

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
    TrainerCode,
)

READS_POSITIONS = AttentionCode(reads_positions=True)
SHIFTED = LossCode(shift_copy=True, slices_whole=True)
FOREACH = OptimizerCode(default="adamw-foreach")

HF_445 = Stack(
    name="hf-4.45",
    releases=Releases(library="transformers", first=(4, 36), last=(4, 45)),
    meaning="transformers 4.36 to 4.45 with its Trainer",
    source=(
        "transformers 4.45.2 models/llama/modeling_llama.py LlamaForCausalLM.forward, trainer.py;"
        " peft 0.13.2; bitsandbytes 0.43.3"
    ),
    model=ModelCode(transformers=(4, 45), scan_kernels=True),
    attention=READS_POSITIONS,
    loss=SHIFTED.replace(outputs_to_fp32=True),
    optimizer=FOREACH,
    quantizer=QuantizerCode(int8_by_columns=True),
    loop=LoopCode(reentrant_checkpointing=True),
    engine=EngineCode(nccl=(2, 20)),
)
HF_448 = HF_445.replace(
    name="hf-4.48",
    releases=Releases(library="transformers", first=(4, 46), last=(4, 49)),
    meaning="transformers 4.46 to 4.49 with its Trainer",
    source=(
        "transformers 4.48.1 loss/loss_utils.py ForCausalLMLoss, trainer.py; peft 0.13.2;"
        " bitsandbytes 0.43.3"
    ),
    model=ModelCode(transformers=(4, 48), scan_kernels=True),
    engine=EngineCode(nccl=(2, 21)),
)
HF = Stack(
    name="hf",
    releases=Releases(library="trl", first=(1, 10), last=(1, 99)),
    meaning="transformers 5 with its Trainer or TRL",
    source="transformers 5.23; trl 1.16",
    tools=("transformers", "trl", "axolotl", "ms-swift"),
    model=ModelCode(scan_kernels=True),
    attention=READS_POSITIONS,
    loss=LossCode(
        outputs_to_fp32=True,
        scores_in_chunks=True,
        temperature="in place",
        reads_entropy=True,
    ),
    quantizer=QuantizerCode(empties_cache=True),
    loop=LoopCode(keeps_stored_type=True),
)

# ---------------------------------------------------------------- TRL's releases

_OLD_DEFAULTS = TrainerCode(divergence=0.04, mixed=False, checkpoints=False, packs_whole_rows=True)
_TRL_011 = HF_445.replace(
    name="trl-0.11",
    meaning="TRL 0.7 to 0.11 (to October 2024): a trainer of pairs keeps the policy's logits",
    source="trl 0.11.4 trainer/dpo_trainer.py concatenated_forward, get_batch_loss_metrics",
    releases=Releases(library="trl", first=(0, 7), last=(0, 11)),
    loss=HF_445.loss.replace(pairs_keep_logits=True),
    trainer=_OLD_DEFAULTS,
)
_TRL_014 = HF_448.replace(
    name="trl-0.14",
    meaning="TRL 0.12 to 0.14 (to January 2025): GRPO without a temperature's division",
    source="trl 0.14.0 trainer/grpo_trainer.py get_per_token_logps, __init__ (ref_model)",
    releases=Releases(library="trl", first=(0, 12), last=(0, 14)),
    loss=HF_448.loss.replace(temperature=""),
    trainer=_OLD_DEFAULTS.replace(copies_reference=True),
)
_TRL_015 = _TRL_014.replace(
    name="trl-0.15",
    meaning="TRL 0.15 (February 2025) over transformers before 4.49: GRPO makes a prompt's logits",
    source=(
        "trl 0.15.2 trainer/grpo_trainer.py _get_per_token_logps, whose logits_to_keep transformers"
        " 4.48 does not know"
    ),
    releases=Releases(library="trl", first=(0, 15), last=(0, 15)),
    loss=_TRL_014.loss.replace(all_rollout_logits=True),
)
_TRL_018 = _TRL_014.replace(
    name="trl-0.18",
    meaning="TRL 0.16 to 0.18 (March to June 2025): logits are copied for the temperature",
    source=(
        "trl 0.16.1 and 0.18.1 trainer/grpo_trainer.py _get_per_token_logps, __init__ (ref_model);"
        " grpo_config.py beta; transformers 4.51 training_args.py bf16, gradient_checkpointing"
    ),
    releases=Releases(library="trl", first=(0, 16), last=(0, 18)),
    model=ModelCode(transformers=(4, 51), scan_kernels=True),
    loss=HF.loss.replace(temperature="copy", reads_entropy=False, scores_in_chunks=False),
    quantizer=QuantizerCode(),
)
_TRL_021 = _TRL_018.replace(
    name="trl-0.21",
    meaning="TRL 0.19 to 0.21 (June to August 2025): bf16 and no reference by default",
    source="trl 0.20.0 trainer/grpo_config.py bf16, beta; grpo_trainer.py, trainer/utils.py",
    releases=Releases(library="trl", first=(0, 19), last=(0, 21)),
    loss=HF.loss.replace(temperature="copy", scores_in_chunks=False),
    trainer=TrainerCode(checkpoints=False),
)
_TRL_029 = _TRL_021.replace(
    name="trl-0.29",
    meaning="TRL 0.22 to 0.29 (August 2025 to February 2026)",
    source="trl 0.24.0 and 0.29.0 trainer/grpo_config.py, grpo_trainer.py, dpo_trainer.py",
    releases=Releases(library="trl", first=(0, 22), last=(0, 29)),
    model=ModelCode(transformers=(4, 56), scan_kernels=True),
    engine=EngineCode(),
    trainer=TrainerCode(),
)
HF_457 = _TRL_029.replace(
    name="hf-4.57",
    releases=Releases(library="transformers", first=(4, 50), last=(4, 57)),
    meaning="transformers 4.50 to 4.57 with its Trainer",
    source="transformers 4.56.2 trainer.py, loss/loss_utils.py, training_args.py optim",
)
_TRL_19 = HF.replace(
    name="trl-1.9",
    meaning="TRL 1.0 to 1.9 over transformers 5: log-probabilities from all logits",
    source="trl 1.8 trainer/grpo_trainer.py _get_per_token_logps_and_entropies",
    releases=Releases(library="trl", first=(1, 0), last=(1, 9)),
    tools=(),
    loss=HF.loss.replace(scores_in_chunks=False),
)
OF_THE_TRAINER = (HF_445, HF_448, HF_457)
"""From the oldest to the newest, as those of TRL."""
OF_TRL = (_TRL_011, _TRL_014, _TRL_015, _TRL_018, _TRL_021, _TRL_029, _TRL_19)

_LOOP = Stack(
    name="hf-loop",
    meaning=(
        "a plain loop over transformers 5 whose variable keeps the outputs: torch's AdamW, no"
        " autocast"
    ),
    source="huggingface/peft method_comparison/MetaMathQA/run.py train",
    attention=READS_POSITIONS,
    loss=LossCode(holds_logits=True),
    quantizer=HF.quantizer,
    optimizer=FOREACH,
    loop=LoopCode(keeps_stored_type=True),
)
_NEMO_RL = HF.replace(
    name="nemo-rl-dtensor",
    tools=(),
    releases=Releases(),
    meaning=(
        "NeMo-RL over DTensor: FSDP2 hands fp32 logits to a loop that drops them before the backward;"
        " on tensor ranks its own log-probabilities"
    ),
    source=(
        "NeMo-RL v0.6.0 models/automodel/setup.py MixedPrecisionPolicy (output_dtype float32),"
        " models/automodel/train.py forward_with_post_processing_fn (del logits; 2b87def7 for v0.4.0);"
        " distributed/model_utils.py get_next_token_logprobs_from_logits"
    ),
    loss=LossCode(across_ranks="log-probabilities", returns_fp32=True, temperature=""),
)
OF_LOOPS = (
    _LOOP,
    _NEMO_RL,
    _NEMO_RL.replace(
        name="nemo-rl-dtensor-0.3",
        meaning=(
            "nemo-rl-dtensor before 0.4: the loop keeps the logits, and a loss's gradient is made of"
            " int64 one-hot labels"
        ),
        source=(
            "NeMo-RL v0.2.1 and v0.3.0 models/dtensor/parallelize.py _parallelize_model,"
            " models/policy/dtensor_policy_worker.py train; distributed/model_utils.py"
            " DistributedLogprob; uv.lock (transformers 4.51.3, 4.52.4)"
        ),
        model=ModelCode(transformers=(4, 52), scan_kernels=True),
        loss=_NEMO_RL.loss.replace(
            across_ranks="log-probabilities by one-hot labels", holds_logits=True
        ),
    ),
    _LOOP.replace(
        name="accelerate-loop",
        meaning="hf-loop whose model accelerate has prepared: it makes outputs of autocast fp32",
        source="accelerate 1.12 accelerator.py prepare_model; utils/operations.py ConvertOutputsToFp32",
        loss=LossCode(holds_logits=True, outputs_to_fp32=True),
    ),
    Stack(
        name="prime-rl-rollouts-2025",
        meaning="prime-rl until October 2025: eager operations over whole fp32 logits, shifted copies",
        source="prime-rl 6e054f2f trainer/rl/train.py, trainer/rl/loss.py, trainer/model.py",
        attention=READS_POSITIONS,
        optimizer=FOREACH,
        loss=LossCode(returns_fp32=True, shifts_rollouts=True, outside_compiler=True),
        loop=LoopCode(fp32_parameters=True),
    ),
    HF.replace(
        name="verl-engine",
        meaning="verl's SFT by its engines: the loss in one kernel, whose gradient lies on the logits",
        source="verl 0.7 workers/engine/fsdp/transformer_impl.py, utils/torch_functional.py",
        tools=(),
        releases=Releases(),
        loss=LossCode(cross_entropy="in place", narrow=True),
    ),
)

# The host under nanotron: 42 us a kernel, forward and backward. From nanotron/old_bench (July 2024,
# H100), where half the tokens of a micro-batch take as long: 24 layers on 4 tensor ranks 151 ms a
# micro-batch of 2 x 4,096 tokens, 14 layers of the first of two stages on 2 tensor ranks 81 to 91 ms
# one of 4,096; both are 6.2 ms a layer. Kernels of Triton 2 and NCCL's calls are launched from Python,
# and after each backward every weight's gradient is added to its buffer.
_NANOTRON_ISSUE = (3.5, 3.5)
_NANOTRON = Stack(
    name="nanotron",
    meaning=(
        "nanotron since August 2024: fp32 masters and gradient buffers as megatron, gates and"
        " rotations in torch's operations, heads copied, gathered inputs gathered again"
    ),
    source=(
        "nanotron 3c356115 and 2411b022 models/llama.py, models/base.py build_model,"
        " parallel/tensor_parallel/functional.py, optim/gradient_accumulator.py, trainer.py"
    ),
    model=ModelCode(rms_norm="fused", joined_projections=True, halves_gate=True),
    attention=AttentionCode(own=True, lays_heads=True),
    loss=LossCode(cross_entropy="vocabulary", copies_logits=True, returns_fp32=True),
    optimizer=OptimizerCode(master_weights=True, main_gradients=True),
    engine=EngineCode(
        tensor_style="nanotron",
        own_stages=True,
        weighs_stages=True,
        sums_late=True,
        nccl=(2, 20),
    ),
    loop=LoopCode(issue=_NANOTRON_ISSUE),
)
OF_NANOTRON = (
    _NANOTRON,
    _NANOTRON.replace(
        name="nanotron-2024",
        meaning=(
            "nanotron before August 2024, or with tp_recompute_allgather false: tensor-parallel"
            " linears keep the inputs that they gather along the sequence"
        ),
        engine=_NANOTRON.engine.replace(tensor_style="nanotron-2024"),
    ),
)
"""With and without inputs that are gathered again."""

LLAMA_FACTORY = HF.replace(
    name="llama-factory",
    meaning="LLaMA-Factory: hf, and its own trainers of pairs",
    source=(
        "LLaMA-Factory ff6d4d12 train/dpo/trainer.py concatenated_forward, get_batch_loss_metrics;"
        " train/rm/trainer.py compute_loss, model/loader.py AutoModelForCausalLMWithValueHead"
    ),
    tools=(),
    loss=HF.loss.replace(pairs_keep_logits=True, scores_beside_logits=True),
)


def over_megatron(megatron: Stack) -> tuple[Stack, ...]:
    """Trainers of rollouts that run Megatron's layers and a loss of their own."""
    unfused = megatron.optimizer.replace(fused_accumulation=False)
    nemo = megatron.replace(
        name="nemo-rl",
        meaning=(
            "Megatron as NeMo-RL's configurations run it: a weight's gradient is made, then summed in"
            " bf16; tensor-parallel collectives wait; its own loss"
        ),
        source=(
            "NeMo-RL 7ea279ab examples/configs/grpo_math_1B.yaml (gradient_accumulation_fusion and"
            " grad_reduce_in_fp32 false, overlap_param_gather); models/megatron/setup.py;"
            " distributed/model_utils.py DistributedLogprob"
        ),
        tools=(),
        loss=LossCode(cross_entropy="log-probabilities", returns_fp32=True),
        optimizer=unfused.replace(main_gradient_dtype="bf16"),
        engine=megatron.engine.replace(shares_optimizer=True, gathers_in_forward=True),
    )
    slime = megatron.replace(
        name="slime",
        meaning="megatron with slime's loss: the probabilities of fp32 logits become their gradient",
        source=(
            "slime 624b824a backends/megatron_utils/loss.py get_log_probs_and_entropy,"
            " utils/ppo_utils.py _VocabParallelLogProbEntropy; Megatron-LM"
            " core/transformer/module.py Float16Module"
        ),
        tools=(),
        loss=LossCode(cross_entropy="probabilities", returns_fp32=True),
    )
    return (
        nemo,
        nemo.replace(
            name="nemo-rl-0.3",
            meaning="nemo-rl before 0.4: a loss's gradient is made of int64 one-hot labels",
            source="NeMo-RL v0.3.0 distributed/model_utils.py DistributedLogprob; else as nemo-rl",
            loss=LossCode(cross_entropy="log-probabilities by one-hot labels", returns_fp32=True),
        ),
        slime,
        slime.replace(
            name="slime-unfused",
            meaning="slime without gradient_accumulation_fusion",
            optimizer=unfused,
        ),
        slime.replace(
            name="slime-2025",
            meaning=(
                "slime until June 2026: the loss reads a copy of the fp32 logits and the entropy"
                " another, whose probabilities stay too"
            ),
            source=(
                "slime 6a0ee158^ utils/ppo_utils.py calculate_log_probs_and_entropy,"
                " _VocabParallelEntropy; Megatron-LM core/fusions/fused_cross_entropy.py"
            ),
            loss=LossCode(cross_entropy="copies with the entropy", returns_fp32=True),
        ),
    )
