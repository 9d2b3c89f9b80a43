"""Random words, trees and bytes, and small changes to valid ones."""

from __future__ import annotations

import json
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 64, 100, 128, 512, 1024, 4096, 65536, -1, -8, 1 << 20, 1 << 31)
ODD_NUMBERS = (
    1 << 40,
    1 << 60,
    1 << 63,
    10**30,
    0.5,
    1.5,
    -0.0,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
)
TEXTS = ("", " ", "0", "1", "-1", "true", "null", "auto", "none", "nan", "bf16", "x" * 300)
UNUSUAL = ("\x00", "\n", "模型", "\udcff", "é", "🦙", "%s", "{}", "'", '"', "\\", "..", "--")
TINY_ARCH = ("--arch", "L2 h64 a4 kv2 f128 v256", "--ctx", "64")
MODELS = ("gpt2", "tinyllama-1.1b", "llama-7b", "qwen3-0.6b", "mixtral-8x7b", "t5-small")
GPUS = ("4090", "H100", "A100-80", "T4", "MI300X", "RTX 3090", "B200", "L4", "V100", "GB200")


def scalar(rng: Random) -> Any:
    """A number, a text or a constant."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(NUMBERS)
    if kind < 0.6:
        return rng.choice(ODD_NUMBERS)
    return text(rng) if kind < 0.8 else rng.choice((None, True, False, [], {}))


def text(rng: Random) -> str:
    """A short text."""
    if rng.random() < 0.5:
        return rng.choice(TEXTS)
    return "".join(rng.choice((chr(rng.randrange(32, 127)), rng.choice(UNUSUAL))) for _ in range(4))


def tree(rng: Random, depth: int = 3) -> Any:
    """A scalar, a list or an object."""
    if depth == 0 or rng.random() < 0.6:
        return scalar(rng)
    inner = [tree(rng, depth - 1) for _ in range(rng.randrange(4))]
    return inner if rng.random() < 0.5 else {text(rng): item for item in inner}


def changed_number(rng: Random, value: float) -> Any:
    """A number near to one, a multiple of it, or another form of it."""
    near = (value + 1, value - 1, -value, value * 2, value / 2, value * 1000, float(value))
    return rng.choice((*near, str(value), [value], [value, value], value // 3 if value else 0))


def changed_tree(rng: Random, value: Any) -> Any:
    """The same with one place changed: a value replaced, a key removed, doubled or added."""
    if isinstance(value, dict) and value and rng.random() < 0.93:
        key, found = rng.choice(list(value)), dict(value)
        action = rng.random()
        if action < 0.12:
            del found[key]
        elif action < 0.2:
            found[text(rng)] = found[key]
        elif action < 0.26:
            found[key] = found[rng.choice(list(value))]
        else:
            found[key] = changed_tree(rng, found[key])
        return found
    if isinstance(value, list) and value and rng.random() < 0.8:
        at, found = rng.randrange(len(value)), list(value)
        if rng.random() < 0.2:
            del found[at]
        else:
            found[at] = changed_tree(rng, found[at])
        return found
    if isinstance(value, bool) and rng.random() < 0.6:
        return not value
    if isinstance(value, (int, float)) and rng.random() < 0.6:
        return changed_number(rng, value)
    return tree(rng) if rng.random() < 0.5 else scalar(rng)


def changed_text(rng: Random, value: str) -> str:
    """The same with a few characters removed, doubled, exchanged or added."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(value) + 1)
        width = rng.choice((1, 1, 1, 4, 20))
        piece = rng.choice((text(rng), str(scalar(rng)), value[at : at + width] * 2, ""))
        value = value[:at] + piece + value[at + width * rng.randrange(2) :]
    return value


def changed_bytes(rng: Random, value: bytes) -> bytes:
    """The same with bytes flipped, cut off, removed or repeated."""
    found = bytearray(value)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not found:
            break
        at, action = rng.randrange(len(found)), rng.random()
        if action < 0.6:
            found[at] = rng.randrange(256)
        elif action < 0.7:
            del found[at:]
        elif action < 0.85:
            del found[at : at + rng.choice((1, 2, 8))]
        else:
            found[at:at] = found[at : at + rng.choice((1, 8, 40))]
    return bytes(found)


def as_json(rng: Random, value: Any) -> bytes:
    """A tree as a JSON file, seldom a damaged one."""
    written = json.dumps(value, indent=rng.choice((None, 1))).encode("utf-8", "surrogatepass")
    return changed_bytes(rng, written) if rng.random() < 0.04 else written


def often(rng: Random, share: float, *words: str) -> tuple[str, ...]:
    """Words, in this share of draws."""
    return words if rng.random() < share else ()


def argument(rng: Random, *known: str) -> str:
    """A value for a flag: mostly one it knows, else a changed one, a number or anything."""
    kind = rng.random()
    if known and kind < 0.86:
        return rng.choice(known)
    if known and kind < 0.91:
        return changed_text(rng, rng.choice(known)).replace("\x00", "")
    return str(rng.choice(NUMBERS)) if kind < 0.96 else text(rng)
