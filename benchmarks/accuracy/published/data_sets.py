"""Lengths of data sets that tables name, for batches padded to their longest sequence."""

from __future__ import annotations

import re

from published.rows import Row

# Alpaca with its prompt under Llama's tokenizer: (tokens, samples of 52,002 no longer), read off
# the plot of tloen/alpaca-lora lengths.ipynb, whose sum of all is 6.67 million tokens.
_ALPACA = (
    (46, 0),
    (60, 1500),
    (75, 8000),
    (100, 22500),
    (125, 31000),
    (150, 38500),
    (200, 46700),
    (256, 49900),
    (300, 50900),
    (400, 51700),
    (512, 51880),
    (800, 51990),
    (1304, 52002),
)
_SAMPLE = 400
_PADDED = r"pad(?:ded|s)?[- ]to[- ](?:the )?longest|dynamic padding"


def named_lengths(row: Row) -> tuple[int, ...]:
    """A sample of the lengths of the data set that a row names, where it says that batches are
    padded to their longest; else empty."""
    if not re.search(_PADDED, row.words("notes", "packed")):
        return ()
    return (
        quantiles(_ALPACA)
        if re.search(r"\balpaca\b", row.words("notes", "packed", "source"))
        else ()
    )


def counts_padding(row: Row) -> bool:
    """Whether a row's tokens are those of padded batches, as the Trainer's num_input_tokens_seen
    counts them (transformers trainer.py)."""
    return bool(re.search(_PADDED, row.words("notes", "packed")))


def quantiles(cumulated: tuple[tuple[int, int], ...], count: int = _SAMPLE) -> tuple[int, ...]:
    """Lengths at evenly spaced shares of a distribution given as (length, samples no longer)."""
    total, found, at = cumulated[-1][1], list[int](), 0
    for index in range(count):
        wanted = (index + 0.5) / count * total
        while cumulated[at + 1][1] < wanted:
            at += 1
        (low, before), (high, after) = cumulated[at], cumulated[at + 1]
        found.append(round(low + (high - low) * (wanted - before) / (after - before)))
    return tuple(found)
