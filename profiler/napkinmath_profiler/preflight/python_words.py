"""What a flag of the command line is in the Python of whoever asked: a plain loop, Transformers'
Trainer, or Lightning."""

from __future__ import annotations

import re
from enum import Enum


class Caller(Enum):
    """From where the check was called."""

    PYTHON = "python"
    TRAINER = "trainer"
    LIGHTNING = "lightning"


_EVERYWHERE = {
    r"--train-mode": "model.train()",
    r"--attention (?:auto|sdpa)": 'from_pretrained(..., attn_implementation="sdpa")',
    r"--adapter-dtype bf16": "get_peft_model(..., autocast_adapter_dtype=False)",
    r"--double-quant": "BitsAndBytesConfig(bnb_4bit_use_double_quant=True)",
    r"--quantize-experts": "bitsandbytes.nn.parametrize.replace_parameter_4bit(experts, name)",
    r"--qlora": "BitsAndBytesConfig(load_in_4bit=True) and get_peft_model",
    r"--lora": "get_peft_model(model, LoraConfig(...))",
    r"--offload optimizer,parameters": "DeepSpeed's offload_optimizer and offload_param",
    r"--checkpointing full": "model.gradient_checkpointing_enable()",
    r"--loss chunked": "a chunked loss, or Liger's fused one",
    r"--optimizer adamw-fused": "torch.optim.AdamW(..., fused=True)",
    r"--optimizer adamw-8bit": "bitsandbytes.optim.AdamW8bit(...)",
    r"--optimizer-in-backward --no-clip": (
        "a step in Tensor.register_post_accumulate_grad_hook, without clipping"
    ),
    r"--optimizer-in-backward": "a step in Tensor.register_post_accumulate_grad_hook",
    r"--fsdp": "torch.distributed.fsdp.fully_shard(model)",
    r"--data-parallel fsdp1": "torch.distributed.fsdp.FullyShardedDataParallel(model)",
    r"--stack hf-4\.(\d+)": r"transformers 4.\1 (pip install 'transformers==4.\1.*')",
    r"--kernels liger": "liger_kernel.transformers.AutoLigerKernelForCausalLM",
    r"--kernels unsloth": "unsloth.FastLanguageModel.from_pretrained(...)",
    r"--zero 3": "DeepSpeed's stage 3",
    r"--zero 1": "torch.distributed.optim.ZeroRedundancyOptimizer(...), or DeepSpeed's stage 1",
    r"--bs (\d+) --grad-accum (\d+)": r"batch_size=\1 and an optimizer step every \2 batches",
    r"--precision fp16-(?:amp|autocast)": 'torch.autocast("cuda", torch.float16) and torch.amp.GradScaler',
    r"--precision fp16": "model.half()",
    r"--precision bf16-(?:amp|autocast)": 'torch.autocast("cuda", torch.bfloat16)',
}
_OF: dict[Caller, dict[str, str]] = {
    Caller.PYTHON: {},
    Caller.TRAINER: {
        r"--checkpointing full": "gradient_checkpointing=True",
        r"--loss chunked": "use_liger_kernel=True",
        r"--kernels liger": "use_liger_kernel=True",
        r"--optimizer adamw-fused": 'TrainingArguments(optim="adamw_torch_fused")',
        r"--optimizer adamw-8bit": 'TrainingArguments(optim="adamw_bnb_8bit")',
        r"--fsdp": 'TrainingArguments(fsdp="full_shard")',
        r"--data-parallel fsdp1": 'TrainingArguments(fsdp="full_shard")',
        r"--zero 3": "TrainingArguments(deepspeed=...) with stage 3",
        r"--bs (\d+) --grad-accum (\d+)": (
            r"per_device_train_batch_size=\1, gradient_accumulation_steps=\2"
        ),
        r"--precision fp16-(?:amp|autocast)": "TrainingArguments(fp16=True)",
        r"--precision bf16-(?:amp|autocast)": "TrainingArguments(bf16=True)",
    },
    Caller.LIGHTNING: {
        r"--fsdp": 'Trainer(strategy="fsdp")',
        r"--data-parallel fsdp1": 'Trainer(strategy="fsdp")',
        r"--zero 3": 'Trainer(strategy="deepspeed_stage_3")',
        r"--bs (\d+) --grad-accum (\d+)": (
            r"DataLoader(batch_size=\1), Trainer(accumulate_grad_batches=\2)"
        ),
        r"--precision fp16-(?:amp|autocast)": 'Trainer(precision="16-mixed")',
        r"--precision bf16-(?:amp|autocast)": 'Trainer(precision="bf16-mixed")',
    },
}


def in_python(text: str, caller: Caller) -> str:
    """The text with every flag in it said in the caller's Python."""
    words = {**_EVERYWHERE, **_OF[caller]}
    for flag in sorted(words, key=len, reverse=True):
        text = re.sub(rf"{flag}(?![\w-])", words[flag], text)
    return text
