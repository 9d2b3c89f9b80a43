"""Memory snapshots: small ones in the layout of torch.cuda.memory._dump_snapshot, damaged."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

from fuzz_doors.door import Case, Door
from fuzz_doors.draw import changed_bytes, changed_tree, tree

_ACTIONS = ("alloc", "alloc", "alloc", "free_requested", "free_completed", "free", "oom")
_SEGMENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap", "snapshot")
_FILES = ("/torch/optim/adamw.py", "/home/me/train.py", "??", "/torch/nn/modules/linear.py")


def _frames(rng: Random) -> list[Any]:
    return [
        {"name": rng.choice(("forward", "step", "main")), "filename": name, "line": 7}
        for name in rng.sample(_FILES, rng.randrange(4))
    ]


def _event(rng: Random) -> dict[str, Any]:
    event: dict[str, Any] = {
        "action": rng.choice(_ACTIONS if rng.random() < 0.85 else _SEGMENTS),
        "addr": 512 * rng.randrange(8),
        "size": rng.choice((0, 1, 512, 1 << 20, 1 << 34)),
        "stream": 0,
        "frames": _frames(rng),
    }
    return event | ({"device_free": 1 << 30} if event["action"] == "oom" else {})


def snapshot(rng: Random) -> dict[str, Any]:
    """Some events, and segments with blocks."""
    blocks = [
        {"size": 512, "requested_size": 500, "address": 512 * i, "state": state, "frames": []}
        for i, state in enumerate(("active_allocated", "inactive"))
    ]
    segment = {"address": 0, "total_size": 2 << 20, "blocks": blocks}
    return {
        "segments": [segment] * rng.randrange(3),
        "device_traces": [[_event(rng) for _ in range(rng.choice((0, 1, 4, 30)))]],
        "allocator_settings": {"expandable_segments": False},
    }


def make(rng: Random) -> Case:
    """A snapshot with changes to its values, to its bytes, or to none."""
    content: Any = snapshot(rng)
    for _ in range(rng.choice((0, 0, 1, 2))):
        content = changed_tree(rng, content)
    if rng.random() < 0.02:
        content = tree(rng)
    written = pickle.dumps(content, protocol=rng.choice((2, 3, 4, 4, 4, 5)))
    if rng.random() < 0.4:
        written = changed_bytes(rng, written)
    return Case(("oom", "@snapshot.pickle"), (("snapshot.pickle", written),))


DOOR = Door("snapshots", make)
