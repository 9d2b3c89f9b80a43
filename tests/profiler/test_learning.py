"""Learning a form: the learned form of a family that is written by hand equals it and the trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from napkinmath.models.layers.learned_replay import CARRIED
from napkinmath.models.learned import layer_key
from napkinmath.models.tasks import ANSWERS, CAUSAL, SEQUENCE, TOKENS
from napkinmath_profiler.tracing.learning import known_results
from napkinmath_profiler.tracing.learning.blocks import cut
from napkinmath_profiler.tracing.learning.composites import Recorded
from napkinmath_profiler.tracing.learning.landmarks import landmarks
from napkinmath_profiler.tracing.learning.layer_fields import shortened
from napkinmath_profiler.tracing.learning.layer_kinds import kinds_rule
from napkinmath_profiler.tracing.learning.recording import record
from napkinmath_profiler.tracing.learning.references import with_references
from napkinmath_profiler.tracing.learning.rows import Shape
from napkinmath_profiler.tracing.learning.samples import FAR, Sizes, refuse_loops, telling_apart
from napkinmath_profiler.tracing.learning.single_rows import with_rows_shared
from napkinmath_profiler.tracing.learning.stage_fields import (
    paths_of_stages,
    shortened_stages,
    stages_of,
    with_entries,
)
from napkinmath_profiler.tracing.learning.symbols import (
    Fitting,
    Recognising,
    UnknownSizeError,
    joined,
)
from napkinmath_profiler.tracing.learning.weight_rows import score_kind
from napkinmath_profiler.tracing.meta_model import build_model, config_from, set_use_cache
from napkinmath_profiler.tracing.trace_errors import TraceError

BASE = {"b": 2, "s": 320, "h": 256, "a": 8, "k": 4}
SAMPLES = [
    BASE,
    {**BASE, "b": 3},
    {**BASE, "s": 333},
    *({**BASE, name: 2 * BASE[name]} for name in ("h", "a", "k")),
    {"b": 3, "s": 320, "h": 768, "a": 16, "k": 12},
]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda b, s, h, a, k: b * s * h, "b*s*h"),
        (lambda b, s, h, a, k: 3 * h // a, "3*h//a"),
        (lambda b, s, h, a, k: h + 2 * a, "h+2*a"),
        (lambda b, s, h, a, k: (a + 2 * k) * h, "a*h+2*k*h"),
        (lambda b, s, h, a, k: -(-s // 64) * 64, "up(s,64)"),
        (lambda b, s, h, a, k: b * -(-s // 64), "b*ceil(s,64)"),
        (lambda b, s, h, a, k: 12, 12),
    ],
)
def test_sizes_become_expressions(rule: Callable[..., int], text: str | int) -> None:
    assert Fitting(SAMPLES, (64,)).fit([rule(**sample) for sample in SAMPLES]) == text


def test_an_expression_has_to_hold_where_all_sizes_move() -> None:
    numbers = [x["a"] * x["k"] for x in SAMPLES]
    with pytest.raises(TraceError, match="follows no rule"):
        Fitting(SAMPLES).fit([*numbers[:-1], numbers[-1] + 1])


def test_a_number_that_two_sizes_share_is_not_recognised() -> None:
    known = Fitting(SAMPLES)
    assert known.fit([x["h"] // x["a"] for x in SAMPLES]) == "h//a"
    assert known.fit([32] * len(SAMPLES)) == 32
    few = Recognising([BASE, {**BASE, "h": 512, "a": 16}], known)
    with pytest.raises(UnknownSizeError):
        few.fit([32, 32])


def test_a_size_without_a_rule_is_refused() -> None:
    with pytest.raises(TraceError, match="follows no rule"):
        Fitting(SAMPLES).fit([5, 7, 1, 13, 2, 3, 4])


def test_recordings_that_differ_in_more_than_sizes_are_refused() -> None:
    with pytest.raises(TraceError, match="another number"):
        joined([[Shape((2,))], [Shape((3,)), Shape((4,))]], Fitting(SAMPLES[:2]))


def test_samples_are_added_until_no_two_sizes_are_alike() -> None:
    def sample(h: int, w: int) -> Sizes:
        return Sizes({}, (2, 320), {"h": h, "w": w})

    few, alone = [sample(64, 64), sample(192, 192)], [sample(64, 64), sample(128, 64)]
    assert telling_apart(few, alone, ["h", "2*h"]) == few
    assert telling_apart(few, alone, ["h", "w"]) == [*few, alone[1]]


@pytest.mark.parametrize("blocks", [0, 256])
def test_a_class_that_goes_over_blocks_of_the_sequence_is_refused(blocks: int) -> None:
    def outline(length: int) -> list[object]:
        times = -(-length // blocks) if blocks else 1
        return [[("mm", "", {}, [], [((length, 8), "bf16")])] * times, []]

    if not blocks:
        return refuse_loops(outline(320), outline, 0)
    with pytest.raises(TraceError, match=f"other operations at {FAR[0]} tokens"):
        refuse_loops(outline(320), outline, 0)


def test_a_remembered_result_is_new_and_laid_out_alike() -> None:
    x = torch.empty((2, 3, 4), device="meta").transpose(0, 1)
    twice = [known_results.run(torch.ops.aten.neg.default, (x,), {}) for _ in range(2)]
    assert [y.stride() for y in twice] == [torch.neg(x).stride()] * 2
    assert len({y.untyped_storage()._cdata for y in (x, *twice)}) == 3


@pytest.mark.parametrize("name", ["_unsafe_view", "view"])
def test_a_view_is_never_a_new_tensor(name: str) -> None:
    x = torch.empty((2, 6), device="meta")
    func = getattr(torch.ops.aten, name).default
    views = [known_results.run(func, (x, [3, 4]), {}) for _ in range(2)]
    assert {y.untyped_storage()._cdata for y in views} == {x.untyped_storage()._cdata}


def test_the_last_layer_may_be_of_a_kind_of_its_own() -> None:
    config = {"model_type": "electra", "num_hidden_layers": 3}
    rule = kinds_rule(config, config, [0, 0, 1], "num_hidden_layers")
    assert rule["ends"] and rule["of"] == {"inner": 0, "last": 1}
    keys = [layer_key([], layer, None, None, 5) for layer in range(6)]
    assert [rule["of"][key] for key in keys] == [0, 0, 0, 0, 0, 1]


def test_the_first_layer_may_be_of_a_kind_of_its_own() -> None:
    config = {"model_type": "electra", "num_hidden_layers": 4}
    rule = kinds_rule(config, config, [0, 1, 1, 2], "num_hidden_layers")
    assert rule["starts"] and rule["ends"]
    keys = [layer_key([], layer, None, None, 5, starts=True) for layer in range(6)]
    assert [rule["of"][key] for key in keys] == [0, 1, 1, 1, 1, 2]


def test_layers_are_told_apart_by_lists_of_their_numbers() -> None:
    """Flint's first two layers are dense by `mlp_only_layers`, and sliding layers come later."""
    kinds = ["full_attention"] * 2 + ["sliding_attention", "full_attention"] * 3
    whole = {"num_hidden_layers": 8, "layer_types": kinds, "mlp_only_layers": [0, 1]}
    short = shortened(whole)
    assert (short["num_hidden_layers"], short["mlp_only_layers"]) == (5, [0, 1])
    rule = kinds_rule({"model_type": "flint", **whole}, short, [0, 0, 1, 2, 1], "num_hidden_layers")
    assert rule["of"] == {
        "full_attention|True": 0,
        "sliding_attention|False": 1,
        "full_attention|False": 2,
    }


