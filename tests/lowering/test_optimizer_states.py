"""Every optimizer row against the state_dict of the real optimizer, to the byte; rows without an
installed library are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.optim import AdamW, AdEMAMix, Lion, RMSprop
from lowering.written_steps import WRITTEN_OUT
from napkinmath.base.dtypes import BF16, FP32
from napkinmath.catalog.optimizers import OPTIMIZERS, find_optimizer
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import TrainConfig
from napkinmath.ir.ledger import Block, Role, Tensor, Weight
from napkinmath.ir.model_spec import Part, Stage
from napkinmath.ir.step import Run
from napkinmath.lowering.optimizer import States
from napkinmath.lowering.policy import Policy
from torch import nn
from transformers.optimization import Adafactor

SHAPES = ((64, 96), (4096,), (64, 63), (48,), (33, 257))
DTYPES = {torch.float32: FP32, torch.bfloat16: BF16}
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

REAL: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, foreach=True),
    "adafactor": lambda p: Adafactor(p),
    "muon": lambda p: torch.optim.Muon([w for w in p if w.ndim == 2]),
    "adamw-8bit": lambda p: AdamW(p, optim_bits=8),
    "adamw-bnb": lambda p: AdamW(p, optim_bits=32),
    "ademamix": lambda p: AdEMAMix(p, optim_bits=32),
    "ademamix-8bit": lambda p: AdEMAMix(p, optim_bits=8),
    "lion-bnb": lambda p: Lion(p, optim_bits=32),
    "lion-8bit": lambda p: Lion(p, optim_bits=8),
    "rmsprop-bnb": lambda p: RMSprop(p, optim_bits=32),
    "rmsprop-8bit": lambda p: RMSprop(p, optim_bits=8),
}
# Paged rows hold what their unpaged row holds; the others' libraries are not installed here.
PAGED = {
    name: name.removeprefix("paged-") if name != "paged-adamw" else "adamw-bnb"
    for name in OPTIMIZERS
    if name.startswith("paged-")
}
PAGED |= {"paged-lion": "lion-bnb"}
# One kernel does it all: read off the code that the compiler generates, or the library's own source
# (Transformer Engine: test_te_adam.py).
COMPILED = ("adamw-8bit-torchao", "adamw-4bit-torchao", "adamw-te")


def test_every_row_is_run_or_written_out() -> None:
    rows = [*REAL, *PAGED, *WRITTEN_OUT, *COMPILED]
    assert sorted(rows) == sorted(OPTIMIZERS)


def real_states(factory: Factory, dtype: torch.dtype) -> int:
    """Bytes of the optimizer's device tensors after its first step; step counters of unfused torch
    optimizers are on the host."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = factory(parameters)
    if isinstance(optimizer, bitsandbytes.optim.optimizer.Optimizer8bit):
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                optimizer.init_state(group, parameter, g, i)
    else:
        optimizer.step()
    found: dict[int, int] = {}
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (name != "step" or fused):
                found[value.data_ptr() or id(value)] = value.numel() * value.element_size()
    return sum(found.values())


def by_rules(
    name: str, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[Tensor]:
    stored = DTYPES[dtype]
    weights = [
        Weight(
            f"w{i}", shape, Tensor("w", shape, stored, Role.WEIGHTS), trainable=True, kind="linear"
        )
        for i, shape in enumerate(shapes)
    ]
    run = Run(Block("", [], weights, None, None, (), {}, {}), 1, Stage(part=Part()), 0)
    states = States(find_optimizer(name), Policy(TrainConfig(), STACKS["hf"]), {})
    tensors = [t for weight in weights for t in states.of(run, weight)]
    return tensors + list(states.shared.values())


def num_bytes(tensors: list[Tensor]) -> Any:
    return sum(t.nbytes + t.host_bytes for t in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in REAL if name != "muon"])
def test_states_equal_the_real_optimizer(name: str, dtype: torch.dtype) -> None:
    assert num_bytes(by_rules(name, dtype)) == real_states(REAL[name], dtype)


def test_muon_keeps_one_momentum_a_matrix_and_adamw_states_elsewhere() -> None:
    matrices = tuple(shape for shape in SHAPES if len(shape) == 2)
    assert num_bytes(by_rules("muon", torch.bfloat16, matrices)) == real_states(
        REAL["muon"], torch.bfloat16
    )
    assert [t.name for t in by_rules("muon", torch.bfloat16, ((48,),))] == [
        "exp_avg of w",
        "exp_avg_sq of w",
        "step of w",
    ]


@pytest.mark.parametrize("name", PAGED)
def test_paged_rows_hold_the_same_and_page_large_states_only(name: str) -> None:
    shapes = ((400, 250), (300, 333), (64,))  # 100,000 elements, fewer, few
    paged, plain = (
        by_rules(name, torch.bfloat16, shapes),
        by_rules(PAGED[name], torch.bfloat16, shapes),
    )
    assert num_bytes(paged) == num_bytes(plain)
    managed = [t for t in paged if t.managed]
    assert managed and all(
        t.nbytes == 0 and t.axes[0] in (100_000, 200_000) and "absmax" not in t.name
        for t in managed
    )
    assert not any(t.managed for t in plain)


def test_an_open_size_prices_both_forms() -> None:
    """A rank bound to an array in a sweep: the same rule at every rank."""
    from napkinmath.base.expr import Bindings, symbol

    shape = (symbol("r"), 64)
    tensors = by_rules("adamw-8bit", torch.bfloat16, (shape,))  # type: ignore[arg-type]
    for rank in (8, 63, 64, 65, 256):
        bind = Bindings({"r": rank})
        assert sum(bind(t.nbytes) for t in tensors if "qmap" not in t.name) == num_bytes(
            [
                t
                for t in by_rules("adamw-8bit", torch.bfloat16, ((rank, 64),))
                if "qmap" not in t.name
            ]
        )


def test_a_4_bit_state_is_as_torchao_0_18_makes_it() -> None:
    """Bytes counted on torchao.optim.AdamW4bit's states of a (512, 256) and a (48,) bf16 parameter:
    codes (65536,), scale (1024,), qmap (16,) for each moment; bf16 moments for the small one."""
    large, small = 2 * (65_536 + 4 * 1024 + 4 * 16), 2 * 2 * 48
    assert num_bytes(by_rules("adamw-4bit-torchao", torch.bfloat16, ((512, 256),))) == large
    assert num_bytes(by_rules("adamw-4bit-torchao", torch.bfloat16, ((48,),))) == small
