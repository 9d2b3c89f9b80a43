"""The literature's formulas, where they hold: activations of a layer, in-flight micro-batches,
bubbles, Megatron-LM's weights; and where not."""

from __future__ import annotations

import pytest
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, PipelineSchedule
from napkinmath.config.train_config import (
    Attention,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.costs import Collective
from napkinmath.ir.ledger import ALLOC, Phase, Tensor, Work
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.parallel.stage_order import (
    bubble_fraction,
    in_flight,
    layers_per_stage,
    stage_order,
)
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config

HIDDEN, HEADS, LENGTH = 1024, 16, 1024
GPT = {
    "model_type": "gpt2",
    "n_embd": HIDDEN,
    "n_layer": 4,
    "n_head": HEADS,
    "n_inner": 4 * HIDDEN,
    "vocab_size": 51200,
    "n_positions": 2048,
    "activation_function": "gelu",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.0,
    "tie_word_embeddings": True,
}
ROW_STATISTICS = 0.004  # means, deviations and log-sum-exps in fp32, which the formulas leave out


def megatron_step(
    config: dict[str, object], parallel: ParallelConfig, *, rank: int = 0, **changes: object
) -> Step:
    train = TrainConfig(
        sequence_length=LENGTH,
        precision=Precision.BF16,
        clip_gradients=False,
        attention=Attention.FLASH2,
        parallel=parallel,
        gradient_accumulation_steps=8 if parallel.pipeline_parallel_size > 1 else 1,
    ).replace(**changes)
    return build_step(
        read_config(config),
        Policy(train, find_stack("megatron"), sdpa_choice=Attention.FLASH),
        pipeline_rank=rank,
    )


def kept_by_a_layer(step: Step) -> float:
    """Bytes that a layer's forward leaves, over s·b·h."""
    bind = Bindings(step.symbols)
    forward = next(s for s in step.micro_steps[0][1] if s.phase is Phase.FORWARD and s.repeat > 1)
    net = sum(
        bind(p.requested) * (1 if action == ALLOC else -1)
        for action, p in forward.events
        if isinstance(p, Tensor)
    )
    return net / (LENGTH * step.symbols["h"])


def tensor(degree: int, *, sequence: bool = False) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=degree, sequence_parallel=sequence)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_layer_keeps_what_korthikanti_et_al_say(degree: int, sequence: bool) -> None:
    """Table 2 of arXiv 2205.05198: 34/t with a split sequence, 10 + 24/t without, the 5·a·s/(h·t)
    of whole scores apart."""
    if sequence and degree == 1:
        pytest.skip("one rank splits nothing")
    linear = 34 / degree if sequence else 10 + 24 / degree
    fused = kept_by_a_layer(megatron_step(GPT, tensor(degree, sequence=sequence)))
    assert fused == pytest.approx(linear, rel=ROW_STATISTICS)
    whole = kept_by_a_layer(
        megatron_step(
            {**GPT, "attn_pdrop": 0.1}, tensor(degree, sequence=sequence), attention=Attention.EAGER
        )
    )
    assert whole == pytest.approx(
        linear + 5 * HEADS * LENGTH / (HIDDEN * degree), rel=ROW_STATISTICS
    )


def test_megatrons_softmax_is_one_kernel_over_the_scores() -> None:
    step = megatron_step(GPT, ParallelConfig(), attention=Attention.EAGER)
    names = [op.name for run in step.runs for op in run.block.ops if "attn" in op.module]
    between = names[names.index("q k^T") + 1 : names.index("scores v")]
    assert between == ["scaled masked softmax"]


def test_a_recomputed_layer_keeps_its_input() -> None:
    recompute = RecomputeConfig(kind=RecomputeKind.FULL)
    assert kept_by_a_layer(megatron_step(GPT, tensor(1), recompute=recompute)) == 2
    assert (
        kept_by_a_layer(megatron_step(GPT, tensor(4, sequence=True), recompute=recompute)) == 2 / 4
    )


