"""plan_cluster: what to run on several GPUs: every valid mesh under a few combinations of knobs,
the fastest that fit verified in full."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import product

from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError
from napkinmath.base.progress import counted
from napkinmath.base.record import Record
from napkinmath.base.values import count
from napkinmath.catalog.stacks import find_stack
from napkinmath.catalog.trainer_meshes import NotRun, not_run, stacks_that_run, strategies_of
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import estimate
from napkinmath.inputs.asked import training_of
from napkinmath.planning.cluster_rows import ClusterCandidate
from napkinmath.planning.mesh_bounds import AlikeSteps, Bounds
from napkinmath.planning.meshes import MeshPrice, MeshSearch, meshes
from napkinmath.planning.space import (
    EXPERTS_PACKED,
    concerns,
    pointless,
    takes_loss,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from napkinmath.calibration.calibration import Calibration
    from napkinmath.config.cluster import Cluster
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.timing.efficiency import Efficiency

# Tried where nothing is given; what a mesh decides (parallel degrees, sharding) is not among them.
Knobs = tuple[tuple[str, tuple[object, ...]], ...]
OPEN_KNOBS: Knobs = (
    ("method", ("full", "lora", "qlora")),
    EXPERTS_PACKED,
    ("checkpointing", (None, "full")),
    ("data_parallel", ("ddp", "zero1", "zero3", "fsdp2")),
    ("bs", (1, 2, 4)),
)
_PACKED_IN_PARTS = (
    "not searched: 4-bit weights over tensor ranks, which no trainer known here has; give --tp to"
    " search it"
)
FP16 = ("fp16-amp", "fp16-autocast")  # where a GPU does not compute in bf16
# Tried beside these where nothing fits: what takes least memory, however slow.
WIDER_KNOBS: Knobs = (
    ("method", ("full", "lora", "qlora")),
    EXPERTS_PACKED,
    ("checkpointing", ("full",)),
    ("data_parallel", ("zero3", "fsdp2")),
    ("bs", (1, 4, 16)),
    ("loss", (None, "chunked")),
    ("offload", ("optimizer", "optimizer,parameters")),
)
# Of so many meshes those that leave a rank only short parts of sequences are left out: tensor ranks,
# stages and expert ranks spread the same work with whole sequences.
_USUAL_STACK = TrainConfig().stack
_MANY_MESHES, _SHORT_PART = 500, 2048
_LEAD = 0.95  # of what another search could find: below it the turn is its
_EACH = 2  # meshes of one combination that are verified
_SPARE = 2  # times as many as are wanted are kept, for some will not fit
_DEGREES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def plan_cluster(
    spec: ModelSpec,
    cluster: Cluster,
    given: Mapping[str, Sequence[object]],
    speed: Efficiency,
    *,
    top: int = 8,
    allocator: str = "",
    calibration: Calibration | None = None,
    left_out: set[str] | None = None,
) -> list[ClusterCandidate]:
    """The fastest combinations and meshes that fit, fastest first; options given stay, the rest of
    OPEN_KNOBS is tried, and of WIDER_KNOBS where nothing of it fits.

    Combinations are searched in the order of what they could reach, and left out once enough is
    known to be faster; what was not searched is added to `left_out` in words. Raises InputError
    where the options given contradict each other or the cluster in every combination.
    """
    searched = _Searched()

    def planned(knobs: Knobs) -> list[ClusterCandidate]:
        priced = _priced(spec, cluster, given, speed, knobs, top, searched)
        return _verified(spec, cluster, speed, priced, top, allocator, calibration)

    found = planned(OPEN_KNOBS) or planned(WIDER_KNOBS)
    if left_out is not None:
        left_out |= searched.in_words()
    return found


class _Searched:
    """What a search left out."""

    __slots__ = ("left_out", "not_run")

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self.not_run: dict[str, set[str]] = {}

    def in_words(self) -> set[str]:
        """A sentence for each kind; what a trainer does not run in one."""
        return self.left_out | {
            f"not searched: {', '.join(sorted(what))}, which {trainer} does not run; give them, or"
            " another trainer by --stack, to search them"
            for trainer, what in self.not_run.items()
        }


def _priced(
    spec: ModelSpec,
    cluster: Cluster,
    given: Mapping[str, Sequence[object]],
    speed: Efficiency,
    open_knobs: Knobs,
    top: int,
    searched: _Searched,
) -> list[tuple[MeshPrice, dict[str, object]]]:
    """The fastest whose requested bytes fit, over the values of some knobs, each with its
    options."""
    waiting, refused = _combinations(spec, cluster, given, speed, open_knobs, searched)
    if not waiting and refused is not None:
        raise refused
    searches = [
        (MeshSearch(combination.bounds, combination.meshes, most=_EACH), combination.options)
        for _, combination in waiting
    ]
    turns = _turns([search for search, _ in searches], [bound for bound, _ in waiting], top)
    for _ in counted(turns, "turns of the search over meshes"):
        pass
    refusals = [search.refusal for search, _ in searches]
    if refusals and None not in refusals:
        raise refused or refusals[0]  # pyright: ignore[reportGeneralTypeIssues]
    found = [(price, options) for search, options in searches for price in search.found]
    return sorted(found, key=lambda item: -item[0].tokens_per_s)


def _turns(searches: list[MeshSearch], ceilings: list[float], top: int) -> Iterator[int]:
    """Lets the search that could find most go on until another could find more, as long as one
    could find more than what is enough; yields whose turn it was."""
    waiting = [(-bound, number) for number, bound in enumerate(ceilings)]
    heapify(waiting)
    enough = _SPARE * top
    while waiting:
        bound, number = heappop(waiting)
        search = searches[number]
        known = sorted((p.tokens_per_s for s in searches for p in s.found), reverse=True)
        floor = known[enough - 1] if len(known) >= enough else 0.0
        if -bound <= floor:
            return
        search.down_to(max(floor, _LEAD * -waiting[0][0] if waiting else 0.0))
        if search.bound > floor:
            heappush(waiting, (max(bound, -search.bound), number))
        yield number


def _verified(
    spec: ModelSpec,
    cluster: Cluster,
    speed: Efficiency,
    priced: list[tuple[MeshPrice, dict[str, object]]],
    top: int,
    allocator: str,
    calibration: Calibration | None,
) -> list[ClusterCandidate]:
    """The first `top` that a whole estimate finds fitting."""
    best: list[ClusterCandidate] = []
    seen: set[TrainConfig] = set()
    for price, options in counted(priced, "meshes checked in full"):
        if price.config in seen:
            continue
        seen.add(price.config)
        e = estimate(
            spec,
            price.config,
            hardware=cluster,
            efficiency=speed,
            allocator=allocator,
            calibration=calibration,
        )
        if e.verdict is Verdict.FITS:
            # of one data-parallel rank every strategy makes the same mesh, which has none of them
            kept = [
                (k, v)
                for k, v in options.items()
                if k != "data_parallel" or not _is_alone(e.config)
            ]
            best.append(ClusterCandidate(options=tuple(kept), price=price, estimate=e))
            if len(best) == top:
                break
    return best


class _Combination(Record):
    """One value of every knob, and the meshes that it is searched over."""

    options: dict[str, object]
    config: TrainConfig
    meshes: list[TrainConfig]
    bounds: Bounds


def _combinations(
    spec: ModelSpec,
    cluster: Cluster,
    given: Mapping[str, Sequence[object]],
    speed: Efficiency,
    open_knobs: Knobs,
    searched: _Searched,
) -> tuple[list[tuple[float, _Combination]], InputError | None]:
    """(tokens/s that it cannot exceed, combination), best first, and the first refusal."""
    knobs = {
        name: tuple(given.get(name) or _tried(given, name, known))
        for name, known in open_knobs
        if name in given or concerns(spec, name)
    }
    knobs |= {name: tuple(values) for name, values in given.items() if name not in knobs}
    gpu = cluster.hardware.gpu
    if "precision" not in given and gpu.dense_flops and not gpu.supports("bf16"):
        knobs["precision"] = FP16
    found: list[tuple[float, _Combination]] = []
    refused: InputError | None = None
    every = list(product(*knobs.values()))
    steps, shared_by = AlikeSteps(), dict[str, object]()
    for values in counted(every, "combinations of settings looked at", len(every)):
        options = {
            name: value for name, value in zip(knobs, values, strict=True) if value is not None
        }
        if pointless(options, given):
            continue
        options["gpus"] = str(cluster.num_gpus)
        try:
            whole = count(options.get("global_batch", 0), "--global-batch", low=0)
            if "grad_accum" not in options:  # else their contradiction is what is to be said
                options = {key: v for key, v in options.items() if key != "global_batch"}
            config = training_of(spec, options)
            if not takes_loss(config, options, given):
                continue
            alone = _without_strategy(spec, options)
            among = [
                mesh
                for mesh in meshes(spec, cluster, config, global_batch=whole, alone=alone)
                if _keeps(mesh, config, options) and (alone is not None or not _is_alone(mesh))
            ]
            if not among:
                raise InputError(
                    f"no mesh of {cluster.num_gpus} GPUs has the degrees given; leave out --tp,"
                    " --pp, --cp, --ep or --etp"
                )
            among = _of_trainers(among, given, searched)
            among = _of_long_parts(among, options, searched)
            if (alike := {**options, "bs": None}) != shared_by:
                steps, shared_by = AlikeSteps(), alike
            bounds = Bounds(spec, cluster, speed)
            ceiling = bounds.reach(among, steps)
        except InputError as error:
            refused = refused or error
            continue
        if whole:
            options["global_batch"] = whole
        found.append(
            (ceiling, _Combination(options=options, config=config, meshes=among, bounds=bounds))
        )
    return sorted(found, key=lambda item: -item[0]), refused


def _without_strategy(spec: ModelSpec, options: dict[str, object]) -> TrainConfig | None:
    """The training of meshes with one data-parallel rank, whose rows name no strategy; None where
    it is refused."""
    try:
        return training_of(spec, {key: v for key, v in options.items() if key != "data_parallel"})
    except InputError:
        return None


def _is_alone(config: TrainConfig) -> bool:
    return config.parallel.data_parallel is DataParallel.NONE


def _keeps(mesh: TrainConfig, config: TrainConfig, options: dict[str, object]) -> bool:
    """Whether a mesh has the degrees that were given."""
    return all(
        getattr(mesh.parallel, name) == getattr(config.parallel, name)
        for flag, name in _DEGREES.items()
        if flag in options
    )


def _tried(
    given: Mapping[str, Sequence[object]], name: str, known: tuple[object, ...]
) -> tuple[object, ...]:
    """The values of a knob that are tried: of strategies those that the stacks' trainers have."""
    if name != "data_parallel":
        return known
    stacks = [find_stack(str(stack)).name for stack in given.get("stack") or (_USUAL_STACK,)]
    had = (had for stack in stacks for had in strategies_of(stack, tuple(map(str, known))))
    return tuple(dict.fromkeys(had))


