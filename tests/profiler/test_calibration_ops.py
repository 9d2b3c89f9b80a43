"""Operations: timed, fitted to the time model's own formulas, drawn; and what goes wrong said
plainly."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_gpu
from napkinmath.cli.main import main
from napkinmath.config.train_config import Precision, RecomputeConfig, RecomputeKind, TrainConfig
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import Phase
from napkinmath.timing.efficiency import Efficiency, default_efficiency
from napkinmath_profiler.calibration import allowance as allowances
from napkinmath_profiler.calibration import devices, dispatch, op_cases
from napkinmath_profiler.calibration.allowance import Allowance, allowance
from napkinmath_profiler.calibration.device_facts import gpu_of
from napkinmath_profiler.calibration.devices import Device, choose_device
from napkinmath_profiler.calibration.op_cases import OpCase
from napkinmath_profiler.calibration.op_curves import error, fitted, rates_of
from napkinmath_profiler.calibration.op_plan import model_ops, planned
from napkinmath_profiler.calibration.op_points import OpPoint, measure_op, measure_ops
from napkinmath_profiler.calibration.roofline import ceilings_of, model_ops_of, write_roofline
from napkinmath_profiler.calibration.timing import Timing, throttling, time_calls
from napkinmath_profiler.measuring import device_memory

CPU = Device(torch.device("cpu"), "CPU under test")
# The weak pull towards the datasheet leaves a point that stands alone this far off; a timing
# scatters by as much.
RECOVERED = 0.04


def ample(seconds: float = 30.0) -> Allowance:
    return Allowance(1 << 30, seconds)


def pretended(case: OpCase, speed: Efficiency) -> OpPoint:
    """A point that took as long as the time model says for a GPU of these speeds."""
    assert case.predict is not None
    return OpPoint(case, Timing((case.predict(speed),)))


def gpu_cases() -> list[OpCase]:
    cases = [op_cases.copy(1 << n) for n in (16, 20, 23, 25, 28)]
    cases += [
        op_cases.gemm(m, n, k, dtype)
        for dtype in ("bf16", "fp16", "fp32")
        for m in (256, 2048, 8192)
        for n, k in ((4096, 4096), (11008, 4096), (1024, 1024))
    ]
    cases += [
        op_cases.elementwise(kind, rows, 4096)
        for kind in ("cast", "add", "silu")
        for rows in (1024, 8192)
    ]
    for kernel in ("flash", "efficient"):
        for length, head_dim in ((512, 128), (2048, 64), (2048, 128), (8192, 128)):
            cases += [
                op_cases.attention(
                    kernel, 2, 32, 8, length, head_dim, causal=True, backward=backward
                )
                for backward in (False, True)
            ]
    cases += [
        op_cases.host_copy(nbytes, to_host=True, pinned=pinned)
        for nbytes in (1 << 20, 1 << 27)
        for pinned in (True, False)
    ]
    return [*cases, op_cases.dequantize(4096, 4096, "bitsandbytes")]


@pytest.mark.parametrize("name", ["H100", "A100-80", "RTX 4090"])
def test_fit_finds_the_speeds_that_made_the_points(name: str) -> None:
    """A GPU that is 15% slower in products, 10% in memory, a fifth in attention and slow to start:
    every point is met again."""
    prior = default_efficiency(find_gpu(name))
    curves = {
        kernel: curve.replace(share=curve.share * 0.8, backward_share=curve.backward_share * 0.85)
        for kernel, curve in prior.attention
    }
    true = prior.replace(
        matmul_flops_per_s=tuple((dtype, rate * 0.85) for dtype, rate in prior.matmul_flops_per_s),
        stream_bytes_per_s=prior.stream_bytes_per_s * 0.9,
        kernel_start_s=4e-6,
        gemm_start_s=7e-6,
        decode_instructions_per_s=prior.decode_instructions_per_s * 1.2,
        pinned_bytes_per_s=prior.pinned_bytes_per_s * 0.5,
        attention=tuple(curves.items()),
    )
    points = [pretended(case, true) for case in gpu_cases()]
    found = fitted(prior, points)
    worst = max(abs(error(point, found)) for point in points)
    before = max(abs(error(point, prior)) for point in points)
    assert worst < RECOVERED < before


def test_one_wild_point_does_not_move_the_rates() -> None:
    prior = default_efficiency(find_gpu("H100"))
    points = [pretended(case, prior) for case in gpu_cases()]
    wild = next(i for i, p in enumerate(points) if p.case.op == "gemm")
    points[wild] = OpPoint(points[wild].case, Timing((points[wild].timing.median_s * 6,)))  # type: ignore[union-attr]
    found = fitted(prior, points)
    assert dict(found.matmul_flops_per_s)["bf16"] == pytest.approx(
        dict(prior.matmul_flops_per_s)["bf16"], rel=RECOVERED
    )


def test_a_cache_that_hits_always_is_no_cache_without_end() -> None:
    """Copies that fit a processor's cache take less than the model grants at any speed of the
    cache: its rate stays one."""
    prior = default_efficiency(find_gpu("H100"))
    rates = {1 << 16: 9e10, 1 << 20: 9e10, 1 << 23: 6e10, 1 << 25: 3.6e10}
    points = [
        OpPoint(op_cases.copy(nbytes), Timing((2 * nbytes / rate,)))
        for nbytes, rate in rates.items()
    ]
    found = fitted(prior.replace(stream_bytes_per_s=3.6e10, l2_bytes_per_s=4e10), points)
    assert found.l2_bytes_per_s <= 10 * found.stream_bytes_per_s


def test_unmeasured_rates_stay() -> None:
    prior = default_efficiency(find_gpu("A100-80"))
    assert fitted(prior, []) == prior


def test_rates_are_what_the_file_takes(tmp_path: Path) -> None:
    from napkinmath.calibration.calibration import read_calibration

    gpu = find_gpu("H100")
    speed = default_efficiency(gpu).replace(stream_bytes_per_s=2.5e12)
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps({"napkinmath_calibration": 2, "gpu": "H100", "rates": rates_of(speed)})
    )
    assert read_calibration(str(path), gpu).efficiency(gpu) == speed


def test_the_plan_of_a_cpu_runs_whole() -> None:
    notes: list[str] = []
    points = measure_ops([c for c in planned(CPU) if c.held < 8 << 20], CPU, ample(), notes)
    assert [p.reason for p in points if p.timing is None] == []
    gpu, facts = gpu_of(CPU, points)
    assert facts["kind"] == "cpu" and gpu.context_bytes == 0
    assert all(
        rate > 0
        for rate in dict(fitted(default_efficiency(gpu), points).matmul_flops_per_s).values()
    )


def test_operations_of_a_model_come_from_its_ledger() -> None:
    model = estimate("tinyllama-1.1b", micro_batch_size=2, sequence_length=512)
    found = [
        (c.op, c.arguments.get("m"), c.arguments.get("n"), c.arguments.get("k"))
        for c in model_ops(model)
    ]
    assert ("gemm", 1024, 5632, 2048) in found
    assert any(op == "attention" for op, *_ in found)


def test_a_gpu_case_on_a_cpu_says_why_not() -> None:
    assert (
        measure_op(op_cases.host_copy(1024, to_host=True, pinned=True), CPU, ample()).reason
        == "needs a GPU"
    )


def test_a_case_larger_than_the_share_is_left_out() -> None:
    point = measure_op(op_cases.copy(1 << 30), CPU, Allowance(300 << 20, 10.0))
    assert point.timing is None and "allowance" in point.reason


def failing(error: Exception) -> OpCase:
    def make(_: Device) -> Any:
        raise error

    return dataclasses.replace(op_cases.copy(1024), make=make)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("no kernel image\nis available"), "RuntimeError: no kernel image"),
    ],
)
def test_a_case_that_fails_costs_the_others_nothing(error: Exception, reason: str) -> None:
    first, second = measure_ops([failing(error), op_cases.copy(1024)], CPU, ample(), [])
    assert first.timing is None and first.reason == reason
    assert second.timing is not None


def test_a_spent_budget_is_a_reason() -> None:
    assert (
        measure_op(op_cases.copy(1024), CPU, ample(seconds=-1.0)).reason == "the budget was spent"
    )


# ---------------------------------------------------------------- spread and throttling


def test_steady_samples_say_nothing() -> None:
    jitter = random.Random(0)
    assert throttling(Timing(tuple(1.0 + 0.02 * jitter.random() for _ in range(40)))) is None


def test_a_clock_turned_down_is_noticed() -> None:
    samples = tuple(1.0 if i < 15 else 1.2 for i in range(40))
    said = throttling(Timing(samples))
    assert said is not None and "20% slower" in said and "clock" in said


def test_percentiles_of_a_timing() -> None:
    timing = Timing(tuple(float(i) for i in range(1, 11)))
    assert (timing.median_s, timing.low_s, timing.high_s) == (5.5, 2.0, 9.0)


def test_inputs_take_turns() -> None:
    seen: list[int] = []
    time_calls([lambda: seen.append(0), lambda: seen.append(1)], CPU, seconds=0.001, most=5)
    assert abs(seen.count(0) - seen.count(1)) <= 2 and len(seen) > 6


# ---------------------------------------------------------------- devices and memory


def test_no_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"--device cpu"):
        choose_device(None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match=r"CUDA_VISIBLE_DEVICES.*unset"):
        choose_device("cuda:0")


def test_an_unknown_device_is_quoted() -> None:
    with pytest.raises(InputError, match=r"'tpu'.*cuda:0 or cpu"):
        choose_device("tpu")


def two_gpus(monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA A100-SXM4-80GB") -> list[int]:
    """A machine with two GPUs, as far as choosing one goes; returns what was made current."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"{name}")
    return chosen


