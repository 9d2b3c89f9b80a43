"""4-bit weights: equal to bitsandbytes bit for bit, both ways; memory bounds, special values,
registration, errors."""

from __future__ import annotations

import dataclasses

import bitsandbytes.functional as bnb
import pytest
import torch
from kernel_numerics import inside_poison, poisoned_allocations
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.nf4 import (
    BLOCK_SIZES,
    NF4_CODE,
    QuantizedWeight,
    _dequantize_into_op,
    _dequantize_op,
    _quantize_op,
    dequantize,
    four_bit_code,
    nested_scale_code,
    quantize,
)
from napkinmath_kernels.weight_buffer import WeightBuffer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = ("nf4", "fp4")
# one block; odd rows; a program and a bit; more than 256 scales; one value; an odd end; an even one
SHAPES = [(1, 64), (3, 192), (130, 128), (65, 320), (1, 1), (7, 2731), (9, 130)]


def theirs(weight, format, blocksize=64, nested=True):
    return bnb.quantize_4bit(
        weight, quant_type=format, blocksize=blocksize, compress_statistics=nested
    )


def weight_of(shape, dtype):
    return (torch.randn(shape) * 10 ** torch.empty(shape[0], 1).uniform_(-4, 2)).to(dtype)


def assert_same_state(ours, packed, state):
    assert torch.equal(ours.packed, packed) and torch.equal(ours.code, state.code)
    assert torch.equal(ours.absmax, state.absmax)
    assert ours.is_nested == state.nested
    if state.nested:
        assert torch.equal(ours.nested_absmax, state.state2.absmax) and torch.equal(
            ours.nested_code, state.state2.code
        )
        assert torch.equal(ours.offset, state.offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_is_bit_exact_with_bitsandbytes(backend, dtype, format, shape):
    weight = weight_of(shape, dtype)
    assert_same_state(quantize(weight, format), *theirs(weight, format))


@pytest.mark.parametrize("blocksize", BLOCK_SIZES)
@pytest.mark.parametrize("nested", [True, False])
def test_block_sizes_and_plain_scales_are_bit_exact(backend, blocksize, nested):
    weight = weight_of((5, 1999), torch.float32)
    ours = quantize(weight, blocksize=blocksize, nested=nested)
    packed, state = theirs(weight, "nf4", blocksize, nested)
    assert_same_state(ours, packed, state)
    exact = bnb.dequantize_4bit(packed, state)
    assert torch.equal(dequantize(ours), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nested", [True, False])
def test_dequantize_is_bit_exact_with_bitsandbytes(backend, dtype, format, shape, nested):
    packed, state = theirs(weight_of(shape, dtype), format, nested=nested)
    ours = dequantize(QuantizedWeight.from_bitsandbytes(packed, state))
    assert ours.shape == shape and torch.equal(ours, bnb.dequantize_4bit(packed, state))


def test_the_tables_are_those_of_bitsandbytes():
    cpu = torch.device("cpu")
    assert torch.equal(nested_scale_code(cpu), bnb.create_dynamic_map())
    for format in FORMATS:
        assert torch.equal(four_bit_code(format, cpu), bnb.get_4bit_type(format, device="cpu"))


def test_params4bit_is_read_without_a_copy():
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(128, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.load_state_dict({"weight": torch.randn(64, 128)})
    layer.to("cpu")
    ours = QuantizedWeight.from_bitsandbytes(layer.weight, layer.weight.quant_state)
    assert ours.packed.data_ptr() == layer.weight.data_ptr()
    exact = bnb.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(dequantize(ours), exact)


def test_bytes_are_the_published_bits_a_parameter():
    nested, plain = quantize(torch.randn(512, 512)), quantize(torch.randn(512, 512), nested=False)
    tables = (
        4 * 16 + 4 * 256 + 4
    )  # code, nested code, offset: bitsandbytes keeps them once a tensor
    numel = 512 * 512
    assert nested.num_bytes() == numel // 2 + numel // 64 + 4 * numel // (64 * 256) + tables
    assert plain.num_bytes() == numel // 2 + 4 * numel // 64 + 4 * 16


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_outside_the_tensors_is_read_or_written(triton_backend, shape):
    weight = weight_of(shape, torch.bfloat16)
    plain = quantize(weight)
    fenced = {
        field.name: (
            inside_poison(value).detach()
            if isinstance(value := getattr(plain, field.name), torch.Tensor)
            else value
        )
        for field in dataclasses.fields(plain)
    }
    with poisoned_allocations():
        values = dequantize(QuantizedWeight(**fenced))
        packed, absmax = _quantize_op(inside_poison(weight), "nf4", 64)
        assert torch.equal(values, dequantize(plain))
        assert torch.equal(packed, plain.packed) and absmax.isfinite().all()


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_spoil_their_block_and_no_other(backend, special):
    weight = torch.randn(4, 64)
    weight[2, 5] = special
    values = dequantize(quantize(weight, nested=False))
    assert not values[2].isfinite().all()
    assert values[[0, 1, 3]].isfinite().all()


def test_a_zero_block_stays_zero(backend):
    assert torch.equal(dequantize(quantize(torch.zeros(2, 64), nested=False)), torch.zeros(2, 64))


def test_out_is_filled_and_returned(backend):
    quantized = quantize(torch.randn(4, 64))
    out = torch.empty(4, 64, dtype=torch.float16)
    assert dequantize(quantized, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, dequantize(quantized, dtype=torch.float16))


def test_opcheck():
    quantized = quantize(torch.randn(4, 64))
    opcheck(_quantize_op, (torch.randn(4, 64), "nf4", 64))
    opcheck(_dequantize_op, (quantized.tensors(), [4, 64], torch.float32, 64, 256))
    opcheck(_dequantize_into_op, (quantized.tensors(), 64, 256, torch.empty(4, 64)))


def test_the_weight_buffer_is_reused_and_grows_to_the_largest():
    buffer, cpu = WeightBuffer(), torch.device("cpu")
    first = buffer.take((4, 8), torch.bfloat16, cpu)
    second = buffer.take((2, 8), torch.bfloat16, cpu)
    assert first.data_ptr() == second.data_ptr() and buffer.num_bytes() == 64
    buffer.take((8, 8), torch.bfloat16, cpu)
    assert buffer.num_bytes() == 128
    buffer.take((1, 1), torch.float32, cpu)
    assert buffer.num_bytes() == 132
    buffer.release()
    assert buffer.num_bytes() == 0


def test_bad_input_is_refused_in_one_line():
    good = quantize(torch.randn(4, 64))
    bad = [
        (lambda: quantize(torch.randn(0, 64)), "0 values in blocks of 64"),
        (lambda: quantize(torch.randn(4, 64), blocksize=48), "blocks of 48"),
        (lambda: quantize(torch.randn(4, 64).double()), "float64"),
        (lambda: quantize(torch.randn(4, 64), "nf5"), "nf5"),
        (lambda: dequantize(good, dtype=torch.int8), "torch.int8"),
        (lambda: dequantize(good, out=torch.empty(64, 4).t()), "strides"),
        (lambda: dataclasses.replace(good, shape=(4, 128)), r"\(4, 128\)"),
        (lambda: dataclasses.replace(good, absmax=good.absmax[:2]), "2 scales"),
        (lambda: dataclasses.replace(good, absmax=good.absmax.float()), "float32, nested=True"),
        (lambda: dataclasses.replace(good, offset=None), "part of the nested state"),
        (lambda: dataclasses.replace(good, nested_absmax=torch.empty(0)), "0 nested scales"),
        (lambda: QuantizedWeight.from_bitsandbytes(torch.empty(4), None), "quant_state"),
    ]
    for call, says in bad:
        with pytest.raises(KernelInputError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_the_code_is_sorted_and_spans_one():
    assert sorted(NF4_CODE) == list(NF4_CODE) and NF4_CODE[0] == -1 and NF4_CODE[-1] == 1


def test_tables_made_inside_a_fake_mode_are_not_kept():
    with FakeTensorMode():
        assert type(quantize(torch.randn(4, 64), "fp4", nested=False).code) is not torch.Tensor
    real = quantize(torch.randn(4, 64), "fp4", nested=False)
    assert type(real.code) is torch.Tensor and dequantize(real).isfinite().all()
    with FakeTensorMode():
        quantize(torch.randn(4, 64), "fp4", nested=False)


def test_a_captured_graph_gets_a_buffer_of_its_own(monkeypatch):
    """Replays write to the address they were captured with: not to one that the next larger weight
    lets go of."""
    made = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(
        torch, "empty", lambda shape, **options: made.append((shape, options)) or torch.zeros(shape)
    )
    buffer = WeightBuffer()
    for _ in range(2):
        buffer.take((2, 3), torch.bfloat16, torch.device("cuda:0"))
    assert [shape for shape, _ in made] == [(2, 3)] * 2 and buffer.num_bytes() == 0
