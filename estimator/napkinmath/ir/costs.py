"""What an operation costs the device: a few physical kinds, each with FLOPs and bytes moved as
expressions.

The schedule turns them into seconds with the efficiencies of the GPU; one multiply-add is 2 FLOP.
"""

from __future__ import annotations

from napkinmath.base.dtypes import DType
from napkinmath.base.expr import Expr, Size, ceil_div, product, substituted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Union

    from napkinmath.ir.ledger import Value

    Cost = Union[
        "Gemm",
        "Move",
        "AttentionCost",
        "Dequantize",
        "HostCopy",
        "HostPass",
        "Disk",
        "Collective",
        "Dispatch",
        "Repeated",
        "EngineRun",
    ]


class Gemm:
    """`batch` matrix products (m x k)·(k x n) in `dtype`.

    `result_bits` are read and written for each element of the result; 0 writes it in `dtype`.
    `of_weight`: both factors lie with k as their rows (a gradient summed over tokens), so how long a
    row is depends on m and n, not on the number of tokens.
    `grouped`: torch's `grouped_mm`. A GPU that has no kernel for it runs one product after the
    other, once the host has read where the groups end.
    `routed`: of experts, in one kernel, which a router sends m "rows" each on average, or k where
    they are summed for "weights".
    """

    __slots__ = ("batch", "dtype", "grouped", "k", "m", "n", "of_weight", "result_bits", "routed")

    def __init__(
        self,
        m: Size,
        n: Size,
        k: Size,
        dtype: DType,
        batch: Size = 1,
        result_bits: int = 0,
        *,
        of_weight: bool = False,
        grouped: bool = False,
        routed: str = "",
    ) -> None:
        self.m, self.n, self.k, self.dtype, self.batch = m, n, k, dtype, batch
        self.result_bits, self.of_weight, self.grouped = result_bits, of_weight, grouped
        self.routed = routed

    @property
    def one(self) -> Gemm:
        """One of the batch, by itself."""
        bits = self.result_bits
        return Gemm(self.m, self.n, self.k, self.dtype, 1, bits, of_weight=self.of_weight)

    @property
    def flops(self) -> Size:
        """Two a multiplication."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def moved(self) -> Size:
        """Bytes: both operands read, the result written."""
        if not self.result_bits:
            total = self.m * self.k + self.k * self.n + self.m * self.n
            return ceil_div(self.batch * total * self.dtype.bits, 8)
        read = (self.m * self.k + self.k * self.n) * self.dtype.bits
        return ceil_div(self.batch * (read + self.m * self.n * self.result_bits), 8)


class Move:
    """One memory-bound kernel that reads and writes `moved` bytes; `launches` counts its kernels,
    `waits` says that the host reads its result, `reach` what share of such kernels' bandwidth it has."""

    __slots__ = ("launches", "moved", "reach", "waits")
    flops = 0

    def __init__(
        self, moved: Size, launches: Size = 1, *, waits: bool = False, reach: float = 1.0
    ) -> None:
        self.moved, self.launches, self.waits, self.reach = moved, launches, waits, reach


