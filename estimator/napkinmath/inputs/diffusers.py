"""Launch lines of diffusers' training examples: text-to-image and DreamBooth, LoRA and full.

Options and what they do: huggingface/diffusers examples/text_to_image, examples/dreambooth,
examples/advanced_diffusion_training and examples/research_projects/flux_lora_quantization at
58eb52c0803e.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.picture_scripts import (
    DIFFUSERS,
    HELD,
    PROMPT,
    SCRIPT,
    Script,
    named_model,
    script_of,
)
from napkinmath.inputs.rows import Row, read_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_LENGTHS = {"flux.1-dev": 512, "qwen-image": 512, "sd3-medium": 77}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a launch line."""
    script = script_of(DIFFUSERS, job.take(SCRIPT) or "train_text_to_image_lora")
    named_model(job, "pretrained_model_name_or_path", script)
    job.give("stack", "diffusers")
    _read_method(job, script)
    _read_pictures(job, script)
    _read_optimizer(job)
    read_rows(job, [Row("grad_accum", "gradient_accumulation_steps")])
    job.give("checkpointing", "full" if job.switch("gradient_checkpointing") else "none")
    _read_precision(job, script)
    _read_resident(job, script)
    clip = job.take("max_grad_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    if str(job.content.get(SCRIPT)) == "train_dreambooth":
        if not job.switch("set_grads_to_none"):
            job.leave_out(
                "set_grads_to_none",
                "gradients are zeroed in place and kept, and are priced as freed",
                memory=Difference.MORE,
            )
    else:
        job.take("set_grads_to_none")
    return job.finish()


def _read_method(job: ForeignJob, script: Script) -> None:
    if not script.adapts:
        job.give("method", "full")
        return
    dora = job.switch("use_dora")
    job.give("method", "dora" if dora else "lora")
    job.give("quant", script.quant or None)
    read_rows(job, (Row("rank", "rank", 4), Row("alpha", "lora_alpha")))
    read_rows(job, [Row("dropout", "lora_dropout")])
    named = job.take("lora_layers")
    targets = [name.strip() for name in str(named).split(",")] if named else list(script.targets)
    job.give("targets", targets or None)


def _read_pictures(job: ForeignJob, script: Script) -> None:
    side = job.take("resolution") or script.side
    job.give("image", f"{side}x{side}")
    rows = values.count(job.take("train_batch_size") or script.batch, "train_batch_size")
    if "train_batch_size" not in job.content:
        job.assume("bs", rows, "the script's train_batch_size")
    if job.switch("with_prior_preservation"):  # collate_fn puts the class pictures beside
        rows *= 2
    job.give("bs", rows)
    usual = _LENGTHS.get(script.model)
    length = job.take("max_sequence_length")
    default = 77 if script.model == "flux.1-dev" and not script.adapts else usual
    said = default if length is None else length
    if usual is not None and said != usual and isinstance(said, int):
        job.leave_out(
            "max_sequence_length",
            f"{said} tokens of text are priced as {usual}",
            memory=Difference.LESS if said < usual else Difference.MORE,
            time=Difference.LESS if said < usual else Difference.MORE,
        )


def _read_optimizer(job: ForeignJob) -> None:
    name = str(job.take("optimizer") or "AdamW").lower()
    eight = job.switch("use_8bit_adam")
    known = {"adamw": "adamw-8bit" if eight else "adamw-foreach", "prodigy": "prodigy"}
    if name not in known:
        job.refuse("optimizer", f"optimizer {shown(name)} of diffusers' examples is not modelled")
    job.give("optimizer", known.get(name))


def _read_precision(job: ForeignJob, script: Script) -> None:
    """Frozen weights are in the type of the autocast; what is trained whole stays in fp32."""
    word = str(job.take("mixed_precision") or "no").lower()
    tf32 = job.switch("allow_tf32")
    if word not in ("bf16", "fp16"):
        plain = "tf32" if tf32 else "fp32"
        if "mixed_precision" in job.content:
            job.give("precision", plain)
        else:
            job.assume("precision", plain, "neither the script nor accelerate says mixed_precision")
        return
    job.give("precision", f"{word}-{'autocast' if script.adapts else 'amp'}")


def _read_resident(job: ForeignJob, script: Script) -> None:
    """What stays on the GPU beside the denoiser."""
    trains = [key for key in ("train_text_encoder", "train_text_encoder_ti") if job.switch(key)]
    for key in trains:
        job.leave_out(
            key,
            "the text encoders' weights are priced, and neither their forward, their gradients nor"
            " their optimizer states",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
    captions = not is_off(job.take("caption_column"))
    early = job.switch("pre_compute_text_embeddings")
    held = script.encoders == HELD and not early
    names = ["text-encoders"] if trains or held or (script.encoders == PROMPT and captions) else []
    own_vae = job.take("pretrained_vae_model_name_or_path")
    cached, waits = job.switch("cache_latents"), job.switch("offload")
    shown_to = not is_off(job.content.get("validation_prompt"))
    if script.vae and not waits and not (cached and not shown_to):
        names.append("vae" if own_vae and script.encoders == HELD else script.vae)
    averages, on_host = job.switch("use_ema"), job.switch("offload_ema")
    if averages and not on_host:
        names.append("ema")
    job.give("resident", names or None)
