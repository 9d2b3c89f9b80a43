"""Rows of a plan on several GPUs: what fits, as options and as flags of `estimate`."""

from __future__ import annotations

from napkinmath.answers.estimate import Estimate
from napkinmath.base.command_line import flags
from napkinmath.base.record import Record
from napkinmath.config.parallel_config import DataParallel
from napkinmath.planning.meshes import MeshPrice


class ClusterCandidate(Record):
    """One combination of options under one mesh that fits every GPU of the cluster."""

    options: tuple[tuple[str, object], ...]
    price: MeshPrice
    estimate: Estimate


def mesh_options(candidate: ClusterCandidate) -> dict[str, object]:
    """The mesh as options, without the GPUs it is laid over."""
    parallel = candidate.price.parallel
    degrees = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_parallel_size,
    }
    found: dict[str, object] = {name: degree for name, degree in degrees.items() if degree > 1}
    if parallel.expert_tensor_ranks != parallel.tensor_parallel_size:
        found["etp"] = parallel.expert_tensor_ranks
    if parallel.pipeline_parallel_size > 1:
        found["pp_schedule"] = parallel.pipeline_schedule.value
    # context-parallel ranks hold shards too, so one data-parallel rank may have a strategy
    if parallel.data_parallel is not DataParallel.NONE:
        found["data_parallel"] = parallel.data_parallel.value
    return found


def mesh_flags(candidate: ClusterCandidate, gpu: str) -> str:
    """The mesh as flags of `estimate`, quoted for a POSIX shell: '--gpus 8xH100 --tp 2
    --data-parallel zero3'."""
    gpus = f"{candidate.price.parallel.world_size}x{gpu}"
    return flags({"gpus": gpus, **mesh_options(candidate)})
