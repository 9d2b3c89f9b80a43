"""Counts of a door's inputs by outcome, its slowest and its largest; plain data, to be merged."""

from __future__ import annotations

from typing import Any

from fuzz_doors.trial import Trial

ANSWERED, REFUSED, DEFECT = "answered", "refused", "defect"
OUTCOMES = (ANSWERED, REFUSED, DEFECT)


def empty() -> dict[str, Any]:
    """Nothing tried."""
    return {
        **dict.fromkeys(OUTCOMES, 0),
        "slowest_processor_seconds": 0.0,
        "slowest_input": None,
        "peak_resident_bytes": 0,
        "defects": {},
    }


def count(tally: dict[str, Any], trial: Trial, number: int) -> None:
    """Adds the trial of a numbered input."""
    tally[DEFECT if trial.defect else REFUSED if trial.refused else ANSWERED] += 1
    if trial.defect:
        tally["defects"][trial.defect] = tally["defects"].get(trial.defect, 0) + 1
    if trial.seconds > tally["slowest_processor_seconds"]:
        tally["slowest_processor_seconds"] = round(trial.seconds, 2)
        tally["slowest_input"] = number
    tally["peak_resident_bytes"] = max(tally["peak_resident_bytes"], trial.nbytes)


def merged(tally: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Two tallies of one door as one."""
    slower = max(tally, more, key=lambda each: each["slowest_processor_seconds"])
    defects = dict(tally["defects"])
    for name, number in more["defects"].items():
        defects[name] = defects.get(name, 0) + number
    return {
        **{name: tally[name] + more[name] for name in OUTCOMES},
        "slowest_processor_seconds": slower["slowest_processor_seconds"],
        "slowest_input": slower["slowest_input"],
        "peak_resident_bytes": max(tally["peak_resident_bytes"], more["peak_resident_bytes"]),
        "defects": defects,
    }
