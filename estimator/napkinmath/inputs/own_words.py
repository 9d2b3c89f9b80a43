"""Words of somebody's own training script that are names of our options.

A reader that does not know such a word may not pass over it: `--tp 2` and `--optimizer` change what
a step holds, whatever the script makes of them.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference, JobKey, KeyUse
from napkinmath.inputs.option_table import BY_KEY, SHORTHANDS, find_option
from napkinmath.inputs.option_table.batch import BATCH
from napkinmath.inputs.option_table.machines import PARALLEL
from napkinmath.inputs.option_table.model_and_method import METHOD, QUANTIZATION
from napkinmath.inputs.option_table.option import flag_of
from napkinmath.inputs.option_table.training_step import STEP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.foreign import ForeignJob

# What scripts mean otherwise by such a name: a process's rank, the loss's name, a host's address.
_MEANS_OTHERWISE = frozenset(
    [
        *("rank", "alpha", "dropout", "targets", "merge", "adapters", "lengths", "clip"),
        *("loss", "stack", "eval", "generate", "prefetch", "wrap", "network", "host"),
        *("image", "images", "min_pixels", "max_pixels", "dataloader_workers", "kernels"),
        *("dataloader_num_workers", "samples_per_s_per_worker", "host_ram", "resident"),
    ]
)
_CHANGES_A_STEP = frozenset(
    option.key for group in (METHOD, QUANTIZATION, BATCH, STEP, PARALLEL) for option in group
)
# Words for a sharding, and what a batch is called that is no step's.
_SHARDS = ("enable_fsdp", "use_fsdp", "fsdp", "use_deepspeed", "zero_stage", "sharding_strategy")
_NO_STEP = ("eval", "val", "test", "infer", "predict", "generat", "buffer", "map", "token")
# A mesh of so many ranks and a row of the catalog mean the same in every script.
UNMISTAKABLE = ("tp", "pp", "cp", "ep", "optimizer")


def option_of(name: str) -> str:
    """The option that changes a training step and has this name; '' where none has."""
    word = name.rpartition(".")[2].lower().replace("-", "_")
    if word in SHORTHANDS:
        key = SHORTHANDS[word][0]
    elif word in BY_KEY["data_parallel"].named_choices() or word in _SHARDS:
        key = "data_parallel"
    elif "batch_size" in word and not any(part in word for part in _NO_STEP):
        key = "bs"
    else:
        option = find_option(word)
        key = "" if option is None else option.key
    return key if key in _CHANGES_A_STEP and word not in _MEANS_OTHERWISE else ""


def left_open(name: str, value: object, given: Mapping[str, object]) -> JobKey | None:
    """What becomes of a key that no reader knows and that has the name of an option, beside those
    that are `given`; None for another name."""
    option = option_of(name)
    if not option:
        return None
    if option in given:
        return JobKey(name=name, use=KeyUse.PRICED)
    return JobKey(
        name=name,
        use=KeyUse.NOT_PRICED,
        why=f"what a script makes of {shown(value)} is not known; add {flag_of(option)}",
        memory=Difference.EITHER,
        time=Difference.EITHER,
        option=option,
    )


def take_own_words(job: ForeignJob) -> None:
    """Gives the options that a script's own words say beyond doubt."""
    for key in UNMISTAKABLE:
        value, option = job.content.get(key), find_option(key)
        if value is None or option is None:
            continue
        try:
            option.read(value)
        except InputError:
            continue  # left open, by name
        job.give(key, job.take(key))
        job.note(f"{key} {shown(value)} taken as {option.flag}")
