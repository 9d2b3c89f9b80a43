"""export: a configuration as the file of another tool, with a note for everything that file cannot
say.

What the file says is not claimed but read back by the same readers that job files go through
(napkinmath.inputs), and compared.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.record import Record
from napkinmath.catalog.models import find_row
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import TrainConfig
from napkinmath.inputs.options import train_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Content = dict[str, object]

# kind -> (module, whether its files are read back as job files, whether it is JSON)
KINDS: dict[str, tuple[str, bool, bool]] = {
    "hf": ("napkinmath.exports.hf", True, False),
    "axolotl": ("napkinmath.exports.axolotl", True, False),
    "torchtune": ("napkinmath.exports.torchtune", True, False),
    "accelerate": ("napkinmath.exports.accelerate", False, False),
    "deepspeed": ("napkinmath.exports.deepspeed", False, True),
}
_SAME_PRICE = ("alpha",)  # fields that change neither bytes nor seconds


def export(config: TrainConfig, model: str, kind: str) -> tuple[str, list[str]]:
    """(the file's text, notes on what it cannot say). Raises InputError for an unknown kind or what
    the tool cannot run at all."""
    return export_with_meaning(config, model, kind)[:2]


def export_with_meaning(
    config: TrainConfig, model: str, kind: str
) -> tuple[str, list[str], TrainConfig | None]:
    """The same with the configuration that the file describes; None for the files that describe
    only how processes are started."""
    if kind not in KINDS:
        raise InputError(
            f"--export {shown(kind)} is unknown; use {', '.join(KINDS)}{suggest(kind, list(KINDS))}"
        )
    module, is_job, is_json = KINDS[kind]
    write: Callable[[TrainConfig, str], Content] = __import__(module, fromlist=["write"]).write
    content = write(config, hub_id(model))
    meant = read_back(content, kind) if is_job else None
    notes = differences(config, meant) if meant is not None else []
    notes = [f"{kind} cannot say {note}" for note in notes]
    if is_json:
        import json

        return json.dumps(content, indent=2) + "\n", notes, meant
    import yaml

    return yaml.safe_dump(content, sort_keys=False, default_flow_style=False), notes, meant


def hub_id(model: str) -> str:
    """The hub's id of a catalogued model, which other tools load; any other name, a path or an id
    of somebody's own as it was given. A name that is only close, such as that of an instruct
    version, stays too: the row's id has other weights."""
    row = find_row(model)
    found = str(row.get("hub_id") or "") if row is not None else ""
    again = find_row(found) if found else None
    if row is None or again is None or again["name"] != row["name"]:
        return model
    return found if model.lower() in (row["name"], found.rpartition("/")[2].lower()) else model


def read_back(content: Content, kind: str) -> TrainConfig:
    """The configuration that the readers of job files find in an exported file."""
    from napkinmath.inputs.foreign import ForeignJob

    module = {"hf": "trainer"}.get(kind, kind)
    read: Callable[[ForeignJob], dict[str, object]] = __import__(
        f"napkinmath.inputs.{module}", fromlist=["read"]
    ).read
    options = read(ForeignJob(kind, content, [], keys=module))
    return train_config(
        {key: value for key, value in options.items() if key not in ("model", "config")}
    )


def settled(config: TrainConfig) -> TrainConfig:
    """The same step with what 'auto' means spelled out and what has no price left at its
    default."""

    if config.optimizer == "auto":
        config = config.replace(optimizer=find_stack(config.stack).optimizer.default)
    if config.adapter is not None:
        config = config.replace(adapter=config.adapter.replace(alpha=0))
    return config


def differences(wanted: TrainConfig, found: TrainConfig) -> list[str]:
    """'optimizer_in_backward=True (the file means False)' for every field in which two
    configurations differ."""
    return [
        f"{name}={_word(ours)} (it means {_word(theirs)})"
        for name, ours, theirs in _differing(settled(wanted), settled(found), "")
    ]


def _differing(ours: object, theirs: object, path: str) -> list[tuple[str, object, object]]:

    if isinstance(ours, Record) and isinstance(theirs, Record) and type(ours) is type(theirs):
        other = dict(theirs.items())
        return [
            row
            for name, value in ours.items()
            for row in _differing(value, other[name], f"{path}.{name}" if path else name)
        ]
    return [] if ours == theirs else [(path, ours, theirs)]


def _word(value: object) -> str:
    return str(getattr(value, "value", value))
