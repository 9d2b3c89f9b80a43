"""Snapshots: written ones are read by PyTorch's own memory_viz, read ones replay to the same
figures, hostile ones run nothing."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from napkinmath.base.errors import InputError
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Stamp, TensorInfo, Timeline, TimelineSegment
from napkinmath.memory.allocator_settings import AllocatorSettings
from napkinmath.memory.replay import replay
from napkinmath_profiler.cli.allocator import replays
from napkinmath_profiler.snapshot.chrome_trace import chrome_events, write_chrome_trace
from napkinmath_profiler.snapshot.oom_message import read_message
from napkinmath_profiler.snapshot.read_snapshot import read_snapshot, read_snapshot_bytes
from napkinmath_profiler.snapshot.streamed_pickle import StreamedPickle
from napkinmath_profiler.snapshot.write_snapshot import snapshot_of, write_snapshot
from napkinmath_profiler.trace import trace_config
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from profiler.traced_families import FAMILIES

MIB = 1 << 20


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return timeline_of(trace_config({**FAMILIES["llama"], "vocab_size": 8192}, sequence_length=256))


def small_timeline(*steps: tuple[str, int]) -> Timeline:
    """('+', bytes) allocates, ('-', n) frees the n-th allocation."""
    sizes = [size for action, size in steps if action == "+"]
    tensors = [
        TensorInfo(f"t{i}", Role.ACTIVATIONS, "m", size, (size + 511) // 512 * 512)
        for i, size in enumerate(sizes)
    ]
    events: list[tuple[str, int]] = []
    for action, value in steps:
        events.append((action, sum(a == "+" for a, _ in events) if action == "+" else value))
    return Timeline(
        tensors, [TimelineSegment("all", Phase.FORWARD, 1, events, [])], Stamp(origin="analytic")
    )


@pytest.mark.parametrize("expandable", [False, True])
def test_pytorchs_memory_viz_reads_a_predicted_snapshot(
    timeline: Timeline, expandable: bool
) -> None:
    from torch.cuda import _memory_viz

    snapshot = snapshot_of(timeline, AllocatorSettings(expandable_segments=expandable))
    summary = _memory_viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}" in summary
    assert len(_memory_viz.trace_plot(snapshot)) > 10_000
    if not expandable:  # its trace listing knows no mapped segments
        assert "alloc" in _memory_viz.trace(snapshot)


def test_a_written_snapshot_reads_back_to_the_same_figures(
    timeline: Timeline, tmp_path: Path
) -> None:
    file = tmp_path / "step.pickle"
    write_snapshot(timeline, file)
    recorded = read_snapshot(file)
    books = replay(timeline)
    assert recorded.timeline.peak().nbytes == timeline.peak().nbytes
    assert recorded.timeline.breakdown(recorded.timeline.peak()) == timeline.breakdown(
        timeline.peak()
    )
    assert recorded.peak_reserved == books.peak_reserved
    again = replay(recorded.timeline)
    assert (again.peak_allocated, again.peak_reserved) == (
        books.peak_allocated,
        books.peak_reserved,
    )


def test_blocks_fill_their_segments_and_do_not_overlap(timeline: Timeline) -> None:
    for segment in snapshot_of(timeline)["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]


def test_nothing_is_written_over_without_force(timeline: Timeline, tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    file.write_bytes(b"precious")
    with pytest.raises(InputError, match="--force"):
        write_snapshot(timeline, file)
    assert file.read_bytes() == b"precious"
    write_snapshot(timeline, file, force=True)
    assert read_snapshot(file).num_events > 0
    assert os.listdir(tmp_path) == ["step.pickle"]


def trace_entry(
    action: str, address: int, size: int, frames: list[dict[str, object]]
) -> dict[str, object]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1,
        "frames": frames,
    }


def recorded_bytes(
    trace: list[dict[str, object]], blocks: list[dict[str, object]], *, protocol: int = 4
) -> bytes:
    total = sum(int(b["size"]) for b in blocks)  # type: ignore[call-overload]
    segment = {
        "address": 0x100000,
        "total_size": total,
        "blocks": blocks,
        "stream": 0,
        "segment_type": "large",
    }
    return pickle.dumps(
        {"segments": [segment] if blocks else [], "device_traces": [trace]}, protocol=protocol
    )


USER = {"filename": "/home/me/train.py", "line": 7, "name": "step"}
BACKWARD = {"filename": "/env/torch/autograd/graph.py", "line": 9, "name": "_engine_run_backward"}
OPTIMIZER = {"filename": "/env/torch/optim/adamw.py", "line": 3, "name": "step"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_was_there_before_the_recording_comes_first(protocol: int) -> None:
    block = {
        "size": 4 * MIB,
        "requested_size": 4 * MIB - 100,
        "state": "active_allocated",
        "address": 0x100000,
    }
    trace = [
        trace_entry("alloc", 5, 2 * MIB, [USER]),
        trace_entry("free_completed", 9, MIB, [USER]),
        trace_entry("free_completed", 5, 2 * MIB, []),
    ]
    timeline = read_snapshot_bytes(recorded_bytes(trace, [block], protocol=protocol), "x").timeline
    assert timeline.segments[0].phase is Phase.LOAD
    assert [timeline.tensors[i].nbytes for _, i in timeline.segments[0].events] == [
        MIB,
        4 * MIB - 100,
    ]
    assert timeline.peak().nbytes == MIB + 4 * MIB + 2 * MIB
    assert timeline.end_bytes() == 4 * MIB


def test_call_stacks_give_place_role_and_phase() -> None:
    trace = [
        trace_entry("alloc", i, 512, frames)
        for i, frames in enumerate([[USER], [BACKWARD, USER], [OPTIMIZER, USER]])
    ]
    timeline = read_snapshot_bytes(recorded_bytes(trace, []), "x").timeline
    assert {t.name for t in timeline.tensors} == {"train.py:7 step"}
    assert [t.role for t in timeline.tensors] == [
        Role.UNEXPLAINED,
        Role.ACTIVATION_GRADIENTS,
        Role.OPTIMIZER,
    ]
    assert [s.phase for s in timeline.segments] == [Phase.FORWARD, Phase.BACKWARD, Phase.STEP]


def test_entries_alike_are_read_in_one_piece_and_alike() -> None:
    """Thousands of entries in the layout of the first take the fast path; every one must come out
    as pickle gives it."""
    trace = [
        trace_entry("alloc", i << 24, 1 + (i * 7919) % (1 << 33), [USER, BACKWARD][: i % 3])
        for i in range(3000)
    ]
    seen: list[tuple[object, ...]] = []

    def listen(entry: dict[str, object]) -> bool:
        if "action" not in entry:
            return False
        seen.append(
            (entry["action"], entry["addr"], entry["size"], [f["name"] for f in entry["frames"]])
        )  # type: ignore[attr-defined]
        return True

    StreamedPickle(
        recorded_bytes(trace, []), "x", listen, ("action", "addr", "size", "frames")
    ).load()
    assert seen == [
        (e["action"], e["addr"], e["size"], [f["name"] for f in e["frames"]]) for e in trace
    ]  # type: ignore[attr-defined]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 62), 1 << 62)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner.filter(lambda v: v != {}), max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(value=plain, protocol=st.integers(2, 5))
def test_plain_values_come_out_as_pickle_gives_them(value: object, protocol: int) -> None:
    assert StreamedPickle(pickle.dumps(value, protocol=protocol), "x").load() == value


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_bytes_come_out_whole(protocol: int) -> None:
    value = [b"", b"x" * 300, b"y"]
    assert StreamedPickle(pickle.dumps(value, protocol=protocol), "x").load() == value


class Touch:
    """Unpickled by ``pickle``, it would create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


