"""Which ranks of a mesh communicate: how many are in each group, and how far apart they lie."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig


def group_ranks(parallel: ParallelConfig) -> dict[str, int]:
    """Ranks of each communicator that a rank is in: one an axis, the two halves of hybrid sharding
    apart."""
    whole = parallel.data_parallel_size * parallel.context_parallel_size
    tensor = parallel.expert_tensor_ranks
    data = (
        {"shard": parallel.shard_degree, "replica": parallel.replica_degree}
        if parallel.shard_degree > 1
        else {"data": whole}
    )
    return {
        **data,
        "tensor": parallel.tensor_parallel_size,
        "context": parallel.context_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "expert": parallel.expert_parallel_size,
        "expert data": parallel.experts_over(whole) if parallel.spreads_experts else 1,
        "expert tensor": tensor if tensor != parallel.tensor_parallel_size else 1,
    }


def axis_strides(parallel: ParallelConfig) -> dict[str, int]:
    """How far apart neighbours on an axis lie: tensor, context, data (shards within replicas),
    pipeline, from the inside out.

    Ranks that share a sequence share weights too, so sums and shards run over both; experts are
    spread over neighbours among them, an expert's own tensor ranks innermost.
    """
    tensor, within = parallel.tensor_parallel_size, parallel.expert_tensor_ranks
    expert, replica = within * parallel.expert_parallel_size, tensor * parallel.shard_degree
    return {
        "tensor": 1,
        "context": tensor,
        "expert tensor": 1,
        "expert": within,
        "data": tensor,
        "shard": tensor,
        "replica": replica,
        "expert data": expert,
        "expert shard": expert,
        "expert replica": max(replica, expert),
        "pipeline": tensor * parallel.context_parallel_size * parallel.data_parallel_size,
    }
