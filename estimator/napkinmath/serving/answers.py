"""Answers to requests: the estimate's own JSON, its timeline, the formulas behind each component,
and job files."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.serving.requests import KNOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.answers.estimate import Estimate

MOST_FORMULAS = 12  # a component
MOST_OPERATIONS = 10  # a phase


def encoded(path: str, options: Mapping[str, Any]) -> bytes:
    """The answer at a path as JSON in ASCII; runs in one of the workers."""
    import json

    kind = path.removeprefix("/api/export/")
    made = job_file(options, kind) if kind != path else ANSWERS[path](options)
    return json.dumps(made, separators=(",", ":"), allow_nan=False).encode()


def begun() -> bytes:
    """What a worker does before anybody asks: imports, catalogues, one small estimate."""
    return encoded("/api/estimate", {"model": "gpt2", "gpu": "T4"})


def catalogue() -> dict[str, Any]:
    """Names of models and GPUs, and of every option its name and its choices."""
    from napkinmath.catalog.gpus import load_gpus
    from napkinmath.catalog.models import load_rows
    from napkinmath.exports import KINDS
    from napkinmath.inputs.option_table import BY_KEY, BY_NAME, OPTIONS, SHORTHANDS, rivals
    from napkinmath.models.families import FAMILIES, is_learned
    from napkinmath.report.palette import COLORS

    return {
        "models": [
            {"name": row["name"], "parameters": row["parameters"], "family": row["family"]}
            for row in load_rows()
            if row["config"]["model_type"] in FAMILIES or is_learned(row["config"]["model_type"])
        ],
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in load_gpus()],
        "exports": list(KINDS),
        "colors": {role.value: color for role, color in COLORS.items()},
        "options": sorted(KNOWN - {"config"}),  # those with a flag
        "choices": {
            key: [name.replace(":K", ":2") for name in BY_KEY[key].named_choices()]
            for key in sorted(KNOWN)
            if BY_KEY[key].named_choices()
        },
        "shorthands": SHORTHANDS,
        "rivals": {o.key: names for o in OPTIONS if (names := rivals(o.key))},
        "aliases": {n: o.key for n, o in BY_NAME.items() if n != o.key and o.key in KNOWN},
    }


def answer(options: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one configuration: what a slider's move has to show at once."""
    from napkinmath.report.json_report import figures

    e, notes = _priced(options)
    return {"report": figures(e), "notes": notes}


def details(options: Mapping[str, Any]) -> dict[str, Any]:
    """What follows: the timeline, the formulas behind each component and operation, other GPUs and
    what to change."""
    from napkinmath.report.json_report import advice
    from napkinmath.report.roofline_svg import roofline_svg
    from napkinmath.report.timeline_data import view_data

    e, _ = _priced(options)
    return {
        "formulas": formulas(e),
        "operations": operations(e),
        "timeline": view_data(e.timeline, e),
        "roofline_svg": roofline_svg(e),
        **advice(e),
    }


def command_line(options: Mapping[str, Any]) -> dict[str, Any]:
    """The command that asks the same, quoted for the `shell` asked for, or the call in Python."""
    from napkinmath.base.command_line import SHELLS, command, python_call

    asked = dict(options)
    shell = str(asked.pop("shell", "posix"))
    if shell not in (*SHELLS, "python"):
        raise InputError(f"shell {shown(shell)} is unknown; use {', '.join(SHELLS)} or python")
    if shell == "python":
        return {"command": python_call(asked)}
    if "config" in asked:  # a command names the file that holds it
        asked = {"model": "./config.json", **{k: v for k, v in asked.items() if k != "config"}}
    return {"command": command(asked, SHELLS[shell])}


def job_file(options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A job file that says the same to another tool."""
    from napkinmath.exports import export

    e, _ = _priced(options)
    text, notes = export(e.config, str(options.get("model", e.spec.name)), kind)
    return {"kind": kind, "text": text, "notes": notes}


def best(options: Mapping[str, Any]) -> dict[str, Any]:
    """What to run: on one GPU the best by `goal`, on several the fastest meshes that fit."""
    from napkinmath.serving.plans import planned

    return planned(options)


def formulas(e: Estimate) -> dict[str, list[dict[str, Any]]]:
    """For each component its largest tensors: bytes, formula with symbols and numbers, and where it
    is from."""
    from napkinmath.report.components import held_by_component
    from napkinmath.report.entries import SymbolScopes, tensor_entries

    scopes = SymbolScopes(e)
    return {
        key: [
            {"nbytes": int(x.amount), "formula": x.formula, "what": x.what}
            for x in tensor_entries(held, scopes)[:MOST_FORMULAS]
        ]
        for key, held in held_by_component(e.timeline, e.peak).items()
    }


def operations(e: Estimate) -> list[dict[str, Any]]:
    """The most expensive operations of each phase with their seconds, formula and bound; none
    without a known speed."""
    if e.speed is None or e.config.parallel.pipeline_parallel_size > 1:
        return []
    from napkinmath.report.entries import cost_entries

    return [
        {
            "phase": phase,
            "seconds": x.amount,
            "count": x.count,
            "formula": x.formula,
            "what": x.what,
        }
        for phase, entries in cost_entries(e).items()
        for x in entries[:MOST_OPERATIONS]
    ]


def limits(options: Mapping[str, Any]) -> dict[str, int]:
    """The largest batch and, of a model that reads tokens, the longest context that surely fit the
    GPU; nothing where no GPU was named, or for what was not searched to the end."""
    e, _ = _priced(options)
    if e.hardware is None:
        return {}
    from napkinmath.planning.search import reached

    return {reach.what: reach.size for reach in reached(e) if not reach.ended_early}


ANSWERS = {
    "/api/estimate": answer,
    "/api/details": details,
    "/api/limits": limits,
    "/api/plan": best,
    "/api/command": command_line,
}
# by the name of `Workers`; anything else is quick: what a move waits for
LANES = {"/api/details": "later", "/api/limits": "long", "/api/plan": "plans"}
AT_ONCE = frozenset(("/api/command",))  # prices nothing: no process is needed
WORDS = {
    "/api/plan": frozenset(("goal",)),
    "/api/command": frozenset(("shell",)),
}  # that an answer takes besides the options


def _priced(options: Mapping[str, Any]) -> tuple[Estimate, list[str]]:
    from napkinmath.inputs.jobs import priced

    if not {"model", "arch", "config"} & options.keys():
        raise InputError("no model was chosen; give its name, or --arch among the further options")
    notes: list[str] = []
    return priced(options, notes)[0], notes
