"""What the page should run: options given stay, the batch and what is at its default are searched."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.asked import for_search
from napkinmath.inputs.denoisers import refuse_search
from napkinmath.inputs.hardware_options import (
    allocator_text,
    calibration_on,
    cluster_of,
    machines,
)
from napkinmath.inputs.model_options import model_spec
from napkinmath.inputs.option_table import MACHINE_KEYS, MODEL_KEYS
from napkinmath.inputs.parallel_options import gpus_and_nodes
from napkinmath.planning.space import Goal, machine_of
from napkinmath.serving.requests import NUMBERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.planning.cluster_rows import ClusterCandidate
    from napkinmath.planning.space import Machine

BATCHES = tuple(1 << power for power in range(9))  # of the page's slider
_MESH_ROWS = 4  # each is an estimate of the whole cluster
_BESIDE = ("task", "allocator", *(key for key in MACHINE_KEYS if key not in ("gpu", "gpus")))
"""What a row has beside what was searched: taking it over clears the page's other fields."""


def planned(options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as the page shows it. Raises InputError where the options contradict each other or
    name no GPU."""
    goal = values.choice(str(options.get("goal", Goal.TOKENS.value)), Goal, "goal")
    if goal is Goal.CHEAPEST:
        raise InputError("goal 'cheapest' needs prices; the command line's plan takes them")
    of_model = {name: options[name] for name in MODEL_KEYS if name in options}
    spec, notes = model_spec(of_model, []), list[str]()
    refuse_search(spec)
    of_machine = {name: options[name] for name in MACHINE_KEYS if name in options}
    found = [
        machine_of(hardware, calibration_on(hardware, of_machine, notes))
        for hardware in machines(of_machine)
        if hardware
    ]
    if not found:
        raise InputError("a plan is for a GPU; choose one")
    allocator = allocator_text(options)
    given: dict[str, Sequence[object]] = {
        name: (value,)
        for name, value in options.items()
        if name not in ("goal", "allocator", *MACHINE_KEYS, *MODEL_KEYS)
    }
    if goal is Goal.CONTEXT:
        given.pop("ctx", None)
    else:
        spec, given = for_search(spec, given, [])
    several = gpus_and_nodes(options)[0] > 1
    made = (
        _on_several(spec, found, given, options, goal, allocator)
        if several
        else _on_one(spec, found, given, goal, allocator)
    )
    beside = {name: options[name] for name in _BESIDE if name in options}
    for row in made["best"]:
        chosen = {**beside, **row["options"]}
        row["options"] = {name: _as_asked(name, value) for name, value in chosen.items()}
    return {**made, "notes": [*dict.fromkeys(notes), *made["notes"]]}


def _as_asked(name: str, value: object) -> object:
    """A number as a request gives it: a row may be the next request."""
    return int(str(value)) if name in NUMBERS else value


def _on_one(
    spec: ModelSpec,
    found: list[Machine],
    given: dict[str, Sequence[object]],
    goal: Goal,
    allocator: str,
) -> dict[str, Any]:
    from napkinmath.planning.plan import plan_or_wider
    from napkinmath.planning.space import open_space
    from napkinmath.planning.trades import trades
    from napkinmath.report.plan_json import plan_mapping

    # Powers of two, and nothing that the page has no field for.
    given["bs"] = BATCHES
    given.setdefault("optimizer_in_backward", (False,))
    space = open_space(spec, found, given, goal, allocator=allocator)
    result, tried = plan_or_wider(space, goal)
    traded = trades(result.space, result.best[0]) if result.best else ()
    return {**plan_mapping(result, traded, tokens=1e9), "notes": list(tried)}


def _on_several(
    spec: ModelSpec,
    found: list[Machine],
    given: dict[str, Sequence[object]],
    options: Mapping[str, Any],
    goal: Goal,
    allocator: str,
) -> dict[str, Any]:
    """The fastest meshes, in the shape of a plan on one GPU."""
    from napkinmath.planning.plan_cluster import plan_cluster
    from napkinmath.timing.efficiency import default_efficiency

    if goal is not Goal.TOKENS:
        raise InputError(f"goal {shown(goal.value)} is searched on one GPU; on several tokens/s is")
    if len(found) > 1:
        raise InputError(f"{len(found)} kinds of GPU make no cluster; choose one")
    gpu, speed = found[0].hardware.gpu, found[0].efficiency
    if not gpu.dense_flops:
        raise InputError("meshes are ranked by speed; choose a GPU whose speed is known")
    cluster: Any = cluster_of(found[0].hardware, options)
    given.setdefault("bs", ("1",))  # one, since each makes the search longer
    left_out = set[str]()
    best = plan_cluster(
        spec,
        cluster,
        given,
        speed or default_efficiency(gpu),
        top=_MESH_ROWS,
        allocator=allocator,
        calibration=found[0].calibration,
        left_out=left_out,
    )
    return {
        "model": spec.name,
        "goal": goal.value,
        "num_candidates": None,
        "num_verified": len(best),
        "best": [_row(candidate, gpu.name, options) for candidate in best],
        "trades": [],
        "notes": sorted(left_out),
    }


def _row(candidate: ClusterCandidate, gpu: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """One mesh as the options that give it, of the machines as they were asked for."""
    from napkinmath.base.command_line import flags
    from napkinmath.planning.cluster_rows import mesh_options
    from napkinmath.planning.grid import figures

    chosen = {**dict(candidate.options), **mesh_options(candidate)}
    chosen["gpus"] = options["gpus"]
    chosen["ctx"] = candidate.estimate.config.sequence_length
    changed = {
        name: value
        for name, value in chosen.items()
        if str(options.get(name)) != str(value) and name not in ("ctx", "bs")
    }
    return {
        "gpu": gpu,
        "options": chosen,
        "changes": [flags({name: value}) for name, value in changed.items()],
        **figures(candidate.estimate),
    }
