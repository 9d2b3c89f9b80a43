"""Measured collectives and experts of a folder of tables, priced by the rules.

`nccl.csv` has the columns of ai-dynamo/aiconfigurator's collector: nccl-tests' out-of-place time of a
message of `elements_or_bytes` elements. Only 16-bit messages are scored, since the switch sums no
int8. `moe.csv` has vLLM's fused experts: both products, the activation between and the sum over a
token's choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any, cast

import numpy as np
import pandas as pd
from napkinmath.catalog import links
from napkinmath.catalog.gpus import find_gpu
from napkinmath.config.cluster import Cluster
from napkinmath.config.hardware import Hardware
from napkinmath.timing import attainable
from napkinmath.timing.collectives import collective_s, fabric
from napkinmath.timing.efficiency import elementwise_s, gemm_s

Table = pd.DataFrame
KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
}
# Nemotron's experts have no gate (squared ReLU); its hidden size is no other model's of the table.
UNGATED_HIDDEN = 2688
# Rows of one expert from which its products, and not its weights' traffic, take the time.
LEAST_ROWS = 256


def collectives(table: Table) -> Table:
    """Rows of 16-bit messages with predicted `seconds`."""
    table = table.loc[table.nccl_dtype == "half"]
    parts = []
    for key, rows in table.groupby(["gpu", "num_gpus", "op_name"]):
        gpu, ranks, name = cast("tuple[str, int, str]", key)
        cluster = Cluster(hardware=Hardware(gpu=find_gpu(gpu), memory_bytes=1), gpus_per_node=8)
        nbytes = 2 * rows.elements_or_bytes.to_numpy(float)
        seconds = collective_s(KINDS[name], nbytes, fabric(cluster, int(ranks)))
        parts.append(rows.assign(seconds=seconds))
    return pd.concat(parts).assign(kind="collectives", framework="nccl", flop=0.0, peak=1.0)


def experts(table: Table, least_rows: int = LEAST_ROWS) -> Table:
    """Rows with at least so many rows an expert, with `flop` and predicted `seconds`."""
    table = table.loc[table.num_tokens * table.topk >= least_rows * table.num_experts]
    parts = []
    for key, rows in table.groupby(["gpu", table.distribution == "balanced"]):
        name, even = cast("tuple[str, bool]", key)
        gpu = find_gpu(name)
        tokens, hidden, inner, choices, count = (
            rows[column].to_numpy(float)
            for column in ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
        )
        joined = np.where(hidden == UNGATED_HIDDEN, 1.0, 2.0)
        each = tokens * choices / count
        # where routing is even no tile is half empty, as none is in the gradient of the weights
        kind = "weights" if even else "rows"
        each = np.ceil(each) if even else each
        seconds = sum(
            gemm_s(each, n, k, "bf16", gpu, batch=count, routed=kind)
            for n, k in ((joined * inner, hidden), (hidden, inner))
        )
        moved = 2 * tokens * (choices * (1 + joined) * inner + (choices + 1) * hidden)
        seconds = seconds + elementwise_s(moved, gpu, launches=2, fused=True)
        flop = 2 * tokens * choices * hidden * inner * (1 + joined)
        parts.append(rows.assign(flop=flop, seconds=seconds, peak=gpu.dense_flops_per_s("bf16")))
    return pd.concat(parts).assign(kind="experts")


def collectives_left_out(table: Table) -> list[dict[str, Any]]:
    """The error of each GPU that has links, priced by those of the other generations where no other
    GPU of the table has its generation. What all GPUs share stays."""
    names = [name for name in table.gpu.unique() if find_gpu(name).gpu_link is not None]
    lines = []
    for name in names:
        others = [other for other in names if other != name]
        with _links_without(name, others):
            rows = collectives(table.loc[table.gpu == name])
        lines.append({"gpu": name, **_error(rows)})
    return lines


def experts_left_out(table: Table) -> list[dict[str, Any]]:
    """The error of each GPU whose experts are slower than dense products, with the share that the
    best versions of the others have where routing is even."""
    shares = {}
    for name, rows in experts(table).groupby("gpu"):
        even = rows[rows.distribution == "balanced"]
        ratio = (even.seconds / (even.latency_ms / 1e3)).groupby(even.version).median()
        if len(ratio) and _is_hungry(str(name)):
            shares[str(name)] = attainable._EXPERTS_SHARE * ratio.max()
    lines, kept = [], attainable._EXPERTS_SHARE
    for name in shares:
        attainable._EXPERTS_SHARE = fmean(shares[other] for other in shares if other != name)
        rows = experts(table.loc[table.gpu == name])
        attainable._EXPERTS_SHARE = kept
        best = min((_error(own) for _, own in rows.groupby("version")), key=lambda e: e["median"])
        lines.append({"gpu": name, **best})
    return lines


def _is_hungry(name: str) -> bool:
    return attainable.experts_share(find_gpu(name), "bf16") < 1


def _error(rows: Table) -> dict[str, Any]:
    error = (rows.seconds / (rows.latency_ms / 1e3) - 1).abs() * 100
    return {
        "rows": len(rows),
        "median": round(error.median(), 2),
        "p90": round(error.quantile(0.9), 2),
    }


@contextmanager
def _links_without(name: str, others: list[str]) -> Iterator[None]:
    """The catalog of links without what a GPU's own generation shows, unless another GPU shows it."""
    link = find_gpu(name).gpu_link
    found = {(o.gpu_link.kind, o.gpu_link.generation) for o in map(find_gpu, others) if o.gpu_link}
    rows = links._table()["gpu_links"]
    own = next(
        r for r in rows if link and (r["kind"], r["generation"]) == (link.kind, link.generation)
    )
    kept = dict(own)
    if (own["kind"], own["generation"]) not in found:
        shown = [r for r in rows if (r["kind"], r["generation"]) in found]
        for field in ("share", "hop_us"):
            own[field] = fmean(row[field] for row in shown)
    try:
        yield
    finally:
        own.update(kept)
