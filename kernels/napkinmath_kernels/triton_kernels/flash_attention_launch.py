"""Tiles of the FlashAttention kernels for each architecture and head size, their launches, and what
the compile gate holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..backend import capability_of, is_interpreted
from ..layouts import empty_token_major
from .flash_attention import _flash_backward_dkdv, _flash_backward_dq, _flash_delta, _flash_forward
from .launch import ALL_ARCHITECTURES, Shipped, launch


@dataclass(frozen=True)
class Tile:
    """Queries and keys a program takes at a time, its warps and its pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


Tiles = dict[int, dict[int, Tile]]

# : GeForce and workstation GPUs: 99 KiB of shared memory a block, also where their number is above
# a data centre's.
SMALL = (86, 89, 120)
# : The largest tiles that compiled without spills under triton 3.6 and 3.9, by head size and
# architecture; the compile gate holds them
#: to it. Head size 96 is padded to 128 and shares its tiles.
FORWARD = {
    64: {100: Tile(64, 64, 8, 3)} | dict.fromkeys((80, 90, *SMALL), Tile(128, 64, 8, 3)),
    128: (
        dict.fromkeys((80, 90, 100), Tile(128, 64, 8, 3))
        | dict.fromkeys(SMALL, Tile(128, 64, 8, 2))
    ),
    256: (
        {90: Tile(128, 32, 8, 2), 100: Tile(64, 64, 8, 2)}
        | dict.fromkeys((80, *SMALL), Tile(64, 32, 8, 2))
    ),
}
BACKWARD_DKDV = {
    64: (
        {90: Tile(64, 128, 8, 2), 100: Tile(64, 64, 8, 2)}
        | dict.fromkeys((80, *SMALL), Tile(32, 64, 4, 2))
    ),
    128: (
        {80: Tile(64, 64, 8, 2), 90: Tile(32, 128, 8, 2)}
        | dict.fromkeys((100, *SMALL), Tile(32, 64, 8, 2))
    ),
    256: dict.fromkeys(ALL_ARCHITECTURES, Tile(32, 32, 8, 1)),
}
BACKWARD_DQ = {
    64: dict.fromkeys(ALL_ARCHITECTURES, Tile(128, 64, 8, 2)),
    128: (
        {80: Tile(64, 64, 8, 2), 90: Tile(128, 64, 8, 2), 100: Tile(64, 64, 8, 2)}
        | dict.fromkeys(SMALL, Tile(64, 64, 8, 1))
    ),
    256: (
        dict.fromkeys((80, 100), Tile(64, 32, 8, 1))
        | dict.fromkeys((90, *SMALL), Tile(32, 32, 4, 1))
    ),
}
# : Windows and packing hold more bounds and offsets in registers: where the tile above spilled with
# them, they take this one.
BOUNDED_FORWARD = FORWARD | {
    64: FORWARD[64] | {100: Tile(64, 64, 8, 2)},
    128: FORWARD[128] | {80: Tile(64, 64, 8, 3)},
}
BOUNDED_DKDV = BACKWARD_DKDV | {
    64: (
        {90: Tile(64, 64, 8, 2), 100: Tile(32, 64, 4, 2), 120: Tile(32, 64, 8, 1)}
        | dict.fromkeys((80, 86, 89), Tile(16, 64, 4, 2))
    ),
    128: {80: Tile(32, 32, 8, 2)} | dict.fromkeys((90, 100, *SMALL), Tile(32, 64, 8, 2)),
}
BOUNDED_DQ = BACKWARD_DQ | {
    64: dict.fromkeys(ALL_ARCHITECTURES, Tile(64, 64, 8, 2)),
    128: BACKWARD_DQ[128] | {80: Tile(64, 64, 8, 1), 90: Tile(64, 64, 8, 2)},
}
#: A window is three loops over the keys: masked at both of its edges, and not between them.
WINDOWED_FORWARD = BOUNDED_FORWARD | {
    128: BOUNDED_FORWARD[128] | dict.fromkeys(SMALL, Tile(128, 32, 8, 3))
}
PACKED_WINDOWED_FORWARD = WINDOWED_FORWARD | {
    256: WINDOWED_FORWARD[256] | {90: Tile(128, 32, 8, 1)}
}
#: Small enough that a test's short sequences still span several blocks of both kinds.
INTERPRETED = Tile(32, 16, 4, 1)


