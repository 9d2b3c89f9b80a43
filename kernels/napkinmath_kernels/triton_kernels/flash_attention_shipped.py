"""Every FlashAttention configuration that a GPU user can meet: what the compile gate compiles."""

from __future__ import annotations

from typing import Any

from .flash_attention import _flash_forward
from .flash_attention_backward import _flash_backward_dkdv, _flash_backward_dq, _flash_delta
from .flash_attention_tiles import (
    Tile,
    Tiles,
    delta_rows,
    dkdv_tiles,
    dq_tiles,
    fitting,
    forward_tiles,
    padded_size,
)
from .launch import ALL_ARCHITECTURES, Shipped

#: What the layers of language models come in, by the switches that are on; a window is causal.
VARIANTS = {
    "full": (),
    "causal": ("CAUSAL",),
    "window": ("CAUSAL", "WINDOWED"),
    "packed": ("CAUSAL", "VARLEN"),
    "packed window": ("CAUSAL", "WINDOWED", "VARLEN"),
    "capped": ("CAUSAL", "CAPPED"),
    "capped window": ("CAUSAL", "WINDOWED", "CAPPED"),
    "sinks window": ("CAUSAL", "WINDOWED", "SINKS"),
    "dropout": ("CAUSAL", "DROPOUT"),
}
#: Packed sequences begin at any row; with dropout the descriptors' form spills.
NO_TMA = {"VARLEN", "DROPOUT"}
#: Sizes each variant is compiled at; 96 takes the tiles of 128.
SIZES = {
    "full": (64, 96, 128, 256),
    "causal": (64, 96, 128, 256),
    "packed window": (64, 128),
    "capped": (128, 256),
    "capped window": (128, 256),
    "sinks window": (64,),
    "dropout": (64, 128),
}
SWITCHES = ("CAUSAL", "WINDOWED", "VARLEN", "CAPPED", "SINKS", "DROPOUT")
TYPES = {
    "lse_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "dlse_ptr": "*fp32",
    "cu_queries_ptr": "*i32",
    "cu_keys_ptr": "*i32",
    "sinks_ptr": "*fp32",
    "seed_ptr": "*i64",
    "scale": "fp32",
    "softcap": "fp32",
    "kept_scale": "fp32",
}


def _burden(on: tuple[str, ...]) -> int:
    """As `FlashCall.burden`."""
    if {"CAPPED", "DROPOUT"} & set(on):
        return 2
    return int(bool({"WINDOWED", "VARLEN"} & set(on)))


def _types(kernel: Any, half: bool, descriptor: str = "") -> dict[str, str]:
    names = kernel.arg_names
    halves = {name: "*fp16" for name in names if name.endswith("_ptr") and half}
    types = halves | {name: kind for name, kind in TYPES.items() if name in names}
    return types | (dict.fromkeys(("k_ptr", "v_ptr"), descriptor) if descriptor else {})


def _shipped(
    name: str, kernel: Any, tiles: Tiles, size: int, variant: str, half: bool = False
) -> list[Shipped]:
    by_tile: dict[tuple[int, Tile], list[int]] = {}
    for architecture in ALL_ARCHITECTURES:
        for place, tile in enumerate(fitting(tiles, size, architecture)):
            if not (tile.tma and NO_TMA & set(VARIANTS[variant])):
                by_tile.setdefault((place, tile), []).append(architecture)
    return [
        _one(name, kernel, tile, size, variant, half, tuple(architectures), place)
        for (place, tile), architectures in by_tile.items()
    ]


def _one(
    name: str,
    kernel: Any,
    tile: Tile,
    size: int,
    variant: str,
    half: bool,
    architectures: tuple[int, ...],
    place: int,
) -> Shipped:
    on = VARIANTS[variant]
    switches: dict[str, object] = {"GROUP": 4, "PRECISION": "ieee", "SIZE": size}
    switches |= {name: name in on for name in SWITCHES if name in kernel.arg_names}
    if kernel is _flash_forward:
        switches |= {"POSITIVE": "CAPPED" not in on, "TMA": tile.tma}
    switches |= {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "BLOCK_D": padded_size(size)}
    kind = "fp16" if half else "bf16"
    block = f"tensordesc<{kind}[1, 1, {tile.keys}, {padded_size(size)}]>" if tile.tma else ""
    label = f"{name} d={size} {variant}{' fp16' if half else ''}{' tma' if tile.tma else ''}"
    return Shipped(
        label + (" second" if place and not _has_tma_beside(tile, name) else ""),
        kernel,
        switches,
        tile.warps,
        tile.stages,
        types=_types(kernel, half, block),
        architectures=architectures,
        has_dot=True,
        options=tile.compiler_options(),
        most_spills=tile.most_spills,
    )


def _has_tma_beside(tile: Tile, name: str) -> bool:
    """Of a descriptor and pointers the first has a name of its own already."""
    return name == "flash_forward" and not tile.tma


def shipped() -> list[Shipped]:
    """Every head size and variant with the tiles that each architecture gets, in bf16; causal
    attention at 128 in fp16 too."""
    kernels = (
        ("flash_forward", _flash_forward, forward_tiles),
        ("flash_backward_dkdv", _flash_backward_dkdv, dkdv_tiles),
        ("flash_backward_dq", _flash_backward_dq, dq_tiles),
    )
    found: list[Shipped] = []
    for name, kernel, tiles in kernels:
        for variant, on in VARIANTS.items():
            if "SINKS" in on and kernel is not _flash_forward:
                continue  # the backward of sinks is that of a window
            for size in SIZES.get(variant, (64, 128, 256)):
                table = tiles(_burden(on))
                found += _shipped(name, kernel, table, size, variant)
        found += _shipped(name, kernel, tiles(0), 128, "causal", half=True)
    return [*found, *_deltas()]


def _deltas() -> list[Shipped]:
    return [
        Shipped(
            f"flash_delta d={size}",
            _flash_delta,
            {
                "HAS_DLSE": size == 64,
                "VARLEN": size == 64,
                "SIZE": size,
                "BLOCK_M": delta_rows(size),
                "BLOCK_D": size,
            },
            4,
            1,
            types=_types(_flash_delta, half=False),
            has_wide_stores=False,
        )
        for size in (64, 128, 256)
    ]
