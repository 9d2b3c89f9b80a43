"""Which release of TRL a file is read by: the one that --stack names, that the file or its neighbours
pin, the last that takes its keys, or the newest; and the type that it loads a model in."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import find_stack
from napkinmath.inputs.pins import pinned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob
    from napkinmath.ir.stack import Stack

# Keys of a method's configuration -> the last release that takes them: a later one ends with an error
# (trl/trainer/grpo_config.py, dpo_config.py, kto_config.py, orpo_config.py at each tag).
_LAST = {
    "vllm_device": "0.17",
    "vllm_dtype": "0.17",
    "vllm_enable_prefix_caching": "0.17",
    "use_liger_loss": "0.27",
    **dict.fromkeys(("max_prompt_length", "ref_model_init_kwargs", "reference_free"), "0.28"),
    **dict.fromkeys(("rpo_alpha", "label_pad_token_id", "use_logits_to_keep"), "0.28"),
}


def release_of(job: ForeignJob) -> Stack:
    """The stack of the file's trainer, which is an option of the job where the file pins it."""
    given = str(job.given.get("stack", ""))
    if given or "stack" in job.options:
        return find_stack(given or str(job.options["stack"]))
    where, version = pinned(job, "trl")
    own = job.options.get("kernels") == "unsloth" or job.content.get(
        "use_unsloth"
    )  # a loss of its own
    key = "" if version or own or "workload" not in job.options else _oldest_key(job)
    version = _LAST.get(key, version)
    try:
        found = find_stack(f"trl-{version}" if version else "hf")
    except InputError:  # older than any era
        return find_stack("hf")
    if version and found is not find_stack("hf"):
        job.give("stack", found.name)
        if key:
            job.note(f"{key} is of TRL up to {version}: --stack {found.name}, {found.meaning}")
            return found
        job.note(f"{where} pins trl {version}: --stack {found.name}, {found.meaning}")
    return found


def _oldest_key(job: ForeignJob) -> str:
    """The key that the fewest later releases take; '' where all are today's."""
    given = [key for key in _LAST if job.content.get(key) is not None]
    return min(given, key=lambda key: float(_LAST[key]), default="")


def loaded_type(job: ForeignJob) -> str:
    """The type in which TRL loads a model by its name: fp32 since 0.27 (trainer/utils.py
    create_model_from_path, trainer/model_config.py dtype), and transformers 4 by itself before. ''
    for the checkpoint's, in which unsloth loads it."""
    if job.options.get("kernels") == "unsloth":
        return ""
    job.note("dtype not given, taken as float32 (TRL's; dtype: bfloat16 halves the weights)")
    return "fp32"
