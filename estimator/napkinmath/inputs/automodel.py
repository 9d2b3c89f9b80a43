"""NeMo Automodel's recipe YAML: sections of its recipes, each with a `_target_`.

Keys: NVIDIA-NeMo/Automodel examples at 36044ad3d139, read by nemo_automodel/recipes/llm/train_ft.py
and recipes/vlm/finetune.py; FSDP 2 computes in bf16 and reduces in fp32
(nemo_automodel/components/distributed/config.py); PeftConfig's defaults are of
components/_peft/lora.py.
"""

from __future__ import annotations

from math import lcm

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, attention_word, dtype_word
from napkinmath.inputs.image_keys import read_image_size, read_processor_limits
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import OPTIMIZERS, Row, degree, give_step, read_rows, world_size
from napkinmath.inputs.te_optimizer import is_transformer_engine, read_fused_adam

_S, _D, _P, _M = "step_scheduler.", "distributed.", "peft.", "model."
_LOSSES = {"fusedlinear": "fused", "chunked": "chunked"}
_SCHEDULES: dict[str, object] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zbv",
    "interleavedzerobubble": "zero-bubble",
}
_FROZEN = {
    "freeze_vision_tower": ("visual", "vision_tower", "vision_model"),
    "freeze_audio_tower": ("audio_tower",),
    "freeze_embeddings": ("embed_tokens",),
    "freeze_language_model": ("language_model",),
}
_NAME = "pretrained_model_name_or_path"
_OWN_MODULES = ("te", "deepep", "hybridep", "uccl_ep")
_CONFIG = f"{_M}config."
# components/models/gpt2.py build_gpt2_model: its dropout stands at the embedding and within
# attention, and its GELU is torch's.
_GPT2_SIZES = {"vocab_size": 50257, "n_positions": 2048, "n_embd": 768, "n_layer": 12, "n_head": 12}
_GPT2 = {"model_type": "gpt2", "activation_function": "gelu", "resid_pdrop": 0.0}
_ROWS = (
    Row("model", f"{_M}{_NAME} {_M}config.{_NAME}"),
    Row("compile", "compile.enabled"),
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an Automodel recipe."""
    job.flatten()
    if str(job.content.get("recipe", "")).startswith(("KnowledgeDistillation", "TrainBiEncoder")):
        job.refuse("workload", f"recipe {shown(job.content['recipe'])} of Automodel is not priced")
    read_rows(job, _ROWS)
    _read_sizes(job)
    _read_length(job)
    _read_modules(job)
    _read_images(job)
    _read_adapter(job)
    _read_mesh(job)
    _read_step(job)
    return job.finish()


def _read_sizes(job: ForeignJob) -> None:
    """A model that is built from sizes: those of a transformers config, or of its own GPT-2."""
    if job.content.get(f"{_CONFIG}{_NAME}") or job.content.get(f"{_M}{_NAME}"):
        return
    package, _, rest = str(job.content.get(f"{_CONFIG}_target_")).partition(".models.")
    if package == "transformers":
        names = [key for key in job.content if key.startswith(_CONFIG)]
        config = {key.removeprefix(_CONFIG): job.take(key) for key in names}
        given = {name: value for name, value in config.items() if not name.startswith("_")}
        job.give("config", {**given, "model_type": rest.partition(".")[0]})
    elif str(job.content.get(f"{_M}_target_")).endswith(".build_gpt2_model"):
        sizes = {name: job.take(f"{_M}{name}") or usual for name, usual in _GPT2_SIZES.items()}
        job.give("config", {**_GPT2, **sizes})


def _read_length(job: ForeignJob) -> None:
    packed = job.take("packed_sequence.packed_sequence_size")
    length = job.take("dataset.seq_len", "dataset.seq_length", "dataset.max_length")
    if not is_off(packed):
        job.give("ctx", packed)
        job.give("packing", True)
    elif length is not None:
        job.give("ctx", length)
    else:
        job.assume("ctx", 2048, "the file gives none: the longest sample decides")


def _read_modules(job: ForeignJob) -> None:
    """Its own models where their modules are named (components/models/common/utils.py
    BackendConfig), else transformers'."""
    names = ("linear", "rms_norm", "experts", "dispatcher")
    named = {str(job.take(f"{_M}backend.{name}")).lower() for name in names}
    if not job.switch(f"{_M}force_hf") and not named.isdisjoint(_OWN_MODULES):
        job.give("stack", "automodel")


def _read_images(job: ForeignJob) -> None:
    """Pictures of noise of a mock dataset (components/datasets/vlm/mock.py), and the limits that
    its processor is made with."""
    number = job.take("dataset.num_images_per_sample")
    if "mock_vlm" in str(job.content.get("dataset._target_", "")):
        job.give("images", 1 if number is None else number)
        job.options.setdefault("image", "256x256")
    read_image_size(job, "dataset.image_size")
    read_processor_limits(job, "processor.min_pixels", "processor.max_pixels")


def _read_adapter(job: ForeignJob) -> None:
    adapts = any(key.startswith(_P) for key in job.content)
    frozen = [
        name
        for key, names in _FROZEN.items()
        if job.switch(f"freeze_config.{key}")
        for name in names
    ]
    _read_quantization(job, adapts=adapts)
    if not adapts:
        job.give("method", "full")
        job.give("freeze", frozen or None)
        return
    read_rows(job, [Row("rank", f"{_P}dim", 8), Row("alpha", f"{_P}alpha", 32)])
    read_rows(job, [Row("dropout", f"{_P}dropout")])
    job.give("method", "dora" if job.switch(f"{_P}use_dora") else "lora")
    job.take(f"{_P}match_all_linear")
    named = [
        str(name).lstrip("*").lstrip(".").rpartition(".")[2]
        for name in values.listed(job.take(f"{_P}target_modules") or [])
    ]
    plain = [name for name in named if name and "*" not in name and not name.startswith("_")]
    job.give("targets", plain if plain and len(plain) == len(named) else "all-linear")


def _read_quantization(job: ForeignJob, *, adapts: bool) -> None:
    four, eight = job.switch("quantization.load_in_4bit"), job.switch("quantization.load_in_8bit")
    kind = job.take("quantization.bnb_4bit_quant_type") or "nf4"
    double = job.switch("quantization.bnb_4bit_use_double_quant", default=True)
    if (four or eight) and not adapts:
        raise InputError("quantization without peft: a quantized base needs adapters; add peft")
    if four:
        job.give("quant", str(kind))
        job.give("double_quant", double)
    elif eight:
        job.give("quant", "int8")


def _read_mesh(job: ForeignJob) -> None:
    """Degrees; the data-parallel ranks are those that the GPUs leave."""
    tp, pp, cp, ep = (degree(job, f"{_D}{axis}_size") for axis in ("tp", "pp", "cp", "ep"))
    copies, given = job.take(f"{_D}dp_replicate_size"), job.take(f"{_D}dp_size")
    for option, size in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep)):
        job.give(option, size if size > 1 else None)
    gpus = world_size(job)
    if gpus is None and given is not None and str(given).isdecimal():
        gpus = int(str(given)) * tp * pp * cp
    least = lcm(tp * pp * cp, ep * pp)
    if gpus is None and least > 1:
        gpus = least
        job.note(
            f"the number of GPUs not given, taken as {least} (as few as the degrees take); add"
            " --gpus N"
        )
    job.give("gpus", gpus)
    strategy = str(job.take(f"{_D}strategy") or "fsdp2").lower()
    job.give("data_parallel", ["ddp" if strategy == "ddp" else "fsdp2"])
    if strategy not in ("ddp", "fsdp2"):
        job.leave_out(
            f"{_D}strategy",
            f"{shown(strategy)} is priced as FSDP 2",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    if not is_off(copies) and gpus is not None and degree(job, f"{_D}dp_replicate_size") > 1:
        job.give("sharding", "hybrid")
        job.give("shard_size", max(1, gpus // (tp * pp) // values.count(copies, "dp_replicate")))
    sequence = job.take(f"{_D}sequence_parallel")
    job.give("sequence_parallel", sequence if tp > 1 else None)
    on = job.take(f"{_D}activation_checkpointing")
    job.give("checkpointing", "selective" if on == "selective" else "none" if not on else "full")
    data = None if gpus is None else max(1, gpus // (tp * pp * cp))
    _read_batch(job, pipelined=pp > 1, data=data)
    kind = dtype_word(job.take(f"{_M}torch_dtype")).removeprefix("torch.")
    held = kind if kind in ("bf16", "fp32", "fp16") else "bf16"
    job.give("precision", "bf16" if gpus not in (None, 1) else held)
    job.give("sharded_dtype", held)
    job.give("reduce_dtype", "fp32")


def _read_batch(job: ForeignJob, *, pipelined: bool, data: int | None) -> None:
    """A pipeline splits the local batch into its micro-batches."""
    rows = values.count(job.take(f"{_S}local_batch_size") or 1, f"{_S}local_batch_size")
    whole = job.take(f"{_S}global_batch_size")
    schedule = Row("pp_schedule", f"{_D}pipeline.pp_schedule", words=_SCHEDULES)
    read_rows(job, [schedule])
    part = job.take(f"{_D}pipeline.pp_microbatch_size")
    if not pipelined:
        job.options.pop("pp_schedule", None)
        for section in (f"{_D}pipeline.", "autopipeline."):
            job.dismiss(section, "there is no pipeline")
    each = values.count(part or 1, "pp_microbatch_size") if pipelined else rows
    job.give("bs", each)
    if whole is None:
        job.give("grad_accum", max(1, rows // each))
    else:
        give_step(job, values.count(whole, f"{_S}global_batch_size"), rows=each, ranks=data)
    steps, at_once = job.options.get("grad_accum"), rows // each
    if pipelined and isinstance(steps, int) and steps > at_once:
        # recipes/llm/train_ft.py _forward_backward_step: schedule.step of each local batch
        job.leave_out(
            f"{_S}local_batch_size",
            f"a pipeline is filled and drained for each {at_once} micro-batches; once a step is priced",
            time=Difference.MORE,
        )


def _read_step(job: ForeignJob) -> None:
    name = str(job.take("optimizer._target_", "optimizer.name") or "torch.optim.AdamW")
    found = OPTIMIZERS.get(name.rpartition(".")[2].lower())
    fused = job.switch("optimizer.fused") or "fusedadam" in name.lower()
    if found is None and not fused:
        job.refuse("optimizer", f"optimizer {shown(name)} of Automodel is not modelled")
    adam = found in (None, "adamw")
    job.give("optimizer", ("adamw-fused" if fused else "adamw-foreach") if adam else found)
    if is_transformer_engine(name):
        read_fused_adam(job, "optimizer.")
    clip = job.take("clip_grad_norm.max_norm", "max_grad_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    loss = str(job.take("loss_fn._target_") or "").rpartition(".")[2].lower()
    job.give("loss", next((ours for word, ours in _LOSSES.items() if word in loss), None))
    backend, attention = job.take(f"{_M}backend.attn"), job.take(f"{_M}attn_implementation")
    word = attention_word(attention if attention is not None else backend)
    job.give("attention", word if word in ("sdpa", "eager", "flash2") else None)
    liger = job.take(f"{_M}use_liger_kernel")
    if liger is not None and values.switch(liger, "use_liger_kernel"):
        if job.options.get("compile") and not job.is_settled("compile"):
            raise InputError(
                "use_liger_kernel with compile.enabled is not priced; add --no-compile"
            )
        job.give("kernels", "liger")
