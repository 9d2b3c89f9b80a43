"""TOML of tdrussell/diffusion-pipe: LoRA and full training of Wan, Qwen-Image, FLUX.1 and Stable
Diffusion 3.

Keys, defaults and what they do: tdrussell/diffusion-pipe train.py, models/base.py, models/wan/wan.py,
models/qwen_image.py, models/flux.py, models/sd3.py at 8f83dbf25d03.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.picture_data import file_of_data, sections
from napkinmath.inputs.picture_scripts import (
    all_linears,
    draws_video,
    encoded_frames,
    known_model,
)
from napkinmath.inputs.rows import Row, read_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_OPTIMIZERS: dict[str, object] = {  # train.py get_optimizer, in lower case
    "adamw": "adamw-foreach",
    "adamw8bit": "adamw-8bit",
    "adamw_optimi": "anyprecision-adamw",
    "sgd": "sgd",
    "prodigy": "prodigy",
    "lion": "lion",
    "adafactor": "adafactor",
}
_USUAL = {  # of a type, where paths of weights say nothing known
    "flux": "flux.1-dev",
    "qwen_image": "qwen-image",
}
_PATHS = ("diffusers_path", "ckpt_path", "transformer_path", "checkpoint_path")
_MULTIPLE = 16  # pixels_round_to_multiple
_FP8 = ("float8", "float8_e4m3fn", "float8_e5m2")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a file."""
    job.flatten()
    job.give("stack", "diffusers")
    model = _read_model(job)
    _read_adapter(job, model)
    _read_datasets(job)
    rows = (
        Row("bs", "micro_batch_size_per_gpu", 1),
        Row("grad_accum", "gradient_accumulation_steps"),
        Row("blocks_to_swap", "blocks_to_swap"),
    )
    sizes = job.content.get("micro_batch_size_per_gpu")
    if isinstance(sizes, list):  # pairs of a resolution and a batch
        taken = values.listed(job.take("micro_batch_size_per_gpu"))
        pairs = [values.listed(pair) for pair in taken]
        job.give("bs", max(values.count(pair[-1], "micro_batch_size_per_gpu") for pair in pairs))
        job.note("of the batches by resolution the largest is priced")
    read_rows(job, rows)
    stages = values.count(job.take("pipeline_stages") or 1, "pipeline_stages")
    job.give("pp", stages if stages > 1 else None)
    _read_optimizer(job)
    again = job.take("activation_checkpointing")
    on_host = str(again).lower() == "unsloth"
    job.give("checkpointing", "none" if is_off(again) else "offload" if on_host else "full")
    clip = job.take("gradient_clipping")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    job.note(
        "modules that are its own are priced as diffusers': the same weights and checkpoints, other"
        " temporaries of one block"
    )
    return job.finish()


def _read_model(job: ForeignJob) -> str:
    kind = str(job.take("model.type") or "")
    given = [str(job.take(f"model.{key}") or "") for key in _PATHS]
    found = next((name for path in given if path and (name := known_model(path))), None)
    usual = _USUAL.get(kind)
    if found is None and usual is not None:
        job.assume("model", usual, f"type {shown(kind)} of diffusion-pipe")
        return usual
    if found is None:
        job.refuse("model", f"type {shown(kind)} of diffusion-pipe with these weights has no rules")
        return str(job.given.get("model", ""))
    job.give("model", found)
    return found


def _read_adapter(job: ForeignJob, model: str) -> None:
    """Every linear of the blocks has one (models/base.py configure_adapter); alpha is its rank."""
    half = dtype_word(job.take("model.dtype")) or "bf16"
    narrow = [
        key
        for key in ("model.transformer_dtype", "model.diffusion_model_dtype")
        if str(job.take(key) or "") in _FP8
    ]
    if not any(key.startswith("adapter.") for key in job.content):
        job.give("method", "full")
        job.give("precision", f"{half}-autocast" if half in ("bf16", "fp16") else "fp32")
        return
    kind = str(job.take("adapter.type") or "lora").lower()
    if kind != "lora":
        job.leave_out(
            "adapter.type",
            f"{shown(kind)} is priced as LoRA",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    read_rows(job, (Row("rank", "adapter.rank"), Row("dropout", "adapter.dropout")))
    job.give("alpha", job.options.get("rank"))
    job.give("method", "lora")
    job.give("targets", list(all_linears(model)))
    job.give("adapter_dtype", dtype_word(job.take("adapter.dtype")) or half)
    job.give("precision", f"{half}-fp8-base" if narrow else f"{half}-autocast")


def _read_datasets(job: ForeignJob) -> None:
    """The largest of the sizes of all folders, of as many frames as the longest bucket has
    (utils/dataset.py)."""
    if "dataset" not in job.content:
        return
    found = file_of_data(job, "dataset")
    if not values.is_mapping(found):
        return
    general = values.mapping(found, "dataset")
    folders = sections(general.get("directory") or [], "directory") or [{}]
    sizes = [size for folder in folders for size in _sizes({**general, **folder})]
    if not sizes:
        job.leave_out(
            "dataset",
            "it names no resolutions and no size_buckets; add --image",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option="image",
        )
        return
    width, height, frames = max(sizes, key=lambda size: size[0] * size[1] * size[2])
    job.give("image", f"{width}x{height}")
    job.give("frames", encoded_frames(frames) if draws_video(job) else None)
    if len(set(sizes)) > 1:
        job.note(f"of {len(set(sizes))} sizes of the data {width}x{height}x{frames} is priced")


def _sizes(folder: dict[str, object]) -> list[tuple[int, int, int]]:
    """(width, height, frames) of a folder's buckets: those of every aspect have the same area, so
    the square one stands for them."""

    def cut(side: float) -> int:
        return max(round(side / _MULTIPLE) * _MULTIPLE, _MULTIPLE)

    buckets = values.listed(folder.get("size_buckets") or [])
    if buckets:
        sides = [
            [values.count(part, "size_buckets") for part in values.listed(one)] for one in buckets
        ]
        return [(cut(one[0]), cut(one[1]), one[2]) for one in sides if len(one) == 3]
    said = values.listed(folder.get("frame_buckets") or 1)
    frames = [values.count(one, "frame_buckets") for one in said]
    areas = [
        [values.count(part, "resolutions") for part in values.listed(one)]
        for one in values.listed(folder.get("resolutions") or [])
    ]
    whole = [(one * 2)[0] * (one * 2)[1] for one in areas if one]
    return [(cut(area**0.5), cut(area**0.5), max(frames)) for area in whole]


def _read_optimizer(job: ForeignJob) -> None:
    name = str(job.take("optimizer.type") or "").lower()
    if name == "adamw8bitkahan":
        job.give("optimizer", "adamw-8bit")
        job.leave_out(
            "optimizer.type",
            "the compensation of rounding beside the 8-bit states, in the type of the weights",
            memory=Difference.MORE,
        )
    elif name in _OPTIMIZERS:
        job.give("optimizer", _OPTIMIZERS[name])
    else:
        job.refuse("optimizer", f"optimizer {shown(name)} of diffusion-pipe is not modelled")
    job.give("optimizer_in_backward", job.switch("optimizer.gradient_release") or None)
