"""A watch whose every hook fails: the training is the same as without it, and one line says why the
watch ended."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from napkinmath_profiler.measuring import drift
from napkinmath_profiler.measuring.device_memory import CpuMemory
from napkinmath_profiler.measuring.watching import Watching
from napkinmath_profiler.watch import lightning_callback, trainer_callback, watch
from torch import nn
from torch.optim import optimizer as torch_optimizer

HOOKS = [
    "_find_model",
    "_model_called",
    "forward_begins",
    "forward_ends",
    "update_begins",
    "_optimizer_done",
    "end_step",
]
READINGS = ["peaks", "current"]
CHECKS = ["longer_batch", "leak", "fragmentation", "beyond_prediction"]


def fail(*_: Any, **__: Any) -> Any:
    raise LookupError("this reading is broken")


def losses(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def said_once(caplog: pytest.LogCaptureFixture) -> bool:
    return caplog.text.count("this reading is broken") == 1 == caplog.text.count("switched off")


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize("broken", [*READINGS, *CHECKS])
def test_a_reading_that_fails_ends_the_watch_and_not_the_training(
    broken: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = losses(small()), small()
    with watch(model if is_named else None, memory=CpuMemory()) as watching:
        monkeypatch.setattr(drift if broken in CHECKS else watching._memory, broken, fail)
        assert losses(model) == plain
        assert not model._forward_pre_hooks and not model._forward_hooks
        assert not torch_optimizer._global_optimizer_pre_hooks
        assert not torch_optimizer._global_optimizer_post_hooks
    assert isinstance(watching.failure, LookupError) and said_once(caplog)
    assert watching.summary()


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_guarded(
    hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The body of each hook fails, under the guard that it has."""
    code = getattr(Watching, hook)
    guarded = type(code)(
        code.__code__, code.__globals__, code.__name__, None, (type(code.__closure__[0])(fail),)
    )
    monkeypatch.setattr(Watching, hook, guarded)
    plain, model = losses(small()), small()
    with watch(None if hook == "_find_model" else model, memory=CpuMemory()) as watching:
        assert losses(model) == plain
    assert isinstance(watching.failure, LookupError) and said_once(caplog)


def test_warnings_that_nobody_can_take_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    with watch(model, memory=CpuMemory(), predicted=1, warn=fail) as watching:
        assert len(losses(model)) == 3
    assert isinstance(watching.failure, LookupError) and said_once(caplog)


def test_running_out_is_what_is_seen_where_the_report_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED"),
        watch(small(), memory=CpuMemory(), warn=fail, report=tmp_path / "r.txt") as watching,
    ):
        monkeypatch.setattr(watching._memory, "figures", fail)
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")


@pytest.mark.parametrize("broken", ["on_train_start", "on_train_batch_start", *HOOKS[2:5]])
def test_no_hook_of_the_lightning_callback_raises(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("pytorch_lightning")
    callback, model = lightning_callback(memory=CpuMemory()), small()
    trainer: Any = SimpleNamespace(optimizers=[torch.optim.SGD(model.parameters())])
    batch: Any = {"input_ids": torch.ones(1, 2)}
    if broken == "on_train_start":
        trainer = object()  # has no optimizers
    elif broken == "on_train_batch_start":
        batch = type("Odd", (UserDict,), {"__iter__": fail})(batch)
    else:
        monkeypatch.setattr(Watching, broken, fail)
    callback.on_train_start(trainer, model)
    for index in range(2):
        callback.on_train_batch_start(trainer, model, batch, index)
        callback.on_before_backward(trainer, model, None)
        callback.on_before_optimizer_step(trainer, model, None)
    callback.on_exception(trainer, model, ValueError("the training's own"))
    callback.on_train_end(trainer, model)
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


def test_no_hook_of_the_trainer_callback_raises(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    callback = trainer_callback(memory=SimpleNamespace())  # no books at all
    callback.on_train_begin(None, None, None, model=small())
    callback.on_train_end(None, None, None)
    assert "not watched" in caplog.text
