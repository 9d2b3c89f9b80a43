"""Which ranks hold the same weight: all data-parallel ranks, or, where experts are spread, those
with the same experts.

An expert is on one of e expert-parallel ranks, so only 1/e of the data-parallel ranks share it:
they shard it and sum its gradient among themselves. Where fewer tensor-parallel ranks share an
expert's products than share all else, more of them hold it. Sources: torchtitan
distributed/parallel_dims.py (the efsdp mesh), Megatron-LM core/parallel_state.py (expert
data-parallel group), DeepSpeed utils/groups.py (expert_data_parallel_group).
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.expr import Size, ceil_div
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import Collective
from napkinmath.ir.ledger import Phase
from napkinmath.ir.step import Run, Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.ledger import Tensor, Weight

EXPERT_AXES = {"shard": "expert shard", "replica": "expert replica", "data": "expert data"}


def is_spread(path: str, parallel: ParallelConfig) -> bool:
    """Whether a weight (or the gradient in its module) is one of experts that ranks divide among
    themselves."""
    return parallel.spreads_experts and "experts" in path.split(".")


def shard_ranks(parallel: ParallelConfig, *, spread: bool) -> int:
    """Ranks that hold one copy together."""
    degree = parallel.shard_degree
    return parallel.experts_over(degree) if spread and parallel.shards else degree


def replica_ranks(parallel: ParallelConfig, *, spread: bool) -> int:
    """Copies of what is sharded."""
    if not spread:
        return parallel.replica_degree
    holders = parallel.experts_over(parallel.data_parallel_size * parallel.context_parallel_size)
    return max(1, holders // shard_ranks(parallel, spread=True))


def data_ranks(parallel: ParallelConfig, *, spread: bool) -> int:
    """Ranks that sum a gradient where nothing is sharded; ranks that share a sequence are among
    them."""
    ranks = parallel.data_parallel_size * parallel.context_parallel_size
    return parallel.experts_over(ranks) if spread else ranks


def own_elements(weights: list[Weight], parallel: ParallelConfig) -> Size:
    """Elements of a rank's part of some weights laid out in a row."""
    total: Size = 0
    for spread in (False, True):
        row: Size = 0
        for weight in weights:
            if is_spread(weight.path, parallel) is spread:
                row = row + weight.elements
        if not (isinstance(row, int) and row == 0):
            total = total + ceil_div(row, shard_ranks(parallel, spread=spread))
    return total


def split_bytes(tensors: Iterable[Tensor], parallel: ParallelConfig) -> tuple[Size, Size]:
    """(bytes of what all ranks hold, bytes of spread experts)."""
    dense: Size = 0
    spread: Size = 0
    for tensor in tensors:
        if is_spread(tensor.module, parallel):
            spread = spread + tensor.nbytes
        else:
            dense = dense + tensor.nbytes
    return dense, spread


def collectives(
    kind: str,
    moved: tuple[Size, Size],
    parallel: ParallelConfig,
    axis: str,
    *,
    overlaps: bool = True,
) -> list[Collective]:
    """A collective over an axis: that of what all ranks hold, and that of the experts among the
    ranks that hold them."""
    ranks_of = {"shard": shard_ranks, "replica": replica_ranks, "data": data_ranks}[axis]
    found: list[Collective] = []
    for nbytes, spread in zip(moved, (False, True), strict=True):
        ranks, own = ranks_of(parallel, spread=spread), EXPERT_AXES[axis] if spread else axis
        if ranks > 1 and not (isinstance(nbytes, int) and nbytes == 0):
            found.append(Collective(kind, nbytes, ranks=ranks, axis=own, overlaps=overlaps))
    return found


def check_spread_engine(parallel: ParallelConfig) -> None:
    """Raises InputError for engines that cannot hold different experts on different data-parallel
    ranks.

    Sources: DeepSpeed runtime/engine.py _configure_zero_optimizer ("MoE not supported with Stage
    3"); FSDP1 has one flat parameter a unit.
    """
    kind = parallel.data_parallel
    if parallel.spreads_experts and kind in (
        DataParallel.ZERO3,
        DataParallel.FSDP1,
        DataParallel.DP,
    ):
        raise InputError(
            f"{kind.value} does not spread experts over ranks; use fsdp2, zero1, zero2 or ddp, or"
            " expert_parallel_size=1"
        )


def with_every_run(last: list[Segment], runs: list[Run]) -> list[Segment]:
    """The last turn of a step, begun by the runs that have no backward in it: other chunks of an
    interleaved stage are done before.

    Their gradients are summed while the last turn runs.
    """
    present = {segment.name for segment in last if segment.phase is Phase.BACKWARD}
    trained = [run for run in runs if any(w.trainable and not w.tied_to for w in run.block.weights)]
    return [
        run.segment(run.name, Phase.BACKWARD, []) for run in trained if run.name not in present
    ] + last


def part_of(nbytes: tuple[Size, Size], parallel: ParallelConfig) -> tuple[Size, Size]:
    """What a rank has of a reduced message."""
    dense, spread = nbytes
    return dense // parallel.shard_degree, spread // shard_ranks(parallel, spread=True)


__all__ = [
    "check_spread_engine",
    "collectives",
    "data_ranks",
    "is_spread",
    "own_elements",
    "part_of",
    "replica_ranks",
    "shard_ranks",
    "split_bytes",
    "with_every_run",
]


def last_apart(
    micro_steps: list[tuple[int, list[Segment]]],
) -> list[tuple[int, list[Segment]]]:
    """(times, segments) with the last micro-step by itself, for what follows it alone."""
    *earlier, (times, last) = micro_steps
    return [*earlier, *([(times - 1, last)] if times > 1 else []), (1, last)]
