"""Job files of the HF Trainer and TRL: TrainingArguments or SFTConfig, with TRL's ModelConfig keys
in the same file.

Defaults as in transformers 5.23 training_args.py and TRL 1.x sft_config.py, model_config.py.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.model_names import without_adapter
from napkinmath.catalog.models import find_row
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, attention_word
from napkinmath.inputs.image_keys import name_images
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.own_words import take_own_words
from napkinmath.inputs.retrieval import retrieval_of
from napkinmath.inputs.rollouts import (
    give_old_logprobs,
    give_rolled_length,
    give_vllm,
    leave_vllm_out,
    name_epochs,
    shares_gpus,
)
from napkinmath.inputs.rows import give_liger
from napkinmath.inputs.sharding import read_sharding
from napkinmath.inputs.trained_by import EMBEDS, PLAIN_TRAINER, give_workload, told_by_keys
from napkinmath.inputs.trainer_adapters import (
    mode_of,
    read_bitsandbytes,
    read_lora,
    trains_adapter,
)
from napkinmath.inputs.trainer_precision import read_loader, read_precision
from napkinmath.inputs.trl_release import read_packing, release_of
from napkinmath.inputs.vocabulary import read_vocabulary

_TRL_KEYS = (
    *("max_length", "max_seq_length", "packing", "dataset_text_field", "use_peft", "lora_r"),
    *("dataset_name", "completion_only_loss", "assistant_only_loss", "activation_offloading"),
    "loss_type",
)
_OWN_HEAD = ("sft", "dpo", "kto", "grpo", "rloo")
_ROLLS_OUT = ("grpo", "rloo")
_BATCHES = ("per_device_train_batch_size", "per_gpu_train_batch_size")
_STEPS = "gradient_accumulation_steps"
# trl 1.10 experimental/ppo/ppo_config.py response_length, num_ppo_epochs.
_ANSWER, _EPOCHS = 53, 4


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a Trainer's or TRL's arguments."""
    trl = any(key in job.content for key in _TRL_KEYS)
    by_name = read_loader(job)
    job.give("model", job.take("model_name_or_path", "model", "config_name"))
    _read_base(job)
    read_vocabulary(job)
    trained_by = retrieval_of(job) or told_by_keys(job)
    own, task = job.take("own_trainer"), job.take("model_task")
    if own is not None:
        trained_by = str(own)
        job.note(f"a trainer of the script's own, by its name taken as {own}")
    give_workload(job, "the trainer", trained_by)
    if job.options.get("workload") is None:  # a workload's head is its own
        job.give("task", task)
    _read_own_loss(job)
    plain = (PLAIN_TRAINER, *EMBEDS)
    trl = (trl or trained_by != "sft") if not job.trained_by else job.trained_by not in plain
    # max_seq_length became max_length in TRL 0.16, before checkpointing and bf16 were its defaults
    # (huggingface/trl#2895, #3510, #3515); in Python it may be that of unsloth's model
    old = "max_seq_length" in job.content and "max_length" not in job.content
    old = old and not job.path.endswith((".py", ".ipynb"))
    today = trl and not old
    teacher = job.take("teacher_model_name_or_path")
    job.give("teacher", teacher)
    if job.switch("precompute_ref_log_probs", "reference_free"):
        job.give("reference", False)
    name_images(job, "images_in_code")
    read_batch(job)
    _read_length(job, trained_by, trl=trl)
    read_packing(job, old=old)
    mode = mode_of(job)
    by_trl = trl and by_name and not old and not job.content.get("use_unsloth")
    quantized = read_bitsandbytes(job, default=mode == "qlora", as_loaded=by_trl)
    adapter = trains_adapter(job, mode) or (quantized and trl)
    read_lora(job, adapter=adapter, quantized=quantized)
    if quantized and job.content.get("use_unsloth"):
        # its own copy of a checkpoint whose experts are stored in 4 bits has each as a 4-bit linear
        row = find_row(str(job.options.get("model") or ""))
        job.give("quantize_experts", True if row and row.get("stored") == "mxfp4" else None)
    checkpoints = today and release_of(job).trainer.checkpoints
    read_checkpointing(job, default=checkpoints, quantized=quantized)
    if job.switch("activation_offloading"):
        job.give("offload", "activations")
    read_step(job)
    _read_loss(job, trained_by, trl=today)
    loading, given = job.section("model_init_kwargs"), job.take("dtype", "torch_dtype")
    if not {"model_name_or_path", "model"} & {*job.content} and "config_name" in job.content:
        given = "float32"  # made from its config, whose weights have torch's default type
    attention = job.take("attn_implementation") or loading.take("attn_implementation")
    read_sharding(job, newest=release_of(job) is find_stack("hf"))
    job.give(
        "attention",
        (
            "flash2"
            if job.switch("use_flash_attention_2", "use_flash_attn")
            else attention_word(attention)
        ),
    )
    _read_group(job)
    _read_divergence(job)
    if shares_gpus(job, default="colocate"):
        sleeps = job.switch("vllm_enable_sleep_mode")  # generation/vllm_generation.py: level 2
        give_vllm(job, "trl", {"rollout_sleep": 2 if sleeps else None})
    leave_vllm_out(job)
    read_precision(
        job,
        given,
        loading,
        default=today and release_of(job).trainer.mixed,
        by_trl=trl and by_name,
        quantized=quantized,
        adapter=adapter,
    )
    if job.trained_by == PLAIN_TRAINER:
        take_own_words(job)
    return job.finish()


