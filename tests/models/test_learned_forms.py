"""Learned forms: the light install answers the types that ship, and says what it was not taught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog import learned_forms
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Batch,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import estimate
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.record import record_runs
from napkinmath.models.families import FAMILIES, read_config
from napkinmath.models.layers.learned_sizes import size_of
from napkinmath.models.learned import spec_of

SIZES = [
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
]
TINY = {
    "model_type": "nanochat",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "intermediate_size": 704,
    "vocab_size": 1000,
    "num_hidden_layers": 3,
}


@pytest.mark.parametrize(
    ("written", "value"),
    [("2*b*s*h//a", 240), ("up(s,64)*b", 384), ("ceil(s,64)", 2), ("a+2*k-1", 23), (7, 7)],
)
def test_sizes_are_read_as_they_were_written(written: str | int, value: int) -> None:
    bound = Bindings({"b": 3, "s": 120, "h": 4, "a": 12, "k": 6})
    assert bound(size_of(written)) == value


def test_shipped_forms_are_of_what_no_family_answers() -> None:
    assert learned_forms.shipped_types()
    for kind in set(learned_forms.shipped_types()) & set(FAMILIES):
        config = {"model_type": kind, **{name: 4 for name in SIZES}}
        tasks = {form["task"] for form in learned_forms.forms_of(kind)}
        assert read_config(config).task not in tasks


def test_parameters_follow_the_config() -> None:
    spec = read_config(TINY)
    policy = Policy(TrainConfig(micro_batch_size=2, sequence_length=32), STACKS["hf-bare"])
    sizes = Bindings({**dict(spec.symbols), "b": 2, "s": 32})
    weights = {
        weight.path: sizes(weight.elements) * run.count
        for run in record_runs(spec, policy).runs
        for weight in run.block.weights
        if not weight.buffer
    }
    # embedding and head, three layers of four projections and a plain feed-forward
    attention = 3 * 256 * (4 * 256)
    assert sum(weights.values()) == 2 * 1000 * 256 + attention + 3 * 2 * 256 * 704


def test_adapters_sit_on_learned_linears() -> None:
    spec = read_config(TINY)
    config = TrainConfig(micro_batch_size=2, sequence_length=32, adapter=AdapterConfig(rank=4))
    found = record_runs(spec, Policy(config, STACKS["hf-bare"]))
    layer = next(run for run in found.runs if run.stage.checkpointed)
    adapted = {weight.path for weight in layer.block.weights if "lora" in weight.path}
    assert len(adapted) == 2 * 6
    assert not any(w.trainable for w in layer.block.weights if "lora" not in w.path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("vocab_size", None),
        ("num_key_value_heads", 4),
    ],
)
def test_a_value_that_was_not_seen_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"{field}=.*estimate learn"):
        read_config({**TINY, field: value})


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            {"batch": Batch(packing=True), "attention": Attention.SDPA},
            "packed sequences behind a mask",
        ),
        ({"compile": True}, "torch.compile"),
        ({"stack": "hf-2024"}, "--stack hf-2024"),
        ({"recompute": RecomputeConfig(kind=RecomputeKind.SELECTIVE)}, "selective"),
        ({"parallel": ParallelConfig(context_parallel_size=2)}, "context parallelism"),
    ],
)
def test_what_was_not_recorded_is_refused_by_name(options: dict[str, Any], what: str) -> None:
    config = TrainConfig(micro_batch_size=2, sequence_length=32).replace(**options)
    with pytest.raises(InputError, match=what):
        record_runs(read_config(TINY), Policy(config, STACKS[config.stack]))


def test_packed_sequences_bring_positions_and_their_ends_to_flash_attention() -> None:
    def operations(*, packing: bool) -> list[str]:
        config = TrainConfig(
            micro_batch_size=2,
            sequence_length=32,
            attention=Attention.FLASH2,
            batch=Batch(packing=packing),
        )
        found = record_runs(read_config(TINY), Policy(config, STACKS["hf-bare"]))
        return [op.name for run in found.runs for op in run.block.ops]

    padded, packed = operations(packing=False), operations(packing=True)
    assert packed == [*padded[:2], "position ids", "ends of the sequences", *padded[2:]]


def test_another_head_than_that_of_the_form_is_refused() -> None:
    words = {"SequenceClassification": "no class of model type nanochat", "MaskedLM": "ForMaskedLM"}
    for ending, said in words.items():
        with pytest.raises(InputError, match=said):
            read_config({**TINY, "architectures": [f"NanoChatFor{ending}"]})


def test_an_unknown_type_is_told_of_learning() -> None:
    with pytest.raises(InputError, match="estimate learn"):
        read_config({"model_type": "nobody-wrote-this"})


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ("mistrall", "mistral"),
        ("Qwen3Moe", "qwen3_moe"),
        ("gpt-neox", "gpt_neox"),
        ("prophetnett", "prophetnet"),
        *((other, "") for other in ("deepseek_v9", "deberta", "big_bird", "xlm", "layoutlmv3")),
    ],
)
def test_an_unknown_type_is_offered_what_it_may_be_misspelt_from(given: str, offered: str) -> None:
    """Another model's name was offered, as 'gpt_bigcode' for 'big_bird'."""
    with pytest.raises(InputError) as caught:
        read_config({"model_type": given})
    said = str(caught.value).partition("did you mean ")[2].partition("?")[0]
    assert said.split(", ")[0] == offered


