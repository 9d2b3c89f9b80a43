"""Components: every tensor in one row, rows that sum exactly, phrases made from the tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Point, Stamp, TensorInfo, Timeline, TimelineSegment
from napkinmath.report.components import components_at, components_of
from napkinmath.report.origins import Facts, facts_of
from napkinmath.report.parts import LABELS, component_key
from priced import CONFIGS, priced, timelines


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("gpu", ["RTX 4090", None])
def test_rows_sum_to_the_device_figure(name: str, gpu: str | None) -> None:
    e = priced(name, gpu)
    rows = components_of(e)
    assert sum(row.nbytes for row in rows) == int(e.memory.device.value)
    tensors = [row for row in rows if row.role not in (Role.SLACK, Role.CONTEXT)]
    assert sum(row.nbytes for row in tensors) == e.peak.nbytes
    assert [row.key for row in rows] == [key for key in LABELS if key in {row.key for row in rows}]


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_sum_at_every_segment_peak_and_agree_with_the_roles(name: str) -> None:
    timeline = priced(name).timeline
    for point in timeline.segment_peaks():
        rows = components_at(timeline, point)
        assert sum(row.nbytes for row in rows) == point.nbytes
        for role, nbytes in timeline.breakdown(point).items():
            assert sum(row.nbytes for row in rows if row.role is role) == nbytes


@pytest.mark.slow
@given(timelines())
def test_rows_of_any_timeline_sum_to_its_peak(timeline: Timeline) -> None:
    point = timeline.peak()
    rows = components_at(timeline, point)
    assert sum(row.nbytes for row in rows) == sum(timeline.breakdown(point).values())
    assert all(row.key in LABELS and row.num_tensors for row in rows)


@pytest.mark.parametrize(
    ("role", "module", "name", "key"),
    [
        (Role.WEIGHTS, "model.layers.*.mlp.up_proj.weight", "weight", "weights.layers"),
        (Role.WEIGHTS, "transformer.h.3.attn.c_attn.weight", "weight", "weights.layers"),
        (Role.WEIGHTS, "model.layers.*.input_layernorm.weight", "weight", "weights.other"),
        (Role.WEIGHTS, "transformer.h.3.ln_1.weight", "weight", "weights.other"),
        (Role.WEIGHTS, "model.embed_tokens.weight", "weight", "weights.other"),
        (Role.ACTIVATIONS, "model.layers.*", "hidden states", "activations.residual"),
        (Role.ACTIVATIONS, "model.layers.7", "add", "activations.residual"),
        (Role.ACTIVATIONS, "model.layers.*.self_attn.q_proj", "output", "activations.attention"),
        (Role.ACTIVATIONS, "model.layers.*.block_sparse_moe.experts", "output", "activations.mlp"),
        (Role.ACTIVATIONS, "model.layers.*.mlp", "silu", "activations.mlp"),
        (Role.ACTIVATIONS, "model.layers.*.self_attn.q_norm", "rsqrt", "activations.norm"),
        (Role.WEIGHTS, "model.layers.self_attn.q_proj.weight", "weight", "weights.layers"),
        (Role.WEIGHTS, "bert.encoder.layer.*.output.LayerNorm.weight", "weight", "weights.other"),
        (
            Role.ACTIVATIONS,
            "encoder.block.*.layer.0.SelfAttention.q",
            "output",
            "activations.attention",
        ),
        (Role.ACTIVATIONS, "encoder.block.*.layer.1.DenseReluDense", "relu", "activations.mlp"),
        (
            Role.ACTIVATIONS,
            "bert.encoder.layer.*.attention.output",
            "dropout",
            "activations.attention",
        ),
        (Role.ACTIVATIONS, "bert.encoder.layer.*.output", "add", "activations.residual"),
        (Role.ACTIVATIONS, "model", "input ids", "activations.other"),
        (Role.UNEXPLAINED, "anything", "?", "unexplained"),
        (Role.LOGITS, "lm_head", "output", "logits"),
    ],
)
def test_a_tensor_belongs_to_the_row_of_its_role_and_module(
    role: Role, module: str, name: str, key: str
) -> None:
    assert component_key(TensorInfo(name, role, module, 8, 512)) == key


def test_every_role_has_a_row() -> None:
    for role in Role:
        assert component_key(TensorInfo("t", role, "m", 8, 512)) in LABELS


def test_what_nobody_explained_is_listed_as_unknown() -> None:
    tensors = [
        TensorInfo("a", Role.WEIGHTS, "model.layers.0.mlp", 1000, 1024),
        TensorInfo("b", Role.UNEXPLAINED, "", 5000, 5120),
    ]
    timeline = Timeline(
        tensors,
        [TimelineSegment("s", Phase.FORWARD, 1, [("+", 0), ("+", 1)], [])],
        Stamp(origin="measured"),
    )
    rows = components_at(timeline, timeline.peak())
    assert [(row.label, row.nbytes) for row in rows] == [
        ("weights of the layers", 1024),
        ("unknown", 5120),
    ]


def test_phrases_come_from_the_tensors() -> None:
    rows = {row.key: row for row in components_of(priced("qlora"))}
    assert rows["weights.layers"].origin.startswith("224 linears, 6.48B x 0.5 B")
    assert rows["activations.residual"].origin.startswith("32 checkpoints b·s·h fp32")
    assert "b·s·v fp32" in rows["logits"].origin
    assert "4 B (fp32)" in rows["adapters"].origin
    bits = float(rows["quantization"].origin.split(" bit")[0])
    linears = [
        elements
        for kind, elements in facts_of(priced("qlora")).weights.values()
        if kind == "linear"
    ]
    assert bits == pytest.approx(8 * rows["quantization"].nbytes / (32 * sum(linears)), abs=5e-4)


def test_without_facts_the_phrases_still_say_how_many_and_how_large() -> None:
    timeline = priced("full").timeline
    with_facts, without = (
        components_at(timeline, timeline.peak(), facts)
        for facts in (facts_of(priced("full")), Facts())
    )
    assert [(r.key, r.nbytes, r.num_tensors) for r in with_facts] == [
        (r.key, r.nbytes, r.num_tensors) for r in without
    ]
    assert without[0].origin == "224 tensors, 6.48B x 2 B (bf16)"


def test_a_moment_with_nothing_alive_has_no_rows() -> None:
    timeline = Timeline(
        [TensorInfo("a", Role.WEIGHTS, "", 8, 512)],
        [TimelineSegment("s", Phase.FORWARD, 1, [("+", 0), ("-", 0)], [])],
        Stamp(origin="traced"),
    )
    assert components_at(timeline, Point(segment=0, repetition=0, event=1, nbytes=0)) == ()
