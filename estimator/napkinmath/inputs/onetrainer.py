"""JSON of Nerogar/OneTrainer: presets and saved configs, LoRA and full training of denoisers.

Keys and defaults: Nerogar/OneTrainer modules/util/config/TrainConfig.py at 23df3832e8f2; what they
do: modules/modelSetup, modules/trainer/GenericTrainer.py, modules/util/create.py,
optimizer_util.py, checkpointing_util.py, quantization_util.py, modules/module/LoRAModule.py.
"""

from __future__ import annotations

import re

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.picture_scripts import UNETS, known_model
from napkinmath.inputs.rows import Row, read_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

# create.py create_optimizer; foreach and fused are off unless the file says so.
_OPTIMIZERS = {
    "ADAM": "adamw",
    "ADAMW": "adamw",
    "ADAM_8BIT": "adamw-bnb",  # bnb.optim.Adam, whose states are of 32 bits
    "ADAMW_8BIT": "adamw-8bit",
    "ADAFACTOR": "adafactor",
    "ADEMAMIX": "ademamix",
    "ADEMAMIX_8BIT": "ademamix-8bit",
    "CAME": "came",
    "LION": "lion",
    "LION_8BIT": "lion-8bit",
    "PRODIGY": "prodigy",
    "RMSPROP": "rmsprop-bnb",
    "RMSPROP_8BIT": "rmsprop-8bit",
    "SCHEDULE_FREE_ADAMW": "schedule-free-adamw",
    "SCHEDULE_FREE_SGD": "schedule-free-sgd",
}
_PAGED = ("adamw-8bit", "ademamix", "ademamix-8bit")
_KEPT = "optimizer_defaults"
_IN_BACKWARD = ("ADAFACTOR", "ADAM", "ADAMW", "CAME")  # Optimizer.supports_fused_back_pass
_MODELS = {  # of a model_type, where base_model_name says nothing known
    "STABLE_DIFFUSION_15": "sd-1.5",
    "STABLE_DIFFUSION_20": "sd-2.1",
    "STABLE_DIFFUSION_20_BASE": "sd-2.1",
    "STABLE_DIFFUSION_21": "sd-2.1",
    "STABLE_DIFFUSION_21_BASE": "sd-2.1",
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "STABLE_DIFFUSION_3": "sd3-medium",
    "FLUX_DEV_1": "flux.1-dev",
    "QWEN": "qwen-image",
}
_NAMED = (*_MODELS, "STABLE_DIFFUSION_35")
# modules/modelSetup/Base*Setup.py LAYER_PRESETS: a screen writes its patterns into layer_filter.
_OF_BLOCKS = {"attn-only": "attn", "blocks": "transformer_block", "full": ""}
_FILTERS = {
    **{unet: {**_OF_BLOCKS, "attn-mlp": "attentions"} for unet in UNETS},
    "flux.1-dev": {**_OF_BLOCKS, "attn-mlp": "attn,ff.net,proj_mlp"},
    "qwen-image": {**_OF_BLOCKS, "attn-mlp": "attn,img_mlp,txt_mlp"},
}
_TYPES = {"FLOAT_32": "fp32", "TFLOAT_32": "tf32", "FLOAT_16": "fp16", "BFLOAT_16": "bf16"}
_EIGHT = ("FLOAT_W8A8", "INT_W8A8")
_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_NUM_ENCODERS = {"flux.1-dev": 2, "sdxl": 2, "sd3-medium": 3, "sd3.5-medium": 3, "sd3.5-large": 3}
_PARTS = (
    *("unet", "prior", "transformer", "unconditional_transformer", "vae", *_ENCODERS),
    *("effnet_encoder", "decoder", "decoder_text_encoder", "decoder_vqgan"),
)
_BUCKET = {"sd-1.5": 8, "sd-2.1": 8}  # modules/dataLoader: pixels that sides are cut to, 64 else
_NARROW = ("FLOAT_8", "INT_8", *_EIGHT)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a file."""
    kept = job.content.get(_KEPT)
    job.content = {key: value for key, value in job.content.items() if key != _KEPT}
    job.flatten()
    if kept is not None:
        job.content = {**job.content, _KEPT: kept}
    job.give("stack", "sd-scripts")
    model = _read_model(job)
    part = "unet" if model in UNETS else "transformer"
    if not job.switch(f"{part}.train", default=True):
        raise InputError(
            f"{part}.train is false: OneTrainer trains text encoders alone, for which there are no"
            f" rules; use {part}.train true"
        )
    encoders = _ENCODERS[: _NUM_ENCODERS.get(model, 1)]
    for other in _PARTS:
        if other not in (part, "vae", *encoders):
            job.dismiss(f"{other}.", f"{model} has no such part", whole=True)
    _read_method(job, model)
    _read_precision(job, part)
    _read_pictures(job, model)
    read_rows(job, (Row("bs", "batch_size", 1), Row("grad_accum", "gradient_accumulation_steps")))
    _read_optimizer(job)
    _read_saving(job, part, model)
    _read_resident(job, encoders)
    _read_mesh(job)
    mechanism = str(job.take("attention_mechanism") or "SDP").upper()
    job.give("attention", {"FLASH": "flash", "CUDNN": "cudnn"}.get(mechanism))
    if mechanism not in ("SDP", "DEFAULT", "FLASH", "CUDNN"):
        job.leave_out(
            "attention_mechanism", f"{mechanism.lower()} is priced as SDPA", time=Difference.EITHER
        )
    clip = job.take("clip_grad_norm")
    job.give("clip", "clip_grad_norm" not in job.content or not is_off(clip))
    return job.finish()


def _read_model(job: ForeignJob) -> str:
    """The model of base_model_name, else the one that its type is."""
    kind = str(job.take("model_type") or "STABLE_DIFFUSION_15").upper()
    name = str(job.take("base_model_name") or "")
    method = str(job.take("training_method") or "FINE_TUNE").upper()
    if method not in ("LORA", "FINE_TUNE"):
        raise InputError(
            f"training_method {shown(method)} of OneTrainer trains no denoiser, and has no rules;"
            " use LORA or FINE_TUNE"
        )
    if job.is_settled("model"):
        return str(job.given.get("model", ""))
    found = known_model(name) if name else None
    if kind not in _NAMED and found is None:
        job.refuse("model", f"model_type {shown(kind)} of OneTrainer has no rules")
    if found is None and kind not in _MODELS:
        job.refuse("model", f"{shown(name)} of OneTrainer is not in the catalog")
    if found is not None:
        job.give("model", found)
        return found
    job.assume("model", _MODELS[kind], f"{shown(name)} is not in the catalog, and its type is")
    return _MODELS[kind]


def _pattern(job: ForeignJob, model: str) -> str:
    """layer_filter as one pattern: names that hold one of its words, or that a regular expression
    finds (modules/util/ModuleFilter.py); '.*' is every linear."""
    said = job.take("layer_filter", "lora_layers")
    preset = str(job.take("layer_filter_preset", "lora_layer_preset") or "full")
    plain = not job.switch("layer_filter_regex", "lora_layers_regex")
    if not said and preset not in ("full", "custom"):
        patterns = _FILTERS.get(model, _OF_BLOCKS)
        if preset not in patterns:
            job.refuse("targets", f"layer_filter_preset {shown(preset)} has no known patterns")
        said, plain = patterns.get(preset), True
    words = [word.strip() for word in str(said or "").split(",")]
    if "" in words:
        return ".*"
    return f".*({'|'.join(re.escape(word) if plain else word for word in words)}).*"


def _read_method(job: ForeignJob, model: str) -> None:
    pattern = _pattern(job, model)
    if job.content.get("training_method", "FINE_TUNE") != "LORA":
        job.give("method", "full")
        if pattern != ".*":
            freezes = "trains the blocks' weights alone" if "block" in pattern else "trains a part"
            job.leave_out(
                "layer_filter",
                f"it {freezes}, and all weights are priced",
                memory=Difference.LESS,
                time=Difference.LESS,
            )
        return
    kind = str(job.take("peft_type") or "LORA").upper()
    job.give("method", "dora" if kind == "LORA" and job.switch("lora_decompose") else "lora")
    job.take("lora_decompose")
    if kind != "LORA":
        job.leave_out(
            "peft_type",
            f"{kind} is priced as LoRA",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    read_rows(job, (Row("rank", "lora_rank", 16), Row("alpha", "lora_alpha", 1)))
    read_rows(job, [Row("dropout", "dropout_probability")])
    job.give("targets", [pattern])
    job.give("adapter_dtype", _TYPES.get(str(job.take("lora_weight_dtype") or "FLOAT_32"), "fp32"))
    if model in UNETS and pattern == ".*":
        job.leave_out(
            "layer_filter",
            "adapters on convolutions are not priced",
            memory=Difference.MORE,
            time=Difference.MORE,
        )


def _read_precision(job: ForeignJob, part: str) -> None:
    """Weights in a type of their own under autocast of train_dtype (dtype_util.py)."""
    key = f"{part}.weight_dtype"
    usual = job.take("weight_dtype")  # before version 9: of the parts that say NONE
    said = str(job.take(key) or "FLOAT_32").upper()
    stored = str(usual or "FLOAT_32").upper() if said == "NONE" else said
    half = _TYPES.get(str(job.take("train_dtype") or "FLOAT_16").upper(), "fp16")
    adapts = job.options["method"] != "full"
    word = _TYPES.get(stored)
    if half not in ("bf16", "fp16"):
        job.give("precision", half)
    elif stored == "FLOAT_8" and adapts:
        job.give("precision", f"{half}-fp8-base")
    elif word in ("fp32", "tf32"):
        job.give("precision", f"{half}-amp")
    else:
        job.give("precision", f"{half}-autocast")
        if word is not None and word != half:
            job.leave_out(
                key,
                f"weights in {word} are cast to {half} for every product, and are priced as {half}",
                memory=Difference.MORE,
                time=Difference.MORE,
            )
    if word is None and (stored != "FLOAT_8" or half not in ("bf16", "fp16")):
        _read_quantization(job, key, stored)
    if adapts is False:
        rounds = job.take("optimizer.stochastic_rounding")
        if word == "bf16" and not is_off(True if rounds is None else rounds):
            job.note(
                "updates are rounded at random: an fp32 copy of one weight at a time is left out"
            )
    else:
        job.take("optimizer.stochastic_rounding")
    job.take("quantization.layer_filter", "quantization.layer_filter_preset")
    job.take("quantization.layer_filter_regex")


def _read_quantization(job: ForeignJob, key: str, stored: str) -> None:
    """8 bits beside adapters: bitsandbytes', or products of 8 bits (LinearW8A8.py)."""
    plain = stored.removesuffix("_COMPRESSED")
    formats = {"NFLOAT_4": "nf4", "INT_8": "int8", **dict.fromkeys(_EIGHT, "quanto-fp8")}
    formats["FLOAT_8"] = "quanto-fp8"
    if plain not in formats:
        job.refuse("quant", f"{key} {shown(stored)} of OneTrainer has no rules")
    job.give("quant", formats.get(plain))
    job.give("kbit", False)
    if plain in _EIGHT:
        job.leave_out(
            key,
            "products of 8 bits leave results of 32 bits before their cast, and are priced as"
            " products of 16 bits",
            memory=Difference.LESS if plain != stored else Difference.MORE,
            time=Difference.LESS,
        )