def forward_tiles(packed: bool, window: bool) -> Tiles:
    """The forward's tiles for what a call has."""
    if window:
        return PACKED_WINDOWED_FORWARD if packed else WINDOWED_FORWARD
    return BOUNDED_FORWARD if packed else FORWARD


def dkdv_tiles(packed: bool, window: bool) -> Tiles:
    """The tiles of the gradients of keys and values."""
    return BOUNDED_DKDV if packed or window else BACKWARD_DKDV


def dq_tiles(packed: bool, window: bool) -> Tiles:
    """The tiles of the queries' gradient."""
    return BOUNDED_DQ if packed or window else BACKWARD_DQ


def _delta_rows(size: int) -> int:
    """Rows a program of `_flash_delta` takes: 64 of 256 values would spill."""
    return 64 if padded_size(size) <= 128 else 32


def padded_size(size: int) -> int:
    """Head size as the tiles hold it: a power of two."""
    return triton.next_power_of_2(size)


def _fitting(table: Tiles, size: int, architecture: int) -> Tile:
    """The tile for a head size on a GPU: its architecture's, or that of the newest one before
    it."""
    by_architecture = table[padded_size(size)]
    return by_architecture[max(known for known in by_architecture if known <= architecture)]


def _tile(table: Tiles, q: torch.Tensor) -> Tile:
    if is_interpreted():
        return INTERPRETED
    major, minor = capability_of(q)
    return _fitting(table, q.shape[3], 10 * major + minor)


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _switches(
    q: torch.Tensor, k: torch.Tensor, causal: bool, window: int, packed: bool
) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "CAUSAL": causal,
        "WINDOWED": window > 0,
        "VARLEN": packed,
        "PRECISION": "ieee",  # of fp32 dots, which only the interpreter meets
        "SIZE": q.shape[3],
        "BLOCK_D": padded_size(q.shape[3]),
    }


def _batches(q: torch.Tensor, cu_q: torch.Tensor | None) -> int:
    return q.shape[0] if cu_q is None else cu_q.numel() - 1


def _strides(*tensors: torch.Tensor, packed: bool) -> list[int]:
    """Batch, head and token strides of each; packed sequences are found by their first row, not by
    a batch stride."""
    return [
        stride
        for x in tensors
        for stride in (0 if packed else x.stride(0), x.stride(1), x.stride(2))
    ]


