"""Explained figures: the formulas of tensors' bytes, read off their axes, and of operations' seconds,
read off their costs."""

from __future__ import annotations

from napkinmath.base.expr import Bindings, Expr, product, render
from napkinmath.base.units import format_bytes, format_count, format_seconds
from napkinmath.ir.ledger import Phase, Work
from napkinmath.memory.simulate import run_order
from napkinmath.report import words
from napkinmath.report.formula import simplify
from napkinmath.report.tensors import stored_type, tensor_axes
from napkinmath.timing.schedule import Clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.base.expr import Size
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.step import Segment
    from napkinmath.ir.timeline import TensorInfo
    from napkinmath.report.origins import Held

MOST_PLACES = 8
LEAST_SHARE = 0.001  # of a phase's seconds, below which a formula is only counted


class Entry:
    """One explained figure: bytes or seconds in all, of so many copies or calls, by which formula,
    and what it is."""

    __slots__ = ("amount", "count", "formula", "what")

    def __init__(self, amount: float, count: int, formula: str, what: str) -> None:
        self.amount, self.count, self.formula, self.what = amount, count, formula, what


class SymbolScopes:
    """Values of the symbols: the model's, and those of stages that bind some otherwise (a vision
    tower)."""

    def __init__(self, estimate: Estimate) -> None:
        self.top = Bindings(estimate.step.symbols)

    def others(self, held: Held) -> list[tuple[tuple[str, Any], ...]]:
        """The values of other models and towers, each where they differ from the model's own."""
        found = (self._differing(bindings) for t, _ in held if (bindings := self.of(t)))
        return [own for own in dict.fromkeys(found) if own]

    def _differing(self, bindings: Bindings) -> tuple[tuple[str, Any], ...]:
        usual = self.top.values
        return tuple((n, v) for n, v in bindings.values.items() if usual.get(n) != v)

    def of(self, tensor: TensorInfo) -> Bindings | None:
        """The values that the tensor was bound by, where its axes give its bytes under them; None
        where no formula is known."""
        bindings = tensor.bindings
        if bindings is None or formula_bytes(tensor, bindings) != stored_bytes(tensor):
            return None
        return bindings


def stored_bytes(tensor: TensorInfo) -> int:
    """Bytes of one copy, wherever it is."""
    return tensor.nbytes or tensor.host_bytes


