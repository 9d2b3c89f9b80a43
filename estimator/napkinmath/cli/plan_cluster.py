"""`estimate plan --gpus N`: the fastest meshes that fit, as a table or JSON."""

from __future__ import annotations

import json

from napkinmath.base import values
from napkinmath.base.command_line import flags
from napkinmath.base.errors import InputError
from napkinmath.base.units import GIB
from napkinmath.cli.prices import price_of
from napkinmath.inputs.asked import for_search
from napkinmath.inputs.hardware_options import calibration_on, cluster_of, machines
from napkinmath.inputs.option_table import MACHINE_KEYS
from napkinmath.inputs.several import several
from napkinmath.report.columns import fitted, terminal_columns
from napkinmath.report.formats import Answer, Sheet
from napkinmath.report.plan_table import (
    print_advice,
    rate,
    run_line,
    speed_heads,
    without_context,
)
from napkinmath.report.screen import wrap
from napkinmath.timing.efficiency import default_efficiency

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.config.cluster import Cluster
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.planning.cluster_rows import ClusterCandidate

_OF_THE_MESH = ("gpus", "data_parallel", "tp", "pp", "cp", "ep", "etp", "pp_schedule")


def plan_on_cluster(
    spec: ModelSpec,
    options: dict[str, object],
    own: Mapping[str, Any],
    notes: list[str],
    tokens: float,
    *,
    allocator: str,
) -> int:
    """Plans for --goal tokens/s or cheapest, which are the same on one kind of GPU; returns 0 where
    something fits, else 1."""
    from napkinmath.planning.plan_cluster import plan_cluster

    if own["goal"] not in (None, "tokens/s", "cheapest"):
        raise InputError(
            f"--goal {own['goal']} is searched on one GPU; on several use tokens/s or cheapest"
        )
    machine = {key: options.pop(key) for key in MACHINE_KEYS if key in options}
    machine = {
        key: value if key == "gpu" else values.listed(value)[0] for key, value in machine.items()
    }
    beside = {key: value for key, value in machine.items() if key not in ("gpu", "gpus")}
    if allocator:
        beside["allocator"] = allocator
    hardware = machines(machine)[0]
    cluster: Any = cluster_of(hardware, machine)
    if hardware is None or not hardware.gpu.dense_flops:
        raise InputError("meshes are ranked by speed; name a GPU with --gpus NxTYPE")
    calibration = calibration_on(hardware, machine, notes)
    speed = (
        calibration.efficiency(hardware.gpu)
        if calibration is not None
        else default_efficiency(hardware.gpu)
    )
    spec, given = for_search(
        spec, {key: several(key, value) for key, value in options.items()}, notes
    )
    left_out, top = set[str](), values.count(own["top"] or 8, "--top", high=100)
    best = plan_cluster(
        spec,
        cluster,
        given,
        speed,
        top=top,
        allocator=allocator,
        calibration=calibration,
        left_out=left_out,
    )
    notes += sorted(left_out)
    price = price_of(hardware.gpu.name, own["price"] or [])
    if own["form"] is not None:
        rows = [_row(candidate, cluster, tokens, price) for candidate in best]
        made = lambda: json.dumps(rows, indent=1)  # noqa: E731
        sheets = lambda: [_sheet(spec, best, cluster, tokens, price)]  # noqa: E731
        print(own["form"].text(Answer(sheets=sheets, json=made)))
    else:
        _print(spec, cluster, best, tokens, price, beside)
    return 0 if best else 1


def _row(
    candidate: ClusterCandidate, cluster: Cluster, tokens: float, price: float | None
) -> dict[str, object]:
    """One row with its figures; tokens/s are those of all GPUs together."""
    from napkinmath.planning.cluster_rows import mesh_flags
    from napkinmath.planning.grid import figures

    found = figures(candidate.estimate)
    hours = tokens / found["tokens_per_s"] / 3600
    return {
        "options": dict(candidate.options),
        "mesh": mesh_flags(candidate, cluster.hardware.gpu.name),
        **found,
        "hours": hours,
        "price": None if price is None else hours * price * cluster.num_gpus,
    }


def _print(
    spec: ModelSpec,
    cluster: Cluster,
    best: list[ClusterCandidate],
    tokens: float,
    price: float | None,
    beside: Mapping[str, object],
) -> None:
    gpus = f"{cluster.num_gpus} x {cluster.hardware.gpu.name}"
    head = f"{spec.name} on {gpus}: the fastest meshes that fit"
    print("\n".join(wrap(head, terminal_columns())))
    if not best:
        print(
            "nothing fits: no mesh of these GPUs does, host memory included (--offload); not"
            " searched: more or larger GPUs, other models and formats, less context"
        )
        return
    sheet = _sheet(spec, best, cluster, tokens, price)
    print("\n".join(fitted(sheet, terminal_columns(), indent="  ")))
    print_advice(best[0].estimate)
    print(run_line(spec, f"{sheet.rows[0][-2]} {sheet.rows[0][-1]}", beside))


def _sheet(
    spec: ModelSpec,
    best: list[ClusterCandidate],
    cluster: Cluster,
    tokens: float,
    price: float | None,
) -> Sheet:
    heads = (
        "#",
        "bs",
        "GiB",
        "headroom",
        *speed_heads(spec, tokens),
        *(["money"] if price is not None else []),
        "mesh",
        "set",
    )
    rows: list[tuple[str, ...]] = []
    for number, candidate in enumerate(best, 1):
        row: dict[str, Any] = _row(candidate, cluster, tokens, price)
        options = {
            key: value
            for key, value in without_context(spec, row["options"]).items()
            if key not in _OF_THE_MESH
        }
        rows.append(
            (
                str(number),
                str(row["options"]["bs"]),
                f"{row['device_bytes'] / GIB:.1f}",
                f"{row['headroom_bytes'] / GIB:+.1f}",
                rate(spec, row["options"], row["tokens_per_s"]),
                f"{row['hours']:,.2f}",
                *([f"{row['price']:,.2f}"] if price is not None else []),
                row["mesh"],
                flags({"method": "full", **options}),
            )
        )
    return Sheet(heads=heads, rows=tuple(rows), right=heads[:-2])