def _results(*like: torch.Tensor, packed: bool) -> list[torch.Tensor]:
    """Where a kernel writes: zeros for packed sequences, since padding after the last one is
    written by nobody."""
    return [empty_token_major(x).zero_() if packed else empty_token_major(x) for x in like]


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, log-sum-exp)."""
    q, k, v = _packed(q), _packed(k), _packed(v)
    packed = cu_q is not None
    (o,) = _results(q, packed=packed)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if packed:
        lse.fill_(float("-inf"))
    tile = _tile(forward_tiles(packed, window > 0), q)
    launch(
        _flash_forward,
        (triton.cdiv(max_q, tile.queries), q.shape[1], _batches(q, cu_q)),
        q,
        k,
        v,
        o,
        lse,
        lse if cu_q is None else cu_q,
        lse if cu_k is None else cu_k,
        *_strides(q, k, v, o, packed=packed),
        0 if packed else lse.stride(0),
        lse.stride(1),
        max_q,
        max_k,
        scale,
        window,
        **_switches(q, k, causal, window, packed),
        POSITIVE=scale > 0,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return o, lse


def _delta(
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    max_q: int,
) -> torch.Tensor:
    delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    packed = cu_q is not None
    rows = _delta_rows(o.shape[3])
    launch(
        _flash_delta,
        (triton.cdiv(max_q, rows), o.shape[1], _batches(o, cu_q)),
        o,
        do,
        lse if dlse is None else dlse.contiguous(),
        delta,
        lse if cu_q is None else cu_q,
        *_strides(o, do, packed=packed),
        0 if packed else lse.stride(0),
        lse.stride(1),
        max_q,
        HAS_DLSE=dlse is not None,
        VARLEN=packed,
        SIZE=o.shape[3],
        BLOCK_M=rows,
        BLOCK_D=padded_size(o.shape[3]),
        num_warps=4,
        num_stages=1,
    )
    return delta


def flash_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv)."""
    q, k, v, o, do = _packed(q), _packed(k), _packed(v), _packed(o), _packed(do)
    lse = lse.contiguous()
    delta = _delta(o, do, lse, dlse, cu_q, max_q)
    packed = cu_q is not None
    dq, dk, dv = _results(q, k, v, packed=packed)
    bounds = (lse if cu_q is None else cu_q, lse if cu_k is None else cu_k)
    statistics = (0 if packed else lse.stride(0), lse.stride(1))
    switches = _switches(q, k, causal, window, packed)
    sizes = (max_q, max_k, scale, window)
    tile = _tile(dkdv_tiles(packed, window > 0), q)
    launch(
        _flash_backward_dkdv,
        (triton.cdiv(max_k, tile.keys), k.shape[1], _batches(q, cu_q)),
        *(
            q,
            k,
            v,
            do,
            lse,
            delta,
            dk,
            dv,
            *bounds,
            *_strides(q, k, v, do, dk, packed=packed),
            *statistics,
            *sizes,
        ),
        **switches,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    tile = _tile(dq_tiles(packed, window > 0), q)
    launch(
        _flash_backward_dq,
        (triton.cdiv(max_q, tile.queries), q.shape[1], _batches(q, cu_q)),
        *(
            q,
            k,
            v,
            do,
            lse,
            delta,
            dq,
            *bounds,
            *_strides(q, k, v, do, dq, packed=packed),
            *statistics,
            *sizes,
        ),
        **switches,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return dq, dk, dv


#: (causal, window, packed): what the layers of language models come in.
VARIANTS = {
    "full": (False, False, False),
    "causal": (True, False, False),
    "window": (True, True, False),
    "packed": (True, False, True),
    "packed window": (True, True, True),
}
TYPES = {
    "lse_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "dlse_ptr": "*fp32",
    "cu_queries_ptr": "*i32",
    "cu_keys_ptr": "*i32",
    "scale": "fp32",
}


def _shipped(
    name: str,
    kernel: Any,
    tiles: Callable[[bool, bool], Tiles],
    size: int,
    variant: str,
    half: bool = False,
) -> list[Shipped]:
    causal, windowed, packed = VARIANTS[variant]
    halves = {
        argument: "*fp16" for argument in kernel.arg_names if argument.endswith("_ptr") and half
    }
    types = halves | {
        argument: kind for argument, kind in TYPES.items() if argument in kernel.arg_names
    }
    by_tile: dict[Tile, list[int]] = {}
    for architecture in ALL_ARCHITECTURES:
        by_tile.setdefault(_fitting(tiles(packed, windowed), size, architecture), []).append(
            architecture
        )
    switches = {"GROUP": 4, "CAUSAL": causal, "WINDOWED": windowed, "VARLEN": packed}
    switches |= {"PRECISION": "ieee", "SIZE": size} | (
        {"POSITIVE": True} if "POSITIVE" in kernel.arg_names else {}
    )
    return [
        Shipped(
            f"{name} d={size} {variant}{' fp16' if half else ''}",
            kernel,
            {
                **switches,
                "BLOCK_M": tile.queries,
                "BLOCK_N": tile.keys,
                "BLOCK_D": padded_size(size),
            },
            tile.warps,
            tile.stages,
            types=types,
            architectures=tuple(architectures),
            has_dot=True,
        )
        for tile, architectures in by_tile.items()
    ]


def shipped() -> list[Shipped]:
    """Every head size and variant with the tile that each architecture gets, in bf16; causal
    attention in fp16 too."""
    kernels = (
        ("flash_forward", _flash_forward, forward_tiles),
        ("flash_backward_dkdv", _flash_backward_dkdv, dkdv_tiles),
        ("flash_backward_dq", _flash_backward_dq, dq_tiles),
    )
    found = [
        config
        for name, kernel, tiles in kernels
        for size in (64, 96, 128, 256)
        for variant in VARIANTS
        if size != 96 or variant != "packed window"  # 96 takes the tiles of 128
        for config in _shipped(name, kernel, tiles, size, variant)
    ]
    for name, kernel, tiles in kernels:
        for size in (64, 128, 256):
            found += _shipped(name, kernel, tiles, size, "causal", half=True)
    types = {
        argument: kind for argument, kind in TYPES.items() if argument in _flash_delta.arg_names
    }
    for size in (64, 128, 256):
        switches = {
            "HAS_DLSE": size == 64,
            "VARLEN": size == 64,
            "SIZE": size,
            "BLOCK_M": _delta_rows(size),
            "BLOCK_D": size,
        }
        found.append(
            Shipped(
                f"flash_delta d={size}",
                _flash_delta,
                switches,
                4,
                1,
                types=types,
                has_wide_stores=False,
            )
        )
    return found
