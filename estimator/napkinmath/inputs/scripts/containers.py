"""Launch lines within files of other programs: Makefiles, Dockerfiles, a README's code, and YAML of
schedulers, containers and workflows.

Each becomes a shell's text on the lines where it stood, and is read as a shell script is.
"""

from __future__ import annotations

import os
import re
import shlex

from napkinmath.base import values
from napkinmath.base.errors import InputError
from napkinmath.inputs.scripts.source import DOCKER, MAKE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# Keys of YAML whose values are a shell's text, or the words of one command.
_TEXTS = ("run", "commands", "command", "script", "cmd", "args", "entrypoint")
_SETTINGS = ("env", "envs", "environment", "variables")
_SHELL_BLOCK = re.compile(r"^\s*(?:```|~~~)\s*(\w*)")
_IS_SHELL = ("bash", "sh", "shell", "console", "zsh")
_SET = re.compile(r"^\s*(?:export\s+|override\s+)?(\w+)\s*(?:\?=|::?=|=)\s*(.*)$")


def shell_of_file(text: str, path: str) -> str:
    """The commands of such a file as a shell's text, line by line."""
    form = _form_of(path)
    return text if form is None else "\n".join(form(text.splitlines()))


def shell_of_yaml(content: Mapping[str, object], text: str) -> str:
    """The commands that YAML runs, with what it sets for them; '' where it runs none."""
    lines = text.splitlines()
    made = [""] * len(lines)
    found = [*_runs_of(content)]
    at = 0
    for piece in found:
        first = next((line.strip() for line in piece.splitlines() if line.strip()), "")
        here = (i for i in range(at, len(lines)) if first and first in lines[i])
        start = next(here, at)
        pieces = piece.splitlines()
        made += [""] * max(0, start + len(pieces) - len(made))
        for index, line in enumerate(pieces):
            spot = start + index
            made[spot] = f"{made[spot]}; {line}" if made[spot].strip() else line
        at = start + len(pieces)
    if not any(line.strip() for line in made):
        return ""
    settings = "; ".join(f"{name}={shlex.quote(value)}" for name, value in _settings_of(content))
    machines = "; ".join(f"{name}={value}" for name, value in _machines_of(content))
    head = "; ".join(part for part in (machines, settings) if part)
    made[0] = f"{head}; {made[0]}" if head and made[0].strip() else head or made[0]
    return "\n".join(made)


def _form_of(path: str) -> Callable[[list[str]], list[str]] | None:
    name = os.path.basename(path).lower()
    if name.startswith(MAKE) or name.endswith(".mk"):
        return _of_make
    if name.startswith(DOCKER) or name.endswith(".dockerfile"):
        return _of_docker
    return _of_page if name.endswith(".md") else None


# ---------------------------------------------------------------- make, docker, pages


def _of_make(lines: list[str]) -> list[str]:
    """Recipes without make's own marks, and its variables as a shell's."""
    made, continued = list[str](), ""
    for line in lines:
        is_recipe = line.startswith(("\t", "    ")) and bool(line.strip())
        if continued:
            text = _shells(line.strip() if continued == "set" else line)
        elif is_recipe:
            text = _shells(line.strip().lstrip("@-+"))
        elif (set_here := _SET.match(line)) and not line.startswith("#"):
            value = set_here[2].strip()
            text = f"{set_here[1]}={_shells(value)}"
            text = text if value.endswith("\\") else _quoted(set_here[1], _shells(value))
        else:
            text = ""
        made.append(text)
        continued = ("recipe" if is_recipe else "set") if text.endswith("\\") else ""
    return made


def _quoted(name: str, value: str) -> str:
    value = value.partition(" #")[0].strip()
    return f'{name}="{value}"' if '"' not in value else f"{name}={shlex.quote(value)}"


def _shells(text: str) -> str:
    """make's `$(NAME)`, `$(shell ...)` and `$$` as a shell writes them."""
    text = re.sub(r"(?<!\$)\$\((\w+)\)", r"${\1}", text)
    return re.sub(r"(?<!\$)\$\(shell ", "$(", text).replace("$$", "$")


def _of_docker(lines: list[str]) -> list[str]:
    """RUN, CMD and ENTRYPOINT; ENV and ARG set. A CMD of words alone follows its ENTRYPOINT."""
    made, verb, started = list[str](), "", ""
    for line in lines:
        if verb != "":  # continued
            text = line
        else:
            word, _, rest = line.strip().partition(" ")
            verb, rest = word.upper(), rest.strip()
            if verb in ("ENV", "ARG"):
                name, blank, value = rest.partition(" ")
                plain = blank and "=" not in name
                text = f"export {name}={shlex.quote(value.strip())}" if plain else f"export {rest}"
                text = text if "=" in text else ""
            elif verb in ("RUN", "CMD", "ENTRYPOINT"):
                words = _words_of(rest)
                text = rest if words is None else shlex.join(words)
                if verb == "CMD" and words is not None:
                    text = f"{started} {text}"
                elif verb == "ENTRYPOINT" and words is not None:
                    started = text
            else:
                text = ""
        made.append(text)
        verb = verb if line.rstrip().endswith("\\") and text else ""
    return made


