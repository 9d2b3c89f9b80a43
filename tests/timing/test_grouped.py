"""Products of experts: one kernel where torch has one for the GPU and the type, else a loop."""

from __future__ import annotations

import pytest
from napkinmath.base.dtypes import BF16, FP16
from napkinmath.catalog.gpus import find_gpu
from napkinmath.inputs.jobs import priced
from napkinmath.ir.costs import Gemm
from napkinmath.timing.efficiency import gemm_s
from napkinmath.timing.grouped import loops
from napkinmath.timing.schedule import StepTime

EXPERTS = 128
JOB = {"model": "qwen3-30b-a3b", "bs": 1, "ctx": 1024, "lora": True, "checkpointing": "full"}


def time_on(gpu: str, **options: object) -> StepTime:
    time = priced({**JOB, "gpu": gpu, **options}, [])[0].time
    assert time is not None
    return time


def host_s(time: StepTime) -> float:
    return sum(phase.host_s for phase in time.phases)


LOOPS_ON = {
    "H100": False,
    "B200": False,
    "B300": False,
    "A100": True,
    "RTX 5090": True,
    "MI300X": True,
}


@pytest.mark.parametrize(("gpu", "loop"), LOOPS_ON.items())
def test_the_kernel_is_for_capability_9_and_10(gpu: str, loop: bool) -> None:
    product = Gemm(64, 768, 2048, BF16, EXPERTS, grouped=True)
    assert loops(product, find_gpu(gpu)) is loop


def test_the_kernel_is_for_bf16_and_for_grouped_products_alone() -> None:
    h100 = find_gpu("H100")
    assert loops(Gemm(64, 768, 2048, FP16, EXPERTS, grouped=True), h100)
    assert not loops(Gemm(64, 768, 2048, FP16, EXPERTS), h100)


def test_the_host_issues_every_product_and_reads_the_offsets() -> None:
    """A checkpointed layer runs two products forward, twice, and the gradient of two rows."""
    one, loop = time_on("H100"), time_on("A100")
    assert not any(phase.waited_s for phase in one.phases)
    assert all(phase.waited_s > 0 for phase in loop.phases[:2])
    assert host_s(loop) > 2 * host_s(one)


def test_megatron_has_products_of_its_own() -> None:
    options: dict[str, object] = {"lora": False, "stack": "megatron"}
    assert host_s(time_on("A100", **options)) == pytest.approx(host_s(time_on("H100", **options)))


def product_s(gpu: str, rows: int, routed: str = "") -> float:
    """Seconds of 64 experts' products, `rows` tokens each."""
    return float(gemm_s(rows, 4096, 4096, "bf16", find_gpu(gpu), batch=64, routed=routed))


@pytest.mark.parametrize(("gpu", "share"), [("H100", 0.67), ("A100", 0.67), ("L40S", 1.0)])
def test_kernels_over_experts_starve_the_matrix_units_of_data_centres(
    gpu: str, share: float
) -> None:
    """vLLM's fused experts, even routing: H100 0.72 of dense products, L40S 0.98."""
    slower = product_s(gpu, 4096, "weights") / product_s(gpu, 4096)
    assert slower == pytest.approx(1 / share, rel=0.01)


def test_a_routers_rows_leave_half_a_tile_of_each_expert_empty() -> None:
    for rows in (512, 4096):  # 4 and 32 tiles of 128 rows
        uneven = product_s("H100", rows, "rows") / product_s("H100", rows, "weights")
        assert uneven == pytest.approx(1 + 0.5 * 128 / rows, rel=0.02)
