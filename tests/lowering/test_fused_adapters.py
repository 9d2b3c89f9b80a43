"""Adapters over quantized weights as one node: what each pass of fms-acceleration's copy of unsloth's
functions reads and writes."""

from __future__ import annotations

import pytest
from napkinmath.base.dtypes import BOOL
from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import AdapterConfig, Precision, QuantizationConfig, TrainConfig
from napkinmath.estimate import estimate
from napkinmath.ir.costs import Gemm, Move
from napkinmath.ir.ledger import ALLOC, Op
from published.stacks import PUBLISHED

STACK, MODEL, LENGTH, WIDTH, RANK = "hf-4.45-foak", "llama-2-7b", 256, 4096, 16
X = LENGTH * WIDTH  # elements of the input, and of the query projection's output


def node(monkeypatch: pytest.MonkeyPatch, dropout: float) -> tuple[Op, Bindings]:
    """The query projection's."""
    monkeypatch.setitem(STACKS, STACK, PUBLISHED[STACK])
    adapter = AdapterConfig(rank=RANK, dropout=dropout, targets=("q_proj",))
    config = TrainConfig(
        sequence_length=LENGTH,
        stack=STACK,
        precision=Precision.BF16,
        adapter=adapter,
        quantization=QuantizationConfig(kbit_preparation=False),
    )
    e = estimate(MODEL, config)
    op = next(op for run in e.step.runs for op in run.block.ops if op.name == "adapter in one node")
    return op, Bindings({**dict(e.spec.symbols), "b": 1, "s": LENGTH, "r": RANK})


def moved(costs: tuple[object, ...], bind: Bindings) -> list[int]:
    return [int(bind(cost.moved)) for cost in costs if isinstance(cost, Move)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_node_reads_and_writes_what_its_source_does(
    monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    op, bind = node(monkeypatch, dropout)
    drawn = [5 * X] if dropout else []  # 16 bits read and written, one byte of mask
    masks = [3 * X, 5 * X] if dropout else []  # x != 0, and its product with the share
    assert moved(op.costs, bind) == [*drawn, 6 * X]
    assert moved(op.backward_costs, bind) == [*masks, 6 * X]
    products = [cost for cost in op.backward_costs if isinstance(cost, Gemm)]
    assert {int(bind(p.flops)) for p in products} == {2 * X * RANK} and len(products) == 6


def test_dropout_makes_a_mask_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    op, _ = node(monkeypatch, 0.1)
    for steps in (op.forward, op.backward):
        assert sum(action == ALLOC and t.dtype is BOOL for action, t in steps) == 1