def test_what_layers_hand_to_the_next_has_one_name_in_all() -> None:
    """ZAYA's routers read the states of the router before."""
    config = {
        "model_type": "zaya",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "moe_intermediate_size": 32,
        "layer_types": ["hybrid"] * 3,
    }
    model = build_model(config_from(config), dtype="bf16", attn_implementation="eager").train()
    set_use_cache(model, False)
    pieces = cut(record(model, batch=2, length=8, how=Recorded()), model, landmarks(model))
    carried = [[n for n in one.inputs if n.startswith(CARRIED)] for one in pieces.layers]
    assert carried[0] == [] and len(carried[1]) == 1 and carried[1] == carried[2]


def test_a_model_on_meta_has_no_weight_elsewhere() -> None:
    """DiffLlama makes its lambdas by `torch.normal`, which asks for no default device."""
    config = config_from({"model_type": "diffllama", "num_hidden_layers": 1, "vocab_size": 64})
    model = build_model(config, dtype="bf16", attn_implementation="eager")
    assert {one.device.type for one in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("owner", "task", "kind"),
    [
        ("classifier.out_proj", SEQUENCE, "task head"),
        ("pre_classifier", SEQUENCE, "task head"),
        ("score", TOKENS, "token head"),
        ("qa_outputs", ANSWERS, "token head"),
        ("classifier", ANSWERS, ""),
        ("score", CAUSAL, ""),
    ],
)
def test_heads_that_peft_trains_whole_have_a_kind(owner: str, task: str, kind: str) -> None:
    assert score_kind(owner, task) == kind


