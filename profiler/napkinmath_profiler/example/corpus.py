"""Text to train on without a download: the Python manual that ships with the interpreter, and
generated arithmetic, as bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

VOCABULARY = 256
"""Tokens are bytes."""


def manual_text() -> bytes:
    """The language reference that `help()` shows, some hundred kilobytes of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def arithmetic_text(num_lines: int = 20_000, seed: int = 0) -> bytes:
    """Lines such as `Question: 17 + 25. Answer: 42.`"""
    rng = random.Random(seed)
    lines = []
    for _ in range(num_lines):
        a, b = rng.randrange(50), rng.randrange(50)
        lines.append(f"Question: {a} + {b}. Answer: {a + b}.")
    return "\n".join(lines).encode()


def batches_of(
    text: bytes, batch_size: int, sequence_length: int, *, seed: int, device: torch.device
) -> Callable[[int], torch.Tensor]:
    """A function from a step's number to its batch (batch_size, sequence_length), int64: the same
    step always sees the same text."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(0, len(tokens) - sequence_length, (batch_size,), generator=generator)
        rows = [tokens[start : start + sequence_length] for start in starts.tolist()]
        return torch.stack(rows).long().to(device)

    return batch
