"""Learned classes against traced steps: with half weights under autocast, the usual precision of
trainers, of which no recording was made, and checkpointed."""

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


CLOSE = 0.001  # of steps that a form was recorded for


@pytest.mark.parametrize(
    "cell",
    [
        Cell("full", True, 2, 333, attention="eager"),
        Cell("lora", True, 1, 77, "bf16-amp", attention="eager"),
    ],
    ids=lambda cell: cell.name,
)
def test_a_layers_own_input_is_freed_once(cell: Cell) -> None:
    """ConvBERT's embeddings, which its forward holds for as long as two layers run, were freed by
    the second layer and as its checkpoint (0.7% low)."""
    form = next(iter(learned_forms.forms_of("convbert")))
    config = {"model_type": "convbert", "architectures": ["ConvBertForTokenClassification"]}
    (one,) = agreement(config, form, [cell], ())
    assert not one.refused
    assert abs(one.difference) < CLOSE, one.name
