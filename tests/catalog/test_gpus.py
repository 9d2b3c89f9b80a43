"""The catalog of GPUs: rows agree with the arithmetic of their architecture, and every name people
write is found."""

from __future__ import annotations

import pytest
from napkinmath.base.errors import InputError
from napkinmath.base.units import GIB, MIB
from napkinmath.catalog.gpus import _key, find_gpu, find_hardware, load_gpus
from napkinmath.config.hardware import Display

GPUS = load_gpus()
NAMES = [gpu.name for gpu in GPUS]

# FLOP per clock and SM (CU), dense, from the architecture whitepapers; the 16-bit rate is that of
# fp16 accumulation where GeForce halves the other. H20's SMs have a quarter of Hopper's matrix
# rate; A10G, L20 and L40 are rated at half of their chip's.
OPS_PER_CLOCK = {
    "6.0": {"fp32": 128, "fp16_fp16acc": 256},
    "6.1": {"fp32": 256},
    "7.0": {"fp32": 128, "fp16": 1024},
    "7.5": {"fp32": 128, "16-bit": 1024, "int8": 2048},
    "8.0": {"fp32": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048, "int8": 4096},
    "8.6": {"fp32": 256, "16-bit": 1024, "int8": 2048},
    "8.9": {"fp32": 256, "16-bit": 1024, "8-bit": 2048},
    "9.0": {"fp32": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192, "int8": 8192},
    "10.0": {"fp32": 256, "tf32": 4096, "fp16": 8192, "bf16": 8192, "fp8": 16384, "fp4": 32768},
    "10.3": {"fp32": 256, "tf32": 4096, "fp16": 8192, "bf16": 8192, "fp8": 16384, "fp4": 49152},
    "12.0": {"fp32": 256, "16-bit": 1024, "8-bit": 2048, "fp4": 4096},
    "12.1": {"fp32": 256, "16-bit": 1024, "8-bit": 2048, "fp4": 4096},
    "gfx908": {"fp32": 256, "fp16": 1024, "bf16": 512, "int8": 1024},
    "gfx90a": {"fp32": 256, "fp16": 1024, "bf16": 1024, "int8": 1024},
    "gfx942": {"fp32": 256, "tf32": 1024, "fp16": 2048, "bf16": 2048, "fp8": 4096, "int8": 4096},
    "gfx950": {"fp32": 256, "fp16": 4096, "bf16": 4096, "fp8": 8192, "int8": 8192, "fp4": 16384},
    "gfx1100": {"fp32": 256, "fp16": 512, "bf16": 512, "int8": 512},
    "gfx1201": {"fp32": 256, "fp16": 1024, "bf16": 1024, "fp8": 2048, "int8": 2048},
}
MATRIX_SHARE = {"H20-96GB": 1 / 4, "H20-141GB": 1 / 4, "A10G": 1 / 2, "L20": 1 / 2, "L40": 1 / 2}
# Datasheets round to three figures and whole TFLOP/s, and a quoted boost clock to 5-15 MHz of
# 1,500: within 1.3% together.
DATASHEET_ROUNDING = 0.013
# Data-centre Blackwell and GB10 are rated at a clock no whitepaper gives; the row has the highest
# clock the driver reports, so the datasheet may lie below it (9% seen on B300) but only by rounding
# above.
RATED_BELOW_TOP_CLOCK = {"10.0": 0.10, "10.3": 0.10, "12.1": 0.02}
RATED_ABOVE = {"12.1": 0.06}
# NVIDIA lists 44 TFLOP/s of fp32 for H20, 11% above its 78 SMs at 1,980 MHz; no whitepaper explains
# it.
# TITAN V's page has the rate of its clock under tensor load.
UNEXPLAINED = {("H20-96GB", "fp32"), ("H20-141GB", "fp32"), ("TITAN V", "fp16")}


