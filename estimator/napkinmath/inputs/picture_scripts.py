"""Scripts that train denoisers, by their file's name: which model they train, how, and with what
beside it. Each was read in its repository (inputs/keys/diffusers.json, sd_scripts.json)."""

from __future__ import annotations

import os
from contextlib import suppress
from math import prod
from typing import NamedTuple

from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.scripts.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.foreign import ForeignJob
    from napkinmath.inputs.scripts.launchers import Launched, Load
    from napkinmath.inputs.scripts.shell_words import Word
    from napkinmath.inputs.scripts.words import Arguments

DATASETS = "dataset_config"
SCRIPT = "script"
"""The key under which a reader finds the script's name."""
HELD, PROMPT, FREED = "held", "prompt", "freed"
"""Text encoders: in each step; freed once one prompt is encoded; freed once all are."""


class Script(NamedTuple):
    """A training script."""

    model: str
    """The catalog's model that it trains where the name says nothing."""
    side: int = 512
    batch: int = 4
    adapts: bool = True
    encoders: str = PROMPT
    vae: str = "vae"
    """The autoencoder beside it as --resident says it; '' where it is freed before the step."""
    targets: tuple[str, ...] = ()
    """Modules that it adapts, where they differ from those of the model's own script."""
    quant: str = ""


_FP32 = "vae-fp32"
DIFFUSERS = {
    "train_text_to_image": Script("sd-1.5", batch=16, adapts=False, encoders=HELD),
    "train_text_to_image_lora": Script("sd-1.5", batch=16, encoders=HELD),
    "train_text_to_image_sdxl": Script("sdxl", 1024, 16, adapts=False, encoders=FREED, vae=""),
    "train_text_to_image_lora_sdxl": Script("sdxl", 1024, 16, encoders=HELD, vae=_FP32),
    "train_dreambooth": Script("sd-1.5", adapts=False, encoders=HELD),
    "train_dreambooth_lora": Script(
        "sd-1.5",
        encoders=HELD,
        targets=("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_v_proj"),
    ),
    "train_dreambooth_lora_sdxl": Script("sdxl", 1024, vae=_FP32),
    "train_dreambooth_lora_sd3": Script("sd3-medium", vae=_FP32),
    "train_dreambooth_sd3": Script("sd3-medium", adapts=False, vae=_FP32),
    "train_dreambooth_flux": Script("flux.1-dev", adapts=False),
    "train_dreambooth_lora_flux": Script("flux.1-dev"),
    "train_dreambooth_lora_flux_advanced": Script("flux.1-dev"),
    "train_dreambooth_lora_qwen_image": Script("qwen-image", encoders=FREED),
    "train_dreambooth_lora_sdxl_advanced": Script("sdxl", 1024, vae=_FP32),
    "train_dreambooth_lora_sd15_advanced": Script("sd-1.5", vae=_FP32),
    "train_dreambooth_lora_flux_miniature": Script(
        "flux.1-dev",
        encoders=FREED,
        targets=("to_k", "to_q", "to_v", "to_out.0"),
        quant="nf4",
    ),
}
SD_SCRIPTS = {
    "train_network": Script("sd-1.5", encoders=HELD),
    "sdxl_train_network": Script("sdxl", encoders=HELD),
    "sd3_train_network": Script("sd3-medium", encoders=HELD),
    "flux_train_network": Script("flux.1-dev", encoders=HELD),
    "fine_tune": Script("sd-1.5", adapts=False, encoders=HELD),
    "train_db": Script("sd-1.5", adapts=False, encoders=HELD),
    "sdxl_train": Script("sdxl", adapts=False, encoders=HELD),
    "sd3_train": Script("sd3-medium", adapts=False, encoders=HELD),
    "flux_train": Script("flux.1-dev", adapts=False, encoders=HELD),
}
MUSUBI = {
    "wan_train_network": Script("wan2.1-t2v-14b", encoders=FREED, vae=""),
    "qwen_image_train_network": Script("qwen-image", encoders=FREED, vae=""),
    "qwen_image_train": Script("qwen-image", adapts=False, encoders=FREED, vae=""),
}
_KINDS = {"diffusers": DIFFUSERS, "sd-scripts": SD_SCRIPTS, "musubi": MUSUBI}
# Linears of a Transformer2DModel, and of the blocks of FLUX and of Stable Diffusion 3.
_UNET = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")
_BLOCKS = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("net.0.proj", "net.2", "norm1.linear", "norm1_context.linear"),
    *("norm.linear", "proj_mlp", "proj_out"),
)
_WAN = (*_UNET, "add_k_proj", "add_v_proj")
_QWEN_IMAGE = (*_WAN, "add_q_proj", "to_add_out")
UNETS = ("sd-1.5", "sd-2.1", "sdxl")
_OF_SCRIPTS = ("network_module", "dit")
_MODEL = "pretrained_model_name_or_path"


def adapted(model: str) -> tuple[str, ...]:
    """Linears of a model's blocks, which trainers with adapters of their own adapt."""
    if model in UNETS:
        return _UNET
    if model.startswith("wan"):
        return _WAN
    return _QWEN_IMAGE if model == "qwen-image" else _BLOCKS


def all_linears(model: str) -> tuple[str, ...]:
    """Every linear of a model's blocks, those of the modulation too."""
    return (*_QWEN_IMAGE, "img_mod.1", "txt_mod.1") if model == "qwen-image" else adapted(model)


def trains_pictures(target: str, words: list[Word]) -> bool:
    """Whether a launched script trains what diffusers', sd-scripts' or musubi-tuner's programs
    train."""
    stem = os.path.basename(target).removesuffix(".py")
    given = {word.text.lstrip("-").partition("=")[0] for word in words}
    return any(stem in known for known in _KINDS.values()) or bool(
        _MODEL in given or given.issuperset(_OF_SCRIPTS)
    )


