"""``estimate compare [A B [C]]``: analytic, traced and measured side by side, by role and by
module."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from napkinmath.base.errors import InputError, shown
from napkinmath.base.whole_file import write_whole
from napkinmath.cli.flag_rows import ON, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser
from napkinmath.ir.timeline import Timeline

from napkinmath_profiler.measuring.comparison import (
    as_mapping,
    compare,
    picture,
    table,
)

OWN = (
    (("--picture",), TEXT, "FILE.svg", "stacked bars as SVG"),
    (("--force",), ON, "", "replace files that exist"),
)
DESCRIPTION = (
    "Hold timelines of one training step against each other. A, B and C are 'analytic', 'traced'"
    " (both of the step that the flags describe) or recorded snapshots (.pickle); analytic and"
    " traced unless named."
)


def run(argv: Sequence[str]) -> int:
    """Makes the timelines, compares, prints."""
    parser = Parser(
        "estimate compare",
        DESCRIPTION,
        (*SHARED, ("compare", OWN)),
        positional=(
            "sides",
            "A B ...",
            "analytic, traced or a snapshot",
        ),
    )
    options: dict[str, Any] = parser.parse(argv)
    sides = _sides(options)
    _refuse_sides(sides)
    comparison = compare({_name(side): _timeline(side, options) for side in sides})
    if "picture" in options:
        write_whole(options["picture"], picture(comparison), force="force" in options)
    print(json.dumps(as_mapping(comparison), indent=2) if "json" in options else table(comparison))
    return 0


def _sides(options: dict[str, Any]) -> list[str]:
    """What is compared; the one word that is no side is the model, as everywhere."""
    words: list[str] = options.pop("sides", None) or []
    models = [word for word in words if not _is_side(word)]
    if len(models) == 1 and not options.keys() & {"model", "arch"}:
        options["model"] = models[0]
        words.remove(models[0])
    return words or ["analytic", "traced"]  # a side alone is refused with what to name beside it


def _is_side(word: str) -> bool:
    return word in ("analytic", "traced") or word.endswith((".pickle", ".pkl"))


def _refuse_sides(sides: Sequence[str]) -> None:
    if not 2 <= len(sides) <= 3:
        raise InputError(
            f"{shown(' '.join(sides), limit=200)} cannot be compared; name two or three of analytic,"
            " traced and a snapshot (.pickle)"
        )
    if len(set(sides)) < len(sides):
        raise InputError(f"{shown(sides)} names one side twice; name different ones")


def _name(side: str) -> str:
    return (
        side
        if side in ("analytic", "traced")
        else "measured"
        if side.endswith((".pickle", ".pkl"))
        else side
    )


def _timeline(side: str, options: dict[str, Any]) -> Timeline:
    if side == "analytic":
        from napkinmath.cli.estimate_command import make_estimates

        return make_estimates(options, [])[0].timeline
    if side == "traced":
        from napkinmath_profiler.cli.trace import traced_timeline

        return traced_timeline(options)
    if side.endswith((".pickle", ".pkl")):
        from napkinmath_profiler.snapshot.read_snapshot import read_snapshot

        return read_snapshot(side).timeline
    raise InputError(
        f"{shown(side)} is no side of a comparison; name analytic, traced or a snapshot (.pickle)"
    )
