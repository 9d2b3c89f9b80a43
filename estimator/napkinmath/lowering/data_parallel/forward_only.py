"""Models that only run forward under an engine that shards parameters: what a rank stores, and the
gathers of their units."""

from __future__ import annotations

from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Work
from napkinmath.ir.step import Run, Segment
from napkinmath.lowering.data_parallel.engines import load_whole_units, owned_by_rank
from napkinmath.lowering.data_parallel.flat import own_partitions
from napkinmath.lowering.data_parallel.fsdp2 import FullyShard
from napkinmath.lowering.data_parallel.holders import collectives
from napkinmath.lowering.data_parallel.units import sum_of, units_of
from napkinmath.lowering.data_parallel.zero3 import gathering, pieces_of, prefetched_elements
from napkinmath.lowering.data_parallel.zero3_partitions import loading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy

    Around = dict[str, tuple[list[Event], list[Event]]]


def stored(runs: list[Run], policy: Policy, sizes: dict[str, int], *, stays: bool) -> list[Segment]:
    """Loading of a rank's part; `stays`: the enclosing unit is gathered for good."""
    parallel = policy.config.parallel
    if parallel.data_parallel is DataParallel.ZERO3:
        pieces, owned = pieces_of(runs, policy, sizes), own_partitions(runs, parallel)
        return loading(pieces, owned, policy)
    units = units_of(runs, policy)
    pieces = {piece.name: piece for unit in units for piece in unit.pieces}
    owned = [owned_by_rank(run, pieces.get(run.name), policy) for run in runs]
    load = load_whole_units(runs, owned, pieces, policy)
    if stays and units[-1].outer:
        for piece in units[-1].pieces:
            events: list[Event] = [(ALLOC, t) for t in piece.gathered]
            name = f"gathered {piece.name}"
            load.append(Segment(name, Phase.LOAD, events, piece.copies, piece.symbols))
    return load


def gathered(
    segments: list[Segment],
    runs: list[Run],
    policy: Policy,
    sizes: dict[str, int],
    *,
    stays: bool = False,
) -> list[Segment]:
    """A forward's segments with what gathers their units; the same where parameters are whole."""
    kind = policy.config.parallel.data_parallel
    if kind is DataParallel.ZERO3:
        prefetch = prefetched_elements(policy, sizes)
        return gathering(segments, pieces_of(runs, policy, sizes), policy, prefetch)
    if kind.is_fsdp:
        return FullyShard(runs, policy).forward_only(segments, stays=stays)
    return segments


def gathered_for_rollout(
    runs: list[Run], policy: Policy, sizes: dict[str, int], what: str, phase: Phase
) -> tuple[list[Segment], list[Segment]]:
    """(gathering, release) of all parameters while ZeRO stage 3 generates; nothing elsewhere.

    Source: trl 1.16 models/utils.py unwrap_model_for_generation (ds3_gather_for_generation).
    """
    opened: list[Segment] = []
    closed: list[Segment] = []
    if policy.config.parallel.data_parallel is DataParallel.ZERO3:
        for piece in pieces_of(runs, policy, sizes):
            run, name = piece.run, f"{what}: parameters of {piece.run.name}"
            events = piece.gather(policy, backward=False)
            opened.append(run.segment(name, phase, events))
            closed.append(run.segment(f"{name} released", phase, piece.release()))
    return opened, closed


def gathered_for_each_token(runs: list[Run], policy: Policy, tokens: Size) -> Around:
    """Events before and after a token goes through a run, by its name, where FSDP gathers a unit
    for each token; the bytes are those of all tokens."""
    found: Around = {}
    if not policy.config.parallel.data_parallel.is_fsdp:
        return found
    for unit in units_of(runs, policy):
        for piece in unit.pieces:
            if piece.output is None:
                continue
            dense, spread = piece.own_bytes()[0] if unit.is_layer else (0, 0)
            moved = (tokens * sum_of([dense]), tokens * sum_of([spread]))
            costs = collectives("all-gather", moved, piece.parallel, "shard")
            before: list[Event] = [(ALLOC, piece.output)]
            before += [(ALLOC, t) for t in piece.gathered]
            before += [(RUN, Work(None, (cost,), False)) for cost in costs]
            after: list[Event] = [(FREE, t) for t in (*piece.gathered, piece.output)]
            found[piece.name] = before, after
    return found
