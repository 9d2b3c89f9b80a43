"""The doors of napkinmath through which input comes, one module each."""

from __future__ import annotations

from fuzz_doors import (
    arch,
    calibrations,
    commands,
    configs,
    flags,
    jobs,
    lengths,
    links,
    oom,
    requests,
    snapshots,
)

DOORS = tuple(
    module.DOOR
    for module in (
        flags,
        arch,
        configs,
        jobs,
        links,
        requests,
        lengths,
        calibrations,
        snapshots,
        oom,
        commands,
    )
)
BY_NAME = {door.name: door for door in DOORS}
