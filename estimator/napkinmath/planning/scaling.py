"""scaling_curve: the throughput of the same step on more and more GPUs, its model-parallel groups
as they are."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.estimate import estimate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napkinmath.answers.throughput import Throughput
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec


def scaling_curve(
    model: str | Mapping[str, object] | ModelSpec,
    config: TrainConfig,
    cluster: Cluster,
    gpus: Sequence[int],
    *,
    global_batch: int = 0,
) -> list[Throughput]:
    """Throughput on each number of GPUs: more replicas, nodes as in `cluster`.

    The batch grows with the replicas (weak scaling), unless `global_batch` sequences are shared by
    them in fewer micro-steps each. Raises InputError where a number cannot be had in whole replicas
    and nodes, or where the GPU has no known speed.
    """
    return [_on(model, config, cluster, count, global_batch) for count in gpus]


def _on(
    model: str | Mapping[str, object] | ModelSpec,
    config: TrainConfig,
    cluster: Cluster,
    count: int,
    global_batch: int,
) -> Throughput:
    parallel = config.parallel
    inner = (
        parallel.tensor_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.context_parallel_size
    )
    per_node = min(cluster.gpus_per_node, count)
    if count < 1 or count % inner or count % per_node:
        raise InputError(
            f"{count} GPUs are not whole replicas of {inner} on whole nodes of {per_node}; use a"
            " multiple of both"
        )
    replicas = count // inner
    steps = config.gradient_accumulation_steps
    if global_batch:
        micro = config.micro_batch_size
        if not isinstance(micro, int) or global_batch % (micro * replicas):
            raise InputError(
                f"a global batch of {global_batch} is not shared evenly by {replicas} replicas;"
                " make it a multiple of both"
            )
        steps = global_batch // (micro * replicas)
    found = estimate(
        model,
        config.replace(
            parallel=parallel.replace(data_parallel_size=replicas),
            gradient_accumulation_steps=steps,
        ),
        hardware=cluster.replace(gpus_per_node=per_node, num_nodes=count // per_node),
    ).throughput
    if found is None:
        raise InputError(
            f"{cluster.hardware.gpu.name} has no known speed; name a GPU of the catalog"
        )
    return found
