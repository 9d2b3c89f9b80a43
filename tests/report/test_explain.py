"""--explain: each formula gives its number, the lines add up, and every tensor has a formula."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import pytest
from napkinmath.base.expr import Bindings
from napkinmath.config.train_config import TrainConfig
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.estimate import Estimate, estimate
from napkinmath.memory.simulate import run_order, steps_priced
from napkinmath.models.families import read_config
from napkinmath.report.components import components_at, components_of, held_by_component
from napkinmath.report.entries import (
    SymbolScopes,
    cost_entries,
    formula_of,
    stored_bytes,
    tensor_entries,
)
from napkinmath.report.explain import explanation_text
from priced import CONFIGS, LLAMA_7B, priced


def evaluate(numbers: str) -> Fraction:
    """'⌈11008·4096/2⌉ x 1 B' as a number, by exact arithmetic."""
    text = re.sub(r"\d+(\.\d+)?", r"F('\g<0>')", numbers.removesuffix(" B"))
    text = re.sub(r" x (?=F)", "*", text).replace("·", "*").replace("⌈", "ceil(").replace("⌉", ")")
    return Fraction(eval(text, {"F": Fraction, "ceil": math.ceil, "min": min, "max": max}))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_at_the_peak_has_a_formula_that_gives_its_bytes(name: str) -> None:
    e = priced(name)
    scopes = SymbolScopes(e)
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
        entries = tensor_entries(held, SymbolScopes(e))
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
                r"(\d+) x .+ (FLOP|B moved) = \1 x (.+) = \1 x ([\d.,]+) ?([A-Za-z]*)$", text
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
                    float(match[4].replace(",", "")) * scale[unit], rel=0.01
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


# two models of equal sizes by other letters: a·dh, k·dh and h·h are the same numbers
NARROW_HEADS = {"num_attention_heads": 64}
WIDE = {"hidden_size": 5120, "num_attention_heads": 40, "intermediate_size": 13824}


def taught(**own: int) -> Estimate:
    """A student with numbers of its own beside a teacher with 32 heads of 128."""
    workload = Workload(kind=WorkloadKind.DISTILL, teacher="llama-7b")
    return estimate({**LLAMA_7B, **own}, TrainConfig(workload=workload), hardware="H200")


def two_towers() -> Estimate:
    """One model whose second half has heads of its own, of the same size in all."""
    spec = read_config(LLAMA_7B)
    at, layers = next((i, s) for i, s in enumerate(spec.stages) if s.count == 32)
    own = (("a", 64), ("k", 64), ("dh", 64))
    towers = layers.replace(count=16), layers.replace(count=16, path="tower.layers", symbols=own)
    stages = (*spec.stages[:at], *towers, *spec.stages[at + 1 :])
    return estimate(spec.replace(stages=stages), hardware="H200")


def test_of_two_models_of_equal_sizes_each_is_explained_by_its_own_letters() -> None:
    for e in (taught(**NARROW_HEADS), two_towers()):
        held = held_by_component(e.timeline, e.peak)["weights.layers"]
        projections = [t for t, _ in held if "q_proj" in t.module]
        numbers = {formula_of(t, SymbolScopes(e))[1] for t in projections}
        assert {text.partition(" ")[0] for text in numbers} == {"32·128·4096", "64·64·4096"}
        assert "another model or tower: a = " in explanation_text(e)


@pytest.mark.parametrize("model", ["two models", "two towers", "images", "plain"])
def test_a_tensor_keeps_the_bindings_of_its_segment(model: str) -> None:
    if model == "two models":
        e = taught(**NARROW_HEADS)
    else:
        e = two_towers() if model == "two towers" else estimate(ONE_TOWER[model])
    top = Bindings(e.step.symbols)
    order, _ = run_order(e.step, steps=steps_priced(e.config))
    for segment, drawn in zip(order, e.timeline.segments, strict=True):
        own = top.extended(dict(segment.symbols)).values
        for action, index in drawn.events:
            if action == "+":
                bindings = e.timeline.tensors[index].bindings
                assert bindings is not None
                assert bindings.values == own, (segment.name, index)


ONE_TOWER: dict[str, Any] = {"images": "pixtral-12b", "plain": LLAMA_7B}


def test_a_row_counts_the_elements_of_every_model() -> None:
    """A teacher of another width has parameters of the student's names."""
    rows = components_of(taught(**WIDE))
    row = next(row for row in rows if row.key == "weights.layers")
    assert row.origin.endswith(" x 2 B"), row.origin
