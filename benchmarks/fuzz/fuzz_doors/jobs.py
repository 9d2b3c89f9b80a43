"""Job files: those of the tests, of every tool, with some places changed."""

from __future__ import annotations

import functools
from pathlib import Path
from random import Random
from typing import Any

import yaml
from napkinmath.inputs.option_table import BY_KEY

from fuzz_doors.door import Case, Door
from fuzz_doors.draw import (
    MODELS,
    NUMBERS,
    argument,
    as_json,
    changed_text,
    changed_tree,
    scalar,
)
from fuzz_doors.flags import KNOWN, ROWS, words
from fuzz_doors.vocabulary import with_known_keys

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "cli" / "jobs"


@functools.cache
def seeds() -> tuple[tuple[str, str], ...]:
    """Names and texts of the files to start from."""
    files = sorted(path for path in FOLDER.iterdir() if path.is_file())
    return tuple((path.name, path.read_text(encoding="utf-8")) for path in files)


def own(rng: Random) -> dict[str, Any]:
    """A job file of ours: a model and up to five options as text, number or anything."""
    found: dict[str, Any] = {"model": rng.choice(MODELS)}
    for key in rng.sample(tuple(BY_KEY), rng.randrange(6)):
        known = KNOWN.get("--" + key.replace("_", "-"))
        found[key] = argument(rng, *known) if known else rng.choice((*NUMBERS, True, scalar(rng)))
    found.pop("hub", None)
    return found


def make(rng: Random) -> Case:
    """One of the files with up to four changes, as YAML, JSON or the text itself."""
    name, text = rng.choice(seeds())
    flags = [words(rng, row) for row in rng.sample(ROWS, rng.choice((0, 0, 0, 1, 2)))]
    more = (*(word for line in flags for word in line), "--json")
    if rng.random() < 0.3:
        return Case(("@job.json", *more), (("job.json", as_json(rng, own(rng))),))
    if name.endswith(".sh") or rng.random() < 0.2:
        written = changed_text(rng, text) if rng.random() < 0.9 else text
        return Case((f"@{name}", *more), ((name, written.encode("utf-8", "replace")),))
    content = yaml.safe_load(text)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        content = changed_tree(rng, content)
    if rng.random() < 0.4:
        content = with_known_keys(rng, content, "inputs")
    if rng.random() < 0.5:
        return Case(("@job.json", *more), (("job.json", as_json(rng, content)),))
    try:
        written = yaml.safe_dump(content, allow_unicode=True)
    except (yaml.YAMLError, UnicodeError):
        written = str(content)
    return Case(("@job.yaml", *more), (("job.yaml", written.encode("utf-8", "replace")),))


DOOR = Door("job files", make)
