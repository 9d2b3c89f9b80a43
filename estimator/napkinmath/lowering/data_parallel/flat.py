"""Flat partitions: DeepSpeed lays all parameters out in one row and cuts it into equal parts."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType, find_dtype
from napkinmath.base.expr import Size
from napkinmath.ir.ledger import ALLOC, Phase, Role, Tensor, Weight
from napkinmath.ir.step import Run, Segment, segments
from napkinmath.lowering.data_parallel.holders import is_spread, own_elements
from napkinmath.lowering.data_parallel.stored import shadow
from napkinmath.lowering.gradient_buffers import PARTITION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.ledger import Event


SOURCE = "DeepSpeed runtime/zero"


def elements_of(weights: list[Weight]) -> Size:
    """Elements of several weights together."""
    total: Size = 0
    for weight in weights:
        total = total + weight.elements
    return total


def partition(
    name: str,
    weights: list[Weight],
    parallel: ParallelConfig,
    dtype: DType,
    role: Role,
    run: Run,
    *,
    host: bool = False,
) -> Tensor:
    """A rank's part of a row of weights, as long as every other's."""
    return Tensor(
        name,
        (own_elements(weights, parallel),),
        dtype,
        role,
        run.block.name,
        SOURCE,
        host=host,
    )


def master_of(run: Run, parallel: ParallelConfig, *, host: bool = False) -> Weight | None:
    """The part that the optimizer updates, as a parameter of its own: in fp32, unless the engine is
    given another type."""
    trained = run.trained
    if not trained:
        return None
    name, dtype = masters_name(parallel), master_dtype(parallel)
    tensor = partition(name, trained, parallel, dtype, Role.MASTER, run, host=host)
    return Weight(f"{run.block.name}.{dtype}", tensor.axes, tensor, trainable=True, kind=PARTITION)


def master_dtype(parallel: ParallelConfig) -> DType:
    """Of masters and of the gradients that their update reads (DeepSpeed runtime/base_optimizer.py
    _configure_master_weights)."""
    return find_dtype(parallel.zero.master_dtype)


def masters_name(parallel: ParallelConfig) -> str:
    """What a rank's part of the masters is called."""
    dtype = master_dtype(parallel)
    return "fp32 partition" if dtype is FP32 else f"{dtype} masters"


def parts_in_place(runs: list[Run], parallel: ParallelConfig) -> list[Run]:
    """Each run with the rank's part of its parameters, as they are stored, for its weight: what an
    optimizer updates that keeps masters of its own. Spread experts are a part of their own."""
    found: list[Run] = []
    for run in runs:
        parts: list[Weight] = []
        for spread, name in ((False, "part"), (True, "experts.part")):
            own = [w for w in run.trained if is_spread(w.path, parallel) == spread]
            if own:
                dtype, path = own[0].tensor.dtype, f"{run.block.name}.{name}"
                tensor = partition("partition", own, parallel, dtype, Role.WEIGHTS, run)
                parts.append(Weight(path, tensor.axes, tensor, trainable=True, kind=PARTITION))
        found.append(shadow(run, parts, []))
    return found


def own_partitions(runs: list[Run], parallel: ParallelConfig, *, host: bool = False) -> list[Run]:
    """Each run with the rank's fp32 part for its weight; without any where nothing is trained."""
    masters = [master_of(run, parallel, host=host) for run in runs]
    return [
        shadow(run, [] if master is None else [master], [])
        for run, master in zip(runs, masters, strict=True)
    ]


class FlatRow:
    """The parameters of some runs in one row: `part` is the rank's fp32 part of it, as a run of its
    own."""

    __slots__ = ("part", "runs")

    def __init__(self, runs: list[Run], parallel: ParallelConfig, *, host: bool = False) -> None:
        self.runs = runs
        size: Size = 0
        for run in runs:
            size = size + run.count * own_elements(run.trained, parallel)
        of = runs[0] if len(runs) == 1 else Run(runs[0].block, 1, runs[0].stage, runs[0].first)
        axes = (size if len(runs) > 1 else own_elements(of.trained, parallel),)
        name, dtype = masters_name(parallel), master_dtype(parallel)
        tensor = Tensor(name, axes, dtype, Role.MASTER, "", SOURCE, host=host)
        weight = Weight(name, axes, tensor, trainable=True, kind=PARTITION)
        self.part = shadow(of, [weight], [])
        self.part.label = of.name if len(runs) == 1 else "all parameters"

    def beside(self, name: str, dtype: DType) -> Tensor:
        """Another tensor as long as the rank's part."""
        weight = self.part.trained[0]
        return Tensor(name, weight.axes, dtype, Role.GRADIENTS, weight.path, SOURCE)


def rows_of(runs: list[Run], parallel: ParallelConfig, *, host: bool = False) -> list[FlatRow]:
    """One row of all that is trained, as DeepSpeed flattens a parameter group; one a run where their
    sizes hang on symbols of their own."""
    trained = [run for run in runs if run.trained]
    sizes = [own_elements(run.trained, parallel) for run in trained]
    together = all(
        isinstance(size, int) or not run.stage.symbols
        for run, size in zip(trained, sizes, strict=True)
    )
    groups = [trained] if together and trained else [[run] for run in trained]
    return [FlatRow(group, parallel, host=host) for group in groups]


def partitions_loaded(owned: list[Run]) -> list[Segment]:
    """The fp32 parts, made as the engine is."""

    def made(run: Run) -> list[Event]:
        return [(ALLOC, w.tensor) for w in run.block.weights]

    return segments("fp32 partition", Phase.LOAD, owned, made)