def test_the_formulas_of_gpt_do_not_hold_for_gated_layers() -> None:
    """Megatron-LM's theoretical_memory_usage.py, 18 + 4·f/h: a gated feed-forward keeps three
    tensors of its width, key/value heads fewer of theirs."""
    sizes = {
        "num_hidden_layers": 4,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_attention_heads": 32,
    }
    llama2 = kept_by_a_layer(
        megatron_step({"model_type": "llama", **sizes, "intermediate_size": 11008}, tensor(1))
    )
    llama3 = kept_by_a_layer(
        megatron_step(
            {"model_type": "llama", **sizes, "intermediate_size": 14336, "num_key_value_heads": 8},
            tensor(1),
        )
    )
    assert llama2 == pytest.approx(16 + 6 * 11008 / 4096, rel=ROW_STATISTICS)
    assert llama3 == pytest.approx(13 + 6 * 14336 / 4096, rel=ROW_STATISTICS)
    assert (18 + 4 * 11008 / 4096) / llama2 == pytest.approx(0.894, abs=0.005)
    assert (18 + 4 * 14336 / 4096) / llama3 == pytest.approx(0.940, abs=0.005)


def test_weights_and_states_are_those_of_megatrons_formula() -> None:
    """18 bytes a parameter of (layers / pp + embedding) / tp on the first stage
    (theoretical_memory_usage.py)."""
    parallel = ParallelConfig(
        tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2
    )
    step = megatron_step({**GPT, "n_layer": 12, "vocab_size": 51200}, parallel)
    held = simulate(step, steps=1)
    states = sum(
        s.repeat
        * sum(
            held.tensors[i].nbytes * (1 if a == "+" else -1)
            for a, i in s.events
            if a in "+-" and held.tensors[i].role.value != "communication buffers"
        )
        for s in held.segments[: held.step_starts[0]]
    )
    layer = 12 * HIDDEN * HIDDEN + 13 * HIDDEN
    positions = (
        2048 * HIDDEN
    )  # learned positions, which the formula leaves out and every rank holds whole
    formula = 18 * (12 * layer / 2 + 51200 * HIDDEN) / 2
    assert states == pytest.approx(formula + 18 * positions, rel=0.002)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_distributed_optimizer_takes_six_bytes_and_a_share_of_twelve(stages: int) -> None:
    """Megatron-LM docs/source/api-guide/dist_optimizer.md: 6 + 12/d bytes a parameter with bf16
    parameters and fp32 gradients."""
    parallel = ParallelConfig(
        pipeline_parallel_size=stages, data_parallel=DataParallel.ZERO1, data_parallel_size=8
    )
    step = megatron_step({**GPT, "n_layer": 8, "tie_word_embeddings": False}, parallel)
    held = simulate(step, steps=1)
    before = held.segments[: held.step_starts[0]]
    states = sum(
        s.repeat * held.tensors[i].nbytes * (1 if a == "+" else -1)
        for s in before
        for a, i in s.events
        if a in "+-"
    )
    bind = Bindings(step.symbols)
    parameters = sum(
        run.count * bind(w.elements) for run in step.runs for w in run.block.weights if w.trainable
    )
    assert states == pytest.approx(parameters * (6 + 12 / 8), rel=0.002)


@pytest.mark.parametrize(
    ("kind", "summed"), [(DataParallel.DDP, "all-reduce"), (DataParallel.ZERO1, "reduce-scatter")]
)
def test_megatron_sums_its_fp32_gradients_once_a_step(kind: DataParallel, summed: str) -> None:
    step = megatron_step(
        {**GPT, "n_layer": 4},
        ParallelConfig(data_parallel=kind, data_parallel_size=8),
        gradient_accumulation_steps=4,
    )
    assert_summed_once(step, summed)


@pytest.mark.parametrize(
    ("kind", "summed"), [(DataParallel.DDP, "all-reduce"), (DataParallel.ZERO1, "reduce-scatter")]
)
def test_every_chunk_of_an_interleaved_stage_is_summed(kind: DataParallel, summed: str) -> None:
    parallel = ParallelConfig(
        data_parallel=kind,
        data_parallel_size=8,
        pipeline_parallel_size=2,
        virtual_pipeline_size=2,
        pipeline_schedule=PipelineSchedule.INTERLEAVED,
    )
    for rank in (0, 1):
        assert_summed_once(megatron_step({**GPT, "n_layer": 8}, parallel, rank=rank), summed)


