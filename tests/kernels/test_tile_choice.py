"""Tiles timed once and remembered: the fastest is taken, the file is read by the next process, and
nothing is timed where it may not be."""

from __future__ import annotations

import json

import pytest
import torch
from napkinmath_kernels.triton_kernels import tile_choice
from napkinmath_kernels.triton_kernels.tile_choice import choose

CUDA = torch.device("cuda", 0)


@pytest.fixture
def chooser(monkeypatch, tmp_path):
    """Chooses among names, whose seconds are given; the calls that were timed are kept."""
    monkeypatch.setenv(tile_choice.VARIABLE, str(tmp_path / "choices.json"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tile_choice, "_chosen", {})
    tile_choice._remembered.cache_clear()
    timed = []

    def run(times, device=CUDA, key="forward"):
        def seconds(call, device):
            return times[call.args[0]]

        return choose(key, list(times), timed.append, device, seconds=seconds)

    return run, timed, tmp_path / "choices.json"


def test_the_fastest_is_taken_and_remembered(chooser, monkeypatch):
    run, _, path = chooser
    assert run({"a": 2.0, "b": 1.0}) == "b"
    assert list(json.loads(path.read_text()).values()) == ["b"]
    assert run({"a": 0.5, "b": 1.0}) == "b"  # of this process
    monkeypatch.setattr(tile_choice, "_chosen", {})
    assert run({"a": 0.5, "b": 1.0}) == "b"  # of the file
    assert run({"a": 0.5, "c": 1.0}) == "a"  # what was chosen is no longer offered
    assert run({"a": 0.5, "b": 1.0}, key="backward") == "a"
    assert len(json.loads(path.read_text())) == 2


def test_nothing_is_timed_where_it_may_not_be(chooser, monkeypatch):
    run, _, path = chooser
    assert run({"a": 2.0, "b": 1.0}, device=torch.device("cpu")) == "a"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run({"a": 2.0, "b": 1.0}) == "a"
    monkeypatch.setenv(tile_choice.VARIABLE, "off")
    assert run({"a": 2.0, "b": 1.0}) == "a"
    assert not path.exists()


def test_a_broken_file_and_a_folder_that_cannot_be_written_cost_a_timing(chooser, monkeypatch):
    run, _, path = chooser
    path.write_text("{")
    assert run({"a": 2.0, "b": 1.0}) == "b"
    monkeypatch.setenv(tile_choice.VARIABLE, str(path / "below a file" / "x.json"))
    monkeypatch.setattr(tile_choice, "_chosen", {})
    assert run({"a": 1.0, "b": 2.0}) == "a"