def _read_own_loss(job: ForeignJob) -> None:
    loop, name = job.take("own_loop"), job.take("compute_loss")
    if loop is not None:
        job.leave_out(
            "own_loop",
            f"{loop} trains in a loop of its own, whose types are not read; give --precision",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option="precision",
        )
    if name is not None:
        job.leave_out(
            "compute_loss",
            f"{name} has a loss of its own; the model's is priced: add --workload sft if that is"
            " the same",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option="workload",
        )


def _read_divergence(job: ForeignJob) -> None:
    """Without a factor there is no reference (trl 1.16 grpo_config.py, rloo_config.py beta); what
    unsloth takes by itself is not known."""
    default = {"grpo": release_of(job).trainer.divergence, "rloo": 0.05}.get(
        str(job.options.get("workload"))
    )
    factor = job.take("beta")
    if default is None or (factor is None and job.options.get("kernels") == "unsloth"):
        return
    job.give("reference", not is_off(default if factor is None else factor))


def _read_group(job: ForeignJob) -> None:
    """Completions of one prompt, which the batch counts one by one. unsloth makes the batch as
    large as that, where a step holds no whole number of groups (its models/rl.py)."""
    if job.options.get("workload") not in ("grpo", "rloo"):
        return
    group = values.count(job.take("num_generations") or 8, "num_generations")
    rows, steps = (values.count(job.options.get(key, 1), key) for key in ("bs", "grad_accum"))
    if job.options.get("kernels") == "unsloth" and rows * steps % group:
        job.give("bs", group)
        job.note(f"unsloth takes batches of {group}, the completions of one prompt")


_LENGTHS = ("max_length", "max_seq_length", "model_max_length", "block_size")


def _read_length(job: ForeignJob, trained_by: str, *, trl: bool) -> None:
    """Tokens of a sequence, or of a prompt and its completion."""
    length = job.take(*_LENGTHS)
    if "ctx" in job.options:
        return
    if trl and trained_by in (*_ROLLS_OUT, "ppo"):
        _read_rolled(job, trained_by, length)
    elif length is not None:
        job.give("ctx", length)
        if trained_by in EMBEDS:
            key = next(name for name in _LENGTHS if job.content.get(name))
            job.leave_out(
                key,
                f"texts of {length} tokens, the most they may have, are priced; a batch is padded to"
                " its longest text: give --ctx",
                memory=Difference.LESS,
                time=Difference.LESS,
                option="ctx",
            )
    elif trl:
        job.assume("ctx", 1024, "SFTConfig's max_length")
    elif "ctx" not in job.given:
        job.note("no length of the sequences is given; give --ctx")


def read_batch(job: ForeignJob) -> None:
    """Batch and accumulation with the Trainer's defaults."""
    leave_auto_open(job, _BATCHES, "bs", "--bs B")
    leave_auto_open(job, (_STEPS,), "grad_accum", "--grad-accum N")
    batch = job.take(*_BATCHES)
    if batch is None:
        job.assume("bs", 8, "the Trainer's per_device_train_batch_size")
    else:
        job.give("bs", batch)
    job.give("grad_accum", job.take(_STEPS))
    evaluates = ("eval_strategy", "evaluation_strategy", "do_eval", "val_size", "eval_on_start")
    if any(not is_off(job.content.get(key)) for key in evaluates):
        key, size = "per_device_eval_batch_size", job.content.get("per_device_eval_batch_size")
        read_evaluation(job, key, 8 if size is None else size)


def leave_auto_open(job: ForeignJob, keys: tuple[str, ...], option: str, way: str) -> None:
    """A size that the file leaves to the run, which its default stands for until a flag says it."""
    key = next((key for key in keys if str(job.content.get(key)).lower() == "auto"), "")
    if not key:
        return
    job.content = {name: value for name, value in job.content.items() if name != key}
    if option not in job.given:
        job.leave_out(
            key,
            f"'auto' is known only when it runs, and its default is priced; give {way}",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option=option,
        )


