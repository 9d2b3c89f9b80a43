"""How much wider a range is for each thing that a table does not say and that had to be assumed."""

from __future__ import annotations

from collections.abc import Iterable

# What a doubt adds (below, above), as a share of the figure. Of the first four the tables tell:
# stack is the blind mode's 90th percentile of allocated where no tool is named; sequence
# torchtune's tutorials; weights whether full training keeps fp32 beside 16 bits (2.2 times the
# bytes: QwenLM/Qwen, DeepSpeed). The others are reasoned: a wrong unit is 1.074, checkpointing
# unstated leaves a half or less.
# A source that nobody has looked into: with the name of its library taken away, each of the tables'
# sources is covered to four fifths by the doubt of the library (held_out_library.py). Six sources in
# no table, whose libraries were named, were 8 to 31% off in the median at first sight, mostly too low.
DOUBTS: dict[str, tuple[float, float]] = {
    "library": (0.3, 0.2),
    "version": (0.1, 0.2),
    "stack": (0.07, 0.07),
    "gpu": (0.03, 0.02),
    "sequence": (0.03, 0.08),
    "length": (0.4, 1.0),
    "weights": (0.05, 1.2),
    "unit": (0.07, 0.0),
    "checkpointing": (0.5, 0.05),
    "rank": (0.02, 0.02),
    "targets": (0.05, 0.05),
    "method": (0.10, 0.13),
    "model": (0.15, 0.15),
    "optimizer": (0.03, 0.03),
    "unknown optimizer": (0.25, 0.1),
    "offload": (0.3, 0.5),
    "attention": (0.05, 0.05),
}
# The same of seconds: no checkpointing, where none is stated, takes three quarters of the time of
# full; micro-batches of other sizes fill the GPU otherwise; fp32 weights are cast in every step.
# Of sources that nobody had looked into 23 were 18% off in the median on one GPU and 28% on several.
_SECONDS: dict[str, tuple[float, float]] = {
    "library": (0.15, 0.3),
    "version": (0.1, 0.2),
    "stack": (0.1, 0.1),
    "attention": (0.05, 0.05),
    "targets": (0.05, 0.05),
    "sequence": (0.03, 0.08),
    "length": (0.4, 1.0),
    "checkpointing": (0.25, 0.3),
    "micro-batch": (0.1, 0.1),
    "weights": (0.1, 0.15),
    "model": (0.1, 0.1),
    "layers": (0.1, 0.1),
    "heads": (0.1, 0.1),
    # the mean batch of eight of Alpaca's samples has 0.60 to 1.69 times the tokens of one that is
    # drawn, nine times of ten (data_sets.py)
    "first batch": (0.4, 0.69),
    # samples up to a limit that nobody counted: as of a length that is not stated
    "cap": (0.4, 1.0),
    # evaluations, logs and workers of data between steps: rasbt/LLMs-from-scratch's steps take 1.1 to
    # 2.1 times as long as priced, nanoGPT's of 2023 1.6 to 1.9
    "loop": (0.0, 0.9),
    # a clock follows its power by the exponent 0.55 (timing/attainable.py): at half of it, 1.46
    "power": (0.0, 0.46),
}


def doubt(doubts: Iterable[str]) -> tuple[float, float]:
    """(below, above) of several independent doubts: the root of the sum of squares; an unknown one
    counts nothing."""
    return _together(DOUBTS[name] for name in doubts if name in DOUBTS)


def _together(widths: Iterable[tuple[float, float]]) -> tuple[float, float]:
    known = list(widths)
    return sum(low * low for low, _ in known) ** 0.5, sum(high * high for _, high in known) ** 0.5


def doubt_of_seconds(doubts: Iterable[str]) -> tuple[float, float]:
    """(below, above) of those doubts that change how long a step takes."""
    return _together(_SECONDS[name] for name in doubts if name in _SECONDS)