@pytest.mark.parametrize(("model_type", "returns_more"), [("bert", False), ("rembert", True)])
def test_layers_that_return_more_than_hidden_states_are_cut_apart(
    model_type: str, returns_more: bool
) -> None:
    config = {
        "model_type": model_type,
        "architectures": ["ItsForMaskedLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 64,
        **({"input_embedding_size": 16, "output_embedding_size": 16} if returns_more else {}),
    }
    model = build_model(config_from(config), dtype="bf16", attn_implementation="eager").train()
    seen = record(model, batch=2, length=8, autocast=None, how=Recorded(attention=False, loss=True))
    assert len(cut(seen, model, landmarks(model)).layers) == 3


def test_a_convolutions_weight_is_cast_in_every_forward_that_is_recorded() -> None:
    """Autocast keeps casts of weights; one that an earlier forward made would be read unseen."""
    config = {
        "model_type": "squeezebert",
        "architectures": ["SqueezeBertForMaskedLM"],
        "hidden_size": 32,
        "embedding_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = build_model(config_from(config), dtype="fp32", attn_implementation="eager").train()
    how = Recorded(attention=False, loss=True)
    seen = record(model, batch=2, length=8, autocast=torch.bfloat16, how=how)
    assert len(cut(seen, model, landmarks(model)).layers) == 2


def test_storages_are_written_by_the_tensor_that_they_are_as_large_as() -> None:
    rows = [[["b", "h"], "bf16"], [["b", "h"], "fp32"], [["f", "h"], "bf16"], [["b", 3], "bf16"]]
    branches = {"11": ["i0", "1", rows, "+0", "0:0", 1, []]}
    facts = {"made": rows[:1], "branches": branches}
    ops = [["mm", "", [1, -1], [[["b", "h"], "bf16", "m0"]], facts, []]]
    block = {"inputs": ["x"], "weights": [["w", "linear", "", 0, ["f", "h"]]], "ops": ops}
    form = with_references({"variants": {"half": {"rows": {"exit": block, "head": {}}}}})
    made = form["variants"]["half"]["rows"]["exit"]["ops"][0][4]
    assert made["made"] == ["o0"]
    assert made["branches"]["11"][2] == ["o0", ["o0", "fp32"], ["i1", "bf16"], rows[3]]
    assert with_references(form) == form


def test_a_batch_of_one_row_is_written_as_more_rows_where_it_says_the_same() -> None:
    def form(*axes: Any) -> dict[str, Any]:
        ops = [["mm", "", [1, -1], [[list(axes), "bf16", "m0"]], {"made": ["o0"]}, [2]]]
        return {"exit": {"inputs": ["x"], "ops": ops}, "layers": [{"ops": ops}], "after": None}

    modes = {"rows": form("b", "b*s", "s"), "single rows": form(1, "s", "s")}
    other = {**modes, "single rows": form(1, "s", "h")}
    made = with_rows_shared({"variants": {"half": modes, "fp32": other}})["variants"]
    assert made["half"]["single rows"] == modes["rows"]
    assert made["fp32"]["single rows"] == other["single rows"]


STAGED = {"model_type": "segformer", "depths": [3, 18], "hidden_sizes": [32, 64], "act": ["gelu"]}


def test_entries_of_lists_are_fields_where_layers_stand_in_stages() -> None:
    flat = with_entries(STAGED)
    assert flat["hidden_sizes.1"] == 64 and flat["act"] == ["gelu"] and "depths" not in flat
    assert [shortened_stages(flat, 2)[f"depths.{i}"] for i in range(2)] == [6, 6]
    assert with_entries({"hidden_sizes": [1, 2]}) == {"hidden_sizes": [1, 2]}


def test_each_stages_list_of_layers_is_found() -> None:
    layers = [torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(depth)) for depth in (3, 18)]
    model = torch.nn.Module()
    model.stages = torch.nn.ModuleList(torch.nn.ModuleDict({"blocks": one}) for one in layers)
    assert paths_of_stages(model, with_entries(STAGED)) == ("stages.0.blocks", "stages.1.blocks")
    with pytest.raises(TraceError, match="no lists of as many layers"):
        paths_of_stages(model, with_entries({"depths": [2, 18]}))


def test_a_stages_layers_are_its_first_then_odd_and_even_ones() -> None:
    (one,) = stages_of(["stages.0.blocks"], [0, 1, 2, 1])
    assert one == {"path": "stages.0.blocks", "count": "depths.0", "kinds": [0, 1, 2]}
    assert stages_of(["stages.0.blocks"], [0, 1, 1, 2])[0]["kinds"] == [0, 1, 1, 2]
