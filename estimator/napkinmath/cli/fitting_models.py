"""`estimate models --fits GPU [flags]`: the models whose training step fits a GPU, largest first."""

from __future__ import annotations

import json
import sys

from napkinmath.base.errors import InputError, shown
from napkinmath.base.progress import counted
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser
from napkinmath.report.formats import Answer, Sheet, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.cli.flag_rows import Group

# What names the one model or the machine of an estimate, and what is no part of a list.
_TAKEN = ("--model", "--arch", "--hub", "--gpu")
_NUMBERS = ("parameters", "device GiB", "headroom GiB", "tokens/s")


def run(argv: Sequence[str], own: tuple[Group, ...], positional: tuple[str, str, str]) -> int:
    """Prints the models that fit or may fit; returns 0, or 1 where none does."""
    groups = tuple(
        (title, tuple(row for row in rows if row[0][0] not in _TAKEN))
        for title, rows in SHARED
        if title != "output"
    )
    options = Parser(
        "estimate models",
        "The models whose training step fits a GPU, largest first. The flags of `estimate` say how"
        " each is trained.",
        (*own, *groups),
        positional=positional,
    ).parse(argv)
    from napkinmath.report.columns import print_sheet
    from napkinmath.report.listing import words_of

    form, words = taken(options), words_of(options)
    options.pop("words", None)
    options.pop("debug", None)
    gpu = one_gpu(options.pop("fits"))
    found, refused = _fitting([*words], {**options, "gpu": [gpu]})
    found.sort(key=lambda pair: -pair[0])
    sheet = _sheet(found)
    if form is not None:
        rows = lambda: json.dumps([_plain(*pair) for pair in found], indent=1)  # noqa: E731
        print(form.text(Answer(sheets=lambda: [sheet], json=rows)))
    else:
        print_sheet(sheet)
        _print_left_out(refused)
    return 0 if found else 1


def _fitting(
    words: list[str], options: dict[str, object]
) -> tuple[list[tuple[int, Estimate]], dict[str, list[str]]]:
    """The estimates that fit or may fit, and by reason the names that have none. Raises InputError
    where the flags hold for no model."""
    from napkinmath.answers.figures import Verdict
    from napkinmath.inputs.hardware_options import machines
    from napkinmath.inputs.jobs import priced
    from napkinmath.report.listing import model_rows

    machines(options)  # a GPU that is unknown is no answer about models
    found: list[tuple[int, Estimate]] = []
    reasons: dict[str, list[str]] = {}
    rows = model_rows(words)
    for row in counted(rows, "models", len(rows)):
        try:
            (e,) = priced({**options, "model": row["name"]}, [])
        except InputError as error:
            reasons.setdefault(str(error), []).append(row["name"])
            continue
        # what tensors ask for is the least of what the device holds, and known without a replay
        assert e.hardware is not None
        if e.peak.nbytes <= e.hardware.memory_bytes and e.verdict is not Verdict.DOES_NOT_FIT:
            found.append((row["parameters"], e))
        else:
            reasons.setdefault("", []).append(row["name"])
    if rows and not found and "" not in reasons:
        raise InputError(max(reasons, key=lambda reason: len(reasons[reason])))
    return found, reasons


def _print_left_out(reasons: dict[str, list[str]]) -> None:
    larger = len(reasons.get("", ()))
    others = sum(map(len, reasons.values())) - larger
    if larger:
        print(f"note: {larger} more {'does' if larger == 1 else 'do'} not fit", file=sys.stderr)
    if others:
        names = [name for reason, found in reasons.items() if reason for name in found]
        some = ", ".join(names[:3]) + (", ..." if others > 3 else "")
        have = "has" if others == 1 else "have"
        print(f"note: {others} {have} no answer under these flags: {some}", file=sys.stderr)


def _sheet(found: list[tuple[int, Estimate]]) -> Sheet:
    from napkinmath.base.units import format_count

    rows = tuple(
        (
            e.spec.name,
            format_count(parameters),
            e.verdict.value,
            *(_text(value, form) for value, form in zip(_figures(e), _FORMATS, strict=True)),
        )
        for parameters, e in found
    )
    heads = ("name", "parameters", "verdict", *_NUMBERS[1:])
    return Sheet(heads=heads, rows=rows, right=_NUMBERS)


_FORMATS = ("{:.1f}", "{:+.1f}", "{:,.0f}")


def _text(value: float | None, form: str) -> str:
    """A figure; one that rounds to nothing has no sign."""
    text = "-" if value is None else form.format(value)
    return text[1:] if text in ("-0.0", "+0.0") else text


def _figures(e: Estimate) -> tuple[float | None, ...]:
    """Device memory and headroom in GiB, and tokens a second."""
    from napkinmath.answers.ranges import headroom_bytes
    from napkinmath.base.units import GIB

    room = headroom_bytes(e)
    speed = e.time.tokens_per_s if e.time is not None else None
    return e.memory.device.value / GIB, None if room is None else room / GIB, speed


def _plain(parameters: int, e: Estimate) -> dict[str, Any]:
    from napkinmath.planning.grid import figures

    assert e.hardware is not None
    own = {"model": e.spec.name, "parameters": parameters}
    return {**own, "gpu": e.hardware.gpu.name, **figures(e)}


def one_gpu(value: object) -> str:
    """The GPU of --fits. Raises InputError for none."""
    if not str(value).strip():
        raise InputError(f"{shown(value)} names no GPU; write e.g. estimate models --fits rtx4090")
    return str(value)
