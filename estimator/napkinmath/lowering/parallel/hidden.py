"""Tensor-parallel collectives that run beside the products of their linears.

Gathers feed a product chunk by chunk and reductions take its result so, hence the first chunk
sticks out; the reduction of an input's gradient runs beside the weight's product as a whole.
Sources: Transformer Engine pytorch/module/base.py initialize_ub (layers that overlap by ring
exchange or pipelined, and in bulk); Megatron-LM core/model_parallel_config.py tp_comm_overlap_ag,
tp_comm_overlap_rs, tp_comm_bulk_wgrad. torch's compiler fuses less: a gather with the products that
read it as it is, a reduction with the one product that it sums (torch 2.13
_inductor/fx_passes/micro_pipeline_tp.py _find_consumer_matmuls, _find_producer_matmul).
"""

from __future__ import annotations

from napkinmath.ir.costs import Collective, Gemm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Op


def hide_gather(gathering: Op, linears: list[Op], degree: int) -> None:
    """The gathering of an input beside the products that read it, and the reduction of its gradient
    beside those of their weights' gradients."""
    for collective in _collectives(gathering.costs):
        collective.hide(_forward(linears), degree)
    for collective in _collectives(gathering.backward_costs):
        collective.hide(_backward(linears, of_weight=True))


def fuse_gather(gathering: Op, linears: list[Op], degree: int, *, casts: bool) -> None:
    """The same by torch's compiler: no gather that is cast before the product (`casts`); the
    reduction of the gradient only where one linear reads the input, since it sums those of several."""
    if not casts:
        for collective in _collectives(gathering.costs):
            collective.hide(_forward(linears), degree)
    for collective in _collectives(gathering.backward_costs):
        if collective.chunks:
            collective.hide((), degree, reach=0.0)
        else:
            collective.hide(_backward(linears, of_weight=False), degree)


def hide_reduction(reducing: Op, linears: list[Op], degree: int, *, casts: bool = False) -> None:
    """The reduction of a result beside its product, and the gathering of its gradient, unless it is
    cast first, beside the product that makes the input's."""
    for collective in _collectives(reducing.costs):
        collective.hide(_forward(linears), degree)
    if not casts:
        for collective in _collectives(reducing.backward_costs):
            collective.hide(_backward(linears, of_weight=False), degree)


def _collectives(costs: Sequence[Cost]) -> list[Collective]:
    return [cost for cost in costs if isinstance(cost, Collective)]


def _forward(linears: list[Op]) -> list[Gemm]:
    return [cost for op in linears for cost in op.costs if isinstance(cost, Gemm)]


def _backward(linears: list[Op], *, of_weight: bool) -> list[Gemm]:
    """Products of the backward that sum over the rows, or the others."""
    rows = [cost.m for cost in _forward(linears)]
    products = [c for op in linears for c in op.backward_costs if isinstance(c, Gemm)]
    return [cost for cost in products if (cost.k in rows) is of_weight]
