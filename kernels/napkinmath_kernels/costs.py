"""What each op saves, needs for a while, computes and moves: formulas over shapes, held to the real
ops by tests/kernels/test_costs.py.

Pure Python, no torch: an estimator can mirror it. Bytes are of requested tensors, without an
allocator's rounding. One multiply-add is 2 FLOP; an element-wise op counts 1 for each arithmetic
operation on a value. Traffic is what must cross the memory bus once: inputs read, outputs written.
`multiprocessors` is the GPU's (132 on an H100 or H200): backwards with parameter gradients leave
partial sums in proportion to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "uint8": 1, "int32": 4}
CHUNK_BYTES = 256 * 2**20
_CHUNK_COLUMNS, _CHUNK_ROWS = 64, 128


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@dataclass(frozen=True)
class SavedTensor:
    """A tensor held from forward to backward; `is_new` if the op made it for that, not if it is an
    input, parameter or result."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_new: bool

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return _product(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Cost:
    """One op, forward and backward. Temporaries are the most that is alive at once beyond inputs,
    results and saved tensors."""

    saved: tuple[SavedTensor, ...]
    forward_flops: int
    backward_flops: int
    forward_traffic_bytes: int
    backward_traffic_bytes: int
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0

    @property
    def new_saved_bytes(self) -> int:
        """Bytes that exist only because the op saved them."""
        return sum(tensor.num_bytes for tensor in self.saved if tensor.is_new)


def rms_norm(
    rows: int,
    hidden: int,
    dtype: str,
    *,
    residual: bool = False,
    trains_weight: bool = True,
    multiprocessors: int = 132,
) -> Cost:
    """`rms_norm`: x (or x + residual, which is a result) and the row's 1/rms in fp32."""
    item, values = ITEM_BYTES[dtype], rows * hidden
    saved = (
        SavedTensor("x + residual" if residual else "x", (rows, hidden), dtype, False),
        SavedTensor("weight", (hidden,), dtype, False),
        SavedTensor("rstd", (rows,), "fp32", True),
    )
    partial = min(rows, 2 * multiprocessors) * hidden * 4 if trains_weight else 0
    rounding = hidden * 4 if trains_weight and dtype != "fp32" else 0
    return Cost(
        saved,
        forward_flops=(5 if residual else 4) * values,
        backward_flops=(9 + 2 * trains_weight + residual) * values,
        forward_traffic_bytes=(4 if residual else 2) * values * item + hidden * item + rows * 4,
        backward_traffic_bytes=(4 if residual else 3) * values * item
        + (1 + trains_weight) * hidden * item
        + rows * 4
        + 2 * partial,
        backward_temporary_bytes=partial + rounding,
    )


def layer_norm(
    rows: int,
    hidden: int,
    dtype: str,
    *,
    trains_parameters: bool = True,
    multiprocessors: int = 132,
) -> Cost:
    """`layer_norm` with a bias: x, and the row's mean and 1/deviation in fp32."""
    item, values = ITEM_BYTES[dtype], rows * hidden
    saved = (
        SavedTensor("x", (rows, hidden), dtype, False),
        SavedTensor("weight", (hidden,), dtype, False),
        SavedTensor("mean", (rows,), "fp32", True),
        SavedTensor("rstd", (rows,), "fp32", True),
    )
    partial = 2 * min(rows, 2 * multiprocessors) * hidden * 4 if trains_parameters else 0
    sums = (
        (2 * hidden * 4 if dtype != "fp32" else 0) + 2 * hidden * item if trains_parameters else 0
    )
    return Cost(
        saved,
        forward_flops=7 * values,
        backward_flops=(11 + 4 * trains_parameters) * values,
        forward_traffic_bytes=2 * values * item + 2 * hidden * item + rows * 8,
        backward_traffic_bytes=3 * values * item
        + (1 + 2 * trains_parameters) * hidden * item
        + rows * 8
        + 2 * partial,
        backward_temporary_bytes=partial + sums,
    )


def rope(
    batch: int,
    q_heads: int,
    k_heads: int,
    tokens: int,
    size: int,
    dtype: str,
    table_dtype: str = "fp32",
) -> Cost:
    """`rope` of whole heads: cos and sin, which every layer shares."""
    table = (1, tokens, size)
    values = batch * (q_heads + k_heads) * tokens * size
    traffic = 2 * values * ITEM_BYTES[dtype] + 2 * tokens * size * ITEM_BYTES[table_dtype]
    saved = (
        SavedTensor("cos", table, table_dtype, False),
        SavedTensor("sin", table, table_dtype, False),
    )
    return Cost(saved, 3 * values, 3 * values, traffic, traffic)


def gated(rows: int, width: int, dtype: str) -> Cost:
    """`swiglu` and `geglu`: gate and up."""
    values = rows * width
    saved = (
        SavedTensor("gate", (rows, width), dtype, False),
        SavedTensor("up", (rows, width), dtype, False),
    )
    return Cost(
        saved,
        6 * values,
        12 * values,
        3 * values * ITEM_BYTES[dtype],
        5 * values * ITEM_BYTES[dtype],
    )


def flash_attention(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    size: int,
    dtype: str,
    *,
    visible_share: float = 1.0,
) -> Cost:
    """`flash_attention`: q, k, v, o and the log-sum-exp. `visible_share` of the scores is computed:
    about a half when causal.

    The backward computes the scores in both of its kernels: 7 products against the forward's 2.
    """
    item = ITEM_BYTES[dtype]
    q_bytes, kv_bytes = batch * heads * queries * size * item, batch * kv_heads * keys * size * item
    statistics = batch * heads * queries * 4
    product = int(2 * batch * heads * queries * keys * size * visible_share)
    saved = (
        SavedTensor("q", (batch, heads, queries, size), dtype, False),
        SavedTensor("k", (batch, kv_heads, keys, size), dtype, False),
        SavedTensor("v", (batch, kv_heads, keys, size), dtype, False),
        SavedTensor("o", (batch, heads, queries, size), dtype, False),
        SavedTensor("log-sum-exp", (batch, heads, queries), "fp32", True),
    )
    return Cost(
        saved,
        forward_flops=2 * product,
        backward_flops=7 * product + 2 * batch * heads * queries * size,
        forward_traffic_bytes=2 * q_bytes + 2 * kv_bytes + statistics,
        backward_traffic_bytes=(2 + 2 + 2 + 1) * q_bytes + 6 * kv_bytes + 6 * statistics,
        backward_temporary_bytes=statistics,
    )


def linear_cross_entropy(
    rows: int,
    hidden: int,
    vocabulary: int,
    dtype: str,
    *,
    valid: int | None = None,
    trains_head: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Cost:
    """`linear_cross_entropy` in training: the gradients, which the forward computes. `valid` of
    `rows` targets are not ignored."""
    item, valid = ITEM_BYTES[dtype], rows if valid is None else valid
    padded = -(-vocabulary // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    chunk = max(1, chunk_bytes // (padded * item))
    chunk = max(1, min(chunk - chunk % _CHUNK_ROWS if chunk >= _CHUNK_ROWS else chunk, valid))
    num_chunks = -(-valid // chunk)
    head = vocabulary * hidden
    saved = [SavedTensor("d hidden", (rows, hidden), dtype, True)]
    if trains_head:
        saved.append(SavedTensor("d weight", (vocabulary, hidden), dtype, True))
    gathered = (2 * valid * hidden * item + valid * 16) if valid < rows else 0
    wide_sums = head * 4 if trains_head and num_chunks > 1 and dtype != "fp32" else 0
    logits = valid * vocabulary * item
    return Cost(
        tuple(saved),
        forward_flops=(6 if trains_head else 4) * valid * hidden * vocabulary
        + 8 * valid * vocabulary,
        backward_flops=rows * hidden + (head if trains_head else 0),
        forward_traffic_bytes=(6 if trains_head else 5) * logits
        + (2 + trains_head) * valid * hidden * item
        + (2 + trains_head) * num_chunks * head * item,
        backward_traffic_bytes=2 * (rows * hidden + (head if trains_head else 0)) * item,
        forward_temporary_bytes=chunk * padded * item + valid * 4 + gathered + wide_sums,
    )


def linear_divergence(
    rows: int,
    hidden: int,
    taught_hidden: int,
    vocabulary: int,
    dtype: str,
    *,
    valid: int | None = None,
    trains_head: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Cost:
    """`linear_divergence` in training: the student's gradients, which the forward computes. `valid`
    of `rows` count; a chunk is of both models' logits."""
    item, some_left_out = ITEM_BYTES[dtype], valid is not None and valid < rows
    valid = rows if valid is None else valid
    padded = -(-vocabulary // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    chunk = max(1, chunk_bytes // 2 // (padded * item))
    chunk = max(1, min(chunk - chunk % _CHUNK_ROWS if chunk >= _CHUNK_ROWS else chunk, valid))
    num_chunks, head = -(-valid // chunk), vocabulary * hidden
    taught_head, logits = vocabulary * taught_hidden, valid * vocabulary * item
    saved = [SavedTensor("d hidden", (rows, hidden), dtype, True)]
    if trains_head:
        saved.append(SavedTensor("d weight", (vocabulary, hidden), dtype, True))
    gathered = valid * ((2 * hidden + taught_hidden) * item + 8) if some_left_out else 0
    wide_sums = head * 4 if trains_head and num_chunks > 1 and dtype != "fp32" else 0
    products, trained = 2 + trains_head, head if trains_head else 0
    return Cost(
        tuple(saved),
        forward_flops=2 * valid * (products * head + taught_head) + 24 * valid * vocabulary,
        backward_flops=rows * hidden + trained,
        forward_traffic_bytes=(10 + trains_head) * logits
        + products * (valid * hidden + num_chunks * head) * item
        + (valid * taught_hidden + num_chunks * taught_head) * item,
        backward_traffic_bytes=2 * (rows * hidden + trained) * item,
        forward_temporary_bytes=2 * chunk * padded * item + valid * 4 + gathered + wide_sums,
    )


def linear_log_probabilities(
    rows: int,
    hidden: int,
    vocabulary: int,
    dtype: str,
    *,
    trains_head: bool = False,
    statistics: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Cost:
    """`linear_log_probabilities` in training, every row scored. A frozen head's forward makes the
    rows' gradients and keeps them; a trained head's backward makes the logits again."""
    item = ITEM_BYTES[dtype]
    padded = -(-vocabulary // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    chunk = max(1, chunk_bytes // (padded * item))
    chunk = max(1, min(chunk - chunk % _CHUNK_ROWS if chunk >= _CHUNK_ROWS else chunk, rows))
    num_chunks, head = -(-rows // chunk), vocabulary * hidden
    product, logits = 2 * rows * head, rows * vocabulary * item
    read = rows * hidden * item + num_chunks * head * item
    results = rows * (4 + statistics * 9)
    buffer = chunk * padded * item
    if not trains_head:
        return Cost(
            (SavedTensor("d hidden", (rows, hidden), dtype, True),),
            forward_flops=2 * product + 8 * rows * vocabulary,
            backward_flops=rows * hidden,
            forward_traffic_bytes=5 * logits + 2 * read + results,
            backward_traffic_bytes=2 * rows * hidden * item + 4 * rows,
            forward_temporary_bytes=buffer,
        )
    wide_sums = head * 4 if num_chunks > 1 and dtype != "fp32" else 0
    return Cost(
        (
            SavedTensor("hidden", (rows, hidden), dtype, False),
            SavedTensor("weight", (vocabulary, hidden), dtype, False),
            SavedTensor("targets", (rows,), "int64", False),
        ),
        forward_flops=product + 4 * rows * vocabulary,
        backward_flops=3 * product + 8 * rows * vocabulary,
        forward_traffic_bytes=2 * logits + read + results,
        backward_traffic_bytes=6 * logits + 3 * read + 4 * rows,
        forward_temporary_bytes=buffer,
        backward_temporary_bytes=buffer + chunk * 4 + wide_sums,
    )


@dataclass(frozen=True)
class LinearSize:
    """A frozen linear of a fused QLoRA op: its size, its adapter's rank (0: none), and the bytes
    its packed weight is stored in."""

    out_features: int
    in_features: int
    rank: int
    stored: tuple[SavedTensor, ...] = ()

    @property
    def stored_bytes(self) -> int:
        """Bytes read to decode it."""
        return sum(tensor.num_bytes for tensor in self.stored)


def four_bit_storage(
    out_features: int, in_features: int, *, nested: bool = True, blocksize: int = 64
) -> tuple[SavedTensor, ...]:
    """The tensors of an NF4 or FP4 weight: packed values, scales, tables."""
    numel = out_features * in_features
    blocks = -(-numel // blocksize)
    found = [SavedTensor("packed", (-(-numel // 2), 1), "uint8", False)]
    found.append(SavedTensor("absmax", (blocks,), "uint8" if nested else "fp32", False))
    found.append(SavedTensor("code", (16,), "fp32", False))
    if nested:
        found.append(SavedTensor("nested code", (256,), "fp32", False))
        found.append(SavedTensor("nested absmax", (-(-blocks // 256),), "fp32", False))
        found.append(SavedTensor("offset", (), "fp32", False))
    return tuple(found)


def eight_bit_storage(
    out_features: int, in_features: int, *, block: tuple[int, int] = (128, 128)
) -> tuple[SavedTensor, ...]:
    """The tensors of an FP8 or int8 weight: values, and scales of its blocks."""
    grid = (-(-out_features // block[0]), -(-in_features // block[1]))
    values = SavedTensor("values", (out_features, in_features), "uint8", False)
    return values, SavedTensor("scales", grid, "fp32", False)


def dequantize(linear: LinearSize, dtype: str) -> Cost:
    """`dequantize`: nothing saved, one product a value."""
    values = linear.out_features * linear.in_features
    return Cost((), values, 0, linear.stored_bytes + values * ITEM_BYTES[dtype], 0)


def decoded_weight_bytes(linears: Sequence[LinearSize], dtype: str) -> int:
    """The shared buffer that weights are decoded into: the largest of them, held from the first op
    on."""
    return max(linear.out_features * linear.in_features for linear in linears) * ITEM_BYTES[dtype]


def _adapter_tensors(linears: Sequence[LinearSize], adapter_dtype: str) -> tuple[SavedTensor, ...]:
    shapes = [
        ("A", (linear.rank, linear.in_features) if linear.rank else (0,)) for linear in linears
    ]
    shapes += [
        ("B", (linear.out_features, linear.rank) if linear.rank else (0,)) for linear in linears
    ]
    return tuple(SavedTensor(name, shape, adapter_dtype, False) for name, shape in shapes)


def _projections(rows: int, linears: Sequence[LinearSize], dtype: str) -> tuple[SavedTensor, ...]:
    return tuple(
        SavedTensor("x A^T", (rows, linear.rank) if linear.rank else (0,), dtype, True)
        for linear in linears
    )


def _linear_flops(rows: int, linear: LinearSize) -> tuple[int, int]:
    base = 2 * rows * linear.out_features * linear.in_features
    thin = 2 * rows * linear.rank * (linear.out_features + linear.in_features)
    decode = linear.out_features * linear.in_features if linear.stored else 0
    return base + thin + decode, base + 2 * thin + decode


def qlora_linears(
    rows: int,
    linears: Sequence[LinearSize],
    dtype: str,
    *,
    adapter_dtype: str = "fp32",
    dropout: bool = False,
) -> Cost:
    """`qlora_linears` (QLoRALinear, QLoRAQKV): x once for all, each adapter's projection, and with
    dropout a seed.

    The decoded weight lies in the shared buffer (`decoded_weight_bytes`) and is not counted among
    the temporaries.
    """
    item, in_features = ITEM_BYTES[dtype], linears[0].in_features
    seed = (SavedTensor("seed", (1,), "int64", True),) if dropout else ()
    stored = tuple(tensor for linear in linears for tensor in linear.stored)
    saved = (
        SavedTensor("x", (rows, in_features), dtype, False),
        *stored,
        *_adapter_tensors(linears, adapter_dtype),
        *_projections(rows, linears, dtype),
        *seed,
    )
    flops = [_linear_flops(rows, linear) for linear in linears]
    x_bytes, decoded = (
        rows * in_features * item,
        sum(linear.out_features * linear.in_features for linear in linears) * item,
    )
    y_bytes = sum(linear.out_features for linear in linears) * rows * item
    stored_bytes = sum(linear.stored_bytes for linear in linears)
    return Cost(
        saved,
        forward_flops=sum(forward for forward, _ in flops),
        backward_flops=sum(backward for _, backward in flops),
        forward_traffic_bytes=stored_bytes + 2 * decoded + 2 * len(linears) * x_bytes + 3 * y_bytes,
        backward_traffic_bytes=stored_bytes
        + 2 * decoded
        + (4 * len(linears)) * x_bytes
        + 3 * y_bytes,
        forward_temporary_bytes=max(
            _forward_temporaries(rows, linear, dtype, adapter_dtype, dropout) for linear in linears
        ),
    )


def _forward_temporaries(
    rows: int, linear: LinearSize, dtype: str, adapter_dtype: str, dropout: bool
) -> int:
    """The dropped x and A in x's dtype while x A^T is made; B in x's dtype after that."""
    if not linear.rank:
        return 0
    cast = 0 if adapter_dtype == dtype else linear.rank * ITEM_BYTES[dtype]
    dropped = rows * linear.in_features * ITEM_BYTES[dtype] if dropout else 0
    return max(dropped + cast * linear.in_features, cast * linear.out_features)


def expert_linear(
    rows: int,
    experts: int,
    linear: LinearSize,
    dtype: str,
    *,
    adapter_dtype: str = "fp32",
) -> Cost:
    """`expert_linear`: `linear` is one expert's, but for `stored`, which is the whole stack's. x,
    its projection, the ends of the experts' rows, and the parameters.

    The decoded stack lies in the shared buffer and is not counted among the temporaries.
    """
    item, rank = ITEM_BYTES[dtype], linear.rank
    inputs, outputs = linear.in_features, linear.out_features
    stack = linear.stored or (SavedTensor("stack", (experts, outputs, inputs), dtype, False),)
    shapes = (("A", (experts, rank, inputs)), ("B", (experts, outputs, rank)))
    adapters = tuple(SavedTensor(name, shape, adapter_dtype, False) for name, shape in shapes)
    saved = (
        SavedTensor("x", (rows, inputs), dtype, False),
        SavedTensor("offsets", (experts,), "int32", False),
        SavedTensor("x A^T", (rows, rank) if rank else (0,), dtype, True),
        *stack,
        *(adapters if rank else ()),
    )
    values, thin = experts * outputs * inputs, 2 * rows * rank * (outputs + inputs)
    base, decode = 2 * rows * outputs * inputs, values if linear.stored else 0
    read = linear.stored_bytes + 2 * values * item if linear.stored else values * item
    x_bytes, y_bytes, narrow = rows * inputs * item, rows * outputs * item, rows * rank * item
    factors = experts * rank * (inputs + outputs) * ITEM_BYTES[adapter_dtype]
    return Cost(
        saved,
        forward_flops=base + thin + decode,
        backward_flops=base + 2 * thin + decode,
        forward_traffic_bytes=read + 2 * x_bytes + 3 * y_bytes + 2 * narrow + factors,
        backward_traffic_bytes=read + 3 * y_bytes + 4 * x_bytes + 4 * narrow + 2 * factors,
        backward_temporary_bytes=narrow,
    )


def qlora_mlp(
    rows: int,
    gate: LinearSize,
    up: LinearSize,
    down: LinearSize,
    dtype: str,
    *,
    adapter_dtype: str = "fp32",
    dropout: bool = False,
    recompute: bool = False,
) -> Cost:
    """`qlora_mlp` (QLoRAMLP): x, the gate's and the up projection's outputs unless `recompute`,
    projections, and a seed with dropout."""
    item, width, linears = ITEM_BYTES[dtype], gate.out_features, (gate, up, down)
    wide = (
        ()
        if recompute
        else tuple(SavedTensor(name, (rows, width), dtype, True) for name in ("e", "g"))
    )
    biases = tuple(SavedTensor("bias", (0,), dtype, False) for _ in range(2)) if recompute else ()
    seed = (SavedTensor("seed", (1,), "int64", True),) if dropout else ()
    saved = (
        SavedTensor("x", (rows, gate.in_features), dtype, False),
        *seed,
        *(wide or biases),
        *_projections(rows, linears, dtype),
        *_adapter_tensors(linears, adapter_dtype),
        *(tensor for linear in linears for tensor in linear.stored),
    )
    first, second, third = (_linear_flops(rows, linear) for linear in linears)
    values, x_bytes = rows * width, rows * gate.in_features * item
    decoded = sum(linear.out_features * linear.in_features for linear in linears) * item
    stored = sum(linear.stored_bytes for linear in linears)
    again = first[0] + second[0] if recompute else 0
    h_bytes = values * item
    recomputed = 2 * h_bytes if recompute else 0
    return Cost(
        saved,
        forward_flops=first[0] + second[0] + third[0] + 6 * values,
        backward_flops=first[1] + second[1] + third[1] + again + 12 * values,
        forward_traffic_bytes=stored
        + 2 * decoded
        + 5 * x_bytes
        + 3 * (2 * h_bytes + x_bytes)
        + 5 * h_bytes,
        backward_traffic_bytes=stored + 2 * decoded + 12 * x_bytes + 15 * h_bytes + 4 * recomputed,
        forward_temporary_bytes=h_bytes
        + recomputed
        + _forward_temporaries(rows, down, dtype, adapter_dtype, dropout),
    )
