"""Launch lines and TOML files of kohya-ss/sd-scripts: LoRA (networks.lora*) and full fine-tuning.

Options and what they do: kohya-ss/sd-scripts train_network.py, flux_train_network.py,
sd3_train_network.py, sdxl_train.py, flux_train.py, library/train_util.py, networks/lora.py,
networks/lora_flux.py at 48d368fa5577.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.kohya_gui import as_arguments, is_of_gui
from napkinmath.inputs.picture_scripts import (
    SCRIPT,
    SD_SCRIPTS,
    UNETS,
    Script,
    adapted,
    named_model,
    one_level,
    read_datasets,
    script_of,
)
from napkinmath.inputs.rows import Row, read_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

# library/train_util.py get_optimizer, in lower case.
_OPTIMIZERS: dict[str, object] = {
    "": "adamw-foreach",
    "adamw": "adamw-foreach",
    "adamw8bit": "adamw-8bit",
    "pagedadamw": "paged-adamw",
    "pagedadamw32bit": "paged-adamw",
    "pagedadamw8bit": "paged-adamw-8bit",
    "lion": "lion",
    "lion8bit": "lion-8bit",
    "pagedlion8bit": "paged-lion-8bit",
    "adafactor": "adafactor",
    "prodigy": "prodigy",
}
_KINDS = ("networks.lora", "networks.lora_flux", "networks.lora_sd3")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a launch line or of a file."""
    if is_of_gui(job.content):
        job.content = as_arguments(job.content)
    elif SCRIPT not in job.content:
        job.content = one_level(job.content)
    script = script_of(SD_SCRIPTS, _script(job))
    job.give("stack", "sd-scripts")
    if job.switch("v2") and not job.is_settled("model"):
        script = script._replace(model="sd-2.1")
    named_model(job, "pretrained_model_name_or_path", script)
    _read_method(job, script)
    _read_pictures(job)
    _read_optimizer(job)
    read_rows(job, [Row("grad_accum", "gradient_accumulation_steps")])
    job.give("checkpointing", "full" if job.switch("gradient_checkpointing") else "none")
    _read_precision(job, script)
    _read_attention(job, script)
    _read_resident(job, script)
    _read_swaps(job, script)
    clip = job.take("max_grad_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    if script.model in UNETS:
        job.note("its own U-Net is priced as that of diffusers, of the same layers")
    elif job.options.get("checkpointing") == "full":
        job.note(
            "modules of Black Forest Labs and Stability are priced as diffusers' own: the same"
            " weights and checkpoints, other temporaries of one block"
        )
    else:
        job.leave_out(
            SCRIPT,
            "its modules are Black Forest Labs' and Stability's, and are priced as diffusers' own",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    return job.finish()


def _script(job: ForeignJob) -> str:
    """The script's name; of a file alone what its network module says."""
    said = job.take(SCRIPT)
    if said is not None:
        return str(said)
    module = str(job.content.get("network_module") or "")
    family = {"networks.lora_flux": "flux_", "networks.lora_sd3": "sd3_"}.get(module, "")
    if not family and "xl" in str(job.content.get("pretrained_model_name_or_path")).lower():
        family = "sdxl_"
    found = f"{family}train_network"
    if not family and not module:
        job.refuse("model", f"the file does not say which script of {job.tool} reads it")
    job.note(f"read as of {found}.py")
    return found


def _read_method(job: ForeignJob, script: Script) -> None:
    if not script.adapts:
        job.give("method", "full")
        return
    module = str(job.take("network_module") or "networks.lora")
    job.give("method", "lora")
    if module not in _KINDS:
        job.leave_out(
            "network_module",
            f"{module} is priced as networks.lora",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    read_rows(job, (Row("rank", "network_dim", 4), Row("alpha", "network_alpha")))
    read_rows(job, [Row("dropout", "network_dropout")])
    job.give("targets", list(adapted(script.model)))
    if job.take("network_args"):
        job.leave_out(
            "network_args",
            "adapters on convolutions, of other ranks or on some blocks alone are not priced",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    if not job.switch("network_train_unet_only"):
        job.leave_out(
            "network_train_unet_only",
            "adapters of the text encoders, their forward and backward",
            memory=Difference.MORE,
            time=Difference.MORE,
        )


def _read_pictures(job: ForeignJob) -> None:
    size = job.take("resolution")
    if size is None:
        read_datasets(job, default="512x512")
    else:
        sides = [part.strip() for part in str(size).replace("x", ",").strip("[]()").split(",")]
        job.give("image", "x".join(sides if len(sides) == 2 else sides * 2))
    rows = job.take("train_batch_size")
    if "bs" in job.options:
        return
    if rows is None:
        job.assume("bs", 1, "sd-scripts' train_batch_size")
    else:
        job.give("bs", values.count(rows, "train_batch_size"))


def _read_optimizer(job: ForeignJob) -> None:
    name = str(job.take("optimizer_type") or "").lower().rpartition(".")[2]
    if job.switch("use_8bit_adam"):
        name = "adamw8bit"
    elif job.switch("use_lion_optimizer"):
        name = "lion"
    if name not in _OPTIMIZERS:
        job.refuse("optimizer", f"optimizer_type {shown(name)} of sd-scripts is not modelled")
    job.give("optimizer", _OPTIMIZERS.get(name))
    fused = [
        key for key in ("fused_backward_pass", "blockwise_fused_optimizers") if job.switch(key)
    ]
    job.give("optimizer_in_backward", bool(fused) or None)


def _read_precision(job: ForeignJob, script: Script) -> None:
    """Frozen weights are in the type of the autocast and adapters in fp32; full_bf16 and full_fp16
    put all that is trained in it too (train_network.py, sdxl_train.py)."""
    word = str(job.take("mixed_precision") or "no").lower()
    narrow = [key for key in ("fp8_base", "fp8_base_unet") if job.switch(key)]
    if narrow and word in ("bf16", "fp16") and script.adapts:  # train_network.py asserts both
        full = job.switch(f"full_{word}")
        job.give("precision", f"{word}-fp8-base")
        job.give("adapter_dtype", word if full else "fp32")
        return
    whole = [kind for kind in ("bf16", "fp16") if job.switch(f"full_{kind}")]
    if whole:
        job.give("precision", f"{whole[0]}-autocast")
        job.give("adapter_dtype", whole[0] if script.adapts else None)
    elif word in ("bf16", "fp16"):
        job.give("precision", f"{word}-{'autocast' if script.adapts else 'amp'}")
        job.give("adapter_dtype", "fp32" if script.adapts else None)
    else:
        job.give("precision", "fp32")


def _read_attention(job: ForeignJob, script: Script) -> None:
    """U-Nets multiply and normalise by single operations unless a flag names a kernel
    (library/original_unet.py). FLUX and Stable Diffusion 3 run SDPA."""
    fused = [key for key in ("sdpa", "xformers", "mem_eff_attn") if job.switch(key)]
    if not fused and script.model in UNETS:
        job.give("attention", "math")


def _read_swaps(job: ForeignJob, script: Script) -> None:
    """Blocks on the host, under adapters; a U-Net's are never swapped."""
    if script.adapts and script.model not in UNETS:
        read_rows(job, [Row("blocks_to_swap", "blocks_to_swap")])
    elif script.model in UNETS:
        job.take("blocks_to_swap")
    elif job.take("blocks_to_swap"):
        job.leave_out(
            "blocks_to_swap",
            "so many blocks' weights are on the host in turn, with their gradients",
            memory=Difference.LESS,
            time=Difference.MORE,
        )


def _read_resident(job: ForeignJob, script: Script) -> None:
    names: list[str] = []
    cached = [
        key
        for key in ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")
        if job.switch(key)
    ]
    trains = job.switch("train_text_encoder")
    if trains:
        job.leave_out(
            "train_text_encoder",
            "the text encoders' gradients and optimizer states",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
    if not cached or trains:
        narrow = job.switch("fp8_base") and not job.switch("fp8_base_unet")
        names.append("text-encoders-fp8" if narrow and script.adapts else "text-encoders")
    if not [key for key in ("cache_latents", "cache_latents_to_disk") if job.switch(key)]:
        names.append("vae-fp32" if job.switch("no_half_vae") else "vae")
    else:
        job.take("no_half_vae")
    job.give("resident", names or None)