def test_a_pickle_that_wants_code_run_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "harm"
    data = pickle.dumps({"segments": [Touch(str(target))], "device_traces": []})
    offset = next(at for op, _, at in pickletools.genops(data) if op.name == "STACK_GLOBAL")
    with pytest.raises(InputError, match=rf"wants code run at offset {offset}"):
        read_snapshot_bytes(data, "x")
    assert not target.exists()


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_truncated_or_damaged_pickle_is_one_clear_error(data: st.DataObject) -> None:
    whole = recorded_bytes([trace_entry("alloc", i, 512 * i, [USER]) for i in range(30)], [])
    cut = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    if data.draw(st.booleans()):
        damaged = damaged[:cut]
    else:
        damaged[cut] = data.draw(st.integers(0, 255))
    try:
        read_snapshot_bytes(bytes(damaged), "'file'")
    except InputError as error:
        assert "'file'" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "empty"),
        (pickle.dumps([1, 2]), "no memory snapshot"),
        (b"PK\x03\x04", "offset"),
        (b"{}", "offset"),
    ],
)
def test_other_files_are_named(content: bytes, match: str, tmp_path: Path) -> None:
    file = tmp_path / "x.pickle"
    file.write_bytes(content)
    with pytest.raises(InputError, match=match):
        read_snapshot(file)


