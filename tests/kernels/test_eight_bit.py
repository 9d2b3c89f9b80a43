"""8-bit weights: FP8 and int8 values with scales a block or a row, decoded and multiplied, and
transformers' FP8 linears under `patch`."""

from __future__ import annotations

import pytest
import torch
from kernel_numerics import inside_poison
from napkinmath_kernels import (
    FrozenLinear,
    LoraAdapter,
    ScaledWeight,
    costs,
    dequantize,
    look_up_8bit,
    qlora_linears,
    quantize_8bit,
)
from napkinmath_kernels.errors import KernelInputError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
#: Half a step of e4m3's three bits of mantissa.
FP8_STEP = 2**-4
BLOCKS = [("fp8", (128, 128)), ("fp8", (1, 200)), ("fp8", (64, 48)), ("int8", (1, 200))]


def values_of(weight: ScaledWeight) -> torch.Tensor:
    """The plain definition, in float64."""
    rows, columns = weight.shape
    scales = weight.scales.double()
    scales = scales.repeat_interleave(weight.block[0], 0)[:rows]
    return weight.values.double() * scales.repeat_interleave(weight.block[1], 1)[:, :columns]


@pytest.mark.parametrize(("format", "block"), BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding_is_the_definition_rounded_once(backend, format, block, dtype):
    weight = quantize_8bit(torch.randn(70, 200) * 3, format, block=block)
    exact = values_of(weight).float()  # a product of 8 and 24 bits is rounded once here
    # the interpreter truncates to bf16: one step of it
    step = 2**-7 if dtype is torch.bfloat16 else 0.0
    out = dequantize(weight, dtype=dtype).float()
    assert ((out - exact.to(dtype).float()).abs() <= step * exact.abs()).all()


def test_bytes_are_those_of_the_cost_table():
    for block in ((128, 128), (1, 200)):
        weight = quantize_8bit(torch.randn(70, 200), block=block)
        storage = costs.eight_bit_storage(70, 200, block=block)
        assert weight.num_bytes() == sum(tensor.num_bytes for tensor in storage)


def test_every_byte_of_e4m3(backend):
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)
    weight = ScaledWeight(every.view(torch.float8_e4m3fn), torch.ones(1, 1), torch.float32)
    want = weight.values.float()
    assert want.isnan().sum() == 2
    assert torch.equal(dequantize(weight).nan_to_num(7.0), want.nan_to_num(7.0))


def test_large_and_small_scales(backend):
    stored = torch.full((2, 3), 448.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0**118], [2.0**-140]])
    found = dequantize(ScaledWeight(stored, scales, torch.float32, (1, 3)))
    assert torch.equal(found, 448.0 * scales.expand(2, 3))


@pytest.mark.parametrize(("format", "block"), BLOCKS)
def test_quantizing_is_within_half_a_step(format, block):
    plain = torch.randn(70, 200)
    plain[:, :48] = 0.0  # a block of zeros
    weight = quantize_8bit(plain, format, block=block)
    largest = weight.scales.repeat_interleave(block[0], 0)[:70]
    largest = largest.repeat_interleave(block[1], 1)[:, :200]
    # of int8 half of a scale; of FP8 also half of its smallest number
    bound = largest / 2 if format == "int8" else plain.abs() * FP8_STEP + largest * 2**-10
    assert ((dequantize(weight) - plain).abs() <= bound * 1.0001).all()


def test_nothing_is_read_or_written_outside(triton_backend):
    weight = quantize_8bit(torch.randn(5, 130), "int8")
    fenced = ScaledWeight(weight.values, inside_poison(weight.scales), torch.float32, weight.block)
    assert torch.equal(dequantize(fenced), values_of(weight).float())


def test_rows_are_looked_up_as_from_the_decoded_table(backend):
    table = quantize_8bit(torch.randn(300, 130), "int8")
    for ids in (torch.tensor([[0, 299, 7], [7, 128, 1]]), torch.zeros(0, dtype=torch.int32)):
        assert torch.equal(look_up_8bit(table, ids), dequantize(table)[ids.long()])


def test_a_row_outside_the_table_reads_nothing(triton_backend):
    table = quantize_8bit(torch.randn(5, 130), "int8")
    found = look_up_8bit(table, torch.tensor([4, 5, -1]))
    assert torch.equal(found[0], dequantize(table)[4]) and found[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_over_8_bits_is_the_one_over_its_values(backend, dtype):
    weight = quantize_8bit(torch.randn(24, 130) / 12, "fp8", block=(16, 128))
    a, b = torch.randn(4, 130) / 12, torch.randn(24, 4)
    results = []
    for base in (weight, dequantize(weight, dtype=dtype)):
        x = torch.linspace(-2, 2, 7 * 130).view(7, 130).to(dtype).requires_grad_()
        lora = [part.clone().requires_grad_() for part in (a, b)]
        (y,) = qlora_linears(x, [FrozenLinear(base, None, LoraAdapter(*lora, 0.5))])
        results.append([y, *torch.autograd.grad(y.float().square().sum(), (x, *lora))])
    for ours, plain in zip(*results, strict=True):
        assert torch.equal(ours, plain)


def test_transformers_fp8_linear_under_patch():
    """Forward and gradients of a patched Llama in FP8 are those of the same weights in 32 bits."""
    from napkinmath_kernels import patch, unpatch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations import finegrained_fp8

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config)
    model = LlamaForCausalLM(config)
    model.load_state_dict(plain.state_dict())
    for name, module in list(plain.named_modules()):
        if type(module) is not torch.nn.Linear or name == "lm_head":
            continue
        weight = quantize_8bit(module.weight, "fp8", block=(32, 32))
        packed = finegrained_fp8.FP8Linear(
            module.in_features, module.out_features, block_size=(32, 32)
        )
        packed.weight = torch.nn.Parameter(weight.values, requires_grad=False)
        packed.weight_scale_inv = torch.nn.Parameter(weight.scales)
        module.weight.data = dequantize(weight)
        model.set_submodule(name, packed)
    tokens = torch.randint(0, 50, (2, 9))
    lora = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"])
    losses, gradients = [], []
    for one in (plain, model):
        adapted = get_peft_model(one, lora)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:  # PEFT rounds its own to the base's type first
                values = torch.linspace(-0.1, 0.1, parameter.numel())
                parameter.data = values.view(parameter.shape)
        report = patch(adapted)
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss)
        gradients.append([p.grad for p in adapted.parameters() if p.requires_grad])
        if one is model:
            assert "mlp" in report.replaced and "qlora_linear" in report.replaced
        unpatch(adapted)
    assert torch.equal(*losses)
    for ours, wanted in zip(*gradients, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: quantize_8bit(torch.randn(4), "fp8"), "(out, in)"),
        (lambda: quantize_8bit(torch.randn(4, 4), "fp9"), "'fp8' or 'int8'"),
        (lambda: ScaledWeight(torch.ones(4, 4), torch.ones(1, 1), torch.float32), "float8_e4m3fn"),
        (
            lambda: ScaledWeight(
                torch.ones(4, 4, dtype=torch.int8), torch.ones(2, 1), torch.float32
            ),
            "float32 (1, 1)",
        ),
        (
            lambda: ScaledWeight(
                torch.ones(4, 4, dtype=torch.int8), torch.ones(1, 1), torch.float32, (0, 4)
            ),
            "two sizes",
        ),
    ],
)
def test_bad_weights_are_refused(call, said):
    with pytest.raises(KernelInputError, match=None) as refused:
        call()
    assert said in str(refused.value)
