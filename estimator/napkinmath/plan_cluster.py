"""plan_cluster: what to run on several GPUs: every valid mesh under a few combinations of knobs, the fastest that fit verified in full."""

from __future__ import annotations

from itertools import product

from napkinmath.errors import InputError
from napkinmath.estimate import Estimate, Verdict, estimate
from napkinmath.meshes import MeshPrice, fastest, meshes, price_mesh
from napkinmath.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napkinmath.cluster import Cluster
    from napkinmath.efficiency import Efficiency
    from napkinmath.model_spec import ModelSpec
    from napkinmath.train_config import TrainConfig

# Tried where nothing is given; what a mesh decides (parallel degrees, sharding) is not among them.
OPEN_KNOBS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("method", ("full", "lora", "qlora")),
    ("checkpointing", (None, "full")),
    ("data_parallel", ("ddp", "zero1", "zero3", "fsdp2")),
    ("bs", (1, 2, 4)),
)
_EACH = 2  # meshes of one combination that are verified


class ClusterCandidate(Record):
    """One combination of options under one mesh that fits every GPU of the cluster."""

    options: tuple[tuple[str, object], ...]
    price: MeshPrice
    estimate: Estimate


def plan_cluster(spec: ModelSpec, cluster: Cluster, given: Mapping[str, Sequence[object]], speed: Efficiency, *, top: int = 8) -> list[ClusterCandidate]:  # fmt: skip
    """The fastest combinations and meshes that fit, fastest first; options given stay, the rest of OPEN_KNOBS is tried."""
    from napkinmath.inputs.options import train_config

    knobs = {name: tuple(given.get(name) or known) for name, known in OPEN_KNOBS}
    knobs |= {name: tuple(values) for name, values in given.items() if name not in knobs}
    priced: list[tuple[MeshPrice, dict[str, object]]] = []
    for values in product(*knobs.values()):
        options = {name: value for name, value in zip(knobs, values, strict=True) if value is not None}
        options["gpus"] = str(cluster.num_gpus)
        try:
            config = train_config(options)
        except InputError:
            continue  # these options contradict each other
        priced += [(price, options) for price in _fastest(spec, config, cluster, speed)]
    priced.sort(key=lambda item: -item[0].tokens_per_s)
    best: list[ClusterCandidate] = []
    seen: set[TrainConfig] = set()
    for price, options in priced:
        if price.config in seen:
            continue
        seen.add(price.config)
        e = estimate(spec, price.config, hardware=cluster, efficiency=speed)
        if e.verdict is Verdict.FITS:
            best.append(ClusterCandidate(options=tuple(options.items()), price=price, estimate=e))
            if len(best) == top:
                break
    return best


def _fastest(spec: ModelSpec, config: TrainConfig, cluster: Cluster, speed: Efficiency) -> list[MeshPrice]:
    """The fastest meshes whose bytes fit; where some mesh is not priced, the fastest of those that are."""
    try:
        return fastest(spec, config, cluster, speed, most=_EACH)
    except InputError:
        pass
    found: list[MeshPrice] = []
    try:
        every = meshes(spec, cluster, config)
    except InputError:
        return []
    for mesh in every:
        try:
            found.append(price_mesh(spec, mesh, cluster, speed))
        except InputError:
            continue
    found = [price for price in found if price.peak_bytes <= cluster.hardware.memory_bytes]
    return sorted(found, key=lambda price: -price.tokens_per_s)[:_EACH]


def mesh_flags(candidate: ClusterCandidate) -> str:
    """The mesh as flags of `estimate`: '--gpus 8 --fsdp', '--gpus 8 --tp 2 --zero 3'."""
    parallel = candidate.price.parallel
    words = [f"--gpus {parallel.world_size}"]
    for flag, degree in (("tp", parallel.tensor_parallel_size), ("pp", parallel.pipeline_parallel_size), ("cp", parallel.context_parallel_size), ("ep", parallel.expert_parallel_size)):  # fmt: skip
        if degree > 1:
            words.append(f"--{flag} {degree}")
    if parallel.pipeline_parallel_size > 1:
        words.append(f"--pp-schedule {parallel.pipeline_schedule.value}")
    if parallel.data_parallel_size > 1:
        words.append(f"--data-parallel {parallel.data_parallel.value}")
    return " ".join(words)