def _read_pictures(job: ForeignJob, model: str) -> None:
    """The largest of the sizes: a side means its square, cut into buckets of the same area."""
    cut = _BUCKET.get(model, 64)
    sizes = [
        [values.count(side, "resolution") for side in word.lower().split("x")]
        for word in re.split(r"[,;\s]+", str(job.take("resolution") or "512").strip())
        if word
    ]
    width, height = max(((size * 2)[:2] for size in sizes), key=lambda s: s[0] * s[1])
    job.give("image", f"{max(width // cut * cut, cut)}x{max(height // cut * cut, cut)}")
    if len(sizes) > 1:
        job.note(f"of {len(sizes)} resolutions the largest is priced")
    job.take("frames")
    concepts = [one for one in values.listed(job.take("concepts") or []) if values.is_mapping(one)]
    pictures = [values.mapping(one, "concepts").get("image") for one in concepts]
    if any(
        values.is_mapping(one) and values.mapping(one, "image").get("enable_resolution_override")
        for one in pictures
    ):
        job.leave_out(
            "concepts",
            "pictures of a size of their own; add --image",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option="image",
        )
    usual, said = {"flux.1-dev": 512}.get(model), job.take("text_encoder_2_sequence_length")
    if usual and (77 if said is None else said) != usual:
        job.leave_out(
            "text_encoder_2_sequence_length",
            f"{said or 77} tokens of text are priced as {usual}",
            memory=Difference.LESS,
            time=Difference.LESS,
        )


