"""Keywords of `napkinmath.estimate()`: every option of the table by its key, beside the fields of a
TrainConfig."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.config.train_config import TrainConfig
from napkinmath.inputs.asked import model_and_training
from napkinmath.inputs.hardware_options import (
    allocator_text,
    calibration_on,
    cluster_of,
    machines,
)
from napkinmath.inputs.option_table import find_option, nearest, spelled_out
from napkinmath.inputs.option_table.option import KEYWORD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.calibration.calibration import Calibration
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.hardware import Hardware
    from napkinmath.ir.model_spec import ModelSpec

_FIELDS = TrainConfig.__record_fields__


class Asked(Record):
    """What keywords say: the arguments of an estimate, and the options among them."""

    spec: ModelSpec
    config: TrainConfig
    hardware: Hardware | Cluster | None
    allocator: str
    calibration: Calibration | None
    options: Mapping[str, object]
    notes: tuple[str, ...]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not isinstance(value, Enum)


def is_field(name: str, value: object) -> bool:
    """Whether a keyword is a field of a TrainConfig as it stands: text for one that is a record or
    an enumeration is an option's value."""
    return name in _FIELDS and (
        not _is_text(value) or name in ("optimizer", "stack") or find_option(name) is None
    )


def read_keywords(model: object, keywords: Mapping[str, object]) -> Asked:
    """Reads keywords among which there is an option. Raises InputError for one that is unknown, for
    two that say the same thing, and for several GPUs."""
    # Text is a flag's here, also where a field takes it: what is chosen by it is chosen alike.
    fields = {
        name: value
        for name, value in keywords.items()
        if is_field(name, value) and (not _is_text(value) or find_option(name) is None)
    }
    options = _options({n: v for n, v in keywords.items() if n not in fields})
    for key, option in ((key, find_option(key)) for key in options):
        whole = "" if option is None else option.sets.partition(".")[0]
        if whole in fields:
            raise InputError(
                f"{key}={shown(options[key])} and {whole}={shown(fields[whole])} both say"
                f" {whole}; give one of them"
            )
    read, notes = _model(model, options), list[str]()
    spec, config = model_and_training(options, notes, read)
    found = machines(options)
    if len(found) > 1:
        raise InputError(
            f"gpu={shown(options['gpu'])} names {len(found)} GPUs; an estimate is of one, call it"
            " once for each"
        )
    changes: dict[str, Any] = fields
    return Asked(
        spec=spec,
        config=config.replace(**changes) if fields else config,
        hardware=cluster_of(found[0], options),
        allocator=allocator_text(options),
        calibration=calibration_on(found[0], options, notes),
        options=options,
        notes=tuple(notes),
    )


def _options(keywords: Mapping[str, object]) -> dict[str, object]:
    """The same by the keys of the table; one that is None is not given."""
    options: dict[str, object] = {}
    for given, said in spelled_out(keywords).items():
        name, value = _in_our_words(given, said)
        option = find_option(name)
        if option is None or not option.is_at(KEYWORD):
            from napkinmath.inputs.option_table.trainers_words import doubt

            why = doubt(name) if option is None else f": {option.away[KEYWORD]}"
            near = "" if why else nearest(name, KEYWORD, _FIELDS)
            raise InputError(
                f"keyword {name}={shown(value)} is unknown{why}{near}; keywords are the fields of"
                " TrainConfig and the flags of `estimate --help`"
            )
        if option.key in options:
            raise InputError(f"{option.key} is given twice, again as {given}; keep one")
        if value is not None:
            options[option.key] = value
    return options


def _in_our_words(name: str, value: object) -> tuple[str, object]:
    """A trainer's keyword (lora_r=8) as the option that it is here."""
    if find_option(name) is not None:
        return name, value
    from napkinmath.inputs.option_table.trainers_words import as_option

    return as_option(name, value)


def _model(model: object, options: dict[str, object]) -> ModelSpec | None:
    """The model where it is no option's text; a name and a config join the options."""
    from napkinmath.ir.model_spec import ModelSpec

    if isinstance(model, ModelSpec):
        return model
    if model is not None:
        options["model" if isinstance(model, str) else "config"] = model
    return None
