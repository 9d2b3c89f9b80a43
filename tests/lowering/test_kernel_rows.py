"""The rows of catalog/kernels.py against the kernels' own cost table, and against the running
operations: equality, not tolerance."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from typing import Any

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first kernel is imported

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from napkinmath.base.dtypes import BF16, FP32, find_dtype
from napkinmath.base.expr import Bindings, symbol
from napkinmath.catalog import adapter_kernels as adapter_rows
from napkinmath.catalog import kernels as rows
from napkinmath.catalog import loss_kernels as loss_rows
from napkinmath_kernels import costs
from napkinmath_kernels.backend import Backend, use_backend
from napkinmath_kernels.ops.cross_entropy import _linear_cross_entropy_op, linear_cross_entropy
from napkinmath_kernels.ops.divergence import _divergence_op, linear_divergence
from napkinmath_kernels.ops.expert_linear import _expert_linear_backward_op, _expert_linear_op
from napkinmath_kernels.ops.flash_attention import flash_attention
from napkinmath_kernels.ops.gated import swiglu
from napkinmath_kernels.ops.layer_norm import layer_norm
from napkinmath_kernels.ops.linear_group import FrozenLinear, LoraAdapter, flatten
from napkinmath_kernels.ops.log_probabilities import (
    SCORE_ALL,
    _log_probabilities_op,
    linear_log_probabilities,
)
from napkinmath_kernels.ops.log_probabilities import (
    _backward_op as _log_probabilities_backward_op,
)
from napkinmath_kernels.ops.nf4 import quantize
from napkinmath_kernels.ops.qlora import (
    _qlora_linears_backward_op,
    _qlora_linears_op,
    qlora_linears,
)
from napkinmath_kernels.ops.qlora_mlp import _qlora_mlp_backward_op, _qlora_mlp_op, qlora_mlp
from napkinmath_kernels.ops.rms_norm import _rms_norm_backward_op, rms_norm
from napkinmath_kernels.ops.rope import rope
from napkinmath_kernels.weight_buffer import SHARED_BUFFER
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "int64", torch.uint8: "uint8"}
R, H, F, RANK, V = 64, 96, 160, 8, 130
r = symbol("rows")
BIND = Bindings({"rows": R})


def described(
    out_features: int, in_features: int, rank: int = RANK
) -> tuple[costs.LinearSize, adapter_rows.FusedLinear]:
    stored = costs.four_bit_storage(out_features, in_features)
    mirrored = tuple(
        rows.Saved(name=s.name, axes=s.shape, dtype=find_dtype(s.dtype), is_new=False)
        for s in stored
    )
    theirs = costs.LinearSize(out_features, in_features, rank, stored)
    return theirs, adapter_rows.FusedLinear(
        outputs=out_features, inputs=in_features, rank=rank, stored=mirrored
    )


EXPERTS = 4


def expert(rank: int, packed: bool) -> tuple[costs.LinearSize, adapter_rows.FusedLinear]:
    """An expert's linear (F, H), the stack of all of them in 4 bits if `packed`."""
    theirs, ours = described(EXPERTS * F, H, rank)
    stored = (theirs.stored, ours.stored) if packed else ((), ())
    return (
        costs.LinearSize(F, H, rank, stored[0]),
        adapter_rows.FusedLinear(outputs=F, inputs=H, rank=rank, stored=stored[1]),
    )


QKV = [described(H, H), described(32, H), described(32, H)]
MLP = [described(F, H), described(F, H), described(H, F)]


def pair(which: list[Any]) -> tuple[Any, Any]:
    return [theirs for theirs, _ in which], tuple(ours for _, ours in which)