def _expected(gpu, kind, per_clock):
    matrix = kind != "fp32" or gpu.vendor == "amd"
    return (
        gpu.num_sms
        * per_clock
        * (gpu.tensor_hz if matrix else gpu.boost_hz)
        * (MATRIX_SHARE.get(gpu.name, 1) if matrix else 1)
    )


def _listed(gpu, kind):
    rates = dict(gpu.dense_flops)
    if kind == "16-bit":
        return rates.get("fp16_fp16acc", rates["fp16"])
    if kind == "8-bit":
        return rates.get("fp8_fp16acc", rates["fp8"])
    return rates.get(kind)


@pytest.mark.parametrize("gpu", GPUS, ids=NAMES)
def test_rates_are_sms_times_operations_per_clock_times_clock(gpu):
    checked = 0
    for kind, per_clock in OPS_PER_CLOCK[gpu.compute_capability].items():
        listed = _listed(gpu, kind)
        if listed is None or (gpu.name, kind) in UNEXPLAINED:
            continue
        ratio = listed / _expected(gpu, kind, per_clock)
        low = 1 - max(DATASHEET_ROUNDING, RATED_BELOW_TOP_CLOCK.get(gpu.compute_capability, 0))
        high = 1 + max(DATASHEET_ROUNDING, RATED_ABOVE.get(gpu.compute_capability, 0))
        assert low <= ratio <= high, f"{kind}: datasheet is {ratio:.3f} of the arithmetic"
        checked += 1
    assert checked >= 1


@pytest.mark.parametrize("gpu", GPUS, ids=NAMES)
def test_row_is_complete_and_plausible(gpu):
    assert 0.86 * gpu.nominal_bytes < gpu.memory_bytes <= gpu.nominal_bytes * 1.005
    if gpu.nvidia_smi_bytes:
        assert gpu.memory_bytes <= gpu.nvidia_smi_bytes <= gpu.nominal_bytes * 1.03
    assert 150e9 < gpu.bandwidth_bytes_per_s < 9e12
    assert gpu.dense_flops_per_s("fp32") <= gpu.dense_flops_per_s("fp16") * 1.001
    assert gpu.dense_flops_per_s("bf16") > 0
    assert MIB <= gpu.l2_bytes < 256 * MIB
    assert gpu.host_link.bytes_per_s > 7e9
    assert dict(gpu.sources)["*"]


def test_catalog_is_large_enough():
    assert len(GPUS) >= 55
    assert len(set(NAMES)) == len(NAMES)


