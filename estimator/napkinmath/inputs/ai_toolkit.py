"""YAML of ostris/ai-toolkit: LoRA and full training of denoisers by `type: sd_trainer`.

Keys and defaults: ostris/ai-toolkit toolkit/config_modules.py (NetworkConfig, TrainConfig,
ModelConfig, DatasetConfig) at 27a03a91f23e; what they do: jobs/process/BaseSDTrainProcess.py,
toolkit/stable_diffusion_model.py, toolkit/lora_special.py.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.picture_scripts import all_linears, draws_video, encoded_frames, known_model
from napkinmath.inputs.rows import Row, read_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_OPTIMIZERS: dict[str, object] = {
    "adamw": "adamw-foreach",
    "adamw8bit": "adamw-8bit",
    "adam8bit": "adamw-8bit",
    "adafactor": "adafactor",
    "prodigy": "prodigy",
    "lion": "lion",
    "lion8bit": "lion-8bit",
}
# Of optimum-quanto and torchao (toolkit/util/quantize.py get_qtype): qfloat8 is e4m3, torchao's
# float8 has fp32 scales.
_FORMATS = {
    "qfloat8": "quanto-fp8",
    "qfloat8_e4m3fn": "quanto-fp8",
    "float8": "quanto-fp8",
    "qint4": "quanto-int4",
    "qint8": "quanto-int8",
    "int8": "quanto-int8",
}
_OWN = ("uint2", "uint3", "uint4", "uint6")  # toolkit/util/uintx_quant.py


_BUCKETS = 16  # pixels that sides are cut to (toolkit/buckets.py get_bucket_sizes)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a file's process."""
    job.content = _process(job)
    job.flatten()
    job.give("stack", "diffusers")
    model = _read_model(job)
    _read_method(job, model)
    sizes = values.listed(job.take("datasets.resolution") or 512)
    sides = [values.count(size, "resolution") for size in sizes]
    side = max(max(sides) // _BUCKETS * _BUCKETS, _BUCKETS)
    job.give("image", f"{side}x{side}")
    frames = values.count(job.take("datasets.num_frames") or 1, "num_frames")
    job.give("frames", encoded_frames(frames) if frames > 1 or draws_video(job) else None)
    if len(sides) > 1:
        job.note(f"of the resolutions {', '.join(map(str, sides))} the largest is priced")
    rows = (
        Row("bs", "train.batch_size", 1),
        Row("grad_accum", "train.gradient_accumulation_steps train.gradient_accumulation"),
        Row("optimizer", "train.optimizer", "adamw", _OPTIMIZERS),
    )
    read_rows(job, rows)
    if job.options.get("optimizer") == "adamw":
        job.give("optimizer", "adamw-foreach")
    again = job.switch("train.gradient_checkpointing", default=True)
    job.give("checkpointing", "full" if again else "none")
    clip = job.take("train.max_grad_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    _read_precision(job)
    _read_resident(job)
    return job.finish()


def _process(job: ForeignJob) -> dict[str, object]:
    """The keys of the process that trains, those of its first dataset as its own."""
    config = job.content.get("config")
    if not values.is_mapping(config):
        return dict(job.content)
    inner = values.mapping(config, "config")
    steps = [s for s in values.listed(inner.get("process") or []) if values.is_mapping(s)]
    if not steps:
        job.refuse("model", "config.process of ai-toolkit's file names nothing")
        return {}
    found = dict(values.mapping(steps[0], "process"))
    kind = found.pop("type", "sd_trainer")
    if kind not in ("sd_trainer", "diffusion_trainer", "ui_trainer"):
        job.refuse("model", f"process {shown(kind)} of ai-toolkit trains no denoiser")
    sets = [s for s in values.listed(found.pop("datasets", None) or []) if values.is_mapping(s)]
    if sets:
        found["datasets"] = values.mapping(sets[0], "datasets")
    return found


# Kinds of which every checkpoint has the same sizes, by their name and by their earlier switch
# (toolkit/config_modules.py ModelConfig).
_KINDS = {"flux": "flux.1-dev", "sdxl": "sdxl", "sd1": "sd-1.5"}
_SWITCHES = {"model.is_flux": "flux", "model.is_xl": "sdxl"}


def _read_model(job: ForeignJob) -> str:
    name = str(job.take("model.name_or_path") or "")
    switched = next((kind for key, kind in _SWITCHES.items() if job.switch(key)), "")
    kind = str(job.take("model.arch") or switched)
    found = known_model(name)
    if found is None and kind in _KINDS and not job.is_settled("model"):
        found = _KINDS[kind]
        job.note(f"model {shown(name)} taken as {found}, whose sizes all of its kind {kind!r} have")
    if found is None:
        job.refuse("model", f"model {shown(name)} of ai-toolkit has no rules")
        return str(job.given.get("model", ""))
    job.give("model", found)
    return found


def _read_method(job: ForeignJob, model: str) -> None:
    """What is trained; a network is in fp32 (BaseSDTrainProcess.py force_to)."""
    if not any(key.startswith("network.") for key in job.content):
        job.give("method", "full")
        return
    kind = str(job.take("network.type") or "lora").lower()
    if kind != "lora":
        job.leave_out(
            "network.type",
            f"{shown(kind)} is priced as LoRA",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    read_rows(
        job, [Row("rank", "network.linear network.rank", 4), Row("alpha", "network.linear_alpha")]
    )
    read_rows(job, [Row("dropout", "network.dropout")])
    job.give("method", "lora")
    job.give("adapter_dtype", "fp32")
    job.give("targets", list(all_linears(model)))


def _read_precision(job: ForeignJob) -> None:
    half = dtype_word(job.take("train.dtype"))
    job.give("precision", f"{half}-autocast" if half in ("bf16", "fp16") else "fp32")
    kind = str(job.take("model.qtype") or "qfloat8")
    if not job.switch("model.quantize"):
        return
    if kind in _FORMATS or kind in _OWN:
        job.give("quant", _FORMATS.get(kind, kind))
        job.give("kbit", False)
        if kind in _OWN:
            job.leave_out(
                "model.qtype",
                "a block's unpacked weights stay to its backward, and are priced as unpacked again",
                memory=Difference.MORE,
                time=Difference.LESS,
            )
        return
    job.leave_out(
        "model.qtype",
        f"weights of qtype {shown(kind)} are priced in the type of the training",
        memory=Difference.LESS,
        time=Difference.MORE,
    )


def _read_resident(job: ForeignJob) -> None:
    """Latents that are cached leave the autoencoder idle on the host, and a text encoder goes
    where its embeddings are cached or where it is unloaded."""
    names: list[str] = []
    gone = [
        key
        for key in (
            *("train.unload_text_encoder", "train.cache_text_embeddings"),
            "datasets.cache_text_embeddings",
        )
        if job.switch(key)
    ]
    packed = job.switch("model.quantize_te", default="quant" in job.options)
    if packed:  # T5 alone, by qfloat8 (toolkit/stable_diffusion_model.py)
        kind = str(job.take("model.qtype_te") or "qfloat8")
        packed = _FORMATS.get(kind) == "quanto-fp8"
    if not gone:
        names.append("text-encoders-fp8" if packed else "text-encoders")
    if job.switch("train.train_text_encoder"):
        job.leave_out(
            "train.train_text_encoder",
            "the text encoders' forward, gradients and optimizer states",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
    cached = [
        key
        for key in ("datasets.cache_latents", "datasets.cache_latents_to_disk")
        if job.switch(key)
    ]
    if not cached:
        names.append("vae")
    if job.switch("train.ema_config.use_ema"):
        names.append("ema")
    job.give("resident", names or None)
