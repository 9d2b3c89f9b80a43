"""The ruler under a step's curve: which phase runs where, and for how long in all."""

from __future__ import annotations

from napkinmath.base.units import format_seconds
from napkinmath.ir.ledger import Phase
from napkinmath.report import moments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.report.curve import Envelope, Span


def ruler(drawn: Envelope, columns: int, seconds: dict[Phase, float]) -> tuple[str, list[str]]:
    """(phases under the columns they take, those with seconds that have no room). Phases that
    alternate too fast for words of their own share theirs."""
    took = {phase: f" {format_seconds(spent)}" for phase, spent in seconds.items()}
    under, left, named = [" "] * columns, dict[Phase, str](), set[Phase]()

    def write(spans: list[Span]) -> bool:
        start, end = (int(x / drawn.extent * columns) for x in (spans[0].start, spans[-1].end))
        phases = list(dict.fromkeys(span.phase for span in spans))
        words_of = [f"{moments.phase_word(phase)}{took.get(phase, '')}" for phase in phases]
        text = "|" + " and ".join(words_of) + (" in turn" if len(phases) > 1 else "")
        if len(text) < end - start:
            under[start:end] = text.ljust(end - start)
            named.update(phases)
            return True
        left.update((p, said) for p, said in zip(phases, words_of, strict=True) if p in took)
        return False

    for spans in in_turn(drawn.spans):
        shown = {span.phase for span in spans if write([span])}
        if len(shown) < len({span.phase for span in spans}):
            write(spans)
    return "".join(under).rstrip(), [text for phase, text in left.items() if phase not in named]


def in_turn(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of a step, with those that alternate together: a pipeline's forwards and backwards
    of many micro-batches."""
    found: list[list[Span]] = []
    at = 0
    while at < len(spans):
        end = at + 1
        cycle = {spans[at].phase}
        while end < len(spans) and (
            spans[end].phase in cycle or any(s.phase is spans[end].phase for s in spans[end + 1 :])
        ):
            cycle.add(spans[end].phase)
            end += 1
        recurs = len({span.phase for span in spans[at:end]}) < end - at
        found += [list(spans[at:end])] if recurs else [[span] for span in spans[at:end]]
        at = end
    return found