def test_no_two_gpus_share_a_name():
    owner: dict[str, str] = {}
    for gpu in GPUS:
        for name in (gpu.name, *gpu.aliases):
            assert owner.setdefault(_key(name), gpu.name) == gpu.name, name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("RTX-4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("a100-80", "A100-SXM4-80GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("a100_40gb", "A100-SXM4-40GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("tesla t4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200-SXM5-141GB"),
        ("H100-SXM HBM2e 96GB 500W", "H100-SXM5-96GB-HBM2e"),
        ("RTX3090 (no NVLink, 280W)", "RTX 3090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("7900 xtx", "Radeon RX 7900 XTX"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 5000 Blackwell", "RTX PRO 5000 Blackwell"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("A6000", "RTX A6000"),
        ("3080", "RTX 3080 10GB"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA RTX 2000 Ada Generation", "RTX 2000 Ada"),
        ("NVIDIA RTX A2000 12GB", "RTX A2000 12GB"),
        ("NVIDIA A2", "A2"),
        ("NVIDIA A30X", "A30X"),
        ("NVIDIA H800 PCIe", "H800-PCIe-80GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "RTX 3080 Laptop 8GB"),
        ("3070 ti laptop", "RTX 3070 Ti Laptop"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA RTX PRO 5000 72GB Blackwell", "RTX PRO 5000 72GB Blackwell"),
        ("RTX PRO 4500 Blackwell", "RTX PRO 4500 Blackwell"),
        ("5060 Ti 8GB", "RTX 5060 Ti 8GB"),
        ("5060 Ti", "RTX 5060 Ti 16GB"),
    ],
)
def test_names_people_write(written, name):
    assert find_gpu(written).name == name


@pytest.mark.parametrize(
    ("written", "nearest"),
    [("H100 SXM9", "H100-SXM"), ("RTX 4095", "RTX 409"), ("mi300y", "MI300")],
)
def test_unknown_names_suggest_the_nearest(written, nearest):
    with pytest.raises(InputError) as caught:
        find_gpu(written)
    assert repr(written) in str(caught.value)
    assert nearest in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bare_memory_and_overrides():
    assert find_hardware(vram="24").memory_bytes == 24 * GIB
    assert find_hardware(vram="24GiB").memory_bytes == 24 * GIB
    assert find_hardware("rtx 4090", vram="20").memory_bytes == 20 * GIB
    with pytest.raises(InputError):
        find_hardware()
    with pytest.raises(InputError, match="no known rate"):
        find_hardware(vram="24").gpu.dense_flops_per_s("bf16")


# Memory of A100 slices as torch and nvidia-smi show it: NVIDIA MIG user guide, "device enumeration"
# and the profile tables.
@pytest.mark.parametrize(
    ("profile", "mib", "sms", "bandwidth_share"),
    [
        ("1g.10gb", 9728, 14, 1 / 8),
        ("2g.20gb", 19968, 28, 2 / 8),
        ("3g.40gb", 40192, 42, 4 / 8),
        ("4g.40gb", 40192, 56, 4 / 8),
    ],
)
def test_mig_slices_of_an_a100(profile, mib, sms, bandwidth_share):
    whole = find_gpu("a100-80")
    gpu = find_hardware(f"A100-80 MIG {profile}").gpu
    assert gpu.memory_bytes == mib * MIB
    assert gpu.num_sms == sms
    assert gpu.bandwidth_bytes_per_s == pytest.approx(whole.bandwidth_bytes_per_s * bandwidth_share)
    assert gpu.dense_flops_per_s("bf16") == pytest.approx(
        whole.dense_flops_per_s("bf16") * sms / 108
    )


def test_impossible_mig_profile_is_refused():
    for text in ("A100-80 MIG 9g.40gb", "A100-80 MIG 3g.400gb", "T4 MIG 1g.2gb"):
        with pytest.raises(InputError):
            find_hardware(text)


# MiB outside torch's allocator, bare process or torch's own out-of-memory message (process in use -
# allocated - reserved).
PUBLISHED_CONTEXTS = [
    ("RTX 6000 Ada", 426),
    ("RTX 3090", 256),
    ("RTX 3090", 315),
    ("RTX 4090", 440),
    ("RTX 5090", 499),
    ("T4", 111),
    ("T4", 142),
    ("H100", 522),
    ("H200", 670),
    ("B200", 712),
    ("A100-40", 418),
    ("B300", 618),
    ("V100-SXM2-16GB", 384),
    ("A6000", 304),
    ("A6000", 309),
    ("RTX PRO 6000", 692),
    ("RTX PRO 6000", 696),
    ("MI300X", 460),
    ("MI300X", 796),
    ("7900 XTX", 424),
]


@pytest.mark.parametrize(("name", "mib"), PUBLISHED_CONTEXTS)
def test_published_contexts_lie_in_the_range(name, mib):
    gpu = find_gpu(name)
    low, high = gpu.context_range
    # torch prints hundredths of a GiB, three figures of which enter a difference.
    rounding = 3 * 0.005 * GIB
    assert low - rounding <= mib * MIB <= high + rounding
    assert low <= gpu.context_bytes <= high


def test_context_of_old_torch_on_v100():
    hardware = find_hardware("V100-SXM2-16GB").replace(lazy_modules=False)
    low, high = hardware.context_range
    assert low <= 1343 * MIB <= high
    assert hardware.context_bytes == pytest.approx(1343 * MIB, rel=0.05)


@pytest.mark.parametrize(
    ("name", "workspace"),
    [
        ("A100", 8519680),
        ("4090", 8519680),
        ("H100", 33554432),
        ("5090", 33554432),
        ("MI300X", 134217728),
    ],
)
def test_cublas_workspace_is_torchs_default(name, workspace):
    assert find_gpu(name).cublas_workspace_bytes == workspace


def test_gpus_of_several_powers_name_the_least():
    """NVIDIA sells one laptop GPU at several powers, and a GH200 shares 450 to 1,000 W with its
    processor and memory (GH200 datasheet, TDP); a card has one."""
    for gpu in GPUS:
        several = gpu.is_laptop or gpu.name.startswith("GH200")
        assert bool(gpu.least_tdp_w) == several, gpu.name
        assert gpu.least_tdp_w < gpu.tdp_w


# RTX 2000 Ada's datasheet has 12.0 TFLOP/s of fp32 and 191.9 of sparse fp8; a laptop's 1,824 AI TOPS
# are sparse fp4.
@pytest.mark.parametrize(
    ("name", "key", "sparse_tflops", "sparsity"),
    [
        ("RTX 2000 Ada", "fp8", 191.9, 2),
        ("RTX A5500", "fp16", 272.8, 2),
        ("RTX A2000", "fp16", 63.9, 2),
        ("RTX 5090 Laptop", "fp4", 1824, 2),
        ("RTX 5070 Laptop", "fp4", 798, 2),
    ],
)
def test_rates_of_a_datasheet_with_sparsity(name, key, sparse_tflops, sparsity):
    dense = find_gpu(name).dense_flops_per_s(key) / 1e12
    assert dense * sparsity == pytest.approx(sparse_tflops, rel=DATASHEET_ROUNDING)


def test_display_takes_memory_first():
    plain, desktop = find_hardware("4090"), find_hardware("4090", display=Display.WDDM)
    assert plain.usable_bytes - desktop.usable_bytes == Display.WDDM[0]
    low, high = desktop.usable_range
    assert low <= desktop.usable_bytes <= high


def test_unified_memory_is_shared_with_the_host():
    spark = find_hardware("DGX Spark")
    assert spark.usable_bytes < spark.memory_bytes - spark.context_bytes - 2 * GIB
    low, high = spark.usable_range
    assert low < spark.usable_bytes < high


def test_host_and_gpu_links_per_direction():
    assert find_gpu("A100").host_link.bytes_per_s == pytest.approx(31.5e9, rel=0.01)
    assert find_gpu("H100").host_link.bytes_per_s == pytest.approx(63.0e9, rel=0.01)
    assert find_gpu("GH200").host_link.bytes_per_s == 450e9
    for name, gb_per_s in (
        ("V100", 150),
        ("A100", 300),
        ("A800", 200),
        ("H100", 450),
        ("B200", 900),
        ("3090", 56.25),
        ("MI300X", 448),
    ):
        link = find_gpu(name).gpu_link
        assert link is not None
        assert link.bytes_per_s == gb_per_s * 1e9
    assert find_gpu("4090").gpu_link is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("M3 Max", "Apple's"),
        ("apple m2-ultra", "Apple's"),
        ("cpu", "no GPU"),
        ("jetson-orin-nano", "a Jetson"),
        ("TPU v5e", "Google's"),
        ("Arc A770", "Intel's"),
        ("trn1", "Amazon's"),
        ("Ascend 910B", "Huawei's"),
    ],
)
def test_machines_that_run_other_kernels_are_named(name: str, said: str) -> None:
    """The way out is taken: its memory is priced."""
    with pytest.raises(InputError, match=said) as refused:
        find_gpu(name)
    assert "--vram 24" in str(refused.value) and find_hardware(vram="24").memory_bytes == 24 << 30
    with pytest.raises(InputError, match=r"did you mean|name one"):
        find_gpu("tesla m4")
