"""The catalog of models: rows by name, alias or hub id.

models.json is a JSON array with one row a line. A name is found by scanning for its line and
parsing only that one; the last part of a path, in lower case, with each run of punctuation as one
dash, is what is compared.
"""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CATALOG = os.path.join(os.path.dirname(__file__), "models.json")
# Endings that say how a checkpoint was tuned or packed; its shapes are those of the model without
# them.
_TUNINGS = (
    "hf",
    "instruct",
    "chat",
    "base",
    "it",
    "bnb-4bit",
    "unsloth",
    "gptq",
    "awq",
    "gguf",
    "fp8",
    "int4",
    "int8",
    "4bit",
    "8bit",
    "dpo",
    "sft",
    "preview",
)


def find_row(name: str) -> dict[str, Any] | None:
    """The catalog's row of a name, alias or hub id; None if there is none."""
    key = name_key(name)
    if not key:
        return None
    with open(CATALOG, encoding="utf-8") as file:
        text = file.read()
    start = _exact_line(text, name.rpartition("/")[2].strip().lower())
    if start < 0:
        start = _tolerant_line(text, key)
    return None if start < 0 else _parse(text[start : text.index("\n", start)])


def load_rows() -> list[dict[str, Any]]:
    """Every row of the catalog, in the file's order."""
    import json

    with open(CATALOG, encoding="utf-8") as file:
        return json.load(file)


def name_key(name: str) -> str:
    """'meta-llama/Llama-3.1_8B' -> 'llama-3-1-8b': the last part of a path, lower case, each run of
    punctuation as one dash."""
    last = name.strip().rstrip("/").rpartition("/")[2].lower()
    return "-".join("".join(c if c.isalnum() else " " for c in last).split())


def joined_key(key: str) -> str:
    """'llama-2-7b' -> 'llama2-7b': dashes only between digits, so that 'llama2-7b' is the same but
    opt-1.3b is not opt-13b."""
    kept = [
        c
        for i, c in enumerate(key)
        if c != "-" or (key[i - 1].isdigit() and key[i + 1 : i + 2].isdigit())
    ]
    return "".join(kept)


def unknown_model(name: str) -> InputError:
    """The error for a name that is neither catalogued nor a path, with the nearest names."""
    names = [row_name for row_name, _, _ in _heads(_text())]
    nearest = suggest(name_key(name), names) or "; see `estimate models`"
    return InputError(
        f"model {shown(name)} is unknown{nearest} (a config.json, its folder, --arch or --hub with"
        " a hub id also work)"
    )


def _text() -> str:
    with open(CATALOG, encoding="utf-8") as file:
        return file.read()


def _exact_line(text: str, name: str) -> int:
    """Where the line begins that has the quoted name among name and aliases; -1 if none."""
    at = text.find(f'"{name}"')
    while at >= 0:
        start = text.rfind("\n", 0, at) + 1
        if at < text.find(',"hub_id"', start):
            return start
        at = text.find(f'"{name}"', at + 1)
    return -1


def _tolerant_line(text: str, key: str) -> int:
    """Where the line begins whose name, alias or hub id has that key, as written, with dashes
    joined, or without a tuning's ending; -1 if none."""
    by_key: dict[str, int] = {}
    by_joined: dict[str, int] = {}
    for _, names, start in _heads(text):
        for name in names:
            found = name_key(name)
            by_key.setdefault(found, start)
            by_joined.setdefault(joined_key(found), start)
    for candidate in _without_tunings(key):
        for index, wanted in ((by_key, candidate), (by_joined, joined_key(candidate))):
            if wanted in index:
                return index[wanted]
    return -1


def _heads(text: str) -> list[tuple[str, list[str], int]]:
    """(name, every name it goes by, start of its line) of each row, without parsing JSON."""
    heads: list[tuple[str, list[str], int]] = []
    start = 0
    for line in text.splitlines(keepends=True):
        if line.startswith('{"name":'):
            strings = line[: line.index(',"family"')].split('"')[1::2]
            names = [s for s in strings if s not in ("name", "aliases", "hub_id")]
            heads.append((names[0], names, start))
        start += len(line)
    return heads


def _without_tunings(key: str) -> list[str]:
    """The key, then with endings like '-instruct' and '-bnb-4bit' taken off one after the other,
    and 'meta-' from its front."""
    candidates = [key]
    shorter = key
    while True:
        ending = next((e for e in _TUNINGS if shorter.endswith("-" + e)), "")
        if not ending:
            break
        shorter = shorter[: -len(ending) - 1]
        candidates.append(shorter)
    return candidates + [c[5:] for c in candidates if c.startswith("meta-")]


def _parse(line: str) -> dict[str, Any]:
    from napkinmath.base.json_text import loads

    return loads(line.strip().rstrip(","))
