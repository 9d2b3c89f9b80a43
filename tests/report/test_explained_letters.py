"""--explain read as a reader reads it: each formula of the printed text, under the letters printed
above it, gives the bytes printed beside it, however many towers and models there are."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

import pytest
from napkinmath.config.train_config import AdapterConfig, TrainConfig
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.estimate import Estimate, estimate
from napkinmath.report.explain import explanation_text
from test_explain import LLAMA_7B, NARROW_HEADS, WIDE, taught, two_towers

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
LINE = re.compile(
    r"^ +(?P<value>[\d.]+) (?P<unit>[KMGT]i?B|B)  (?:(?P<count>\d+) x )?(?P<letters>\S.*?)"
    r" x (?P<each>[\d.]+) B (?P<type>\w+)"
    r"(?: = (?:\d+ x )?(?P<numbers>\S.*?) x [\d.]+ B)?(?:, \d+ B booked as (?P<booked>\d+) each)?"
    r"(?:   |$)"
)


class Line(NamedTuple):
    """One printed line: what is said to be the bytes of so many copies."""

    text: str
    nbytes: float
    count: int
    letters: str
    numbers: str
    item: Fraction
    booked: int


def value_of(formula: str, letters: dict[str, int]) -> Fraction:
    """'⌈f·h/2⌉' under its letters, by exact arithmetic; KeyError for a letter that is not given."""
    text = re.sub(r"[A-Za-z]\w*", lambda m: name_or_value(m[0], letters), formula)
    text = re.sub(r"⌈([^⌈⌉]*)⌉(\d+)", r"up(\1, \2)", text)  # to a multiple of the number behind it
    text = re.sub(r"\d+(\.\d+)?", r"F('\g<0>')", text).replace("·", "*")
    text = text.replace("⌈", "ceil(").replace("⌉", ")").replace("⌊", "floor(").replace("⌋", ")")
    names = {"F": Fraction, "ceil": math.ceil, "floor": math.floor, "min": min, "max": max}
    return Fraction(eval(text, {**names, "up": lambda size, step: math.ceil(size / step) * step}))


def name_or_value(word: str, letters: dict[str, int]) -> str:
    return word if word in ("min", "max") else str(letters[word])


def printed(e: Estimate) -> tuple[list[dict[str, int]], list[Line]]:
    """(letters of the model and of each other model or tower, lines of the memory part)."""
    text = explanation_text(e, width=4000)
    symbols, _, rest = text.partition("\nmemory")
    own, *others = re.split("another model or tower:", symbols)
    found = [dict(re.findall(r"(\w+) = (\d+)", part)) for part in (own, *others)]
    first = {name: int(value) for name, value in found[0].items()}
    scopes = [first] + [first | {n: int(v) for n, v in more.items()} for more in found[1:]]
    memory = rest.partition("from requested to device")[0]
    return scopes, [read(m) for line in memory.splitlines() if (m := LINE.match(line))]


def read(match: re.Match[str]) -> Line:
    return Line(
        match[0],
        float(match["value"]) * UNITS[match["unit"]],
        int(match["count"] or 1),
        match["letters"],
        match["numbers"] or match["letters"],
        Fraction(match["each"]),
        int(match["booked"] or 0),
    )


def small(**fields: object) -> Estimate:
    return estimate(hardware="H200", sequence_length=256, **fields)  # type: ignore[arg-type]


CASES = {
    "plain": lambda: estimate(LLAMA_7B, hardware="H200"),
    "two towers of equal sizes by other heads": two_towers,
    "a teacher of equal hidden size": lambda: taught(**NARROW_HEADS),
    "a teacher equal in everything": taught,
    "a student of another width": lambda: taught(**WIDE),
    "encoder and decoder": lambda: small(model="t5-small"),
    "encoder and decoder of BART": lambda: small(model="bart-large"),
    "images": lambda: small(model="pixtral-12b"),
    "images by CLIP": lambda: small(model="llava-1.5-7b"),
    "images read by layers of their own": lambda: small(model="llama-3.2-11b-vision"),
    "a reference model": lambda: estimate(
        "tinyllama",
        TrainConfig(
            sequence_length=256,
            adapter=AdapterConfig(),
            workload=Workload(kind=WorkloadKind.DPO),
        ),
        hardware="H200",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_printed_formula_under_printed_letters_gives_the_printed_bytes(name: str) -> None:
    scopes, lines = printed(CASES[name]())
    assert len(lines) > 10
    for line in lines:
        each = value_of(line.numbers, {}) * line.item
        booked = line.booked or math.ceil(each / 512) * 512
        assert line.count * booked == pytest.approx(line.nbytes, rel=0.006), line.text
        under = [
            value_of(line.letters, letters) == value_of(line.numbers, {}) for letters in scopes
        ]
        assert any(under), line.text


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_the_letters_of_one_scope(name: str) -> None:
    """Letter by letter, so that a·dh of one tower never stands for k·dh of another."""
    scopes, lines = printed(CASES[name]())
    for line in lines:
        spelled = [
            re.sub(r"[A-Za-z]\w*", lambda m, s=scope: name_or_value(m[0], s), line.letters)
            for scope in scopes
        ]
        assert line.numbers in spelled, line.text


def test_a_wrong_letter_would_be_found() -> None:
    right, wrong = {"a": 64, "dh": 64}, {"a": 32, "dh": 64}
    assert value_of("a·dh", right) == 4096
    assert value_of("a·dh", wrong) != 4096
    assert [value_of("⌈a·dh/2⌉ + max(a, dh)", s) for s in (right, wrong)] == [2112, 1088]
