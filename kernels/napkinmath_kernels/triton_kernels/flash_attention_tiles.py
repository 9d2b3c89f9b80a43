"""Tiles of the FlashAttention kernels for each architecture and head size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .launch import ALL_ARCHITECTURES, next_power_of_2


@dataclass(frozen=True)
class Tile:
    """Queries and keys a program takes at a time, its warps and its pipeline stages; with `tma`,
    keys and values come through tensor descriptors. `most_registers` is the compiler's limit a
    thread, so that two programs share a multiprocessor; 0 sets none. `most_spills` allows local
    accesses where a GPU timed the tile faster than those without."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = False
    most_registers: int = 0
    most_spills: int = 0

    def compiler_options(self) -> dict[str, int]:
        """Further options of the compiler, beside warps and stages."""
        return {"maxnreg": self.most_registers} if self.most_registers else {}


#: By padded head size and architecture: the tiles that may be fastest, the first of them where
#: nothing was timed.
Tiles = Mapping[int, Mapping[int, tuple[Tile, ...]]]

#: GeForce and workstation GPUs: 99 KiB of shared memory a block, also where their number is above
#: a data centre's.
SMALL = (86, 89, 120)
#: Head size 96 is padded to 128 and shares its tiles. Each compiles without spills and without
#: serialized wgmma under triton 3.6 and 3.9; the compile gate holds them to it. Where two have
#: static figures of one size, both are here. The first ones of 128 on sm_90 are the fastest that an
#: H200 timed (benchmarks/results/h200/kernel_variants.csv).
FORWARD: Tiles = {
    64: {
        **dict.fromkeys((80, *SMALL), (Tile(128, 64, 8, 3),)),
        90: (Tile(128, 128, 8, 3, tma=True), Tile(128, 64, 8, 3)),
        100: (Tile(64, 64, 8, 3),),
    },
    128: {
        **dict.fromkeys((80, 100), (Tile(128, 64, 8, 3),)),
        **dict.fromkeys(SMALL, (Tile(128, 64, 8, 2),)),
        90: (Tile(64, 64, 4, 3, tma=True), Tile(128, 64, 8, 3)),
    },
    256: {
        **dict.fromkeys((80, *SMALL), (Tile(64, 32, 8, 2),)),
        90: (Tile(128, 32, 8, 2),),
        100: (Tile(64, 64, 8, 2),),
    },
}
DKDV: Tiles = {
    64: {
        **dict.fromkeys((80, *SMALL), (Tile(16, 64, 4, 2),)),
        90: (Tile(64, 128, 8, 2),),
        100: (Tile(64, 64, 8, 2),),
    },
    128: {
        **dict.fromkeys(SMALL, (Tile(32, 64, 8, 2),)),
        80: (Tile(64, 64, 8, 2),),
        90: (Tile(32, 64, 4, 2, most_spills=32), Tile(32, 128, 8, 2)),
        100: (Tile(32, 64, 8, 1),),
    },
    256: dict.fromkeys(ALL_ARCHITECTURES, (Tile(32, 32, 8, 1),)),
}
DQ: Tiles = {
    64: {
        **dict.fromkeys((80, *SMALL), (Tile(128, 32, 8, 2),)),
        **dict.fromkeys((90, 100), (Tile(128, 64, 8, 2),)),
    },
    128: {
        **dict.fromkeys((80, 100), (Tile(64, 64, 8, 2),)),
        **dict.fromkeys(SMALL, (Tile(64, 64, 8, 1),)),
        90: (Tile(128, 32, 8, 3, most_registers=128), Tile(128, 128, 8, 2)),
    },
    256: {
        **dict.fromkeys((80, 100), (Tile(64, 32, 8, 1),)),
        **dict.fromkeys((90, *SMALL), (Tile(32, 32, 4, 1),)),
    },
}
#: Windows and packing hold more bounds in registers, caps and dropout more numbers still.
BOUNDED_FORWARD: Tiles = FORWARD | {
    64: {
        **FORWARD[64],
        90: (Tile(128, 64, 8, 3, tma=True), Tile(128, 64, 8, 3)),
        100: (Tile(64, 64, 8, 2),),
    },
    128: {
        **FORWARD[128],
        80: (Tile(64, 64, 8, 3),),
        90: (Tile(128, 64, 8, 3, tma=True), Tile(128, 64, 8, 3)),
        **dict.fromkeys(SMALL, (Tile(128, 32, 8, 3),)),
    },
    256: {**FORWARD[256], 90: (Tile(128, 32, 8, 1),)},
}
BOUNDED_DKDV: Tiles = DKDV | {
    64: {
        **dict.fromkeys((80, 86, 89), (Tile(16, 64, 4, 2),)),
        90: (Tile(64, 64, 8, 2),),
        100: (Tile(32, 64, 8, 2),),
        120: (Tile(32, 64, 8, 1),),
    },
    128: {
        80: (Tile(32, 32, 8, 2),),
        **dict.fromkeys((90, *SMALL), (Tile(32, 64, 8, 2),)),
        100: (Tile(32, 64, 8, 1),),
    },
}
BOUNDED_DQ: Tiles = DQ | {
    64: {**DQ[64], 100: (Tile(64, 64, 8, 2),)},
    128: {**DQ[128], 80: (Tile(64, 64, 8, 1),), 90: (Tile(128, 64, 8, 2),)},
}
COSTLY_DKDV: Tiles = BOUNDED_DKDV | {
    64: {**BOUNDED_DKDV[64], 90: (Tile(32, 64, 8, 2),)},
    128: {**BOUNDED_DKDV[128], 90: (Tile(32, 64, 8, 1),), 100: (Tile(32, 32, 8, 2),)},
}
COSTLY_DQ: Tiles = BOUNDED_DQ | {
    64: {**BOUNDED_DQ[64], **dict.fromkeys((80, *SMALL), (Tile(64, 32, 8, 2),))},
}
#: Small enough that a test's short sequences still span several blocks of both kinds.
INTERPRETED = (Tile(32, 16, 4, 1),)


def forward_tiles(burden: int) -> Tiles:
    """The forward's tiles: 0 for lengths alone, 1 with windows or packing, 2 with caps or
    dropout."""
    return (FORWARD, BOUNDED_FORWARD, BOUNDED_FORWARD)[burden]


def dkdv_tiles(burden: int) -> Tiles:
    """The tiles of the gradients of keys and values."""
    return (DKDV, BOUNDED_DKDV, COSTLY_DKDV)[burden]


def dq_tiles(burden: int) -> Tiles:
    """The tiles of the queries' gradient."""
    return (DQ, BOUNDED_DQ, COSTLY_DQ)[burden]


def delta_rows(size: int) -> int:
    """Rows a program of `_flash_delta` takes: 64 of 256 values would spill."""
    return 64 if padded_size(size) <= 128 else 32


def padded_size(size: int) -> int:
    """Head size as the tiles hold it: a power of two."""
    return next_power_of_2(size)


def fitting(table: Tiles, size: int, architecture: int) -> tuple[Tile, ...]:
    """The tiles for a head size on a GPU: its architecture's, or those of the newest one before
    it."""
    by_architecture = table[padded_size(size)]
    return by_architecture[max(known for known in by_architecture if known <= architecture)]
