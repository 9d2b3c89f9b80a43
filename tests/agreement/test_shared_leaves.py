"""A leaf that later layers read, and its gradient, against the traced step."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from agreement.tiny_configs import TINY
from agreement_matrix import compare
from analytic_vs_traced import Case

TOLERANCE = 0.001  # less than the bias


@pytest.mark.filterwarnings("ignore")
def test_the_gradient_of_t5s_zero_bias_lives_to_the_end() -> None:
    """Checkpointed layers accumulate it into `.grad` of the first layer's (1.1% low without)."""
    config = {**TINY["t5"], "dropout_rate": 0.0}
    case = Case(config=config, checkpointing=True, attention="auto", sequence=333)
    cell = compare("t5", case)
    assert abs(cell.difference) <= TOLERANCE, f"{cell.difference:+.3%}"
