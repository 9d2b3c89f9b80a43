"""Launch lines of OLMo-core's scripts of supervised fine-tuning."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.olmo_core import CLUSTER, SCRIPT, SCRIPTS
from napkinmath.inputs.scripts.source import Source
from napkinmath.inputs.scripts.words import arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.launchers import Launched

_FOLDER = "scripts/train/sft"
_TRAINS = ("train", "launch")
_PLACES = {1: "run_name", 2: "checkpoint", 3: CLUSTER}


def olmo_core_sources(found: Launched, path: str) -> list[Source] | None:
    """The source of `SCRIPT train RUN CHECKPOINT CLUSTER --key=value ...`; none for a command that
    trains nothing, None for another script.
    Raises InputError for a script of its folder that there are no rules for."""
    folder, _, name = found.target.rpartition("/")
    stem = name.removesuffix(".py")
    if stem not in SCRIPTS:
        if folder.endswith(_FOLDER):
            raise InputError(
                f"there are no rules for what OLMo-core's {shown(name)} trains; read are"
                f" {', '.join(SCRIPTS)}; give the run with flags (`estimate --help`)"
            )
        return None
    places = [word.text for word in found.words[: 1 + len(_PLACES)]]
    if not places or places[0] not in _TRAINS:
        return []
    given = arguments(found.words[len(places) :])
    content = {**given.content, SCRIPT: stem}
    content |= {_PLACES[at]: text for at, text in enumerate(places) if at in _PLACES}
    return [
        Source(
            path=path,
            content={key: it for key, it in content.items() if key not in given.computed},
            tool=name,
            kind="olmo-core",
            lines=given.lines,
            computed=given.computed,
        )
    ]
