"""The catalog of models: rows by name, alias or hub id.

models.json is a JSON array with one row a line. A name is found by scanning for its line and
parsing only that one; the last part of a path, in lower case, with each run of punctuation as one
dash, is what is compared.
"""

from __future__ import annotations

import os
from functools import lru_cache

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.base.values import refuse_several

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CATALOG = os.path.join(os.path.dirname(__file__), "models.json")


def find_row(name: str) -> dict[str, Any] | None:
    """The catalog's row of a name, alias or hub id, or of the model that a name's words say was
    tuned, quantized or given a score in the place of its head; None if there is none. Of a folder
    that a run saved a checkpoint in, it is the row that the run's own folder names."""
    line = _line(name) if name_key(name) else ""
    return _parse(line) if line else _reward_row(name) or _row_of_run(name)


def _reward_row(name: str) -> dict[str, Any] | None:
    """The base of a reward model with one score for its head, or of a classifier with two; None
    where the name says none.

    Source: transformers 5.23 modeling_layers.py GenericForSequenceClassification, whose `score` has
    no bias; trl 0.24 RewardTrainer loads it with one label.
    """
    from napkinmath.catalog.model_names import without_score

    base, labels = without_score(name)
    row = find_row(base) if base else None
    kind = str(row["class"]) if row else ""
    if row is None or not kind.endswith("ForCausalLM"):
        return None
    scored = kind.removesuffix("ForCausalLM") + "ForSequenceClassification"
    config: dict[str, Any] = {**row["config"], "architectures": [scored], "num_labels": labels}
    head = 0 if config.get("tie_word_embeddings") else int(config["vocab_size"])
    return {
        **row,
        "name": f"{row['name']}-{'reward' if labels == 1 else 'classifier'}",
        "aliases": [],
        "hub_id": None,
        "class": scored,
        "config": config,
        "parameters": row["parameters"] + (labels - head) * config["hidden_size"],
    }


def _row_of_run(name: str) -> dict[str, Any] | None:
    if "/" not in name:
        return None
    from napkinmath.catalog.model_names import without_checkpoint

    run = without_checkpoint(name)
    return find_row(run) if run else None


def stored_format(name: str) -> str:
    """The quantized format in which a catalogued name's weights are stored, as its words say: nf4
    of '...-bnb-4bit'; '' where they are plain, and for FP8, which trainers widen."""
    from napkinmath.catalog.model_names import storage, words_of

    words = words_of(name)
    row = find_row(name)
    if row is None or name_key(row["name"]) == name_key(name):
        return ""
    return storage(words, of=str(row["name"])) or ""


def served_format(name: str) -> str:
    """The format in which an engine loads a catalogued name's weights: as its words say, else as
    its publisher stores them (`stored`, of the row's own names); '' for 16 bits."""
    from napkinmath.catalog.model_names import words_of

    row, words = find_row(name), set(words_of(name))
    if row is None or words & {"bf16", "fp16", "unquantized", "dequantized"}:
        return ""
    own = (row["name"], *row["aliases"], row["hub_id"] or "")
    published = row.get("stored", "") if name_key(name) in map(name_key, own) else ""
    if "fp8" in words:
        return "fp8-block" if row.get("stored") == "fp8-block" else "fp8"
    return stored_format(name) or published


def is_publisher(owner: str) -> bool:
    """Whether catalogued models are published under this name."""
    return owner.lower() in _index().owners.values()


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
        if c != "-" or (key[i - 1].isdecimal() and key[i + 1 : i + 2].isdecimal())
    ]
    return "".join(kept)


def unknown_model(name: str) -> InputError:
    """The error for a name that is neither catalogued nor a path: why it can be none, or the
    nearest names."""
    from napkinmath.catalog.model_names import refusal, without_adapter, without_format

    refuse_several(name, "model")
    reason = refusal(name)
    if reason:
        base = without_format(name) or without_adapter(name)
        row = find_row(base) if base else None
        meant = f" (which may be {row['name']})" if row else ""
        return InputError(f"model {shown(name)} {reason}{meant}; list: `estimate models`")
    nearest = _nearest(name)
    nearest = f"; did you mean {', '.join(nearest)}?" if nearest else "; see `estimate models`"
    return InputError(
        f"model {shown(name)} is unknown{nearest} (a config.json, its folder, --arch or --hub with"
        " a hub id also work)"
    )


