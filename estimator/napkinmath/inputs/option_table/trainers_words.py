"""Flags and keywords as trainers write them, in our words: `--per_device_train_batch_size 2` is
`--bs 2`.

What means the same, value for value, is read; what may mean two things here gets a line that says
which. Sources: transformers TrainingArguments, peft LoraConfig, trl, axolotl, LLaMA-Factory, unsloth,
torchtune, accelerate and DeepSpeed launchers, Megatron-LM arguments.py.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.option_table import SHORTHANDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Sequence

SAME = {
    "--rank": "lora-r lora-rank r lora-dim",
    "--alpha": "lora-alpha",
    "--dropout": "lora-dropout",
    "--targets": "target-modules lora-target-modules lora-target lora-modules",
    "--train-modules": "modules-to-save lora-modules-to-save additional-target",
    "--method": "peft peft-type peft-method finetuning-type train-type tuner-type",
    "--bs": (
        "per-device-train-batch-size per-device-batch-size"
        " train-micro-batch-size-per-gpu device-train-microbatch-size microbatch-size mbs bsz batch"
    ),
    "--global-batch": "gbs global-train-batch-size",
    "--grad-accum": "gas ga grad-acc grad-acc-steps gradient-accumulation accumulate-grad-batches",
    "--ctx": (
        "max-seq-length max-seq-len max-length max-len cutoff-len sequence-len seqlen seq"
        " seq-length context-length ctx-len model-max-length block-size"
    ),
    "--optimizer": "optim optimizer-type",
    "--attention": "attn-implementation attn-impl attn",
    "--precision": "dtype torch-dtype",
    "--checkpointing": "activation-checkpointing grad-checkpointing ac gc",
    "--compile": "torch-compile",
    "--packing": "sample-packing packed",
    "--gpus": "num-gpus n-gpus ngpus num-processes world-size",
    "--nodes": "nnodes num-nodes num-machines",
    "--zero": "zero-stage deepspeed-stage ds-stage",
    "--tp": "tensor-parallel tensor-parallel-size tensor-model-parallel-size tp-size",
    "--pp": "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pp-size",
    "--cp": "context-parallel context-parallel-size cp-size",
    "--ep": "expert-parallel expert-parallel-size expert-model-parallel-size ep-size",
    "--vram": "vram-gb gpu-memory gpu-mem gpu-ram memory-per-gpu",
    "--freeze": "freeze-modules frozen",
    "--samples": "num-samples max-samples",
    "--mlp-tiles": "tiled-mlp",
}
ALONE = {
    "bf16": "--precision bf16-autocast",
    "fp16": "--precision fp16-autocast",
    "fp32": "--precision fp32",
    "fp8": "--precision fp8",
    "load-in-4bit": "--quant nf4",
    "load-in-8bit": "--quant int8",
    "4bit": "--quant nf4",
    "8bit": "--quant int8",
    "flash-attn": "--attention flash",
    "flash-attention": "--attention flash",
    "use-flash-attn": "--attention flash",
    "liger": "--kernels liger",
    "use-liger": "--kernels liger",
    "use-liger-kernel": "--kernels liger",
    "enable-liger-kernel": "--kernels liger",
    "unsloth": "--kernels unsloth",
    "use-lora": "--lora",
    "use-peft": "--lora",
    "use-qlora": "--qlora",
    "zero1": "--zero 1",
    "zero2": "--zero 2",
    "zero3": "--zero 3",
    "no-checkpointing": "--checkpointing none",
    "no-gradient-checkpointing": "--checkpointing none",
    "offload-optimizer": "--offload optimizer",
    "cpu-offload-optimizer": "--offload optimizer",
}
# What a flag of a value means without one.
ALONE_MEANS = {"--checkpointing": "full", "--attention": "flash"}
UNSURE = {
    "mixed-precision": (
        "write --precision bf16-autocast over 16-bit weights, or bf16-amp over fp32 ones"
    ),
    "sp": "--sequence-parallel splits norms over tensor ranks, --cp N --cp-kind ulysses attention",
    "train-batch-size": "write --bs for a GPU's micro-batch, --global-batch for a step on all of them",
    "ulysses": "write --cp N --cp-kind ulysses",
    "ulysses-size": "write --cp N --cp-kind ulysses",
    "cpu-offload": "write --offload optimizer, parameters or activations, or several of them",
    "offload-param": "write --offload parameters, with optimizer under DeepSpeed",
    "int8": "write --quant int8 for a base of 8 bits",
    "int4": "write --quant nf4 for a base of 4 bits",
    "nproc-per-node": "write --gpus with the GPUs of all machines",
    "max-grad-norm": "gradients are clipped unless --no-clip is said, to whatever norm",
    "learning-rate": "a rate changes neither memory nor time; leave it out",
    "lr": "a rate changes neither memory nor time; leave it out",
    "vocab-size": "a vocabulary is part of --arch, or of the model's config.json",
    "config": "write the file alone, `estimate FILE`: a config.json, a trainer's file or a script",
    "params": "write --model NAME, or a shape with --arch: a count alone is no model",
    "model-size": "write --model NAME, or a shape with --arch: a count alone is no model",
    "training": "an estimate is of a training step; leave it out",
    "inference": "write `estimate generate`, which prices prompts and answers",
    "steps": "write --max-steps for the steps of a run",
    "tokens": "write --samples, or --max-steps, for the length of a run, or ask `estimate plan --tokens N`",
    "epoch": "write --epochs N and --samples N",
}
_OURS = {name: flag for flag, names in SAME.items() for name in names.split()}
_ON, _OFF = ("true", "1", "yes"), ("false", "0", "no")


def in_our_words(
    name: str, following: Sequence[str], known: Container[str]
) -> tuple[list[str], int] | None:
    """(what the flag `name` is called here, how many of the following words said whether it is on).

    None where it is nobody's. `known` are the command's own flags. Raises InputError for a flag that
    could mean two things.
    """
    plain = name.lower().replace("_", "-")
    if plain != name and plain in known:
        return [plain], 0
    word = plain.removeprefix("--")
    flag = _OURS.get(word, "")
    if flag in known:
        return [flag], 0
    written = ALONE.get(word, "").split()
    if written and written[0] in known:
        value = following[0].lower() if following else ""
        return ([], 1) if value in _OFF else (written, int(value in _ON))
    if word in UNSURE:
        raise InputError(f"flag {shown(name)} is not one of this program's: {UNSURE[word]}")
    return None


def as_option(name: str, value: object) -> tuple[str, object]:
    """The option, and its value, that a keyword or a key of trainers is here; the same where it is
    nobody's, or could mean two things. A switch that is off is no option: the value is None."""
    word = name.strip().lower().replace("_", "-")
    if flag := _OURS.get(word):
        return _key(flag), value
    written = ALONE.get(word, "").split()
    if not written or not isinstance(value, bool):
        return name, value
    key, said = SHORTHANDS.get(_key(written[0]), (_key(written[0]), written[-1]))
    return key, said if value else None


def doubt(name: str) -> str:
    """Which of our words to write for one of trainers' that could mean two things, or ''."""
    said = UNSURE.get(name.strip().lower().replace("_", "-"))
    return f": {said}" if said else ""


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