def test_of_several_gpus_the_named_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = two_gpus(monkeypatch)
    device = choose_device("cuda:1")
    assert device.torch_device == torch.device("cuda", 1) and chosen == [1]
    with pytest.raises(InputError, match="there are 2 GPUs, cuda:0 to cuda:1"):
        choose_device("cuda:2")


def test_several_gpus_have_their_links_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    found = {
        c.arguments["operation"] for c in planned(choose_device("cuda:0")) if c.op == "gpu link"
    }
    assert found == {"peer copy", "all-reduce"}


def test_a_mig_slice_is_not_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, "NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    gpu = choose_device("cuda").catalogued
    assert gpu is not None and gpu.name.endswith("MIG 3g.40gb") and gpu.num_sms < 108


def test_a_gpu_the_catalog_lacks_is_described_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_gpus(monkeypatch, "NVIDIA Q9000")
    assert choose_device("cuda").catalogued is None


def busy(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> Device:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    return Device(torch.device("cuda", 0), "NVIDIA A100-SXM4-80GB")


def test_never_more_than_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    allowed = allowance(busy(monkeypatch, 20 << 30, 80 << 30), share=0.5, seconds=10.0, notes=notes)
    assert allowed.nbytes == 10 << 30
    assert any("other programs held 60.0 GiB of 80.0 GiB" in note for note in notes), notes


def test_a_full_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"100 MiB of 80.0 GiB free.*stop what else uses it"):
        allowance(busy(monkeypatch, 100 << 20, 80 << 30), share=0.5, seconds=10.0, notes=[])


