"""Tensor parallelism by the rules against torch's own DTensor on pretended ranks: transformers'
tp_plan, and torch's styles with a split sequence."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import Counter

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.config.train_config import Precision, TrainConfig
from napkinmath.ir.costs import Collective
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.parallel.tensor_parallel import trace_tensor_parallel
from napkinmath_profiler.tracing.traced_timeline import timeline_of

TOLERANCE = 0.01
BATCH, LENGTH = 2, 128
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
FAMILIES = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 32},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": None},
}
TORCH_NAMES = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}


def analytic(
    config: dict[str, object], degree: int, *, sequence: bool, stack: str = "hf-bare"
) -> Step:
    parallel = ParallelConfig(tensor_parallel_size=degree, sequence_parallel=sequence)
    train = TrainConfig(
        micro_batch_size=BATCH,
        sequence_length=LENGTH,
        precision=Precision.BF16,
        optimizer="adamw",
        clip_gradients=False,
        parallel=parallel,
    )
    return build_step(read_config(config), Policy(train, STACKS[stack]))


def collectives(step: Step) -> Counter[tuple[str, int]]:
    """(kind, bytes of the whole message) of one micro-step."""
    bind, found = Bindings(step.symbols), Counter[tuple[str, int]]()
    for run in step.runs:
        for op in run.block.ops:
            for cost in (*op.costs, *op.backward_costs):
                if isinstance(cost, Collective):
                    found[cost.kind, bind(cost.moved)] += run.count
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["plan", "sequence"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_of_a_rank_is_the_traced_one(family: str, sequence: bool) -> None:
    if family == "qwen3" and sequence:
        pytest.skip("the norm of each head wants a plan of its own beside torch's styles")
    config = FAMILIES[family]
    options = TraceOptions(micro_batch_size=BATCH, sequence_length=LENGTH, optimizer="adamw")
    result = trace_tensor_parallel(dict(config), 2, options, sequence=sequence)
    traced, step = timeline_of(result).peak().nbytes, analytic(config, 2, sequence=sequence)
    assert simulate(step).peak().nbytes == pytest.approx(traced, rel=TOLERANCE)
    counted = Counter[tuple[str, int]]()
    for record in result.records:
        name = record.op.removeprefix("_c10d_functional.").removesuffix(".default")
        if (
            record.step == 0
            and name in TORCH_NAMES
            and record.phase.value in ("forward", "backward")
        ):
            share = 2 if name == "reduce_scatter_tensor" else 1
            counted[TORCH_NAMES[name], record.requested_bytes * share] += 1
    rows = BATCH * LENGTH * 4  # the loss exchanges one number a row, on its own
    assert Counter({key: n for key, n in collectives(step).items() if key[1] != rows}) == Counter(
        {key: n for key, n in counted.items() if key[1] != rows}
    )


# Families whose tp_plan in transformers splits all that can be split; others leave fused
# projections or shared experts whole.
PLANNED = (
    "granite",
    "gemma2",
    "starcoder2",
    "olmo",
    "smollm3",
    "arcee",
    "nemotron",
    "helium",
    "cohere",
    "apertus",
    "exaone4",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "glm4_moe",
)


@pytest.mark.parametrize("family", PLANNED)
def test_the_plan_of_each_family_is_traced_to_a_thousandth(family: str) -> None:
    from agreement.tiny_configs import TINY

    options = TraceOptions(micro_batch_size=BATCH, sequence_length=LENGTH, optimizer="adamw")
    traced = timeline_of(trace_tensor_parallel(dict(TINY[family]), 2, options)).peak().nbytes
    assert simulate(analytic(TINY[family], 2, sequence=False)).peak().nbytes == pytest.approx(
        traced, rel=0.001
    )


def test_four_ranks_share_two_key_value_heads() -> None:
    with pytest.raises(
        InputError,
        match=(
            "num_key_value_heads=2 of llama does not divide by tensor_parallel_size=4; use 1 or 2"
        ),
    ):
        analytic(
            FAMILIES["llama"], 4, sequence=False
        )  # torch's and transformers' splits refuse it, Megatron-LM copies heads
    step = analytic(FAMILIES["llama"], 4, sequence=False, stack="megatron")
    bind = Bindings(step.symbols)
    assert (step.symbols["a"], step.symbols["k"]) == (1, 1)
    layer = next(run for run in step.runs if run.count == 2)
    sizes = {
        w.path.split(".")[-2]: bind(w.elements) for w in layer.block.weights if w.kind == "linear"
    }
    assert sizes == {
        "q_proj": 32 * 128,
        "k_proj": 32 * 128,
        "v_proj": 32 * 128,
        "o_proj": 128 * 32,
        "gate_proj": 48 * 128,
        "up_proj": 48 * 128,
        "down_proj": 128 * 48,
    }
