"""prime-rl's TOML: of `sft`, and of `rl`, whose trainer's sections lie under `trainer`.

Keys and defaults: PrimeIntellect-ai/prime-rl packages/prime-rl-configs/src/prime_rl/configs
(trainer.py, sft.py, rl.py) at 559b44772e47; what they do: src/prime_rl/trainer/model.py (FSDP 2
over parameters of optimization_dtype, computed in bf16). The trainer has GPUs of its own: rollouts
and what generates them are elsewhere. Releases of 2025 had other keys and other defaults:
src/prime_rl/trainer/config.py, rl.py and trainer/rl/train.py at the end of that year.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import EXPANDABLE, ForeignJob, attention_word, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rollouts import name_rollouts
from napkinmath.inputs.rows import Row, degree, read_rows, world_size

_OPTIMIZERS: dict[str, object] = {"adamw": "adamw-foreach", "sgd": "momentum", "muon": "muon"}
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Keys that only the releases of 2025 have, under which nothing is recomputed, compiled or moved to
# the host unless the file says so, and the loss holds whole logits.
_OF_2025 = ("inference_gpu_ids", "trainer_gpu_ids", "model.experimental.")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a prime-rl file. Raises InputError for its orchestrator's."""
    if "rollouts_per_example" in job.content and "trainer" not in job.content:
        hosted = isinstance(job.content.get("model"), str)
        whose = "a training that Prime Intellect hosts" if hosted else "prime-rl's orchestrator"
        raise InputError(
            f"{shown(job.path)} is the file of {whose}: it says nothing of the GPUs and types of the"
            " update; give the trainer's file, or the model with flags (`estimate --help`)"
        )
    has_adapter = _has_empty(job, "lora")
    by_rl = "trainer" in job.content or "orchestrator" in job.content
    job.flatten()
    t = "trainer." if by_rl else ""
    m = f"{t}model."
    older = any(key.removeprefix("trainer.").startswith(_OF_2025) for key in job.content)
    rows_of = job.content.get("orchestrator")  # packs the trainer's rows unless that says its own
    packed = values.mapping(rows_of, "orchestrator").get("seq_len") if rows_of else None
    length = f"data.seq_len {m}seq_len seq_len" if older else f"data.seq_len seq_len {m}seq_len"
    job.give("stack", "hf-bare-layers")
    job.give("allocator", EXPANDABLE)  # utils/process.py DEFAULT_TRAINER_ENV_VARS
    rows = (
        Row("model", "model.name trainer.model.name", "Qwen/Qwen3-0.6B"),
        Row("ctx", length, None if packed else 2048 if by_rl else 128),
        Row("bs", "data.micro_batch_size", None if by_rl else 1),
        Row("optimizer", f"{t}optim.type", words=_OPTIMIZERS),
    )
    read_rows(job, rows)
    job.options.setdefault("optimizer", "adamw-foreach")
    if packed is not None:
        job.options.setdefault("ctx", values.count(packed, "orchestrator.seq_len"))
    clip = job.take(f"{t}optim.max_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    earlier = f"{m}experimental.lora"
    place = earlier if any(key.startswith(earlier) for key in job.content) else f"{m}lora"
    _read_adapter(job, place, on=has_adapter)
    _read_checkpointing(job, f"{m}ac", usual=not older)
    gpus = _read_mesh(job, m, offloads_states=not older)
    _read_batch(job, gpus, by_rl=by_rl)
    job.give("attention", attention_word(job.take(f"{m}attn")))
    compiles = any(key.startswith(f"{m}compile.") for key in job.content) or not older
    compiled = job.content.get(f"{m}compile", compiles)
    job.give("compile", True if compiled == {} or not is_off(compiled) else None)
    job.take(f"{m}compile")
    head = job.take(f"{m}fused_lm_head_token_chunk_size")
    job.give("loss", None if older or head == "disabled" else "chunked")
    if older:
        job.note("keys of the releases of 2025: what the file leaves open is as they had it")
    if by_rl:
        job.note("the update of the policy is priced; rollouts run on GPUs of their own")
        name_rollouts(job, "inference", "vLLM")
    return job.finish()


def _has_empty(job: ForeignJob, name: str) -> bool:
    """Whether a section of the model's is written and empty, which turns it on."""
    for place in (job.content, job.content.get("trainer")):
        model = values.mapping(place, "trainer").get("model") if values.is_mapping(place) else None
        if values.is_mapping(model) and values.mapping(model, "model").get(name) == {}:
            return True
    return False


def _is_none(value: object) -> bool:
    """TOML has no null: the tool takes the word for it."""
    return is_off(value) or value == {}


def _read_adapter(job: ForeignJob, at: str, *, on: bool) -> None:
    on = on or any(key.startswith(f"{at}.") for key in job.content)
    job.take(at)
    job.give("method", "lora" if on else "full")
    rows = (
        Row("rank", f"{at}.rank", 16),
        Row("alpha", f"{at}.alpha", 32),
        Row("dropout", f"{at}.dropout"),
        Row("train_modules", f"{at}.modules_to_save"),
    )
    if not on:
        return
    read_rows(job, rows)
    named = values.listed(job.take(f"{at}.target_modules") or [*_TARGETS])
    job.give("targets", [name for name in named if name != "experts"])
    if "experts" in named:
        job.leave_out(
            f"{at}.target_modules",
            "adapters on experts are not priced",
            memory=Difference.MORE,
            time=Difference.MORE,
        )


def _read_checkpointing(job: ForeignJob, at: str, *, usual: bool) -> None:
    """By default (`usual`) every layer is checkpointed, and its checkpoint lies in host memory."""
    unsaid = not any(key == at or key.startswith(f"{at}.") for key in job.content)
    off = at in job.content and job.content[at] != {} and _is_none(job.take(at))
    off = off or (unsaid and not usual)
    job.take(at)
    mode = str(job.take(f"{at}.mode") or "full")
    every = values.count(job.take(f"{at}.freq") or 1, f"{at}.freq")
    targets = job.take(f"{at}.targets")
    host = f"{at}_offloading"
    said = host in job.content or any(key.startswith(f"{host}.") for key in job.content)
    offloads = said or usual
    if host in job.content and job.content[host] != {}:
        offloads = not _is_none(job.content[host])
    job.take(host)
    if off:
        job.give("checkpointing", "none")
    elif mode == "selective":
        job.give("checkpointing", "none")
        job.leave_out(
            f"{at}.mode",
            f"what is recomputed of {shown(targets or ['norm'])} is not priced; give"
            " --checkpointing",
            memory=Difference.LESS,
            time=Difference.MORE,
            option="checkpointing",
        )
    elif every > 1:
        job.give("checkpointing", f"interleaved:{every}")
    else:
        job.give("checkpointing", "offload" if offloads else "full")


def _read_mesh(job: ForeignJob, m: str, *, offloads_states: bool) -> int:
    """GPUs of the trainer: those given, or of the deployment; one unless said."""
    cp, copies = (degree(job, f"{m}{name}") for name in ("cp", "dp_replicate"))
    experts, style = job.take(f"{m}ep"), job.take(f"{m}cp_style")
    ep = 1 if experts in (None, "auto") else degree(job, f"{m}ep")
    each, nodes = job.take("deployment.gpus_per_node"), job.take("deployment.num_train_nodes")
    gpus = world_size(job, per_node="deployment.num_train_gpus")
    named = job.take("trainer_gpu_ids")
    if isinstance(named, str):
        raise InputError(f"trainer_gpu_ids {shown(named)} is no list; write e.g. [0, 1]")
    own = values.listed(named or [])
    if own and "gpus" not in job.given:
        gpus = len(own)
    if nodes is not None and "gpus" not in job.given:
        gpus = values.count(each or 8, "gpus_per_node") * values.count(nodes, "num_train_nodes")
    gpus = gpus or 1
    job.give("gpus", gpus)
    job.give("cp", cp if cp > 1 else None)
    job.give("cp_kind", style if cp > 1 else None)
    job.give("ep", ep if ep > 1 else None)
    held = dtype_word(job.take(f"{m}optimization_dtype")) or "fp32"
    reduced = dtype_word(job.take(f"{m}reduce_dtype")) or "fp32"
    reshards = job.switch(f"{m}reshard_after_forward", default=True)
    offloads = job.switch(f"{m}fsdp_cpu_offload")
    job.give("precision", "bf16")
    # trainer/model.py setup_fsdp: fully_shard on one GPU too, and it reduces in each backward
    job.give("data_parallel", ["fsdp2"])
    job.give("sync_each_batch", True)
    job.give("sharded_dtype", held)
    job.give("reduce_dtype", reduced)
    job.give("reshard", None if reshards else False)
    job.give("offload", "optimizer,parameters" if offloads else None)
    if copies > 1:
        job.give("sharding", "hybrid")
        job.give("shard_size", max(1, gpus // copies))
    if job.switch(f"{m}optim_cpu_offload", default=offloads_states) and not offloads:
        job.leave_out(
            f"{m}optim_cpu_offload",
            "states lie in host memory between updates and are priced on the GPU; give --offload",
            memory=Difference.LESS,
            time=Difference.MORE,
            option="offload",
        )
    return max(1, gpus // cp)


def _read_batch(job: ForeignJob, data: int, *, by_rl: bool) -> None:
    """Rows of packed samples; the reinforcement's micro-batch is one row of seq_len tokens."""
    job.give("packing", True)
    whole = job.take("data.batch_size")
    if by_rl or whole is None:
        job.options.setdefault("bs", 1)
        return
    rows = values.count(job.options["bs"], "data.micro_batch_size")
    job.give("grad_accum", max(1, values.count(whole, "data.batch_size") // (rows * data)))
