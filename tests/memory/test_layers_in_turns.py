"""Layers that take turns: what is lowered, numbered and priced grows with their kinds, not with how
often they come."""

from __future__ import annotations

from collections.abc import Iterable

import napkinmath.memory.replay as replays
import pytest
from napkinmath.catalog.models import find_row
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import estimate
from napkinmath.ir.timeline import Timeline, TimelineSegment
from napkinmath.memory.books import Books
from napkinmath.memory.replay import replay


def gemma(layers: int) -> Timeline:
    """Gemma 3: five sliding layers, then one that attends to all."""
    row = find_row("gemma-3-270m")
    assert row is not None
    config = {**row["config"], "num_hidden_layers": layers}
    return estimate(config, TrainConfig(sequence_length=64)).timeline


def test_runs_of_one_block_share_their_events() -> None:
    def lists(layers: int) -> tuple[int, int]:
        segments = [segment for _, segment in gemma(layers).segments.counted()]
        return len(segments), len({id(segment.events) for segment in segments})

    (few, own), (many, same) = lists(18), lists(54)
    assert many > 2 * few and same == own < few


def test_the_books_do_not_tell_shared_lists_from_copies() -> None:
    timeline = gemma(18)
    found = replay(timeline)
    for _, segment in timeline.segments.counted():
        segment.events = list(segment.events)
    assert replay(timeline) == found


def test_very_many_layers_in_turns_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows, of which few are played; the books are those of all of them, to within 1%."""
    timeline, played = gemma(486), 0
    plain, play = replay(timeline), Books.play

    def counting(books: Books, row: Iterable[TimelineSegment]) -> None:
        nonlocal played
        played += 1
        play(books, row)

    monkeypatch.setattr(Books, "play", counting)
    monkeypatch.setattr(replays, "SPELLED", 100)
    followed = replay(timeline)
    assert played < 1_500  # 2,144 one by one
    for name in ("peak_allocated", "peak_reserved", "end_allocated"):
        assert getattr(followed, name) == pytest.approx(getattr(plain, name), rel=0.01), name
