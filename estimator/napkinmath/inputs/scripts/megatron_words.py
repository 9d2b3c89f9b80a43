"""Megatron-LM's arguments in a launch line, with what the script sets and writes for them."""

from __future__ import annotations

from napkinmath.inputs.megatron import kind_of_arguments
from napkinmath.inputs.megatron_deepspeed import ENGINE_KEYS
from napkinmath.inputs.megatron_mesh import MACHINES
from napkinmath.inputs.scripts.source import Source
from napkinmath.inputs.scripts.words import arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.launchers import Launched
    from napkinmath.inputs.scripts.shell_words import Command


def megatron_source(found: Launched, command: Command, path: str) -> Source:
    """The arguments of a program of Megatron-LM's, and the processes of its launcher."""
    given = arguments(found.words)
    content: dict[str, object] = {"megatron_arguments": True}
    for name in MACHINES:
        word = command.settings.get(name)
        if word is not None and not word.source:
            content[name] = word.text
    for source in found.sources:
        gpus, nodes = source.content.get("gpus"), source.content.get("nodes", 1)
        if isinstance(gpus, int) and isinstance(nodes, int):
            content |= {"nproc_per_node": gpus // nodes, "nnodes": nodes}
    content |= given.content
    engine = any(key in content for key in ENGINE_KEYS)
    return Source(
        path=path,
        kind=kind_of_arguments({**content, **given.computed}),
        content=content,
        text=found.target,
        lines={**dict.fromkeys(("nproc_per_node", "nnodes"), found.line), **given.lines},
        computed=given.computed,
        table="megatron_deepspeed" if engine else "",
    )
