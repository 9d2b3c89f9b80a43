"""What repeats is a count: the work of an estimate does not grow with micro-steps, micro-batches or
layers, and what is counted is what a plain loop finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from napkinmath.base.errors import InputError
from napkinmath.config.parallel_config import ParallelConfig, PipelineSchedule
from napkinmath.config.pipeline_schedules import SCHEDULES
from napkinmath.config.train_config import RecomputeConfig, RecomputeKind, TrainConfig
from napkinmath.estimate import Estimate, estimate
from napkinmath.inputs.options import train_config
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.order import Order
from napkinmath.ir.step import Run
from napkinmath.ir.timeline import Stamp, TensorInfo, Timeline, TimelineSegment
from napkinmath.lowering.parallel import pipeline
from napkinmath.memory import replay as replays
from napkinmath.memory.books import Books
from napkinmath.memory.simulate import peak_bytes, simulate
from napkinmath.report import curve, drawn
from napkinmath.serving.front_end import PAGE as page_folder
from napkinmath.serving.requests import options_of

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
}


def tiny(layers: int = 2, **changes: object) -> Estimate:
    config = {"micro_batch_size": 1, "sequence_length": 64, **changes}
    return estimate(
        {**TINY, "num_hidden_layers": layers}, TrainConfig().replace(**config), hardware="H100"
    )


def pipelined(count: int, schedule: PipelineSchedule = PipelineSchedule.GPIPE) -> ParallelConfig:
    return ParallelConfig(
        pipeline_parallel_size=2, pipeline_schedule=schedule, num_micro_batches=count
    )


def spelled_out(timeline: Timeline) -> Timeline:
    """The same timeline as a plain list of segments."""
    return Timeline(timeline.tensors, list(timeline.segments), timeline.stamp, timeline.step_starts)


def calls(work: Callable[[], object]) -> int:
    """Calls of Python functions that something takes."""
    number = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return number


def answer(e: Estimate) -> None:
    """Everything that the report and its pictures ask for."""
    assert e.memory.device.value > 0 and e.time is not None and e.time.seconds > 0
    assert len(curve.envelope(e.timeline, 64).spans) <= 2 * 64 + 8
    found = drawn.shown(e.timeline, most_events=20_000)
    assert len(found.segments) <= 4_000
    drawn.columns(found, 100)


rows_strategy = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 9), max_size=4)), max_size=5
)


@given(rows_strategy, st.data())
def test_an_order_is_the_sequence_that_it_stands_for(
    rows: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    order = Order(rows)
    plain = [item for times, items in rows for _ in range(times) for item in items]
    assert list(order) == plain and len(order) == len(plain)
    assert [order[i] for i in range(len(plain))] == plain
    start, stop = (data.draw(st.integers(-20, 20)) for _ in range(2))
    assert list(order[start:stop]) == plain[start:stop]
    assert sum(times for times, _ in order.counted()) == len(plain)
    if plain:
        assert order[-1] == plain[-1]
    with pytest.raises(IndexError):
        order[len(plain)]


CHANGES = st.fixed_dictionaries(
    {
        "recompute": st.sampled_from(
            [
                RecomputeConfig(),
                RecomputeConfig(kind=RecomputeKind.FULL),
                RecomputeConfig(kind=RecomputeKind.EVERY, every=2),
            ]
        ),
        "micro_batch_size": st.integers(1, 3),
    }
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(4, 6),
    count=st.integers(1, 12),
    schedule=st.sampled_from([None, PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B]),
    changes=CHANGES,
)
def test_counted_repetitions_are_the_plain_loop(
    layers: int, count: int, schedule: PipelineSchedule | None, changes: dict[str, object]
) -> None:
    spread = (
        {"gradient_accumulation_steps": count}
        if schedule is None
        else {"parallel": pipelined(count, schedule)}
    )
    e = tiny(layers, **changes, **spread)
    counted, plain = e.timeline, spelled_out(e.timeline)
    assert counted.peak() == plain.peak()
    assert counted.phase_peaks() == plain.phase_peaks()
    assert counted.live_counts(counted.peak()) == plain.live_counts(plain.peak())
    assert counted.end_bytes() == plain.end_bytes()
    assert counted.seconds == pytest.approx(plain.seconds, rel=1e-9)
    assert peak_bytes(e.step) == simulate(e.step).peak().nbytes
    assert replays.replay(counted) == replays.replay(plain)


@dataclass
class Job:
    """A job of a count that may be any."""

    name: str
    made: Callable[[int], Estimate]
    few: int
    many: int
    most: float = 1.2


def in_chunks(count: int) -> Estimate:
    """A pipeline of two ranks with so many model chunks of two layers each on a rank."""
    parallel = ParallelConfig(
        pipeline_parallel_size=2,
        pipeline_schedule=PipelineSchedule.INTERLEAVED,
        virtual_pipeline_size=count,
        num_micro_batches=16,
    )
    return tiny(4 * count, parallel=parallel)


JOBS = [
    Job("micro-steps", lambda n: tiny(gradient_accumulation_steps=n), 64, 1 << 14),
    Job("more micro-steps", lambda n: tiny(gradient_accumulation_steps=n), 64, 1 << 40),
    Job("GPipe", lambda n: tiny(parallel=pipelined(n)), 512, 1024),
    Job("more of GPipe", lambda n: tiny(parallel=pipelined(n)), 512, 1 << 20),
    Job(
        "1F1B",
        lambda n: tiny(parallel=pipelined(n, PipelineSchedule.ONE_F_ONE_B)),
        64,
        1 << 30,
    ),
    Job("layers", lambda n: tiny(n), 2_048, 10_000, most=1.6),  # five times as many
]


@pytest.mark.slow
def test_equal_chunks_of_a_pipeline_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    real = pipeline.lower_micro_step

    def lower(runs: list[Run], *given: object, **more: object) -> object:
        lowered.append(len(runs))
        return real(runs, *given, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(pipeline, "lower_micro_step", lower)
    counts: list[int] = []
    for chunks in (48, 192):
        lowered.clear()
        assert in_chunks(chunks).peak.nbytes > 0
        counts.append(len(lowered))
    # the first or the last chunk and all others, on each rank, with gradients made or added to
    assert counts == [8, 8]


@pytest.mark.slow
def test_thousands_of_layers_in_chunks_are_played_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the chunks are four times the segments, and no more than four times the events."""
    played: list[int] = []
    real = Books._play

    def play(books: Books, segment: TimelineSegment, times: int) -> None:
        played[-1] += times * len(segment.events)
        real(books, segment, times)

    looked: list[int] = []
    state = Books.state

    def look(books: Books, reach: dict[int, tuple[int, int]]) -> object:
        found = state(books, reach)
        assert isinstance(found, tuple)
        looked[-1] += sum(len(addresses) for _, addresses in found[3])
        return found

    monkeypatch.setattr(Books, "_play", play)
    monkeypatch.setattr(Books, "state", look)
    spelled: list[int] = []
    for chunks in (64, 256):
        played.append(0)
        looked.append(0)
        timeline = in_chunks(chunks).timeline
        replays.replay(timeline)
        spelled.append(sum(len(s.events) * s.repeat for s in timeline.segments))
    assert played[1] < 4.5 * played[0], played
    assert looked[1] < 4.5 * looked[0], looked  # blocks that are compared: not those of all chunks
    assert played[1] < spelled[1] / 3, (played, spelled)  # a sixth of the micro-batches, about


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_the_work_does_not_grow_with_the_count(job: Job) -> None:
    answer(job.made(job.few))  # what is loaded and learned once
    few = calls(lambda: answer(job.made(job.few)))
    many = calls(lambda: answer(job.made(job.many)))
    assert many <= job.most * few, (few, many)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [700, 1_100])
