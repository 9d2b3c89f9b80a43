"""Other libraries' kernels and losses, traced as their own code runs them: Liger's, TRL's and
ours."""

from __future__ import annotations

import pytest
import torch
from napkinmath.config.train_config import Kernels, Loss, TrainConfig
from napkinmath_profiler.trace import trace, trace_config
from napkinmath_profiler.tracing.meta_model import QuantizationOptions, TrainMethod
from napkinmath_profiler.tracing.quantized_model import quantize_4bit
from napkinmath_profiler.tracing.trace_errors import TraceError
from napkinmath_profiler.tracing.trace_result import TraceResult
from torch import nn

VOCABULARY, TOKENS, HIDDEN = 8192, 512, 64
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
ALL_LOGITS = TOKENS * VOCABULARY * 4


def traced(
    kernels: Kernels = Kernels.HF,
    loss: Loss = Loss.HF,
    method: TrainMethod = TrainMethod.FULL,
    **options: object,
) -> TraceResult:
    return trace_config(
        options.pop("config", LLAMA),
        kernels=kernels,
        loss=loss,
        method=method,
        micro_batch_size=1,
        sequence_length=TOKENS,
        optimizer="adamw-fused",
        **options,
    )


def largest(result: TraceResult) -> int:
    """Bytes of the largest tensor made in a step."""
    return max(r.rounded_bytes for r in result.records if r.step is not None and r.step >= 0)


def test_liger_holds_no_logits_and_launches_its_kernels() -> None:
    pytest.importorskip("liger_kernel")
    plain, patched = traced(), traced(Kernels.LIGER)
    assert patched.choices["triton launches"] > 0 and "triton launches" not in plain.choices
    assert largest(plain) == ALL_LOGITS
    # Liger's chunk: as many rows as make logits no larger than the input, so TOKENS x HIDDEN in
    # bf16, rounded up to a power of two.
    assert (
        max(r.rounded_bytes for r in patched.records if r.shape and r.shape[-1] == VOCABULARY)
        <= 2 * TOKENS * HIDDEN * 2
    )


def test_only_the_loss_of_liger() -> None:
    pytest.importorskip("liger_kernel")
    fused, whole = traced(loss=Loss.FUSED), traced(Kernels.LIGER)
    assert 0 < fused.choices["triton launches"] < whole.choices["triton launches"]
    assert fused.peak_bytes < traced().peak_bytes


def test_trls_head_reads_the_vocabulary_in_tiles() -> None:
    pytest.importorskip("trl")
    chunked = traced(loss=Loss.CHUNKED, config={**LLAMA, "vocab_size": 80_000})
    assert chunked.choices["boolean index"] > 0 and chunked.choices["triton launches"] > 0
    tiles = [
        r for r in chunked.records if r.shape and r.shape[-1] == 32_768
    ]  # trl/trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE
    assert tiles and {r.shape[0] for r in tiles} == {TOKENS - 1}
    assert not any(r.shape and r.shape[-1] == 80_000 for r in chunked.records)


@pytest.mark.parametrize("method", TrainMethod)
def test_our_kernels_are_traced_from_inside(method: TrainMethod) -> None:
    pytest.importorskip("triton")
    result = traced(Kernels.NAPKINMATH, method=method)
    assert result.choices["opened kernels"] > 0
    assert any(
        r.op.startswith("aten.") and r.shape == (TOKENS - 1, HIDDEN) for r in result.records
    ), "the loss gathers the valid rows"
    assert result.peak_bytes < traced(method=method).peak_bytes


def test_a_patch_ends_with_its_trace() -> None:
    pytest.importorskip("liger_kernel")
    from transformers.models.llama import modeling_llama

    names = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")
    before = (
        [getattr(modeling_llama, name) for name in names],
        modeling_llama.LlamaForCausalLM.forward,
    )
    first = traced()
    traced(Kernels.LIGER)
    assert before == (
        [getattr(modeling_llama, name) for name in names],
        modeling_llama.LlamaForCausalLM.forward,
    )
    again = traced()
    assert [e[:2] for e in first.events] == [e[:2] for e in again.events]


def test_what_a_library_does_not_know_is_named() -> None:
    pytest.importorskip("liger_kernel")
    config = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 64,
        "n_positions": 1024,
    }
    with pytest.raises(TraceError, match="does not know model type 'gpt2'"):
        traced(Kernels.LIGER, config=config)
    with pytest.raises(TraceError, match="unsloth"):
        trace(LLAMA, TrainConfig(kernels=Kernels.UNSLOTH))


def test_the_command_takes_kernels_and_loss(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    pytest.importorskip("trl")
    from napkinmath_profiler.cli.trace import run

    assert run(["--arch", "L2 h64 a4 f128 v8192", "--loss", "chunked", "--ctx", "256"]) in (0, None)
    assert "trl" in capsys.readouterr().out


def test_a_mask_selects_everything_through_a_table_of_positions() -> None:
    from collections import Counter

    from napkinmath_profiler.tracing.module_paths import ModulePaths
    from napkinmath_profiler.tracing.op_handlers import OpHandlers
    from napkinmath_profiler.tracing.storage_tracker import StorageTracker

    counts: Counter[str] = Counter()
    tracker = StorageTracker("meta", ModulePaths(), OpHandlers(counts).table(cuda=True), None)
    with tracker:
        x, mask = (
            torch.empty(4, 6, 8, device="meta"),
            torch.empty(4, 6, dtype=torch.bool, device="meta"),
        )
        assert x[mask].shape == (24, 8)
        assert torch.equal(x, x)
    assert counts["boolean index"] == 1 and counts["scalar answers"] == 1
    assert any(r.shape == (2, 24) and r.dtype == "int64" for r in tracker.records)


def test_a_real_quantization_follows_one_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    monkeypatch.setattr(functional, "name2qmap", {})
    meta = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("meta")
    meta.all_tied_weights_keys, meta.get_output_embeddings = {}, lambda: None  # type: ignore[assignment]
    quantize_4bit(meta, compute_dtype="bf16", options=QuantizationOptions(double_quant=True))
    packed, state = functional.quantize_4bit(
        torch.randn(64, 64), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    assert functional.dequantize_4bit(packed, state).isfinite().all()