def _nearest(name: str, *, limit: int = 3) -> list[str]:
    """Catalogued names like a given one without the words of its tuning: those that it begins, those
    that begin with its word, those that share its family's, those of the same size, the most alike,
    the shortest."""
    import difflib

    from napkinmath.catalog import model_names

    words = model_names.words_of(name)
    size, stems = model_names.sizes(name), [word.rstrip("0123456789") for word in words]
    matcher = difflib.SequenceMatcher()
    matcher.set_seq2(model_names.plain(words))
    beginning = model_names.pieces(words)
    found: list[tuple[bool, bool, bool, bool, float, int, str]] = []
    for known, _, _ in _heads(_text()):
        parts = model_names.words_of(known)
        begun = bool(beginning) and model_names.pieces(parts)[: len(beginning)] == beginning
        matcher.set_seq1(model_names.plain(parts))
        if not begun and (matcher.real_quick_ratio() < 0.5 or matcher.quick_ratio() < 0.5):
            continue
        alike, same = matcher.ratio(), bool(size) and size == model_names.sizes(known)
        kin = difflib.get_close_matches(parts[0].rstrip("0123456789"), stems, n=1, cutoff=0.75)
        if begun or alike >= (0.5 if kin or same else 0.6):
            begins = parts[:1] == words[:1]
            found.append((not begun, not begins, not kin, not same, -alike, len(known), known))
    return [known for *_, known in sorted(found)[:limit]]


def _text() -> str:
    with open(CATALOG, encoding="utf-8") as file:
        return file.read()


@lru_cache(maxsize=64)
def _line(name: str) -> str:
    """The row's line; '' if there is none. One command asks for its model several times."""
    text = _text()
    start = _exact_line(text, name.strip().rpartition("/")[2].lower())
    if start < 0:
        start = _tolerant_line(text, name)
    return "" if start < 0 else text[start : text.index("\n", start)]


def _exact_line(text: str, name: str) -> int:
    """Where the line begins that has the quoted name among name and aliases; -1 if none."""
    at = text.find(f'"{name}"')
    while at >= 0:
        start = text.rfind("\n", 0, at) + 1
        if at < text.find(',"hub_id"', start):
            return start
        at = text.find(f'"{name}"', at + 1)
    return -1


def _tolerant_line(text: str, name: str) -> int:
    """Where the line begins of the model that a name's words mean: as written, without words of a
    tuning or of a quantized format, or as part of a fine-tune's name; -1 if none."""
    from napkinmath.catalog import model_names

    if model_names.refusal(name):
        return -1
    words = model_names.words_of(name)
    start = _same_words(words)
    if start < 0:
        start = _tuned_line(name)
    return -1 if model_names.is_open(words, of=_name_at(text, start)) else start


class _Index(Record):
    """Where the line begins of each name, by what is compared."""

    by_key: dict[str, int]
    by_plain: dict[str, int]
    """Without the words of a tuning; -1 where two models are left with the same."""
    versioned: dict[str, int]
    """Names with a version and a size, dashes joined."""
    owners: dict[int, str]
    """Who publishes the model of a line."""


@lru_cache(maxsize=1)
def _index() -> _Index:
    from napkinmath.catalog import model_names

    found = _Index(by_key={}, by_plain={}, versioned={}, owners={})
    for _, names, start in _heads(_text()):
        for known in names:
            key = name_key(known)
            found.by_key.setdefault(key, start)
            found.by_key.setdefault(joined_key(key), start)
            plain = model_names.plain(key.split("-"))
            found.by_plain[plain] = start if found.by_plain.get(plain, start) == start else -1
            if model_names.is_versioned(known):
                found.versioned.setdefault(joined_key(key), start)
            if "/" in known:
                found.owners.setdefault(start, known.partition("/")[0].lower())
    return found


def _same_words(words: list[str]) -> int:
    """Where the line begins of the model with these words, dashes joined, or without words of a
    tuning or of a quantized format; -1 if none, or if two have them."""
    from napkinmath.catalog import model_names

    index = _index()
    for candidate in (*model_names.shorter(words), *model_names.shorter(model_names.bare(words))):
        key = "-".join(candidate)
        start = index.by_key.get(key, index.by_key.get(joined_key(key), -1))
        if start >= 0:
            return start
    return index.by_plain.get(model_names.plain(words), -1)


def _tuned_line(name: str) -> int:
    """Where the line begins of the model whose versioned name is part of a fine-tune's, or any name
    before the word 'finetuned'; -1 if none.

    What the publisher of that model names anew may have other sizes: it counts only where the other
    words are those of a tuning.
    """
    from napkinmath.catalog import model_names

    index, words = _index(), model_names.bare(model_names.words_of(name))
    start = index.by_key.get("-".join(model_names.tuned_from(words)), -1)
    if start >= 0:
        return start
    owner = name.strip().rpartition("/")[0].lower()
    for run, rest in (*model_names.spans(words), *model_names.licensed(words)):
        start = index.versioned.get(joined_key("-".join(run)), -1)
        if start >= 0 and (owner != index.owners.get(start) or model_names.all_tunings(rest)):
            return start
    return -1


def _name_at(text: str, start: int) -> str:
    """The catalogued name of a line."""
    return "" if start < 0 else text[start : text.index(",", start)].split('"')[3]


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


def _parse(line: str) -> dict[str, Any]:
    from napkinmath.base.json_text import loads

    return loads(line.strip().rstrip(","))


if not TYPE_CHECKING:

    def __getattr__(name):
        """Names of 0.1 that are elsewhere now."""
        import napkinmath

        return napkinmath.moved_name(__name__, name)