class AttentionCost:
    """A fused attention kernel; `flops` counts the scores that the mask or window leaves, backward
    2.5 times forward."""

    __slots__ = (
        "backward",
        "causal",
        "dtype",
        "head_dim",
        "heads",
        "kernel",
        "kv_heads",
        "rows",
        "s_kv",
        "s_q",
        "window",
    )

    def __init__(
        self,
        kernel: str,
        rows: Size,
        heads: Size,
        kv_heads: Size,
        s_q: Size,
        s_kv: Size,
        head_dim: Size,
        *,
        causal: bool,
        window: Size | None,
        dtype: DType,
        backward: bool,
    ) -> None:
        self.kernel, self.rows, self.heads, self.kv_heads, self.s_q, self.s_kv, self.head_dim = (
            kernel,
            rows,
            heads,
            kv_heads,
            s_q,
            s_kv,
            head_dim,
        )
        self.causal, self.window, self.dtype, self.backward = causal, window, dtype, backward

    @property
    def flops(self) -> Size:
        """Two products forward, five backward; a causal mask halves them."""
        full = 4 * self.rows * self.heads * self.s_q * self.s_kv * self.head_dim
        counted = full // 2 if self.causal else full
        return 5 * counted // 2 if self.backward else counted

    @property
    def moved(self) -> Size:
        """Bytes: queries, keys and values read, the result written; backward twice that."""
        queries, keys = (
            self.rows * self.s_q * self.heads * self.head_dim,
            self.rows * self.s_kv * self.kv_heads * self.head_dim,
        )
        return (2 * queries + 2 * keys) * (self.dtype.bits // 8) * (2 if self.backward else 1)


class Dequantize:
    """Expanding `elements` packed weights of a quantization `kind` to `dtype`."""

    __slots__ = ("bits", "dtype", "elements", "kind")
    flops = 0

    def __init__(self, kind: str, elements: Size, bits: int, dtype: DType) -> None:
        self.kind, self.elements, self.bits, self.dtype = kind, elements, bits, dtype

    @property
    def moved(self) -> Size:
        """Bytes: packed elements read, whole ones written."""
        return ceil_div(self.elements * (self.bits + self.dtype.bits), 8)


class HostCopy:
    """A copy between host and device; it `overlaps` with computation on a stream of its own, which
    needs pinned memory."""

    __slots__ = ("moved", "overlaps", "pinned", "to_host")
    flops = 0

    def __init__(
        self, moved: Size, *, to_host: bool, pinned: bool = True, overlaps: bool = True
    ) -> None:
        self.moved, self.to_host, self.pinned, self.overlaps = (
            moved,
            to_host,
            pinned,
            overlaps and pinned,
        )


class HostPass:
    """Arithmetic on tensors in host memory: `touched` bytes read and written by the processors.
    `one_core` of a machine works for each rank, else all of them do."""

    __slots__ = ("one_core", "touched")
    flops = 0
    moved = 0

    def __init__(self, touched: Size, *, one_core: bool = False) -> None:
        self.touched, self.one_core = touched, one_core


class Disk:
    """Tensors on NVMe: bytes `read` and `written`."""

    __slots__ = ("read", "written")
    flops = 0
    moved = 0

    def __init__(self, read: Size, written: Size = 0) -> None:
        self.read, self.written = read, written


class Collective:
    """Communication of `ranks` ranks along an `axis` of the mesh, on a stream of its own unless it
    does not `overlap`.

    `kind`: all-gather, reduce-scatter, all-reduce, broadcast, reduce, all-to-all, staged all-to-all
    (within nodes, then between them), send. `moved` are
    the bytes of the whole message: what a gather makes, what a reduction reads, what one rank has
    in an all-to-all. `axis`: data (all data-parallel ranks), shard and replica (its two halves
    under hybrid sharding), the same with 'expert' before it, tensor, context, expert, pipeline.
    `beside` are the kernels that hide it, and `reach` the share of their time that it may take: of
    a message in `chunks` one sticks out, of one in no chunks what is longer than that time.
    Of an all-to-all with `choices` the message has a row for each of a token's choices, of which one
    travels to each rank, and one over the network to each node (DeepEP); `limit` is the router's.
    """

    __slots__ = (
        "axis",
        "beside",
        "choices",
        "chunks",
        "kind",
        "limit",
        "moved",
        "overlaps",
        "ranks",
        "reach",
    )
    flops = 0

    def __init__(
        self, kind: str, moved: Size, *, ranks: int, axis: str, overlaps: bool = True
    ) -> None:
        self.kind, self.moved, self.ranks, self.axis, self.overlaps = (
            kind,
            moved,
            ranks,
            axis,
            overlaps,
        )
        self.beside: tuple[Gemm | AttentionCost, ...] = ()
        self.chunks, self.reach, self.choices = 0, 1.0, 0
        self.limit: tuple[int, int] | None = None

    def hide(
        self, kernels: Sequence[Gemm | AttentionCost], chunks: int = 0, *, reach: float = 1.0
    ) -> None:
        """Adds kernels that run beside it."""
        self.beside, self.chunks, self.reach = (*self.beside, *kernels), chunks, reach


def places_reached(places: int, choices: int, limit: tuple[int, int] | None = None) -> float:
    """How many of equally likely places the choices of one token fall on, on average. `limit`:
    (groups of experts, those in which a token's lie), where each group has places of its own
    (DeepSeek-V3, arXiv 2412.19437 section 2.1.2, node-limited routing)."""
    if limit is not None and places % limit[0] == 0:
        places = places // limit[0] * limit[1]
    return places * (1.0 - (1.0 - 1.0 / places) ** choices)


# Of a layer besides its kernels, forward and backward: calls of modules with their hooks, views and
# the nodes that they leave. On the H200's machine layers of 17 to 93 kernels (GPT-2, Llama, Qwen3,
# Gemma 3, Mixtral, adapters of 4-bit weights) take 1.2 to 4 ms forward: 1 ms and 18 us a kernel; and
# 0.75 ms and 20 us a kernel backward (benchmarks/results/h200).
LAYER_DISPATCHES = (50, 40)
# Of a checkpointed layer besides its second forward, forward and backward, in kernels of the forward.
# The reentrant form keeps and restores the generators' states and runs a backward within the backward;
# the other one calls Python for each tensor that a node keeps, twice, and once more to give it out
# (torch utils/checkpoint.py, _CustomFunction and _checkpoint_hook). napkinmath.timing.efficiency has
# the measurements.
REENTRANT_DISPATCHES, CHECKPOINT_DISPATCHES = (5, 15), (44, 96)
# Of one parameter that ZeRO 3 fetches, releases and reduces, forward and backward, with
# recomputation: 2.3 and 6.3 ms more a layer of nine parameters than without DeepSpeed, where a
# checkpointed layer alone takes 3.0 (DeepSpeed 0.19.8, torch 2.13, one rank, one EPYC core, layers
# of 64). By it Qwen-1.8B's steps take 2.1 to 2.3 s from 256 to 2048 tokens alike (QwenLM/Qwen
# README).
HOOK_DISPATCHES = (27, 73)


class Dispatch:
    """Work of the host alone, as long as issuing `count` kernels takes it; the device does nothing
    for it. `bookkeeping`: a checkpoint's or a hook's, whose length a calibration measures."""

    __slots__ = ("bookkeeping", "count")
    flops = 0
    moved = 0

    def __init__(self, count: int, *, bookkeeping: bool = False) -> None:
        self.count, self.bookkeeping = count, bookkeeping


class Repeated:
    """The same kernels `times` over, one after the other: a token at a time. `again`: they are part
    of a recomputation, which the model's own work leaves out."""

    __slots__ = ("again", "cost", "times")

    def __init__(self, cost: Cost, times: Size, *, again: bool = False) -> None:
        self.cost, self.times, self.again = cost, times, again

    @property
    def flops(self) -> Size:
        """Of all times."""
        return self.times * self.cost.flops

    @property
    def moved(self) -> Size:
        """Bytes of all times."""
        return self.times * self.cost.moved


class EngineRun:
    """An inference engine generates `tokens` for `rows` prompts of a rank; `plan` says which and
    where."""

    __slots__ = ("plan", "prompt", "rows", "tokens")
    flops = 0
    moved = 0

    def __init__(self, plan: object, rows: Size, prompt: Size, tokens: Size) -> None:
        self.plan, self.rows, self.prompt, self.tokens = plan, rows, prompt, tokens

    @property
    def is_aside(self) -> bool:
        """Whether other GPUs do it beside the whole step: rollouts that may be behind the
        policy."""
        return bool(getattr(self.plan, "staleness", 0))


def under_sizes(cost: Cost, values: Mapping[str, Size]) -> Cost:
    """The same cost with some symbols of its sizes replaced: what was recorded for a sequence, for
    one token of it."""
    other: Cost = object.__new__(cost.__class__)
    for slot in cost.__slots__:
        size = getattr(cost, slot)
        setattr(other, slot, substituted(size, values) if isinstance(size, Expr) else size)
    return other


def traffic(*values: Value) -> Size:
    """Bytes of reading or writing each of these values once."""
    total: Size = 0
    for value in values:
        key = value.axes, value.dtype.bits
        size = _bytes_of.get(key)
        if size is None:
            size = _bytes_of[key] = ceil_div(product(value.axes) * value.dtype.bits, 8)
        total = total + size
    return total


_bytes_of: dict[tuple[tuple[Size, ...], int], Size] = {}
