"""Sizes made symbols again: one expression for a number that differs between recordings of one
model at several batches, lengths and sizes of its config."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from napkinmath_profiler.tracing.learning.rows import Shape
from napkinmath_profiler.tracing.trace_errors import TraceError

Samples = Sequence[Mapping[str, int]]
View = Sequence[Mapping[str, int]]
"""The samples with other symbols in the place of some: one that follows from several moves alone
there."""
Term = dict[str, int]
"""A product of symbols: name -> power."""
LENGTHS = ("s", "st")
ROUNDINGS = (8, 16, 32, 64, 128, 256)
POWERS = (1, -1, 2, -2)
MOST_PARTS = 16
"""A size is a whole multiple of a product, or such a part of one (half a head, a quarter of it)."""


class Fitting:
    """Finds expressions over the symbols of the samples; what was found is remembered.

    The first sample is the base, others move one symbol, the last ones several at once: an
    expression is read off the former and has to hold in all. `chunks` are whole numbers of the
    config that a length may be padded to. `views` are tried where the samples show no rule.
    """

    def __init__(
        self,
        samples: Samples,
        chunks: Sequence[int] = (),
        *,
        views: Sequence[View] = (),
        most_parts: int = MOST_PARTS,
    ) -> None:
        self.samples = samples
        self._views = [Fitting(view) for view in views]
        self._most_parts = most_parts
        self.chunks = tuple(dict.fromkeys((*chunks, *ROUNDINGS)))
        self._known: dict[tuple[int, ...], str | int] = {}
        self._alone = self._moved_alone()

    def _moved_alone(self) -> dict[str, int]:
        """Symbol -> the sample that moves it alone."""
        base, found = self.samples[0], dict[str, int]()
        for index, sample in enumerate(self.samples):
            moved = [name for name in base if sample[name] != base[name]]
            if len(moved) == 1:
                found.setdefault(moved[0], index)
        return found

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
        samples = list(self.samples)
        found = self._plainly(numbers) or self._in_a_view(numbers)
        lengths = [one for one in LENGTHS if one in self._alone and found is None]
        for s, chunk in itertools.product(lengths, self.chunks):
            for name, length in ((f"up({s},{chunk})", chunk), (f"ceil({s},{chunk})", 1)):
                padded = [{**x, s: -(-x[s] // chunk) * length} for x in samples]
                found = self._one_term(numbers, padded) or self._sum(numbers, padded)
                if found is not None:
                    return _with_length(found, s, name)
        if found is None:
            shown = ", ".join(str(n) for n in dict.fromkeys(numbers))
            raise TraceError(f"a size of {shown} follows no rule in its config")
        return found

    def _plainly(self, numbers: Sequence[int]) -> str | None:
        samples = list(self.samples)
        return self._one_term(numbers, samples) or self._sum(numbers, samples)

    def _in_a_view(self, numbers: Sequence[int]) -> str | None:
        return next(filter(None, (view._plainly(numbers) for view in self._views)), None)

    def _one_term(self, numbers: Sequence[int], samples: Samples) -> str | None:
        """A product of symbols, or a part of one."""
        term = self._proportional(numbers, samples)
        factor = Fraction(numbers[0]) / _product(samples[0], term)
        if factor.denominator > self._most_parts:
            return None
        holds = all(factor * _product(x, term) == n for x, n in zip(samples, numbers, strict=True))
        return _text(factor, term) if holds else None

    def _proportional(self, numbers: Sequence[int | Fraction], samples: Samples) -> Term:
        """The symbols by a power of which the numbers grow."""
        term: Term = {}
        for name, index in self._alone.items():
            ratio = Fraction(numbers[index]) / numbers[0] if numbers[0] else Fraction(1)
            grown = Fraction(samples[index][name], samples[0][name])
            power = next((p for p in POWERS if grown**p == ratio and ratio != 1), 0)
            if power:
                term[name] = power
        return term

    def _sum(self, numbers: Sequence[int], samples: Samples) -> str | None:
        """A sum of whole multiples of products, times what all of them have in common."""
        common = self._proportional(numbers, samples)
        rest = [n / _product(x, common) for x, n in zip(samples, numbers, strict=True)]
        base, slopes = samples[0], dict[str, Fraction]()
        for name, index in self._alone.items():
            step = samples[index][name] - base[name]
            if step and rest[index] != rest[0]:
                slopes[name] = (rest[index] - rest[0]) / step
        for groups in _groupings({name: slopes[name] * base[name] for name in slopes}):
            terms = [(slopes[g[0]] / _product(base, dict.fromkeys(g[1:], 1)), g) for g in groups]
            constant = rest[0] - sum((slopes[g[0]] * base[g[0]] for g in groups), Fraction(0))
            parts = [(factor, dict.fromkeys(g, 1)) for factor, g in terms]
            parts += [(constant, {})] if constant else []
            if self._holds(parts, rest, samples):
                return _added([(factor, _times(term, common)) for factor, term in parts])
        return None

    def _holds(
        self, parts: list[tuple[Fraction, Term]], rest: Sequence[Fraction], samples: Samples
    ) -> bool:
        whole = len(parts) > 1 and all(factor.denominator == 1 for factor, _ in parts)
        return whole and all(
            sum((f * _product(x, term) for f, term in parts), Fraction(0)) == n
            for x, n in zip(samples, rest, strict=True)
        )


class UnknownSizeError(Exception):
    """A size that the smaller set of samples does not settle."""


class Recognising(Fitting):
    """Recognises, by fewer samples in which several symbols move at once, sizes that another
    fitting has found."""

    def __init__(self, samples: Samples, found: Fitting) -> None:
        super().__init__(samples)
        self._clashing: set[tuple[int, ...]] = set()
        for expression in set(found.expressions()):
            key = tuple(evaluated(expression, sample) for sample in samples)
            if self._known.setdefault(key, expression) != expression:
                self._clashing.add(key)
        for key in self._clashing:
            del self._known[key]

    def _found(self, numbers: tuple[int, ...]) -> str | int:
        if len(set(numbers)) == 1 and numbers not in self._clashing:
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


def _groupings(worth: Mapping[str, Fraction]) -> Iterator[list[list[str]]]:
    """How symbols may stand together in products: those of one term are worth the same."""
    together: dict[Fraction, list[str]] = {}
    for name, value in worth.items():
        together.setdefault(value, []).append(name)
    ways = [
        [[names], [[name] for name in names]] if len(names) > 1 else [[names]]
        for names in together.values()
    ]
    for chosen in itertools.product(*ways):
        yield [group for groups in chosen for group in groups]


def _times(term: Term, other: Term) -> Term:
    return {name: term.get(name, 0) + other.get(name, 0) for name in (*term, *other)}


def _with_length(expression: str, plain: str, length: str) -> str:
    """The expression with a rounded length in the place of a plain one."""
    return re.sub(rf"\b{plain}\b", length, expression)


def _product(sample: Mapping[str, int], powers: Mapping[str, int]) -> Fraction:
    value = Fraction(1)
    for name, power in powers.items():
        value *= Fraction(sample[name]) ** power
    return value


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
