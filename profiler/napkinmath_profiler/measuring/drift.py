"""Reads drift off the figures of training steps: what grows, how fast, and when the memory there is
will be spent."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from napkinmath.base.units import MIB, format_bytes

WINDOW = 8  # steps looked at: fewer would take a few uneven batches for a trend
SETTLING_STEPS = 2  # the first makes optimizer states, the second finds them
SMALLEST_GROWTH = MIB  # over a window; less is a list of logged numbers, no danger
GROWING_SHARE = 0.75  # of the steps in a window that must have grown
SMALLEST_FRAGMENT = 32 * MIB  # more than the 20 MiB segment that one request may bring
FRAGMENTED_SHARE = 0.02  # of what is reserved: growth of the cache beyond the tensors' in a window


@dataclass(slots=True)
class StepRecord:
    """One training step: tokens it saw, peaks of allocated bytes by phase, and what was there at
    its end."""

    step: int
    tokens: int = 0
    peaks: dict[str, int] = field(default_factory=dict[str, int])
    end_allocated: int = 0
    end_reserved: int = 0
    peak_reserved: int = 0
    longest: int = 0
    """Tokens of its largest micro-batch, which its peak follows; 0: it had one."""

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch."""
        return self.longest or self.tokens

    @property
    def peak(self) -> int:
        """Highest allocated bytes."""
        return max(self.peaks.values(), default=0)


@dataclass(frozen=True, slots=True)
class DriftWarning:
    """Something to know before memory runs out."""

    kind: str
    step: int
    text: str


def leak(records: Sequence[StepRecord], limit: int | None) -> DriftWarning | None:
    """What stays allocated after the step grows, step by step."""
    window = [r for r in records if r.step >= SETTLING_STEPS][-WINDOW:]
    if len(window) < WINDOW:
        return None
    ends = [record.end_allocated for record in window]
    growth = [after - before for before, after in itertools.pairwise(ends)]
    total = ends[-1] - ends[0]
    if total < SMALLEST_GROWTH or sum(g > 0 for g in growth) < GROWING_SHARE * len(growth):
        return None
    each = max(1, round(statistics.median(growth)))
    text = (
        f"what stays allocated after a step has grown by {format_bytes(total)} in {len(growth)}"
        f" steps, {format_bytes(each)} a step"
    )
    if limit:
        left = max(0, limit - max(r.peak for r in window)) // each
        text += f"; at this rate memory runs out in about {left:,} steps"
    text += (
        ". Something keeps tensors, or a graph through them: losses summed without .item(), outputs"
        " in a list"
    )
    return DriftWarning("leak", window[-1].step, text)


def fragmentation(records: Sequence[StepRecord]) -> DriftWarning | None:
    """What is reserved grows while the tensors' peak does not."""
    window = [r for r in records if r.step >= SETTLING_STEPS][-WINDOW:]
    if len(window) < WINDOW:
        return None
    highest = max(r.peak for r in records[: -len(window)])
    gaps: list[int] = []  # what is reserved beyond the most that tensors have needed so far
    for record in window:
        highest = max(highest, record.peak)
        gaps.append(record.peak_reserved - highest)
    extra = gaps[-1] - gaps[0]
    if extra < max(SMALLEST_FRAGMENT, FRAGMENTED_SHARE * window[0].peak_reserved):
        return None
    text = (
        f"the allocator holds {format_bytes(gaps[-1])} beyond the most that tensors have needed,"
        f" {format_bytes(extra)} more than {len(window) - 1} steps ago: its cache fragments. Set"
        " PYTORCH_ALLOC_CONF=expandable_segments:True, or pad batches to few lengths"
    )
    return DriftWarning("fragmentation", window[-1].step, text)


def longer_batch(
    records: Sequence[StepRecord], tokens: int, limit: int | None
) -> DriftWarning | None:
    """A batch longer than any before, named before it runs: what it will take if memory goes on as
    it went with the tokens."""
    settled = [r for r in records if r.largest and r.step >= SETTLING_STEPS]
    if len(settled) < 2:
        return None
    longest = max(settled, key=lambda r: r.largest)
    if tokens <= longest.largest:
        return None
    slope = _bytes_a_token(settled)
    expected = longest.peak + round(slope * (tokens - longest.largest))
    text = (
        f"a batch of {tokens:,} tokens, the longest so far had {longest.largest:,} and peaked at"
        f" {format_bytes(longest.peak)}; about {format_bytes(expected)} expected"
    )
    if not limit or expected <= 0.95 * limit:
        return None
    over = expected - limit
    text += (
        f", {format_bytes(over)} more than there is" if over > 0 else ", within 5% of what there is"
    )
    return DriftWarning("longer batch", records[-1].step + 1, text)


def _bytes_a_token(records: Sequence[StepRecord]) -> float:
    """Slope of the peak over tokens; from one length alone, all that is above what stays after the
    step."""
    shortest, longest = min(records, key=lambda r: r.largest), max(records, key=lambda r: r.largest)
    if longest.largest > shortest.largest:
        return max(0.0, (longest.peak - shortest.peak) / (longest.largest - shortest.largest))
    return max(0, longest.peak - longest.end_allocated) / longest.largest


def beyond_prediction(
    records: Sequence[StepRecord], predicted: int | None, tokens: int | None
) -> DriftWarning | None:
    """More is allocated than was predicted, for no longer a batch."""
    last = records[-1]
    if not predicted or last.peak <= predicted or (tokens and last.tokens > tokens):
        return None
    phase = max(last.peaks, key=lambda name: last.peaks[name])
    more = last.peak - predicted
    text = (
        f"{format_bytes(last.peak)} were allocated in the {phase}, {format_bytes(more)}"
        f" ({more / predicted:.1%}) more than the {format_bytes(predicted)} predicted"
    )
    return DriftWarning("beyond prediction", last.step, text)
