"""Megatron-LM's degrees of parallelism, and the data-parallel ranks that are left."""

from __future__ import annotations

from math import lcm

from napkinmath.base import values
from napkinmath.base.errors import InputError
from napkinmath.inputs.rows import WITHIN, give_experts, give_step, world_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_GPUS_PER_NODE, _NODES = (
    ("nproc_per_node", "nproc-per-node", "GPUS_PER_NODE", "NPROC_PER_NODE"),
    ("nnodes", "NNODES", "NUM_NODES"),
)
MACHINES = (*_GPUS_PER_NODE, *_NODES)


# Options that settle an argument whose value a script computes.
_SETTLES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "micro_batch_size": "bs",
    "global_batch_size": "global_batch",
    "seq_length": "ctx",
}


def count_of(job: ForeignJob, name: str) -> int | None:
    """A whole number of an argument; None where it is absent, or computed and given beside the
    script."""
    value, flag = job.take(name), f"--{name.replace('_', '-')}"
    if isinstance(value, str) and value.startswith("$") and name in _SETTLES:
        job.refuse(
            _SETTLES[name], f"{flag} comes from {value}, which only a run of the script knows"
        )
        return None
    return None if value is None else values.count(value, flag)


def read_mesh(job: ForeignJob, rows: int) -> int:
    """Degrees; the data-parallel ranks, which are returned, are what is left of the GPUs."""
    tensor, pipeline, context = (
        count_of(job, name) or 1
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
    )
    expert = count_of(job, "expert_model_parallel_size") or 1
    within = count_of(job, WITHIN) or tensor
    each, nodes = _first(job, _GPUS_PER_NODE), _first(job, _NODES)
    inner = tensor * pipeline * context
    least = lcm(inner, expert * within * pipeline) if expert > 1 else inner
    told = world_size(job)
    gpus = told or (each or 1) * (nodes or 1)
    if told is None and (each is None or gpus % inner):
        job.note(
            f"the number of GPUs not given, taken as {least} (as few as the degrees take); add"
            " --gpus N"
        )
        gpus = least
    job.give("gpus", gpus)
    if nodes is not None and each is not None and gpus == each * nodes:
        job.give("nodes", nodes)
    for option, degree in (("tp", tensor), ("pp", pipeline), ("cp", context)):
        job.give(option, degree if degree > 1 else None)
    data = max(1, gpus // (tensor * pipeline))
    give_experts(
        job,
        "expert_model_parallel_size",
        tensor=tensor,
        data=data,
        within=WITHIN,
        sends="allgather",
    )
    sequence = bool(job.take("sequence_parallel"))
    job.give("sequence_parallel", sequence if tensor > 1 else None)
    overlaps = bool(job.take("tp_comm_overlap"))
    if overlaps and tensor > 1 and not sequence:
        raise InputError("--tp-comm-overlap needs --sequence-parallel, as Megatron-LM does")
    job.give("tp_comm_overlap", True if overlaps and tensor > 1 else None)
    hides = bool(job.take("overlap_moe_expert_parallel_comm"))
    job.give("ep_comm_overlap", True if hides and expert > 1 else None)
    _chunks(job, pipeline)
    data = max(1, gpus // inner)
    whole = count_of(job, "global_batch_size")
    if whole is not None:
        give_step(job, whole, rows=rows, ranks=data)
        if whole % (rows * data) and "grad_accum" in job.options:
            raise InputError(
                f"--global-batch-size {whole} is not a multiple of {rows} x {data} (micro-batch x"
                f" data-parallel ranks); use {rows * data}, {2 * rows * data}, ..."
            )
    return data


def _first(job: ForeignJob, names: tuple[str, ...]) -> int | None:
    found: int | None = None
    for name in names:
        value = job.take(name)
        if found is None and value is not None and str(value).isdecimal():
            found = values.count(str(value), f"--{name.replace('_', '-')}", low=0)
    return found


def _chunks(job: ForeignJob, pipeline: int) -> None:
    """Model chunks of a rank, given as such or by the layers of one."""
    each, chunks = (
        count_of(job, "num_layers_per_virtual_pipeline_stage"),
        count_of(job, "num_virtual_stages_per_pipeline_rank"),
    )
    if each is not None:
        layers = values.count(job.content.get("num_layers"), "--num-layers")
        chunks = layers // (pipeline * each)
    if chunks and chunks > 1:
        job.give("pp_chunks", chunks)
