"""Configs of bghira/SimpleTuner (JSON and TOML), with the file of its data backends: LoRA and full
training of denoisers.

Keys and defaults: bghira/SimpleTuner simpletuner/simpletuner_sdk/server/services/field_registry at
bc8e6ab7738c; what they do: simpletuner/helpers/training/trainer.py, optimizer_param.py,
quantisation/__init__.py, simpletuner/helpers/models/common.py and each model's model.py.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.picture_data import file_of_data, sections
from napkinmath.inputs.picture_scripts import draws_video, encoded_frames, known_model
from napkinmath.inputs.rows import Row, read_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_FLAVOURS = {  # models/*/model.py HUGGINGFACE_PATHS, the usual one first
    "flux": {
        **{"krea": "flux.1-dev", "dev": "flux.1-dev", "fluxbooru": "flux.1-dev"},
        **{"schnell": "flux.1-schnell", "libreflux": "flux.1-schnell"},
    },
    "sd1x": {"dreamshaper": "sd-1.5", "1.5": "sd-1.5", "1.4": "sd-1.5", "realvis": "sd-1.5"},
    "sd2x": {"pseudoflex-v2": "sd-2.1", "2.1": "sd-2.1", "2.0": "sd-2.1"},
    "sdxl": {"base-1.0": "sdxl", "base-0.9": "sdxl"},
    "sd3": {"medium": "sd3.5-medium", "large": "sd3.5-large"},
    "qwen_image": {"v2.0": "qwen-image", "v1.0": "qwen-image"},
    "wan": {
        "t2v-480p-1.3b-2.1": "wan2.1-t2v-1.3b",
        "t2v-480p-14b-2.1": "wan2.1-t2v-14b",
        **dict.fromkeys(("i2v-14b-2.1", "i2v-14b-2.1-720p"), "wan2.1-i2v-14b"),
        **dict.fromkeys(("i2v-14b-2.2-high", "i2v-14b-2.2-low"), "wan2.2-i2v-a14b"),
        "ti2v-5b-2.2": "wan2.2-ti2v-5b",
    },
}
_OPTIMIZERS: dict[str, object] = {  # optimizer_param.py
    "adamw_bf16": "anyprecision-adamw",  # with the rest that rounding leaves, as a third state
    "torch-adam": "adamw-foreach",
    "torch-adamw": "adamw-foreach",
    "torch-sgd": "sgd",
    "torch-adagrad": "adagrad",
    "torch-rmsprop": "rmsprop",
    "ao-adamw8bit": "adamw-8bit-torchao",
    "ao-adamw4bit": "adamw-4bit-torchao",
    "adamw_schedulefree+no_kahan": "schedule-free-adamw",
    "optimi-adamw": "anyprecision-adamw",
    "optimi-lion": "lion",
    "bnb-adam": "adamw-bnb",
    "bnb-adamw": "adamw-bnb",
    "bnb-adam8bit": "adamw-8bit",
    "bnb-adamw8bit": "adamw-8bit",
    "bnb-adamw-paged": "paged-adamw",
    "bnb-adamw8bit-paged": "paged-adamw-8bit",
    "bnb-lion": "lion-bnb",
    "bnb-lion8bit": "lion-8bit",
    "bnb-lion-paged": "paged-lion",
    "bnb-lion8bit-paged": "paged-lion-8bit",
    "bnb-ademamix": "ademamix",
    "bnb-ademamix8bit": "ademamix-8bit",
    "bnb-ademamix-paged": "paged-ademamix",
    "bnb-ademamix8bit-paged": "paged-ademamix-8bit",
}
_FORMATS = {  # quantisation/__init__.py
    "int8-quanto": "quanto-int8",
    "int8-torchao": "quanto-int8",
    "fp8-quanto": "quanto-fp8",
    "fp8wo-torchao": "quanto-fp8",
    "int4-quanto": "quanto-int4",
    "nf4-bnb": "nf4",
}
_TARGETS = ("to_k", "to_q", "to_v", "to_out.0")
_TEXT = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
_FEEDS = ("ff_context.net.0.proj", "ff_context.net.2")
_ALL = (*_TARGETS, *_TEXT)
_EVERY = (*_ALL, "ff.net.0.proj", "ff.net.2", *_FEEDS, "proj_mlp", "proj_out")
_FLUX = {  # models/flux/model.py get_lora_target_layers
    "all": _ALL,
    "context": _TEXT,
    "context+ffs": (*_TEXT, *_FEEDS),
    "all+ffs": _EVERY,
}
_EMBEDS = ("text_embeds", "image_embeds", "conditioning", "conditioning_image_embeds", "eval")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a config."""
    job.content = {key.removeprefix("--"): value for key, value in job.content.items()}
    job.give("stack", "diffusers")
    model = _read_model(job)
    _read_method(job, model)
    _read_precision(job)
    _read_data(job)
    name = str(job.take("optimizer") or "adamw_bf16").lower()
    if name not in _OPTIMIZERS:
        job.refuse("optimizer", f"optimizer {shown(name)} of SimpleTuner is not modelled")
    job.give("optimizer", _OPTIMIZERS.get(name))
    if name == "optimi-lion":
        job.leave_out(
            "optimizer",
            "the compensation of rounding, in the type of the weights",
            memory=Difference.MORE,
        )
    job.give("optimizer_in_backward", job.switch("optimizer_release_gradients") or None)
    read_rows(job, [Row("grad_accum", "gradient_accumulation_steps")])
    job.give("bs", values.count(job.take("train_batch_size") or 4, "train_batch_size"))
    again = job.switch("gradient_checkpointing", default=True)
    job.give("checkpointing", "full" if again else "none")
    most = job.take("max_grad_norm")
    by_norm = job.take("grad_clip_method") == "norm"  # 'value' keeps nothing
    job.give("clip", by_norm and not is_off(2.0 if most is None else most))
    _read_swaps(job, model)
    _read_resident(job)
    ranks = values.count(job.take("num_processes") or 1, "num_processes")
    job.give("gpus", ranks if ranks > 1 else None)
    return job.finish()


