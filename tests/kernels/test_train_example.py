"""The training example: it learns, goes on from a checkpoint as if never stopped, and prints
predicted against observed."""

from __future__ import annotations

import re

import pytest
import torch
from napkinmath_profiler import train
from napkinmath_profiler.example.corpus import arithmetic_text, batches_of, manual_text
from napkinmath_profiler.example.loop import Progress, load_checkpoint, run_steps
from napkinmath_profiler.example.report import MemoryFigure, comparison_lines
from napkinmath_profiler.train import main

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SMALL = [
    "--base-steps",
    "6",
    "--steps",
    "6",
    "--bs",
    "2",
    "--ctx",
    "32",
    "--rank",
    "2",
    "--save-every",
    "3",
    "--device",
    "cpu",
]


@pytest.mark.parametrize("checkpointing", ["keep", "full"])
def test_the_whole_example_runs_and_reports(tmp_path, capsys, checkpointing):
    assert main([*SMALL, "--out", str(tmp_path), "--checkpointing", checkpointing]) == 0
    shown = capsys.readouterr().out
    ratio = float(re.search(r"ratio (\d\.\d\d)", shown).group(1))
    assert 0.8 < ratio < 1.3, (
        shown
    )  # the buffers inside the fused ops, a large part of so small a step, are not seen on a CPU
    assert "peak memory" in shown and "observed" in shown and "qlora_qkv" in shown
    assert (tmp_path / "losses.png").stat().st_size > 5000
    saved = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert len(saved["losses"]) == 6 and all("lora_" in name for name in saved["trained"])
    assert saved["losses"][-1] < saved["losses"][0]


def test_without_bitsandbytes_the_base_stays_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "can_quantize", lambda: False)
    assert main([*SMALL, "--base-steps", "2", "--steps", "2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "bitsandbytes is not installed" in shown and "qlora_qkv" in shown
    assert 0.8 < float(re.search(r"ratio (\d\.\d\d)", shown).group(1)) < 1.3, shown


def test_a_device_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["--device", "cuda:7", "--out", str(tmp_path)]) == 2
    assert "CUDA device" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    dropout = ["--dropout", "0.2"]
    main([*SMALL, *dropout, "--out", str(whole)])
    main([*SMALL, *dropout, "--out", str(resumed), "--steps", "3"])
    main([*SMALL, *dropout, "--out", str(resumed)])
    first, second = (
        torch.load(folder / "adapters.pt", weights_only=True) for folder in (whole, resumed)
    )
    assert first["losses"] == second["losses"]
    assert all(
        torch.equal(first["trained"][name], value) for name, value in second["trained"].items()
    )


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, other)]

    class Toy(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, labels, use_cache):
            return type("Output", (), {"loss": self.inner(input_ids.float()).square().mean()})

    path = tmp_path / "c.pt"
    run_steps(
        Toy(model),
        optimizers[0],
        lambda step: torch.ones(1, 2),
        1,
        checkpoint=path,
        save_every=1,
        advance=lambda loss: None,
    )
    with pytest.raises(ValueError, match="trains 1"):
        load_checkpoint(path, Toy(other), optimizers[1])


def test_the_text_is_there_and_batches_repeat():
    assert len(manual_text()) > 100_000 and b"Answer: " in arithmetic_text(10)
    batch = batches_of(b"abcdefghij", 2, 4, seed=1, device=torch.device("cpu"))
    assert (
        batch(3).shape == (2, 4)
        and torch.equal(batch(3), batch(3))
        and not torch.equal(batch(3), batch(4))
    )


def test_the_comparison_says_what_it_compares():
    lines = comparison_lines(2 * 2**20, MemoryFigure(2**20, "somewhere"), None, 1000.0)
    assert "ratio 2.00" in lines[0] and "somewhere" in lines[1] and "no GPU named" in lines[2]
    assert "ratio 0.50" in comparison_lines(1, MemoryFigure(1, ""), 500.0, 1000.0)[2]


def test_speed_is_the_median_without_the_first_step():
    assert Progress([0.0] * 4, [9.0, 1.0, 2.0, 4.0]).tokens_per_second(8) == 4.0