def test_torch_is_held_to_the_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    device, held = busy(monkeypatch, 40 << 30, 80 << 30), []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: held.append(share)
    )
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(device_memory, "_shares", {})
    allowances.hold_to(device, Allowance(20 << 30, 10.0))
    assert held == [0.25]
    memory = device_memory.CudaMemory(device.torch_device)
    memory.limit(
        0.9
    )  # a measurement inside takes no more than was allowed, and what was allowed holds after it
    memory.unlimit()
    assert held == [0.25, 0.25, 0.25]
    memory.limit(0.1)
    memory.unlimit()
    assert held[3:] == [0.05, 0.25]


def test_the_cpu_is_named_with_its_threads() -> None:
    assert devices.cpu_name().startswith("CPU ") and devices.cpu_name().endswith(
        ("thread", "threads")
    )


# ---------------------------------------------------------------- the commands


def test_bench_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "roof.png"
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "vocab_size": 128,
                "num_hidden_layers": 2,
            }
        )
    )
    code = main(
        [
            "bench",
            "--device",
            "cpu",
            "--budget",
            "8",
            "--model",
            str(config),
            "--ctx",
            "32",
            "--plot",
            str(plot),
            "--json",
        ]
    )
    content = json.loads(capsys.readouterr().out)
    assert code == 0 and plot.stat().st_size > 10_000
    assert {row["op"] for row in content["ops"]} >= {
        "copy",
        "gemm",
        "elementwise",
        "launch",
        "attention",
    }
    assert any(row["name"] == "linear" and row["flops"] > 0 for row in content["model_ops"])


def test_bench_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--budget", "2"]) == 0
    text = capsys.readouterr().out
    assert "operations" in text and "TFLOP/s" in text and "the budget was spent" in text