def test_a_broken_file_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": learned_forms.SCHEMA, "forms": "@3", "pieces": []}))
    with pytest.raises(InputError, match="cannot be read"):
        learned_forms.read_forms(str(path))


EXPERTS = {
    "model_type": "mellum",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1000,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_adapters_move_to_the_experts_where_peft_moves_them(targets: tuple[str, ...]) -> None:
    adapter = AdapterConfig(rank=4, targets=targets)
    config = TrainConfig(micro_batch_size=2, sequence_length=32, adapter=adapter)
    found = record_runs(read_config(EXPERTS), Policy(config, STACKS["hf-bare"]))
    weights = [w for run in found.runs if run.stage.checkpointed for w in run.block.weights]
    moved = {w.path.rpartition("mlp.")[2] for w in weights if "experts" in w.path and w.trainable}
    stacks = ("gate_up_proj", "down_proj") if targets == ("all-linear",) else ()
    assert moved == {f"experts.{name}.lora_{factor}" for name in stacks for factor in "AB"}
    # gate and up share a stack, each with its rank: (experts * 2 * rank, h)
    size = Bindings({**dict(read_config(EXPERTS).symbols), "b": 2, "s": 32})
    first = [size(w.elements) for w in weights if w.path.endswith("gate_up_proj.lora_A")]
    assert set(first) == ({4 * 2 * 4 * 64} if stacks else set())


@pytest.mark.parametrize("quantized", [False, True])
def test_a_quantized_router_is_adapted_as_a_linear(quantized: bool) -> None:
    sizes = {k: v for k, v in EXPERTS.items() if k != "model_type"}
    spec = read_config({"model_type": "afmoe", **sizes, "num_dense_layers": 1})
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=32,
        adapter=AdapterConfig(rank=4, targets=("all-linear",)),
        quantization=QuantizationConfig() if quantized else None,
    )
    runs = record_runs(spec, Policy(config, STACKS["hf-bare"])).runs
    last = [run for run in runs if run.stage.checkpointed][-1].block
    read = [op.name for op in last.ops if op.module.endswith("router.gate")]
    assert ("nf4 linear" in read) is quantized and ("B A" in read) is not quantized


def test_an_encoder_is_learned_with_its_own_loss() -> None:
    encoder = {
        "model_type": "electra",
        "hidden_size": 64,
        "embedding_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "num_hidden_layers": 3,
        "id2label": {str(i): str(i) for i in range(5)},
    }
    masked = read_config(encoder)
    assert masked.task == "masked-lm" and masked.stages[-1].part.task == "masked-lm"
    spec = read_config(encoder, task="sequence-classification")
    config = TrainConfig(micro_batch_size=2, sequence_length=32, adapter=AdapterConfig(rank=4))
    runs = record_runs(spec, Policy(config, STACKS["hf-bare"])).runs
    size = Bindings({**dict(spec.symbols), "b": 2, "s": 32})
    head = {w.path: size(w.elements) for w in runs[-1].block.weights if w.trainable}
    # PEFT trains the classifier whole: dense and out_proj with their biases
    assert sorted(head.values()) == [5, 64, 5 * 64, 64 * 64]
    labels = [x for run in runs for x in run.block.weights if "lora" in x.path]
    assert labels and not any("classifier" in x.path for x in labels)


