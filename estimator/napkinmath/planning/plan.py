"""plan: what to run. Every combination of the knobs left open is priced as arrays; the best that
fit are verified by a replay.

Requested bytes are less than what the allocator needs and are exact, so a candidate that they
exclude is excluded; speed and every other goal are exact too. Candidates are therefore verified
best first, and the first that pass are those an exhaustive search would find.
"""

from __future__ import annotations

from enum import Enum
from itertools import product

from napkinmath.answers.estimate import Estimate
from napkinmath.answers.figures import Verdict
from napkinmath.answers.ranges import ALLOCATED
from napkinmath.base import values as read
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.estimate import estimate
from napkinmath.inputs.options import ADAPTER_OPTIONS, QUANT_OPTIONS, train_config
from napkinmath.planning.sweep import Sweeper, SweepResult

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from napkinmath.config.hardware import Hardware
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.planning.sweep import Sweeper
    from napkinmath.timing.efficiency import Efficiency

SAME_SPEED = (
    0.005  # speeds closer than this count as equal: fewer changes, then less memory, decide
)


class Goal(str, Enum):
    """What is best."""

    TOKENS = "tokens/s"
    CONTEXT = "context"
    BATCH = "batch"
    CHEAPEST = "cheapest"
    FEWEST_CHANGES = "fewest-changes"


class Machine(Record):
    """A GPU to run on: its speeds, and what an hour of it costs (None: not known)."""

    hardware: Hardware
    efficiency: Efficiency | None = None
    price_per_hour: float | None = None


class Space(Record):
    """What may be run: `base` holds the options that are given, `knobs` the values of each option
    left open, the first being the default.

    `batches`, `lengths` and `ranks` are tried with each combination; the first batch and the first
    rank are the defaults.
    """

    spec: ModelSpec
    machines: tuple[Machine, ...]
    base: tuple[tuple[str, object], ...]
    knobs: tuple[tuple[str, tuple[object, ...]], ...]
    batches: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = (2048,)
    ranks: tuple[int, ...] = (16,)
    allocator: str = ""


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


class _Combination:
    """One combination of knobs on one machine, with its cells priced as arrays."""

    __slots__ = ("changes", "config", "machine", "options", "requested", "speed", "sweeper")

    def __init__(
        self,
        options: dict[str, object],
        changes: tuple[str, ...],
        config: TrainConfig,
        machine: Machine,
        sweeper: Sweeper,
    ) -> None:
        self.options, self.changes, self.config, self.machine, self.sweeper = (
            options,
            changes,
            config,
            machine,
            sweeper,
        )
        self.requested: Any = None
        self.speed: Any = None


def plan(space: Space, goal: Goal = Goal.TOKENS, *, top: int = 8, clouds: bool = False) -> Plan:
    """The `top` combinations that fit, each with its best batch, length and rank. Raises InputError
    where a price or speed is missing."""
    import numpy as np

    if goal is Goal.CHEAPEST and any(machine.price_per_hour is None for machine in space.machines):
        raise InputError(
            "--goal cheapest needs the price of an hour of each GPU; add --price 2.5, or --price"
            " NAME=2.5 for each"
        )
    combinations = list(_combinations(space))
    b, s, r = np.meshgrid(space.batches, space.lengths, space.ranks, indexing="ij")
    sizes = b.ravel(), s.ravel(), r.ravel()
    keys: list[Any] = []
    for number, combination in enumerate(combinations):
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


# ---------------------------------------------------------------- what is left open

# Values that are tried for an option nobody gave; None leaves it to its default.
OPEN_KNOBS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("method", ("full", "lora", "qlora")),
    ("precision", (None, "bf16-amp", "fp16-amp", "fp16-autocast")),
    ("checkpointing", (None, "none", "full", "selective")),
    ("optimizer", (None, "adamw-8bit", "paged-adamw-8bit", "adafactor")),
    ("optimizer_in_backward", (None, True)),
    ("loss", (None, "chunked")),
    ("kernels", (None, "liger")),
)
BATCHES = (*range(1, 33), *range(36, 65, 4), *range(72, 129, 8), 160, 192, 224, 256)
LENGTHS = (
    *range(256, 8193, 256),
    *range(9216, 32769, 1024),
    *range(36864, 131073, 4096),
    *range(147456, 1048577, 16384),
)


