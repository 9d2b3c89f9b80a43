"""The types of a Trainer's or TRL's arguments: what is loaded, and what it is computed in."""

from __future__ import annotations

from napkinmath.base.dtypes import CHECKPOINT, CHECKPOINT_TF32
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import dtype_word, precision_of
from napkinmath.inputs.trl_release import loaded_type, loads_wide

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob


def read_loader(job: ForeignJob) -> bool:
    """Whether the trainer loads the model by its name; else a script does, which may be unsloth's."""
    job.by_unsloth, job.follows_gpu = job.switch("loaded_by_unsloth"), job.switch("halves_by_gpu")
    job.transformers = str(job.take("transformers_pin") or "")
    return not job.switch("loaded_by_script")


def read_precision(
    job: ForeignJob,
    given: object,
    loading: ForeignJob,
    *,
    default: bool,
    by_trl: bool,
    quantized: bool,
    adapter: bool,
) -> None:
    """bf16, fp16 and tf32 over weights of the type given, that of a section beside it, or what
    loads them; `default` is bf16 where neither it nor fp16 is set."""
    bf16 = job.take("bf16")
    fp16 = job.switch("fp16")
    half = str(job.options.get("precision", ""))  # of a DeepSpeed file, whose engine decides
    if bf16 is None and "fp16" not in job.content and half.startswith(("bf16", "fp16")):
        bf16 = half.startswith("bf16") or None
        fp16 = bf16 is None
    use_bf16 = bool(default and not fp16) if bf16 is None else bf16 is True or job.switch("bf16")
    if bf16 is None and use_bf16:
        job.note("bf16 not given, taken as true (SFTConfig's default)")
    if not (bf16 or fp16 or job.take("tf32")) and given is None:
        job.assumed.add("precision")
    weights = dtype_word(given if given is not None else loading.take("dtype", "torch_dtype"))
    weights = weights or (loaded_type(job) if by_trl and not quantized else "")
    if not weights and not quantized and loads_wide(job):
        weights = "fp32"
        if use_bf16 or fp16:
            job.note("dtype not given, taken as float32 (transformers' before 5)")
    if not weights and not quantized and (use_bf16 or fp16):
        _name_older_loading(job)
    tf32 = job.switch("tf32")
    if not weights and not use_bf16 and not fp16 and not quantized:
        job.note("neither bf16 nor fp16 is set: weights have the checkpoint's type")
        job.give("precision", CHECKPOINT_TF32 if tf32 else CHECKPOINT)
        return
    job.give(
        "precision",
        precision_of(
            job,
            bf16=use_bf16,
            fp16=fp16,
            tf32=tf32,
            weights=weights,
            quantized=quantized,
            adapter=adapter,
        ),
    )


def _name_older_loading(job: ForeignJob) -> None:
    """Says that an argument is of transformers before 4.46 (training_args.py), whose
    from_pretrained makes fp32 weights where no dtype is named; 5 keeps the checkpoint's."""
    if "evaluation_strategy" in job.content:
        job.leave_out(
            "evaluation_strategy",
            "transformers before 4.46 has it and loads fp32 weights by default; for that add"
            " --precision bf16-amp --stack hf-4.45",
            memory=Difference.MORE,
            time=Difference.MORE,
            option="precision",
        )