def formula_bytes(tensor: TensorInfo, bindings: Bindings) -> int | None:
    """Bytes of a tensor by its axes and type; None where either is unknown."""
    dtype, axes = stored_type(tensor), tensor_axes(tensor)
    if dtype is None or not axes:
        return None
    try:
        elements = bindings(product(axes))
    except KeyError:
        return None
    return -(-elements * dtype.bits // 8)


# ---------------------------------------------------------------- bytes


def tensor_entries(held: Held, scopes: SymbolScopes, *, with_source: bool = True) -> list[Entry]:
    """Every distinct formula with its bytes, where its tensors are, and its source; largest
    first."""
    groups: dict[tuple[Any, ...], dict[str, list[tuple[TensorInfo, int]]]] = {}
    for tensor, count in held:
        key = *formula_of(tensor, scopes), stored_bytes(tensor), tensor.source
        groups.setdefault(key, {}).setdefault(tensor.name, []).append((tensor, count))
    entries: list[Entry] = []
    for (formula, numbers, nbytes, source), names in groups.items():
        for alike, members in _with_same_modules(names):
            count, total = (
                sum(n for _, n in members),
                sum((t.requested or t.host_bytes) * n for t, n in members),
            )
            times = f"{count} x " if count > 1 else ""
            text = f"{times}{formula}" + (f" = {times}{numbers}" if numbers != formula else "")
            booked = members[0][0].requested
            text += f", {nbytes} B booked as {booked} each" if booked not in (nbytes, 0) else ""
            places = _places([t.module for t, _ in members], alike)
            what = f"{', '.join(map(words.printable, alike))}{f' of {places}' if places else ''}{f'   [{words.printable(source)}]' if source and with_source else ''}"
            entries.append(Entry(total, count, text, what))
    return sorted(entries, key=lambda entry: -entry.amount)


def _with_same_modules(
    names: dict[str, list[tuple[TensorInfo, int]]],
) -> list[tuple[list[str], list[tuple[TensorInfo, int]]]]:
    """Tensors of one formula whose names occur in exactly the same modules, together (exp_avg and
    exp_avg_sq)."""
    merged: dict[frozenset[str], tuple[list[str], list[tuple[TensorInfo, int]]]] = {}
    for name, members in names.items():
        alike, together = merged.setdefault(frozenset(t.module for t, _ in members), ([], []))
        alike.append(name)
        together += members
    return list(merged.values())


def formula_of(tensor: TensorInfo, scopes: SymbolScopes) -> tuple[str, str]:
    """A tensor's bytes with symbols and with numbers; both are the plain size where no formula is
    known."""
    bindings = scopes.of(tensor)
    dtype = stored_type(tensor)
    if bindings is None or dtype is None:
        size = f"{stored_bytes(tensor)} B {tensor.dtype}".rstrip()
        return size, size
    elements = simplify(product(tensor_axes(tensor)))
    each = f"{dtype.bits / 8:g} B"
    if not isinstance(elements, Expr):
        plain = f"{elements} x {each} {dtype.name}"
        return plain, plain
    return (
        f"{_factor(elements)} x {each} {dtype.name}",
        f"{_factor(elements, bindings.values)} x {each}",
    )


def _factor(elements: Size, values: dict[str, Any] | None = None) -> str:
    text = render(elements, values)
    return f"({text})" if isinstance(elements, Expr) and elements.op in ("+", "-") else text


def _places(modules: list[str], names: list[str]) -> str:
    """'model.layers.*.self_attn.{q_proj, k_proj}': modules with what they share said once, and
    without the tensor's own name."""
    paths = list(dict.fromkeys(_without_name(module, names) for module in modules if module))
    if len(paths) <= 1:
        return words.printable(paths[0]) if paths else ""
    parts = [path.split(".") for path in paths]
    start = end = 0
    while all(len(p) > start + 1 for p in parts) and len({p[start] for p in parts}) == 1:
        start += 1
    while all(len(p) > start + end + 1 for p in parts) and len({p[-1 - end] for p in parts}) == 1:
        end += 1
    middles = list(dict.fromkeys(".".join(p[start : len(p) - end]) for p in parts))
    some = ", ".join(middles[:MOST_PLACES]) + (
        f" and {len(middles) - MOST_PLACES} more" if len(middles) > MOST_PLACES else ""
    )
    prefix, suffix = (
        ".".join(parts[0][:start]),
        ".".join(parts[0][len(parts[0]) - end :] if end else []),
    )
    return words.printable(".".join(part for part in (prefix, "{" + some + "}", suffix) if part))


def _without_name(module: str, names: list[str]) -> str:
    """'mlp.up_proj.weight' holding 'weight', or states of it, -> 'mlp.up_proj'."""
    for name in names:
        own = name.rpartition(" of ")[2]
        if module.endswith("." + own):
            return module[: -len(own) - 1]
    return module.removesuffix(".weight").removesuffix(".bias")


# ---------------------------------------------------------------- seconds


def cost_entries(e: Estimate) -> dict[str, list[Entry]]:
    """For each phase of a steady step every distinct operation and formula with its seconds, the
    most expensive first."""
    assert e.speed is not None
    clock, top = Clock(e.speed, e.step.policy), Bindings(e.step.symbols)
    order, starts = run_order(e.step, steps=2)
    phases: dict[str, dict[tuple[str, ...], Calls]] = {}
    for times, segment in order[starts[-1] :].counted():
        bind = top.extended(dict(segment.symbols))
        groups = phases.setdefault(segment.phase.value, {})
        for _, work in segment.events:
            if isinstance(work, Work):
                for cost, kernel in zip(work.costs, clock.kernels(work, bind), strict=True):
                    name, kind = _operation(work, segment), type(cost).__name__.lower()
                    key = name, kind, *_cost_formula(cost, bind), kernel.bound
                    groups.setdefault(key, Calls()).add(
                        work, kernel.seconds, times * segment.repeat
                    )
    return {phase: _call_entries(groups) for phase, groups in phases.items() if groups}


class Calls:
    """How often a formula runs in a phase, where, and for how long in all."""

    __slots__ = ("count", "modules", "seconds")

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.modules: dict[str, None] = {}

    def add(self, work: Work, seconds: float, repeat: int) -> None:
        """Counts a kernel that runs `repeat` times."""
        self.count += repeat
        self.seconds += seconds * repeat
        self.modules.setdefault(work.op.module if work.op is not None else "")


def _operation(work: Work, segment: Segment) -> str:
    if work.op is None:
        return (
            "adding gradients"
            if segment.phase is Phase.BACKWARD
            else segment.name.partition(" of ")[0]
        )
    again = segment.phase is Phase.BACKWARD and not work.backward
    return f"{words.printable(work.op.name)}{' again' if again else ''}"


def _cost_formula(cost: Cost, bind: Bindings) -> tuple[str, str, str]:
    """FLOP of a product, bytes moved of anything else: with symbols, with numbers, and the
    value."""
    size, unit = (cost.flops, "FLOP") if cost.flops else (cost.moved, "B moved")
    value = bind(size)
    short = simplify(size)
    return (
        f"{_factor(short)} {unit}",
        _factor(short, bind.values),
        format_count(value) if cost.flops else format_bytes(value),
    )


def _call_entries(groups: dict[tuple[str, ...], Calls]) -> list[Entry]:
    total = sum(calls.seconds for calls in groups.values())
    entries: list[Entry] = []
    small = Calls()
    for (name, kind, formula, numbers, value, bound), calls in sorted(
        groups.items(), key=lambda item: -item[1].seconds
    ):
        if calls.seconds < LEAST_SHARE * total:
            small.count += calls.count
            small.seconds += calls.seconds
            continue
        places = _places(list(calls.modules), [])
        each = format_seconds(calls.seconds / calls.count)
        text = f"{calls.count} x {formula} = {calls.count} x {numbers} = {calls.count} x {value}"
        what = f"{name} ({kind}){f' of {places}' if places else ''}, {each} a call, {bound}"
        entries.append(Entry(calls.seconds, calls.count, text, what))
    if small.count:
        rest = f"{small.count} calls of formulas with less than {LEAST_SHARE:.1%} of the phase each"
        entries.append(Entry(small.seconds, small.count, rest, ""))
    return entries
