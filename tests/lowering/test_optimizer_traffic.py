"""What every optimizer row states, what is priced of it, and what the real step moves: one figure.

The real step runs on the CPU and its bytes are counted op by op. Rows whose library is not installed
are counted over the same operations, written out in written_steps.py as their source has them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import bitsandbytes
import pytest
import torch
from lowering.both_ways import LLAMA, train_config
from lowering.counted_traffic import CountedTraffic
from lowering.test_optimizer_states import COMPILED, DTYPES, PAGED, REAL
from lowering.written_steps import WRITTEN_OUT
from napkinmath.base.expr import Bindings
from napkinmath.catalog.optimizer_states import Optimizer
from napkinmath.catalog.optimizers import OPTIMIZERS
from napkinmath.catalog.stacks import STACKS
from napkinmath.ir.costs import Gemm, Move
from napkinmath.ir.ledger import RUN, Role, Tensor, Weight
from napkinmath.ir.stack import Stack
from napkinmath.lowering.build import build_step
from napkinmath.lowering.optimizer_traffic import update_costs
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import read_config
from torch import nn

SHAPE = (768, 512)
TALL = (10_240, 64)  # one side above every limit that rows have, one below every rank
# Statistics of rows and columns and scales of blocks, whose small kernels rows leave out.
SMALL_TENSORS = 0.01


def counted(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> CountedTraffic:
    """The second step of the row's optimizer on one matrix; the first also makes states."""
    parameter = nn.Parameter(torch.rand(shape).to(dtype))
    parameter.grad = torch.rand_like(parameter)
    name = PAGED.get(name, name)
    if name in WRITTEN_OUT:
        states = states_of(name, dtype, shape)
        with CountedTraffic() as found, torch.no_grad():
            WRITTEN_OUT[name](parameter.data, parameter.grad, states)
        return found
    optimizer: Any = REAL[name]([parameter])
    group, step = optimizer.param_groups[0], optimizer.step
    if isinstance(optimizer, bitsandbytes.optim.optimizer.Optimizer8bit):
        optimizer.init_state(group, parameter, 0, 0)
        step = partial(optimizer.update_step, group, parameter, 0, 0)
    else:
        step()  # makes the states
    with CountedTraffic() as found:
        step()
    return found


def states_of(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A row's states as it states them for one matrix: flat where they are not of its shape."""
    made = {}
    for state in OPTIMIZERS[name].states:
        kind = next((t for t, d in DTYPES.items() if d is state.dtype), dtype)
        count = state.elements(shape) if state.elements else None
        made[state.name] = torch.rand(shape if count is None else (count,)).to(kind)  # type: ignore[arg-type]
    return made


def weight_of(dtype: torch.dtype, shape: tuple[int, int]) -> Weight:
    tensor = Tensor("w", shape, DTYPES[dtype], Role.WEIGHTS)
    return Weight("w", shape, tensor, trainable=True, kind="linear")


def priced(
    row: Optimizer, dtype: torch.dtype, stack: str = "hf", shape: tuple[int, int] = SHAPE
) -> tuple[int, list[int]]:
    """(bytes, multiplications of each product) of one matrix's update."""
    costs = update_costs(row, weight_of(dtype, shape), STACKS[stack])
    moved = sum(int(c.moved) for c in costs if isinstance(c, Move))  # pyright: ignore[reportArgumentType]
    return moved, sorted(c.m * c.n * c.k for c in costs if isinstance(c, Gemm))  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in COMPILED])
@pytest.mark.parametrize("shape", [SHAPE, TALL], ids=str)
def test_what_is_priced_is_what_the_real_step_moves(
    name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    real = counted(name, dtype, shape)
    moved, products = priced(OPTIMIZERS[name], dtype, shape=shape)
    assert moved == pytest.approx(real.moved, rel=SMALL_TENSORS)
    assert products == sorted(m * n * k for m, n, k in real.products)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_s_step_is_priced_by_its_rows(name: str) -> None:
    """Every path of the lowering (one by one, foreach, in the backward) prices what the row
    states."""
    row, stack = OPTIMIZERS[name], STACKS["hf"]
    step = build_step(read_config(dict(LLAMA)), Policy(train_config(optimizer=name), stack))

    def moved(costs: list[Any]) -> int:
        bind = Bindings(step.symbols)
        return sum(int(bind(cost.moved)) for cost in costs if isinstance(cost, Move))

    works = step.update.work + (step.micro_steps[0][1] if row.in_backward else [])
    found = sum(
        segment.repeat * moved(list(work.costs))
        for segment in works
        for action, work in segment.events
        if action == RUN and work.op is None and not work.backward
    )
    stated = sum(
        run.count * moved(update_costs(row, weight, stack))
        for run in step.runs
        for weight in run.trained
    )
    assert found == stated > 0


@pytest.mark.parametrize(
    "stack", [s for s in STACKS.values() if s.optimizer.master_weights], ids=lambda s: s.name
)
def test_an_fp32_master_is_what_is_updated(stack: Stack) -> None:
    """States, gradient and weight of the update are fp32; the 16-bit copies are read and written
    around it."""
    parameter = torch.rand(SHAPE).to(torch.bfloat16)
    gradient = torch.rand(SHAPE).to(
        torch.float32 if stack.optimizer.main_gradients else torch.bfloat16
    )
    master = nn.Parameter(parameter.float())
    optimizer = torch.optim.AdamW([master], fused=True)
    master.grad = gradient.to(torch.float32)
    optimizer.step()  # makes the states
    with CountedTraffic() as found:
        flat = gradient.clone() if stack.optimizer.casts_gradients else gradient
        master.grad = flat.to(torch.float32)
        optimizer.step()
        parameter.copy_(master.detach())
    moved, _ = priced(OPTIMIZERS["adamw-fused"], torch.bfloat16, stack.name)
    assert moved == pytest.approx(found.moved, rel=SMALL_TENSORS)
