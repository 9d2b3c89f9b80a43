"""The shape of what will be trained on: a batch, a shape, a data loader or a dataset, of which the longest sequence counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from napkinmath_profiler.tracing.trace_errors import TraceError

IDS = ("input_ids", "inputs_embeds", "input_values", "pixel_values")
MOST_ROWS = 200_000  # rows of a dataset that are looked at


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sequences of a micro-batch, and tokens of the longest and of a usual one."""

    micro_batch_size: int
    sequence_length: int
    usual_length: int = 0
    rows_seen: int = 0


def shape_of(batch: Any) -> BatchShape:
    """From a mapping with input_ids, a tensor (b, s), or the two numbers themselves."""
    if isinstance(batch, BatchShape):
        return batch
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in IDS if name in batch), None)
        if found is None:
            raise TraceError(
                f"the batch has none of {', '.join(IDS)} but {', '.join(map(str, batch))}; give batch=(batch_size, sequence_length)"
            )
        batch = found
    if isinstance(batch, torch.Tensor):
        batch = tuple(batch.shape[:2])
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(n, int) and n > 0 for n in batch):
        return BatchShape(batch[0], batch[1])
    raise TraceError(
        f"batch {str(batch)[:60]!r} is not a batch; give a mapping with input_ids, a tensor (b, s) or (batch_size, sequence_length)"
    )


def longest_of(dataset: Any, micro_batch_size: int, *, at_most: int = 0) -> BatchShape:
    """The longest and the median row of a dataset that is tokenized already; a batch is padded to its longest row.

    ``at_most``: the length to which the loop truncates, 0 for none. Iterable datasets are not read: their rows would be gone.
    """
    lengths = sorted(_lengths(dataset))
    if not lengths:
        raise TraceError("the dataset has no tokenized rows (input_ids or length); give batch=(batch_size, sequence_length)")
    limit = at_most or lengths[-1]
    return BatchShape(micro_batch_size, min(lengths[-1], limit), min(lengths[len(lengths) // 2], limit), len(lengths))


def _lengths(dataset: Any) -> Iterable[int]:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return []
    columns = getattr(dataset, "column_names", None) or ()
    for name in ("length", "lengths"):
        if name in columns:
            return [int(n) for n in dataset[name][:MOST_ROWS]]
    if "input_ids" in columns:
        return [len(row) for row in dataset["input_ids"][:MOST_ROWS]]
    rows = (dataset[i] for i in range(min(len(dataset), MOST_ROWS)))
    return [len(row["input_ids"]) for row in rows if isinstance(row, Mapping) and "input_ids" in row]