def read_evaluation(job: ForeignJob, key: str, size: object) -> None:
    """An evaluation in the middle of training: its forward needs less than a step of as many
    sequences, so only a larger batch can raise the peak."""
    if values.count(size, key) > values.count(job.options["bs"], "batch size"):
        job.leave_out(
            key,
            f"an evaluation runs {shown(size)} sequences at once; add --eval-bs {shown(size)}",
            memory=Difference.MORE,
            option="eval_bs",
        )


def give_layerwise(job: ForeignJob) -> None:
    """Hooks update each parameter as its gradient is made and drop it (GaLore's and APOLLO's
    layerwise forms), so nothing is left to clip."""
    job.give("optimizer_in_backward", True)
    job.give("clip", False)


def read_step(job: ForeignJob) -> None:
    """Optimizer, clipping, compilation, Liger: what all users of TrainingArguments share."""
    optim, clip = job.take("optim"), job.take("max_grad_norm")
    if clip is not None:
        job.give("clip", clip != 0)
    if isinstance(optim, str) and optim.endswith("_layerwise"):
        optim = optim.removesuffix("_layerwise")
        give_layerwise(job)
    job.give("optimizer", optim)
    if job.take("torch_compile") is not None:
        job.give("compile", job.switch("torch_compile"))
    if job.switch("use_unsloth"):
        job.give("kernels", "unsloth")
    if job.switch("use_liger_kernel", "use_liger", "enable_liger_kernel"):
        parts = job.take("liger_kernel_config")
        known = values.mapping(parts, "liger_kernel_config") if values.is_mapping(parts) else {}
        give_liger(job, known)


def read_checkpointing(job: ForeignJob, *, default: bool, quantized: bool) -> None:
    """gradient_checkpointing and its keywords; on by itself with a k-bit base."""
    names = (
        "activation_checkpointing",
        "gradient_checkpointing",
    )  # the newer name wins (transformers 5.23 training_args.py)
    value = job.take(*names)
    keywords = job.mapping("activation_checkpointing_kwargs") or job.mapping(
        "gradient_checkpointing_kwargs"
    )
    if value is None and default:
        job.note("gradient_checkpointing not given, taken as true (SFTConfig's default)")
    if value == "unsloth":
        job.give("checkpointing", "offload")
        return
    on = job.switch(*names, default=default or quantized)
    job.give("checkpointing", "full" if on else "none")
    if "use_reentrant" in keywords:
        job.give("reentrant", keywords["use_reentrant"])


def _read_base(job: ForeignJob) -> None:
    """A further adapter on one that is published: transformers loads the base that it names."""
    base = without_adapter(str(job.options.get("model", "")))
    adapts = not is_off(job.content.get("use_peft")) or "lora_r" in job.content
    if not base or not adapts or find_row(base) is None:
        return
    job.give("model", base)
    job.leave_out(
        "model_name_or_path",
        f"the adapter that it names lies on {base}, which is priced without it",
        memory=Difference.MORE,
        time=Difference.MORE,
        option="model",
    )


def _read_rolled(job: ForeignJob, trained_by: str, length: object) -> None:
    """Lengths and updates of a trainer that rolls out; max_length is no argument of it, and where
    it is given all the same (unsloth's model has one) prompts take what completions leave."""
    if trained_by == "ppo":
        answer = ("response_length", job.take("response_length"))
        give_rolled_length(job, ("", None), answer, usual=_ANSWER, whole=length)
        name_epochs(job, "num_ppo_epochs", _EPOCHS)
        return
    prompt, answer = (
        (key, job.take(key)) for key in ("max_prompt_length", "max_completion_length")
    )
    limit = job.take("vllm_max_model_length")
    give_rolled_length(job, prompt, answer, whole=length, most=limit)
    if trained_by == "grpo":
        give_old_logprobs(job, engine=job.content.get("use_vllm"))


def _read_loss(job: ForeignJob, trained_by: str, *, trl: bool) -> None:
    """TRL's trainers put their own head into the model, which never holds all logits (trl 1.16
    trainer/utils.py add_fused_lm_head; SFT's default since 1.10). `nll` by name was the loss of all
    logits until 1.15, and is priced so."""
    kind = job.take("loss_type")
    if trained_by == "sft" and kind not in (None, "nll", "dft", "chunked_nll"):
        raise InputError(f"loss_type {shown(kind)} is unknown; use nll, dft or chunked_nll")
    if trained_by == "sft" and kind == "chunked_nll":
        job.give("loss", "chunked")
    elif not release_of(job).loss.scores_in_chunks:
        return
    elif trl and trained_by in _OWN_HEAD and (trained_by != "sft" or kind != "nll"):
        job.assume("loss", "chunked", "TRL's since 1.10; --stack trl-0.16 names an older one")
