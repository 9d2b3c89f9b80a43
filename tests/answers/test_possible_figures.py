"""No figure that cannot be leaves: drawn models, methods, GPUs, meshes and workloads, and speeds that
no machine has."""

from __future__ import annotations

import json
import random
from math import isfinite
from typing import TYPE_CHECKING, Any

import pytest
from napkinmath.answers.figures import Memory, Range, Verdict
from napkinmath.answers.possible import impossible_memory, impossible_time
from napkinmath.base.errors import ImpossibleFigure, InputError
from napkinmath.cli.main import main
from napkinmath.config.train_config import AdapterConfig, QuantizationConfig, TrainConfig
from napkinmath.estimate import Estimate, estimate
from napkinmath.inputs.jobs import priced
from napkinmath.ir.ledger import Phase
from napkinmath.report.components import components_of
from napkinmath.timing.schedule import PhaseTime, StepTime

if TYPE_CHECKING:
    from pathlib import Path

DRAWN, LEAST_PRICED = 32, 14  # some combinations contradict each other and are refused
ROUNDING = 1e-9
MODELS = ("tinyllama-1.1b", "bert-base", "t5-base", "gpt2", "qwen3-0.6b", "gpt-oss-20b")
GPUS = ("T4", "V100", "A10G", "RTX 4090", "A100-80", "H100", "MI300X")
METHODS: tuple[dict[str, Any], ...] = (
    {},
    {"lora": True},
    {"qlora": True},
    {"qlora": True, "checkpointing": "none"},
    {"lora": True, "quant": "int8", "checkpointing": "none"},
    {"method": "ia3"},
)
MESHES: tuple[dict[str, Any], ...] = (
    {"strategy": "fsdp2"},
    {"strategy": "ddp"},
    {"zero": "3"},
    {"tp": "2"},
    {"pp": "2"},
    {"pp": "4", "pp_schedule": "interleaved"},
    {"cp": "2"},
)
WORKLOADS = ("dpo", "grpo", "reward", "ppo")
CHOICES: tuple[tuple[float, str, tuple[Any, ...]], ...] = (
    (0.4, "checkpointing", ("full", "selective", "every:2")),
    (0.3, "precision", ("bf16", "fp16-amp", "fp32", "fp8")),
    (0.3, "optimizer", ("adamw-8bit", "muon", "paged-adamw-8bit")),
    (0.3, "grad_accum", ("4",)),
    (0.2, "kernels", ("liger", "napkinmath", "unsloth")),
    (0.2, "loss", ("chunked", "fused")),
)


def drawn(seed: int) -> dict[str, Any]:
    """Options of one configuration, as a command line or a job would give them."""
    rng = random.Random(seed)
    found: dict[str, Any] = {
        "model": rng.choice(MODELS),
        "gpu": rng.choice(GPUS),
        "bs": rng.choice(("1", "2", "8")),
        "ctx": rng.choice(("8", "64", "512")),
        **rng.choice(METHODS),
    }
    for chance, key, options in CHOICES:
        if rng.random() < chance:
            found.setdefault(key, rng.choice(options))
    place = rng.random()
    if place < 0.2:
        found["workload"] = rng.choice(WORKLOADS)
    elif place < 0.5:
        found |= {"gpus": "4", **rng.choice(MESHES)}
    return found


def contradictions(e: Estimate) -> list[str]:
    """What is wrong among the figures of an estimate; the rules are written anew, not the
    program's own."""
    found: list[str] = []
    memory, time, whole = e.memory, e.time, e.throughput
    spans = (memory.allocated, memory.reserved, memory.device)
    for span in spans:
        if not 0 <= span.low <= span.value <= span.high < float("inf"):
            found.append(f"span {span}")
    heights = [memory.requested, *(span.value for span in spans)]
    if sorted(heights) != heights:
        found.append(f"order {heights}")
    if e.hardware is not None and e.verdict is Verdict.FITS:
        found += [
            f"beyond the device {span}" for span in spans if span.high > e.hardware.memory_bytes
        ]
    rows = components_of(e)
    if any(row.nbytes < 0 for row in rows):
        found.append(f"negative rows {[row for row in rows if row.nbytes < 0]}")
    if sum(row.nbytes for row in rows) != int(memory.device.value):
        found.append("rows that are not the device figure")
    if time is not None and whole is not None:
        if not 0 <= time.mfu <= time.hfu * (1 + ROUNDING) <= 1:
            found.append(f"MFU {time.mfu}, HFU {time.hfu}")
        bounds = ("compute", "bandwidth", "launch", "host link", "communication")
        shares = [*(time.share(bound) for bound in bounds), whole.bubble_share]
        if min(shares) < 0 or sum(shares) > 1 + 1e-6:
            found.append(f"shares {shares}")
        rates = (time.seconds, whole.tokens_per_s, whole.gpu_hours_per_billion)
        found += [f"rate {x}" for x in rates if not (isfinite(x) and x > 0)]
    return found


