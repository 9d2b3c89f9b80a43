"""A launch line's own Python script, where it lies beside the shell script: its literal defaults
and calls, with the line's words in place of its arguments. Nothing is run."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.known_keys import known_keys
from napkinmath.inputs.marks import kind_by_marks
from napkinmath.inputs.nearby import nearby
from napkinmath.inputs.scripts.source import Computed, Source
from napkinmath.inputs.scripts.usual_names import USUAL, by_usual_names
from napkinmath.inputs.scripts.words import Arguments
from napkinmath.models.config_file import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ast import Module
    from collections.abc import Mapping

    from napkinmath.inputs.scripts.python_run import Walk

_OF_OTHERS = ("base_model", "finetuning_type", "cutoff_len", "stage")
# Words that say how DeepSpeed shards, and in which type a loop computes.
_SHARDS = ("deepspeed", "deepspeed_config", "zero_stage", "ds_config", "deepspeed_config_file")
_TYPES = ("bf16", "fp16", "dtype", "torch_dtype", "precision", "mixed_precision", "amp", "half")
# What stands in any script that trains, or starts or imports one that does.
_TRAINING_WORDS = ("train", "Train", "backward", "subprocess", "os.system", "os.exec", "finetune")
_MOST_SCRIPT = 1 << 20
_MOST_WALKS = 24


def is_own(given: Arguments) -> bool:
    """Whether no reader but the Trainer's would know the words."""
    keys = {**given.content, **dict.fromkeys(given.computed, "")}
    return kind_by_marks(keys) is None and not any(key in keys for key in _OF_OTHERS)


def trains(source: Source) -> bool:
    """Whether keys are those of a trainer."""
    keys = {*source.content, *source.computed}
    return bool(
        keys & {"model_name_or_path", "base_model", "finetuning_type", "learning_rate"}
    ) or any(key.startswith("per_device_train") for key in keys)


def script_beside(target: str, script: str) -> str:
    """The path of the Python file that a line of `script` starts; '' where it is not here. It may
    lie in or below a folder above, from which the line is run."""
    if not target.endswith(".py"):
        return ""
    path = os.path.join(os.path.dirname(script), target)
    if not os.path.isfile(path):
        path = nearby(target, script)
    if os.path.isabs(target) and not os.path.isfile(path):  # of the machine it was written on
        path = os.path.join(os.path.dirname(script), os.path.basename(target))
    return os.path.normpath(path) if os.path.isfile(path) else ""


def never_trains(python: str) -> bool:
    """Whether a script's text has nothing that trains or that runs what does: one that edits the
    file it is given."""
    try:
        text = read_text(python, what="script")
    except InputError:
        return False
    return not any(word in text for word in _TRAINING_WORDS)


def launched_python(given: Arguments, python: str, path: str) -> list[Source]:
    """The sources of a line whose Python script makes a trainer; none where it makes none. Where
    it trains in a loop of its own, `given` takes the defaults of its arguments."""
    from napkinmath.inputs.scripts.python_job import sources_of_walk, walked
    from napkinmath.inputs.scripts.python_text import tree_of

    try:
        text = read_text(python, what="script")
        if len(text) > _MOST_SCRIPT:
            return []
        tree = tree_of(text, python)
        walk = walked(tree, python, _told(given))
    except InputError:
        return []  # the line alone is read
    if not walk.trainings:
        _take_defaults(given, walk, python)
        _name_loop(given, tree, python)
        return []
    sources = sources_of_walk(walk, tree, text, python)
    told = sources[-1]
    plain = sources_of_walk(walked(tree, python, {}), tree, text, python)[-1]
    return [*sources[:-1], _merged(told, plain, given, path, _Again(given, tree, text, python))]


class _Again:
    """The script read with one word of the line that nobody knows."""

    def __init__(self, given: Arguments, tree: Module, text: str, python: str) -> None:
        self.told, self.tree, self.text, self.python = _told(given), tree, text, python
        self.left = _MOST_WALKS

    def without(self, key: str) -> Source | None:
        """What the script says then; None where that was asked often enough."""
        from napkinmath.inputs.scripts.python_job import sources_of_walk, walked
        from napkinmath.inputs.scripts.python_values import Unknown

        self.left -= 1
        if self.left < 0:
            return None
        told = {**self.told, key: Unknown(source=key, line=0)}
        walk = walked(self.tree, self.python, told)
        return sources_of_walk(walk, self.tree, self.text, self.python)[-1]


