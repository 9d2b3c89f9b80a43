"""`estimate plan --model M --gpu NAME [flags]`: searches what is left open and ranks what fits by a
goal."""

from __future__ import annotations

import sys

from napkinmath.answers.figures import Verdict
from napkinmath.base import values
from napkinmath.base.command_line import flags
from napkinmath.base.errors import InputError, plain, shown
from napkinmath.base.values import listed
from napkinmath.cli.flag_rows import DEBUG, ON, REPEAT, TEXT
from napkinmath.cli.flags import parsed
from napkinmath.cli.forms import form_rows
from napkinmath.cli.parser import Parser
from napkinmath.cli.prices import price_of, price_of_name
from napkinmath.cli.sweep import several_flags
from napkinmath.config.job_keys import JobKeys
from napkinmath.inputs.asked import for_search
from napkinmath.inputs.denoisers import refuse_search
from napkinmath.inputs.model_options import model_spec
from napkinmath.inputs.option_table import MACHINE_KEYS, MODEL_KEYS
from napkinmath.planning.space import Goal, machine_of, open_space
from napkinmath.report.formats import Answer, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from napkinmath.cli.flag_rows import Row
    from napkinmath.planning.plan import Plan
    from napkinmath.planning.space import Goal, Machine


def _goals() -> list[str]:

    return [goal.value for goal in Goal]


def _kinds() -> Iterable[str]:
    from napkinmath.exports import KINDS

    return KINDS


_OWN: tuple[Row, ...] = (
    (("--goal",), TEXT, "NAME", lambda: f"{', '.join(_goals())} [tokens/s]"),
    (("--tokens",), TEXT, "N", "tokens of the whole run, for hours and money: 1b, 300m [1b]"),
    (
        ("--price",),
        REPEAT,
        "[NAME=]P",
        "money for one hour of a GPU; NAME=P where several GPUs are named",
    ),
    (("--top",), TEXT, "N", "rows of the table [8]"),
    (("--max-bs",), ON, "", "the largest batch of the configuration given, instead of a search"),
    (
        ("--max-ctx", "--max-context"),
        ON,
        "",
        "the longest context of the configuration given, instead of a search",
    ),
    (("--plot",), TEXT, "FILE", "draw speed against memory as .png or .svg"),
    (("--export",), TEXT, "KIND", lambda: f"print the best as a config: {', '.join(_kinds())}"),
    (("--out", "-o"), TEXT, "FILE", "write the exported config here"),
    *form_rows(json="the ranked rows as JSON"),
    (("--force",), ON, "", "replace a file that is there"),
    DEBUG,
)
_DESCRIPTION = (
    "What should I run? Options that are given stay as they are (several values: any of them), what"
    " is left open is searched: method, precision, checkpointing, optimizer, loss, kernels, batch;"
    " with --gpus N every mesh of tensor, pipeline, context and data parallelism. For --goal"
    " fewest-changes the options given are where to start from. Methods learn differently, which no"
    " row of the table prices: give --lora or --full where that is settled."
)
MOST_TOKENS = 1e18
_NAMED = ("gpu", "gpus")  # in every row


def run(argv: Sequence[str]) -> int:
    """Prints the plan; returns 0 where something fits, 1 where nothing does, 3 where a job file
    asks for memory that is not priced."""
    parser = Parser(
        "estimate plan",
        _DESCRIPTION,
        several_flags(_OWN, "plan"),
        positional=("job", "MODEL|JOB...", "a model, or job files of one run to start from"),
    )
    options = parsed(parser, argv)
    form = taken(options)
    own: dict[str, Any] = {
        key: options.pop(key, None)
        for key in (row[0][0].lstrip("-").replace("-", "_") for row in _OWN)
    }
    own["form"] = form
    notes: list[str] = []
    from napkinmath.config.lengths import with_lengths
    from napkinmath.inputs.job_file import with_job_file

    options = with_lengths(with_job_file(options, notes))
    if own["plot"] is not None:
        from napkinmath.report.drawing import check_file

        check_file(own["plot"], force=own["force"] is not None)
    if own["max_bs"] or own["max_ctx"]:
        code = _limits(options, own, notes)
    else:
        keys = options.pop("job_keys", None)
        code = _plan(options, own, notes)
        if isinstance(keys, JobKeys) and keys.takes_more and not code:
            notes.append("what is not priced takes more memory: nothing listed surely fits")
            code = Verdict.UNKNOWN.exit_code
    for note in dict.fromkeys(notes):
        print(f"note: {plain(note)}", file=sys.stderr)
    return code


def _limits(options: dict[str, object], own: Mapping[str, Any], notes: list[str]) -> int:
    from napkinmath.cli.limits import print_limits
    from napkinmath.inputs.jobs import priced

    single = {
        key: value if key in ("gpu", "method") else listed(value)[0]
        for key, value in options.items()
    }
    return print_limits(
        priced(single, notes), batch=own["max_bs"] is not None, context=own["max_ctx"] is not None
    )