def open_space(
    spec: ModelSpec,
    machines: Sequence[Machine],
    given: Mapping[str, Sequence[object]],
    goal: Goal,
    *,
    allocator: str = "",
) -> Space:
    """The space around options of which some are given: one value stays, several are tried, none
    leaves the knob to OPEN_KNOBS.

    For the fewest changes a value given is where to start from, and every knob may turn.
    """
    fewest = goal is Goal.FEWEST_CHANGES
    base: dict[str, object] = {}
    knobs: dict[str, tuple[object, ...]] = {}
    for name, known in OPEN_KNOBS:
        asked = tuple(given.get(name, ()))
        if fewest:
            knobs[name] = tuple(dict.fromkeys((*asked, *known)))
        elif len(asked) > 1 or not asked:
            knobs[name] = asked or known
        else:
            base[name] = asked[0]
    for name, asked in given.items():
        if name in knobs or name in base or name in ("bs", "ctx", "rank"):
            continue
        if len(asked) > 1:
            knobs[name] = tuple(asked)
        else:
            base[name] = asked[0]
    sizes = {
        name: tuple(read.count(value, f"--{name}") for value in given.get(name, ()))
        for name in ("bs", "ctx", "rank")
    }
    default_batches = BATCHES if goal is not Goal.CONTEXT else (1,)
    return Space(
        spec=spec,
        machines=tuple(machines),
        base=tuple(base.items()),
        knobs=tuple(knobs.items()),
        batches=(
            tuple(dict.fromkeys((*sizes["bs"], *BATCHES)))
            if fewest
            else sizes["bs"] or default_batches
        ),
        lengths=sizes["ctx"] or (LENGTHS if goal is Goal.CONTEXT else (2048,)),
        ranks=sizes["rank"] or (16,),
        allocator=allocator,
    )


# ---------------------------------------------------------------- pricing


def _combinations(space: Space) -> Iterator[_Combination]:
    """Every combination of knobs that does not contradict itself, on every machine; equal
    configurations once."""
    names = [name for name, _ in space.knobs]
    seen: set[tuple[str, TrainConfig]] = set()
    for machine in space.machines:
        for values in product(*(values for _, values in space.knobs)):
            options = {
                **dict(space.base),
                **{
                    name: value
                    for name, value in zip(names, values, strict=True)
                    if value is not None
                },
            }
            if pointless(options, dict(space.base)):
                continue
            if options.get("optimizer_in_backward"):
                options.setdefault("clip", False)  # no gradients are left to clip
            try:
                config = train_config(options)
            except InputError:
                continue
            key = (machine.hardware.gpu.name, config)
            if key in seen or not _runs(
                config, machine.hardware, given="precision" in dict(space.base)
            ):
                continue
            seen.add(key)
            changes = tuple(
                _flag(name, value)
                for (name, known), value in zip(space.knobs, values, strict=True)
                if value != known[0]
            )
            yield _Combination(
                options,
                changes,
                config,
                machine,
                Sweeper(space.spec, config, machine.hardware, machine.efficiency),
            )


def pointless(options: Mapping[str, object], given: Mapping[str, object]) -> bool:
    """Whether options that nobody gave make no sense together: fp32 masters of a frozen base, a
    second fused loss."""
    full = options.get("method", "full") == "full"
    if (
        not full
        and "precision" not in given
        and options.get("precision") in ("bf16-amp", "fp16-amp")
    ):
        return True
    if full and "precision" not in given and options.get("precision") == "fp16-autocast":
        return True
    if not full and "optimizer_in_backward" not in given and options.get("optimizer_in_backward"):
        return True  # adapters' gradients are too few to matter
    if (
        not full
        and "optimizer" not in given
        and options.get("optimizer") not in (None, "adamw-8bit")
    ):
        return True
    return (
        "loss" not in given
        and "kernels" not in given
        and "loss" in options
        and "kernels" in options
    )


