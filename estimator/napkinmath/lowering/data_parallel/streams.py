"""Streams of engines beside the one that computes: whose pool a block is of, and what it waits for.

FSDP 1 makes unsharded flat parameters on its unshard stream and lets computation read them, casts
of shards on another before, and what it reduces on its post-backward stream, which also reads
autograd's gradients. At most two gathers are in flight (`limit_all_gathers`), so of units that have
gone one may still be computed with; without the limiter all may. ZeRO 3 fetches on a stream of its
own, two fetches ahead at most, and records the one that computes as it releases. FSDP 2 keeps
references until events have passed instead of recording streams. Sources: torch 2.13
distributed/fsdp/_runtime_utils.py _init_streams, _unshard, _post_backward_hook, _flat_param.py
_free_unsharded_flat_param, _limiter_utils.py; _fully_shard/_fsdp_collectives.py foreach_all_gather,
foreach_reduce; DeepSpeed 0.19 runtime/zero/partitioned_param_coordinator.py fetch_sub_module,
partition_parameters.py free_param.
"""

from __future__ import annotations

from napkinmath.ir.ledger import StreamUse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.ledger import Tensor

_GATHER, _REDUCE, _CAST = 1, 2, 3
_IN_FLIGHT = 1
_ALL = 10**6  # more units than any model has

GATHERED = StreamUse(_GATHER)
REDUCED = StreamUse(_REDUCE)
TO_REDUCE = StreamUse(_REDUCE, "to reduce", lag=_IN_FLIGHT)
UNREDUCED = StreamUse(0, "unreduced gradients", lag=_IN_FLIGHT)
CAST = StreamUse(_CAST, "parts to gather", lag=_IN_FLIGHT)


def lends(tensors: list[Tensor], parallel: ParallelConfig) -> None:
    """Marks a unit's gathered parameters: made by the gather's stream, read by computation."""
    lag = _IN_FLIGHT if parallel.limit_all_gathers else _ALL
    for tensor in tensors:
        last = tensor is tensors[-1]
        tensor.use = StreamUse(_GATHER, "gathered parameters", lag=lag, closes=last)