def _told(given: Arguments) -> dict[str, object]:
    from napkinmath.inputs.scripts.python_values import Unknown

    computed = {k: Unknown(source=it.source, line=it.line) for k, it in given.computed.items()}
    return {**given.content, **computed}


def _merged(told: Source, plain: Source, given: Arguments, path: str, again: _Again) -> Source:
    """What the script makes of the line's words, and the words that it leaves to a library."""
    usual = Arguments()
    usual.content, usual.computed = dict(given.content), dict(given.computed)
    by_usual_names(usual, os.path.basename(told.path))
    content, lines = dict(told.content), dict(told.lines)
    computed, elsewhere = dict[str, Computed](), dict[str, str]()
    for key, it in told.computed.items():
        if key in usual.content:
            content[key] = usual.content[key]
        elif key in usual.computed or it.source in [c.source for c in given.computed.values()]:
            computed[key] = usual.computed.get(key, it)
        else:
            computed[key] = it.replace(source=f"{it.source} of {told.path}")
    for key, value in content.items():
        if plain.content.get(key, again) == value and given.content.get(key, again) != value:
            elsewhere[key] = told.path
        else:
            lines[key] = _line_of(key, value, given)
    known = known_keys(told.table).known
    for key in {**given.content, **given.computed}:
        if key in content or key in computed:
            continue
        less = None if key in known else again.without(key)
        if less is not None and (less.content, less.computed) != (told.content, told.computed):
            continue  # the script says what it is for
        if key in given.computed:
            computed[key] = given.computed[key]
        else:
            content[key] = given.content[key]
        lines[key] = given.lines.get(key, 0)
    notes = (*told.notes, f"the arguments and calls of {told.path} are read with the line's words")
    return told.replace(
        path=path,
        code=told.path,
        content=content,
        computed=computed,
        lines=lines,
        elsewhere=elsewhere,
        notes=notes,
    )


def _name_loop(given: Arguments, tree: Module, python: str) -> None:
    """Says that a script's own loop decides what the line's words do not say. Raises InputError
    where DeepSpeed runs it with a configuration that is in no word."""
    import ast

    called = {
        node.func.attr: ast.unparse(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    said = {**given.content, **given.computed}
    given.is_loop = "backward" in called
    if given.is_loop and (reason := _hidden(tree, said)):
        raise InputError(
            f"{shown(python)} trains in a loop of its own that is not read: it {reason}; give its"
            " choices with flags (`estimate --help`)"
        )
    if called.get("initialize") == "deepspeed" and not any(key in said for key in _SHARDS):
        raise InputError(
            f"{shown(python)} trains in a loop of its own, with DeepSpeed's choices in its code,"
            " which are not read; give its choices with flags (`estimate --help`)"
        )
    plain = "backward" in called and "accelerator" not in called["backward"]
    if plain and "initialize" not in called and not any(key in said for key in _TYPES):
        given.content["own_loop"] = os.path.basename(python)


def _hidden(tree: Module, said: Mapping[str, object]) -> str:
    """What a loop's code decides and no word of its line says, in words; '' for nothing."""
    from napkinmath.inputs.scripts.python_loops import freezes, shards

    if shards(tree) and not any(key.startswith("fsdp") for key in said):
        return "shards its model in its code"
    if freezes(tree) and not any("lora" in key or "peft" in key for key in said):
        return "freezes parameters in its code"
    return ""


def _line_of(key: str, value: object, given: Arguments) -> int:
    """The line of the word that says a key: its own, else one that has its value."""
    same = (name for name, it in given.content.items() if it == value)
    name = key if key in given.lines else next(same, "")
    return given.lines.get(name, 0)


def _take_defaults(given: Arguments, walk: Walk, python: str) -> None:
    """Puts the defaults of the script's arguments below the line's words, as far as their names
    are usual."""
    from napkinmath.inputs.scripts.python_values import is_plain

    said = {**given.content, **given.computed}
    for made in walk.parsed:
        adapts = any(made.keys.get(name) for name in ("lora_dim", "lora_r", "lora_rank"))
        for key, value in made.keys.items():
            if key in said or value is None or not is_plain(value) or key not in USUAL:
                continue
            if key == "lora_module_name" and not adapts:
                continue
            given.content[key] = value
            given.lines[key] = made.lines.get(key, made.line)
            given.elsewhere[key] = python