def picture_sources(
    found: Launched, given: Arguments, file: Source | None, path: str, load: Load
) -> list[Source]:
    """The sources of a script that trains a denoiser, with its launcher's. Raises InputError for
    one that there are no rules for."""
    name = os.path.basename(found.target)
    stem = name.removesuffix(".py")
    kind = next((kind for kind, known in _KINDS.items() if stem in known), "")
    if not kind:
        raise InputError(
            f"there are no rules for what {shown(name)} trains; read are diffusers' text-to-image and"
            " DreamBooth scripts of Stable Diffusion 1 to 3.5, FLUX.1 and Qwen-Image, sd-scripts', and"
            " musubi-tuner's of Wan and Qwen-Image; give a denoiser by its name"
        )
    content = {**({} if file is None else one_level(file.content)), **given.content, SCRIPT: stem}
    if isinstance(named := content.get(DATASETS), str):
        with suppress(InputError):  # the reader says that it was not read
            content[DATASETS] = load(named).content
    launched = list(found.sources)
    _take_precision(content, launched)
    source = Source(
        path=path,
        content={k: v for k, v in content.items() if k not in given.computed},
        tool=stem,
        kind=kind,
        lines=given.lines,
        elsewhere=given.elsewhere,
        computed=given.computed,
    )
    return [*launched, source]


def one_level(content: object) -> dict[str, object]:
    """Keys of a file whose sections have no meaning (library/train_util.py
    read_config_from_file)."""
    from napkinmath.base import values

    found: dict[str, object] = {}
    for key, value in values.mapping(content, "file").items():
        found.update(values.mapping(value, key) if values.is_mapping(value) else {key: value})
    return found


def _take_precision(content: dict[str, object], launched: list[Source]) -> None:
    """accelerate's mixed precision is the script's own where that says none: which types it means
    for the weights is the script's to say."""
    for at, source in enumerate(launched):
        if source.kind == "accelerate" and "mixed_precision" in source.content:
            kept = dict(source.content)
            content.setdefault("mixed_precision", kept.pop("mixed_precision"))
            launched[at] = source.replace(content=kept)
    launched[:] = [s for s in launched if s.content or s.computed or s.kind != "accelerate"]


def read_datasets(job: ForeignJob, *, default: str) -> None:
    """Size, batch and frames of the largest data set of a file that --dataset_config names; asked
    for where the file is not here."""
    from napkinmath.base import values

    if not values.is_mapping(job.content.get(DATASETS)):
        job.leave_out(
            DATASETS,
            "it says size, frames and batch, and is not here; add --image, --frames and --bs",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option="image",
        )
        return
    file = values.mapping(job.take(DATASETS), DATASETS)
    general = values.mapping(file.get("general") or {}, "general")
    named = values.listed(file.get("datasets") or [])
    sets = [values.mapping(one, "datasets") for one in named] or [{}]
    sizes = [_of_dataset({**general, **one}, default) for one in sets]
    width, height, frames, rows = max(sizes, key=lambda each: prod(each))
    job.give("image", f"{width}x{height}")
    job.give("frames", frames if frames > 1 or draws_video(job) else None)
    job.give("bs", rows)
    if len(set(sizes)) > 1:
        job.note(f"of {len(sizes)} data sets the one of {width}x{height}x{frames} is priced")
    if any("control_directory" in one for one in sets):
        job.leave_out(
            DATASETS,
            "tokens of control pictures are not priced",
            memory=Difference.MORE,
            time=Difference.MORE,
        )


def draws_video(job: ForeignJob) -> bool:
    """Whether the job's model makes videos."""
    return str(job.given.get("model") or job.options.get("model")).startswith("wan")


def _of_dataset(one: Mapping[str, object], default: str) -> tuple[int, int, int, int]:
    """(width, height, frames, batch) of a data set (dataset/image_video_dataset.py)."""
    from napkinmath.base import values

    said = one.get("resolution") or default.split("x")
    sides = [values.count(side, "resolution") for side in values.listed(said)]
    wide, high = sides if len(sides) == 2 else sides * 2
    kept = [values.count(n, "target_frames") for n in values.listed(one.get("target_frames") or 1)]
    if one.get("frame_extraction") == "full":
        kept = [values.count(one.get("max_frames") or 129, "max_frames")]
    rows = values.count(one.get("batch_size") or 1, "batch_size")
    return wide, high, encoded_frames(max(kept)), rows


def encoded_frames(frames: int) -> int:
    """Frames that the autoencoder of videos encodes: it leaves out those behind the last four
    (diffusers autoencoder_kl_wan.py _encode)."""
    return (frames - 1) // 4 * 4 + 1


def script_of(known: Mapping[str, Script], name: object) -> Script:
    """The script of a name. Raises InputError for one that is not read."""
    found = known.get(str(name))
    if found is None:
        raise InputError(f"script {shown(name)} is not read; use one of {', '.join(known)}")
    return found


def named_model(job: ForeignJob, key: str, script: Script) -> None:
    """The model of a name, or, for a checkpoint that the catalog does not have, the one that the
    script is for."""
    name = str(job.take(key) or "")
    if job.is_settled("model"):
        return
    found = known_model(name)
    if found is not None:
        job.give("model", found)
        return
    job.assume("model", script.model, f"{shown(name)} is not in the catalog, and the script is")


def known_model(name: str) -> str | None:
    """The catalog's name of a hub id, a path or a file; None for one that it does not have."""
    from napkinmath.catalog.models import find_row

    row = find_row(name) or find_row(name.replace("\\", "/").rpartition("/")[2])
    return None if row is None else str(row["name"])