@pytest.mark.parametrize("change", [{"num_labels": 1}, {"tie_word_embeddings": None}])
def test_a_number_to_regress_is_another_loss(change: dict[str, Any]) -> None:
    config = {"model_type": "electra", "architectures": ["ElectraForSequenceClassification"]}
    sizes = dict.fromkeys(SIZES, 4) | {"embedding_size": 2}
    if "num_labels" in change:
        with pytest.raises(InputError, match="num_labels=1"):
            read_config({**config, **sizes, **change})
    else:
        assert read_config({**config, **sizes, **change}).task == "sequence-classification"


def test_sizes_that_run_otherwise_where_they_are_equal_are_refused() -> None:
    config = {"model_type": "electra", **dict.fromkeys(SIZES, 8), "embedding_size": 8}
    forms = learned_forms.forms_of("electra")
    masked = [form for form in forms if form["task"] == "masked-lm" and form["unequal"]]
    with pytest.raises(InputError, match="embedding_size=hidden_size=8"):
        spec_of(masked[0], config, name="electra")
    assert spec_of(masked[0], {**config, "embedding_size": 4}, name="electra").num_layers == 8


def test_a_gradient_that_is_handed_to_a_narrower_input_is_cast() -> None:
    """BitNet's first layer adds fp32 to 16-bit embeddings: what is handed on keeps its size."""
    e = estimate(read_config({"model_type": "bitnet", "num_hidden_layers": 2}))
    sizes = [tensor.requested for tensor in e.timeline.tensors]
    handed = [pair for segment in e.timeline.segments for pair in segment.pairs]
    assert handed and all(sizes[old] == sizes[new] for old, new in handed)


def test_a_second_result_of_a_layer_goes_as_the_next_has_returned() -> None:
    """RemBERT's layers return their probabilities: two layers' are alive at once, not all."""
    config = {"model_type": "rembert", "architectures": ["RemBertForMaskedLM"], "vocab_size": 1000}

    def of_four_layers(length: int) -> int:
        few, more = (
            estimate(
                {**config, "num_hidden_layers": layers},
                bs=1,
                ctx=length,
                attention="eager",
                checkpointing="full",
                method="lora",
            ).peak.nbytes
            for layers in (4, 8)
        )
        return more - few

    probabilities = 18 * 512 * 512 * 2  # of one layer: heads, positions squared, bytes
    assert of_four_layers(512) - of_four_layers(256) < 2 * probabilities


def test_a_pooler_that_nobody_reads_is_not_trained() -> None:
    """LayoutLM's masked head goes over all tokens; its body makes the pooled first one too."""
    config = {"model_type": "layoutlm", **dict.fromkeys(SIZES, 16), "max_position_embeddings": 64}
    policy = Policy(TrainConfig(micro_batch_size=2, sequence_length=8), STACKS["hf-bare"])
    for task, trained in (("masked-lm", False), ("sequence-classification", True)):
        runs = record_runs(read_config(config, task=task), policy).runs
        pooler = [w for run in runs for w in run.block.weights if "pooler" in w.path]
        assert len(pooler) == 2 and all(w.trainable is trained for w in pooler)


def test_what_a_branch_that_no_result_reads_keeps_goes_with_its_layer() -> None:
    """LiLT's layers hand on two streams; no loss reads what the last one makes of the layout."""
    config = {"model_type": "lilt", "num_hidden_layers": 3, "vocab_size": 1000}
    policy = Policy(TrainConfig(micro_batch_size=2, sequence_length=8), STACKS["hf-bare"])
    runs = record_runs(read_config(config, task="sequence-classification"), policy).runs
    layers = [
        run.block.ops for run in runs if any("layout_output" in op.module for op in run.block.ops)
    ]
    kept = [[op for op in ops if "layout_output" in op.module and op.saves] for ops in layers]
    assert kept[0] and not kept[-1]
