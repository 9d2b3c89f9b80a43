"""The shape of what will be trained on: a batch, a shape, a data loader or a dataset, of which the
longest sequence counts."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from napkinmath_profiler.tracing.trace_errors import TraceError

IDS = ("input_ids", "inputs_embeds", "input_values", "pixel_values")
LENGTHS = ("length", "lengths")
# TRL's tokenized preferences and completions: a prompt and the longest of what may follow it.
PROMPT, ANSWERS = "prompt_ids", ("chosen_ids", "rejected_ids", "completion_ids")
SECONDS_TO_READ = 0.4  # of a dataset's rows; what is not read by then is not known
ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sequences of a micro-batch, and tokens of the longest and of a usual one."""

    micro_batch_size: int
    sequence_length: int
    usual_length: int = 0
    rows_seen: int = 0
    num_rows: int = 0


def shape_of(batch: Any) -> BatchShape:
    """From a mapping with input_ids, a tensor (b, s), or the two numbers themselves."""
    if isinstance(batch, BatchShape):
        return batch
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in IDS if name in batch), None)
        if found is None:
            raise TraceError(
                f"the batch has none of {', '.join(IDS)} but {', '.join(map(str, batch))}; give"
                " batch=(batch_size, sequence_length)"
            )
        batch = found
    sizes: Any = tuple(batch.shape[:2]) if isinstance(batch, torch.Tensor) else batch
    if (
        isinstance(sizes, (tuple, list))
        and len(sizes) == 2
        and all(isinstance(n, int) and n > 0 for n in sizes)
    ):
        return BatchShape(sizes[0], sizes[1])
    raise TraceError(
        f"batch {str(batch)[:60]!r} is not a batch; give a mapping with input_ids, a tensor (b, s)"
        " or (batch_size, sequence_length)"
    )


def longest_of(dataset: Any, micro_batch_size: int, *, at_most: int = 0) -> BatchShape:
    """The longest and the median row of a dataset that is tokenized already; a batch is padded to
    its longest row.

    ``at_most``: the length to which the loop truncates, 0 for none. Rows are read for
    SECONDS_TO_READ, from all over the dataset. Iterable datasets are not read: their rows would be
    gone.
    """
    lengths = sorted(_lengths(dataset))
    if not lengths:
        raise TraceError(
            "the dataset has no tokenized rows (input_ids or length); give batch=(batch_size,"
            " sequence_length)"
        )
    limit = at_most or lengths[-1]
    return BatchShape(
        micro_batch_size,
        min(lengths[-1], limit),
        min(lengths[len(lengths) // 2], limit),
        len(lengths),
        len(dataset),
    )


def _lengths(dataset: Any) -> list[int]:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return []
    columns: set[str] = set(getattr(dataset, "column_names", None) or ())
    wanted = _columns(columns)
    by_table = bool(wanted) and hasattr(dataset, "with_format")
    if by_table:
        dataset = dataset.select_columns(wanted).with_format("arrow")
    until = time.perf_counter() + SECONDS_TO_READ
    found: list[int] = []
    for start in _all_over(len(dataset)):
        for i in (start,) if by_table else range(start, min(start + ROWS_AT_ONCE, len(dataset))):
            found += _of_table(dataset[i : i + ROWS_AT_ONCE]) if by_table else _of_row(dataset[i])
            if time.perf_counter() > until:
                return found
    return found


def _columns(columns: set[str]) -> list[str]:
    """The columns that say how long a row is, the cheapest first."""
    for names in (*((name,) for name in LENGTHS), ("input_ids",), (PROMPT, *ANSWERS)):
        present = [name for name in names if name in columns]
        if present:
            return present
    return []


def _all_over(num_rows: int) -> Iterator[int]:
    """Starts of pieces, neighbours far apart: by the golden ratio, which leaves the largest gap
    smallest whenever one stops. Each is made when asked for; no list of them all."""
    pieces = -(-num_rows // ROWS_AT_ONCE)
    if not pieces:
        return
    stride = max(1, round(pieces * 0.6180339887498949))
    while math.gcd(stride, pieces) != 1:  # coprime: every piece comes once
        stride += 1
    for turn in range(pieces):
        yield turn * stride % pieces * ROWS_AT_ONCE


def _of_table(table: Any) -> list[int]:
    """Lengths of the rows of an Arrow table, whose lists are never made."""
    compute: Any = importlib.import_module("pyarrow.compute")

    for name in LENGTHS:
        if name in table.column_names:
            return [int(n) for n in table[name].to_pylist()]
    of = {name: compute.list_value_length(table[name]).to_pylist() for name in table.column_names}
    if "input_ids" in of:
        return of["input_ids"]
    return [_pair({name: values[i] for name, values in of.items()}) for i in range(table.num_rows)]


def _of_row(row: Any) -> list[int]:
    if not isinstance(row, Mapping):
        return []
    if "input_ids" in row:
        return [len(row["input_ids"])]
    lengths = {name: len(row[name]) for name in (PROMPT, *ANSWERS) if name in row}
    return [_pair(lengths)] if lengths else []


def _pair(lengths: Mapping[str, int]) -> int:
    return lengths.get(PROMPT, 0) + max(
        (n for name, n in lengths.items() if name != PROMPT), default=0
    )
