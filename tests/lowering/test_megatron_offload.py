"""The optimizer on the host under Megatron-LM: gradients stay in its buffers on the device
(core/optimizer/cpu_offloading/hybrid_optimizer.py _set_sub_optimizer_grads copies them in the
step), where ZeRO-Offload sends each away as it is made."""

from __future__ import annotations

from typing import Any

import napkinmath
import pytest
from napkinmath.base.expr import Bindings
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import RUN, Role, Work

ARCH = "L4 h512 a8 f1536 v4096"
FP32_BYTES = 4


@pytest.mark.parametrize("mesh", [{"gpu": "h100"}, {"gpus": "8xh100", "zero": 1}])
def test_gradients_stay_on_the_device(mesh: dict[str, Any]) -> None:
    found = napkinmath.estimate(
        arch=ARCH, method="full", stack="megatron", offload="optimizer", **mesh
    )
    held = found.breakdown
    assert held[Role.GRADIENTS] == pytest.approx(FP32_BYTES * found.num_parameters, rel=1e-3)
    assert Role.MASTER not in held
    assert Role.OPTIMIZER not in held


def test_what_the_step_copies_to_the_host_is_the_buffers() -> None:
    found = napkinmath.estimate(
        arch=ARCH, method="full", stack="megatron", offload="optimizer", gpu="h100"
    )
    copied, sizes = {True: 0, False: 0}, Bindings(found.step.symbols)
    for segment in found.step.update.work:
        for action, work in segment.events:
            for cost in work.costs if action == RUN and isinstance(work, Work) else ():
                if isinstance(cost, HostCopy):
                    copied[cost.to_host] += int(sizes(cost.moved)) * segment.repeat
    assert copied[True] == FP32_BYTES * found.num_parameters
    assert copied[False] == 2 * found.num_parameters


def test_other_stacks_send_gradients_away_as_they_are_made() -> None:
    found = napkinmath.estimate(
        arch=ARCH, method="full", stack="hf", offload="optimizer", gpu="h100"
    )
    assert found.breakdown.get(Role.GRADIENTS, 0) < found.num_parameters
