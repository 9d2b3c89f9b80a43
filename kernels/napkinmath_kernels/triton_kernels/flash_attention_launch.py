"""Launches of the FlashAttention kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backend import capability_of, is_interpreted
from ..layouts import empty_token_major
from .flash_attention import _flash_forward
from .flash_attention_backward import _flash_backward_dkdv, _flash_backward_dq, _flash_delta
from .flash_attention_tiles import (
    INTERPRETED,
    Tile,
    Tiles,
    delta_rows,
    dkdv_tiles,
    dq_tiles,
    fitting,
    forward_tiles,
    padded_size,
)
from .launch import cdiv, launch, next_power_of_2
from .tile_choice import choose

if TYPE_CHECKING:
    from ..ops.flash_attention import FlashCall


def _candidates(table: Tiles, q: torch.Tensor) -> tuple[Tile, ...]:
    if is_interpreted():
        return INTERPRETED
    major, minor = capability_of(q)
    return fitting(table, q.shape[3], 10 * major + minor)


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def takes_descriptor(x: torch.Tensor) -> bool:
    """Whether the copy engine can read x: addresses and strides in steps of 16 bytes, no row twice
    (CUDA driver API, cuTensorMapEncodeTiled)."""
    item = x.element_size()
    return (
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(stride > 0 and stride * item % 16 == 0 for stride in x.stride()[:-1])
    )


def _descriptor(x: torch.Tensor, tile: Tile) -> TensorDescriptor:
    block = [1, 1, tile.keys, padded_size(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def _switches(q: torch.Tensor, k: torch.Tensor, call: FlashCall) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "CAUSAL": call.causal,
        "WINDOWED": call.window > 0,
        "VARLEN": call.cu_q is not None,
        "CAPPED": call.softcap > 0,
        "DROPOUT": call.dropout > 0,
        "PRECISION": "ieee",  # of fp32 dots, which only the interpreter meets
        "SIZE": q.shape[3],
        "BLOCK_D": padded_size(q.shape[3]),
    }


def _shape_of(name: str, q: torch.Tensor, k: torch.Tensor, call: FlashCall) -> str:
    """What a choice among tiles is remembered for: lengths to the next power of two, since between
    them the order of tiles seldom changes."""
    flags = ("causal",) * call.causal + ("window",) * (call.window > 0)
    flags += ("packed",) * (call.cu_q is not None) + ("capped",) * (call.softcap > 0)
    lengths = (next_power_of_2(max(1, n)) for n in (call.max_q, call.max_k))
    work = next_power_of_2(_batches(q, call.cu_q) * q.shape[1])
    return " ".join(
        (
            name,
            str(q.dtype).removeprefix("torch."),
            "x".join(map(str, (work, *lengths, q.shape[3]))),
            *flags,
        )
    )


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


def _numbers(call: FlashCall) -> tuple[Any, ...]:
    """The kernels' last arguments."""
    return (
        call.max_q,
        call.max_k,
        call.scale,
        call.window,
        call.softcap,
        round(call.dropout * 2**24),
        1.0 / (1.0 - call.dropout),
    )


def _options(tile: Tile) -> dict[str, int]:
    return {
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **tile.compiler_options(),
    }


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: FlashCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, log-sum-exp)."""
    q, k, v = _packed(q), _packed(k), _packed(v)
    packed = call.cu_q is not None
    (o,) = _results(q, packed=packed)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if packed:
        lse.fill_(float("-inf"))
    switches = _switches(q, k, call)

    def run(tile: Tile) -> None:
        launch(
            _flash_forward,
            (cdiv(call.max_q, tile.queries), q.shape[1], _batches(q, call.cu_q)),
            q,
            _descriptor(k, tile) if tile.tma else k,
            _descriptor(v, tile) if tile.tma else v,
            o,
            lse,
            *(lse if x is None else x for x in (call.cu_q, call.cu_k, call.sinks, call.seed)),
            *_strides(q, k, v, o, packed=packed),
            0 if packed else lse.stride(0),
            lse.stride(1),
            *_numbers(call),
            **switches,
            SINKS=call.sinks is not None,
            POSITIVE=call.scale > 0 and call.softcap == 0,
            TMA=tile.tma,
            **_options(tile),
        )

    tiles = _candidates(forward_tiles(call.burden), q)
    described = not packed and not call.dropout and not k.is_meta
    described = described and takes_descriptor(k) and takes_descriptor(v)
    _run_fastest("flash_forward", [t for t in tiles if described or not t.tma], run, q, k, call)
    return o, lse


def _run_fastest(
    name: str,
    tiles: list[Tile],
    run: Callable[[Tile], None],
    q: torch.Tensor,
    k: torch.Tensor,
    call: FlashCall,
) -> None:
    if len(tiles) == 1:
        return run(tiles[0])
    return run(choose(_shape_of(name, q, k, call), tiles, run, q.device))


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
    rows = delta_rows(o.shape[3])
    launch(
        _flash_delta,
        (cdiv(max_q, rows), o.shape[1], _batches(o, cu_q)),
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
    call: FlashCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, delta); delta is what the softmax's gradient subtracts, of which the sinks'
    gradient is made."""
    q, k, v, o, do = _packed(q), _packed(k), _packed(v), _packed(o), _packed(do)
    lse = lse.contiguous()
    packed = call.cu_q is not None
    delta = _delta(o, do, lse, dlse, call.cu_q, call.max_q)
    dq, dk, dv = _results(q, k, v, packed=packed)
    bounds = [lse if x is None else x for x in (call.cu_q, call.cu_k, call.seed)]
    statistics = (0 if packed else lse.stride(0), lse.stride(1))
    switches = _switches(q, k, call)

    def run_dkdv(tile: Tile) -> None:
        launch(
            _flash_backward_dkdv,
            (cdiv(call.max_k, tile.keys), k.shape[1], _batches(q, call.cu_q)),
            *(q, k, v, do, lse, delta, dk, dv, *bounds),
            *(*_strides(q, k, v, do, dk, packed=packed), *statistics, *_numbers(call)),
            **switches,
            **_options(tile),
        )

    def run_dq(tile: Tile) -> None:
        launch(
            _flash_backward_dq,
            (cdiv(call.max_q, tile.queries), q.shape[1], _batches(q, call.cu_q)),
            *(q, k, v, do, lse, delta, dq, *bounds),
            *(*_strides(q, k, v, do, dq, packed=packed), *statistics, *_numbers(call)),
            **switches,
            **_options(tile),
        )

    for name, tables, run in (
        ("flash_backward_dkdv", dkdv_tiles(call.burden), run_dkdv),
        ("flash_backward_dq", dq_tiles(call.burden), run_dq),
    ):
        tiles = [tile for tile in _candidates(tables, q) if not tile.tma]
        _run_fastest(name, tiles, run, q, k, call)
    return dq, dk, dv, delta
