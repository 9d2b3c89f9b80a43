"""`estimate links --gpus NxTYPE`: what collectives take on these GPUs, by message size."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.cli.flag_rows import DEBUG, ON, REPEAT, TEXT
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napkinmath.config.cluster import Cluster

_PARSER = Parser(
    "estimate links",
    "Time and bus bandwidth of collectives by message size, as nccl-tests define them. Without"
    " --gpus: the catalog of networks.",
    (
        (
            "hardware",
            (
                (("--gpus",), TEXT, "NxTYPE", "GPUs in all, e.g. 16xH100"),
                (("--nodes",), TEXT, "N", "machines they are in [as few as take 8 each]"),
                (
                    ("--network",),
                    TEXT,
                    "NAME",
                    (
                        "link between nodes: 400 (Gbit/s per GPU), ib-ndr, roce:200, 4xib-hdr [what"
                        " such nodes usually have]"
                    ),
                ),
            ),
        ),
        (
            "messages",
            (
                (
                    ("--collective",),
                    REPEAT,
                    "NAME",
                    (
                        "all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all,"
                        " send [the first three and all-to-all]"
                    ),
                ),
                (("--ranks",), TEXT, "N", "ranks of a group [all]"),
                (("--stride",), TEXT, "N", "GPUs from one rank of the group to the next [1]"),
                (("--from",), TEXT, "SIZE", "smallest message [1KiB]"),
                (("--to",), TEXT, "SIZE", "largest message [4GiB]"),
            ),
        ),
        (
            "output",
            (
                (("--json",), ON, "", "the table as JSON, with sources"),
                (
                    ("--plot",),
                    TEXT,
                    "FILE",
                    "draw time and bus bandwidth by message size (.svg, or .png with matplotlib)",
                ),
                (("--force",), ON, "", "replace a file that is there"),
                DEBUG,
            ),
        ),
    ),
)
_SHOWN = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def run(argv: Sequence[str]) -> int:
    """Prints the table, and writes the plot that is asked for."""
    options = _PARSER.parse(argv)
    if "gpus" not in options:
        return _list_networks(options)
    from napkinmath.base import values
    from napkinmath.report.links import link_table, print_links
    from napkinmath.timing.collectives import KINDS, fabric

    cluster = _cluster(options)
    ranks = values.count(options["ranks"], "--ranks") if "ranks" in options else cluster.num_gpus
    stride = values.count(options["stride"], "--stride") if "stride" in options else 1
    kinds = [str(kind) for kind in values.listed(options.get("collective", _SHOWN))]
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(
                f"--collective {shown(kind)} is unknown; use one of {', '.join(KINDS)}"
            )
    table = link_table(cluster, fabric(cluster, ranks, stride), kinds, _sizes(options))
    if "plot" in options:
        from napkinmath.report.links_plot import write_link_plot

        write_link_plot(table, str(options["plot"]), force="force" in options)
    print_links(table, as_json="json" in options)
    return 0


def _cluster(options: Mapping[str, object]) -> Cluster:
    from napkinmath.config.cluster import Cluster
    from napkinmath.inputs.hardware_options import cluster_of, machines

    machine = machines(options)[0]
    if machine is None:
        raise InputError(f"--gpus {shown(options['gpus'])} names no GPU; write e.g. --gpus 8xH100")
    found = cluster_of(machine, options)
    if not isinstance(found, Cluster):
        raise InputError(
            f"--gpus {shown(options['gpus'])}: one GPU has no one to talk to; give 2 or more"
        )
    return found


def _sizes(options: Mapping[str, object]) -> list[int]:
    """Powers of four from the smallest to the largest message."""
    from napkinmath.base.units import GIB, KIB, parse_bytes

    first = parse_bytes(str(options["from"]), what="--from") if "from" in options else KIB
    last = parse_bytes(str(options["to"]), what="--to") if "to" in options else 4 * GIB
    if first > last:
        raise InputError(
            f"--from {shown(options.get('from', '1KiB'))} is above --to; make it smaller"
        )
    sizes: list[int] = []
    while first < last:
        sizes.append(first)
        first *= 4
    return [*sizes, last]


def _list_networks(options: Mapping[str, object]) -> int:
    for key in ("plot", "nodes", "network", "ranks", "stride", "collective"):
        if key in options:
            raise InputError(
                f"--{key} {shown(options[key])} says nothing without GPUs; add --gpus, e.g. --gpus"
                " 8xH100"
            )
    from napkinmath.catalog.links import load_networks

    if "json" in options:
        import json

        print(
            json.dumps(
                [
                    {
                        "name": n.name,
                        "aliases": list(n.aliases),
                        "gbit_per_s": n.gbit_per_s,
                        "share": n.attained.share,
                        "hop_s": n.attained.hop_s,
                        "sources": list(n.attained.sources),
                    }
                    for n in load_networks()
                ],
                indent=1,
            )
        )
        return 0
    from napkinmath.report.columns import print_sheet
    from napkinmath.report.formats import Sheet

    heads = ("name", "Gbit/s a port", "GB/s attained", "hop, us", "also known as")
    rows = tuple(
        (
            n.name,
            f"{n.gbit_per_s:g}",
            f"{n.gbit_per_s / 8 * n.attained.share:.3g}",
            f"{n.attained.hop_s * 1e6:g}",
            ", ".join(n.aliases),
        )
        for n in load_networks()
    )
    print_sheet(Sheet(heads=heads, rows=rows, right=heads[1:-1]))
    return 0