CELLS: dict[str, Any] = {
    "rms_norm": lambda d: (costs.rms_norm(R, H, d), rows.rms_norm(r, H, find_dtype(d))),
    "rms_norm, frozen": lambda d: (
        costs.rms_norm(R, H, d, trains_weight=False),
        rows.rms_norm(r, H, find_dtype(d), trains_weight=False),
    ),
    "rms_norm, residual": lambda d: (
        costs.rms_norm(R, H, d, residual=True),
        rows.rms_norm(r, H, find_dtype(d), residual=True),
    ),
    "rms_norm, few programs": lambda d: (
        costs.rms_norm(R, H, d, multiprocessors=4),
        rows.rms_norm(r, H, find_dtype(d), processors=4),
    ),
    "layer_norm": lambda d: (costs.layer_norm(R, H, d), rows.layer_norm(r, H, find_dtype(d))),
    "rope": lambda d: (costs.rope(2, 4, 2, 5, 16, d), rows.rope(2, 4, 2, 5, 16, find_dtype(d))),
    "gated": lambda d: (costs.gated(R, F, d), rows.gated(r, F, find_dtype(d))),
    "flash": lambda d: (
        costs.flash_attention(2, 4, 2, R, R, 64, d),
        rows.flash_attention(2, 4, 2, r, r, 64, find_dtype(d)),
    ),
    **{
        f"loss {valid} {trains} {chunk}": lambda d, valid=valid, trains=trains, chunk=chunk: (
            costs.linear_cross_entropy(
                R, H, V, d, valid=valid, trains_head=trains, chunk_bytes=chunk
            ),
            loss_rows.linear_cross_entropy(
                r, H, V, find_dtype(d), valid=valid, trains_head=trains, chunk_bytes=chunk
            ),
        )
        for valid in (None, R - 3)
        for trains in (False, True)
        for chunk in (costs.CHUNK_BYTES, 16 * 192 * 2)
    },
    **{
        f"divergence {valid} {trains} {chunk}": lambda d, given=given: (
            costs.linear_divergence(R, H, F, V, d, **given),
            loss_rows.linear_divergence(r, H, F, V, find_dtype(d), **given),
        )
        for valid in (None, R - 3)
        for trains in (False, True)
        for chunk in (costs.CHUNK_BYTES, 2 * 16 * 192 * 2)
        for given in [{"valid": valid, "trains_head": trains, "chunk_bytes": chunk}]
    },
    **{
        f"log-probabilities {trains} {statistics} {chunk}": lambda d, given=given: (
            costs.linear_log_probabilities(R, H, V, d, **given),
            loss_rows.linear_log_probabilities(r, H, V, find_dtype(d), **given),
        )
        for trains in (False, True)
        for statistics in (False, True)
        for chunk in (costs.CHUNK_BYTES, 16 * 192 * 2)
        for given in [{"trains_head": trains, "statistics": statistics, "chunk_bytes": chunk}]
    },
    **{
        f"qkv {adapter} {dropout}": lambda d, adapter=adapter, dropout=dropout: (
            costs.qlora_linears(R, pair(QKV)[0], d, adapter_dtype=adapter, dropout=dropout),
            adapter_rows.qlora_linears(
                r, pair(QKV)[1], find_dtype(d), adapter_dtype=find_dtype(adapter), dropout=dropout
            ),
        )
        for adapter in ("fp32", "bf16")
        for dropout in (False, True)
    },
    **{
        f"experts {packed} {rank}": lambda d, packed=packed, rank=rank: (
            costs.expert_linear(R, EXPERTS, expert(rank, packed)[0], d),
            adapter_rows.expert_linear(r, EXPERTS, expert(rank, packed)[1], find_dtype(d)),
        )
        for packed in (False, True)
        for rank in (0, RANK)
    },
    **{
        f"mlp {dropout} {recompute}": lambda d, dropout=dropout, recompute=recompute: (
            costs.qlora_mlp(R, *pair(MLP)[0], d, dropout=dropout, recompute=recompute),
            adapter_rows.qlora_mlp(
                r, pair(MLP)[1], find_dtype(d), dropout=dropout, recompute=recompute
            ),
        )
        for dropout in (False, True)
        for recompute in (False, True)
    },
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_row_is_that_of_the_kernels_own_table(cell: str, dtype: str) -> None:
    theirs, ours = CELLS[cell](dtype)
    names = [
        (s.name.split()[0] if cell.startswith("mlp") else s.name, s.shape, s.dtype, s.is_new)
        for s in theirs.saved
    ]
    found = [
        (s.name, tuple(BIND(axis) for axis in s.axes), s.dtype.name, s.is_new) for s in ours.saved
    ]
    assert [row[1:] for row in found] == [row[1:] for row in names]
    assert BIND(ours.forward_flops) == theirs.forward_flops
    assert BIND(ours.backward_flops) == theirs.backward_flops
    assert BIND(ours.forward_moved) == theirs.forward_traffic_bytes
    assert BIND(ours.backward_moved) == theirs.backward_traffic_bytes
    assert BIND(ours.forward_temporary) == theirs.forward_temporary_bytes
    if not cell.startswith(("qkv", "mlp")):  # whose backward the kernels' table does not go into
        assert BIND(ours.backward_temporary) == theirs.backward_temporary_bytes


def test_every_row_of_the_kernels_own_table_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        name: function
        for name, function in vars(costs).items()
        if callable(function) and getattr(function, "__annotations__", {}).get("return") == "Cost"
    }
    called: set[str] = set()
    for name, function in table.items():

        def counted(*given: Any, _name: str = name, _run: Any = function, **named: Any) -> Any:
            called.add(_name)
            return _run(*given, **named)

        monkeypatch.setattr(costs, name, counted)
    for cell in CELLS.values():
        cell("bf16")
    # decoding alone is a cost of every product here (ir/costs.py Dequantize)
    assert set(table) - called == {"dequantize"}


