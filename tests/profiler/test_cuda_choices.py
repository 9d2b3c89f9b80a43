"""Each override of the meta device by CUDA's choice, on its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from napkinmath_profiler.trace import trace_config, trace_module
from napkinmath_profiler.tracing.attention_choice import (
    AttentionBackend,
    AttentionCall,
    choose_attention,
    efficient_supports_gqa,
)
from napkinmath_profiler.tracing.cuda_autocast import autocast_lists, meta_autocast
from napkinmath_profiler.tracing.cuda_choices import CHOICES, AppliedChoices, cuda_choices
from napkinmath_profiler.tracing.kernel_workspaces import FEW_INDICES
from napkinmath_profiler.tracing.meta_model import TrainMethod
from napkinmath_profiler.tracing.observation import CudaSettings, observe
from napkinmath_profiler.tracing.optimizer_choices import OPTIMIZERS
from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from napkinmath_profiler.tracing.training_step import LoopOptions
from profiler.traced_families import FAMILIES
from torch import nn

AMPERE, ADA, HOPPER, BLACKWELL, TURING = (8, 0), (8, 9), (9, 0), (10, 0), (7, 5)
FLASH, EFFICIENT, CUDNN, MATH, AUTO = (
    getattr(AttentionBackend, n) for n in ("FLASH", "EFFICIENT", "CUDNN", "MATH", "AUTO")
)


def call(
    dtype: torch.dtype = torch.bfloat16,
    *,
    heads: tuple[int, int] = (8, 8),
    size: int = 64,
    **changes: object,
) -> AttentionCall:
    query, key = (2, heads[0], 128, size), (2, heads[1], 128, size)
    defaults: dict[str, object] = {
        "has_mask": False,
        "is_causal": True,
        "enable_gqa": heads[0] != heads[1],
        "dropout_p": 0.0,
        "needs_grad": True,
    }
    return AttentionCall(dtype, query, key, key, **{**defaults, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "capability", "expected"),
    [
        (call(), AMPERE, FLASH),
        (call(torch.float16), AMPERE, FLASH),
        (call(torch.float32), AMPERE, EFFICIENT),
        (call(has_mask=True, is_causal=False), AMPERE, EFFICIENT),
        (call(heads=(8, 2)), AMPERE, FLASH),
        (call(heads=(8, 2), enable_gqa=False), AMPERE, MATH),
        (call(size=320), AMPERE, EFFICIENT),
        (call(size=36), AMPERE, FLASH),
        (call(size=36, has_mask=True), AMPERE, MATH),
        (call(torch.float32, size=36), AMPERE, EFFICIENT),
        (call(), HOPPER, CUDNN),
        (call(size=256), HOPPER, CUDNN),
        (call(size=256, has_mask=True, is_causal=False), HOPPER, CUDNN),
        (call(size=256), BLACKWELL, FLASH),
        (call(size=256, has_mask=True, is_causal=False), BLACKWELL, EFFICIENT),
        (call(size=208), ADA, EFFICIENT),
        (call(size=208, needs_grad=False), ADA, FLASH),
        (call(torch.float16), TURING, EFFICIENT),
        (call(), TURING, MATH),
    ],
)
def test_attention_kernel_that_cuda_picks(
    asked: AttentionCall, capability: tuple[int, int], expected: AttentionBackend
) -> None:
    assert choose_attention(AUTO, asked, capability) is expected


def test_float32_with_grouped_heads_falls_to_math_unless_the_efficient_kernel_takes_them() -> None:
    expected = EFFICIENT if efficient_supports_gqa() else MATH
    assert choose_attention(AUTO, call(torch.float32, heads=(8, 2)), AMPERE) is expected


def test_a_wanted_kernel_that_does_not_fit_leaves_math() -> None:
    assert choose_attention(FLASH, call(torch.float32), AMPERE) is MATH
    assert choose_attention(EFFICIENT, call(), AMPERE) is EFFICIENT


def traced(
    function: Callable[[nn.Module], torch.Tensor],
    *,
    settings: CudaSettings | None = CudaSettings(),
    width: int = 64,
) -> TraceResult:
    """A forward and backward of ``function`` around one linear on meta."""
    model = nn.Linear(width, width, device="meta")
    return observe(model, lambda: function(model).sum().backward(), settings=settings)


def heads(
    model: nn.Module, *, dtype: torch.dtype = torch.bfloat16, rows: int = 128, key_heads: int = 4
) -> list[torch.Tensor]:
    """q (2, 4, rows, 16), k and v (2, key_heads, rows, 16) out of the linear."""
    out = (
        model(torch.empty(2, rows, 64, device="meta"))
        .view(2, rows, 4, 16)
        .transpose(1, 2)
        .to(dtype)
    )
    return [out, out[:, :key_heads], out[:, :key_heads]]


def test_flash_keeps_the_logsumexp_and_no_scores() -> None:
    result = traced(lambda m: F.scaled_dot_product_attention(*heads(m), is_causal=True))
    assert result.attention == {"flash": 1}
    assert (2, 4, 128) in {r.shape for r in result.saved_records()}
    assert not [r for r in result.records if r.shape[-2:] == (128, 128)]


def test_math_keeps_the_scores() -> None:
    result = traced(
        lambda m: F.scaled_dot_product_attention(*heads(m), is_causal=True),
        settings=CudaSettings(attention_backend=MATH),
    )
    assert result.attention == {"math": 1}
    assert (2, 4, 128, 128) in {r.shape for r in result.saved_records()}


def test_flash_pads_an_odd_head_size() -> None:
    def attend(model: nn.Module) -> torch.Tensor:
        q = (
            model(torch.empty(2, 128, 60, device="meta"))
            .view(2, 128, 3, 20)
            .transpose(1, 2)
            .to(torch.bfloat16)
        )
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    result = traced(attend, width=60)
    assert (2, 3, 128, 24) in {r.shape for r in result.saved_records()}


def test_efficient_takes_a_boolean_mask_as_an_aligned_bias() -> None:
    mask = torch.ones(2, 1, 100, 100, dtype=torch.bool, device="meta")
    result = traced(lambda m: F.scaled_dot_product_attention(*heads(m, rows=100), attn_mask=mask))
    assert result.attention == {"efficient": 1}
    assert (2, 1, 100, 104) in {r.shape for r in result.saved_records()}, (
        "the last dimension is padded to a multiple of 8"
    )


def test_dropout_saves_a_bool_mask_and_elsewhere_a_float_one() -> None:
    def dropped(model: nn.Module) -> torch.Tensor:
        return F.dropout(model(torch.empty(8, 64, device="meta")), 0.1, True)

    masks = [
        {
            r.dtype
            for r in traced(dropped, settings=settings).saved_records()
            if r.shape == (8, 64) and "addmm" not in r.op
        }
        for settings in (CudaSettings(), None)
    ]
    assert masks[0] == {"bool"}
    assert masks[1] == {"float32"}


def test_dropout_of_nothing_is_the_input() -> None:
    result = traced(lambda m: F.dropout(m(torch.empty(8, 64, device="meta")), 0.0, True))
    assert "dropout" not in result.choices


def test_float16_softmax_reads_half_and_writes_float() -> None:
    def probabilities(model: nn.Module) -> torch.Tensor:
        return F.softmax(
            model(torch.empty(8, 64, device="meta")).half(), dim=-1, dtype=torch.float32
        )

    assert traced(probabilities).choices["half softmax"] == 1
    copies = [
        sum(r.op == "aten._to_copy.default" for r in traced(probabilities, settings=s).records)
        for s in (CudaSettings(), None)
    ]
    assert copies[1] == copies[0] + 2, (
        "elsewhere a float32 copy of the input is made first, and its gradient cast back"
    )


def test_autocast_lists_are_those_the_installed_torch_registers() -> None:
    listed = {name for names in autocast_lists().values() for name in names}
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    own_signature = {
        "norm.Scalar",
        "norm.ScalarOpt_dim",
        "norm.names_ScalarOpt_dim",
        "binary_cross_entropy",
    }
    missing = {
        name
        for name in registered - listed - own_signature
        if not name.startswith(("cudnn_", "_cudnn_", "miopen_", "upsample", "_upsample"))
    }
    assert missing == set()
    assert len(listed) > 100


def test_autocast_casts_matmul_down_softmax_up_and_promotes() -> None:
    weight = torch.empty(16, 16, device="meta", requires_grad=True)
    x = torch.empty(4, 16, device="meta")
    with meta_autocast(), torch.autocast("cuda", dtype=torch.bfloat16):
        first = F.linear(x, weight)
        assert first.dtype == torch.bfloat16
        assert first.softmax(-1).dtype == torch.float32
        assert (first + first).dtype == torch.bfloat16
        assert torch.addcmul(x, first[:, :16], x).dtype == torch.float32, "promoted to the widest"
        with torch.autocast("cuda", enabled=False):
            assert F.linear(x, weight).dtype == torch.float32
    assert F.linear(x, weight).dtype == torch.float32


def test_autocast_casts_each_weight_once_a_forward() -> None:
    def twice(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(model(torch.empty(8, 64, device="meta")))

    result = traced(twice)
    assert (
        sum(
            r.shape == (64, 64) and r.dtype == "bfloat16" and r.phase is TracePhase.FORWARD
            for r in result.records
        )
        == 1
    )
    assert {r.dtype for r in result.records if r.role is StorageRole.GRADIENTS} == {"float32"}


def test_autocast_holds_in_the_recompute_of_a_checkpoint() -> None:
    loop = LoopOptions(autocast_dtype=torch.bfloat16)
    for reentrant in (False, True):
        result = trace_config(
            FAMILIES["llama"],
            sequence_length=32,
            dtype="fp32",
            checkpointing=True,
            use_reentrant=reentrant,
            loop=loop,
        )
        products = {
            r.dtype
            for r in result.records
            if r.phase is TracePhase.RECOMPUTE and r.op == "aten.mm.default"
        }
        assert products == {"bfloat16"}


def test_code_that_switches_autocast_off_by_device_type_is_heard() -> None:
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as modeling

    weight, x = torch.empty(16, 16, device="meta"), torch.empty(4, 16, device="meta")
    with meta_autocast(), torch.autocast("cuda", dtype=torch.bfloat16):
        for switched_off in (
            modeling.maybe_autocast(device_type="meta", enabled=False),
            torch.autocast("meta", enabled=False),
        ):
            with switched_off:
                assert F.linear(x, weight).dtype == torch.float32
        assert F.linear(x, weight).dtype == torch.bfloat16


ADAMW_PEAK_BYTES_PER_PARAMETER = {"adamw-foreach": 10, "adamw-fused": 8}


@pytest.mark.parametrize(("optimizer", "expected"), ADAMW_PEAK_BYTES_PER_PARAMETER.items())
def test_pure_bf16_adamw_step_peaks_at_its_bytes_per_parameter(
    optimizer: str, expected: int
) -> None:
    config = {**FAMILIES["llama"], "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 512}
    result = trace_config(config, sequence_length=1, optimizer=optimizer)
    weights = result.persistent_bytes()[StorageRole.WEIGHTS]
    peak = max(
        m.requested_bytes
        for p, m in result.peak_by_phase().items()
        if p in (TracePhase.OPTIMIZER, TracePhase.ZERO_GRAD)
    )
    assert peak / (weights / 2) == pytest.approx(
        expected, rel=2e-3
    )  # batch, buffers, step counters: < 0.2% of so small a model


def test_a_4bit_linear_dequantizes_one_weight_at_a_time_when_tokens_are_many() -> None:
    pytest.importorskip("bitsandbytes")
    many, few = (
        trace_config(
            FAMILIES["llama"],
            method=TrainMethod.QLORA,
            sequence_length=s,
            loop=LoopOptions(num_steps=1),
        )
        for s in (2048, 64)
    )
    unpacked = [
        r
        for r in many.records
        if r.op.startswith("bitsandbytes.dequantize_4bit") and r.phase is TracePhase.FORWARD
    ]
    assert len(unpacked) == 2 * 7, "one a linear"
    assert all(r.died_phase is TracePhase.FORWARD for r in unpacked)
    assert not [
        r
        for r in few.records
        if r.op.startswith("bitsandbytes.dequantize_4bit") and r.phase is TracePhase.FORWARD
    ]


def test_grouped_products_take_float32() -> None:
    result = trace_config(FAMILIES["mixtral"], sequence_length=16, dtype="fp32")
    assert result.choices["grouped_mm"] > 0


def workspaces_of(result: TraceResult) -> dict[str, int]:
    return {r.name: r.requested_bytes for r in result.records if r.role is StorageRole.WORKSPACE}


def test_flash_backward_accumulates_dq_in_float32_and_expands_grouped_heads() -> None:
    result = traced(
        lambda m: F.scaled_dot_product_attention(
            *heads(m, rows=130, key_heads=2), is_causal=True, enable_gqa=True
        )
    )
    assert workspaces_of(result) == {
        "flash softmax_d": 2 * 4 * 256 * 4,
        "flash dq_accum": 2 * 256 * 4 * 32 * 4,
        "flash dk_expanded": 2 * 130 * 4 * 16 * 2,
        "flash dv_expanded": 2 * 130 * 4 * 16 * 2,
    }


@pytest.mark.parametrize(
    ("count", "padding", "expected"),
    [(FEW_INDICES, None, 0), (FEW_INDICES, 0, 7), (FEW_INDICES + 1, None, 7)],
)
def test_embedding_backward_sorts_many_indices(
    count: int, padding: int | None, expected: int
) -> None:
    model = nn.Embedding(100, 16, padding_idx=padding, device="meta", dtype=torch.bfloat16)
    result = observe(
        model,
        lambda: model(torch.empty(count, dtype=torch.long, device="meta")).sum().backward(),
        settings=CudaSettings(),
    )
    found = workspaces_of(result)
    assert len(found) == expected
    if expected:
        assert found["embedding partial sums"] == count * 16 * 4
        assert found["embedding sorted indices"] == count * 8


def test_clipping_takes_the_foreach_path() -> None:
    result = trace_config(
        FAMILIES["llama"], sequence_length=16, loop=LoopOptions(max_grad_norm=1.0)
    )
    assert any(r.op == "aten._foreach_norm.Scalar" for r in result.records)
    assert "foreach norm partials" in workspaces_of(result)


def test_workspaces_can_be_left_out() -> None:
    assert (
        workspaces_of(trace_config(FAMILIES["llama"], sequence_length=16, kernel_workspaces=False))
        == {}
    )


def test_every_choice_has_a_source_and_nothing_is_left_behind() -> None:
    assert all(choice.source and choice.what for choice in CHOICES.values())
    with cuda_choices(AUTO, AMPERE, AppliedChoices(Counter(), Counter())):
        pass
    q = torch.empty(1, 1, 4, 8, device="meta", dtype=torch.bfloat16)
    assert (
        torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.AutocastCUDA) is False
    )
    assert F.dropout(q, 0.5, True).shape == q.shape
    assert (
        trace_module(
            nn.Linear(4, 4, device="meta"),
            lambda m, o: m(torch.empty(2, 4, device="meta")).sum().backward(),
        ).choices
        == {}
    )


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_steps_and_leaves_only_states(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    config = {
        **FAMILIES["llama"],
        "hidden_size": 512,
        "intermediate_size": 1024,
    }  # matrices large enough to be paged and quantized
    result = trace_config(config, sequence_length=8, optimizer=name)
    left = {r.role for r in result.live_at(len(result.events) - 1)}
    assert left <= {
        StorageRole.WEIGHTS,
        StorageRole.BUFFERS,
        StorageRole.INPUTS,
        StorageRole.OPTIMIZER_STATES,
    }
    states = result.persistent_bytes().get(StorageRole.OPTIMIZER_STATES, 0)
    assert (states == 0) == (name == "sgd")
    managed = sum(r.managed_bytes for r in result.records)
    assert (managed > 0) == name.startswith("paged")
    assert timeline_of(result).host_peak(managed=True) == managed


def test_8bit_states_are_a_quarter_of_32bit_ones() -> None:
    pytest.importorskip("bitsandbytes")
    config = {**FAMILIES["llama"], "hidden_size": 1024, "intermediate_size": 4096}
    wide, narrow = (
        trace_config(config, sequence_length=8, dtype="fp32", optimizer=name).persistent_bytes()
        for name in ("adamw-bnb", "adamw-8bit")
    )
    ratio = narrow[StorageRole.OPTIMIZER_STATES] / wide[StorageRole.OPTIMIZER_STATES]
    assert ratio == pytest.approx(
        0.25 + 1 / 256, rel=0.05
    )  # one float32 scale in 256 elements; small tensors stay in 32 bits


class Fan(nn.Module):
    """One tensor read by three linears, so that three gradients of it are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, device="meta")
        self.readers = nn.ModuleList(nn.Linear(64, 64, device="meta") for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.first(x)
        return sum(reader(shared) for reader in self.readers)  # type: ignore[return-value]


def summed(settings: CudaSettings | None) -> TraceResult:
    model = Fan()
    return observe(
        model, lambda: model(torch.empty(8, 64, device="meta")).sum().backward(), settings=settings
    )


def test_gradients_are_summed_in_place_as_cuda_sums_them() -> None:
    on, off = summed(CudaSettings()), summed(CudaSettings(sums_in_place=False))
    assert on.choices["gradient sums"] == 2
    assert len(off.events) - len(on.events) == 2 * 2, "a birth and a death fewer for each"
    assert [r.storage_id for r in on.records] == list(range(len(on.records)))
    deaths = {
        event.storage_id: index for index, event in enumerate(on.events) if not event.is_allocation
    }
    assert {r.storage_id: r.died for r in on.records if r.died is not None} == deaths
    births = {
        event.storage_id: index for index, event in enumerate(on.events) if event.is_allocation
    }
    assert {r.storage_id: r.born for r in on.records} == births


class AddsItself(torch.autograd.Function):
    """A Python backward with a sum of its own, which nobody makes in place."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 + grad * 3


def test_sums_inside_a_python_backward_stay_as_written() -> None:
    result = traced(lambda m: AddsItself.apply(m(torch.empty(8, 64, device="meta"))))
    assert "gradient sums" not in result.choices