def test_long_runs_of_layers_are_followed_to_within_a_segment(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_to_the_plain_replay(tiny(layers), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("count", [70, 200, 333])
def test_long_pipelines_are_followed_to_within_a_segment(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_to_the_plain_replay(tiny(4, parallel=pipelined(count)), monkeypatch)


def held_to_the_plain_replay(e: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = replays.replay(e.timeline)
    monkeypatch.setattr(replays, "long_counts", lambda *_: [])
    plain = replays.replay(e.timeline)
    for name in ("peak_allocated", "peak_reserved", "peak_unreturnable", "end_allocated"):
        ours, theirs = getattr(followed, name), getattr(plain, name)
        assert ours == pytest.approx(theirs, rel=0.01, abs=22 << 20), name


@given(
    times=st.integers(1, 40),
    events=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6),
    columns=st.integers(1, 60),
)
def test_the_curve_of_a_counted_row_reaches_what_the_plain_one_does(
    times: int, events: list[int], columns: int
) -> None:
    sizes = [512, 1024, 4096]
    tensors = [TensorInfo(str(s), Role.ACTIVATIONS, "", s, s) for s in sizes]
    up = TimelineSegment("f", Phase.FORWARD, 1, [("+", e) for e in events], [])
    down = TimelineSegment("b", Phase.BACKWARD, 1, [("-", e) for e in events[1:]], [])
    counted = Timeline(tensors, Order([(times, [up, down])]), Stamp(origin="analytic"))
    found = curve.envelope(counted, columns)
    plain = curve.envelope(spelled_out(counted), columns)
    assert max(found.values) == max(plain.values) == counted.peak().nbytes
    assert found.extent == plain.extent
    assert found.spans[-1].end == pytest.approx(found.extent)


@given(stages=st.integers(1, 4), chunks=st.integers(2, 3), groups=st.integers(1, 6), data=st.data())
def test_interleaved_turns_are_those_of_one_micro_batch_after_the_other(
    stages: int, chunks: int, groups: int, data: st.DataObject
) -> None:
    rank, count = data.draw(st.integers(0, stages - 1)), groups * stages
    blocks = SCHEDULES["interleaved"].order(stages, chunks, rank, count)
    found = [turn for times, turns in blocks for _ in range(times) for turn in turns]
    for what in ("forward", "backward"):
        order = [chunk for name, chunk in found if name == what]
        passing = range(chunks) if what == "forward" else range(chunks - 1, -1, -1)
        assert order == [chunk for chunk in passing for _ in range(stages)] * groups
    warmup = min(count * chunks, 2 * (stages - rank - 1) + (chunks - 1) * stages)
    names = [name for name, _ in found]
    steady = count * chunks - warmup
    assert names == [
        *["forward"] * warmup,
        *["forward", "backward"] * steady,
        *["backward"] * warmup,
    ]
    assert len(blocks) <= 2 * warmup + 2


@pytest.mark.parametrize("key", ["grad_accum", "micro_batches"])
def test_micro_steps_have_one_limit_at_every_door(key: str) -> None:
    """Flag, job file and page take the same number, and price it as fast as a small one."""
    most = 1 << 40
    rest: dict[str, object] = {"pp": 2, "gpus": "2xH100"} if key == "micro_batches" else {}
    doors: list[Callable[[int], object]] = [
        lambda count: train_config({**rest, key: count}),
        lambda count: train_config({**rest, key: str(count)}),
        lambda count: options_of(json.dumps({key: count}).encode()),
    ]
    for door in doors:
        door(most)
        with pytest.raises(InputError, match=str(most)):
            door(most + 1)
    page = Path(page_folder, "index.html").read_text()
    assert f'id="grad_accum-number" min="1" max="{most}"' in page


def test_chunks_have_one_limit_at_every_door() -> None:
    """A rank with more would take longer than 5 s; no model has as many layers."""
    rest: dict[str, object] = {"pp": 2, "gpus": "2xH100", "pp_schedule": "interleaved"}
    for door in (
        lambda chunks: train_config({**rest, "pp_chunks": chunks}),
        lambda chunks: options_of(json.dumps({**rest, "pp_chunks": chunks}).encode()),
        lambda chunks: ParallelConfig(
            pipeline_parallel_size=2,
            pipeline_schedule=PipelineSchedule.INTERLEAVED,
            virtual_pipeline_size=chunks,
        ),
    ):
        door(512)
        with pytest.raises(InputError, match="512"):
            door(513)


@pytest.mark.parametrize("schedule", [schedule.value for schedule in PipelineSchedule])
def test_every_schedule_takes_the_limit(schedule: str) -> None:
    options = {"pp": 2, "gpus": "2xH100", "pp_schedule": schedule, "micro_batches": 1 << 40}
    e = tiny(4, parallel=train_config(options).parallel)
    assert e.memory.device.value > 0 and e.time is not None and e.time.seconds > 0


def work_of_copies(copies: int) -> int:
    config: dict[str, object] = {
        **{key: value for key, value in TINY.items() if key != "model_type"},
        "model_type": "gemma3n_text",
        "altup_num_inputs": copies,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 64,
        "head_dim": 32,
        "num_kv_shared_layers": 0,
        "num_key_value_heads": 1,
    }
    config_of_step = TrainConfig().replace(micro_batch_size=1, sequence_length=8)
    return calls(lambda: estimate(config, config_of_step).peak)


def test_work_grows_with_what_blocks_share_not_with_its_square() -> None:
    """Each copy of Gemma 3n's hidden state is shared; Qwen-Image's blocks share thousands of casts."""
    few, many, more = (work_of_copies(copies) for copies in (40, 72, 104))
    assert more - many < 1.5 * (many - few)  # where it is a square, twice as much
