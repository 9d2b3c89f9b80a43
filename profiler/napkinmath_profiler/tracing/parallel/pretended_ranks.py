"""A process group of any size in one process: collectives return at once, tensors on meta have no
data to exchange."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended_ranks(world_size: int, *, rank: int = 0) -> Generator[None]:
    """torch's ``fake`` backend with ``world_size`` ranks, of which this process is ``rank``; meta
    counts as a device."""
    had_meta = hasattr(torch, "meta")
    if not had_meta:
        setattr(  # noqa: B010
            torch,
            "meta",
            SimpleNamespace(
                device_count=lambda: 1,
                is_initialized=lambda: True,
                current_device=lambda: 0,
                set_device=lambda _: None,
            ),
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    exchange = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda p2p_op_list: []  # knows no backend for meta
    try:
        yield
    finally:
        dist.batch_isend_irecv = exchange
        dist.destroy_process_group()
        if not had_meta:
            delattr(torch, "meta")


def meta_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """A device mesh of meta devices."""
    return init_device_mesh("meta", sizes, mesh_dim_names=names)


def meta_positions(length: int) -> torch.Tensor:
    """Position ids of one sequence, (1, s)."""
    return torch.empty((1, length), dtype=torch.int64, device="meta")
