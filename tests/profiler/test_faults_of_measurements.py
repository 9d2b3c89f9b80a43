"""Whatever call of the file system fails while a calibration, a snapshot, a trace or the rows of a campaign are written: the old file or the new one is whole."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import campaign
import pytest
from base.faults import each_fault, ended
from campaign_parts.ledger import Rows, append_row, compressed_rows
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Stamp, TensorInfo, Timeline, TimelineSegment
from napkinmath_profiler.calibration import store
from napkinmath_profiler.snapshot.chrome_trace import write_chrome_trace
from napkinmath_profiler.snapshot.write_snapshot import write_snapshot

OLD = b"what was there before\n"
STEP = Timeline(
    [TensorInfo("t", Role.ACTIVATIONS, "m", 512, 512)],
    [TimelineSegment("all", Phase.FORWARD, 1, [("+", 0), ("-", 0)], [])],
    Stamp(origin="analytic"),
)
WRITERS: dict[str, Callable[[Path], object]] = {
    "calibration": lambda path: store.save({"napkinmath_calibration": 2}, str(path)),
    "snapshot": lambda path: write_snapshot(STEP, path, force=True),
    "chrome trace": lambda path: write_chrome_trace(STEP, path, force=True),
    "JSON of a campaign": lambda path: campaign.write_json(path, {"a": [1, 2]}),
    "log of a campaign": lambda path: campaign.run_command(
        [sys.executable, "-S", "-c", "print('done')"], 60, path
    ),
}


@pytest.mark.parametrize("what", WRITERS)
def test_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    WRITERS[what](tmp_path / "file")
    new = (tmp_path / "file").read_bytes()

    def check(folder: Path) -> None:
        assert [path.name for path in folder.iterdir()] == ["file"]
        assert (folder / "file").read_bytes() in (OLD, new)

    calls = each_fault(
        monkeypatch,
        tmp_path,
        lambda folder: (folder / "file").write_bytes(OLD) and None,
        lambda folder: ended(functools.partial(WRITERS[what], folder / "file")),
        check,
    )
    assert calls >= 3  # it opens, sends to the disk and renames


def test_rows_of_a_campaign_are_whole_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [{"case": str(number), "text": "x" * 50} for number in range(3)]

    def act(folder: Path) -> None:
        rows = Rows(folder / "steps.jsonl")
        for row in wanted:
            if row["case"] not in rows.names():
                rows.add(row)
        for row in wanted:
            append_row(folder / "events.jsonl.gz", row)

    def check(folder: Path) -> None:
        text = (folder / "steps.jsonl").read_text() if (folder / "steps.jsonl").exists() else ""
        lines = text.splitlines(keepends=True)
        assert [json.loads(line) for line in lines] == wanted[: len(lines)]
        found = list(compressed_rows(folder / "events.jsonl.gz"))
        assert found == wanted[: len(found)]
        act(folder)
        assert Rows(folder / "steps.jsonl").rows == wanted
        assert list(compressed_rows(folder / "events.jsonl.gz")) == found + wanted

    each_fault(
        monkeypatch, tmp_path, lambda _: None, lambda folder: ended(lambda: act(folder)), check
    )
