"""What must hold of every answer, whatever was asked."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import NapkinError

from fuzz_doors.door import Case, Done, prepared

CODES = (0, 1, 2, 3)
SIGNED = {"headroom", "headroom_bytes", "saved_bytes"}  # what is missing is negative
ROUNDING = 1e-9


def untidy(done: Done) -> str:
    """What is wrong with an exit code or an error's form; empty where nothing is."""
    if done.defect:
        return done.defect
    if done.code not in CODES:
        return f"exit code {done.code}"
    if "Traceback" in done.err:
        return "a traceback on standard error"
    if "is withheld: " in done.err:  # an ImpossibleFigure: refused, but a mistake of ours
        return "an impossible figure is withheld"
    if done.code == 2 and (done.out or len(done.err.splitlines()) != 1):
        return f"a refusal of {len(done.err.splitlines())} lines, {len(done.out)} letters printed"
    return ""


def wrong_figures(done: Done, *, by_schema: bool) -> str:
    """What is wrong with an estimate's JSON; empty where nothing is, or where it is none."""
    if not done.out.startswith(("{", "[")):
        return ""
    try:
        found = json.loads(done.out, parse_constant=_refuse_constant)
    except ValueError as error:
        return f"no JSON: {error}"
    for report in found if isinstance(found, list) else [found]:
        wrong = _wrong_report(report) if "components" in report else _not_finite(report)
        if not wrong and by_schema and "fits_on" in report:
            wrong = _against_schema(report)
        if wrong:
            return wrong
    return ""


def wrong_reaches(case: Case, folder: Path) -> str:
    """What is wrong with the largest batch and context when both are priced anew."""
    from napkinmath.cli import estimate_command
    from napkinmath.planning.search import reaches, same_but

    try:
        options = estimate_command._parser().parse(prepared(case, folder))
        found = estimate_command.make_estimates(options, [])[0]
        asked = reaches(found)
    except NapkinError:
        return ""
    names = {"batch": "micro_batch_size", "context": "sequence_length"}
    for reach in asked:
        each = found.config.workload.sequences if reach.what == "batch" else 1
        for size, fits in ((reach.size, True), (reach.size + 1, False)):
            if not 1 <= size <= reach.most:
                continue
            try:
                config = found.config.replace(**{names[reach.what]: size * each})
                verdict = same_but(found, config).verdict
            except NapkinError:
                verdict = None
            if (verdict is Verdict.FITS) is not fits:
                return f"{reach.what} {'that fits does not' if fits else 'beyond the limit fits'}"
    return ""


def _wrong_report(report: dict[str, Any]) -> str:
    total = report["memory"]["device"]["value"]
    if sum(row["nbytes"] for row in report["components"]) != total:
        return "components do not sum to the total"
    for path, value in _numbers(report):
        if not math.isfinite(value) or (value < 0 and not SIGNED.intersection(path)):
            return f"{value} at {'.'.join(path)}"[:100]
    time = report["time"]
    if time and time["mfu"] is not None:
        mfu, hfu = time["mfu"], time["hfu"]
        if not mfu <= hfu * (1 + ROUNDING) or hfu > 1 + ROUNDING:
            return "MFU <= HFU <= 1 does not hold"
    return ""


def _not_finite(report: Any) -> str:
    """A number of another answer (a sweep's, a plan's) that is none."""
    found = ((value, path) for path, value in _numbers(report) if not math.isfinite(value))
    return next((f"{value} at {'.'.join(path)}"[:100] for value, path in found), "")


def _numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("config", "symbols", "settings"):
                yield from _numbers(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"constant {name}")


@functools.cache
def _validator() -> Any:
    from jsonschema.validators import Draft202012Validator

    schema = files("napkinmath.report") / "schema" / "estimate-2.json"
    return Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))


def _against_schema(report: dict[str, Any]) -> str:
    error = next(_validator().iter_errors(report), None)
    return "" if error is None else f"schema: {'.'.join(map(str, error.absolute_path))}"
