"""plan: what to run. Every combination of the knobs left open is priced as arrays; the best that
fit are verified by a replay.

Requested bytes are less than what the allocator needs and are exact, so a candidate that they
exclude is excluded; speed and every other goal are exact too. Candidates are therefore verified
best first, and the first that pass are those an exhaustive search would find.
"""

from __future__ import annotations

from napkinmath.answers.estimate import Estimate
from napkinmath.answers.figures import Verdict
from napkinmath.answers.verdict import room_for
from napkinmath.base.errors import InputError
from napkinmath.base.progress import counted
from napkinmath.base.record import Record
from napkinmath.estimate import estimate
from napkinmath.planning.space import (
    SAME_SPEED,
    Combination,
    Goal,
    Machine,
    Space,
    combinations_of,
    wider,
)
from napkinmath.planning.sweep import SweepResult

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from napkinmath.config.train_config import TrainConfig


class Candidate(Record):
    """One configuration on one GPU that fits: its options, what it changes of the defaults, and its
    estimate."""

    options: tuple[tuple[str, object], ...]
    changes: tuple[str, ...]
    machine: Machine
    estimate: Estimate

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second; 0 where the GPU has no known speed."""
        return self.estimate.time.tokens_per_s if self.estimate.time is not None else 0.0

    def hours(self, tokens: float) -> float:
        """Hours for so many tokens."""
        return tokens / self.tokens_per_s / 3600 if self.tokens_per_s else float("inf")

    def price(self, tokens: float) -> float | None:
        """Money for so many tokens."""
        hourly = self.machine.price_per_hour
        return None if hourly is None else self.hours(tokens) * hourly


class Cloud(Record):
    """One combination's cells that requested bytes do not exclude, for the plot: requested bytes
    and tokens/s of each batch."""

    options: tuple[tuple[str, object], ...]
    gpu: str
    requested: tuple[int, ...]
    tokens_per_s: tuple[float, ...]


class Plan(Record):
    """The best candidates, best first; how many were priced and how many verified by a replay; all
    cells for the plot."""

    goal: Goal
    best: tuple[Candidate, ...]
    num_candidates: int
    num_verified: int
    clouds: tuple[Cloud, ...]
    space: Space


def plan(space: Space, goal: Goal = Goal.TOKENS, *, top: int = 8, clouds: bool = False) -> Plan:
    """The `top` combinations that fit, each with its best batch, length and rank. Raises InputError
    where a price or speed is missing."""
    import numpy as np

    if goal is Goal.CHEAPEST and any(machine.price_per_hour is None for machine in space.machines):
        raise InputError(
            "--goal cheapest needs the price of an hour of each GPU; add --price 2.5, or --price"
            " NAME=2.5 for each"
        )
    combinations = list(combinations_of(space))
    b, s, r = np.meshgrid(space.batches, space.lengths, space.ranks, indexing="ij")
    sizes = b.ravel(), s.ravel(), r.ravel()
    keys: list[Any] = []
    for number, combination in counted(enumerate(combinations), "combinations", len(combinations)):
        _price(combination, sizes, space)
        keys.append(_key(space, goal, combination, number, sizes))
    order = np.concatenate(keys, axis=1) if keys else np.empty((6, 0))
    best, verified = _verified(
        space, combinations, sizes, order[:, np.lexsort(order[3::-1])], goal, top
    )
    num_candidates = sum(len(_cells(combination, sizes)) for combination in combinations)
    return Plan(
        goal=goal,
        best=tuple(best),
        num_candidates=num_candidates,
        num_verified=verified,
        clouds=tuple(_clouds(combinations)) if clouds else (),
        space=space,
    )


def plan_or_wider(
    space: Space, goal: Goal, *, top: int = 8, clouds: bool = False
) -> tuple[Plan, tuple[str, ...]]:
    """The plan, and where nothing of the space fits that of the wider ones in turn, with what each
    tried. Raises InputError as `plan` does."""
    found = plan(space, goal, top=top, clouds=clouds)
    notes: list[str] = []
    for note, more in wider(space):
        if found.best:
            break
        notes.append(note)
        found = plan(more, goal, top=top, clouds=clouds)
    return found, tuple(notes)


# ---------------------------------------------------------------- pricing


def _price(combination: Combination, sizes: tuple[Any, Any, Any], space: Space) -> None:
    """Requested bytes and tokens/s of every cell; what a combination cannot run at all has no
    cell."""
    import numpy as np

    try:
        b, s, r = (size[_cells(combination, sizes)] for size in sizes)
        found: SweepResult = combination.sweeper(b * combination.config.workload.sequences, s, r)
    except InputError:  # the family refuses it (no fused attention, say)
        combination.requested = np.full(len(_cells(combination, sizes)), np.iinfo(np.int64).max)
        combination.speed = np.zeros(len(combination.requested))
        return
    combination.requested = found.requested
    combination.speed = (
        np.zeros(len(found.requested)) if found.tokens_per_s is None else found.tokens_per_s
    )


def _cells(combination: Combination, sizes: tuple[Any, Any, Any]) -> Any:
    """Indices of the cells that are different for this combination: without adapters all ranks are
    one."""
    import numpy as np

    return (
        np.arange(len(sizes[0]))
        if combination.config.adapter is not None
        else np.flatnonzero(sizes[2] == sizes[2][0])
    )


def _key(
    space: Space, goal: Goal, combination: Combination, number: int, sizes: tuple[Any, Any, Any]
) -> Any:
    """Columns to sort by, best first: three keys of the goal, requested bytes, then combination and
    cell. Cells that cannot fit are gone."""
    import numpy as np

    cells = _cells(combination, sizes)
    b, s, r = (size[cells] for size in sizes)
    config = combination.config
    # What surely fits has its allocated bytes, which are no less than the requested ones, within
    # their range's upper end.
    room = room_for(combination.machine.hardware, config.parallel.world_size, sure=True)
    changes = (
        len(combination.changes)
        + (b != space.batches[0])
        + ((r != space.ranks[0]) if config.adapter is not None else 0)
    )
    slowness = -speed_step(combination.speed)
    first = {
        Goal.TOKENS: slowness,
        Goal.CONTEXT: -s,
        Goal.BATCH: -b,
        Goal.CHEAPEST: -speed_step(combination.speed / (combination.machine.price_per_hour or 1.0)),
        Goal.FEWEST_CHANGES: changes,
    }[goal]
    second, third = (
        (slowness, changes)
        if goal in (Goal.CONTEXT, Goal.BATCH, Goal.FEWEST_CHANGES)
        else (changes, slowness)
    )
    columns = np.stack(
        [
            first,
            second,
            third,
            combination.requested,
            np.full(len(cells), number),
            np.arange(len(cells)),
        ]
    ).astype(np.float64)
    return columns[:, combination.requested <= room]


def speed_step(tokens_per_s: Any) -> Any:
    """Speeds on a ladder of SAME_SPEED: equal steps count as equally fast."""
    import numpy as np

    return np.floor(np.log(np.maximum(tokens_per_s, 1e-9)) / np.log1p(SAME_SPEED))


# ---------------------------------------------------------------- verification


def _verified(
    space: Space,
    combinations: Sequence[Combination],
    sizes: tuple[Any, Any, Any],
    order: Any,
    goal: Goal,
    top: int,
) -> tuple[list[Candidate], int]:
    """The first cells of `top` combinations that pass the allocator's replay, and how many were
    replayed."""
    found: list[Candidate] = []
    done: set[int] = set()
    failed: dict[int, list[tuple[int, int, int]]] = {}
    replayed = 0
    rows: list[tuple[int, int]] = list(
        zip(order[4].astype(int).tolist(), order[5].astype(int).tolist(), strict=True)
    )
    for number, at in counted(rows, "candidates looked at"):
        cell = _cells(combinations[number], sizes)[at]
        cell_sizes = (int(sizes[0][cell]), int(sizes[1][cell]), int(sizes[2][cell]))
        worse = failed.setdefault(number, [])
        combination = combinations[number]
        if (
            number in done
            or _adds_nothing(combination, float(combination.speed[at]), found, goal)
            or any(all(x >= y for x, y in zip(cell_sizes, known, strict=True)) for known in worse)
        ):
            continue
        e = price_at(space, combination.config, combination.machine, cell_sizes)
        replayed += 1
        if e.verdict is not Verdict.FITS:
            worse.append(cell_sizes)
            continue
        done.add(number)
        found.append(_candidate(space, combination, cell_sizes, e))
        if len(found) == top:
            break
    return found, replayed


def _adds_nothing(
    combination: Combination, speed: float, found: Sequence[Candidate], goal: Goal
) -> bool:
    """Whether something better was found that changes less: the same changes without one that
    brings no speed."""
    worth = 1 + (10 * SAME_SPEED if goal in (Goal.CONTEXT, Goal.BATCH) else SAME_SPEED)
    return any(
        candidate.machine is combination.machine
        and set(candidate.changes) - {f"--bs {dict(candidate.options)['bs']}"}
        < set(combination.changes)
        and speed <= candidate.tokens_per_s * worth
        for candidate in found
    )


def price_at(
    space: Space, config: TrainConfig, machine: Machine, sizes: tuple[int, int, int]
) -> Estimate:
    """The estimate of a combination at one batch, length and rank."""
    b, s, r = sizes
    config = config.replace(micro_batch_size=b * config.workload.sequences, sequence_length=s)
    if config.adapter is not None:
        config = config.replace(adapter=config.adapter.replace(rank=r))
    return estimate(
        space.spec,
        config,
        hardware=machine.hardware,
        efficiency=machine.efficiency,
        allocator=space.allocator,
        calibration=machine.calibration,
    )


def _candidate(
    space: Space, combination: Combination, sizes: tuple[int, int, int], e: Estimate
) -> Candidate:
    b, s, r = sizes
    own: dict[str, object] = {"bs": b, "ctx": s}
    if e.config.gradient_accumulation_steps > 1:
        own["grad_accum"] = e.config.gradient_accumulation_steps
    if e.config.adapter is not None:
        own["rank"] = r
    changes = combination.changes
    changes += (f"--bs {b}",) if b != space.batches[0] else ()
    changes += (f"--rank {r}",) if "rank" in own and r != space.ranks[0] else ()
    return Candidate(
        options=tuple({**combination.options, **own}.items()),
        changes=changes,
        machine=combination.machine,
        estimate=e,
    )


def _clouds(combinations: Sequence[Combination]) -> Iterator[Cloud]:
    for combination in combinations:
        yield Cloud(
            options=tuple(combination.options.items()),
            gpu=combination.machine.hardware.gpu.name,
            requested=tuple(combination.requested.tolist()),
            tokens_per_s=tuple(combination.speed.tolist()),
        )


# ---------------------------------------------------------------- what each change trades