def _runs(config: TrainConfig, hardware: Hardware, *, given: bool) -> bool:
    """Whether the GPU computes in the configuration's type: bf16 where it has it, else fp16, unless
    the precision was given."""
    if given or not hardware.gpu.dense_flops:
        return True
    return not config.precision.value.startswith(
        "fp16" if hardware.gpu.supports("bf16") else "bf16"
    )


def _flag(name: str, value: object) -> str:
    if name == "method":
        return f"--{value}"
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name.replace('_', '-')}"
    return f"--{name.replace('_', '-')} {value}"


def _price(combination: _Combination, sizes: tuple[Any, Any, Any], space: Space) -> None:
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


def _cells(combination: _Combination, sizes: tuple[Any, Any, Any]) -> Any:
    """Indices of the cells that are different for this combination: without adapters all ranks are
    one."""
    import numpy as np

    return (
        np.arange(len(sizes[0]))
        if combination.config.adapter is not None
        else np.flatnonzero(sizes[2] == sizes[2][0])
    )


def _key(
    space: Space, goal: Goal, combination: _Combination, number: int, sizes: tuple[Any, Any, Any]
) -> Any:
    """Columns to sort by, best first: three keys of the goal, requested bytes, then combination and
    cell. Cells that cannot fit are gone."""
    import numpy as np

    cells = _cells(combination, sizes)
    b, s, r = (size[cells] for size in sizes)
    config = combination.config
    # What surely fits has its allocated bytes, which are no less than the requested ones, within
    # their range's upper end.
    room = combination.machine.hardware.usable_range[0] / (1 + ALLOCATED.base)
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
    combinations: Sequence[_Combination],
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
    for number, at in rows:
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
    combination: _Combination, speed: float, found: Sequence[Candidate], goal: Goal
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
    )


def _candidate(
    space: Space, combination: _Combination, sizes: tuple[int, int, int], e: Estimate
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


def _clouds(combinations: Sequence[_Combination]) -> Iterator[Cloud]:
    for combination in combinations:
        yield Cloud(
            options=tuple(combination.options.items()),
            gpu=combination.machine.hardware.gpu.name,
            requested=tuple(combination.requested.tolist()),
            tokens_per_s=tuple(combination.speed.tolist()),
        )


# ---------------------------------------------------------------- what each change trades


class Trade(Record):
    """One change of a plan: bytes the peak would grow by without it (negative: shrink), and the
    speed the plan has of that without it."""

    flag: str
    saved_bytes: int
    speed_ratio: float | None


def trades(space: Space, best: Candidate) -> tuple[Trade, ...]:
    """What each knob that the plan turns is worth: the plan with that knob alone put back."""
    found: list[Trade] = []
    options = dict(best.options)
    defaults = {
        **{name: known[0] for name, known in space.knobs},
        "bs": space.batches[0],
        "rank": space.ranks[0],
    }
    for flag in best.changes:
        name = (
            "method"
            if flag.lstrip("-") == str(options.get("method"))
            else flag.split()[0].lstrip("-").removeprefix("no-").replace("-", "_")
        )
        back = _put_back(options, name, defaults.get(name))
        try:
            config = train_config({**back, "grad_accum": options.get("grad_accum", 1)})
            other = estimate(
                space.spec,
                config,
                hardware=best.machine.hardware,
                efficiency=best.machine.efficiency,
                allocator=space.allocator,
            )
        except InputError:
            continue
        ratio = (
            best.tokens_per_s / other.time.tokens_per_s
            if other.time is not None and best.tokens_per_s
            else None
        )
        found.append(
            Trade(
                flag=flag,
                saved_bytes=other.peak.nbytes - best.estimate.peak.nbytes,
                speed_ratio=ratio,
            )
        )
    return tuple(found)


def _put_back(options: Mapping[str, object], name: str, default: object) -> dict[str, object]:
    back = {key: value for key, value in options.items() if key != name}
    if default is not None:
        back[name] = default
    if name == "method" and default in (None, "full"):
        back = {
            key: value
            for key, value in back.items()
            if key not in (*ADAPTER_OPTIONS, "quant", *QUANT_OPTIONS)
        }
    return back