def _read_optimizer(job: ForeignJob) -> None:
    """The optimizer with what is kept of it under optimizer_defaults, as a screen takes it
    (optimizer_util.py change_optimizer)."""
    name = str(job.take("optimizer.optimizer", "optimizer") or "ADAMW").upper()
    found = _OPTIMIZERS.get(name)
    if found is None:
        job.refuse("optimizer", f"optimizer {shown(name)} of OneTrainer is not modelled")
    kept = job.mapping(_KEPT).get(name)
    beside = values.mapping(kept, name) if values.is_mapping(kept) else {}

    def asks(key: str) -> bool:
        said = job.take(f"optimizer.{key}")
        return not is_off(beside.get(key) if said is None else said)

    fused, several, paged = asks("fused"), asks("foreach"), asks("is_paged")
    if found == "adamw":
        found = "adamw-fused" if fused else "adamw-foreach" if several else "adamw"
    elif paged and found in _PAGED:
        found = f"paged-{found}"
    job.give("optimizer", found)
    early = asks("fused_back_pass") and name in _IN_BACKWARD
    job.give("optimizer_in_backward", early or None)


def _read_saving(job: ForeignJob, part: str, model: str) -> None:
    """Checkpointing, with what waits on the host (LayerOffloadConductor.py)."""
    old = job.take("gradient_checkpointing")  # before version 11: of all parts
    again = job.take(f"{part}.gradient_checkpointing")
    runs_again = str(old).upper() not in ("OFF", "FALSE") if again is None else not is_off(again)
    moves = old is None or str(old).upper() == "CPU_OFFLOADED"
    on_host = job.switch(f"{part}.activation_offloading")
    on_host |= (
        job.switch("enable_activation_offloading", default=True) and moves and old is not None
    )
    share = job.take(f"{part}.offload_fraction", "layer_offload_fraction") if moves else None
    job.take("layer_offload_fraction")
    job.give("checkpointing", "offload" if on_host else "full" if runs_again else "none")
    if is_off(share) or model in UNETS:
        return
    part_of = values.number(share, "offload_fraction")
    if job.options["method"] == "full":
        job.leave_out(
            f"{part}.offload_fraction",
            f"{part_of:.0%} of the blocks' weights are on the host in turn",
            memory=Difference.LESS,
            time=Difference.MORE,
        )
        return
    job.give("blocks_to_swap", _share_of_blocks(model, part_of) or None)


