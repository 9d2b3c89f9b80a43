"""The catalog of links: what large collectives attain of a link's rate, what a hop takes, and the
names of networks.

Rates of a GPU's own links are in gpus.json; here is what of them is left (links.json, each row with
its sources).
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.json_text import loads
from napkinmath.base.record import Record
from napkinmath.config.cluster import NetworkLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.config.hardware import Gpu

_tables: dict[str, Any] = {}


class Attained(Record):
    """What collectives get of a link: share of its rate for large messages, seconds of a hop, and
    the sources.

    `sharp_share` is the share where the switch itself sums (NVLink SHARP), from groups of
    `sharp_from` GPUs on; 0 where it does not.
    """

    share: float
    hop_s: float
    sources: tuple[str, ...]
    sharp_share: float = 0.0
    sharp_from: int = 0


class Network(Record):
    """A way between nodes: the rate of one port, and what is attained of it."""

    name: str
    aliases: tuple[str, ...]
    gbit_per_s: float
    attained: Attained


def load_networks() -> list[Network]:
    """Every network of the catalog, in the file's order."""
    return [_network(row) for row in _table()["networks"]]


def find_network(name: str) -> Network:
    """The network a name means; InputError names the nearest."""
    key = _key(name)
    for network in load_networks():
        if key in (_key(network.name), *(_key(alias) for alias in network.aliases)):
            return network
    known = [network.name for network in load_networks()]
    raise InputError(
        f"network {shown(name)} is unknown{suggest(name, known)}; use one of {', '.join(known)}, or"
        " Gbit/s per GPU"
    )


def network_named(text: str, gpus_per_node: int) -> NetworkLink:
    """The link that '400', 'ib-ndr', 'roce:200' (Gbit/s of one GPU) or '4x ib-hdr' (ports of one
    node) describes."""
    plain = text.strip().lower()
    ports, times, rest = plain.partition("x")
    if times and ports.strip().isdecimal():
        network = find_network(rest.strip())
        return NetworkLink(
            kind=network.name, gbit_per_s_per_gpu=int(ports) * network.gbit_per_s / gpus_per_node
        )
    name, colon, rate = plain.partition(":")
    if colon:
        return NetworkLink(kind=find_network(name).name, gbit_per_s_per_gpu=_rate(rate, text))
    if plain.replace(".", "", 1).isdecimal():
        return NetworkLink(
            kind="roce" if float(plain) >= 25 else "ethernet", gbit_per_s_per_gpu=_rate(plain, text)
        )
    network = find_network(plain)
    return NetworkLink(kind=network.name, gbit_per_s_per_gpu=network.gbit_per_s)


def default_network(gpu: Gpu) -> NetworkLink:
    """What nodes of this GPU usually have; Ethernet of 100 Gbit/s for eight where nothing is
    usual."""
    name = gpu.name.lower()
    for row in _table()["default_networks"]:
        if any(name.startswith(prefix) for prefix in row["gpus"]):
            return NetworkLink(kind=row["network"], gbit_per_s_per_gpu=row["gbit_per_s_per_gpu"])
    row = _table()["fallback_network"]
    return NetworkLink(kind=row["network"], gbit_per_s_per_gpu=row["gbit_per_s_per_gpu"])


def attained_on_network(kind: str) -> Attained:
    """What collectives get of a network's rate; a kind that is not in the catalog is taken for
    RoCE."""
    for row in _table()["networks"]:
        if row["name"] == kind:
            return _attained(row)
    return find_network("roce").attained


def attained_on_gpu_link(kind: str, generation: int) -> Attained:
    """What collectives get of a GPU's own links; generation 0 of a kind stands for those that are
    not listed."""
    rows: list[dict[str, Any]] = [row for row in _table()["gpu_links"] if row["kind"] == kind]
    for row in rows:
        if row["generation"] in (generation, 0):
            return _attained(row)
    return _attained(rows[-1] if rows else _table()["pcie"]["pair"])


def attained_on_pcie(*, ranks: int, through_host: bool) -> Attained:
    """What collectives get of PCI Express: a pair, more GPUs that share root complexes, or copies
    through host memory."""
    return _attained(
        _table()["pcie"]["through-host" if through_host else "pair" if ranks <= 2 else "shared"]
    )


def _table() -> dict[str, Any]:
    if not _tables:
        import os

        with open(os.path.join(os.path.dirname(__file__), "links.json"), encoding="utf-8") as file:
            _tables.update(loads(file.read()))
    return _tables


def _network(row: dict[str, Any]) -> Network:
    return Network(
        name=row["name"],
        aliases=tuple(row["aliases"]),
        gbit_per_s=row["gbit_per_s"],
        attained=_attained(row),
    )


def _attained(row: dict[str, Any]) -> Attained:
    sources = _table()["sources"]
    return Attained(
        share=row["share"],
        hop_s=row["hop_us"] * 1e-6,
        sources=tuple(sources[key] for key in row["sources"]),
        sharp_share=row.get("sharp_share", 0.0),
        sharp_from=row.get("sharp_from", 0),
    )


def _rate(text: str, whole: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1e5:
        raise InputError(
            f"network {shown(whole)} has no rate; write Gbit/s of one GPU, e.g. 400 or roce:200"
        )
    return rate


def _key(name: str) -> str:
    return "".join(c for c in name.lower().replace("infiniband", "ib") if c.isalnum())