def _read_model(job: ForeignJob) -> str:
    family = str(job.take("model_family") or "").lower()
    path, flavour = job.take("pretrained_model_name_or_path"), job.take("model_flavour")
    own = str(path or job.take("pretrained_transformer_model_name_or_path") or "")
    job.take("pretrained_transformer_model_name_or_path")
    if job.is_settled("model"):
        return str(job.given.get("model", ""))
    flavours = _FLAVOURS.get(family, {})
    found = known_model(own) if own and flavours else None
    if found is None and flavours:
        found = flavours.get(str(flavour)) if flavour else next(iter(flavours.values()))
        if found is not None and own:
            job.assume("model", found, f"{shown(own)} is not in the catalog, and model_family is")
            return found
    if found is None:
        said = " ".join(str(one) for one in (family, flavour) if one) or own
        job.refuse("model", f"{shown(said)} of SimpleTuner has no rules")
        return ""
    job.give("model", found)
    return found


def _read_method(job: ForeignJob, model: str) -> None:
    if str(job.take("model_type") or "full").lower() != "lora":
        job.give("method", "full")
        return
    job.give("method", "dora" if job.switch("use_dora") else "lora")
    kind = str(job.take("lora_type") or "standard").lower()
    if kind != "standard":
        job.leave_out(
            "lora_type",
            f"{kind} is priced as LoRA",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    read_rows(job, (Row("rank", "lora_rank", 16), Row("dropout", "lora_dropout", 0.1)))
    alpha = job.take("lora_alpha")
    job.give("alpha", job.options["rank"] if alpha is None else alpha)
    job.give("adapter_dtype", "bf16")
    named, where = job.take("peft_lora_target_modules"), str(job.take("flux_lora_target") or "all")
    if named:
        job.give("targets", named)
        return
    if model.startswith("flux") and where not in _FLUX:
        job.leave_out(
            "flux_lora_target",
            f"{shown(where)} is priced as 'all'",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    job.give("targets", list(_FLUX.get(where, _ALL) if model.startswith("flux") else _TARGETS))


def _read_precision(job: ForeignJob) -> None:
    """Weights and adapters in the type of mixed_precision under autocast; a base is quantized beside
    adapters alone (configuration/cmd_args.py is_quantized)."""
    word = str(job.take("mixed_precision") or "bf16").lower()
    if word in ("bf16", "fp16"):
        job.give("precision", f"{word}-autocast")
    else:
        job.give("precision", "fp32")
    if job.options["method"] != "full":
        job.give("adapter_dtype", word if word in ("bf16", "fp16") else "fp32")
    kind = str(job.take("base_model_precision") or "no_change").lower()
    if kind == "no_change" or job.options["method"] == "full":
        return
    nearest = next((_FORMATS[f] for f in _FORMATS if f[:4] == kind[:4]), "quanto-int8")
    job.give("quant", _FORMATS.get(kind, nearest))
    job.give("kbit", False)
    if kind not in _FORMATS:
        job.leave_out(
            "base_model_precision",
            f"{kind} is priced as {job.options['quant']}",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )


def _read_data(job: ForeignJob) -> None:
    """The largest of the backends of pictures and videos."""
    usual = (job.take("resolution"), job.take("resolution_type"))
    if "data_backend_config" not in job.content:
        width, high = _side(usual[0], usual[1])
        job.give("image", f"{width}x{high}")
        return
    found = file_of_data(job, "data_backend_config")
    backends = [
        one
        for one in sections(found or [], "data_backend_config")
        if str(one.get("dataset_type") or "image") not in _EMBEDS and not one.get("disabled")
    ]
    if not backends:
        width, high = _side(usual[0], usual[1])
        job.give("image", f"{width}x{high}")
        return
    sizes = [_of_backend(one, usual) for one in backends]
    side, frames = max(sizes, key=lambda each: each[0] ** 2 * each[1])
    job.give("image", f"{side}x{side}")
    job.give("frames", encoded_frames(frames) if frames > 1 or draws_video(job) else None)
    if len(set(sizes)) > 1:
        job.note(f"of {len(sizes)} data backends the one of {side}x{side}x{frames} is priced")
    if any(str(one.get("dataset_type")) == "conditioning" for one in sections(found, "data")):
        job.leave_out(
            "data_backend_config",
            "pictures that control others are not priced",
            memory=Difference.MORE,
            time=Difference.MORE,
        )


def _of_backend(one: dict[str, object], usual: tuple[object, object]) -> tuple[int, int]:
    """Side and frames of a data backend (helpers/data_backend/config/image.py)."""
    size = one.get("resolution")
    kind = one.get("resolution_type") or usual[1]
    side, _ = _side(usual[0] if size is None else size, kind)
    video = one.get("video")
    frames = values.mapping(video, "video").get("num_frames") if values.is_mapping(video) else None
    moves = str(one.get("dataset_type")) == "video"
    return side, values.count(frames or (125 if moves else 1), "num_frames")


def _side(size: object, kind: object) -> tuple[int, int]:
    """A side in pixels, cut to the buckets' 64: megapixels are an area of squares."""
    said = values.number(1024 if size is None else size, "resolution", high=1 << 16)
    pixels = said if said >= 64 and kind != "area" else (said * 1e6) ** 0.5
    side = max(round(pixels / 64) * 64, 64)
    return side, side


def _read_swaps(job: ForeignJob, model: str) -> None:
    """Blocks on the host; of two lists the last blocks of both together, where ours are of each."""
    swaps = job.content.get("musubi_blocks_to_swap")
    if is_off(swaps):
        job.take("musubi_blocks_to_swap")
    elif job.options["method"] == "full" or model.startswith("flux"):
        job.leave_out(
            "musubi_blocks_to_swap",
            "so many of the last blocks wait on the host",
            memory=Difference.LESS,
            time=Difference.MORE,
        )
    else:
        read_rows(job, [Row("blocks_to_swap", "musubi_blocks_to_swap")])


def _read_resident(job: ForeignJob) -> None:
    """Text encoders and the autoencoder are unloaded once all is cached (trainer.py
    init_unload_text_encoder, init_unload_vae)."""
    names: list[str] = []
    if job.switch("train_text_encoder"):
        names.append("text-encoders")
        job.leave_out(
            "train_text_encoder",
            "the text encoders' forward, gradients and optimizer states",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
    live = [key for key in ("text_cache_disable", "text_cache_ondemand") if job.switch(key)]
    if live and not names:
        names.append("text-encoders")
    drawn = [k for k in ("vae_cache_disable", "vae_cache_ondemand") if job.switch(k)]
    if job.switch("keep_vae_loaded") or drawn:
        wide = str(job.take("vae_dtype") or "bf16").lower() == "fp32"
        names.append("vae-fp32" if wide else "vae")
    else:
        job.take("vae_dtype")
    where = str(job.take("ema_device") or "cpu")
    averages = job.switch("use_ema")
    if averages and where == "accelerator":
        names.append("ema")
    elif averages:
        job.leave_out("use_ema", "averages on the host take copies each step", time=Difference.MORE)
    job.give("resident", names or None)
    if job.switch("validation_disable"):
        job.dismiss("validation_", "validation_disable is on")
