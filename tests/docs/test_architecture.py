"""docs/ARCHITECTURE.md shows the rooms as they are, and a configuration's walk through them stays short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "estimator").is_dir()
)
sys.path.insert(0, str(ROOT / "docs"))

import generate_architecture as drawn  # noqa: E402
import import_graph as graph  # noqa: E402

PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
# advice has a file of its own; findings ask the stack; a checkpoint says its type
MOST_MOVES, MOST_CLIMBS = 45, 18


def test_the_picture_is_what_the_script_draws() -> None:
    advice = "run python docs/generate_architecture.py"
    assert drawn.PICTURE.read_text(encoding="utf-8") == drawn.picture(), advice


def test_the_page_names_every_room_in_order() -> None:
    places = [PAGE.find(f"\n| `{room}/` |") for room in graph.ROOMS]
    assert -1 not in places and places == sorted(places)


def test_every_room_says_what_it_is_for() -> None:
    assert all(len(drawn.purpose(room).split()) >= 5 for room in graph.ROOMS)


def test_a_configuration_walks_a_short_way() -> None:
    """In a process of its own: what was priced before would hide modules."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_architecture.py"), "--walk"],
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()[-1].split()
    assert int(words[2]) <= MOST_MOVES and int(words[4]) <= MOST_CLIMBS, done.stdout
