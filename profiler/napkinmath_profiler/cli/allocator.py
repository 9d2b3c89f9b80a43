"""``estimate allocator SNAPSHOT``: replay a recorded snapshot under other allocator settings and
say what would change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from napkinmath.base.errors import InputError
from napkinmath.base.units import GIB, format_bytes, parse_bytes
from napkinmath.cli.flag_rows import DEBUG, ON, REPEAT, TEXT
from napkinmath.cli.parser import Parser
from napkinmath.memory.allocator_settings import UNLIMITED, parse_settings
from napkinmath.memory.replay import Replay, replay

from napkinmath_profiler.snapshot.read_snapshot import RecordedSnapshot, read_snapshot

DEFAULT = "default"
USUAL = ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:8")
OWN = (
    (
        ("--conf",),
        REPEAT,
        "CONF",
        "settings as PYTORCH_ALLOC_CONF has them; may be repeated [the usual ones]",
    ),
    (("--vram",), TEXT, "SIZE", "capacity: does each setting go through, e.g. 24GiB"),
    (("--json",), ON, "", "JSON instead of the table"),
    DEBUG,
)
DESCRIPTION = (
    "Replay the allocations of a recorded memory_snapshot.pickle under other PYTORCH_ALLOC_CONF"
    " settings."
)


def run(argv: Sequence[str]) -> int:
    """Reads, replays, prints; exit code 1 where the first settings named (else the default) would
    not go through the capacity named."""
    parser = Parser(
        "estimate allocator",
        DESCRIPTION,
        (("replay", OWN),),
        positional=("file", "SNAPSHOT", "a memory_snapshot.pickle"),
    )
    options: dict[str, Any] = parser.parse(argv)
    if "file" not in options:
        raise InputError("no snapshot was named; write `estimate allocator memory_snapshot.pickle`")
    recorded = read_snapshot(options["file"])
    limit = parse_bytes(str(options["vram"]), what="--vram") if "vram" in options else UNLIMITED
    named: Sequence[str] = options.get("conf") or USUAL
    rows = replays(recorded, dict.fromkeys(("", *named)), limit)
    if "json" in options:
        print(json.dumps(as_mapping(recorded, rows), indent=2))
    else:
        print(table(recorded, rows))
    return 1 if rows[named[0] or DEFAULT].out_of_memory else 0


def replays(
    recorded: RecordedSnapshot, settings: Iterable[str], limit: int = UNLIMITED
) -> dict[str, Replay]:
    """Settings -> what the replay under them books and holds."""
    return {
        text or DEFAULT: replay(recorded.timeline, parse_settings(text, limit_bytes=limit))
        for text in settings
    }


def table(recorded: RecordedSnapshot, rows: Mapping[str, Replay]) -> str:
    """Peaks in GiB under each setting, against what was recorded."""
    width = max(len("as recorded"), *(len(name) for name in rows))
    peak = recorded.timeline.peak().nbytes
    head = f"{'':{width}}  {'allocated':>10} {'reserved':>10} {'slack':>8} {'segments':>9}"
    lines = [f"{recorded.num_events:,} events, {format_bytes(peak)} requested at the peak", head]
    lines.append(f"{'as recorded':{width}}  {'':>10} {recorded.peak_reserved / GIB:>10.3f}")
    for name, books in rows.items():
        slack = 1 - books.peak_allocated / books.peak_reserved if books.peak_reserved else 0.0
        figures = (
            f"{books.peak_allocated / GIB:>10.3f} {books.peak_reserved / GIB:>10.3f} {slack:>8.1%}"
            f" {books.num_segments:>9,}"
        )
        lines.append(
            f"{name:{width}}  {figures}"
            + (f"  {books.out_of_memory}" if books.out_of_memory else "")
        )
    return "\n".join([*lines, _advice(rows)])


def _advice(rows: Mapping[str, Replay]) -> str:
    """Which setting would hold least, and how much less than the default, the first row."""
    through = {name: books for name, books in rows.items() if not books.out_of_memory}
    if not through:
        return "none of these settings goes through"
    best = min(through, key=lambda name: through[name].peak_reserved)
    first = next(iter(rows))
    if rows[first].out_of_memory:
        return f"PYTORCH_ALLOC_CONF={best} would go through where the default does not"
    saved = rows[first].peak_reserved - through[best].peak_reserved
    if best == first or saved <= 0:
        return "no setting here holds less than the default"
    return f"PYTORCH_ALLOC_CONF={best} would hold {format_bytes(saved)} less than the default"


def as_mapping(recorded: RecordedSnapshot, rows: Mapping[str, Replay]) -> dict[str, Any]:
    """The table as JSON."""
    return {
        "schema": 1,
        "num_events": recorded.num_events,
        "recorded": {
            "requested_peak": recorded.timeline.peak().nbytes,
            "reserved_peak": recorded.peak_reserved,
            "settings": {k: str(v) for k, v in recorded.settings.items()},
        },
        "settings": {
            name: {
                "peak_allocated": r.peak_allocated,
                "peak_reserved": r.peak_reserved,
                "inactive_split_bytes": r.inactive_split_bytes,
                "num_segments": r.num_segments,
                "out_of_memory": r.out_of_memory or None,
            }
            for name, r in rows.items()
        },
    }
