"""Where in a run a point lies, in words: its phase, module, micro-batch and operation."""

from __future__ import annotations

from napkinmath.ir.ledger import Phase
from napkinmath.ir.step import END_OF_STEP
from napkinmath.report.words import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.timeline import Point, Timeline, TimelineSegment


PHASE_WORDS = {Phase.CLIP: "clipping", Phase.STEP: "step"}


def phase_word(phase: Phase) -> str:
    """A phase in one short word."""
    return PHASE_WORDS.get(phase, phase.value)


def moment(timeline: Timeline, point: Point) -> str:
    """'backward of model.layers.31': where in the run a point lies."""
    segment = timeline.segments[point.segment]
    name = printable(_copy_name(segment, point.repetition))
    if segment.phase.value not in name:
        name = f"{phase_word(segment.phase)} of {name}"
    return name + _micro_batch(timeline, point)


def _micro_batch(timeline: Timeline, point: Point) -> str:
    """' of micro-batch 2' where a model that is not trained runs in each of several."""
    if ": " not in timeline.segments[point.segment].name:
        return ""
    start = max(first for first in (0, *timeline.step_starts) if first <= point.segment)
    after = next((i for i in timeline.step_starts if i > point.segment), len(timeline.segments))
    ends = [i for i in range(start, after) if timeline.segments[i].name == END_OF_STEP]
    if len(ends) < 2 or point.segment > ends[-1]:
        return ""
    return f" of micro-batch {sum(end < point.segment for end in ends) + 1}"


def _copy_name(segment: TimelineSegment, repetition: int) -> str:
    """'model.layers.1..31' in its first repetition -> 'model.layers.1', backward 'model.layers.31';
    'CausalLmHead' -> 'causal lm head'."""
    stem, _, numbers = segment.name.rpartition(".")
    if ".." in segment.name:
        stem, _, last = segment.name.partition("..")
        stem, _, first = stem.rpartition(".")
        if first.isdecimal() and last.isdecimal():
            number = (
                int(last) - repetition
                if segment.phase is Phase.BACKWARD
                else int(first) + repetition
            )
            return f"{stem}.{number}"
    return (
        segment.name
        if stem or not numbers[:1].isupper()
        else "".join(" " + c.lower() if c.isupper() else c for c in numbers).strip()
    )


def operation(timeline: Timeline, point: Point) -> str:
    """The operation during which a point is reached: the next one that runs, else the last; empty
    where none is known."""
    segment = timeline.segments[point.segment]
    later = [index for action, index in segment.events[point.event + 1 :] if action == "!"]
    earlier = [index for action, index in segment.events[: point.event + 1] if action == "!"]
    index = later[0] if later else earlier[-1] if earlier else None
    return printable(segment.kernels[index].name) if index is not None else ""