def _words_of(text: str) -> list[str] | None:
    """The words of `["python", "train.py"]`; None for a shell's text."""
    from napkinmath.base.json_text import loads

    try:
        found: object = loads(text)
    except ValueError:
        return None
    return [str(word) for word in values.listed(found)] if _is_list(found) else None


def _of_page(lines: list[str]) -> list[str]:
    """Blocks of shell code."""
    made, inside, is_shell = list[str](), False, False
    for line in lines:
        fence = _SHELL_BLOCK.match(line)
        if fence:
            inside, is_shell = not inside, not inside and fence[1].lower() in _IS_SHELL
        kept = inside and is_shell and not fence
        made.append(line.strip().removeprefix("$ ") if kept else "")
    return made


# ---------------------------------------------------------------- YAML


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _inside(content: object) -> Iterator[tuple[str, object, Mapping[str, object]]]:
    """Every key, its value and its mapping, depth first."""
    if values.is_mapping(content):
        mapping = values.mapping(content, "")
        for key, value in mapping.items():
            yield key, value, mapping
            yield from _inside(value)
    elif _is_list(content):
        for value in values.listed(content):
            yield from _inside(value)


def _runs_of(content: Mapping[str, object]) -> Iterator[str]:
    for key, value, around in _inside(content):
        if key not in _TEXTS or (key == "args" and ("command" in around or "entrypoint" in around)):
            continue
        if isinstance(value, str):
            yield value
        elif _is_list(value):
            words = [str(word) for word in values.listed(value)]
            if key in ("command", "entrypoint", "args"):
                more = around.get("args" if key == "command" else "command")
                words += map(str, values.listed(more)) if _is_list(more) else ()
                yield shlex.join(words)
            else:
                yield "\n".join(words)


def _settings_of(content: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key, value, _ in _inside(content):
        if key not in _SETTINGS:
            continue
        if values.is_mapping(value):
            pairs = [*values.mapping(value, key).items()]
        else:
            pairs = [_pair(one) for one in values.listed(value)]
        for name, setting in pairs:
            if name.isidentifier() and isinstance(setting, (str, int, float)):
                yield name, " ".join(str(setting).split())


def _pair(one: object) -> tuple[str, object]:
    """`{name: A, value: 1}` of Kubernetes, or `A=1`."""
    if values.is_mapping(one):
        mapping = values.mapping(one, "env")
        return str(mapping.get("name", "")), mapping.get("value")
    name, _, value = str(one).partition("=")
    return name, value


def _machines_of(content: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """What SkyPilot and dstack tell a run of its machines (docs.skypilot.co running-jobs/
    environment-variables; dstack docs reference/environment-variables)."""
    nodes = content.get("num_nodes", content.get("nodes", 1))
    each = _number(_asked(content))
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        yield "SKYPILOT_NUM_NODES", nodes
        yield "DSTACK_NODES_NUM", nodes
        if each:
            yield "DSTACK_GPUS_NUM", nodes * each
    if each:
        yield "SKYPILOT_NUM_GPUS_PER_NODE", each
        yield "DSTACK_GPUS_PER_NODE", each


# SkyPilot's A100 has 40 GB, its A100-80GB 80 (docs.skypilot.co compute/gpus); dstack takes either as A100.
_OF_SKYPILOT = {"A100": "A100-40"}
_OF_SEVERAL_SIZES = ("A100", "V100")


def gpu_of_yaml(content: Mapping[str, object]) -> str:
    """The GPU that `resources` of SkyPilot or dstack ask for: `H100` of `H100:8`, `{H100: 8}` or
    `{name: H100}`; '' where it is a choice, a size or not said."""
    from napkinmath.catalog.gpus import find_gpu

    asked, resources = _asked(content), content.get("resources")
    if values.is_mapping(asked):
        mapping = values.mapping(asked, "gpu")
        asked = mapping.get("name", next(iter(mapping), ""))
    name = asked.partition(":")[0] if isinstance(asked, str) else ""
    if values.is_mapping(resources) and "accelerators" in values.mapping(resources, "resources"):
        name = _OF_SKYPILOT.get(name, name)
    elif name in _OF_SEVERAL_SIZES:
        return ""
    try:
        find_gpu(name)
    except InputError:
        return ""
    return name


def _asked(content: Mapping[str, object]) -> object:
    resources = content.get("resources")
    asked = values.mapping(resources, "resources") if values.is_mapping(resources) else {}
    return asked.get("accelerators", asked.get("gpu"))


def _number(asked: object) -> int:
    """GPUs of `H100:8`, `80GB:8`, `{H100: 8}` or `{count: 8}`; 0 where it is a range or not
    said."""
    if values.is_mapping(asked):
        mapping = values.mapping(asked, "gpu")
        number = mapping.get("count", next(iter(mapping.values()), None))
        return number if type(number) is int else 0
    parts = str(asked).split(":")[1:] if isinstance(asked, str) else []
    return int(parts[-1]) if parts and parts[-1].isdecimal() else int(bool(isinstance(asked, str)))
