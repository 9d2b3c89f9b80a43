"""Cluster: equal nodes of equal GPUs, the links within and between nodes, and host memory."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.base.units import GIB
from napkinmath.config.hardware import GpuLink, Hardware, HostLink


class NetworkLink(Record):
    """The way between nodes: the rate of one GPU's share of the adapters, one direction."""

    kind: str
    gbit_per_s_per_gpu: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second for one GPU."""
        return self.gbit_per_s_per_gpu * 1e9 / 8

    def validate(self) -> None:
        """Raises InputError for a network without speed."""
        if self.gbit_per_s_per_gpu <= 0:
            raise InputError(
                f"a network of {self.gbit_per_s_per_gpu:g} Gbit/s carries nothing; give e.g. 400"
            )


class Cluster(Record):
    """`num_nodes` machines with `gpus_per_node` GPUs each; `host_bytes` is the memory of one
    machine, 0 where it is not known."""

    hardware: Hardware
    gpus_per_node: int = 1
    num_nodes: int = 1
    network: NetworkLink | None = None
    """Between nodes; None where there is one node, or nothing is known."""
    host_bytes: int = 0

    def validate(self) -> None:
        """Raises InputError for a cluster without a GPU or with negative memory."""
        if self.gpus_per_node < 1 or self.num_nodes < 1:
            raise InputError(
                f"a cluster of {self.num_nodes} nodes with {self.gpus_per_node} GPUs has no GPU;"
                " use 1 or more of both"
            )
        if self.host_bytes < 0:
            raise InputError(
                f"host_bytes={self.host_bytes} is negative; give the memory of one node, e.g."
                f" {1024 * GIB}"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.gpus_per_node * self.num_nodes

    @property
    def linked_gpus(self) -> int:
        """GPUs that reach each other without the network: those of a node, or of several where
        switches join their links."""
        link = self.hardware.gpu.gpu_link
        return max(self.gpus_per_node, link.domain if link is not None else 0)

    @property
    def link(self) -> GpuLink | HostLink:
        """Between the GPUs of a node: their own link, or PCI Express."""
        return self.hardware.gpu.gpu_link or self.hardware.gpu.host_link