def leaf(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(*shape).to(dtype).requires_grad_()


def linears(which: list[Any], dtype: Any = torch.bfloat16) -> list[Any]:
    return [
        FrozenLinear(
            quantize(torch.randn(t.out_features, t.in_features)),
            None,
            LoraAdapter(
                leaf(RANK, t.in_features, dtype=dtype), leaf(t.out_features, RANK, dtype=dtype), 1.0
            ),
        )
        for t, _ in which
    ]


def cases(name: str) -> tuple[Any, list[Any], rows.KernelCost]:
    """(operation, its inputs, its row) at bf16 with adapters in bf16."""
    if name == "rms_norm":
        weight = leaf(H)
        return lambda x: rms_norm(x, weight), [leaf(R, H)], rows.rms_norm(r, H, BF16)
    if name == "layer_norm":
        weight, bias = leaf(H), leaf(H)
        return lambda x: layer_norm(x, weight, bias), [leaf(R, H)], rows.layer_norm(r, H, BF16)
    if name == "rope":
        cos, sin = torch.rand(1, 5, 16), torch.rand(1, 5, 16)
        return (
            lambda q, k: rope(q, k, cos, sin),
            [leaf(2, 4, 5, 16), leaf(2, 2, 5, 16)],
            rows.rope(2, 4, 2, 5, 16, BF16),
        )
    if name == "gated":
        return swiglu, [leaf(R, F), leaf(R, F)], rows.gated(r, F, BF16)
    if name == "flash":
        return (
            flash_attention,
            [leaf(2, 4, 5, 64), leaf(2, 2, 5, 64), leaf(2, 2, 5, 64)],
            rows.flash_attention(2, 4, 2, 5, 5, 64, BF16),
        )
    if name == "qkv":
        found = linears(QKV)
        return (
            lambda x: qlora_linears(x, found, dropout=0.1),
            [leaf(R, H)],
            adapter_rows.qlora_linears(r, pair(QKV)[1], BF16, adapter_dtype=BF16, dropout=True),
        )
    if name == "mlp":
        found = linears(MLP)
        return (
            lambda x: qlora_mlp(x, *found),
            [leaf(R, H)],
            adapter_rows.qlora_mlp(r, pair(MLP)[1], BF16, adapter_dtype=BF16),
        )
    head, targets = leaf(V, H), torch.randint(0, V, (R,))
    if name in ("scored", "scored by a frozen head"):
        trains = name == "scored"
        weight = head if trains else head.detach()
        return (
            lambda h: linear_log_probabilities(h, weight, targets).log_probs,
            [leaf(R, H)],
            loss_rows.linear_log_probabilities(r, H, V, BF16, trains_head=trains),
        )
    if name == "divergence":
        taught, taught_head = torch.randn(R, F).bfloat16(), torch.randn(V, F).bfloat16()
        return (
            lambda h: linear_divergence(h, head, taught, taught_head).loss,
            [leaf(R, H)],
            loss_rows.linear_divergence(r, H, F, V, BF16, trains_head=True),
        )
    return (
        lambda h: linear_cross_entropy(h, head, targets),
        [leaf(R, H)],
        loss_rows.linear_cross_entropy(r, H, V, BF16, trains_head=True),
    )


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        "layer_norm",
        "rope",
        "gated",
        "flash",
        "qkv",
        "mlp",
        "loss",
        "scored",
        "scored by a frozen head",
        "divergence",
    ],
)
def test_a_row_saves_what_the_autograd_function_saves(name: str) -> None:
    run, inputs, row = cases(name)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append((tuple(t.shape), NAMES[t.dtype])) or t, lambda t: t
    ):
        run(*inputs)
    assert Counter(saved) == Counter(
        (tuple(BIND(axis) for axis in s.axes), s.dtype.name) for s in row.saved
    )


