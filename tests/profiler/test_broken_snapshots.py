"""Snapshots broken at random, in their bytes and in their structure: each is read or refused in one
line, by every command that reads one."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from napkinmath.base.errors import InputError, NapkinError
from napkinmath_profiler.cli import allocator, oom
from napkinmath_profiler.snapshot.read_snapshot import read_snapshot, read_snapshot_bytes

NUM_CASES = int(os.environ.get("NAPKINMATH_FUZZ", "200"))
FRAME = {"filename": "/home/me/train.py", "line": 7, "name": "step"}
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 47,
    1 << 70,
    1 << 2030,
    float("nan"),
    float("inf"),
    1.5,
    "text",
    "\ud800",
    b"\xff",
    [],
    {},
    (),
    [[]],
    {"action": "alloc", "size": "big"},
)


def sound() -> dict[str, Any]:
    """A small snapshot with everything in it that the reader looks at."""
    trace: list[dict[str, Any]] = [{"action": "segment_alloc", "addr": 1 << 30, "size": 1 << 21}]
    for i in range(12):
        address = (1 << 30) + 4096 * i
        trace.append({"action": "alloc", "addr": address, "size": 4096, "frames": [FRAME]})
        trace.append({"action": "free_completed", "addr": address, "size": 4096, "frames": []})
    trace.append({"action": "oom", "device_free": 1 << 20, "size": 1 << 30, "frames": [FRAME]})
    block = {"address": 5, "size": 512, "requested_size": 500, "state": "active_allocated"}
    segment = {"address": 5, "total_size": 512, "blocks": [{**block, "frames": [FRAME]}]}
    return {
        "segments": [segment],
        "device_traces": [trace],
        "allocator_settings": {"expandable_segments": False},
    }


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) within ``value``."""
    if not isinstance(value, (dict, list)):
        return []
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [(value, key) for key, _ in items] + [p for _, inner in items for p in places(inner)]


def broken_structure(chance: random.Random) -> bytes:
    snapshot = copy.deepcopy(sound())
    for _ in range(chance.randint(1, 3)):
        owner, key = chance.choice(places(snapshot) or [(snapshot, "segments")])
        if chance.random() < 0.3:
            owner.pop(key, None) if isinstance(owner, dict) else owner.pop(key)
        else:
            owner[key] = copy.deepcopy(chance.choice(ODD_VALUES))
    return pickle.dumps(snapshot, protocol=chance.randint(2, 5))


def broken_bytes(chance: random.Random) -> bytes:
    data = bytearray(pickle.dumps(sound(), protocol=chance.randint(2, 5)))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        data[at] ^= 1 << chance.randrange(8)
    return bytes(data[: chance.randrange(len(data))] if chance.random() < 0.3 else data)


@pytest.mark.parametrize("broken", [broken_structure, broken_bytes])
def test_a_broken_snapshot_is_read_or_refused_in_one_line(broken: Any, tmp_path: Path) -> None:
    chance = random.Random(7)
    file = tmp_path / "broken.pickle"
    for case in range(NUM_CASES):
        file.write_bytes(broken(chance))
        for command in (allocator.run, oom.run):
            try:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    command([str(file)])
                out.getvalue().encode()
            except NapkinError as error:
                assert "\n" not in str(error) and "broken.pickle" in str(error), case
            except Exception as error:
                pytest.fail(f"case {case} of {broken.__name__}: {command.__module__}: {error!r}")


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b"\x80\x04" + opening * depth + closing * depth + b"."


@pytest.mark.parametrize("depth", [2_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["lists", "tuples", "key", "value"])
def test_deep_nesting_is_refused_and_not_recursed_into(kind: str, depth: int) -> None:
    tuples = b")" + b"\x85" * depth
    data = {
        "lists": nested(b"]", b"", depth).replace(b".", b"a" * (depth - 1) + b"."),
        "tuples": b"\x80\x04" + tuples + b".",
        "key": b"\x80\x04}" + tuples + b"Ns.",  # which is hashed
        "value": b"\x80\x04}X\x08\x00\x00\x00segments" + tuples + b"s.",
    }[kind]
    with pytest.raises(InputError, match=r"nested deeper|no key"):
        read_snapshot_bytes(data, "'deep'")


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), 1 << 60, "1", None, True])
@pytest.mark.parametrize("place", ["event", "block", "segment"])
def test_sizes_that_no_memory_has_are_refused(size: Any, place: str) -> None:
    snapshot = sound()
    segment = snapshot["segments"][0]
    owner, key = {
        "event": (snapshot["device_traces"][0][1], "size"),
        "block": (segment["blocks"][0], "requested_size"),
        "segment": (segment, "total_size"),
    }[place]
    owner[key] = size
    with pytest.raises(InputError, match=rf"'x'.*{key} is "):
        read_snapshot_bytes(pickle.dumps(snapshot), "'x'")


@pytest.mark.parametrize("traces", [[], [[]], [[], []]])
def test_a_snapshot_of_nothing_says_how_to_record(traces: list[Any]) -> None:
    data = pickle.dumps({"segments": [], "device_traces": traces})
    with pytest.raises(InputError, match=r"nothing was recorded.*_record_memory_history"):
        read_snapshot_bytes(data, "'x'")


def test_pipes_devices_and_folders_are_refused_unopened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.pickle"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match=r"pipe or a device"):
            read_snapshot(path)


def test_a_pipe_that_nobody_writes_is_no_message(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(InputError, match="is no CUDA out-of-memory message"):
        oom.run([str(tmp_path / "log")])


def test_blocks_shared_by_many_segments_are_not_read_again_and_again() -> None:
    blocks = [{"size": 512, "state": "active_allocated"}] * 1000
    segments = [{"address": 0, "total_size": 512, "blocks": blocks}] * 1000
    with pytest.raises(InputError, match="blocks"):
        read_snapshot_bytes(pickle.dumps({"segments": segments, "device_traces": []}), "'x'")