def _of_trainers(
    among: list[TrainConfig], given: Mapping[str, Sequence[object]], searched: _Searched
) -> list[TrainConfig]:
    """The meshes that the stack's trainer runs, and those that were asked for; what went is
    remembered. Raises InputError where none is left.

    An axis is asked for where its degree is given, unless the trainer runs it beside another
    strategy and nobody gave one.
    """
    kept: list[TrainConfig] = []
    refused: tuple[NotRun, TrainConfig] | None = None
    for mesh in among:
        lacking = next((n for n in not_run(mesh) if not _asked(n, given)), None)
        packed = mesh.quantization is not None and mesh.parallel.tensor_parallel_size > 1
        if lacking is not None:
            refused = refused or (lacking, mesh)
            tried = lacking.beside or lacking.option == "data_parallel"  # by others of the search
            if lacking.option not in given and not tried:
                searched.not_run.setdefault(lacking.trainer, set()).add(lacking.what)
        elif packed and "tp" not in given:
            searched.left_out.add(_PACKED_IN_PARTS)
        else:
            kept.append(mesh)
    if not kept and refused is not None:
        _refuse(*refused)
    return kept or among


def _refuse(lacking: NotRun, mesh: TrainConfig) -> None:
    """Raises InputError where the trainer runs none of the meshes, the first of which lacks
    something."""
    others = stacks_that_run(mesh)
    raise InputError(
        f"{lacking.trainer} does not run {lacking.what}, and no other mesh of"
        f" {mesh.parallel.world_size} GPUs has the degrees and the batch given; use a batch with more"
        f" divisors{f', or another trainer, such as --stack {others[0]}' if others else ''}"
    )


def _asked(lacking: NotRun, given: Mapping[str, Sequence[object]]) -> bool:
    return lacking.option in given and (not lacking.beside or "data_parallel" in given)


def _of_long_parts(
    among: list[TrainConfig], options: dict[str, object], searched: _Searched
) -> list[TrainConfig]:
    """The meshes to search: of many those alone that leave ranks long parts of a sequence, unless
    the context-parallel ranks were given; what went is said in `left_out`."""
    if len(among) <= _MANY_MESHES or "cp" in options:
        return among
    kept = [mesh for mesh in among if _part(mesh) >= _SHORT_PART or _context(mesh) == 1]
    short = [_context(mesh) for mesh in among if _context(mesh) > max(map(_context, kept))]
    if short:
        searched.left_out.add(
            f"not searched: --cp {min(short)} and more, which leaves a rank fewer than"
            f" {_SHORT_PART:,} tokens of a sequence; give --cp to search it"
        )
    return kept


def _context(mesh: TrainConfig) -> int:
    return mesh.parallel.context_parallel_size


def _part(mesh: TrainConfig) -> int:
    """Tokens of a sequence that a rank has; 0 where the length is no number."""
    length = mesh.sequence_length
    return length // _context(mesh) if isinstance(length, int) else 0
