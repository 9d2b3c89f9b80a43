"""Following a training on the books that a GPU's allocator would keep: phases, drift before memory
runs out, the report when it has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.base.units import format_bytes
from napkinmath_profiler.cli.watch import run, split
from napkinmath_profiler.measuring import drift
from napkinmath_profiler.measuring.device_memory import CpuMemory, CudaMemory
from napkinmath_profiler.measuring.drift import StepRecord
from napkinmath_profiler.watch import Watching, lightning_callback, trainer_callback, watch
from torch import nn

MIB = 1 << 20
WIDTH, BATCH = 256, 64


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    batch: Callable[[int], int] = lambda _: BATCH,
    keep: Any = None,
) -> None:
    for step in range(steps):
        loss = model(torch.randn(batch(step), WIDTH)).square().mean()
        loss.backward()
        if keep is not None:
            keep.append(torch.empty(200_000))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss


def watched(steps: int = 4, *, limit: int | None = None, **how: Any) -> Watching:
    said: list[str] = []
    model, optimizer = model_and_optimizer()
    with watch(
        model,
        optimizer,
        memory=CpuMemory(limit_bytes=limit),
        warn=said.append,
        **how.pop("watch", {}),
    ) as watching:
        train(model, optimizer, steps, **how)
    assert len(said) == len(watching.warnings)
    return watching


def test_every_step_has_its_phases_and_they_agree_with_the_books() -> None:
    watching = watched()
    assert [r.step for r in watching.records] == [0, 1, 2, 3]
    assert not watching.warnings
    weights = sum(p.nbytes for p in model_and_optimizer()[0].parameters())
    for record in watching.records:
        assert set(record.peaks) == {"between steps", "forward", "backward", "optimizer step"}
        assert record.tokens == BATCH
        assert record.peaks["backward"] > record.peaks["between steps"] >= weights
        assert record.end_allocated >= 4 * weights  # weights, gradients, two states
    first, second = watching.records[:2]
    assert second.peaks["forward"] > first.peaks["forward"]  # the states are there
    assert f"{len(watching.records)} steps" in watching.summary()


def test_the_model_is_found_where_none_is_named() -> None:
    with watch(memory=CpuMemory()) as watching:
        model, optimizer = model_and_optimizer()
        with torch.no_grad():
            model(torch.zeros(1, WIDTH))
        train(model, optimizer, 2)
    assert len(watching.records) == 2 and watching.records[1].peaks["backward"] > 0


def test_a_leak_is_told_with_the_steps_that_are_left() -> None:
    watching = watched(12, keep=[], watch={"limit_bytes": 64 * MIB})
    assert [w.kind for w in watching.warnings] == ["leak"]
    warning = watching.warnings[0]
    assert warning.step == drift.SETTLING_STEPS + drift.WINDOW - 1
    peak = max(r.peak for r in watching.records[: warning.step + 1])
    each = watching.records[5].end_allocated - watching.records[4].end_allocated
    assert f"about {(64 * MIB - peak) // each} steps" in warning.text


def test_a_longer_batch_is_told_before_it_runs() -> None:
    lengths = [64, 64, 64, 64, 1 << 15]
    watching = watched(5, batch=lambda step: lengths[step], watch={"limit_bytes": 24 * MIB})
    assert [w.kind for w in watching.warnings] == ["longer batch"]
    assert watching.warnings[0].step == 4 and "32,768 tokens" in watching.warnings[0].text
    assert (
        watching.records[4].peak > 24 * MIB
    )  # it would have run out, and was told so by what the shorter ones took


def records_of(values: list[tuple[int, int]]) -> list[StepRecord]:
    return [
        StepRecord(i, 64, {"backward": peak}, peak // 2, reserved, reserved)
        for i, (peak, reserved) in enumerate(values)
    ]


def test_under_accumulation_the_longest_micro_batch_counts() -> None:
    """Four micro-batches a step: one twice as long as any before is longer, though the step's sum
    of tokens is not."""
    model, optimizer = model_and_optimizer()
    said: list[str] = []
    with watch(
        model, optimizer, memory=CpuMemory(), limit_bytes=5 * MIB, warn=said.append
    ) as watching:
        for step in range(5):
            for part in range(4):
                model(
                    torch.randn(1024 if (step, part) == (4, 2) else BATCH, WIDTH)
                ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert watching.records[0].tokens == 4 * BATCH and watching.records[0].largest == BATCH
    assert [w.kind for w in watching.warnings] == [
        "longer batch"
    ] and "1,024 tokens, the longest so far had 64" in said[0]


@pytest.mark.filterwarnings("ignore")  # Lightning's, of workers and of epochs
def test_a_lightning_fit_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.head(self.encoder(batch[0]).relu()).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), foreach=False)

    def fit(books: CpuMemory, rows: int) -> Any:
        callback = lightning_callback(
            memory=books, report=tmp_path / "report.txt", warn=lambda _: None
        )
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer = lightning.Trainer(max_steps=3, accelerator="cpu", callbacks=[callback], **quiet)
        data = torch.utils.data.TensorDataset(torch.randn(3 * rows, WIDTH))
        try:
            trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=rows))
        finally:
            assert callback.watching is not None and callback._block is None
        return callback.watching

    with caplog.at_level("INFO", logger="napkinmath.watch"):
        watching = fit(CpuMemory(), BATCH)
    assert [record.tokens for record in watching.records] == [BATCH] * 3
    assert all(
        {"forward", "backward", "optimizer step"} <= set(record.peaks)
        for record in watching.records
    )
    assert "memory of the training" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        fit(CpuMemory(limit_bytes=60 * MIB), 8192)
    assert (tmp_path / "report.txt").read_text().startswith("asked for 8.00 MiB in step 0, forward")


def test_fragmentation_is_a_cache_that_grows_without_the_tensors() -> None:
    grows = records_of([(1000 * MIB, (1100 + 20 * i) * MIB) for i in range(12)])
    warning = drift.fragmentation(grows)
    assert (
        warning is not None
        and "140 MiB more than 7 steps ago" in warning.text
        and "expandable_segments" in warning.text
    )
    assert drift.fragmentation(records_of([(1000 * MIB, 1100 * MIB)] * 12)) is None
    assert (
        drift.fragmentation(
            records_of([((1000 + 20 * i) * MIB, (1100 + 20 * i) * MIB) for i in range(12)])
        )
        is None
    )
    uneven = [((1000 - 300 * (i % 2)) * MIB, (1100 + (i % 2)) * MIB) for i in range(12)]
    assert drift.fragmentation(records_of(uneven)) is None


def test_steady_steps_and_noise_are_no_leak() -> None:
    steady = records_of([(100 * MIB, 110 * MIB)] * 20)
    noisy = [StepRecord(i, 64, {"backward": 1}, (100 + i % 3) * MIB, 0, 0) for i in range(20)]
    logged = [StepRecord(i, 64, {"backward": 1}, 100 * MIB + 512 * i, 0, 0) for i in range(20)]
    for records in (steady, noisy, logged, steady[:4]):
        assert drift.leak(records, 1 << 30) is None


def test_more_than_predicted_is_told_once() -> None:
    watching = watched(4, watch={"predicted": MIB})
    assert [w.kind for w in watching.warnings] == ["beyond prediction"]
    assert "more than the 1.0" in watching.warnings[0].text


def test_running_out_writes_what_was_there_and_what_to_change(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    predicted = estimate("TinyLlama-1.1B", micro_batch_size=1, sequence_length=128)
    with pytest.raises(torch.OutOfMemoryError):
        watched(
            5,
            limit=24 * MIB,
            batch=lambda step: 64 if step < 3 else 1 << 14,
            watch={"report": path, "predicted": predicted},
        )
    text = path.read_text()
    weights = sum(p.nbytes for p in model_and_optimizer()[0].parameters())
    assert text.startswith("asked for 16") and "step 3, forward" in text.splitlines()[0]
    assert f"{format_bytes(weights)}  parameters" in text
    assert "optimizer states" in text and "by module" in text and "predicted: " in text
    assert "16,384 tokens" in text and "cap the length" in text and "--lora" in text
    assert text.count("tokens, peak") == 3


def test_a_report_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        said: list[str] = []
        model, optimizer = model_and_optimizer()
        with watch(
            model,
            optimizer,
            memory=CpuMemory(limit_bytes=4 * MIB),
            report=tmp_path / "no" / "folder",
            warn=said.append,
        ):
            train(model, optimizer, 3, batch=lambda _: 1 << 14)
    assert any("no report could be written" in line for line in said)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_running_out_past_the_allocator_is_reported_too(tmp_path: Path, error: Exception) -> None:
    model, optimizer = model_and_optimizer()
    path = tmp_path / "report.txt"
    with (
        pytest.raises(type(error)),
        watch(model, optimizer, memory=CpuMemory(), report=path, warn=lambda _: None),
    ):
        train(model, optimizer, 2)
        raise error
    assert path.read_text().startswith("ran out in step 2, between steps")


def test_other_errors_write_no_report(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with (
        pytest.raises(RuntimeError),
        watch(model, optimizer, memory=CpuMemory(), report=tmp_path / "report.txt"),
    ):
        raise RuntimeError("shapes do not match")
    assert not (tmp_path / "report.txt").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_said_what_can_be_watched(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="no CUDA device"), watch():
        raise AssertionError("nothing is watched")
    with pytest.raises(InputError, match="CpuMemory"), watch(device="cpu"):
        raise AssertionError("nothing is watched")
    callback = trainer_callback()
    with caplog.at_level("WARNING", "napkinmath.watch"):
        callback.on_train_begin(None, None, None)
        callback.on_train_end(None, None, None)
    assert callback.watching is None and "not watched: no CUDA device" in caplog.text


def test_a_watch_that_is_over_keeps_nothing_of_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch keeps its observers of exhaustion for good: a model watched once must not stay on the
    GPU through one."""
    from napkinmath_profiler.measuring import device_memory

    attached: list[Callable[..., None]] = []
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False
    )
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    device_memory._attach_observer.cache_clear()
    told: list[int] = []
    memories = [CudaMemory(torch.device("cuda", index)) for index in (0, 1)]
    ends = [memory.on_out_of_memory(told.append) for memory in memories]
    assert len(attached) == 1  # one for the process, however many watches
    attached[0](1, 4096, 1 << 30, 0)
    assert told == [4096]  # of two GPUs the one that is watched
    ends[1]()
    attached[0](1, 4096, 1 << 30, 0)
    assert told == [4096]
    ends[0]()
    device_memory._attach_observer.cache_clear()

    model, optimizer = model_and_optimizer()
    gone = weakref.ref(model)
    books = CpuMemory()
    with watch(model, optimizer, memory=books):
        train(model, optimizer, 2)
    del model, optimizer
    gc.collect()
    assert gone() is None and books._observers == []


