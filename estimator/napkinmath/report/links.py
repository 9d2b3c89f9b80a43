"""The table of `estimate links`: seconds and bus bandwidth of each collective by message size, and
what the links are."""

from __future__ import annotations

import json

from napkinmath.base.record import Record
from napkinmath.report.columns import folded, print_sheet, terminal_columns
from napkinmath.report.formats import Sheet
from napkinmath.timing.collectives import (
    Fabric,
    algorithms,
    bus_factor,
    is_linked,
    network_of,
    sources,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.config.cluster import Cluster


class Message(Record):
    """One message: its collective, bytes, fastest algorithm, seconds, and bus bandwidth in
    bytes/s."""

    kind: str
    nbytes: int
    algorithm: str
    seconds: float
    bus_bytes_per_s: float


class LinkTable(Record):
    """Messages of one group on one cluster."""

    cluster: Cluster
    group: Fabric
    messages: tuple[Message, ...]


def link_table(
    cluster: Cluster, group: Fabric, kinds: Sequence[str], sizes: Sequence[int]
) -> LinkTable:
    """Prices every message."""
    return LinkTable(
        cluster=cluster,
        group=group,
        messages=tuple(_message(kind, size, group) for kind in kinds for size in sizes),
    )


def _message(kind: str, nbytes: int, group: Fabric) -> Message:
    name, seconds = min(algorithms(kind, nbytes, group).items(), key=lambda item: item[1])
    bus = nbytes / seconds * bus_factor(kind, group.ranks) if seconds else 0.0
    return Message(kind=kind, nbytes=nbytes, algorithm=name, seconds=seconds, bus_bytes_per_s=bus)


def print_links(table: LinkTable, *, as_json: bool) -> None:
    """Prints the table as text or JSON."""
    if as_json:
        print(json.dumps(_plain(table), indent=1))
        return
    for line in described(table):
        print(folded(line, terminal_columns(), indent="  "))
    heads = ("collective", "message KiB", "time us", "bus GB/s", "algorithm")
    rows = tuple(
        (
            m.kind,
            f"{m.nbytes / 1024:,.0f}",
            f"{1e6 * m.seconds:,.1f}",
            f"{m.bus_bytes_per_s / 1e9:.4g}",
            m.algorithm,
        )
        for m in table.messages
    )
    print_sheet(Sheet(heads=heads, rows=rows, right=heads[1:4]))


def described(table: LinkTable) -> list[str]:
    """What the group and its links are, one line each."""
    cluster, group = table.cluster, table.group
    gpu = cluster.hardware.gpu
    lines = [
        f"{group.ranks} ranks on {group.nodes} node{'s' if group.nodes > 1 else ''} of"
        f" {cluster.gpus_per_node} x {gpu.name}"
    ]
    link, linked = gpu.gpu_link, is_linked(cluster, group)
    way = (
        f"{link.kind} {link.generation}, {link.gb_per_s_per_direction:g} GB/s"
        if link is not None and linked
        else (
            f"{gpu.host_link.kind} {gpu.host_link.generation} x{gpu.host_link.lanes},"
            f" {gpu.host_link.bytes_per_s / 1e9:.3g} GB/s"
        )
    )
    lines.append(
        f"within a node: {way} each way, {group.bus_bytes_per_s / 1e9:.3g} attained by a ring,"
        f" {group.hop_s * 1e6:.2g} us a hop"
    )
    if group.nodes > 1:
        network = network_of(cluster)
        assumed = "" if cluster.network is not None else " (assumed)"
        lines.append(
            f"between nodes: {network.kind}, {network.gbit_per_s_per_gpu:g} Gbit/s per"
            f" GPU{assumed}, {group.network_bytes_per_s / 1e9:.3g} GB/s attained by the group's"
            f" ranks of a node, {group.network_hop_s * 1e6:.2g} us a hop"
        )
    return lines


def _plain(table: LinkTable) -> dict[str, Any]:
    group = table.group
    return {
        "gpu": table.cluster.hardware.gpu.name,
        "ranks": group.ranks,
        "nodes": group.nodes,
        "bus_bytes_per_s": group.bus_bytes_per_s,
        "hop_s": group.hop_s,
        "network_bytes_per_s": group.network_bytes_per_s,
        "network_hop_s": group.network_hop_s,
        "sources": list(sources(table.cluster, group)),
        "messages": [dict(m.items()) for m in table.messages],
    }
