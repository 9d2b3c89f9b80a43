"""The pre-flight check speaks the Python of whoever called it, and its headroom is the one of
`estimate check`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("transformers")

import torch
from napkinmath.answers.changes import CANDIDATES
from napkinmath.answers.remedies import LEVELS
from napkinmath.base.errors import DoesNotFit
from napkinmath.cli.main import main
from napkinmath_profiler.preflight import preflight
from napkinmath_profiler.preflight.batch_shape import longest_of
from napkinmath_profiler.preflight.python_words import Caller, in_python
from napkinmath_profiler.tracing.trace_errors import TraceError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
)
FLAGS = sorted(
    {c.flag.format(bs=2, accum=8) for c in (*CANDIDATES, *(c for level in LEVELS for c in level))}
)


def llama(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype).train()


@pytest.mark.parametrize("caller", Caller)
@pytest.mark.parametrize("flag", [*FLAGS, "--attention sdpa", "--precision fp16-autocast"])
def test_every_flag_of_a_change_has_words_in_python(flag: str, caller: Caller) -> None:
    assert "--" not in in_python(f"use {flag}, please", caller)


def test_words_are_those_of_the_caller() -> None:
    batch = "--bs 2 --grad-accum 8"
    assert in_python(batch, Caller.TRAINER) == (
        "per_device_train_batch_size=2, gradient_accumulation_steps=8"
    )
    assert "accumulate_grad_batches=8" in in_python(batch, Caller.LIGHTNING)
    assert in_python("--checkpointing full", Caller.PYTHON) == (
        "model.gradient_checkpointing_enable()"
    )
    assert in_python("--checkpointing full", Caller.TRAINER) == "gradient_checkpointing=True"
    assert "optim=" in in_python("--optimizer adamw-8bit", Caller.TRAINER)


@pytest.mark.parametrize("caller", Caller)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gpu", ["t4", "v100-32", "a100-80"])
def test_no_text_has_a_flag(caller: Caller, dtype: torch.dtype, gpu: str) -> None:
    found = preflight(
        llama(dtype),
        "adamw",
        (64, 8192),
        hardware=gpu,
        raises=False,
        caller=caller,
        requested_checkpointing=True,
    )
    assert found.ways and "--" not in str(found) + " ".join(found.ways)


@pytest.mark.parametrize(("gpu", "batch"), [("t4", 4), ("a100-80", 16), ("rtx4090", 2)])
def test_headroom_is_that_of_the_check(
    gpu: str, batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama()
    found = preflight(model, "adamw-fused", (batch, 512), hardware=gpu)
    assert f"headroom {found.headroom_bytes / 2**30:.2f} GiB" in str(found)  # type: ignore[operator]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(model.config.to_dict()))
    flags = f"--full --precision bf16 --optimizer adamw-fused --stack hf-bare --bs {batch}"
    arguments = ["check", "--model", str(file), *flags.split(), "--ctx", "512", "--gpu", gpu]
    codes = []
    for room in (found.headroom_bytes, found.headroom_bytes + 1):  # type: ignore[operator]
        codes.append(main([*arguments, "--min-headroom", f"{room}B"]))
    assert codes == [0, 1], capsys.readouterr()


def test_a_dataset_of_any_length_is_read_in_time() -> None:
    class Endless:
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": range(7)}

    begun = time.process_time()
    shape = longest_of(Endless(), 2)
    assert (shape.sequence_length, shape.num_rows) == (7, 10**12)
    assert time.process_time() - begun < 2  # it stops by its own clock after 0.4 s


class Around(nn.Module):
    """A wrapper whose inner module is itself."""

    def __getattr__(self, name: str) -> Any:
        return self if name == "module" else super().__getattr__(name)


def test_wrappers_without_end_are_refused() -> None:
    """A mock holds an optimizer that holds another, without end."""
    with pytest.raises(TraceError, match="torch optimizer itself"):
        preflight(llama(), MagicMock(), (1, 64), hardware="T4")
    with pytest.raises(TraceError, match="transformers model itself"):
        preflight(Around(), "sgd", (1, 64), hardware="T4")


@pytest.mark.parametrize("broken", ["str", "checked"])
def test_only_does_not_fit_leaves_a_callback(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from napkinmath_profiler.preflight import trainer_callback

    class Unprintable:
        def __str__(self) -> str:
            raise LookupError("broken")

    def fail(*_: Any, **__: Any) -> Any:
        raise LookupError("broken")

    callback = trainer_callback.PreflightCallback()
    checked = (lambda *_: Unprintable()) if broken == "str" else fail
    monkeypatch.setattr(callback, "_checked", checked)
    callback.on_train_begin(SimpleNamespace(process_index=0), None, None)
    assert "left out: LookupError: broken" in caplog.text

    def refuse(*_: Any, **__: Any) -> Any:
        raise DoesNotFit("too large")

    monkeypatch.setattr(callback, "_checked", refuse)
    with pytest.raises(DoesNotFit):
        callback.on_train_begin(SimpleNamespace(process_index=0), None, None)
