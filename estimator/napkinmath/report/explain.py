"""--explain: every line of the report as formula, numbers, value and source, read off the tensors'
axes and the operations' costs.

Nothing here knows a formula: a tensor's bytes are its axes times its type, an operation's FLOP and
bytes moved are the expressions that the clock prices.
"""

from __future__ import annotations

from napkinmath.answers.ranges import memory_doubts, returned_bytes
from napkinmath.answers.speed_range import speed_doubts, tokens_range
from napkinmath.base.cuda import ALLOCATION_GRANULE
from napkinmath.base.errors import shown
from napkinmath.base.expr import SYMBOLS
from napkinmath.base.units import format_bytes, format_seconds
from napkinmath.report import moments, words
from napkinmath.report.components import RETURNED, components_of, held_by_component, held_on_host
from napkinmath.report.entries import SymbolScopes, cost_entries, tensor_entries
from napkinmath.report.parts import LABELS
from napkinmath.report.screen import (
    Screen,
    is_unicode,
    standard_output,
    terminal_width,
    wants_color,
    wrap,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

    from napkinmath.answers.estimate import Estimate
    from napkinmath.answers.figures import Range
    from napkinmath.report.entries import Entry
    from napkinmath.report.origins import Held
    from napkinmath.timing.schedule import StepTime


def print_explain(
    estimate: Estimate,
    *,
    width: int | None = None,
    color: bool | None = None,
    stream: TextIO | None = None,
) -> None:
    """Prints the explanation; width and colours follow the stream unless given."""
    out = stream or standard_output()
    wide = width or terminal_width(out)
    out.write(
        explanation_text(
            estimate,
            width=wide,
            color=wants_color(out) if color is None else color,
            unicode=is_unicode(out),
        )
    )


def explanation_text(
    estimate: Estimate, *, width: int = 120, color: bool = False, unicode: bool = True
) -> str:
    """The explanation as text."""
    screen = Screen(width, color=color, unicode=unicode)
    scopes = SymbolScopes(estimate)
    held = held_by_component(estimate.timeline, estimate.peak)
    _origins(screen, estimate)
    _symbols(screen, scopes, [member for members in held.values() for member in members])
    _memory(screen, estimate, held, scopes)
    _host(screen, estimate, scopes)
    _totals(screen, estimate)
    _time(screen, estimate)
    return screen.text()


# ---------------------------------------------------------------- what was asked for


def _origins(screen: Screen, e: Estimate) -> None:
    """Every option of a job file with its value and the line that says it."""
    if e.job_keys is None or not e.job_keys.origins:
        return
    screen.line(("options", "bold"))
    for origin in e.job_keys.origins:
        value = words.printable(shown(origin.value, limit=70))
        screen.flow("", [f"{origin.option} = {value}   {words.printable(origin.place)}"], indent=2)
    screen.line("")


# ---------------------------------------------------------------- memory


def _symbols(screen: Screen, scopes: SymbolScopes, held: Held) -> None:
    screen.line(("symbols", "bold"))
    screen.flow("", _valued(scopes.top.values.items()), indent=2)
    for values in scopes.others(held):
        first, *more = _valued(values)
        screen.flow("", [f"another model or tower: {first}", *more], indent=2)


def _valued(values: Iterable[tuple[str, object]]) -> list[str]:
    return [f"{name} = {value} {SYMBOLS.get(name, '')}".rstrip() for name, value in values]


def _memory(screen: Screen, e: Estimate, found: dict[str, Held], scopes: SymbolScopes) -> None:
    screen.line("")
    screen.line(
        ("memory", "bold"),
        f" at the peak, {moments.moment(e.timeline, e.peak)}: bytes = copies x formula = copies x"
        " numbers",
    )
    rows = {row.key: row for row in components_of(e)}
    for key, held in found.items():
        screen.line("")
        sources = {t.source for t, _ in held}
        said_once = len(sources) == 1 and any(sources)
        source = f"   [{words.printable(next(iter(sources)))}]" if said_once else ""
        origin = f"{words.printable(rows[key].origin)}{source}"
        screen.flow("", [f"{LABELS[key]}  {format_bytes(rows[key].nbytes)}   {origin}"], indent=2)
        _sizes(screen, tensor_entries(held, scopes, with_source=not said_once))


def _sizes(screen: Screen, entries: list[Entry]) -> None:
    for entry in entries:
        _line(screen, format_bytes(entry.amount), entry.formula, entry.what)


def _line(screen: Screen, value: str, formula: str, what: str) -> None:
    """A value and its formula, and what they are: on one line where it fits, else on two."""
    left = f"  {value:>10}  {formula}"
    if len(left) + 3 + len(what) <= screen.width:
        screen.line(left, (f"   {what}", "dim"))
        return
    for number, row in enumerate(wrap(formula, screen.width - 14)):
        screen.line(f"  {value if number == 0 else '':>10}  {row}")
    for row in wrap(what, screen.width - 16):
        screen.line((" " * 16 + row, "dim"))


def _host(screen: Screen, e: Estimate, scopes: SymbolScopes) -> None:
    held = held_on_host(e.timeline, e.peak)
    for name, members in (
        ("host memory", [m for m in held if not m[0].managed]),
        ("unified memory", [m for m in held if m[0].managed]),
    ):
        if members:
            screen.line("")
            screen.line(
                (f"  {name}", "bold"),
                f"  {format_bytes(sum(t.host_bytes * n for t, n in members))} at that moment,"
                " outside the allocator's books",
            )
            _sizes(screen, tensor_entries(members, scopes))


def _totals(screen: Screen, e: Estimate) -> None:
    context = next(row for row in components_of(e) if row.key == "context")
    memory, replay = e.memory, e.replay
    usual = dict(type(e.settings)().items())
    changed = ", ".join(
        f"{name}={value}" for name, value in e.settings.items() if value != usual[name]
    )
    settings = f" with {changed}" if changed else ""
    screen.line("")
    screen.line(("  from requested to device", "bold"))
    requested = f"the sum of the tensors above, each rounded up to {ALLOCATION_GRANULE} B"
    _line(screen, format_bytes(memory.requested), "requested", requested)
    for name, value, what in (
        (
            "allocated",
            memory.allocated,
            f"replay of the caching allocator{settings}; a block too small to split is booked"
            " whole",
        ),
        (
            "reserved",
            memory.reserved,
            f"the same replay: {replay.num_segments} segments at its end,"
            f" {format_bytes(replay.inactive_split_bytes)} of them free beside booked blocks",
        ),
        (
            "device",
            memory.device,
            f"reserved + {format_bytes(context.nbytes)} of {context.origin}"
            + (RETURNED if returned_bytes(e) else ""),
        ),
    ):
        _line(screen, format_bytes(value.value), f"{name}{_span(value)}", what)
    for doubt in memory_doubts(e):
        share = f"-{format_bytes(int(doubt.below))} +{format_bytes(int(doubt.above))}"
        _line(screen, share, f"of the device figure: {doubt.name}", doubt.meaning)


def _span(value: Range) -> str:
    return f" ({format_bytes(value.low)} to {format_bytes(value.high)})"


# ---------------------------------------------------------------- time


def _time(screen: Screen, e: Estimate) -> None:
    time = e.time
    screen.line("")
    screen.line(("time", "bold"), " of one step: seconds = calls x FLOP or bytes moved a call")
    if time is None:
        screen.flow("", [words.no_time(e)], indent=2)
        return
    seconds = {p.phase.value: p for p in time.phases}
    for phase, entries in cost_entries(e).items():
        screen.line("")
        known = seconds.get(phase)
        total = format_seconds(known.seconds if known else sum(entry.amount for entry in entries))
        screen.line(
            (f"  {phase}", "bold"),
            f"  {total}, " + (f"bound by {known.bound}" if known else "no part of the step"),
        )
        for entry in entries:
            _line(screen, format_seconds(entry.amount), entry.formula, entry.what)
    _rates(screen, time)
    _speed_span(screen, e)


def _speed_span(screen: Screen, e: Estimate) -> None:
    """The range of the speed, and what it comes from."""
    found = tokens_range(e)
    assert found is not None
    screen.line("")
    screen.line(
        ("  range", "bold"),
        f"  {found.low:,.0f} to {found.high:,.0f} tokens/s; squares of what widens it add up",
    )
    for doubt in speed_doubts(e):
        share = f"{-doubt.below:+.0%} {doubt.above:+.0%}"
        _line(screen, share, f"of the seconds: {doubt.name}", doubt.meaning)


def _rates(screen: Screen, time: StepTime) -> None:
    screen.line("")
    screen.line(("  rates", "bold"))
    step, peak = f"{time.seconds:.4g} s", f"{time.peak_flops_per_s:.4g} FLOP/s"
    _line(screen, f"{time.tokens_per_s:,.0f}", f"tokens/s = {time.tokens} / {step}", "")
    _line(
        screen,
        f"{time.mfu:.1%}",
        f"MFU = {time.model_flops:.4g} FLOP / {step} / {peak}",
        "what the model needs, recomputation not counted",
    )
    _line(
        screen,
        f"{time.hfu:.1%}",
        f"HFU = {time.hardware_flops:.4g} FLOP / {step} / {peak}",
        "everything computed",
    )
