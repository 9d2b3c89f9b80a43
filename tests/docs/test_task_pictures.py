"""docs/tasks.md and docs/how_it_works.md show what their script draws."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

from generate_task_pictures import IMAGES, ROOT, commands, drawn, flow

ADVICE = "run python docs/generate_task_pictures.py"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def labels(picture: str) -> list[str]:
    """Texts of a picture without their figures."""
    return [NUMBER.sub("#", text) for text in re.findall(r"<text[^>]*>([^<]+)", picture)]


def test_every_picture_of_a_task_has_its_command() -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"img/(\w+\.svg)", page)) - {"timeline.svg"}  # the README's
    assert shown == commands().keys() and len(shown) >= 5
    assert all((IMAGES / name).exists() for name in shown), ADVICE


def test_pictures_are_what_is_drawn() -> None:
    assert flow() == (IMAGES / "flow.svg").read_text(encoding="utf-8"), ADVICE
    kept = (IMAGES / "gpus.svg").read_text(encoding="utf-8")
    assert labels(kept) == labels(drawn("gpus.svg")), ADVICE
