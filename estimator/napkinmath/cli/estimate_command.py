"""`estimate [flags] [JOB FILE]`: prices one training step and prints the report."""

from __future__ import annotations

import sys
from functools import partial

from napkinmath.base import values
from napkinmath.base.errors import InputError, plain, shown
from napkinmath.cli.commands import COMMANDS
from napkinmath.cli.edited import CommandLine
from napkinmath.cli.flag_rows import ON, TEXT
from napkinmath.cli.flags import RUN_FILES, SHARED, parsed
from napkinmath.cli.forms import form_rows
from napkinmath.cli.parser import Parser
from napkinmath.report.formats import Answer, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.report.formats import Form, Sheet

_DESCRIPTION = (
    "What one training step of a language model costs in memory and time, what it is made of, and"
    " on which GPUs it fits."
)
_FILES = ("files", ((("--force",), ON, "", "replace the --timeline file if it is there"),))
_MONEY = (
    "money",
    (
        (
            ("--price",),
            TEXT,
            "P",
            "money for one hour of one GPU, for the price of a billion tokens",
        ),
    ),
)
_TIMELINE_KINDS = (".html", ".svg", ".png")


def run(argv: Sequence[str]) -> int:
    """Parses the flags, estimates for every GPU named, prints; returns the exit code."""
    typed = CommandLine(_parser(), argv)
    options = parsed(typed.parser, argv)
    form = taken(options)
    _check_output(options, form)
    notes: list[str] = []
    price, force = options.pop("price", None), bool(options.pop("force", False))
    estimates = make_estimates(options, notes)
    if price is not None:
        each = values.price(price, "--price")
        estimates = [e.with_price(each) for e in estimates]
    _print(estimates, options, form, typed, force=force)
    for note in notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    return _exit_code(estimates)


def make_estimates(given: dict[str, Any], notes: list[str]) -> list[Estimate]:
    """One estimate, or one for each GPU named; `notes` receives what was assumed or ignored."""
    from napkinmath.inputs.jobs import priced

    if "lengths" in given:
        from napkinmath.config.lengths import with_lengths

        given = with_lengths(given)
    if not any(key in given for key in ("job", "deepspeed", "launch")):
        return priced(given, notes)
    from napkinmath.inputs.job_file import with_job_file
    from napkinmath.models.config_file import quoted

    options = with_job_file(given, notes)
    try:
        return priced(options, notes)
    except InputError as error:
        files = ", ".join(quoted(str(path)) for path in values.listed(given.get("job", [])))
        named = f"the job file {files}" if files else "the files and words given beside the flags"
        raise InputError(f"{error} (with {named})") from error


def _parser() -> Parser:
    return Parser(
        "estimate",
        _DESCRIPTION,
        (*SHARED, RUN_FILES, ("other forms", form_rows(single_table=False)), _FILES, _MONEY),
        positional=(
            "job",
            "JOB...",
            (
                "a job file: ours, or one of axolotl, TRL, the HF Trainer, torchtune,"
                " LLaMA-Factory, accelerate or DeepSpeed (YAML or JSON); several are one run"
            ),
        ),
        usage="estimate MODEL [flags] | estimate JOB.yaml [MORE.yaml] [flags] | estimate [flags] -- LAUNCH LINE | estimate COMMAND ...",
        ending=_ending,
        short=_short_help,
    )


def _short_help() -> str:
    from napkinmath.cli.start import short_help

    return short_help()


def _ending() -> str:
    """The commands that are there, and the exit codes."""
    from importlib.util import find_spec

    names: list[str] = []
    for name, (target, meaning) in COMMANDS.items():
        module = target.partition(":")[0]
        if find_spec(module.partition(".")[0]) and find_spec(module):
            names.append(f"  {name:<12} {meaning}")
    codes = "exit codes: 0 fits, or no GPU was named; 1 does not fit; 2 bad input; 3 cannot tell"
    return "\n".join(["commands (estimate COMMAND --help):", *names, "", codes])


def _check_output(options: dict[str, Any], form: Form | None) -> None:
    if form is not None and "explain" in options:
        raise InputError(
            f"--{form.key} and --explain are two forms of the same answer; give one of them"
        )
    file = options.get("timeline")
    if file is not None and not file.lower().endswith(_TIMELINE_KINDS):
        raise InputError(
            f"--timeline {shown(file)} has no known ending; use {', '.join(_TIMELINE_KINDS)}"
        )
    if file is not None and len(options.get("gpu", ())) > 1:
        raise InputError(f"--timeline {shown(file)} shows one step; give one --gpu")


def _print(
    estimates: list[Estimate],
    options: dict[str, Any],
    form: Form | None,
    typed: CommandLine,
    *,
    force: bool,
) -> None:
    if "export" in options:
        from napkinmath.cli.exporting import write_export

        write_export(
            estimates[0],
            str(options.get("model", estimates[0].spec.name)),
            options["export"],
            None,
            force=False,
        )
        return
    if "timeline" in options:
        from napkinmath.report.plot import write_timeline

        write_timeline(estimates[0], options["timeline"], force=force)
    if form is not None:
        print(form.text(Answer(sheets=lambda: _sheets(estimates), json=lambda: _json(estimates))))
    elif "explain" in options:
        from napkinmath.report.explain import print_explain

        for e in estimates:
            print_explain(e)
    else:
        from napkinmath.report.table import print_report

        for e in estimates:
            gpu = e.hardware.gpu.name if e.hardware is not None and len(estimates) > 1 else ""
            print_report(e, over=partial(typed.over, gpu=gpu))
    if "timeline" in options and form is None:
        print(f"timeline written to {options['timeline']}")


def _json(estimates: list[Estimate]) -> str:
    from napkinmath.report.json_report import to_json

    texts = [to_json(e) for e in estimates]
    return texts[0] if len(texts) == 1 else "[" + ",\n".join(texts) + "]"


def _sheets(estimates: list[Estimate]) -> list[Sheet]:
    from napkinmath.report.sheets import estimate_sheets

    return [sheet for e in estimates for sheet in estimate_sheets(e)]


def _exit_code(estimates: list[Estimate]) -> int:
    """The worst answer over the GPUs named: does not fit, then cannot tell, then fits."""
    codes = {e.verdict.exit_code for e in estimates}
    return 1 if 1 in codes else max(codes)
