"""--explain: each formula gives its number, the lines add up, and every tensor has a formula."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from napkinmath.report.components import components_at, held_by_component
from napkinmath.report.entries import Scopes, cost_entries, formula_of, stored_bytes, tensor_entries
from napkinmath.report.explain import explanation_text
from priced import CONFIGS, priced


def evaluate(numbers: str) -> Fraction:
    """'⌈11008·4096/2⌉ x 1 B' as a number, by exact arithmetic."""
    text = re.sub(r"\d+(\.\d+)?", r"F('\g<0>')", numbers.removesuffix(" B"))
    text = re.sub(r" x (?=F)", "*", text).replace("·", "*").replace("⌈", "ceil(").replace("⌉", ")")
    return Fraction(eval(text, {"F": Fraction, "ceil": math.ceil, "min": min, "max": max}))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_at_the_peak_has_a_formula_that_gives_its_bytes(name: str) -> None:
    e = priced(name)
    scopes = Scopes(e)
    for tensor, count in zip(e.timeline.tensors, e.timeline.live_counts(e.peak), strict=True):
        if count:
            assert scopes.of(tensor) is not None, tensor.name
            formula, numbers = formula_of(tensor, scopes)
            plain = numbers if numbers != formula else re.sub(r" \w+$", "", numbers)
            assert math.ceil(evaluate(plain)) == stored_bytes(tensor), (
                tensor.name,
                formula,
                numbers,
            )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_lines_of_a_component_hold_all_its_tensors(name: str) -> None:
    e = priced(name)
    rows = {row.key: row for row in components_at(e.timeline, e.peak)}
    for key, held in held_by_component(e.timeline, e.peak).items():
        entries = tensor_entries(held, Scopes(e))
        assert sum(entry.amount for entry in entries) == rows[key].nbytes
        assert sum(entry.count for entry in entries) == rows[key].num_tensors
        for entry in entries:
            assert entry.count == 1 or entry.formula.startswith(f"{entry.count} x ")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_costs_of_a_phase_add_up_to_its_device_time(name: str) -> None:
    e = priced(name)
    assert e.time is not None
    lines = cost_entries(e)
    for phase in e.time.phases:
        assert sum(entry.amount for entry in lines[phase.phase.value]) == pytest.approx(
            phase.device_s, rel=1e-9
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cost_line_says_its_value_in_symbols_and_in_numbers(name: str) -> None:
    for entries in cost_entries(priced(name)).values():
        for text in (entry.formula for entry in entries):
            match = re.match(
                r"(\d+) x .+ (FLOP|B moved) = \1 x (.+) = \1 x ([\d.]+) ?([A-Za-z]*)$", text
            )
            if match is None:
                assert "formulas with less than" in text
                continue
            scale = {
                "": 1,
                "K": 1e3,
                "M": 1e6,
                "B": 1e9,
                "T": 1e12,
                "KiB": 2**10,
                "MiB": 2**20,
                "GiB": 2**30,
            }
            unit = "" if match[2] == "B moved" and match[5] == "B" else match[5]
            if "/" not in re.sub(
                r"⌈[^⌈⌉]*⌉", "", match[3]
            ):  # a floor outside ceilings reads like a quotient
                assert float(evaluate(match[3])) == pytest.approx(
                    float(match[4]) * scale[unit], rel=0.01
                ), text


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_explanation_fits_the_screen_and_names_its_sources(width: int) -> None:
    text = explanation_text(priced("qlora"), width=width)
    assert max(map(len, text.splitlines())) <= width
    for expected in (
        "h = 4096 hidden size",
        "bitsandbytes",
        "4·2048·32000",
        "requested",
        "allocated",
        "reserved",
        "device",
        "MFU =",
        "HFU =",
    ):
        assert expected in re.sub(r"\s+", " ", text), expected


def test_the_explanation_without_a_gpu_has_no_times() -> None:
    assert "name a GPU with --gpu" in explanation_text(priced("qlora", None))


def test_ascii_terminals_get_ascii() -> None:
    assert explanation_text(priced("qlora"), unicode=False).isascii()
