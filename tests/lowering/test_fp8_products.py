"""What FP8 products cast, keep and leave: sizes by hand, and the two ways of scaling against each
other."""

from __future__ import annotations

import pytest
from napkinmath.base.expr import Bindings
from napkinmath.config.train_config import AdapterConfig, Precision, TrainConfig
from napkinmath.ir.ledger import ALLOC, Op
from napkinmath.lowering.build import build_step
from napkinmath.lowering.choices import resolve
from napkinmath.models.families import read_config

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 1000,
    "num_hidden_layers": 2,
}
TOKENS, HIDDEN, WIDTH = 2 * 384, 256, 768


def gate(precision: Precision, **fields: object) -> tuple[Op, Bindings]:
    """The gate's product in a layer of 768 tokens."""
    spec = read_config(MODEL)
    config = TrainConfig(micro_batch_size=2, sequence_length=384, precision=precision, **fields)  # type: ignore[arg-type]
    step = build_step(spec, resolve(spec, config, None))
    found = next(
        op
        for run in step.runs
        for op in run.block.ops
        if op.name == "FP8 linear" and op.module.endswith("gate_proj")
    )
    return found, Bindings(step.symbols)


def made(op: Op, bind: Bindings, *, backward: bool = False) -> dict[str, int]:
    return {
        t.name: bind(t.nbytes)
        for action, t in (op.backward if backward else op.forward)
        if action == ALLOC
    }


def test_a_tensor_has_one_scale() -> None:
    forward = made(*gate(Precision.FP8))
    assert forward["scales of input"] == forward["scales of weight"] == 4
    assert forward["input in FP8"] == TOKENS * HIDDEN
    assert forward["weight in FP8"] == WIDTH * HIDDEN


def test_blocks_have_a_scale_for_each_128_of_a_row_and_each_128_by_128() -> None:
    op, bind = gate(Precision.FP8_BLOCK)
    forward, backward = made(op, bind), made(op, bind, backward=True)
    assert forward["scales of input"] == TOKENS * (HIDDEN // 128) * 4
    assert forward["scales of weight"] == (WIDTH // 128) * (HIDDEN // 128) * 4
    assert backward["scales of gradient"] == TOKENS * (WIDTH // 128) * 4
    assert backward["scales of input"] == (TOKENS // 128) * HIDDEN * 4  # down the columns


def test_rows_are_scaled_along_what_a_product_sums_over() -> None:
    """The backward's factors run the other way: 16-bit copies of weight, gradient and input."""
    op, bind = gate(Precision.FP8_ROW)
    forward, backward = made(op, bind), made(op, bind, backward=True)
    assert forward["scales of input"] == TOKENS * 4
    assert forward["scales of weight"] == WIDTH * 4
    assert backward["scales of weight"] == HIDDEN * 4
    copies = {name: size for name, size in backward.items() if "in 16 bits" in name}
    assert copies == {
        "weight in 16 bits, transposed": WIDTH * HIDDEN * 2,
        "gradient again in 16 bits, transposed": TOKENS * WIDTH * 2,
        "input in 16 bits, transposed": TOKENS * HIDDEN * 2,
    }
    assert not any("FP8, transposed" in name for name in backward)


def test_only_tensor_wise_products_copy_operands_transposed() -> None:
    names = {
        p: {n for n in made(*gate(p), backward=True) if "transposed" in n}
        for p in (Precision.FP8, Precision.FP8_BLOCK)
    }
    assert names[Precision.FP8] == {
        f"{n} in FP8, transposed" for n in ("weight", "gradient again", "input")
    }
    assert not names[Precision.FP8_BLOCK]


def test_the_16_bit_input_is_kept_and_the_weight_is_not_cast_to_16_bits() -> None:
    op, bind = gate(Precision.FP8)
    assert [bind(t.nbytes) for t in op.saves] == [TOKENS * HIDDEN * 2]
    assert op.inputs[1].weight is not None
    assert op.inputs[1].dtype.name == "fp32"


def test_head_and_adapters_stay_in_16_bits() -> None:
    spec = read_config(MODEL)
    step = build_step(
        spec, resolve(spec, TrainConfig(precision=Precision.FP8, adapter=AdapterConfig()), None)
    )
    modules = {op.module for run in step.runs for op in run.block.ops if op.name == "FP8 linear"}
    assert modules
    assert not any(m.endswith("lm_head") or "lora" in m for m in modules)


@pytest.mark.parametrize("precision", [Precision.FP8, Precision.FP8_ROW, Precision.FP8_BLOCK])
def test_every_cast_is_dropped_by_the_end_of_its_pass(precision: Precision) -> None:
    op, _ = gate(precision)
    for steps in (op.forward, op.backward):
        alive = [t for action, t in steps if action == ALLOC]
        for action, t in steps:
            if action != ALLOC:
                alive.remove(t)
        assert not any("FP8" in t.name or "scales" in t.name for t in alive)


def test_gradient_of_a_bias_is_as_large_as_the_bias() -> None:
    """Whatever the batch: it is summed over the rows."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100}

    def gradients(batch: int) -> dict[str, int]:
        settings = TrainConfig(micro_batch_size=batch, sequence_length=64, precision=Precision.FP8)
        spec = read_config(config)
        step = build_step(spec, resolve(spec, settings, None))
        bind = Bindings(step.symbols)
        return {
            f"{g.module} {g.name}": bind(g.nbytes) for r in step.runs for g in r.block.gradients
        }

    assert gradients(1) == gradients(4)
