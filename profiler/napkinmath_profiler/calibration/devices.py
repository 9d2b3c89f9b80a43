"""The device to measure: found by name or refused with what to do, its free memory, and what the
catalog knows about it."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch
from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.hardware import Gpu

from napkinmath_profiler.measuring.device_names import why_no_gpu

CPUINFO = "/proc/cpuinfo"
MEMINFO = "/proc/meminfo"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or the CPU: torch's handle and torch's name for it."""

    torch_device: torch.device
    name: str

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.torch_device.type == "cuda"

    @property
    def catalogued(self) -> Gpu | None:
        """The catalog's row, for a MIG slice its part; None for a CPU or a GPU that the catalog
        lacks."""
        if not self.is_cuda:
            return None
        try:
            return find_hardware(self.name).gpu
        except InputError:
            return None

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes; what other processes hold is not free."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.torch_device)
        fields = dict(line.split(":", 1) for line in _text(MEMINFO).splitlines() if ":" in line)
        total = int(fields.get("MemTotal", "0 kB").split()[0]) * 1024
        free = int(fields.get("MemAvailable", "0 kB").split()[0]) * 1024
        if not total:  # not Linux
            total = free = 4 << 30
        return free, total

    def synchronize(self) -> None:
        """Wait until it has done the work it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def release(self) -> None:
        """Give cached memory back."""
        if self.is_cuda:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def choose_device(text: str | None) -> Device:
    """The device of --device: 'cuda', 'cuda:N' or 'cpu'; the first GPU where nothing is said.
    InputError says what to do."""
    if text is not None and text.lower() == "cpu":
        return Device(torch.device("cpu"), cpu_name())
    kind, _, number = (text or "cuda").lower().partition(":")
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise InputError(f"--device {shown(text)} is unknown; write cuda, cuda:0 or cpu")
    if not torch.cuda.is_available():
        raise InputError(
            f"no GPU can be used: {why_no_gpu()}; to try the whole way out on the CPU, add"
            " --device cpu"
        )
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        there = "is one GPU" if count == 1 else f"are {count} GPUs"
        raise InputError(
            f"--device {shown(text)} does not exist: there {there}, cuda:0 to cuda:{count - 1}"
        )
    torch.cuda.set_device(index)
    return Device(torch.device("cuda", index), torch.cuda.get_device_name(index))


def cpu_name() -> str:
    """'CPU <model>, N threads': the number of threads is part of its speed."""
    models = [
        line.partition(":")[2].strip()
        for line in _text(CPUINFO).splitlines()
        if line.startswith("model name")
    ]
    model = models[0] if models else platform.processor() or platform.machine()
    return f"CPU {model}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
