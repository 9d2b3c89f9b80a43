"""Which release of TRL a file is read by: the one that --stack names, that the file or its neighbours
pin, the last that takes its keys, or the newest; and the type that it loads a model in."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import find_stack
from napkinmath.inputs.pins import pinned
from napkinmath.inputs.rollouts import read_flattened
from napkinmath.inputs.trained_by import EMBEDS, PLAIN_TRAINER

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
_LAST_OF = {key: (key, f"trl-{last}") for key, last in _LAST.items()}


# What a script gives its trainer, which took it until then (trl 0.12.2 and 0.15.2 trainer/
# sft_trainer.py, dpo_trainer.py __init__; 0.19.1 sft_config.py; transformers 4.57 trainer.py).
_UNTIL = {
    "SFTConfig's max_seq_length": "trl-0.19",
    "a trainer's tokenizer": "trl-0.15",
    "Trainer's tokenizer": "transformers-4.57",
}
_KEYWORD_UNTIL = "trl-0.12"
# The first release of each library that a stack is of: what is older is nearer to it than to today's.
_OLDEST = {"trl": "0.7", "transformers": "4.30"}


def release_of(job: ForeignJob) -> Stack:
    """The stack of the file's trainer, which is an option of the job where the file pins it."""
    job.take("given_to_trainer")
    given = str(job.given.get("stack", ""))
    if given or "stack" in job.options:
        return find_stack(given or str(job.options["stack"]))
    why, release = _told(job)
    try:
        found = find_stack(release or "hf")
    except InputError:  # outside of every era: before the first of them, or after the last
        library, _, version = release.rpartition("-")
        first = _OLDEST.get(library, "")
        if not first or _numbers(version) >= _numbers(first):
            return find_stack("hf")
        why, found = f"{why}, taken as {library} {first}", find_stack(f"{library}-{first}")
    if found is not find_stack("hf"):
        job.give("stack", found.name)
        job.note(f"{why}: --stack {found.name}, {found.meaning}")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _told(job: ForeignJob) -> tuple[str, str]:
    """(what tells the release, that release): a pin, or what the fewest later releases take."""
    plain = job.trained_by in (PLAIN_TRAINER, *EMBEDS)
    where, version = pinned(job, "trl")
    if version:
        return f"{where} pins trl {version}", f"trl-{version}"
    if job.options.get("kernels") == "unsloth" or job.content.get("use_unsloth"):
        return "", ""  # a loss of its own, in any release
    told = [_LAST_OF[key] for key in _LAST if job.content.get(key) is not None]
    told = told if "workload" in job.options else []
    if job.path.endswith((".py", ".ipynb")) and "evaluation_strategy" in job.content:
        told.append(("evaluation_strategy", "transformers-4.45" if plain else "trl-0.11"))
    keyword = job.content.get("given_to_trainer")
    if keyword is not None:
        told.append((str(keyword), _UNTIL.get(str(keyword), _KEYWORD_UNTIL)))
    if not told:
        return "", ""
    key, release = min(told, key=lambda one: find_stack(one[1]).model.transformers)
    library, _, version = release.rpartition("-")
    return f"{key} is of {library.replace('trl', 'TRL')} up to {version}", release


def loads_wide(job: ForeignJob) -> bool:
    """Whether the file's transformers makes fp32 weights where no type is named, as it did before 5
    (modeling_utils.py from_pretrained)."""
    stack = release_of(job)
    before = stack.model.runs_transformers and stack.model.is_transformers_before((5, 0))
    return before and job.options.get("kernels") != "unsloth"


def loaded_type(job: ForeignJob) -> str:
    """The type in which TRL loads a model by its name: fp32 since 0.27 (trainer/utils.py
    create_model_from_path, trainer/model_config.py dtype), and transformers 4 by itself before. ''
    for the checkpoint's, in which unsloth loads it."""
    if job.options.get("kernels") == "unsloth":
        return ""
    job.note("dtype not given, taken as float32 (TRL's; dtype: bfloat16 halves the weights)")
    return "fp32"


def read_packing(job: ForeignJob, *, old: bool) -> None:
    """Packed rows, unless they are cut from one text: nothing tells attention where those end."""
    cut = old or job.content.get("packing_strategy") == "wrapped"
    packing = job.take("packing")
    job.give("packing", None if cut or release_of(job).trainer.packs_whole_rows else packing)
    read_flattened(job, "padding_free")
