"""ms-swift 1 and 2 (2023 and 2024): `swift sft --model_type qwen-7b-chat --sft_type lora ...`,
`python llm_sft.py`, `torchrun swift/cli/sft.py`.

Keys, defaults and names of models: modelscope/ms-swift swift/llm/utils/argument.py and model.py,
swift/llm/tuner.py, swift/cli/main.py at v1.7.3, v2.0.0 and v2.6.1.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.catalog.models import find_row
from napkinmath.inputs import ms_swift
from napkinmath.inputs.foreign import ForeignJob, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.ms_swift_names import model_named
from napkinmath.inputs.rows import Row, read_rows, world_size
from napkinmath.inputs.trainer import read_evaluation, read_step

_SAMPLES = 16  # argument.py: accumulation makes steps of so many where nothing is said
_ROWS = (
    Row("bs", "batch_size per_device_train_batch_size", 1),
    Row("packing", "packing"),
    Row("method", "sft_type", "lora", {"lora": "lora", "full": "full"}),
)
_LORA = (
    Row("rank", "lora_rank", 8),
    Row("alpha", "lora_alpha", 32),
    Row("dropout", "lora_dropout lora_dropout_p", 0.05),
    Row("rslora", "use_rslora"),
)
# model.py LoRATM: what makes queries, keys and values, as one linear or as three.
_QKV = ("q_proj", "k_proj", "v_proj", "c_attn", "W_pack", "query_key_value", "wqkv", "qkv_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_DEFAULTS = {
    "mamba": ("in_proj", "x_proj", "embeddings", "out_proj"),
    "deepseek_v2": (*_LATENT, "o_proj"),
    "minicpm3": _LATENT,
    "phi": (*_QKV, "Wqkv"),
    "dbrx": ("Wqkv",),
}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an ms-swift command of 2023 or 2024."""
    job.assume("stack", "hf-2024", "ms-swift 1 and 2 ask for transformers 4.33 to 4.47")
    _read_model(job)
    read_rows(job, _ROWS)
    _read_length(job)
    _check_backend(job)
    quantized = ms_swift.read_quantization(job)
    full = _read_tuner(job)
    ms_swift.check_quantized(quantized=quantized, full=full)
    if (file := job.take("deepspeed_config_path")) is not None:
        job.content = {**job.content, "deepspeed": file}
    ms_swift.read_sharding_names(job)
    _read_accumulation(job)
    ms_swift.read_checkpointing_form(job)
    flash = job.take("use_flash_attn")
    job.give("attention", "flash2" if flash is not None and not is_off(flash) else None)
    ms_swift.read_workload(job)
    if job.switch("use_galore"):
        job.give("optimizer", "galore")
    read_step(job)
    size = job.take("eval_batch_size", "per_device_eval_batch_size")
    if size is not None:
        read_evaluation(job, "eval_batch_size", size)
    ms_swift.read_precision(job, full=full)
    ms_swift.read_rolled_lengths(job)
    ms_swift.read_divergence(job)
    return job.finish()


def _read_model(job: ForeignJob) -> None:
    """Weights of `model_id_or_path`, else those that `model_type` downloads. A folder whose name
    says no model has those of the type."""
    kind, path = job.take("model_type"), job.take("model_id_or_path", "model_cache_dir")
    named = None if kind is None else model_named(str(kind))
    if path is not None and (named is None or find_row(str(path)) is not None):
        job.give("model", path)
    elif named is not None:
        job.give("model", named)
        if named != kind:
            job.note(f"model_type {kind} is {named}")


def _read_length(job: ForeignJob) -> None:
    length = job.take("max_length")
    if length in (-1, "-1"):
        job.refuse("ctx", "max_length -1 of ms-swift cuts nothing, so the longest sample decides")
    elif length is None:
        job.assume("ctx", 2048, "ms-swift's max_length")
    else:
        job.give("ctx", length)


def _check_backend(job: ForeignJob) -> None:
    """`train_backend: megatron` is another program; unsloth's kernels come with its tuner."""
    backend = str(job.take("train_backend") or "transformers")
    if backend != "transformers":
        job.refuse(
            "stack",
            f"train_backend {shown(backend)} of ms-swift runs Megatron-LM's step; give that with"
            " --stack megatron, --tp and --pp",
        )
    if job.content.get("tuner_backend") == "unsloth":
        job.take("tuner_backend")
        job.give("kernels", "unsloth")
        job.by_unsloth = True


def _read_tuner(job: ForeignJob) -> bool:
    """Whether all parameters are trained."""
    frozen = job.switch("freeze_vit")
    if job.options.get("method") == "full":
        job.give("freeze", list(ms_swift.FROZEN["freeze_vit"]) if frozen else None)
        return True
    if job.switch("use_dora"):
        job.options["method"] = "dora"
    read_rows(job, _LORA)
    kind = dtype_word(job.take("lora_dtype"))
    job.give("adapter_dtype", kind if kind in ("fp32", "bf16", "fp16") else None)
    saved = values.listed(job.take("lora_modules_to_save", "modules_to_save") or [])
    job.give("train_modules", saved or None)
    regex = job.take("target_regex", "lora_target_regex")
    targets = job.take("lora_target_modules", "target_modules")
    job.give("targets", regex if regex is not None else _targets(job, targets))
    return False


def _targets(job: ForeignJob, given: object) -> object:
    """DEFAULT: what makes queries, keys and values; ALL: every linear. A model that sees pictures
    has adapters on every linear of its language model (model.py LoRATM)."""
    names = [
        part.strip() for name in values.listed(given or "DEFAULT") for part in str(name).split(",")
    ]
    if "ALL" in names:
        return "all-linear"
    found: list[str] = []
    for name in names:
        found += _usual(job) if name in ("DEFAULT", "AUTO") else [name]
    return "all-linear" if "all-linear" in found else list(dict.fromkeys(found))


def _usual(job: ForeignJob) -> list[str]:
    row = find_row(str(job.options.get("model", ""))) or {}
    config = row.get("config", {})
    if "vision_config" in config or "audio_config" in config:
        return ["all-linear"]
    return list(_DEFAULTS.get(str(config.get("model_type")), _QKV))


def _read_accumulation(job: ForeignJob) -> None:
    given = job.take("gradient_accumulation_steps")
    if given is not None:
        job.give("grad_accum", given)
        return
    rows = values.count(job.options["bs"], "batch_size") * (world_size(job) or 1)
    job.assume("grad_accum", -(-_SAMPLES // rows), f"ms-swift makes steps of {_SAMPLES} samples")
