"""How much memory a device has left."""

from __future__ import annotations

import os

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be taken: of the GPU, or of the host's memory without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
