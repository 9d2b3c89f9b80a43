"""Learned classes with half weights under autocast, the usual precision of trainers, against a
traced step. No recording was made of it: one of those of other types runs."""

from __future__ import annotations

import pytest
from napkinmath.catalog import learned_forms
from napkinmath_profiler.tracing.learning.checking import Cell, agreement

ALIKE = 0.0001  # what autocast does not change is recorded as it runs; caches of casts are left
WIDENED = 0.005  # sums and embeddings of the form with fp32 weights are wider than those that run


@pytest.mark.parametrize(
    ("model_type", "tolerance"), [("lfm3", ALIKE), ("mellum", ALIKE), ("nanochat", WIDENED)]
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_half_weights_under_autocast_run_as_traced(
    model_type: str, tolerance: float, method: str
) -> None:
    form = next(f for f in learned_forms.forms_of(model_type) if f["task"] == "causal-lm")
    cell = Cell(method, method == "lora", 2, 512, "bf16-autocast")
    for one in agreement({"model_type": model_type}, form, [cell])[:1]:
        assert not one.refused
        assert abs(one.difference) < tolerance, one.name
