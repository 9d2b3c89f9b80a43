"""Files of Unsloth Studio (its export, its presets) and of `unsloth train --config`, whose flags
lie over them: QLoRA, LoRA and full fine-tuning on one GPU by unsloth's kernels.

Keys and defaults: unslothai/unsloth unsloth_cli/config.py and studio/frontend/src/features/training
/lib/yaml-config.ts at 015bdef0d94a; what they do: studio/backend/core/training/trainer.py
load_model, prepare_model_for_training, and the arguments of its SFTTrainer.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import Row, read_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EVERY = "all-linear"
_PARTS = ("vision_layers", "language_layers", "attention_modules", "mlp_modules")
# A flag is named as the key of a section, and wins over it.
_ROWS = (
    Row("bs", "batch_size training.batch_size", 2),
    Row("ctx", "max_seq_length training.max_seq_length", 2048),
    Row("grad_accum", "gradient_accumulation_steps training.gradient_accumulation_steps", 4),
    Row("packing", "packing training.packing"),
    Row("optimizer", "optim training.optim", "adamw-8bit"),
)
_OF_ADAPTERS = (
    Row("alpha", "lora_alpha lora.lora_alpha"),
    Row("dropout", "lora_dropout lora.lora_dropout"),
    Row("rslora", "use_rslora lora.use_rslora"),
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a file."""
    job.flatten()
    job.content = {  # a flag of the line turns off what it names
        key.removeprefix("no_"): value if not key.startswith("no_") else not value
        for key, value in job.content.items()
    }
    job.give("model", job.take("model"))
    read_rows(job, _ROWS)
    job.give("precision", "bf16-autocast")
    job.by_unsloth = job.follows_gpu = True
    kind = str(job.take("training_type", "training.training_type") or "lora").lower()
    four = job.take("load_in_4bit", "training.load_in_4bit")
    if kind == "full":
        job.give("method", "full")
        job.dismiss("lora.", "a full fine-tuning has no adapters", whole=True)
    else:
        _read_adapter(job)
        if four is None:
            job.assume("quant", "nf4", "Studio's usual method, which its file does not say")
        elif values.switch(four, "load_in_4bit"):
            job.give("quant", "nf4")
        if "quant" in job.options:
            job.give("double_quant", True)  # unsloth/models/llama.py BitsAndBytesConfig
    again = job.take("gradient_checkpointing", "training.gradient_checkpointing")
    off = again is not None and is_off(again)
    whole = again is True or str(again).lower() in ("true", "1", "yes")
    job.give("checkpointing", "none" if off else "full" if whole else "offload")
    return job.finish()


def _read_adapter(job: ForeignJob) -> None:
    dora = job.switch("use_dora", "lora.use_dora")
    job.give("method", "dora" if dora else "lora")
    job.give("kernels", None if dora else "unsloth")
    if dora:
        job.leave_out(
            "lora.use_dora" if "lora.use_dora" in job.content else "use_dora",
            "unsloth's kernels beside DoRA have no rules: transformers' own operations are priced",
            memory=Difference.LESS,
            time=Difference.LESS,
            option="kernels",
        )
    read_rows(job, [Row("rank", "lora_r lora.lora_r", 64), *_OF_ADAPTERS])
    given = job.take("target_modules", "lora.target_modules")
    listed = str(given).split(",") if isinstance(given, str) else values.listed(given or [])
    names = [name for each in listed if (name := str(each).strip())]
    if job.switch("vision_all_linear", "lora.vision_all_linear") or names == [_EVERY]:
        job.give("targets", _EVERY)
    else:
        job.give("targets", [name for name in names if name != _EVERY] or list(_TARGETS))
    for part in _PARTS:
        key = f"finetune_{part}"
        if not job.switch(key, f"lora.{key}", default=True):
            job.leave_out(
                key if key in job.content else f"lora.{key}",
                "of a model that reads images adapters lie on a part alone",
                memory=Difference.LESS,
                time=Difference.LESS,
                option="targets",
            )
