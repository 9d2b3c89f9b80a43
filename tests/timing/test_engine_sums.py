"""Sums over an engine's ranks and its products in narrow formats, beside what was measured."""

from __future__ import annotations

import pytest
from napkinmath.catalog.gpus import find_hardware
from napkinmath.timing.collectives import collective_s, fabric
from napkinmath.timing.efficiency import default_efficiency, gemm_s
from napkinmath.timing.engine_sums import engine_sum_s, own_kernel_s
from napkinmath.timing.served_products import quantize_s
from napkinmath.timing.serving import engine_cluster

# ai-dynamo/aiconfigurator custom_allreduce_perf: vLLM 0.14 on A100, 0.24 on H100 and H200, launched
# from a graph. One constant serves them all, and a barrier varies by a microsecond: 25%.
SUM_TOLERANCE = 0.25
SUMS = [
    ("a100", 2, 4 << 20, 25.2),
    ("a100", 8, 4 << 20, 45.4),
    ("h100", 2, 16 << 10, 4.5),
    ("h100", 4, 256 << 10, 7.2),
    ("h100", 8, 256 << 10, 10.8),
    ("h100", 8, 4 << 20, 30.8),
    ("h200", 4, 1 << 20, 12.1),
    ("h200", 8, 2 << 20, 18.1),
]


@pytest.mark.parametrize(("gpu", "ranks", "nbytes", "measured_us"), SUMS)
def test_small_sums_are_those_of_the_engines_kernel(
    gpu: str, ranks: int, nbytes: int, measured_us: float
) -> None:
    cluster = engine_cluster(find_hardware(gpu), ranks)
    priced = engine_sum_s(nbytes, fabric(cluster, ranks), cluster)
    assert priced * 1e6 == pytest.approx(measured_us, rel=SUM_TOLERANCE)


def test_large_sums_and_other_groups_are_nccls() -> None:
    eight, sixteen = (engine_cluster(find_hardware("h100"), n) for n in (8, 16))
    group = fabric(eight, 8)
    assert engine_sum_s(64 << 20, group, eight) == collective_s("all-reduce", 64 << 20, group)
    assert own_kernel_s(1 << 10, fabric(sixteen, 16), sixteen) is None  # two machines
    l40s = engine_cluster(find_hardware("l40s"), 4)
    assert own_kernel_s(1 << 10, fabric(l40s, 4), l40s) is None  # no links


# vLLM 0.24 gemm_perf, the inputs' conversion within. Nothing is fitted to FP8 or NVFP4: 20%.
PRODUCT_TOLERANCE = 0.2
PRODUCTS = [
    ("h100", "fp8", 64, 8192, 8192, 30),
    ("h100", "fp8", 4096, 4096, 4096, 154),
    ("h200", "fp8", 4096, 8192, 8192, 453),
    ("h200", "fp8", 1024, 10240, 8192, 133),
    ("b200", "fp8", 4096, 10240, 8192, 291),
    ("b200", "fp4", 64, 8192, 8192, 13),
    ("b200", "fp4", 1024, 8192, 8192, 42),
    ("b200", "fp4", 4096, 4096, 4096, 48),
]


@pytest.mark.parametrize(("gpu", "dtype", "m", "n", "k", "measured_us"), PRODUCTS)
def test_narrow_products_convert_their_inputs(
    gpu: str, dtype: str, m: int, n: int, k: int, measured_us: float
) -> None:
    speed = default_efficiency(find_hardware(gpu).gpu)
    priced = gemm_s(m, n, k, dtype, speed, result_bits=16) + quantize_s(m * k, "bf16", speed)
    assert priced * 1e6 == pytest.approx(measured_us, rel=PRODUCT_TOLERANCE)
