"""One to three layers measured on the CPU, carried over to more: bytes of every phase as the whole
model really has them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from napkinmath import (
    AdapterConfig,
    Kernels,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.calibration.measured_layers import MeasuredLayers, from_json, to_json
from napkinmath.cli.main import main
from napkinmath.estimate import Estimate, estimate
from napkinmath.ir.ledger import Phase
from napkinmath.models.families import read_config
from napkinmath_profiler.calibration.allowance import Allowance
from napkinmath_profiler.calibration.devices import Device, choose_device
from napkinmath_profiler.calibration.layer_fit import NotAligned, fit_linear, fit_memory
from napkinmath_profiler.calibration.layer_plan import plan_layers
from napkinmath_profiler.calibration.layer_runs import LayerOptions, measure_layers, points_for
from napkinmath_profiler.measuring.device_memory import CpuMemory
from napkinmath_profiler.measuring.runner import MeasureOptions, measure_step
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_options import options_from
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import PHASES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "num_hidden_layers": 7,
    "max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 96,
    "num_hidden_layers": 13,
    "sliding_window": 8,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 6,
    "vocab_size": 96,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Wide enough for blocks of 64 weights, and for the sizes that our kernels take.
WIDE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_hidden_layers": 5,
}
QWEN3: dict[str, Any] = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
}
MODELS = {"llama": LLAMA, "gemma": GEMMA, "gpt2": GPT2, "qwen3": QWEN3, "mixtral": MIXTRAL}
CASES = [
    *((model, "full") for model in MODELS.values()),
    (LLAMA, "checkpointed"),
    (LLAMA, "lora"),
    (GEMMA, "loop"),
    (WIDE, "qlora"),
    (WIDE, "our kernels"),
]
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointed": {"recompute": RecomputeConfig(kind=RecomputeKind.FULL)},
    "lora": {"adapter": AdapterConfig(rank=4)},
    "loop": {"stack": "hf-bare", "optimizer": "adamw"},
    "qlora": {"adapter": AdapterConfig(rank=4), "quantization": QuantizationConfig()},
    "our kernels": {"kernels": Kernels.NAPKINMATH},
    "bf16": {"precision": Precision.BF16},
    "bf16 lora": {"precision": Precision.BF16, "adapter": AdapterConfig(rank=4)},
    "autocast, checkpointed lora": {
        "precision": Precision.BF16_AUTOCAST,
        "adapter": AdapterConfig(rank=4),
        "recompute": RecomputeConfig(kind=RecomputeKind.FULL),
    },
}
# By the allocator's history, as on a GPU: there what a layer made and the next one's end frees is
# told of no layer.
BY_HISTORY = [
    (LLAMA, "bf16"),
    (GEMMA, "bf16 lora"),
    (MIXTRAL, "bf16 lora"),
    (LLAMA, "autocast, checkpointed lora"),
]
BATCH, LENGTH = 2, 16
CPU = "cpu"


def train_config(**changes: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "micro_batch_size": BATCH,
            "sequence_length": LENGTH,
            "precision": Precision.FP32,
            **changes,
        }
    )


def measured(
    config: dict[str, Any],
    train: TrainConfig,
    notes: list[str],
    *,
    how: LayerOptions | None = None,
    seconds: float = 120.0,
    points: Any = ((BATCH, LENGTH),),
) -> tuple[MeasuredLayers | None, Estimate]:
    """Layers of a model on the CPU, at one point unless more are asked for."""
    model = estimate(read_config(config), train)
    found = measure_layers(
        dict(config),
        options_from(train),
        model,
        choose_device(CPU),
        Allowance(1 << 30, seconds),
        notes,
        how=how or LayerOptions(rounds=1, num_steps=2),
        points=points,
    )
    return found, model


def real_peaks(config: dict[str, Any], train: TrainConfig) -> dict[str, int]:
    """The highest bytes of each phase of the whole model's real steps, as the CPU tracker records
    them."""
    result = measure_step(
        dict(config), options_from(train), MeasureOptions(device=CPU, num_steps=0)
    ).result
    assert result is not None
    return peaks_of(result)


def peaks_of(result: TraceResult) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for phase, moment in result.peak_by_phase().items():
        if PHASES[phase] is not Phase.LOAD:
            name = PHASES[phase].value
            peaks[name] = max(peaks.get(name, 0), moment.requested_bytes)
    return peaks


@pytest.mark.parametrize(
    ("config", "way"), CASES, ids=[f"{config['model_type']}-{way}" for config, way in CASES]
)
def test_memory_of_the_whole_model_to_the_byte(config: dict[str, Any], way: str) -> None:
    train = train_config(**WAYS[way])
    notes: list[str] = []
    found, priced = measured(config, train, notes)
    assert found is not None
    point = found.points[0]
    assert point.memory is not None, notes
    order = found.order_in(priced.spec)
    assert order == found.order
    assert point.memory.phase_peaks(order) == real_peaks(config, train)


@pytest.mark.parametrize(
    ("config", "way"),
    BY_HISTORY,
    ids=[f"{config['model_type']}-{way}" for config, way in BY_HISTORY],
)
def test_memory_by_the_allocators_history_to_the_byte(config: dict[str, Any], way: str) -> None:
    train = train_config(**WAYS[way])
    notes: list[str] = []
    found, priced = measured(
        config, train, notes, how=LayerOptions(rounds=1, num_steps=1, stand_in=CpuMemory)
    )
    assert found is not None and found.points[0].memory is not None, notes
    assert found.points[0].memory.phase_peaks(found.order_in(priced.spec) or ()) == real_peaks(
        config, train
    )


def test_seconds_are_positive_and_grow_with_the_layers() -> None:
    notes: list[str] = []
    found, _ = measured(LLAMA, train_config(), notes, how=LayerOptions(rounds=2, num_steps=3))
    assert found is not None
    seconds = dict(found.points[0].seconds)
    assert set(seconds) == {"forward", "backward", "gradient clipping", "optimizer step"}
    for phase in ("forward", "backward"):
        assert 0 < seconds[phase].at([3]) < seconds[phase].at([30])


def test_measured_layers_survive_the_file() -> None:
    found, _ = measured(GEMMA, train_config(), [])
    assert found is not None
    assert from_json(to_json(found), "test") == found


def test_kinds_of_layers_are_there_up_to_three_times() -> None:
    plan = plan_layers(config_from(GEMMA), options_from(train_config()))
    assert plan.order == (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0)
    assert plan.runs == ((0, 5, 11, 12), (0, 1, 5, 11, 12))
    assert [plan.counts(run) for run in plan.runs] == [[2, 2], [3, 2]]
    deep = plan_layers(
        config_from({**GEMMA, "num_hidden_layers": 20}), options_from(train_config())
    )
    assert deep.runs == ((0, 5, 11, 17, 19), (0, 1, 5, 17, 19), (0, 1, 5, 11, 17, 19))


def test_runs_of_one_kind_have_one_two_and_three_layers() -> None:
    assert plan_layers(config_from(LLAMA), options_from(train_config())).runs == (
        (0,),
        (0, 6),
        (0, 1, 6),
    )


def test_points_hold_the_one_at_hand_first() -> None:
    assert points_for(4, 2048) == [(4, 2048), (4, 1024), (8, 1024)]
    assert points_for(1, 16) == [(1, 16), (2, 16)]


def limited(nbytes: int) -> Callable[[], CpuMemory]:
    return lambda: CpuMemory(limit_bytes=nbytes)


def test_out_of_memory_in_the_middle_keeps_what_was_learned() -> None:
    """The larger point runs out of memory, the smaller before it stays, and the message says
    which."""
    notes: list[str] = []
    how = LayerOptions(rounds=1, num_steps=2, stand_in=limited(4 << 20))
    found, _ = measured(LLAMA, train_config(), notes, how=how, points=[(BATCH, LENGTH), (64, 64)])
    assert found is not None
    assert [(p.micro_batch_size, p.sequence_length) for p in found.points] == [(BATCH, LENGTH)]
    assert any("64 x 64" in note and "ran out of memory" in note for note in notes), notes


def test_nothing_learned_is_told() -> None:
    notes: list[str] = []
    found, _ = measured(
        LLAMA,
        train_config(),
        notes,
        how=LayerOptions(rounds=1, stand_in=limited(2 << 20)),
        points=[(64, 64)],
    )
    assert found is None
    assert any("ran out of memory" in note for note in notes), notes


def test_torch_running_out_while_building_ends_only_that_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import napkinmath_profiler.calibration.layer_runs as layer_runs

    real, calls = measure_step, []

    def failing(config: Any, options: TraceOptions, how: MeasureOptions) -> Any:
        calls.append(options.sequence_length)
        if options.sequence_length == 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(config, options, how)

    monkeypatch.setattr(layer_runs, "measure_step", failing)
    notes: list[str] = []
    found, _ = measured(LLAMA, train_config(), notes, points=[(BATCH, LENGTH), (BATCH, 32)])
    assert found is not None and len(found.points) == 1
    assert calls.count(32) == 1
    assert any("while it was built" in note for note in notes), notes


def test_layers_that_cannot_be_built_cost_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """QLoRA without bitsandbytes: the operations measured before are kept, and it is said what is
    missing."""
    from napkinmath_profiler.calibration import calibrate as whole
    from napkinmath_profiler.calibration.op_cases import copy, gemm

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(whole, "planned", lambda *_: [copy(1 << 20), gemm(64, 64, 64, "fp32")])
    monkeypatch.setattr(whole, "measured_dispatch", lambda speed, *_: speed)
    train = train_config(**WAYS["qlora"])
    model = whole.ModelToMeasure(dict(LLAMA), read_config(LLAMA), train)
    found = whole.calibrate(choose_device(CPU), Allowance(1 << 30, 30.0), model)
    assert found.layers is None and [point.case.op for point in found.points if point.timing] == [
        "copy",
        "gemm",
    ]
    assert any(
        "no layers were measured" in note and "pip install bitsandbytes" in note
        for note in found.notes
    )


def test_a_spent_budget_is_told() -> None:
    notes: list[str] = []
    found, _ = measured(LLAMA, train_config(), notes, seconds=-1.0)
    assert found is None
    assert notes == [f"batch {BATCH} x {LENGTH}: not measured, the budget was spent"]


def test_memory_needs_three_layers() -> None:
    plan = plan_layers(config_from(LLAMA), options_from(train_config()))
    with pytest.raises(NotAligned, match="no run had 3 layers"):
        fit_memory(plan, {})


def test_a_fit_takes_noise_for_no_cost() -> None:
    """Three runs whose times fall with depth have slope zero, not a negative one."""
    fit = fit_linear([[1], [2], [3]], [3.0, 2.0, 1.0], not_negative=True)
    assert fit.slopes == (0.0,) and fit.intercept == pytest.approx(2.0)
    fit = fit_linear([[1], [2], [3]], [1.0, 2.5, 4.0], not_negative=True)
    assert fit.intercept == 0.0 and fit.slopes[0] == pytest.approx(1.5, rel=0.15)
    fit = fit_linear([[1], [2], [3]], [3.0, 5.0, 7.0], not_negative=True)
    assert fit.at([32]) == pytest.approx(65.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_a_gpu_within_a_percent() -> None:
    device = Device(torch.device("cuda", 0), torch.cuda.get_device_name(0))
    train = train_config()
    model = estimate(read_config(LLAMA), train)
    found = measure_layers(
        dict(LLAMA),
        options_from(train),
        model,
        device,
        Allowance(1 << 30, 60.0),
        [],
        points=[(BATCH, LENGTH)],
    )
    assert found is not None and found.points[0].memory is not None
    result = measure_step(
        dict(LLAMA), options_from(train), MeasureOptions(device="cuda:0", num_steps=0)
    ).result
    assert result is not None
    for phase, nbytes in peaks_of(result).items():
        assert found.points[0].memory.phase_peaks(found.order)[phase] == pytest.approx(
            nbytes, rel=0.01
        )


def test_the_command_and_the_estimate_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """calibrate writes a file; the estimate that is given it takes each phase's seconds and bytes
    from the layers in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, out = tmp_path / "config.json", tmp_path / "here.json"
    config.write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    step = ["--model", str(config), "--bs", str(BATCH), "--ctx", str(LENGTH), "--precision", "fp32"]
    assert main(["calibrate", *step, "--device", "cpu", "--budget", "60", "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "7 in the whole model" in said
        and "matrix products" in said
        and str(out) in said.replace(" ", "")
    )
    content = json.loads(out.read_text())
    assert content["stamp"]["torch"] == torch.__version__ and content["device"]["kind"] == "cpu"
    assert any(row["op"] == "gemm" and row["median_s"] > 0 for row in content["ops"])
    point = from_json(content["layers"][0], "test").points[0]
    assert point.num_runs == 3 and dict(point.classes)["forward"]
    assert main([*step, "--calibration", str(out), "--json"]) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    assert time["calibration"]["measured_layers"] is True
    assert time["seconds"] == pytest.approx(sum(fit.at([7]) for _, fit in point.seconds), rel=1e-6)


def test_an_error_of_a_library_costs_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver or a kernel's compiler raises has no common type."""
    from napkinmath_profiler.calibration import calibrate as whole
    from napkinmath_profiler.calibration.op_cases import copy, gemm

    class OutOfResources(Exception):
        """As Triton has it: not a RuntimeError."""

    def fail(*_: object, **__: object) -> None:
        raise OutOfResources("shared memory, Required: 200000, Hardware limit: 101376\nmore")

    monkeypatch.setattr(whole, "planned", lambda *_: [copy(1 << 20), gemm(64, 64, 64, "fp32")])
    monkeypatch.setattr(whole, "measured_dispatch", fail)
    monkeypatch.setattr(whole, "measure_layers", fail)
    model = whole.ModelToMeasure(dict(LLAMA), read_config(LLAMA), train_config())
    found = whole.calibrate(choose_device(CPU), Allowance(1 << 30, 30.0), model)
    assert found.layers is None and [point.case.op for point in found.points if point.timing] == [
        "copy",
        "gemm",
    ]
    assert (
        sum("OutOfResources: shared memory" in note and "more" not in note for note in found.notes)
        == 2
    )
