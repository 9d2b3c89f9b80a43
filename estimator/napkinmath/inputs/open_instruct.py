"""open-instruct's YAML and command lines: finetune.py, dpo_tune_cache.py, dpo.py, grpo_fast.py and
reward_modeling.py.

Keys and defaults: allenai/open-instruct open_instruct/finetune.py FlatArguments, dpo_utils.py,
grpo_utils.py, data_loader.py, reward_modeling.py at e6c3044aa620. Weights are loaded in bf16 and
computed in it; the reference of a preference is run once before the training and kept as numbers
(dpo_utils.py build_reference_logprobs_cache).
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, attention_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.olmo_core import give_engine, name_gathered
from napkinmath.inputs.rollouts import name_rollouts, policy_alone
from napkinmath.inputs.rows import Row, degree, read_rows, world_size

_TARGETS = ("q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj")
_LENGTHS = "max_seq_length max_token_length"
_OF_REINFORCEMENT = (
    *("beta", "gamma_beta_ratio", "load_ref_policy", "num_learners_per_node", "single_gpu_mode"),
    *("deepspeed_offload_optimizer", "deepspeed_offload_param", "num_mini_batches"),
    *("num_unique_prompts_rollout", "max_prompt_token_length", "response_length", "pack_length"),
    *("vllm_num_engines", "vllm_tensor_parallel_size"),
)
# OLMo-core's names of sizes (olmo_core_utils.py OLMO_MODEL_CONFIG_MAP), which win over a checkpoint's
# path.
_CONFIGS = {
    "olmo2_1B_v2": "olmo-2-1b",
    "olmo2_7B": "olmo-2-7b",
    "olmo2_13B": "olmo-2-13b",
    "olmo2_32B": "olmo-2-32b",
    "olmo3_7B": "olmo-3-7b",
    "olmo3_32B": "olmo-3-32b",
    "olmo3_hybrid_7B": "olmo-hybrid-7b",
    "olmoe_1B_7B": "olmoe-1b-7b",
    "qwen3_0_6B": "qwen3-0.6b",
    "qwen3_1_7B": "qwen3-1.7b",
    "qwen3_4B": "qwen3-4b",
    "qwen3_8B": "qwen3-8b",
    "qwen3_14B": "qwen3-14b",
    "qwen3_32B": "qwen3-32b",
}
_ROWS = (
    Row("packing", "packing"),
    Row("compile", "compile_model"),
)
# Scripts that OLMo-core's trainer runs -> whether it packs by itself (olmo_core_finetune.py, dpo.py).
_OF_CORE = {"olmo_core_finetune.py": True, "dpo.py": False}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an open-instruct run."""
    workload, core = _workload(job), job.program in _OF_CORE
    named, config = job.take("model_name_or_path"), job.take("config_name")
    job.give("model", named if config is None else _CONFIGS.get(str(config), config))
    read_rows(job, _ROWS)
    if workload != "sft":
        job.give("workload", workload)
    if workload == "grpo":
        _read_reinforcement(job)
    else:
        _read_batch(job, reward=workload == "reward")
        job.give("reference", False if workload == "dpo" else None)
        _read_core(job) if core else _read_sharding(job)
        for key in _OF_REINFORCEMENT:
            job.dismiss(key, "only grpo_fast.py reads it", whole=True)
    quantized = _read_adapter(job)
    job.give("checkpointing", "full" if job.switch("gradient_checkpointing") else "none")
    if not core:
        job.give("precision", "bf16-autocast" if workload != "grpo" else "bf16")
    _read_optimizer(job, quantized=quantized)
    clip = job.take("clip_grad_norm", "max_grad_norm")
    job.give("clip", workload == "grpo" or (not is_off(clip) and str(clip) not in ("-1", "-1.0")))
    job.give("attention", attention_word(job.take("attn_implementation")))
    if job.switch("use_liger_kernel"):
        job.give("kernels", "liger")
    job.give("sync_each_batch", True if job.switch("sync_each_batch") else None)
    return job.finish()