@pytest.mark.slow
def test_no_drawn_configuration_has_an_impossible_figure() -> None:
    refused = 0
    for seed in range(DRAWN):
        options = drawn(seed)
        try:
            e = priced(options, [])[0]
            assert not e.withheld, options
            assert not contradictions(e), (options, contradictions(e))
        except InputError:
            refused += 1
    assert DRAWN - refused >= LEAST_PRICED


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("model", ["tinyllama-1.1b", "bert-base", "t5-base", "gpt-oss-20b"])
def test_without_recomputation_the_model_needs_what_the_device_computes(
    model: str, accumulation: int
) -> None:
    """A gradient that nobody asks for counts on neither side: of the first quantized layer's
    input, for one."""
    for quantization in (None, QuantizationConfig()):
        for adapter in (None, AdapterConfig()) if quantization is None else (AdapterConfig(),):
            e = estimate(
                model,
                TrainConfig(
                    adapter=adapter,
                    quantization=quantization,
                    gradient_accumulation_steps=accumulation,
                    sequence_length=64,
                ),
                hardware="A100-80",
            )
            assert e.time is not None
            assert e.time.mfu == pytest.approx(e.time.hfu, rel=ROUNDING)


# ---------------------------------------------------------------- what the program itself refuses

POSSIBLE = StepTime(
    phases=(PhaseTime(phase=Phase.FORWARD, device_s=1.0, host_s=0.5, shares=()),),
    tokens=10,
    model_flops=50,
    hardware_flops=60,
    peak_flops_per_s=100.0,
)
NAN, INF = float("nan"), float("inf")


def of_phase(**changed: float) -> dict[str, Any]:
    return {"phases": (POSSIBLE.phases[0].replace(**changed),)}


@pytest.mark.parametrize(
    "changed",
    [
        {"model_flops": 61},
        {"model_flops": -1},
        {"hardware_flops": 101, "model_flops": 1},
        {"bubble_s": -0.1},
        {"paging_s": NAN},
        {"measured_s": INF},
        {"peak_flops_per_s": NAN},
        {"phases": ()},
        of_phase(device_s=-1.0, host_s=2.0),
        of_phase(host_s=NAN),
        of_phase(waited_s=INF),
    ],
)
def test_a_time_that_cannot_be_is_named(changed: dict[str, Any]) -> None:
    assert not impossible_time(POSSIBLE)
    assert impossible_time(POSSIBLE.replace(**changed))


def memory(requested: int, *values: float) -> Memory:
    low, middle, high = (Range(low=v - 1, value=v, high=v + 1) for v in values)
    return Memory(requested=requested, allocated=low, reserved=middle, device=high)


@pytest.mark.parametrize(
    "values", [(9, 8, 20, 30), (1, 25, 20, 30), (1, 8, NAN, 30), (1, 8, 20, INF), (-3, 8, 20, 30)]
)
def test_memory_that_cannot_be_is_named(values: tuple[Any, ...]) -> None:
    assert not impossible_memory(memory(8, 9, 20, 30))
    assert impossible_memory(memory(*values))


def test_impossible_memory_never_leaves_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    e = estimate("tinyllama-1.1b", sequence_length=64)
    monkeypatch.setattr("napkinmath.answers.estimate.memory_ranges", lambda _: memory(9, 8, 20, 30))
    with pytest.raises(ImpossibleFigure, match=r"tinyllama.*less is allocated than requested"):
        _ = e.memory


@pytest.fixture
def busy(tmp_path: Path) -> str:
    """Speeds above the datasheet's, by less than what is refused when the file is read."""
    path = tmp_path / "busy.json"
    rates = {"matmul_flops_per_s": {"bf16": 8e14}, "stream_bytes_per_s": 5e12}
    path.write_text(
        json.dumps({"napkinmath_calibration": 2, "gpu": "A100-80", "stamp": {}, "rates": rates})
    )
    return str(path)


BUSY = ["--model", "llama-7b", "--bs", "8", "--gpu", "A100-80", "--checkpointing", "full"]


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--explain"], ["--json"]])
def test_speeds_of_a_busy_machine_are_withheld_by_name(
    busy: str, form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BUSY, "--calibration", busy, *form]) in (0, 1)
    out = " ".join(capsys.readouterr().out.split())
    assert "of the datasheet's peak" in out
    if form == ["--json"]:
        assert json.loads(out)["time"] is None
    else:
        assert "withheld" in out
        assert "MFU" not in out


def test_what_is_read_off_a_withheld_time_is_withheld_too(busy: str) -> None:
    e = estimate("llama-7b", hardware="A100-80", calibration=busy, micro_batch_size=8)
    assert e.withheld
    assert e.time is None
    assert e.throughput is None
    assert e.priced_time is not None