def test_a_long_reason_leaves_the_table_its_columns() -> None:
    """On a GPU some operation always fails, with a sentence: at 80 columns the names and figures of
    the others stay."""
    from napkinmath_profiler.calibration.report import ops_table, unmeasured_lines
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    good, bad = (
        op_cases.gemm(8192, 8192, 8192, "bf16"),
        op_cases.attention("cudnn", 1, 32, 32, 2048, 128, causal=True, backward=False),
    )
    reason = "RuntimeError: No available kernel. Aborting execution. " * 2
    points = [
        OpPoint(good, Timing((1.0, 1.0, 1.0))),
        OpPoint(bad, None, reason),
        OpPoint(good, None, reason),
    ]
    console.print(ops_table(points))
    text = console.export_text()
    assert (
        good.label in text and bad.label in text and "1.00 s" in text and "No available" not in text
    )
    (line,) = unmeasured_lines(points)
    assert line == f"not measured: attention {bad.label}, gemm {good.label}: {reason}"


def test_a_model_under_the_roof(tmp_path: Path) -> None:
    model = estimate("llama-7b", hardware="H100", micro_batch_size=8)
    ops = model_ops_of(model)
    assert ops[0].name == "linear" and ops[0].kind == "gemm"
    assert model.time is not None
    assert sum(op.seconds for op in ops) == pytest.approx(
        sum(p.device_s for p in model.time.phases)
    )
    speed = default_efficiency(find_gpu("H100"))
    points = [pretended(case, speed) for case in gpu_cases()]
    ceilings = ceilings_of(points)
    assert max(op.flops / op.seconds for op in ops) <= 1.05 * max(ceilings.flops_per_s.values())
    write_roofline(str(tmp_path / "roof.svg"), points, title="H100", ops=ops)
    assert "TFLOP/s" in (tmp_path / "roof.svg").read_text()


def test_a_roof_needs_walls() -> None:
    with pytest.raises(InputError, match="raise --budget"):
        ceilings_of([OpPoint(op_cases.copy(1024), None, "the budget was spent")])


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--device", "cpu", "--plot", "roof.gif"],
        ["bench", "--gpu", "H100"],
        ["calibrate", "--gpu", "H100", "--device", "cpu"],
    ],
)
def test_bad_arguments_are_quoted(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert (
        arguments[-1] in capsys.readouterr().err
        or arguments[2] in capsys.readouterr().err
        or "H100" in arguments
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_gpu_case_runs() -> None:
    device = choose_device("cuda:0")
    points = measure_ops(planned(device), device, Allowance(4 << 30, 60.0), [])
    assert [(p.case.label, p.reason) for p in points if p.timing is None] == []


def test_no_gpu_on_the_command_line() -> None:
    """The whole command in a process that sees no GPU: one line, exit code 2."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code = "import sys; from napkinmath.cli.main import main; sys.exit(main(['calibrate']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_environment()
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--device cpu" in done.stderr


def _environment() -> dict[str, str]:
    import os

    root = Path(__file__).resolve().parents[2]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            str(root / folder) for folder in ("estimator", "profiler", "kernels")
        ),
    }


def test_a_checkpoints_share_is_measured_beside_the_hosts_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Priced with what was measured, tiny steps take as long as they took, with checkpointing and
    without."""
    took = {
        RecomputeKind.NONE: {Phase.FORWARD: 4e-3, Phase.BACKWARD: 8e-3},
        RecomputeKind.FULL: {Phase.FORWARD: 6e-3, Phase.BACKWARD: 15e-3},
    }

    def tiny(train: TrainConfig, _: Device) -> Any:
        step = {k: SimpleNamespace(seconds=s) for k, s in took[train.recompute.kind].items()}
        return SimpleNamespace(failure=None, steps=[step] * 20)

    monkeypatch.setattr(dispatch, "measured_tiny", tiny)
    device, notes, base = choose_device("cpu"), list[str](), default_efficiency(find_gpu("H200"))
    found = dispatch.measured_dispatch(base, device, Allowance(8 << 30, 120.0), notes)
    assert not notes
    for kind, phases in took.items():
        train = TrainConfig(
            micro_batch_size=1,
            sequence_length=8,
            precision=Precision.FP32,
            recompute=RecomputeConfig(kind=kind),
        )
        priced = dispatch._priced_phases(train, found)
        ours = sum(priced[phase].host_s + priced[phase].device_s for phase in phases)
        assert ours == pytest.approx(sum(phases.values()), rel=0.01)
    late = dispatch.measured_dispatch(base, device, Allowance(8 << 30, 0.0), notes)
    assert late == base and "budget" in notes[0]
