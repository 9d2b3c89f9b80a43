"""A config of somebody's own training script, in sections or flat, whose keys are the Trainer's and
PEFT's own or their usual names."""

from __future__ import annotations

import os

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.scripts.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# The Trainer's own name: what has it was written around transformers' Trainer or TRL.
_MARK = "per_device_train_batch_size"
_MODEL = "model_name_or_path"
# What people call the file that a config of theirs lies over.
_BUILDS_ON = ("extends", "_base_", "base_config", "inherits", "inherit_from")
# What a section's own name says of its keys: 'lora: {r: 16}'.
_OF_LORA = {
    "r": "lora_r",
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
}
_OF_MODEL: dict[str, str] = dict.fromkeys(
    (
        *("name_or_path", "model_name", "model_id", "base_model", "pretrained", "name", "id"),
        *("path", "hf_model_ckpt"),
    ),
    _MODEL,
)


# Sections of another program than the training.
_ELSEWHERE = (
    "inference",
    "generation",
    "eval",
    "evaluation",
    "test",
    "testing",
    "serving",
    "export",
)


def own_config(content: Mapping[str, object], kind: str, path: str) -> Source | None:
    """The same as a file of the Trainer's, for a file of no tool; None where it is none either."""
    if kind not in ("own", "trainer"):
        return None
    content, named = _over_its_base(content, path)
    if _MODEL in content and (_MARK in content or not _in_a_section(content)):
        return Source(path=path, content=content, kind=kind, notes=named) if named else None
    flat, told = _flattened(content)
    if _MARK not in flat:
        return None
    from napkinmath.inputs.scripts.usual_names import by_usual_names
    from napkinmath.inputs.scripts.words import Arguments

    given = Arguments()
    given.content = flat
    told += by_usual_names(given)
    if _MODEL not in flat or not isinstance(flat[_MODEL], str):
        return None
    if any(key.startswith("lora_") for key in flat):
        flat.setdefault("use_peft", True)
    notes = (f"{path.rpartition('/')[2]}: {', '.join(told)}",) if told else ()
    return Source(path=path, content=flat, kind="trainer", notes=(*named, *notes))


def _over_its_base(
    content: Mapping[str, object], path: str
) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """The keys over those of the file that `extends` names, and what is to be said of it: a script
    reads the path from its own folder, so that one that is not beside the config is named."""
    key = next((name for name in _BUILDS_ON if isinstance(content.get(name), str)), None)
    if key is None:
        return content, ()
    base, here = shown(content[key]), path.rpartition("/")[2]
    if not os.path.isfile(os.path.join(os.path.dirname(path), str(content[key]))):
        return content, (f"{here} builds on {base}, which is not beside it: its keys are not read",)
    from napkinmath.inputs.inheritance import with_parents

    return with_parents(content, path, "somebody's", key=key), (f"{here} lies over {base}",)


def _in_a_section(content: Mapping[str, object]) -> bool:
    """Whether the batch stands in a section of the file."""
    return any(_MARK in section for k, v in content.items() for _, section in _sections(k, v))


def _sections(name: str, value: object) -> list[tuple[str, dict[str, object]]]:
    """A section, and those within it (georgian-io/LLM-Finetuning-Toolkit: 'training:
    {training_args: {...}}'); keywords of one argument stay with it."""
    if not values.is_mapping(value):
        return []
    own: dict[str, object] = {}
    inner: list[tuple[str, dict[str, object]]] = []
    for key, one in values.mapping(value, name).items():
        if values.is_mapping(one) and not key.endswith(("_kwargs", "_config")):
            inner += _sections(f"{name}.{key}", one)
        else:
            own[key] = one
    return [(name, own), *([] if is_off(own.get("enabled", True)) else inner)]


def _flattened(content: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The keys of sections beside those of the file, by their last names, and what they are taken
    as; a name that two sections give with two values keeps its section."""
    flat = {key: value for key, value in content.items() if not values.is_mapping(value)}
    sections = [found for name, value in content.items() for found in _sections(name, value)]
    given: dict[str, list[object]] = {}
    for name, section in sections:
        for key, value in section.items():
            given.setdefault(key, []).extend([] if _is_elsewhere(name) else [value])
    told: list[str] = []
    for name, section in sections:
        if is_off(section.get("enabled", True)):
            continue
        word = name.lower()
        if _is_elsewhere(name):
            flat |= {f"{name}.{key}": value for key, value in section.items()}
            continue
        renamed: dict[str, str] = {}
        if "lora" in word or "peft" in word or "adapter" in word:
            renamed = _OF_LORA
        elif word in ("model", "base_model"):
            renamed = _OF_MODEL
        for key, value in section.items():
            known = renamed.get(key, key)
            several = known == key and any(other != value for other in given[key])
            if several or flat.get(known, value) != value:
                flat[f"{name}.{key}"] = value
                continue
            flat[known] = value
            if known != key:
                told.append(f"{name}.{key} taken as {known}")
    return flat, told


def _is_elsewhere(section: str) -> bool:
    return section.lower().partition(".")[0] in _ELSEWHERE
