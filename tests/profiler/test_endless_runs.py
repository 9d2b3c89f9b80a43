"""A run of 2^40 micro-steps: what holds every event, or runs every step, names its limit at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.runs import TINY, run
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import Estimate, estimate
from napkinmath_profiler.calibration.roofline import model_ops_of
from napkinmath_profiler.snapshot.chrome_trace import chrome_events, write_chrome_trace
from napkinmath_profiler.snapshot.spelled_out import MOST_EVENTS
from napkinmath_profiler.snapshot.write_snapshot import snapshot_of, write_snapshot
from napkinmath_profiler.tracing.training_step import MOST_MICRO_STEPS

MANY = 1 << 40
TINY_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def tiny(micro_steps: int) -> Estimate:
    config = TrainConfig(
        micro_batch_size=1, sequence_length=64, gradient_accumulation_steps=micro_steps
    )
    return estimate(TINY_CONFIG, config, hardware="H100")


@pytest.mark.parametrize("write", [write_snapshot, write_chrome_trace])
def test_a_file_of_all_events_names_its_limit(tmp_path: Path, write: object) -> None:
    assert callable(write)
    with pytest.raises(InputError, match=f"at most {MOST_EVENTS:,}, and this one has [0-9,]+; "):
        write(tiny(MANY).timeline, tmp_path / "file")
    assert not list(tmp_path.iterdir())
    write(tiny(3).timeline, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size


def test_what_is_below_the_limit_is_spelled_out() -> None:
    short, long = tiny(2).timeline, tiny(6).timeline
    events = sum(1 for _ in long.events()) - sum(1 for _ in short.events())
    assert events > 0
    assert len(chrome_events(long)) > len(chrome_events(short))
    traces = [snapshot_of(timeline)["device_traces"][0] for timeline in (short, long)]
    assert len(traces[1]) > len(traces[0])


@pytest.mark.parametrize(
    "command", [("trace",), ("measure", "--device", "cpu"), ("trace", "--chrome", "x.json")]
)
def test_real_steps_name_their_limit(command: tuple[str, ...]) -> None:
    for count in (MOST_MICRO_STEPS + 1, MANY):
        done = run(*command, *TINY, "--grad-accum", str(count))
        assert done.code == 2 and f"at most {MOST_MICRO_STEPS}" in done.err
        assert len(done.err.strip().splitlines()) == 1


def test_the_operations_of_a_roofline_are_counted() -> None:
    once, often = (
        {(op.name, op.phase): op.flops for op in model_ops_of(tiny(count))} for count in (4, 4096)
    )
    forward = [key for key in once if key[1] == "forward" and once[key]]
    assert forward and all(often[key] == 1024 * once[key] for key in forward)
    assert model_ops_of(tiny(MANY))
