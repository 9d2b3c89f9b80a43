"""Files of sequence lengths: `--lengths FILE`."""

from __future__ import annotations

import json
from random import Random

from fuzz_doors.door import Case, Door
from fuzz_doors.draw import TINY_ARCH, changed_bytes, often, scalar


def make(rng: Random) -> Case:
    """Numbers as text, a JSON list or JSON Lines; some of them none, some files damaged."""
    high = rng.choice((8, 64, 64, 2048, 1 << 41))
    values = [rng.randrange(1, high) for _ in range(rng.choice((0, 1, 2, 5, 30, 300)))]
    found = [scalar(rng) if rng.random() < 0.002 else value for value in values]
    kind = rng.randrange(4)
    if kind == 0:
        text = rng.choice((" ", "\n", ",", ", ")).join(map(str, found))
    elif kind == 1:
        text = json.dumps(found)
    else:
        text = "\n".join(json.dumps({"length": value}) for value in found)
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        content = changed_bytes(rng, content)
    argv = [*TINY_ARCH, "--lengths", "@lengths.txt", "--bs", rng.choice(("1", "2", "4"))]
    argv += [*often(rng, 0.3, "--packing"), *often(rng, 0.1, "--gpu", "4090"), "--json"]
    return Case(tuple(argv), (("lengths.txt", content),))


DOOR = Door("lengths", make)
