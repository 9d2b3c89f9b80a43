"""torchtune's recipe YAML: components named by `_component_`, a pure dtype, its own flags for
activations (torchtune recipes/configs)."""

from __future__ import annotations

import os

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import EXPANDABLE, ForeignJob, dtype_word
from napkinmath.inputs.parallel_options import number_and_type
from napkinmath.inputs.rollouts import give_rolled_length, name_epochs
from napkinmath.inputs.sharding import read_mesh
from napkinmath.inputs.trained_by import give_workload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_MODULES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_OPTIMIZERS = {
    "pagedadamw8bit": "paged-adamw-8bit",
    "adamw8bit": "adamw-8bit",
    "pagedadamw": "paged-adamw",
    "pagedadamw32bit": "paged-adamw",
    "lion": "lion",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adamwfp8": "adamw-8bit",
    "cpuoffloadoptimizer": "adamw-fused",
}
_NO_TRAINING = ("eleuther_eval", "generate", "quantize")
# Keys that its FSDP recipes alone read (recipes/*_distributed.py).
_OF_FSDP = (
    "data_parallel_shard_dim",
    "data_parallel_replicate_dim",
    "tensor_parallel_dim",
    "context_parallel_dim",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "custom_sharded_layers",
)
_KNOBS = (
    "lora_attn_modules",
    "apply_lora_to_mlp",
    "apply_lora_to_output",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "use_dora",
    "quantize_base",
    "_component_",
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a torchtune recipe."""
    model = job.mapping("model")
    builder = str(model.get("_component_", "")).rpartition(".")[2]
    job.give("stack", "torchtune")
    job.give("allocator", EXPANDABLE)  # torchtune/__init__.py
    _read_model(job, model, builder)
    if "max_new_tokens" in job.content and not {"optimizer", "loss"} & {*job.content}:
        raise InputError(
            "a torchtune file of max_new_tokens, without optimizer and loss, trains nothing; give"
            " the file of a recipe that does"
        )
    _read_adapter(job, model, builder)
    job.give("bs", job.take("batch_size"))
    job.give("grad_accum", job.take("gradient_accumulation_steps"))
    _read_length(job)
    clip = job.take("clip_grad_norm")
    job.give("clip", clip is not None)
    _read_optimizer(job)
    loss = str(job.section("loss").take("_component_") or "").lower()
    if "chunked" in loss or "linearcrossentropy" in loss or "lineargrpo" in loss:
        job.give("loss", "chunked")
    _read_recipe(job)
    _read_workload(job, loss)
    _read_mesh(job)
    job.give("precision", dtype_word(job.take("dtype")) or "fp32")
    job.give("checkpointing", "full" if job.switch("enable_activation_checkpointing") else "none")
    if job.switch("enable_activation_offloading"):
        job.give("offload", "activations")
        job.give("offload_style", "torchtune")
    compiled = job.take("compile")
    job.give("compile", values.is_mapping(compiled) or bool(compiled))
    return job.finish()


def _read_recipe(job: ForeignJob) -> None:
    """What the header says to run: `tune run --nproc_per_node 4 full_finetune_distributed`."""
    import re

    found = re.search(r"tune run ((?:--\S+ +\S+ +)*)([a-z][\w/]*)", job.text)
    words, recipe = (found[1], found[2]) if found else ("", os.path.basename(job.path))
    for name in _NO_TRAINING:
        if name in recipe:
            raise InputError(
                f"torchtune's recipe {shown(recipe)} trains nothing; give one that does"
            )
    if "qat" in recipe:
        job.leave_out(
            "quantizer",
            "quantization-aware training keeps fake-quantized copies",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
    carved = bool(job.take("custom_sharded_layers"))
    alone = "grpo" in str(job.content.get("loss")).lower()  # dev/grpo_full_finetune_distributed
    ranks = number_and_type({"gpus": job.given.get("gpus", 1)})[0]  # no recipe replicates alone
    of_fsdp = "distributed" in recipe or any(key in job.content for key in _OF_FSDP)
    if not (alone or of_fsdp or ranks > 1):
        return
    job.give("data_parallel", ["fsdp2"])
    # training/_distributed.py shard_model: layers, what is named, and the rest with the root
    job.give("wrap", "carved" if carved else "layer")
    job.give("sync_each_batch", True)  # recipes/full_finetune_distributed.py: no no_sync
    gpus = re.search(r"-{2}nproc_per_node +(\d+)", words)
    nodes = re.search(r"-{2}nnodes +(\d+)", words)
    if gpus:
        machines = int(nodes[1]) if nodes else 1
        job.give("gpus", int(gpus[1]) * machines)
        job.give("nodes", machines if machines > 1 else None)


def _read_workload(job: ForeignJob, loss: str) -> None:
    teacher = job.section("teacher_model").take("_component_")
    job.take("kd_loss", "quantizer")
    if teacher is not None:
        give_workload(job, "teacher_model", "kd")
        job.give("teacher", str(teacher).rpartition(".")[2].removeprefix("lora_"))
        return
    for word in ("dpo", "simpo", "grpo", "ppo"):
        if f"{word}loss" in loss or f"{word}simple" in loss:
            give_workload(job, "loss", word)
            if "data_parallel" in job.options and job.options.get("method") == "full":
                # its reference is sharded by layers; GRPO's policy stays gathered for generation
                job.give("reference_at", "sharded")
                job.give("sharding", "grad-op" if word == "grpo" else None)
            if word in ("grpo", "ppo"):
                _read_rollouts(job, word)
            return


def _read_rollouts(job: ForeignJob, word: str) -> None:
    """tokenizer.max_seq_len cuts the prompts. GRPO trains on all answers of its prompts at once,
    PPO on what accumulation leaves of ppo_batch_size; both score them with the policy before
    (recipes/dev/grpo_full_finetune_distributed.py, ppo_full_finetune_single_device.py)."""
    prompt = job.options.get("ctx")
    answer = ("max_generated_tokens", job.take("max_generated_tokens"))
    give_rolled_length(job, ("tokenizer.max_seq_len", prompt), answer)
    job.give("old_logprobs", True)
    name_epochs(job, "ppo_epochs", 1)
    rows = values.count(job.options.get("bs", 1), "batch_size")
    job.give("reference", True)
    if word == "grpo":
        each = values.count(job.take("grpo_samples") or 1, "grpo_samples")
        job.give("bs", rows * each)
        return
    whole = values.count(job.take("ppo_batch_size") or rows, "ppo_batch_size")
    steps = values.count(job.options.get("grad_accum", 1), "gradient_accumulation_steps")
    job.give("bs", max(1, whole // steps))


def _read_mesh(job: ForeignJob) -> None:
    read_mesh(
        job,
        {
            "tp": ("tensor_parallel_dim",),
            "cp": ("context_parallel_dim",),
            "replicas": ("data_parallel_replicate_dim",),
            "shards": ("data_parallel_shard_dim",),
        },
    )
    reshards = job.take("fsdp_reshard_after_forward")
    if reshards is not None and "data_parallel" in job.options:
        sizes = isinstance(reshards, int) and not isinstance(reshards, bool) and reshards > 1
        job.give("reshard", True if sizes else reshards)
        if sizes:  # torch distributed/fsdp/_fully_shard fully_shard: over so many ranks again
            job.leave_out(
                "fsdp_reshard_after_forward",
                f"after the forward {reshards} ranks share the weights again; all are priced",
                memory=Difference.MORE,
                time=Difference.LESS,
                option="reshard",
            )
    section = job.section("fsdp")
    if section.take("cpu_offload") or job.switch("fsdp_cpu_offload"):
        job.give("offload", "optimizer,parameters")


def _read_model(job: ForeignJob, model: Mapping[str, object], builder: str) -> None:
    from napkinmath.catalog.models import find_row

    if "embed_dim" in model:
        job.give("config", _explicit_config(model))
        return
    checkpoints = job.mapping("checkpointer").get("checkpoint_dir")
    plain = builder.removeprefix("qlora_").removeprefix("lora_")
    for name in (plain, checkpoints):
        if isinstance(name, str) and find_row(name) is not None:
            job.give("model", name)
            return
    job.refuse("model", f"model {shown(model.get('_component_'))} is not in the catalog")


def _explicit_config(model: Mapping[str, object]) -> dict[str, object]:
    """A builder with its sizes spelled out, as a Llama config."""
    fields = {
        "hidden_size": "embed_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "vocab_size": "vocab_size",
        "intermediate_size": "intermediate_dim",
        "head_dim": "head_dim",
    }
    wide = 4 * int(2 * values.count(model["embed_dim"], "model.embed_dim") / 3)
    return {
        "model_type": "llama",
        "intermediate_size": 256 * -(-wide // 256),  # models/llama2 scale_hidden_dim_for_mlp
        **{ours: model[theirs] for ours, theirs in fields.items() if model.get(theirs) is not None},
    }


def _read_adapter(job: ForeignJob, model: Mapping[str, object], builder: str) -> None:
    extra = [key for key in model if key not in _KNOBS and "embed_dim" not in model]
    if extra:
        job.note(f"ignored: {', '.join('model.' + key for key in extra)}")
    quantized = builder.startswith("qlora_") or bool(model.get("quantize_base"))
    if not quantized and not builder.startswith("lora_"):
        job.give("method", "full")
        return
    job.give("method", "dora" if model.get("use_dora") else "lora")
    if quantized:
        job.give("quant", "nf4")
        job.give("kbit", False)  # torchao's NF4 keeps the rest of the model in the recipe's dtype
    job.give("rank", model.get("lora_rank", 8))
    job.give("alpha", model.get("lora_alpha"))
    job.give("dropout", model.get("lora_dropout"))
    job.give("adapter_dtype", "bf16" if dtype_word(job.take("dtype")) == "bf16" else None)
    attention = model.get("lora_attn_modules") or ()
    if isinstance(attention, str):
        raise InputError(
            f"lora_attn_modules {shown(attention)} is not a list; write e.g. ['q_proj', 'v_proj']"
        )
    targets = [_MODULES.get(str(name), str(name)) for name in values.listed(attention)]
    targets += _MLP if model.get("apply_lora_to_mlp") else ()
    targets += ("lm_head",) if model.get("apply_lora_to_output") else ()
    if not targets:
        raise InputError(
            f"lora_attn_modules {shown(model.get('lora_attn_modules'))} names no module; write e.g."
            " ['q_proj', 'v_proj']"
        )
    job.give("targets", list(dict.fromkeys(targets)))


def _read_length(job: ForeignJob) -> None:
    length = job.section("tokenizer").take("max_seq_len")
    if values.is_mapping(job.content.get("dataset")):
        packed = job.section("dataset").take("packed")
        job.give("packing", True if packed is True else None)
    else:
        job.take("dataset")
    if length is None and "max_generated_tokens" not in job.content:
        job.note(
            "tokenizer.max_seq_len not given, sequence length taken as 2048; give --ctx for another"
        )
    job.give("ctx", length)


def _read_optimizer(job: ForeignJob) -> None:
    optimizer = job.section("optimizer")
    given = optimizer.take("_component_") or "torch.optim.AdamW"
    fused = optimizer.take("fused")
    name = str(given).rpartition(".")[2].lower()
    if name in ("adamw", "adam"):
        job.give("optimizer", "adamw-fused" if fused else "adamw-foreach")
    elif name in _OPTIMIZERS:
        job.give("optimizer", _OPTIMIZERS[name])
    else:
        job.refuse("optimizer", f"optimizer {shown(given)} is not modelled")
    if job.switch("optimizer_in_bwd"):
        job.give("optimizer_in_backward", True)
        job.give("clip", False)  # the recipe has no gradients left to clip
