"""The one table of options: flags, `--help`, keys of job files, Python keywords and the page's
fields follow from it. A new option is a record in one of these files and a row of its test."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import suggest
from napkinmath.inputs.option_table.batch import BATCH
from napkinmath.inputs.option_table.machines import HARDWARE, PARALLEL
from napkinmath.inputs.option_table.model_and_method import METHOD, MODEL, QUANTIZATION
from napkinmath.inputs.option_table.option import CHOICE, COUNT, DOORS, NAMES, ON, Option
from napkinmath.inputs.option_table.rollouts import ROLLOUTS
from napkinmath.inputs.option_table.training_step import RUN, STEP, WORKLOAD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (
    ("model", MODEL),
    ("what is trained", METHOD),
    ("quantization of the base", QUANTIZATION),
    ("batch", BATCH),
    ("training step", STEP),
    ("the whole run", RUN),
    ("workload", WORKLOAD),
    ("rollouts", ROLLOUTS),
    ("hardware", HARDWARE),
    ("many GPUs", PARALLEL),
)
OPTIONS = tuple(option for _, options in GROUPS for option in options)
BY_KEY = {option.key: option for option in OPTIONS}
BY_NAME = BY_KEY | {alias: option for option in OPTIONS for alias in option.aliases}
SHORTHANDS = {name: (o.key, value) for o in OPTIONS for name, value, _ in o.shorthands}
"""Flags that are one value of an option."""
MODEL_WAYS = tuple(o.key for o in MODEL if o.kind not in (ON, CHOICE))
"""Ways to name a model."""
MODEL_KEYS = (*MODEL_WAYS, "task")
"""What says which model it is, less `hub`."""
MACHINE_KEYS = (
    "gpus",
    *(o.key for o in OPTIONS if o.sets.startswith(("hardware.", "cluster.", "estimate.calib"))),
)
"""What says which machine it is."""
# Whole numbers, which a range of a sweep may run over, and what divides several of them by ';'.
COUNTS = frozenset(o.key for o in OPTIONS if o.kind == COUNT) | {"gpus"}
LISTS = frozenset(o.key for o in OPTIONS if o.kind == NAMES or o.commas)


def find_option(name: str) -> Option | None:
    """The option of a key or alias, written with dashes or underscores."""
    return BY_NAME.get(name.strip().lower().replace("-", "_"))


def spelled_out(given: Mapping[str, object]) -> dict[str, object]:
    """Keys and keywords with each shorthand as a value of its option (qlora=True: method qlora);
    one that is off is not given."""
    found, short = dict[str, object](), list[tuple[str, str]]()
    for name, value in given.items():
        key = name.strip().lower().replace("-", "_")
        if key not in SHORTHANDS or not isinstance(value, (bool, str)):
            found[name] = value
        elif values.switch(value, key):
            short.append(SHORTHANDS[key])
    for key, value in short:
        said = found.get(key, ())
        found[key] = [*(said if isinstance(said, (list, tuple)) else (said,)), value]
    return found


def keys_at(door: str) -> frozenset[str]:
    """Keys of the options that a door has."""
    assert door in DOORS
    return frozenset(option.key for option in OPTIONS if option.is_at(door))


def nearest(name: str, door: str, more: Iterable[str] = ()) -> str:
    """'; did you mean rank?' for a misspelt name at a door, or ''."""
    known = [known for known, option in BY_NAME.items() if option.is_at(door)]
    return suggest(name.replace("-", "_"), [*known, *more])


def fields_of(options: Mapping[str, object], record: str) -> dict[str, object]:
    """The fields of a record ('adapter', 'parallel.zero', '' for the TrainConfig itself) that
    single options set. Raises InputError for a value that cannot be understood."""
    found: dict[str, object] = {}
    for key, value in options.items():
        option = BY_KEY.get(key)
        if option is not None and not option.joint:
            path, _, field = option.sets.rpartition(".")
            if path == record:
                found[field] = option.read(value)
    return found


def rivals(key: str) -> tuple[str, ...]:
    """Other options that set the same field (--global-batch and --grad-accum): one of them is
    given."""
    option = BY_KEY.get(key)
    if option is None or not option.sets:
        return ()
    return tuple(o.key for o in OPTIONS if o.sets == option.sets and o.key != key)


def keys_of(record: str) -> tuple[str, ...]:
    """Keys of the options that set fields of a record or of its parts."""
    return tuple(o.key for o in OPTIONS if o.sets.startswith(f"{record}."))
