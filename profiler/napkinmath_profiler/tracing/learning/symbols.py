"""Sizes made symbols again: one expression for a number that differs between recordings of one
model at several batches, lengths and sizes of its config."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction

from napkinmath_profiler.tracing.learning.rows import Shape
from napkinmath_profiler.tracing.trace_errors import TraceError

Samples = Sequence[Mapping[str, int]]
ROUNDINGS = (8, 16, 32, 64, 128, 256)
MOST_TERMS = 3
MOST_FACTORS = 4


class Fitting:
    """Finds expressions over the symbols of the samples, of which the first is the base; what was
    found is remembered. `chunks` are whole numbers of the config that a length may be padded to."""

    def __init__(self, samples: Samples, chunks: Sequence[int] = ()) -> None:
        self.samples = samples
        self.chunks = tuple(dict.fromkeys((*chunks, *ROUNDINGS)))
        self._known: dict[tuple[int, ...], str | int] = {}

    def fit(self, numbers: Sequence[int]) -> str | int:
        """The expression as text ('2*b*s*h//a'), or the number where all are equal."""
        key = tuple(numbers)
        if key not in self._known:
            self._known[key] = self._found(key)
        return self._known[key]

    def expressions(self) -> list[str | int]:
        """What was found so far."""
        return list(self._known.values())

    def _found(self, numbers: tuple[int, ...]) -> str | int:
        if len(set(numbers)) == 1:
            return numbers[0]
        symbols = self._moving(numbers)
        found = self._monomial(numbers, symbols) or self._sum(numbers, symbols)
        if found is None and "s" in symbols:
            found = self._padded(numbers, symbols)
        if found is None:
            shown = ", ".join(str(n) for n in dict.fromkeys(numbers))
            raise TraceError(
                f"a size of {shown} follows no rule in {', '.join(symbols) or 'its config'}"
            )
        return found

    def _moving(self, numbers: tuple[int, ...]) -> list[str]:
        """The symbols on which the numbers may turn: those that a sample alone changes along with
        the number."""
        base, found = self.samples[0], dict[str, None]()
        for sample, number in zip(self.samples, numbers, strict=True):
            changed = [name for name in base if sample[name] != base[name]]
            if number != numbers[0] and len(changed) == 1:
                found[changed[0]] = None
        return list(found)

    def _monomial(self, numbers: tuple[int, ...], symbols: list[str]) -> str | None:
        for powers in _powers(symbols):
            values = [_product(sample, powers) for sample in self.samples]
            factor = Fraction(numbers[0]) / values[0]
            if all(factor * value == number for value, number in zip(values, numbers, strict=True)):
                return _text(factor, powers)
        return None

    def _sum(self, numbers: tuple[int, ...], symbols: list[str]) -> str | None:
        terms = [dict[str, int](), *_powers(symbols, most=3)]
        columns = [[_product(sample, term) for sample in self.samples] for term in terms]
        plain = [i for i, term in enumerate(terms) if min(term.values(), default=1) > 0]
        for count in range(2, MOST_TERMS + 1):
            places = range(len(terms)) if count == 2 else plain
            for some in itertools.combinations(places, count):
                factors = _solve([columns[i] for i in some], numbers)
                if factors is not None and all(factors):
                    return _added([(f, terms[i]) for f, i in zip(factors, some, strict=True)])
        return None

    def _padded(self, numbers: tuple[int, ...], symbols: list[str]) -> str | None:
        """With the length rounded up to a multiple, or counted in chunks."""
        others = [name for name in symbols if name != "s"]
        for chunk in self.chunks:
            for name, length in (
                (f"up(s,{chunk})", lambda s, c=chunk: -(-s // c) * c),
                (f"ceil(s,{chunk})", lambda s, c=chunk: -(-s // c)),
            ):
                samples = [{**sample, name: length(sample["s"])} for sample in self.samples]
                inner = Fitting(samples, ())
                found = inner._monomial(numbers, [*others, name])
                found = found or inner._sum(numbers, [*others, "s", name])
                if found is not None:
                    return found
        return None


class UnknownSizeError(Exception):
    """A size that the smaller set of samples does not settle."""


class Recognising(Fitting):
    """Recognises, by fewer samples in which several symbols move at once, sizes that another
    fitting has found."""

    def __init__(self, samples: Samples, found: Fitting) -> None:
        super().__init__(samples)
        clashing: set[tuple[int, ...]] = set()
        for expression in set(found.expressions()):
            key = tuple(evaluated(expression, sample) for sample in samples)
            if self._known.setdefault(key, expression) != expression:
                clashing.add(key)
        for key in clashing:
            del self._known[key]

    def _found(self, numbers: tuple[int, ...]) -> str | int:
        if len(set(numbers)) == 1:
            return numbers[0]
        raise UnknownSizeError


def evaluated(expression: str | int, sample: Mapping[str, int]) -> int:
    """The value of a size that `Fitting` wrote."""
    if isinstance(expression, int):
        return expression
    names: dict[str, object] = {
        **sample,
        "up": lambda s, c: -(-s // c) * c,
        "ceil": lambda s, c: -(-s // c),
    }
    return int(eval(expression, {"__builtins__": {}}, names))  # written by this module alone


def coded(symbols: Sequence[str]) -> list[set[str]]:
    """Sets of symbols to move at once, by which each can be told from the others: the digits of
    their numbers."""
    count = (len(symbols)).bit_length()
    return [{name for i, name in enumerate(symbols) if (i + 1) >> bit & 1} for bit in range(count)]


def _powers(symbols: Sequence[str], most: int = MOST_FACTORS) -> list[dict[str, int]]:
    """Products of symbols, each once, over or under the line; simple ones first."""
    found: list[dict[str, int]] = []
    for count in range(1, min(most, len(symbols)) + 1):
        for some in itertools.combinations(symbols, count):
            for signs in itertools.product((1, -1), repeat=count):
                if any(sign > 0 for sign in signs):
                    found.append(dict(zip(some, signs, strict=True)))
        for name in symbols if count == 2 else ():
            found.append({name: 2})
    return sorted(found, key=lambda term: (sum(p < 0 for p in term.values()), len(term)))


def _product(sample: Mapping[str, int], powers: Mapping[str, int]) -> Fraction:
    value = Fraction(1)
    for name, power in powers.items():
        value *= Fraction(sample[name]) ** power
    return value


def _solve(columns: list[list[Fraction]], numbers: Sequence[int]) -> list[Fraction] | None:
    """Small factors of the columns whose sum is the numbers; None where there are none."""
    rows = [[*row, Fraction(n)] for row, n in zip(zip(*columns, strict=True), numbers, strict=True)]
    width = len(columns)
    for column in range(width):
        pivot = next((r for r in range(column, len(rows)) if rows[r][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [x / rows[column][column] for x in rows[column]]
        for r in range(len(rows)):
            if r != column and rows[r][column]:
                by = rows[r][column]
                rows[r] = [x - by * y for x, y in zip(rows[r], rows[column], strict=True)]
    if any(row[-1] for row in rows[width:]):
        return None
    factors = [rows[i][-1] for i in range(width)]
    return factors if all(f.denominator <= 64 for f in factors) else None


def _text(factor: Fraction, powers: Mapping[str, int]) -> str:
    above = [name for name, power in powers.items() for _ in range(max(power, 0))]
    below = [name for name, power in powers.items() for _ in range(max(-power, 0))]
    if factor.numerator != 1 or not above:
        above.insert(0, str(factor.numerator))
    if factor.denominator != 1:
        below.append(str(factor.denominator))
    return "*".join(above) + "".join(f"//{name}" for name in below)


def _added(terms: list[tuple[Fraction, dict[str, int]]]) -> str:
    ordered = sorted(terms, key=lambda term: term[0] < 0)
    text = ""
    for factor, powers in ordered:
        piece = _text(abs(factor), powers)
        text += f"-{piece}" if factor < 0 else f"+{piece}" if text else piece
    return text


def joined(samples: Sequence[object], fitting: Fitting, where: str = "") -> object:
    """One structure for those of several recordings, sizes as expressions; raises TraceError where
    they differ in more."""
    first = samples[0]
    if isinstance(first, Shape):
        if any(len(x) != len(first) for x in samples):  # type: ignore[arg-type]
            raise TraceError(f"a tensor has other axes at another size{where}")
        return [fitting.fit(numbers) for numbers in zip(*samples, strict=True)]  # type: ignore[arg-type]
    if isinstance(first, dict):
        if any(set(x) != set(first) for x in samples):  # type: ignore[arg-type]
            raise TraceError(f"an operation is called otherwise at another size{where}")
        return {k: joined([x[k] for x in samples], fitting, where) for k in first}  # type: ignore[index]
    if isinstance(first, (list, tuple)):
        if any(len(x) != len(first) for x in samples):  # type: ignore[arg-type]
            raise TraceError(f"it runs another number of operations at another size{where}")
        named = first and isinstance(first[0], str) and len(first) == 6
        place = f", at {first[0]} of {first[1] or 'the model'}" if named else where
        return [joined(list(items), fitting, place) for items in zip(*samples, strict=True)]
    if any(x != first for x in samples):
        raise TraceError(
            f"{first!r} is {next(x for x in samples if x != first)!r} at another size{where}"
        )
    return first