NO_SIZES = ("7", 1.5, None, [7], -1, 1 << 70, True)


@pytest.mark.parametrize("size", NO_SIZES)
@pytest.mark.parametrize("place", ["event", "block", "segment", "device_free"])
def test_sizes_that_are_none_are_refused(place: str, size: object) -> None:
    """Also where a pickle itself is whole; what a device has free need not be there."""
    if place == "device_free" and size is None:
        return
    event = {"action": "oom" if place == "device_free" else "alloc", "addr": 1, "size": 512}
    block = {"state": "active_allocated", "size": size if place == "block" else 512}
    total = size if place == "segment" else 2 << 20
    content = {
        "segments": [{"address": 0, "total_size": total, "blocks": [block]}],
        "device_traces": [[event | ({place: size} if place == "device_free" else {})]],
    }
    if place == "event":
        event["size"] = size
        content["device_traces"] = [[event]]
    with pytest.raises(InputError, match=r"^s\.pickle "):
        read_snapshot_bytes(pickle.dumps(content), "s.pickle")


@pytest.mark.parametrize("segments", [7, "x", None, {"a": 1}, [7], [{"blocks": [7]}]])
def test_segments_of_another_layout_are_refused(segments: object) -> None:
    content = pickle.dumps({"segments": segments, "device_traces": []})
    with pytest.raises(InputError, match=r"is corrupt|another layout"):
        read_snapshot_bytes(content, "s.pickle")


@pytest.mark.parametrize(
    "unit", ["bytes", "B", *(f"{k}{i}B" for k in "KMGT" for i in ("i", "")), "gib"]
)
def test_a_message_is_read_in_every_unit(unit: str) -> None:
    read = read_message(f"CUDA out of memory. Tried to allocate 3.00 {unit}. 2.00 {unit} free")
    assert read.tried > (read.free or 0) > 0 and read.tried * 2 == (read.free or 0) * 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_snapshot(tmp_path / "none.pickle")


def test_fragmentation_that_expandable_segments_mend() -> None:
    """15 MiB blocks between small survivors: freed, their segments cannot serve 30 MiB requests;
    growing segments can."""
    steps: list[tuple[str, int]] = []
    for _ in range(8):
        steps += [("+", 15 * MIB), ("+", 3 * MIB)]
    steps += [("-", 2 * i) for i in range(8)]
    steps += [("+", 30 * MIB)] * 3
    rows = replays_of(small_timeline(*steps), ("", "expandable_segments:True"))
    assert rows["expandable_segments:True"].peak_reserved < rows["default"].peak_reserved


def replays_of(timeline: Timeline, settings_: tuple[str, ...]) -> dict[str, object]:
    recorded = read_snapshot_bytes(pickle.dumps(snapshot_of(timeline)), "x")
    return replays(recorded, settings_)  # type: ignore[return-value]


def test_the_chrome_trace_has_the_peak_the_phases_and_the_largest_tensor(
    timeline: Timeline, tmp_path: Path
) -> None:
    events = chrome_events(timeline)
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == timeline.peak().nbytes
    assert {e["cat"] for e in events if e.get("cat")} >= {"forward", "backward", "optimizer step"}
    largest = max(t.requested for t in timeline.tensors)
    assert (
        max(e["args"]["bytes"] for e in events if e.get("pid") == 3 and e["ph"] == "X") == largest
    )
    file = tmp_path / "step.json"
    write_chrome_trace(timeline, file)
    assert json.loads(file.read_text())["traceEvents"]
