"""What the machine around the GPUs takes: the optimizer's arithmetic in host memory, and tensors on
NVMe. All ranks of a machine do the same at the same time, and share it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.hardware import Host
    from napkinmath.timing.efficiency import Seconds, Sizes

# Share of a machine's memory bandwidth that updates on the host reach. Three runs, each alone:
# torchtune's README (70B on eight A100, 20.9 s a step, about 12 of them on the GPUs) 0.3; DeepSpeed
# issue 6834 (72B on 4 x 8 A100, 10 s) 0.19; DeepSpeed pull request 7474 (3B on two A100, bound to
# cores) 0.2. The kernel by itself reaches 0.5 (arXiv 2101.06840 table 4, DGX-2).
_ATTAINED = 0.25
# What one core streams: torchrun gives every rank one (torch distributed/run.py OMP_NUM_THREADS).
_CORE_BYTES_PER_S = 10e9


def host_pass_s(touched: Sizes, one_core: bool, ranks: int, host: Host) -> Seconds:
    """Seconds until `ranks` of a machine have each read and written so many bytes of its memory."""
    ranks = host.ranks(ranks)
    rate = _ATTAINED * host.memory_bytes_per_s
    cores = ranks if one_core else host.cores
    return touched * ranks / min(rate, cores * _CORE_BYTES_PER_S)


def disk_s(read: Sizes, written: Sizes, ranks: int, host: Host) -> Seconds:
    """Seconds until `ranks` of a machine have each read and written so many bytes of its disks."""
    return ranks * (read / host.disk_read_bytes_per_s + written / host.disk_write_bytes_per_s)
