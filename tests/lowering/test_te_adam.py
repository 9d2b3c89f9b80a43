"""Transformer Engine's FusedAdam: what it keeps, moves and widens, by hand from its source
(pytorch/optimizers/fused_adam.py, common/multi_tensor/adam.cu AdamFunctor)."""

from __future__ import annotations

from typing import Any

import napkinmath
import pytest
from napkinmath.base.dtypes import BF16, FP32
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.optimizers import find_optimizer
from napkinmath.catalog.stacks import STACKS
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, Phase, Role, Tensor, Weight
from napkinmath.lowering.optimizer_traffic import update_costs

SIDES = (64, 96)
RANKS, LAYERS = 8, 4
ARCH = f"L{LAYERS} h512 a8 f1536 v4096"


def bytes_an_element(name: str) -> float:
    """Of one bf16 matrix whose gradient is summed in fp32."""
    tensor = Tensor("w", SIDES, BF16, Role.WEIGHTS)
    weight = Weight("w", SIDES, tensor, trainable=True, kind="linear")
    costs = update_costs(find_optimizer(name), weight, STACKS["megatron"], FP32)
    moved = sum(int(cost.moved) for cost in costs if isinstance(cost, Move))  # pyright: ignore[reportArgumentType]
    return moved / (SIDES[0] * SIDES[1])


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        # gradient 4, weight 2 read and 2 written, moments 2 x 8, master 8
        ("adamw-te:master=fp32", 4 + 4 + 16 + 8),
        # the weight is read for its own bits, its other half is 2 bytes
        ("adamw-te:master=remainders", 4 + 4 + 16 + 4),
        # both moments in bf16 are read as they are
        ("adamw-te:exp_avg=bf16,exp_avg_sq=bf16,master=fp32", 4 + 4 + 8 + 8),
        # one of them: widened (2 + 4), updated (8), measured (4), scaled (8), stored (4 + 2)
        ("adamw-te:exp_avg=bf16,master=fp32", 4 + 4 + 8 + 8 + 6 + 8 + 4 + 8 + 6),
    ],
)
def test_what_one_update_moves(name: str, moved: int) -> None:
    assert bytes_an_element(name) == moved


def kept(optimizer: str, reduce_dtype: str) -> dict[str, int]:
    """Bytes by role that a rank of Megatron's distributed optimizer keeps through the run."""
    found = napkinmath.estimate(
        arch=ARCH,
        method="full",
        stack="megatron",
        gpus=f"{RANKS}xh100",
        zero=1,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
    )
    sizes, held = Bindings(found.step.symbols), dict[str, int]()
    for segment in (*found.step.load, *found.step.update.states):
        for action, tensor in segment.events:
            if action == ALLOC and isinstance(tensor, Tensor):
                size = int(sizes(tensor.nbytes)) * segment.repeat
                held[tensor.role.value] = held.get(tensor.role.value, 0) + size
    return held


def test_a_rank_keeps_remainders_and_narrow_moments_of_its_part() -> None:
    usual = kept("adamw-fused", "bf16")
    narrow = kept("adamw-te:exp_avg=bf16,exp_avg_sq=bf16,master=remainders", "bf16")
    master, states = Role.MASTER.value, Role.OPTIMIZER.value
    assert narrow[master] * 2 == usual[master]
    assert narrow[states] * 2 == pytest.approx(
        usual[states], rel=1e-4
    )  # less torch's step counters
    same = {role: size for role, size in usual.items() if role not in (master, states)}
    assert {role: narrow[role] for role in same} == same


def test_gradients_of_16_bits_are_read_as_they_are() -> None:
    """Megatron's own update makes fp32 gradients of them first."""
    usual, own = (
        napkinmath.estimate(
            arch=ARCH, method="full", stack="megatron", gpus="8xh100", zero=1, reduce_dtype="bf16",
            optimizer=name,
        )
        for name in ("adamw-fused", "adamw-te:master=fp32")
    )  # fmt: skip
    names = [[segment.name for segment in e.step.update.work] for e in (usual, own)]
    assert any("fp32 gradients" in name for name in names[0])
    assert not any("fp32 gradients" in name for name in names[1])


@pytest.mark.parametrize("given", ["exp_avg=int4", "moment=bf16", "master=bf16", "exp_avg"])
def test_a_type_that_it_has_not_is_refused(given: str) -> None:
    with pytest.raises(InputError, match="adamw-te"):
        find_optimizer(f"adamw-te:{given}")


def update_peak(stack: str, arch: str = ARCH, **keys: Any) -> int:
    """Bytes that a rank of the distributed optimizer needs in the update, moments in bf16."""
    found = napkinmath.estimate(
        arch=arch, method="full", stack=stack, gpus=f"{RANKS}xh100", zero=1, reduce_dtype="bf16",
        optimizer="adamw-te:exp_avg=bf16,exp_avg_sq=bf16,master=remainders", **keys,
    )  # fmt: skip
    return found.phase_peaks[Phase.STEP].nbytes


def test_before_2_13_both_moments_of_a_rank_are_widened_at_once() -> None:
    parameters = napkinmath.estimate(arch=ARCH, method="full").num_parameters
    more = update_peak("megatron-2025") - update_peak("megatron")
    assert more == pytest.approx(2 * 4 * parameters / RANKS, rel=1e-3)  # 512-byte rounding


def test_spread_experts_are_widened_after_the_others() -> None:
    """Each has an optimizer of its own, so the larger of the two decides, not their sum."""
    arch = f"L{LAYERS} h512 a8 f1536 v4096 moe8x2"
    one = napkinmath.estimate(arch=arch, method="full")
    experts = LAYERS * 8 * 3 * 512 * 1536
    dense = one.num_parameters - experts
    more = update_peak("megatron-2025", arch, ep=RANKS) - update_peak("megatron", arch, ep=RANKS)
    assert experts / RANKS > dense / RANKS  # each expert is on one rank, all else over eight
    assert more == pytest.approx(2 * 4 * experts / RANKS, rel=1e-3)
