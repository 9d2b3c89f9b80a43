"""Hardware: what a GPU is (`Gpu`, one row of the catalog) and what is left of it for a training
step (`Hardware`).

Memory is in bytes, rates in bytes or FLOP per second, per direction for links. Dense rates only: no
figure counts sparsity.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.base.units import GIB, KIB, MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType

# Where the hardware lacks a format, torch computes in the next one: bf16 on Volta and Turing and
# tf32 before Ampere run as fp32; fp8 storage before Ada is widened to 16 bits. Tried in this order.
_COMPUTED_AS = {
    "fp32": (),
    "tf32": ("fp32",),
    "fp16": ("fp32",),
    "bf16": ("fp32",),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("fp16", "fp32"),
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
    "int4": ("int8", "fp16", "fp32"),
}
_DTYPE_KEYS = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "uint8": "int8", "nf4": "bf16"}

# Resident threads per SM (CU on AMD), CUDA C programming guide, table of technical specifications
# per compute capability.
_THREADS_PER_SM = {"7.5": 1024, "8.6": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
_DEFAULT_THREADS_PER_SM = 2048

# A CUDA context holds local memory for every resident thread, so it grows with SMs x threads. The
# line through four published bare contexts with lazy module loading (102-111 MiB on T4, 256 on RTX
# 3090, 426 on RTX 6000 Ada, 522 on H100) gives the others: 418 on A100-40 and 618 on B300 against
# 432 and 582. Sources: InvokeAI issue 9413, unsloth-zoo PR 1053, "Process N has X memory in use" in
# torch out-of-memory messages.
_CONTEXT_BASE_BYTES = 27 * MIB
_CONTEXT_BYTES_PER_THREAD = 1920
# Kernels loaded lazily while training (cuBLAS, attention, elementwise): process total less the
# context above and what torch reserved, in out-of-memory messages: 10-40 MiB on T4, 40-60 on V100,
# RTX A6000, 3090 and 4090, 0 on RTX 5090; 130-170 on H200, B200 and RTX PRO 6000, whose libraries
# carry larger kernels.
_LOADED_KERNELS_BYTES = 60 * MIB
_LOADED_KERNELS_BYTES_HOPPER = 130 * MIB
_LOADED_KERNELS_RANGE = (0, 180 * MIB)
# Every kernel at once, as before CUDA 11.7 and torch 1.13: 666.6 MB against 287.0 MB lazily in the
# same program (pytorch PR
# 86509); 1343 MiB on a V100 with torch 1.x (transformers 4.x, perf_train_gpu_one).
_EAGER_MODULES_BYTES = 960 * MIB
_EAGER_MODULES_RANGE = (360 * MIB, 1100 * MIB)
# Instinct and Radeon: HIP runtime and code objects of one process: 460 and 796 MiB on MI300X
# (device total less free and less torch's own, in out-of-memory messages), 424 on RX 7900 XTX
# (llama.cpp issue 23999).
_HIP_CONTEXT_BYTES = 460 * MIB
_HIP_CONTEXT_RANGE = (200 * MIB, 1024 * MIB)
# One memory for host and GPU: the operating system, Python and the loaders' buffers live in what
# CUDA reports. Typical, least, most; an assumption, not a measurement.
_UNIFIED_HOST_SHARE = (4 * GIB, 2 * GIB, 10 * GIB)


class HostLink(Record):
    """The way to host memory: PCI Express of a generation and width, or NVLink-C2C."""

    kind: str
    generation: int
    lanes: int = 0
    gb_per_s_per_direction: float = 0.0
    own_lanes: bool = False
    """The lanes are known to be this card's alone; a desktop's two cards usually share sixteen."""

    @property
    def bytes_per_s(self) -> float:
        """Raw rate in one direction; PCI Express gen 3 to 5 is 8, 16, 32 GT/s a lane in 128b/130b,
        gen 6 64 GT/s in 242B/256B flits."""
        if self.gb_per_s_per_direction:
            return self.gb_per_s_per_direction * 1e9
        giga_transfers = 8.0 * 2 ** (self.generation - 3)
        coding = 128 / 130 if self.generation < 6 else 242 / 256
        return giga_transfers * coding / 8 * self.lanes * 1e9


class Host(Record):
    """The processor and memory beside GPUs: cores, and bytes a second of memory and of NVMe."""

    cores: int
    memory_bytes_per_s: float
    disk_read_bytes_per_s: float = 6e9
    disk_write_bytes_per_s: float = 3e9
    gpus: int = 0
    """The GPUs that have cores and memory to themselves (a Grace's); 0: those of a machine."""

    def ranks(self, of_machine: int) -> int:
        """How many ranks of a machine share its cores and memory."""
        return min(of_machine, self.gpus) if self.gpus else of_machine

    def validate(self) -> None:
        """Raises InputError for a host without a core or with a rate that is not positive."""
        rates = (self.memory_bytes_per_s, self.disk_read_bytes_per_s, self.disk_write_bytes_per_s)
        if self.cores < 1 or min(rates) <= 0:
            raise InputError(
                f"a host of {self.cores} cores and {rates[0]:g}, {rates[1]:g}, {rates[2]:g} bytes a"
                " second cannot work; use 1 core or more and rates above 0"
            )


# Two sockets with eight channels of DDR4-3200 each (AMD EPYC 7742, as in DGX A100), and a desktop's
# two channels of DDR5-5200; disks are one PCI Express 4.0 drive.
_SERVER = Host(cores=64, memory_bytes_per_s=410e9)
_DESKTOP = Host(cores=16, memory_bytes_per_s=83e9)
# Grace's 72 cores with LPDDR5X, one to a GH200 and to two GPUs of a GB200 or GB300 (their datasheets:
# up to 512 GB/s); a DGX Spark's 20 cores share the GPU's memory.
_GRACE = Host(cores=72, memory_bytes_per_s=512e9)
_OF_SUPERCHIP = {
    "GH200": _GRACE.replace(gpus=1),
    "GB200": _GRACE.replace(gpus=2),
    "GB300": _GRACE.replace(gpus=2),
    "GB10": Host(cores=20, memory_bytes_per_s=273e9, gpus=1),
}
_DESKTOP_NAMES = ("RTX", "GTX", "TITAN", "Quadro", "GeForce")


class GpuLink(Record):
    """A direct link between GPUs: all of one GPU's lanes together, one direction."""

    kind: str
    generation: int
    gb_per_s_per_direction: float
    domain: int = 0
    """GPUs that switches between machines join by it; 0: those of one machine."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second in one direction."""
        return self.gb_per_s_per_direction * 1e9


class Gpu(Record):
    """One GPU as a program sees it (one GCD of an MI250, one of an A16's four).

    `memory_bytes` is what CUDA reports to the program, `nvidia_smi_bytes` what the driver's tool
    prints (it includes what ECC and the driver keep), `nominal_bytes` the box. `dense_flops` pairs
    a format with FLOP/s at fp32 accumulation; a `_fp16acc` format is the rate at fp16 accumulation
    where it differs.
    """

    name: str
    vendor: str
    architecture: str
    compute_capability: str
    nominal_bytes: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    dense_flops: tuple[tuple[str, float], ...]
    num_sms: int
    boost_hz: float
    l2_bytes: int
    tdp_w: float
    host_link: HostLink
    given_host: Host | None = None
    power_limit_w: float = 0.0
    """What its board is held to, below `tdp_w`; 0 where nothing limits it."""
    least_tdp_w: float = 0.0
    """The least power that makers build it with, where that differs (laptops, superchips that share
    theirs with the processor); else 0."""
    gpu_link: GpuLink | None = None
    nvidia_smi_bytes: int | None = None
    tensor_hz: float = 0.0
    unified_memory: bool = False
    launched: str = ""
    aliases: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()

    def dense_flops_per_s(self, dtype: DType | str) -> float:
        """Dense FLOP/s of matrix multiplication in a format, or in the one torch computes in where
        the hardware lacks it."""
        key = str(dtype)
        key = _DTYPE_KEYS.get(key, key)
        rates = dict(self.dense_flops)
        for candidate in (key, *_COMPUTED_AS.get(key, ())):
            if candidate in rates:
                return rates[candidate]
        raise InputError(
            f"{self.name} has no known rate for {key}; it has {', '.join(rates) or 'none'}; name a"
            " GPU with --gpu"
        )

    def supports(self, dtype: DType | str) -> bool:
        """Whether the matrix units take this format themselves."""
        key = str(dtype)
        return _DTYPE_KEYS.get(key, key) in dict(self.dense_flops)

    @property
    def watts(self) -> float:
        """What its board may take."""
        return self.power_limit_w or self.tdp_w

    @property
    def is_laptop(self) -> bool:
        """Whether it is sold inside a laptop only."""
        return "Laptop" in self.name

    @property
    def host(self) -> Host:
        """The machine around it: as given, else what such GPUs usually stand in."""
        if self.given_host is not None:
            return self.given_host
        usual = _DESKTOP if self.name.startswith(_DESKTOP_NAMES) else _SERVER
        return _OF_SUPERCHIP.get(self.name.partition("-")[0], usual)

    @property
    def is_hopper_or_later(self) -> bool:
        """Whether it is of the Hopper or a Blackwell generation."""
        return self.architecture in ("hopper", "blackwell")

    @property
    def context_bytes(self) -> int:
        """Device memory a training process holds outside torch's allocator, with lazy module
        loading."""
        if self.vendor == "cpu":
            return 0
        if self.vendor == "amd":
            return _HIP_CONTEXT_BYTES
        return self._bare_context_bytes + (
            _LOADED_KERNELS_BYTES_HOPPER if self.is_hopper_or_later else _LOADED_KERNELS_BYTES
        )

    @property
    def context_range(self) -> tuple[int, int]:
        """The least and most that published processes held there."""
        if self.vendor == "cpu":
            return 0, 0
        if self.vendor == "amd":
            return _HIP_CONTEXT_RANGE
        low, high = _LOADED_KERNELS_RANGE
        return self._bare_context_bytes + low, self._bare_context_bytes + high

    @property
    def cublas_workspace_bytes(self) -> int:
        """What torch allocates for cuBLAS (hipBLAS) per thread and stream that multiplies: forward
        and autograd's thread have one each.

        Through the caching allocator, so it counts as allocated. Source: torch 2.11+
        aten/src/ATen/cuda/CublasHandlePool.cpp parseChosenWorkspaceSize; before 2.8 only compute
        capability 9.0 had the larger one.
        """
        if self.vendor == "cpu":
            return 0
        if self.vendor == "amd":
            return (128 if self.compute_capability.startswith(("gfx94", "gfx95")) else 32) * MIB
        return 32 * MIB if self.is_hopper_or_later else 2 * 4096 * KIB + 8 * 16 * KIB

    @property
    def _bare_context_bytes(self) -> int:
        threads = self.num_sms * _THREADS_PER_SM.get(
            self.compute_capability, _DEFAULT_THREADS_PER_SM
        )
        return _CONTEXT_BASE_BYTES + threads * _CONTEXT_BYTES_PER_THREAD


class Display:
    """What else holds the GPU's memory: (typical bytes, least, most)."""

    NONE = (0, 0, 0)
    # A Linux desktop session: compositor, X or Wayland server, a browser. Not from one measurement:
    # look at nvidia-smi before training.
    LINUX_DESKTOP = (600 * MIB, 100 * MIB, 1536 * MIB)
    # Windows (WDDM): the desktop and what its memory manager keeps: 424 MiB on Windows 11
    # (llama.cpp issue 23999), 2.5 GiB under WSL2 on the same card, 3.2 GiB of 22 on Windows 10
    # (ollama issue 9167).
    WDDM = (1024 * MIB, 424 * MIB, 3277 * MIB)


class Hardware(Record):
    """One GPU and what else holds its memory.

    `memory_bytes` is what the device offers to all processes (a MIG slice, or the `--vram` given,
    where that differs from the GPU's); `display` is memory other programs hold: typical, least,
    most bytes; `lazy_modules` is false for CUDA before 11.7.
    """

    gpu: Gpu
    memory_bytes: int
    display: tuple[int, int, int] = Display.NONE
    lazy_modules: bool = True
    communicator_bytes: int = 0
    """What collectives' communicators hold on the device, outside torch's allocator."""

    def validate(self) -> None:
        """Raises InputError for a memory that is not positive."""
        if self.memory_bytes <= 0:
            raise InputError(
                f"memory_bytes={self.memory_bytes} must be positive; give the GPU's memory, e.g."
                " --vram 24GiB"
            )

    @property
    def context_bytes(self) -> int:
        """Device memory of the process outside torch's allocator."""
        return (
            self.gpu.context_bytes
            + (0 if self.lazy_modules else _EAGER_MODULES_BYTES)
            + self.communicator_bytes
        )

    @property
    def context_range(self) -> tuple[int, int]:
        """Least and most bytes that `context_bytes` may be."""
        low, high = (bound + self.communicator_bytes for bound in self.gpu.context_range)
        if self.lazy_modules:
            return low, high
        return low + _EAGER_MODULES_RANGE[0], high + _EAGER_MODULES_RANGE[1]

    @property
    def others_bytes(self) -> tuple[int, int, int]:
        """What other programs hold of the memory: display, and the host's share where memory is
        unified (typical, least, most)."""
        host = _UNIFIED_HOST_SHARE if self.gpu.unified_memory else Display.NONE
        return self.display[0] + host[0], self.display[1] + host[1], self.display[2] + host[2]

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can reserve: the device's memory less context, display and a
        unified host's share."""
        return max(0, self.memory_bytes - self.context_bytes - self.others_bytes[0])

    @property
    def usable_range(self) -> tuple[int, int]:
        """`usable_bytes` with everything else at its most and at its least."""
        low_context, high_context = self.context_range
        _, least, most = self.others_bytes
        return max(0, self.memory_bytes - high_context - most), max(
            0, self.memory_bytes - low_context - least
        )