class Allocations(TorchDispatchMode):
    """Every storage made inside, with its size and the order of its birth and death; numbered, for
    addresses are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.alive: dict[int, int] = {}  # number by address
        self._made = 0

    def _gone(self, address: int, size: int) -> None:
        self.events.append((self.alive.pop(address), -size))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        result = func(*args, **(kwargs or {}))
        before = {
            t.untyped_storage()._cdata
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (
                    storage._cdata not in self.alive
                    and storage._cdata not in before
                    and storage.nbytes()
                ):
                    self._made += 1
                    self.alive[storage._cdata] = self._made
                    self.events.append((self._made, storage.nbytes()))
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result


@pytest.fixture
def without_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are not run: what lies around their launches is allocated as on a GPU."""
    names = (
        "cross_entropy",
        "divergence",
        "dropout",
        "expert_lora",
        "gated",
        "log_probabilities",
        "nf4",
        "rms_norm",
    )
    for name in names:
        module = importlib.import_module(f"napkinmath_kernels.triton_kernels.{name}")
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    SHARED_BUFFER.take((512, 512), torch.bfloat16, torch.device("cpu"))


def temporaries(function: Any, *arguments: Any) -> int:
    """Peak bytes of what the function makes and does not hand back."""
    with use_backend(Backend.TRITON), torch.no_grad(), Allocations() as watch:
        results = function(*arguments)
    leaves = [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
    kept = {watch.alive.get(t.untyped_storage()._cdata) for t in leaves}
    alive = peak = 0
    for key, change in watch.events:
        alive += 0 if key in kept else change
        peak = max(peak, alive)
    return peak


@pytest.mark.usefixtures("without_launches")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_temporaries_of_the_fused_linears(dropout: float) -> None:
    x = torch.zeros(R, H, dtype=torch.bfloat16)
    arguments = flatten(linears(QKV), x)
    seed = torch.ones(1, dtype=torch.int64) if dropout else None
    row = adapter_rows.qlora_linears(r, pair(QKV)[1], BF16, adapter_dtype=BF16, dropout=dropout > 0)
    assert temporaries(_qlora_linears_op._init_fn, x, *arguments, dropout, seed) == BIND(
        row.forward_temporary
    )
    upstream = [torch.zeros(R, n, dtype=torch.bfloat16) for n in (H, 32, 32)]
    projections = [torch.zeros(R, RANK, dtype=torch.bfloat16)] * 3
    back = (upstream, projections, x, *arguments, dropout, seed, True, [True] * 3)
    assert temporaries(_qlora_linears_backward_op._init_fn, *back) == BIND(row.backward_temporary)


@pytest.mark.usefixtures("without_launches")
def test_temporaries_of_the_experts() -> None:
    row = adapter_rows.expert_linear(r, EXPERTS, expert(RANK, True)[1], BF16, adapter_dtype=BF16)
    x, dy = (torch.zeros(R, n, dtype=torch.bfloat16) for n in (H, F))
    a, b = torch.zeros(EXPERTS, RANK, H).bfloat16(), torch.zeros(EXPERTS, F, RANK).bfloat16()
    weight = quantize(torch.randn(EXPERTS, F, H))
    layout = [EXPERTS, F, H, weight.blocksize, weight.nested_blocksize]
    arguments = (x, weight.tensors(), layout, False, torch.tensor([R // 2, R, R, R]).int(), a, b)
    assert temporaries(_expert_linear_op._init_fn, *arguments, 0.5) == BIND(row.forward_temporary)
    back = (dy, torch.zeros(R, RANK).bfloat16(), *arguments, 0.5, True, True)
    assert temporaries(_expert_linear_backward_op._init_fn, *back) == BIND(row.backward_temporary)


@pytest.mark.usefixtures("without_launches")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", [False, True])
def test_temporaries_of_the_fused_feed_forward(dropout: float, recompute: bool) -> None:
    x = torch.zeros(R, H, dtype=torch.bfloat16)
    arguments = flatten(linears(MLP), x)
    seed = torch.ones(1, dtype=torch.int64) if dropout else None
    row = adapter_rows.qlora_mlp(
        r, pair(MLP)[1], BF16, adapter_dtype=BF16, dropout=dropout > 0, recompute=recompute
    )
    assert temporaries(_qlora_mlp_op._init_fn, x, *arguments, dropout, seed, 0, recompute) == BIND(
        row.forward_temporary
    )
    kept = [] if recompute else [torch.zeros(R, F, dtype=torch.bfloat16)] * 2
    projections = [torch.zeros(R, RANK, dtype=torch.bfloat16)] * 3
    back = (
        torch.zeros(R, H, dtype=torch.bfloat16),
        kept,
        projections,
        x,
        *arguments,
        dropout,
        seed,
        0,
        True,
        [True] * 3,
    )
    assert temporaries(_qlora_mlp_backward_op._init_fn, *back) == BIND(row.backward_temporary)


@pytest.mark.usefixtures("without_launches")
@pytest.mark.parametrize("ignored", [0, 3])
@pytest.mark.parametrize("trains", [False, True])
def test_temporaries_of_the_loss(ignored: int, trains: bool) -> None:
    """The numbers of one value each (divisor, its inverse, a sum in float64) are up to 28 bytes
    that the rows leave out."""
    hidden, head, targets = (
        torch.zeros(R, H, dtype=torch.bfloat16),
        torch.zeros(V, H, dtype=torch.bfloat16),
        torch.zeros(R).long(),
    )
    targets[:ignored] = -100
    row = loss_rows.linear_cross_entropy(
        r, H, V, BF16, valid=R - ignored if ignored else None, trains_head=trains
    )
    arguments = (
        hidden,
        head,
        hidden.new_empty(0, 0),
        hidden.new_empty(0, 0),
        targets,
        None,
        True,
        -100,
        0.0,
        0.0,
        0.0,
        costs.CHUNK_BYTES,
        [True, trains, False, False],
    )
    found = temporaries(_linear_cross_entropy_op._init_fn, *arguments)
    assert 0 <= found - BIND(row.forward_temporary) <= 28


@pytest.mark.usefixtures("without_launches")
@pytest.mark.parametrize("trains", [False, True])
def test_temporaries_of_the_log_probabilities(trains: bool) -> None:
    """In one chunk and in several; all targets are scored. A sum over several chunks of a trained
    head makes wide copies on a CPU alone: the traces compare it."""
    hidden, head = (torch.zeros(n, H, dtype=torch.bfloat16) for n in (R, V))
    targets = torch.zeros(R).long()
    for chunk_bytes in (costs.CHUNK_BYTES, 16 * 192 * 2):
        row = loss_rows.linear_log_probabilities(
            r, H, V, BF16, trains_head=trains, chunk_bytes=chunk_bytes
        )
        options = (SCORE_ALL, 1.0, 0.0, 1.0, chunk_bytes)
        arguments = (hidden, head, targets, *options, True, True, trains)
        found = temporaries(_log_probabilities_op._init_fn, *arguments)
        assert found == BIND(row.forward_temporary)
        if trains and chunk_bytes == costs.CHUNK_BYTES:
            back = (torch.zeros(R), hidden, head, targets, *options, True)
            found = temporaries(_log_probabilities_backward_op._init_fn, *back)
            assert found == BIND(row.backward_temporary)


@pytest.mark.usefixtures("without_launches")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("left_out", [0, 3])
def test_temporaries_of_the_divergence(left_out: int, trains: bool) -> None:
    """The numbers of one value each are up to 28 bytes that the rows leave out."""
    hidden, head = (torch.zeros(n, H, dtype=torch.bfloat16) for n in (R, V))
    taught, taught_head = (torch.zeros(n, F, dtype=torch.bfloat16) for n in (R, V))
    mask = torch.ones(R, dtype=torch.bool)
    mask[:left_out] = False
    nothing = hidden.new_empty(0, 0)
    tensors = (hidden, head, nothing, nothing, taught, taught_head, mask, None)
    chunks = (costs.CHUNK_BYTES,) if trains else (costs.CHUNK_BYTES, 2 * 16 * 192 * 2)
    for chunk_bytes in chunks:  # sums over several make wide copies on a CPU alone
        valid = R - left_out if left_out else None
        row = loss_rows.linear_divergence(
            r, H, F, V, BF16, valid=valid, trains_head=trains, chunk_bytes=chunk_bytes
        )
        options = (True, 0.5, [1.0, 1.0], [0.0, 0.0], 1.0, chunk_bytes, False)
        has = [True, trains, False, False]
        found = temporaries(_divergence_op._init_fn, *tensors, *options, has)
        assert 0 <= found - BIND(row.forward_temporary) <= 28


@pytest.mark.usefixtures("without_launches")
@pytest.mark.parametrize("trains", [False, True])
def test_temporaries_of_the_norm(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("napkinmath_kernels.triton_kernels.rms_norm")
    monkeypatch.setattr(module, "num_processors", lambda *_: 4)
    x, weight, rstd = (
        torch.zeros(R, H, dtype=torch.bfloat16),
        torch.zeros(H, dtype=torch.bfloat16),
        torch.zeros(R),
    )
    row = rows.rms_norm(r, H, BF16, trains_weight=trains, processors=4)
    assert temporaries(
        _rms_norm_backward_op._init_fn, x, None, x, weight, rstd, 0.0, trains
    ) == BIND(row.backward_temporary)


def test_a_head_stored_in_another_type_is_cast_for_its_products() -> None:
    same, other = (
        loss_rows.linear_cross_entropy(r, H, V, BF16, head_dtype=dtype) for dtype in (BF16, FP32)
    )
    assert BIND(other.forward_temporary) - BIND(same.forward_temporary) == 2 * V * H
