"""A plan in words: the ranked table, what each change of the best trades, and the command that runs
it."""

from __future__ import annotations

from napkinmath.base.command_line import command, flags
from napkinmath.base.units import GIB, format_count
from napkinmath.catalog.models import find_row
from napkinmath.models.tasks import LABELLED, PICTURED
from napkinmath.planning.guidelines import guidelines
from napkinmath.report.columns import fitted, folded, terminal_columns
from napkinmath.report.formats import Sheet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.planning.plan import Candidate, Plan
    from napkinmath.planning.trades import Trade

_WORTH_A_LINE = 0.01


def print_plan(
    plan: Plan, traded: tuple[Trade, ...], *, tokens: float, beside: Mapping[str, object]
) -> None:
    """Prints the table, best first, and under it what the best plan's changes are worth; `beside`
    are the options of the machine and its allocator, which the command to run has too."""
    space = plan.space
    machines = ", ".join(machine.hardware.gpu.name for machine in space.machines)
    print(f"{space.spec.name} on {machines}: best by {plan.goal.value}")
    print(
        f"{plan.num_candidates:,} candidates priced, {plan.num_verified} replayed in the allocator"
    )
    if not plan.best:
        print(
            "nothing fits: no combination of what is left open does, host memory included; not"
            " searched: other models and formats, several GPUs (--gpus N), less context"
        )
        return
    sheet = plan_sheet(plan, tokens)
    print("\n".join(fitted(sheet, terminal_columns(), indent="  ")))
    _print_trades(plan.best[0], traded)
    print_advice(plan.best[0].estimate)
    print(run_line(space.spec, command_flags(plan.best[0]), beside))


def plan_sheet(plan: Plan, tokens: float) -> Sheet:
    """The best plans, a line each; the GPU only where there are several, money where it has a
    price."""
    heads = [
        "#",
        "GPU",
        "bs",
        "ctx",
        "GiB",
        "headroom",
        *speed_heads(plan.space.spec, tokens),
        "set",
    ]
    priced = any(candidate.price(tokens) is not None for candidate in plan.best)
    if priced:
        heads.insert(8, "money")
    rows = [
        _row(number, candidate, tokens, priced=priced)
        for number, candidate in enumerate(plan.best, 1)
    ]
    drop = None if len(plan.space.machines) > 1 else 1
    shown = [tuple(cell for i, cell in enumerate(row) if i != drop) for row in (heads, *rows)]
    right = tuple(head for head in heads if head not in ("GPU", "set"))
    return Sheet(heads=shown[0], rows=tuple(shown[1:]), right=right)


def speed_heads(spec: ModelSpec, tokens: float) -> tuple[str, str]:
    """Heads of a plan's speed and hours: where a model reads images alone, of images."""
    hours = f"hours for {format_count(tokens)}"
    if spec.task in PICTURED:
        return f"{PICTURED[spec.task]}/s", f"{hours} tokens"
    return "tokens/s", hours


def rate(spec: ModelSpec, options: Mapping[str, Any], tokens_per_s: float) -> str:
    """The speed under that head: an image is as many tokens as its sequence has."""
    return f"{tokens_per_s / (options['ctx'] if spec.task in PICTURED else 1):,.0f}"


def without_context(spec: ModelSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a command, without the context of a model of images alone: it follows from them."""
    leaves_out = ("ctx",) if spec.task in PICTURED else ()
    return {key: value for key, value in options.items() if key not in leaves_out}


def _row(number: int, candidate: Candidate, tokens: float, *, priced: bool) -> list[str]:
    e, options = candidate.estimate, dict(candidate.options)
    device = int(e.memory.device.value)
    price = candidate.price(tokens)
    return [
        str(number),
        candidate.machine.hardware.gpu.name,
        str(options["bs"]),
        str(options["ctx"]),
        f"{device / GIB:.1f}",
        f"{(candidate.machine.hardware.memory_bytes - device) / GIB:+.1f}",
        rate(e.spec, options, candidate.tokens_per_s) if candidate.tokens_per_s else "-",
        f"{candidate.hours(tokens):,.1f}" if candidate.tokens_per_s else "-",
        *([f"{price:,.2f}" if price is not None else "-"] if priced else []),
        " ".join(change for change in candidate.changes if not change.startswith("--bs "))
        or "(as it is)",
    ]


def _print_trades(best: Candidate, traded: tuple[Trade, ...]) -> None:
    rows = [
        (trade.flag, _saved(trade), _faster(trade))
        for trade in traded
        if abs(trade.saved_bytes) > _WORTH_A_LINE * best.estimate.peak.nbytes or _moves(trade)
    ]
    if rows:
        print("what each change of the first is worth, the others kept:")
        heads = ("change", "memory", "speed")
        made = Sheet(heads=heads, rows=tuple(rows))
        print("\n".join(fitted(made, terminal_columns(), indent="  ")))


def print_advice(best: Estimate) -> None:
    """The field's guidelines that the numbers contradict here."""
    if best.time is None:
        return
    rows = [
        [advice.name, f'"{advice.field}"', f"here: {advice.here}"]
        for advice in guidelines(best)
        if not advice.agrees
    ]
    if rows:
        print("where the numbers disagree with the field's guidelines:")
        for name, field, here in rows:
            text = f"{name}: {field}; {here}"
            print("  " + folded(text, terminal_columns() - 2, indent="    "))


def _saved(trade: Trade) -> str:
    return (
        f"{'saves' if trade.saved_bytes >= 0 else 'costs'} {abs(trade.saved_bytes) / GIB:.2f} GiB"
    )


def _moves(trade: Trade) -> bool:
    return trade.speed_ratio is not None and abs(trade.speed_ratio - 1) > _WORTH_A_LINE


def _faster(trade: Trade) -> str:
    if trade.speed_ratio is None:
        return ""
    percent = 100 * (trade.speed_ratio - 1)
    return (
        "same speed"
        if abs(percent) < 0.5
        else f"{abs(percent):.0f}% {'faster' if percent > 0 else 'slower'}"
    )


def run_line(spec: ModelSpec, quoted: str, beside: Mapping[str, object]) -> str:
    """The command that prices a model under flags, which are quoted already, on a machine."""
    machine = f" {flags(beside)}" if beside else ""
    return f"run it:      {command(_model_options(spec))} {quoted}{machine}"


def command_flags(candidate: Candidate) -> str:
    """The flags of `estimate` that price the candidate, quoted for a POSIX shell."""
    options = {**dict(candidate.options), "gpu": candidate.machine.hardware.gpu.name}
    return flags(without_context(candidate.estimate.spec, options))


def _model_options(spec: ModelSpec) -> dict[str, object]:
    """The options that name a model: bare numbers, a config file, or a name."""
    task = {"task": spec.task} if spec.task in LABELLED else {}
    if spec.source == "--arch":
        return {"arch": spec.name, **task}
    if spec.source.endswith("on the hub"):
        return {"model": spec.name, "hub": True, **task}
    row = find_row(spec.name)
    of_catalog = row is not None and row["source"] == spec.source
    is_file = spec.source.endswith(".json") and "://" not in spec.source and not of_catalog
    return {"model": spec.source if is_file else spec.name, **task}
