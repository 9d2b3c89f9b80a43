"""Flat partitions: DeepSpeed lays all parameters out in one row and cuts it into equal parts."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.base.expr import Size
from napkinmath.ir.ledger import Role, Tensor, Weight
from napkinmath.ir.step import Run
from napkinmath.lowering.data_parallel.holders import own_elements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig


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
        "DeepSpeed runtime/zero",
        host=host,
    )


def trained_weights(run: Run) -> list[Weight]:
    """The weights of a run that get a gradient, tied ones once."""
    return [w for w in run.block.weights if w.trainable and not w.tied_to and not w.buffer]


def master_of(run: Run, parallel: ParallelConfig, *, host: bool = False) -> Weight | None:
    """The fp32 part that the optimizer updates, as a parameter of its own."""
    trained = trained_weights(run)
    if not trained:
        return None
    tensor = partition("fp32 partition", trained, parallel, FP32, Role.MASTER, run, host=host)
    return Weight(f"{run.block.name}.fp32", tensor.axes, tensor, trainable=True, kind="partition")