def test_hooks_are_gone_afterwards() -> None:
    model, optimizer = model_and_optimizer()
    with watch(model, optimizer, memory=CpuMemory()) as watching:
        train(model, optimizer, 1)
    train(model, optimizer, 2)
    assert len(watching.records) == 1 and not model._forward_hooks and not model._forward_pre_hooks


def test_a_trainer_is_followed(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}

    data = [{"x": torch.randn(16), "labels": torch.tensor(1.0)} for _ in range(12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    callback = trainer_callback(memory=CpuMemory())
    Trainer(model=Regression(), args=arguments, train_dataset=data, callbacks=[callback]).train()
    assert callback.watching is not None and len(callback.watching.records) == 3
    assert all(r.peaks["backward"] > 0 for r in callback.watching.records)


SCRIPT = """
import sys, torch
from napkinmath.base.units import format_bytes
from torch import nn
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.randn(int(sys.argv[2]), 256)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
sys.exit(7)
"""


def test_the_command_runs_a_script_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(["--device", "cpu", "train.py", "3", "8"]) == 7
    assert "3 steps" in capsys.readouterr().err
    assert (
        run(["--device", "cpu", "--limit", "4MiB", "--report", "oom.txt", "train.py", "3", "65536"])
        == 1
    )
    assert "asked for 64" in (tmp_path / "oom.txt").read_text()


def test_words_before_the_script_are_ours() -> None:
    assert split(["--bs", "4", "train.py", "--bs", "8"]) == (
        ["--bs", "4"],
        ["train.py", "--bs", "8"],
    )
    assert split(["--bs", "4", "--", "train", "x"]) == (["--bs", "4"], ["train", "x"])
    assert split(["-m", "runpy", "x.py"]) == ([], ["-m", "runpy", "x.py"])
    assert split(["-m", "llama-7b", "train.py"]) == (["-m", "llama-7b"], ["train.py"])
