"""Several files that are one run: a trainer's file, accelerate's and DeepSpeed's beside it.

What a file says counts before what its tool takes by itself; of two that say something, the
trainer's file comes before accelerate's and that before DeepSpeed's, as transformers 5.23
training_args.py and integrations/deepspeed.py have it. Our own file comes before them all.
"""

from __future__ import annotations

import os

from napkinmath.base.errors import shown
from napkinmath.base.record import Record
from napkinmath.config.job_keys import Difference, JobKeys, KeyUse, Origin
from napkinmath.config.run_length import RunLength
from napkinmath.inputs.method_options import ADAPTER_OPTIONS, QUANT_OPTIONS
from napkinmath.inputs.option_table import BY_KEY
from napkinmath.inputs.option_table.option import flag_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_RANKS = {"deepspeed": 0, "accelerate": 1, "own": 3}
_TRAINER = 2
# Options that mean something only beside another one: they stand and fall with it.
_SHARDING = (
    *("sharding", "reshard", "shard_size", "wrap", "forward_prefetch", "backward_prefetch"),
    *("limit_all_gathers", "hpz", "mics", "broadcast_loading", "full_state_dict", "zero_options"),
    "sync_each_batch",
)
_SPREAD = ("data_parallel", "offload", "nvme", *_SHARDING)
_TOGETHER = {
    "data_parallel": _SHARDING,
    "method": ADAPTER_OPTIONS,
    "quant": QUANT_OPTIONS,
}


class Reading(Record):
    """One file as options."""

    path: str
    kind: str
    options: Mapping[str, object]
    said: Mapping[str, tuple[str, int]] = {}
    """Option -> the key that says it, and its line; what is absent its tool takes by itself."""
    elsewhere: Mapping[str, str] = {}
    """Keys that another file says -> its path."""
    is_flag: bool = False
    """Whether a flag names the file, which then says more than the others how a step is spread."""

    def rank(self, option: str) -> int:
        """How strongly it says an option, against other files. DeepSpeed's optimizer is built
        instead of the Trainer's (integrations/deepspeed.py deepspeed_optim_sched)."""
        engine = self.kind == "deepspeed" and (
            option in ("optimizer", "zero_options") or (self.is_flag and option in _SPREAD)
        )
        strength = _TRAINER + 0.5 if engine else _RANKS.get(self.kind, _TRAINER)
        return int(10 * (strength + (10 if option in self.said else 0)))

    def origin(self, option: str) -> Origin:
        """Where it says an option."""
        key, line = self.said.get(option, ("", 0))
        value = self.options[option]
        file = self.elsewhere.get(key, self.path)
        return Origin(option=option, value=value, file=file, key=key, line=line)


def one_run(readings: list[Reading]) -> dict[str, object]:
    """The options of all files together, with `job_keys` of them all. The last of two files of one
    kind counts."""
    taken: dict[str, Reading] = {}
    differing: list[str] = []
    for reading in readings:
        for option in reading.options:
            if option == "job_keys":
                continue
            before = taken.get(option)
            if before is None:
                taken[option] = reading
                continue
            if (on := _checkpoints(option, before, reading)) is not None:
                taken[option] = on
                continue
            wins = reading.rank(option) >= before.rank(option)
            kept, other = (reading, before) if wins else (before, reading)
            differing += _difference(option, kept, other)
            taken[option] = kept
    _drop_what_lost(taken)
    options = {option: reading.options[option] for option, reading in taken.items()}
    origins = tuple(reading.origin(option) for option, reading in taken.items())
    return options | {"job_keys": _all_keys(readings, options, origins, differing)}


def _checkpoints(option: str, one: Reading, other: Reading) -> Reading | None:
    """The file that turns checkpointing on where the other's switch is off: FSDP's wrapper and the
    model's own method do not know of one another (accelerate 1.14 utils/fsdp_utils.py
    fsdp2_apply_ac; transformers trainer.py _inner_training_loop)."""
    if option != "checkpointing":
        return None
    on = [reading for reading in (one, other) if reading.options[option] != "none"]
    return on[0] if len(on) == 1 else None


def _drop_what_lost(taken: dict[str, Reading]) -> None:
    """Removes what means something only beside a choice that another file made otherwise."""
    for pair in (("zero", "data_parallel"), ("grad_accum", "global_batch")):
        if all(option in taken for option in pair):
            del taken[min(pair, key=lambda o: taken[o].rank(o))]
    for leader, others in _TOGETHER.items():
        for option in [o for o in others if o in taken and leader in taken]:
            loses = leader in taken[option].options and taken[option] is not taken[leader]
            if loses and not _alike(leader, taken[option], taken[leader]):
                del taken[option]


def _alike(option: str, one: Reading, other: Reading) -> bool:
    def plain(value: object) -> object:
        row = BY_KEY.get(option)
        try:
            return value if row is None else row.read(value)
        except ValueError:
            return value

    first, second = one.options[option], other.options[option]
    return first == second or str(plain(first)).lower() == str(plain(second)).lower()


def _difference(option: str, kept: Reading, other: Reading) -> list[str]:
    """A sentence where both files say an option themselves, and not the same."""
    both = option in kept.said and option in other.said
    if not both or option not in BY_KEY or _alike(option, kept, other):
        return []
    first, second = kept.origin(option), other.origin(option)
    return [
        f"{second.place} says {flag_of(option)} {shown(second.value)} and {first.place} says"
        f" {shown(first.value)}, which is priced; make the files agree, or add"
        f" {flag_of(option)}"
    ]


def _all_keys(
    readings: list[Reading],
    options: Mapping[str, object],
    origins: tuple[Origin, ...],
    differing: list[str],
) -> JobKeys:
    """The keys of all files; what one leaves open and another says is priced."""
    read = [(r, keys) for r in readings if isinstance(keys := r.options.get("job_keys"), JobKeys)]
    found = [keys for _, keys in read]
    keys = tuple(
        key.replace(use=KeyUse.PRICED, why="", memory=Difference.NONE, time=Difference.NONE)
        if key.use is KeyUse.NOT_PRICED
        and key.option in options
        and any(key.option in other.options for other in readings if other is not reading)
        else key
        for reading, one in read
        for key in one.keys
    )
    tools = list(dict.fromkeys(one.tool for one in found)) or ["napkinmath"]
    paths = [os.path.normpath(reading.path) for reading in readings]
    return JobKeys(
        tool=" and ".join(tools),
        path=" ".join(paths),
        keys=keys,
        origins=origins,
        run=next((one.run for one in found if one.run != RunLength()), RunLength()),
        workers=next((one.workers for one in found if one.workers), 0),
        engine=next((one.engine for one in found if one.engine), ""),
        differing=tuple(dict.fromkeys(differing)),
        by_unsloth=any(one.by_unsloth for one in found),
        follows_gpu=any(one.follows_gpu for one in found),
        transformers=next((one.transformers for one in found if one.transformers), ""),
    )