def _workload(job: ForeignJob) -> str:
    """What its script is called, or what only one script has among its keys."""
    content = job.content
    loss = str(job.take("loss_type") or "")
    if job.trained_by in ("dpo", "grpo", "reward"):
        found = job.trained_by
    elif "num_samples_per_prompt_rollout" in content or "deepspeed_stage" in content:
        found = "grpo"
    elif loss or any(key in content for key in ("beta", "gamma_beta_ratio")):
        found = "dpo"
    else:
        in_path = "dpo" in job.path.lower().replace("\\", "/").split("/")
        found = "dpo" if in_path else "sft"
    return "simpo" if found == "dpo" and loss == "simpo" else found


def _read_batch(job: ForeignJob, *, reward: bool) -> None:
    length = job.take(*_LENGTHS.split())
    if length is None:
        usual = 512 if reward else 2048
        job.assume("ctx", usual, "the file gives no max_seq_length: the longest sample decides")
    else:
        job.give("ctx", length)
    rows = (
        Row("bs", "per_device_train_batch_size", 1 if reward else 8),
        Row("grad_accum", "gradient_accumulation_steps", 8 if reward else None),
    )
    read_rows(job, rows)


def _read_sharding(job: ForeignJob) -> None:
    """ZeRO by the file, or the mesh of OLMo-core's trainer; accelerate's file says it elsewhere."""
    stage, sequence = job.take("zero_stage"), job.take("sequence_parallel_size", "cp_degree")
    places = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
    offloaded = [part for part, key in places.items() if job.switch(key)]
    if stage is not None:
        number = values.count(stage, "zero_stage", low=0, high=3)
        job.give("data_parallel", [f"zero{number}" if number else "ddp"])
        job.give("offload", ",".join(offloaded) or None)
    if sequence is not None and values.count(sequence, "sequence_parallel_size") > 1:
        job.give("cp", sequence)
        job.give("cp_kind", "ulysses")
    shards = job.take("fsdp_shard_degree", "fsdp_num_replicas")
    tensor = job.take("tensor_parallel_degree")
    if tensor is not None and values.count(tensor, "tensor_parallel_degree") > 1:
        job.give("tp", tensor)
    if shards is not None:
        job.give("data_parallel", ["fsdp2"])


def _read_core(job: ForeignJob) -> None:
    """The mesh of a script that OLMo-core's trainer runs, one node a copy where SFT says nothing,
    all ranks where a preference does not."""
    gpus = world_size(job) or 1
    own = gpus // values.count(job.given.get("nodes", 1), "nodes")
    context = degree(job, "cp_degree", "context_parallel_degree")
    job.give("tp", tensor if (tensor := degree(job, "tensor_parallel_degree")) > 1 else None)
    copies, shards = degree(job, "fsdp_num_replicas"), job.take("fsdp_shard_degree")
    packs = _OF_CORE[job.program]
    usual = own // context if packs else max(1, gpus // (copies * context * tensor))
    shared = usual if shards is None else values.count(shards, "fsdp_shard_degree")
    give_engine(job, gpus, shards=shared, context=context)
    if context > 1 and str(job.take("cp_strategy") or "llama3") == "ulysses":
        job.give("cp_kind", "ulysses")
    elif context > 1:
        name_gathered(job, "cp_degree", context)
    job.give("stack", "hf-bare")
    job.give("packing", True if packs else None)
    job.give("compile", job.options.get("compile", True))


def _read_adapter(job: ForeignJob) -> bool:
    """Whether the base is quantized."""
    adapts, quantizes = job.switch("use_lora"), job.switch("use_qlora")
    rows = (
        Row("rank", "lora_rank lora_r", 64),
        Row("alpha", "lora_alpha", 16),
        Row("dropout", "lora_dropout", 0.1),
    )
    if not adapts:
        if quantizes:
            raise InputError("use_qlora without use_lora; set use_lora: true")
        for row in rows:
            job.take(*row.keys.split())
        job.give("method", "full")
        return False
    read_rows(job, rows)
    job.give("method", "lora")
    job.give("targets", list(_TARGETS))
    if quantizes:
        job.give("quant", "nf4")
        job.give("double_quant", True)
    return quantizes


