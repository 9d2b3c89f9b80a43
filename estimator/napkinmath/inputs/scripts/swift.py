"""ms-swift's launches: which of its programs a script is, and whether its words are those of 2023
and 2024 or of today (modelscope/ms-swift swift/cli/main.py at v2.6.1 and 3602360a5623)."""

from __future__ import annotations

import re

from napkinmath.inputs.scripts import launchers
from napkinmath.inputs.scripts.source import PIXELS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.scripts.shell_words import Command
    from napkinmath.inputs.scripts.source import Source
    from napkinmath.inputs.scripts.words import Arguments

VERBS = ("sft", "rlhf", "pt", "dpo", "orpo", "simpo")
TODAY, BEFORE = ("ms-swift",), ("ms-swift-2",)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PREFERENCES = VERBS[3:]
_PROGRAM = re.compile(rf"(?:^|/)(?:llm_|swift/cli/(?:_megatron/)?)({'|'.join(VERBS)})\.py$")


def verb_of(target: str) -> str:
    """'sft' of `llm_sft.py` and `swift/cli/sft.py`; '' of another script."""
    found = _PROGRAM.search(target.replace("\\", "/"))
    return found[1] if found else ""


def program_of(target: str) -> str:
    """'megatron' of the scripts that its command starts, else 'swift'."""
    return "megatron" if "/_megatron/" in target.replace("\\", "/") else "swift"


def kinds_of(given: Arguments, base: Mapping[str, object]) -> tuple[str, ...]:
    """The reader of the words: version 3 has `--model` for `--model_type` and
    `--model_id_or_path`, and `--train_type` for `--sft_type`."""
    keys = {*given.content, *given.computed, *base}
    before = {"sft_type", "model_id_or_path", "model_type"} & keys
    return BEFORE if before and "model" not in keys else TODAY


def name_command(given: Arguments, base: Mapping[str, object], verb: str) -> None:
    """What the command itself says: `swift dpo` is `swift rlhf --rlhf_type dpo`, which is rlhf's
    default too; `swift pt` trained every parameter before version 3."""
    said: dict[str, object] = {}
    if verb in ("rlhf", *_PREFERENCES):
        said["rlhf_type"] = "dpo" if verb == "rlhf" else verb
    elif verb == "pt" and kinds_of(given, base) == BEFORE:
        said = {"sft_type": "full", "target_modules": "ALL"}
    for key, value in said.items():
        if key not in base and key not in given.computed:
            given.content.setdefault(key, value)


def name_pixels(given: Arguments, command: Command) -> None:
    """The sizes of images that ms-swift reads from its environment, as keys of its own."""
    for name in PIXELS:
        if name in command.settings:
            given.set(name, [command.settings[name]])


def name_visible(given: Arguments, command: Command, started: list[Source]) -> None:
    """GPUs without processes of their own: the layers of a process lie on several in turn."""
    seen = launchers.visible_gpus(command.settings)
    each, made = launchers.number_of(command.settings, "NPROC_PER_NODE")
    for source in started:
        each, made = source.content.get("gpus"), source.computed.get("gpus")
        nodes = source.content.get("nodes")
        each = each // nodes if isinstance(each, int) and isinstance(nodes, int) else each
    if seen and made is None and seen > (each if isinstance(each, int) else 1):
        given.content[_VISIBLE] = seen
