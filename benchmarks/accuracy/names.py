"""How many of the model ids that people train resolve offline.

`benchmarks/data/model_ids.csv` has the ids that public training configurations mention, and those
that at least two public registries of models list; `typed_ids.txt` has ids that a person typed by
heart, `typed_2026.txt` names of 2026 as people type them. `python benchmarks/accuracy/names.py` prints the shares that are priced, known to a trace
or under a `--task` only, refused by a reason, and unknown; `--unknown` lists the last by mentions,
`--as` what each id was taken as. `--list FILE` counts the ids of a file, one a line.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from napkinmath.base.errors import InputError
from napkinmath.catalog.model_names import refusal
from napkinmath.catalog.models import find_row, stored_format
from napkinmath.models.read import read_model

IDS = Path(__file__).resolve().parents[1] / "data" / "model_ids.csv"
TYPED = IDS.with_name("typed_ids.txt")
NAMES_OF_2026 = IDS.with_name("typed_2026.txt")
ANSWERS = ("priced", "trace only", "refused", "unknown")


class Mention(NamedTuple):
    id: str
    mentions: int
    repositories: int
    lists: int
    kind: str


def read_ids(path: Path = IDS) -> list[Mention]:
    """Every id, the most mentioned first."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Mention(
                row["id"],
                **{key: int(row[key]) for key in Mention._fields[1:4]},
                kind=row["kind"],
            )
            for row in csv.DictReader(file)
        ]


def read_typed(path: Path = TYPED, kind: str = "typed") -> list[Mention]:
    """The ids that were typed by heart, one a line; nobody counted them."""
    return [Mention(name, 0, 0, 0, kind) for name in path.read_text(encoding="utf-8").split()]


@functools.cache
def answer(name: str) -> tuple[str, str]:
    """(one of ANSWERS, what the name was taken as or why it is refused)."""
    row = find_row(name)
    if row is None:
        reason = refusal(name)
        return ("refused", reason) if reason else ("unknown", "")
    stored = stored_format(name)
    taken = f"{row['name']}{' in ' + stored if stored else ''}"
    return ("priced" if is_priced(row["name"]) else "trace only"), taken


@functools.cache
def is_priced(name: str) -> bool:
    """Whether the rules answer a catalogued model as it is."""
    try:
        read_model(name)
    except InputError:
        return False
    return True


def shares(ids: Iterable[Mention], weight: Callable[[Mention], int]) -> dict[str, float]:
    """The share of each answer, of all weight."""
    found: dict[str, float] = dict.fromkeys(ANSWERS, 0.0)
    for one in ids:
        found[answer(one.id)[0]] += weight(one)
    whole = sum(found.values())
    return {kind: value / whole for kind, value in found.items()}


def questions(ids: list[Mention]) -> dict[str, dict[str, float]]:
    """The shares by what is counted."""
    used, listed = [one for one in ids if one.mentions], [one for one in ids if one.lists]
    text = [one for one in listed if one.kind == "text"]
    return {
        "mentions in training configs": shares(used, lambda one: one.mentions),
        "ids in training configs": shares(used, lambda _: 1),
        "popular ids": shares(listed, lambda _: 1),
        "popular ids of text models": shares(text, lambda _: 1),
        "ids typed by heart": shares((one for one in ids if one.kind == "typed"), lambda _: 1),
        "names typed in 2026": shares((one for one in ids if one.kind == "2026"), lambda _: 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unknown", action="store_true", help="list what is unknown")
    parser.add_argument("--as", action="store_true", dest="taken", help="list every answer")
    parser.add_argument("--list", type=Path, action="append", default=[], help="ids, one a line")
    options = parser.parse_args(arguments)
    ids = [*read_ids(), *read_typed(), *read_typed(NAMES_OF_2026, "2026")]
    print(f"{'':32}" + "".join(f"{kind:>12}" for kind in ANSWERS))
    for question, found in questions(ids).items():
        print(f"{question:32}" + "".join(f"{found[kind]:>12.1%}" for kind in ANSWERS))
    for path in options.list:
        listed = read_typed(path)
        found = shares(listed, lambda _: 1)
        print(f"{path.name:32}" + "".join(f"{found[kind]:>12.1%}" for kind in ANSWERS))
        ids += listed
    for one in ids:
        kind, taken = answer(one.id)
        if options.taken or (options.unknown and kind == "unknown"):
            print(f"{one.id}\t{one.mentions}\t{one.lists}\t{kind}\t{taken}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