def assert_summed_once(step: Step, summed: str) -> None:
    """Each trained parameter's four bytes, in one step."""
    bind, sent, parameters = Bindings(step.symbols), 0, 0
    for times, segments in step.micro_steps:
        for segment in segments:
            works = [payload for _, payload in segment.events if isinstance(payload, Work)]
            costs = [c for work in works for c in work.costs if isinstance(c, Collective)]
            costs = [c for c in costs if c.axis != "pipeline"]
            assert {(c.kind, c.ranks) for c in costs} <= {(summed, 8)}
            sent += times * segment.repeat * sum(bind(c.moved) for c in costs)
    parameters = sum(
        run.count * bind(w.elements)
        for run in step.runs
        for w in run.block.weights
        if w.trainable and not w.tied_to
    )
    assert sent == 4 * parameters


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 4), (4, 16), (8, 32)])
def test_1f1b_holds_as_many_micro_batches_as_stages_are_left(
    stages: int, micro_batches: int
) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=stages)
    for rank in range(stages):
        order = stage_order(parallel, rank, micro_batches)
        assert in_flight(order) == {0: min(micro_batches, stages - rank)}
        turns = [turn for times, row in order for _ in range(times) for turn in row]
        assert len(turns) == 2 * micro_batches
    assert bubble_fraction(parallel, micro_batches) == (stages - 1) / micro_batches


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 3, 24)]
)
def test_interleaved_stages_hold_and_wait_as_narayanan_et_al_say(
    stages: int, chunks: int, micro_batches: int
) -> None:
    """In flight p·(1 + (p-1)/(p·v)) micro-batches on the first rank, a bubble of (p-1)/(m·v) (arXiv
    2104.04473; theoretical_memory_usage.py)."""
    parallel = ParallelConfig(
        pipeline_parallel_size=stages,
        virtual_pipeline_size=chunks,
        pipeline_schedule=PipelineSchedule.INTERLEAVED,
    )
    for rank in range(stages):
        order = stage_order(parallel, rank, micro_batches)
        turns = [turn for times, row in order for _ in range(times) for turn in row]
        live, most, state = 0, 0, dict.fromkeys(range(chunks), 0)
        for what, chunk in turns:
            state[chunk] += 1 if what == "forward" else -1
            assert state[chunk] >= 0
            live = sum(state.values())
            most = max(most, live)
        assert live == 0
        if rank == 0:
            assert most / chunks == stages * (1 + (stages - 1) / (stages * chunks))
    assert bubble_fraction(parallel, micro_batches) == (stages - 1) / (micro_batches * chunks)


def test_gpipe_holds_all_and_naive_splitting_one() -> None:
    for schedule, held in ((PipelineSchedule.GPIPE, 8), (PipelineSchedule.NAIVE, 1)):
        parallel = ParallelConfig(pipeline_parallel_size=4, pipeline_schedule=schedule)
        assert in_flight(stage_order(parallel, 0, 8)) == {0: held}
    assert (
        bubble_fraction(
            ParallelConfig(pipeline_parallel_size=4, pipeline_schedule=PipelineSchedule.NAIVE), 8
        )
        == 3
    )


def test_left_over_layers_go_to_the_middle() -> None:
    assert layers_per_stage(126, ParallelConfig(pipeline_parallel_size=16)) == [7, *[8] * 14, 7]
    assert layers_per_stage(9, ParallelConfig(pipeline_parallel_size=4)) == [2, 3, 2, 2]


HALVED = (
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "intermediate_size",
    "mamba_num_heads",
    "n_groups",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
MIXERS: dict[str, dict[str, object]] = {
    "nemotron_h": {
        "model_type": "nemotron_h",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "head_dim": 32,
        "intermediate_size": 384,
        "hybrid_override_pattern": "M-M*ME",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 256,
    },
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "head_dim": 64,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


@pytest.mark.parametrize("family", MIXERS)
def test_a_mixer_s_rank_is_the_same_mixer_of_half_the_heads_and_groups(family: str) -> None:
    """Megatron-LM core/ssm/mamba_mixer.py, gated_delta_net/common.py: heads and groups over ranks,
    the output projection split by rows; torch's and transformers' plans leave such layers out."""
    whole = MIXERS[family]
    half = {k: v // 2 if k in HALVED and isinstance(v, int) else v for k, v in whole.items()}

    def layers(config: dict[str, object], degree: int) -> list[tuple[str, list[int]]]:
        step = megatron_step(config, ParallelConfig(tensor_parallel_size=degree))
        bind = Bindings(step.symbols)
        return [
            (w.path, [bind(axis) for axis in w.axes])
            for run in step.runs
            if run.stage.checkpointed
            for w in run.block.weights
        ]

    assert layers(whole, 2) == layers(half, 1)
    for run in megatron_step(whole, ParallelConfig(tensor_parallel_size=2)).runs:
        if run.stage.checkpointed:
            assert any(isinstance(c, Collective) for op in run.block.ops for c in op.costs)
    with pytest.raises(InputError, match="is not counted in heads or feed-forward"):
        build_step(
            read_config(whole),
            Policy(TrainConfig(parallel=ParallelConfig(tensor_parallel_size=2)), find_stack("hf")),
        )