def _read_optimizer(job: ForeignJob, *, quantized: bool) -> None:
    """bitsandbytes' in paged memory under QLoRA or where asked for; else torch's, fused unless
    said."""
    eight, fused = job.switch("use_8bit_optimizer"), job.switch("fused_optimizer", default=True)
    paged = job.switch("dpo_use_paged_optimizer")
    named = str(job.take("optimizer_type") or "adamw").lower()
    if named not in ("adamw", "muon"):
        job.refuse("optimizer", f"optimizer_type {shown(named)} of open-instruct is not modelled")
    if quantized or paged:
        job.give("optimizer", "paged-adamw-8bit" if eight else "paged-adamw")
    elif named == "muon":
        job.give("optimizer", "muon")
    elif _OF_CORE.get(job.program):  # its own Adam, foreach
        job.give("optimizer", "adamw-foreach")
    else:
        job.give("optimizer", "adamw-fused" if fused else "adamw-foreach")


def _read_reinforcement(job: ForeignJob) -> None:
    """The learners' update: packs of tokens under DeepSpeed, without the engines beside them."""
    learners = job.take("num_learners_per_node", "actor_num_gpus_per_node")
    several = values.listed(learners) if learners is not None else [1]
    gpus = world_size(job) or sum(values.count(n, "num_learners_per_node") for n in several)
    alone = job.switch("single_gpu_mode")
    gpus = 1 if alone else gpus
    job.give("gpus", gpus)
    number = values.count(job.take("deepspeed_stage") or 0, "deepspeed_stage", low=0, high=3)
    places = {"optimizer": "deepspeed_offload_optimizer", "parameters": "deepspeed_offload_param"}
    offloaded = [part for part, key in places.items() if job.switch(key)]
    if gpus > 1:
        job.give("data_parallel", [f"zero{number}" if number else "ddp"])
        job.give("offload", ",".join(offloaded) or None)
    sequence = degree(job, "sequence_parallel_size")
    if sequence > 1 and gpus % sequence == 0:
        job.give("cp", sequence)
        job.give("cp_kind", "ulysses")
    _read_sequences(job, max(1, gpus // sequence))
    factor, kept = job.take("beta"), job.switch("load_ref_policy", default=True)
    refers = kept and not is_off(0.05 if factor is None else factor)
    policy_alone(job, "load_ref_policy" if refers else "num_samples_per_prompt_rollout")
    said = [key for key in ("vllm_num_engines", "vllm_tensor_parallel_size") if key in job.content]
    for key in said:
        name_rollouts(job, key, "vLLM")
    if said:
        return
    job.leave_out(
        "vllm_num_engines",
        "rollouts run on vLLM, which holds memory and takes time of its own",
        memory=Difference.EITHER,
        time=Difference.EITHER,
    )


def _read_sequences(job: ForeignJob, gpus: int) -> None:
    """Packs of a mini-batch, with every answer as long as it may be."""
    sizes = {
        name: values.count(job.take(name) or usual, name)
        for name, usual in (
            *(("max_prompt_token_length", 256), ("response_length", 256), ("pack_length", 512)),
            *(("num_samples_per_prompt_rollout", 4), ("num_unique_prompts_rollout", 16)),
            *(("num_mini_batches", 1), ("per_device_train_batch_size", 1)),
        )
    }
    pack, rows = sizes["pack_length"], sizes["per_device_train_batch_size"]
    prompts, answers = (
        sizes[f"num_{name}_rollout"] for name in ("unique_prompts", "samples_per_prompt")
    )
    tokens = prompts * answers * (sizes["max_prompt_token_length"] + sizes["response_length"])
    job.give("bs", rows)
    job.give("ctx", pack)
    job.give("completion", min(pack - 1, sizes["response_length"]))
    job.give("packing", True)
    job.give("grad_accum", max(1, tokens // (pack * rows * gpus * sizes["num_mini_batches"])))
    job.note("prompts and answers taken as long as they may be")