def _plan(options: dict[str, object], own: Mapping[str, Any], notes: list[str]) -> int:
    from napkinmath.cli.plan_cluster import plan_on_cluster
    from napkinmath.inputs.hardware_options import allocator_text
    from napkinmath.inputs.parallel_options import number_and_type
    from napkinmath.inputs.several import several
    from napkinmath.planning.plan import plan_or_wider
    from napkinmath.planning.trades import trades
    from napkinmath.report.plan_table import print_plan

    goal = values.choice(own["goal"] or "tokens/s", Goal, "--goal")
    tokens = read_tokens(own["tokens"] or "1b")
    names = {key: options.pop(key) for key in (*MODEL_KEYS, "hub", "allocator") if key in options}
    names = {
        key: several(key, value)[0] if key != "arch" else values.listed(value)[0]
        for key, value in names.items()
    }
    spec = model_spec(names, notes)
    refuse_search(spec)
    if "gpus" in options and number_and_type({"gpus": values.listed(options["gpus"])[0]})[0] > 1:
        allocator = allocator_text(names)
        return plan_on_cluster(spec, options, own, notes, tokens, allocator=allocator)
    beside = {key: options[key] for key in MACHINE_KEYS if key in options} | names
    machines = _machines(options, own["price"] or [], notes, goal)
    given = {key: several(key, value) for key, value in options.items()}
    if goal is not Goal.CONTEXT or not given.keys().isdisjoint(("ctx", "audio")):
        spec, given = for_search(spec, given, notes)
    space = open_space(spec, machines, given, goal, allocator=allocator_text(names))
    top = values.count(own["top"] or 8, "--top", high=1000)
    clouds = own["plot"] is not None
    found, tried = plan_or_wider(space, goal, top=top, clouds=clouds)
    notes.extend(tried)
    traded = trades(found.space, found.best[0]) if found.best else ()
    if own["form"] is not None:
        from napkinmath.report.plan_json import plan_json
        from napkinmath.report.plan_table import plan_sheet

        made = lambda: plan_json(found, traded, tokens=tokens)  # noqa: E731
        print(own["form"].text(Answer(sheets=lambda: [plan_sheet(found, tokens)], json=made)))
    elif own["export"] is None or own["out"] is not None:
        beside = {key: v for key, v in beside.items() if key not in (*MODEL_KEYS, "hub", *_NAMED)}
        print_plan(found, traded, tokens=tokens, beside=beside)
    if own["plot"] is not None:
        from napkinmath.report.plan_plot import write_plan_plot

        write_plan_plot(found, own["plot"], force=own["force"] is not None)
        print(f"plot written to {own['plot']}", file=sys.stderr)
    if own["export"] is not None and found.best:
        _export(found, own, names)
    return 0 if found.best else 1


def _export(found: Plan, own: Mapping[str, Any], names: Mapping[str, object]) -> None:
    from napkinmath.cli.exporting import write_export

    best = found.best[0]
    write_export(
        best.estimate,
        str(names.get("model", found.space.spec.name)),
        own["export"],
        own["out"],
        force=own["force"] is not None,
    )


def _machines(
    options: dict[str, object], prices: Sequence[str], notes: list[str], goal: Goal
) -> list[Machine]:
    """The GPUs named, each with its calibrated speeds and its price; their options are taken
    out."""
    from napkinmath.inputs.hardware_options import calibration_on, machines

    own = {key: options.pop(key) for key in MACHINE_KEYS if key in options}
    own = {key: value if key == "gpu" else listed(value)[0] for key, value in own.items()}
    if "gpu" in own:
        own["gpu"] = [name.strip() for text in listed(own["gpu"]) for name in str(text).split(",")]
    found: list[Machine] = []
    for hardware in machines(own):
        if hardware is None:
            raise InputError(
                "a plan is for a GPU; add --gpu NAME, several times to compare (list: `estimate"
                " gpus`)"
            )
        calibration = calibration_on(hardware, own, notes)
        found.append(machine_of(hardware, calibration, price_of(hardware.gpu.name, prices)))
    for text in prices:
        name = text.rpartition("=")[0]
        if name and price_of_name(name) not in [m.hardware.gpu.name for m in found]:
            raise InputError(
                f"--price {shown(text)} is of a GPU that is not asked about; add"
                f" {flags({'gpu': name})}"
            )
    return found


def read_tokens(text: str) -> float:
    """'1b' -> 1e9, '300m' -> 3e8, '2t', '5000'; powers of ten, as tokens are counted."""
    number, scale = text.strip().lower(), 1.0
    for suffix, factor in (("t", 1e12), ("b", 1e9), ("m", 1e6), ("k", 1e3)):
        if number.endswith(suffix):
            number, scale = number[: -len(suffix)], factor
            break
    try:
        found = float(number) * scale
    except ValueError:
        found = 0.0
    if not 0 < found <= MOST_TOKENS:
        raise InputError(
            f"--tokens {shown(text)} is not a number of tokens; write e.g. 1b, 300m or 5000000"
        )
    return found
