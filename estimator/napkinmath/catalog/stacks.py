"""Stacks: whose training code runs, and when: each quirk of a library or era that moves memory is a
field of a row here."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.record import Record


class Stack(Record):
    """How a library of an era runs the same model; a field is priced wherever the builders and the
    loss ask for it."""

    name: str
    meaning: str
    source: str
    transformers: tuple[int, int] = (5, 23)
    """Version of transformers whose modelling code runs."""
    modelling: str = ""
    """Library with model classes of its own (a row of MODELLING in catalog/families); '' is
    transformers."""
    reentrant_checkpointing: bool = False
    default_optimizer: str = "adamw-fused"
    logits_upcast: bool = True
    """The loss makes an fp32 copy of the logits."""
    logits_shift_copy: bool = False
    """`logits[..., :-1, :].contiguous()` before the loss (transformers before 4.50)."""
    slices_whole: bool = False
    """`:` inside `x[..., :-1, :]` runs as a slice of its own, whose backward writes zeros and a
    copy (torch before ATen/TensorIndexing.h applySlice compared by `<=`; pytorch issue 63921)."""
    logits_upcast_in_model: bool = False
    """The model itself upcasts (`logits = logits.float()` in forward, transformers before 4.46) and
    returns the copy."""
    outputs_to_fp32: bool = False
    """Under autocast the returned 16-bit logits are copied to fp32 after the forward (accelerate,
    and so the Trainer)."""
    output_chunks: int = 0
    """A chunked loss gets the logits as a list of so many chunks (torchtune); 0: head and loss run
    chunk by chunk in one operation."""
    gradients_kept: bool = False
    """zero_grad fills gradients with zeros and keeps them (torch before 2.0)."""
    bucket_bytes: int = 0
    """Buffers in which gradients are gathered before they are reduced, there on one GPU too."""
    softmax_keeps_input: bool = False
    """softmax saves its input beside its output, whose type alone its backward asks for (torch
    before 1.11, derivatives.yaml _softmax)."""
    logits_held: bool = False
    """The caller keeps the returned logits through the backward."""
    cross_entropy: str = "chain"
    """'chain' is log_softmax and nll_loss; 'in place' one kernel each way that writes the gradient
    over the logits (unsloth's)."""
    scan_kernels: bool = False
    """The optional kernels of state-space layers (mamba_ssm, causal_conv1d, fla) are installed."""
    rms_norm: str = "eager"
    """'eager' is the chain of small ops, 'fused' is F.rms_norm, 'in place' unsloth's kernel: its
    gradient overwrites the incoming one and the weight gets none."""
    rotary: str = "eager"
    """'eager' is the chain of small ops, 'in place' unsloth's kernel, which turns queries and keys
    where they lie."""
    fused_gate: bool = False
    """act(gate) * up runs as one operation that keeps its two inputs (Megatron-LM
    core/fusions/fused_bias_swiglu.py)."""
    fused_softmax: bool = False
    """Scale, mask and softmax of scores are one kernel that keeps its result; its backward is in
    place (Megatron-LM core/fusions/fused_softmax.py)."""
    fused_adapters: bool = False
    """Adapters over quantized weights run as one autograd node a projection that keeps x and its
    dropped copy (unsloth's)."""
    quantized_keeps_input: bool = False
    """A 4-bit product keeps its input as an attribute of its autograd node (bitsandbytes up to
    0.43.1): until the graph is dropped."""
    int8_by_columns: bool = False
    """LLM.int8() quantizes x by rows and by columns, which it keeps, and reorders both factors into
    tiles (bitsandbytes before 0.45)."""
    quantizes_by_search: bool = False
    """Loading compares every element with all 16 codes at once (torchao's NF4 in early 2024)."""
    unpacks_by_half: bool = False
    """Weights were quantized from fp16 and unpack to it, then to the compute type: two copies
    (lightning plugins/precision/bitsandbytes.py)."""
    holds_last_step: bool = False
    """The loop's variables keep loss and logits, and by them the graph, until the next step binds
    them anew."""
    half_embeddings: bool = False
    """After k-bit preparation the trainer casts embeddings and head back to the compute type; norms
    stay fp32 (TRL peft_module_casting_to_bf16)."""
    master_weights: bool = False
    """Half-precision parameters are updated through an fp32 copy that stays; states are fp32."""
    main_gradients: bool = False
    """Gradients are added as they are made to fp32 buffers that stay (Megatron's main_grad)."""
    checkpoints_within: bool = False
    """Checkpointing is put around layers that are FSDP units already, and so runs within them
    (torch's apply_activation_checkpointing)."""
    flat_adapters: bool = False
    """Under FSDP1 adapters share their layer's flat parameter, whose gradient is then as large as
    the layer (use_orig_params, no policy for them)."""
    parameter_hooks: bool = False
    """Parameters are fetched, released and reduced in hooks of their modules on one GPU too (ZeRO
    stage 3 without other ranks)."""
    step_gradients_fp32: bool = False
    """The update flattens all gradients and casts them to fp32 first (DeepSpeed stage_1_and_2.py
    step: flatten_dense_tensors_aligned of its single partition)."""


_HF_445 = Stack(
    name="hf-4.45",
    scan_kernels=True,
    meaning="transformers 4.38 to 4.45 with its Trainer",
    source=(
        "transformers 4.45.2 models/llama/modeling_llama.py LlamaForCausalLM.forward, trainer.py;"
        " peft 0.13.2; bitsandbytes 0.43.3"
    ),
    transformers=(4, 45),
    outputs_to_fp32=True,
    reentrant_checkpointing=True,
    default_optimizer="adamw-foreach",
    logits_shift_copy=True,
    slices_whole=True,
    logits_upcast_in_model=True,
    int8_by_columns=True,
)
_HF_448 = Stack(
    name="hf-4.48",
    scan_kernels=True,
    meaning="transformers 4.46 to 4.49 with its Trainer",
    source=(
        "transformers 4.48.1 loss/loss_utils.py ForCausalLMLoss, trainer.py; peft 0.13.2;"
        " bitsandbytes 0.43.3"
    ),
    transformers=(4, 48),
    outputs_to_fp32=True,
    reentrant_checkpointing=True,
    default_optimizer="adamw-foreach",
    logits_shift_copy=True,
    slices_whole=True,
    int8_by_columns=True,
)

STACKS: dict[str, Stack] = {
    row.name: row
    for row in (
        Stack(
            name="hf",
            scan_kernels=True,
            meaning="transformers 5 with its Trainer or TRL",
            source="transformers 5.23",
            outputs_to_fp32=True,
        ),
        Stack(
            name="hf-bare",
            meaning=(
                "a bare loop over transformers 5: torch's AdamW, outputs dropped before the"
                " backward"
            ),
            source="transformers 5.23",
            default_optimizer="adamw-foreach",
        ),
        Stack(
            name="megatron",
            meaning=(
                "mixed precision with fp32 masters and fp32 gradient buffers: 18 bytes a parameter,"
                " 6 + 12/d with --zero 1"
            ),
            source=(
                "Megatron-LM optimizer/optimizer.py Float16OptimizerWithFloat16Params,"
                " distributed/param_and_grad_buffer.py"
            ),
            master_weights=True,
            main_gradients=True,
            rms_norm="fused",
            fused_gate=True,
            fused_softmax=True,
        ),
        Stack(
            name="megatron-deepspeed",
            meaning=(
                "Megatron-LM's layers under DeepSpeed's ZeRO: 16-bit gradients, fp32 masters in"
                " partitions"
            ),
            source=(
                "Megatron-DeepSpeed megatron/training.py setup_model_and_optimizer; DeepSpeed"
                " runtime/zero/stage_1_and_2.py"
            ),
            master_weights=True,
            rms_norm="fused",
            fused_gate=True,
            fused_softmax=True,
        ),
        Stack(
            name="deepspeed",
            meaning="mixed precision with fp32 masters: 2 + 2 + 4 + 8 = 16 bytes a parameter",
            source="DeepSpeed runtime/zero/stage_1_and_2.py (ZeRO, arXiv 1910.02054)",
            master_weights=True,
            step_gradients_fp32=True,
        ),
        Stack(
            name="hf-2022",
            meaning="transformers 4.1x to 4.2x with its Trainer on torch 1.x",
            source=(
                "transformers 4.18 trainer.py, optimization.py AdamW; torch 1.11 optim/optimizer.py"
                " zero_grad"
            ),
            transformers=(4, 18),
            reentrant_checkpointing=True,
            default_optimizer="adamw",
            logits_shift_copy=True,
            slices_whole=True,
            gradients_kept=True,
            softmax_keeps_input=True,
            int8_by_columns=True,
        ),
        _HF_445.replace(
            name="hf-2023",
            meaning="transformers 4.30 to 4.37 with its Trainer",
            source="transformers 4.32 trainer.py; peft 0.5; accelerate 0.21",
            transformers=(4, 32),
            quantized_keeps_input=True,
        ),
        _HF_445.replace(name="hf-2024", meaning="transformers 4.3x to 4.45 with its Trainer"),
        Stack(
            name="hf-loop",
            meaning=(
                "a plain loop over transformers 5 whose variable keeps the outputs: torch's AdamW,"
                " no autocast"
            ),
            source="huggingface/peft method_comparison/MetaMathQA/run.py train",
            default_optimizer="adamw-foreach",
            logits_held=True,
        ),
        Stack(
            name="litgpt",
            meaning="litgpt's fine-tuning scripts of 2023 to 2024",
            source="litgpt 0.4 finetune/lora.py, lora.py, model.py; bitsandbytes 0.42",
            transformers=(0, 0),
            modelling="litgpt",
            flat_adapters=True,
            default_optimizer="adamw-foreach",
            quantized_keeps_input=True,
            unpacks_by_half=True,
            int8_by_columns=True,
            holds_last_step=True,
        ),
        Stack(
            name="torchtune",
            meaning="torchtune's single-device recipes since late 2024",
            source=(
                "torchtune 0.4 recipes/full_finetune_single_device.py, modules/transformer.py,"
                " modules/peft/lora.py"
            ),
            transformers=(0, 0),
            default_optimizer="adamw-fused",
            output_chunks=8,
        ),
        _HF_445,
        _HF_448,
    )
}


def find_stack(name: str) -> Stack:
    """The row of that name; raises InputError with the nearest names."""
    row = STACKS.get(name)
    if row is None:
        raise InputError(
            f"stack {shown(name)} is unknown; use one of"
            f" {', '.join(STACKS)}{suggest(name, list(STACKS))}"
        )
    return row
