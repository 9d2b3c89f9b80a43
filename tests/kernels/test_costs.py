"""The cost table against the ops themselves: saved tensors by hooks, FLOPs by torch's counter,
temporaries by watching allocations."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from napkinmath_kernels import costs
from napkinmath_kernels.backend import Backend, use_backend
from napkinmath_kernels.ops.cross_entropy import linear_cross_entropy
from napkinmath_kernels.ops.divergence import linear_divergence
from napkinmath_kernels.ops.flash_attention import _flash_backward_op, flash_attention
from napkinmath_kernels.ops.gated import swiglu
from napkinmath_kernels.ops.layer_norm import _layer_norm_backward_op, layer_norm
from napkinmath_kernels.ops.linear_group import FrozenLinear, LoraAdapter
from napkinmath_kernels.ops.log_probabilities import linear_log_probabilities
from napkinmath_kernels.ops.nf4 import quantize
from napkinmath_kernels.ops.qlora import qlora_linears
from napkinmath_kernels.ops.qlora_mlp import qlora_mlp
from napkinmath_kernels.ops.rms_norm import _rms_norm_backward_op, rms_norm
from napkinmath_kernels.ops.rope import rope
from napkinmath_kernels.weight_buffer import SHARED_BUFFER
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64, "uint8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ROWS, HIDDEN, WIDTH, RANK = 6, 64, 128, 4
PROCESSORS = 4  # what stands in for a GPU's in the interpreter


def leaf(*shape, dtype="bf16"):
    return torch.randn(*shape).to(DTYPES[dtype]).requires_grad_()


def linears_of(shapes, adapter_dtype="fp32"):
    found, described = [], []
    for out_features, in_features in shapes:
        a, b = (
            leaf(RANK, in_features, dtype=adapter_dtype),
            leaf(out_features, RANK, dtype=adapter_dtype),
        )
        found.append(
            FrozenLinear(
                quantize(torch.randn(out_features, in_features)), None, LoraAdapter(a, b, 1.0)
            )
        )
        described.append(
            costs.LinearSize(
                out_features, in_features, RANK, costs.four_bit_storage(out_features, in_features)
            )
        )
    return found, described


def qkv(dropout):
    found, described = linears_of([(HIDDEN, HIDDEN), (32, HIDDEN), (32, HIDDEN)])
    run = lambda x: qlora_linears(x, found, dropout=dropout)  # noqa: E731
    return (
        run,
        [leaf(ROWS, HIDDEN)],
        costs.qlora_linears(ROWS, described, "bf16", dropout=dropout > 0),
    )


def mlp(dropout, recompute):
    found, described = linears_of([(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)])
    run = lambda x: qlora_mlp(x, *found, dropout=dropout, recompute=recompute)  # noqa: E731
    return (
        run,
        [leaf(ROWS, HIDDEN)],
        costs.qlora_mlp(ROWS, *described, "bf16", dropout=dropout > 0, recompute=recompute),
    )


def loss(trains_head, ignored, chunk_bytes=costs.CHUNK_BYTES):
    weight = leaf(100, HIDDEN) if trains_head else leaf(100, HIDDEN).detach()
    targets = torch.randint(0, 100, (ROWS,))
    targets[:ignored] = -100
    run = lambda h: linear_cross_entropy(h, weight, targets, chunk_bytes=chunk_bytes)  # noqa: E731
    cost = costs.linear_cross_entropy(
        ROWS,
        HIDDEN,
        100,
        "bf16",
        valid=ROWS - ignored,
        trains_head=trains_head,
        chunk_bytes=chunk_bytes,
    )
    return run, [leaf(ROWS, HIDDEN)], cost


def scored(trains_head):
    weight = leaf(100, HIDDEN) if trains_head else leaf(100, HIDDEN).detach()
    targets = torch.randint(0, 100, (ROWS,))
    run = lambda h: linear_log_probabilities(h, weight, targets).log_probs  # noqa: E731
    cost = costs.linear_log_probabilities(ROWS, HIDDEN, 100, "bf16", trains_head=trains_head)
    return run, [leaf(ROWS, HIDDEN)], cost


def compared(trains_head, left_out):
    weight = leaf(100, HIDDEN) if trains_head else leaf(100, HIDDEN).detach()
    taught, taught_weight = leaf(ROWS, WIDTH).detach(), leaf(100, WIDTH).detach()
    mask = torch.arange(ROWS) >= left_out
    run = lambda h: linear_divergence(h, weight, taught, taught_weight, mask=mask).loss  # noqa: E731
    cost = costs.linear_divergence(
        ROWS, HIDDEN, WIDTH, 100, "bf16", valid=ROWS - left_out, trains_head=trains_head
    )
    return run, [leaf(ROWS, HIDDEN)], cost


def norm(residual, trains=True):
    weight = leaf(HIDDEN) if trains else leaf(HIDDEN).detach()
    run = lambda x, *r: rms_norm(x, weight, residual=r[0] if r else None)  # noqa: E731
    inputs = [leaf(ROWS, HIDDEN) for _ in range(2 if residual else 1)]
    return (
        run,
        inputs,
        costs.rms_norm(
            ROWS,
            HIDDEN,
            "bf16",
            residual=residual,
            trains_weight=trains,
            multiprocessors=PROCESSORS,
        ),
    )


def attention():
    q, k = leaf(1, 4, 5, 64), leaf(1, 2, 7, 64)
    return (
        flash_attention,
        [q, k, leaf(1, 2, 7, 64)],
        costs.flash_attention(1, 4, 2, 5, 7, 64, "bf16"),
    )


def rotation():
    cos, sin = torch.rand(1, 5, 16), torch.rand(1, 5, 16)
    return (
        lambda q, k: rope(q, k, cos, sin),
        [leaf(2, 4, 5, 16), leaf(2, 2, 5, 16)],
        costs.rope(2, 4, 2, 5, 16, "bf16"),
    )


def layer():
    weight, bias = leaf(HIDDEN), leaf(HIDDEN)
    cost = costs.layer_norm(ROWS, HIDDEN, "bf16", multiprocessors=PROCESSORS)
    return lambda x: layer_norm(x, weight, bias), [leaf(ROWS, HIDDEN)], cost


CASES = {
    "rms_norm": lambda: norm(False),
    "rms_norm + residual": lambda: norm(True),
    "rms_norm, frozen": lambda: norm(False, trains=False),
    "layer_norm": layer,
    "rope": rotation,
    "swiglu": lambda: (
        swiglu,
        [leaf(ROWS, WIDTH), leaf(ROWS, WIDTH)],
        costs.gated(ROWS, WIDTH, "bf16"),
    ),
    "flash_attention": attention,
    "loss, frozen head": lambda: loss(False, 0),
    "loss, trained head": lambda: loss(True, 0),
    "loss, ignored, chunks": lambda: loss(True, 2, chunk_bytes=2 * 128 * 2),
    "log-probabilities, frozen head": lambda: scored(False),
    "log-probabilities, trained head": lambda: scored(True),
    "divergence, frozen head": lambda: compared(False, 2),
    "divergence, trained head": lambda: compared(True, 0),
    "qlora qkv": lambda: qkv(0.0),
    "qlora qkv, dropout": lambda: qkv(0.1),
    "qlora mlp": lambda: mlp(0.0, False),
    "qlora mlp, dropout": lambda: mlp(0.1, False),
    "qlora mlp, recompute": lambda: mlp(0.0, True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_what_the_table_says(case):
    run, inputs, cost = CASES[case]()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append((tuple(t.shape), NAMES[t.dtype])) or t, lambda t: t
    ):
        run(*inputs)
    assert Counter(saved) == Counter((tensor.shape, tensor.dtype) for tensor in cost.saved)


@pytest.mark.parametrize("case", CASES)
def test_saved_tensors_marked_new_are_no_inputs(case):
    run, inputs, cost = CASES[case]()
    found = []
    given = {x.untyped_storage().data_ptr() for x in inputs}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        outputs = run(*inputs)
    outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
    given |= {y.untyped_storage().data_ptr() for y in outputs}
    fresh = Counter(
        (tuple(t.shape), NAMES[t.dtype])
        for t in found
        if t.untyped_storage().data_ptr() not in given
    )
    for tensor in cost.saved:
        if tensor.is_new and tensor.num_bytes:
            assert fresh[tensor.shape, tensor.dtype] > 0, tensor


class WatchAllocations(TorchDispatchMode):
    """The most bytes alive at once in storages made inside, each counted once; the shared weight
    buffer is not made inside."""

    def __init__(self):
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._known = set()

    def _forget(self, key, size):
        self.alive -= size
        self._known.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
                    storage._cdata not in self._known
                    and storage._cdata not in before
                    and storage.nbytes()
                ):
                    self._known.add(storage._cdata)
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result


def temporaries_of(function, *arguments):
    """Peak bytes inside less what is handed back."""
    with use_backend(Backend.TRITON), WatchAllocations() as watch:
        results = function(*arguments)
    kept = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in results
        if isinstance(t, torch.Tensor)
    }
    return watch.peak - sum(kept.values())


def test_backward_temporaries_of_the_norms():
    """fp32, which the interpreter runs without copies of its own."""
    x, dy, weight, rstd, mean = (
        torch.randn(9, 32),
        torch.randn(9, 32),
        torch.randn(32),
        torch.rand(9),
        torch.randn(9),
    )
    cost = costs.rms_norm(9, 32, "fp32", multiprocessors=PROCESSORS)
    assert (
        temporaries_of(_rms_norm_backward_op._init_fn, dy, None, x, weight, rstd, 0.0, True)
        == cost.backward_temporary_bytes
    )
    frozen = costs.rms_norm(9, 32, "fp32", trains_weight=False)
    assert (
        temporaries_of(_rms_norm_backward_op._init_fn, dy, None, x, weight, rstd, 0.0, False)
        == frozen.backward_temporary_bytes
        == 0
    )
    cost = costs.layer_norm(9, 32, "fp32", multiprocessors=PROCESSORS)
    assert (
        temporaries_of(_layer_norm_backward_op._init_fn, dy, x, weight, mean, rstd, True)
        == cost.backward_temporary_bytes
    )


def test_backward_temporaries_of_attention():
    q, o, do = (torch.randn(1, 2, 5, 64) for _ in range(3))
    k, v = torch.randn(1, 1, 7, 64), torch.randn(1, 1, 7, 64)
    lse = torch.randn(1, 2, 5)
    arguments = (q, k, v, o, lse, do, None, None, None, 5, 7, 0.125, False, 0)
    assert (
        temporaries_of(_flash_backward_op._init_fn, *arguments)
        == costs.flash_attention(1, 2, 1, 5, 7, 64, "fp32").backward_temporary_bytes
    )


def flops_of(function, inputs):
    """Matrix products only, as torch counts them when they are seen one by one: the ops' own
    functions, below the dispatcher."""
    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() in ("aten::mm", "aten::mm.out"):
                found.append(2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1])
            if func.name() in ("aten::addmm", "aten::addmm_", "aten::addmm.out"):
                found.append(2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1])
            return func(*args, **(kwargs or {}))

    with Count():
        function(*inputs)
    return sum(found)


def test_flops_of_the_fused_linears_are_those_of_their_products():
    from napkinmath_kernels.ops.linear_group import flatten
    from napkinmath_kernels.ops.qlora import _qlora_linears_backward_op, _qlora_linears_op

    found, described = linears_of([(HIDDEN, HIDDEN), (32, HIDDEN)])
    x = torch.randn(ROWS, HIDDEN)
    arguments = flatten(found, x)
    cost = costs.qlora_linears(ROWS, described, "fp32")
    decode = sum(linear.out_features * linear.in_features for linear in described)
    assert (
        flops_of(_qlora_linears_op._init_fn, (x, *arguments, 0.0, None))
        == cost.forward_flops - decode
    )
    upstream, projections = (
        [torch.randn(ROWS, HIDDEN), torch.randn(ROWS, 32)],
        [torch.randn(ROWS, RANK)] * 2,
    )
    backward = (upstream, projections, x, *arguments, 0.0, None, True, [True, True])
    with torch.no_grad():
        assert (
            flops_of(_qlora_linears_backward_op._init_fn, backward) == cost.backward_flops - decode
        )


@pytest.mark.parametrize("trains_head", [False, True])
def test_flops_of_the_loss_are_those_of_its_products(trains_head):
    from napkinmath_kernels.ops.cross_entropy import _linear_cross_entropy_op

    hidden, weight, targets = (
        torch.randn(ROWS, HIDDEN),
        torch.randn(100, HIDDEN),
        torch.randint(0, 100, (ROWS,)),
    )
    cost = costs.linear_cross_entropy(ROWS, HIDDEN, 100, "fp32", trains_head=trains_head)
    arguments = (
        hidden,
        weight,
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
        [True, trains_head, False, False],
    )
    assert (
        flops_of(_linear_cross_entropy_op._init_fn, arguments)
        == cost.forward_flops - 8 * ROWS * 100
    )


@pytest.mark.parametrize("trains_head", [False, True])
def test_flops_of_the_log_probabilities_are_those_of_its_products(trains_head):
    """A frozen head takes two products, both in the forward; a trained one four."""
    from napkinmath_kernels.ops import log_probabilities as op

    cost = costs.linear_log_probabilities(ROWS, HIDDEN, 100, "fp32", trains_head=trains_head)
    hidden, weight = torch.randn(ROWS, HIDDEN), torch.randn(100, HIDDEN)
    targets = torch.randint(0, 100, (ROWS,))
    options = (op.SCORE_ALL, 1.0, 0.0, 1.0, costs.CHUNK_BYTES)
    arguments = (hidden, weight, targets, *options, False, True, trains_head)
    passes = 4 if trains_head else 8
    found = flops_of(op._log_probabilities_op._init_fn, arguments)
    assert found == cost.forward_flops - passes * ROWS * 100
    if trains_head:
        back = (torch.randn(ROWS), hidden, weight, targets, *options, True)
        found = flops_of(op._backward_op._init_fn, back)
        assert found == cost.backward_flops - 8 * ROWS * 100


@pytest.mark.parametrize("trains_head", [False, True])
def test_flops_of_the_divergence_are_those_of_its_products(trains_head):
    from napkinmath_kernels.ops.divergence import _divergence_op

    cost = costs.linear_divergence(ROWS, HIDDEN, WIDTH, 100, "fp32", trains_head=trains_head)
    shapes = ((ROWS, HIDDEN), (100, HIDDEN), (0, 0), (0, 0), (ROWS, WIDTH), (100, WIDTH))
    tensors = [torch.randn(shape) for shape in shapes]
    options = (True, 0.5, [1.0, 1.0], [0.0, 0.0], 1.0, costs.CHUNK_BYTES, False)
    has = [True, trains_head, False, False]
    found = flops_of(_divergence_op._init_fn, (*tensors, None, None, *options, has))
    assert found == cost.forward_flops - 24 * ROWS * 100


def test_the_decoded_weight_lies_in_the_shared_buffer():
    found, described = linears_of([(HIDDEN, HIDDEN), (32, HIDDEN)])
    SHARED_BUFFER.release()
    qlora_linears(torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16), found)
    assert SHARED_BUFFER.num_bytes() == costs.decoded_weight_bytes(described, "bf16")


@pytest.mark.parametrize("nested", [True, False])
def test_four_bit_storage_is_what_quantize_stores(nested):
    weight = quantize(torch.randn(96, 256), nested=nested)
    described = costs.four_bit_storage(96, 256, nested=nested)
    assert [(tuple(t.shape), NAMES[t.dtype]) for t in weight.tensors()] == [
        (tensor.shape, tensor.dtype) for tensor in described
    ]
    assert costs.LinearSize(96, 256, 0, described).stored_bytes == weight.num_bytes()


def test_the_table_needs_no_torch():
    import subprocess
    import sys
    from pathlib import Path

    code = (
        f"import sys, runpy; runpy.run_path({str(Path(costs.__file__))!r}); sys.exit('torch' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