def _share_of_blocks(model: str, share: float) -> int:
    """What --blocks-to-swap is for a share of a model's blocks; 0 where its config has no count of
    them."""
    from napkinmath.catalog.models import find_row

    row = find_row(model)
    config: dict[str, int] = {} if row is None else row["config"]
    first, second = (config.get(name, 0) for name in ("num_layers", "num_single_layers"))
    most = min(2 * first, second) if second else first
    return max(min(round(share * most), most - 3 if second else most - 1), 0)


def _read_resident(job: ForeignJob, encoders: tuple[str, ...]) -> None:
    """Cached latents leave the autoencoder and the text encoders on the host
    (modules/modelSetup setup_train_device)."""
    names: list[str] = []
    caches = job.switch("latent_caching", default=True)
    trained = [e for e in encoders if job.switch(f"{e}.train", default=True)]
    job.take(*(f"{e}.include" for e in encoders))
    kinds = [str(job.take(f"{e}.weight_dtype") or "FLOAT_32").upper() for e in encoders]
    if trained:
        job.leave_out(
            f"{trained[0]}.train",
            "the text encoders' forward, gradients and optimizer states (a preset that does not say"
            " false trains them)",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
    if trained or not caches:
        narrow = [kind for kind in kinds if kind.removesuffix("_COMPRESSED") in _NARROW]
        names.append("text-encoders-fp8" if narrow else "text-encoders")
        if "NFLOAT_4" in kinds:
            job.leave_out(
                f"{encoders[kinds.index('NFLOAT_4')]}.weight_dtype",
                "text encoders of 4 bits are priced in the type of the training",
                memory=Difference.LESS,
            )
    wide = str(job.take("vae.weight_dtype") or "FLOAT_32").upper() == "FLOAT_32"
    if not caches:
        names.append("vae-fp32" if wide else "vae")
    average = str(job.take("ema") or "OFF").upper()
    if average == "GPU":
        names.append("ema")
    elif average == "CPU":
        job.leave_out("ema", "averages on the host take copies each step", time=Difference.MORE)
    job.give("resident", names or None)


def _read_mesh(job: ForeignJob) -> None:
    several, devices = job.switch("multi_gpu"), str(job.take("device_indexes") or "")
    count = len([one for one in devices.split(",") if one.strip()])
    if several and count > 1:
        job.give("gpus", count)
    elif several:
        job.leave_out(
            "multi_gpu",
            "every GPU that is there takes part; add --gpus",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option="gpus",
        )
