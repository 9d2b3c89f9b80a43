"""Public threads and published steps of reinforcement learning: their lines still mean something,
and the report agrees with what was true where it did when the table was made."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from napkinmath.base.expr import Bindings
from napkinmath.ir.costs import Repeated
from napkinmath.ir.ledger import Work

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "accuracy"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


THREADS = script("threads")
ROWS = [row for row in THREADS.rows() if row["line"]]
QUICK = ("huggingface/trl#3678", "huggingface/trl#3456 (0.6B)", "huggingface/alignment-handbook#22")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=row["thread"], marks=() if row["thread"] in QUICK else pytest.mark.slow
        )
        for row in ROWS
    ],
)
def test_a_thread_gets_the_answer_that_the_table_says(row: dict[str, Any]) -> None:
    found = THREADS.agrees(row, THREADS.reported(row["line"]))
    assert found is (row.get("agrees", True) if row["truth"] else None)


def test_published_steps_are_priced_and_lengths_have_their_mean() -> None:
    steps = script("rl_steps")
    rows = {row["row_id"]: row for row in steps.rows()}
    lengths = steps.spread(201, 1536, 701.0)
    assert sum(lengths) / len(lengths) == pytest.approx(701, rel=0.01)
    assert 201 <= min(lengths) < 230 and 1400 < max(lengths) <= 1536
    # the asynchronous step of 192 GPUs: 34.5 s were measured, the rules are too fast (docs/rollouts.md)
    row = rows["nemo-rl-9"]
    time = steps.priced(row).time
    assert time is not None
    slower = float(row["step_s"]) / time.seconds
    assert 1 < slower < 2.2


# Of releases that nothing was made with: dense models are 8 to 41% too fast, 15 in the median; these
# two are 10 and 13%.
PARTS_TOLERANCE = 0.25


@pytest.mark.parametrize("name", ["nemo-rl-18", "nemo-rl-22", "nemo-rl-26"])
def test_steps_of_dense_models_take_what_was_published(name: str) -> None:
    steps = script("rl_steps")
    row = next(row for row in steps.rows() if row["row_id"] == name)
    parts = steps.parts_s(row)
    assert parts["step"] == pytest.approx(float(row["step_s"]), rel=PARTS_TOLERANCE)
    if row["generation_s"]:
        measured = float(row["generation_s"])
        assert parts["generation"] == pytest.approx(measured, rel=PARTS_TOLERANCE)
    assert parts["step"] == pytest.approx(
        parts["training"] + parts["generation"] + parts["refit"], rel=1e-6
    )


def test_weights_of_all_stages_go_through_every_rank_of_a_pipeline() -> None:
    """Each of four stages is a quarter of the layers, and a rank receives all: within the embeddings,
    which two of them have, the whole model's bytes of its tensor ranks."""
    steps = script("rl_steps")
    row = next(row for row in steps.rows() if row["row_id"] == "nemo-rl-27")
    e, received = steps.priced(row), 0
    segments = [segment for _, some in e.step.micro_steps for segment in some]
    for segment in segments:
        if "weights to the engine" in segment.name:
            bind = Bindings({**e.step.symbols, **dict(segment.symbols)})
            works = [work for _, work in segment.events if isinstance(work, Work)]
            costs = [cost for work in works for cost in work.costs if isinstance(cost, Repeated)]
            sent = [cost for cost in costs if getattr(cost.cost, "kind", "") == "broadcast"]
            received += segment.repeat * sum(bind(cost.moved) for cost in sent)
    assert received == pytest.approx(2 * e.num_parameters / int(row["tp"]), rel=0.05)


# TensorRT-LLM's Llama 3.3 70B in FP8 and NVFP4, which no rule was made with: 0 to 24%, 3.4 in the median.
SERVED_TOLERANCE = 0.1


@pytest.mark.parametrize("gpus", ["2xH100", "2xH200"])
def test_a_served_llama_has_the_throughput_that_was_published(gpus: str) -> None:
    served = script("served")
    found = [r for r in served.rows() if r["model"] == "llama-3.3-70b" and r["gpus"] == gpus]
    assert len(found) >= 2
    for row in found:
        assert served.priced(row) == pytest.approx(float(row["tokens_per_s"]), rel=SERVED_TOLERANCE)
