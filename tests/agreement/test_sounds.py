"""A step of a model that reads sounds by the rules against the same step of the real class on meta
tensors."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.ir.cache import cached_stages
from napkinmath.models.families import read_config

WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "d_model": 128,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 192,
    "decoder_ffn_dim": 192,
    "vocab_size": 512,
    "max_source_positions": 150,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "eos_token_id": 5,
    "decoder_start_token_id": 6,
}
OTHER = {
    "max_source_positions": 333,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "tie_word_embeddings": False,
}
CLOSE = 0.0005
SAMPLES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 32,
    "conv_dim": [64] * 7,
}
LARGE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}
NORMLESS = {"feat_proj_layer_norm": False}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changed", "method", "precision", "attention", "length"),
    [
        ({}, "full", "bf16-amp", "auto", 256),
        ({}, "lora", "bf16", "auto", 256),
        (OTHER, "full", "fp32", "auto", 100),
        (OTHER, "full", "bf16", "eager", 100),
    ],
)
def test_the_peak_of_whisper_is_that_of_the_traced_step(
    changed: dict[str, Any], method: str, precision: str, attention: str, length: int
) -> None:
    case = Case(
        config={**WHISPER, **changed},
        method=method,
        precision=precision,
        checkpointing=method == "lora",
        attention=attention,
        sequence=length,
        optimizer="adamw-fused",
    )
    cell = compare("whisper", case)
    assert abs(cell.difference) <= CLOSE, f"{cell.difference:+.3%}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "architecture", "changed", "method", "precision", "length"),
    [
        ("wav2vec2", "Wav2Vec2ForCTC", {}, "full", "bf16-autocast", 99),
        ("wav2vec2", "Wav2Vec2ForCTC", LARGE, "lora", "bf16", 333),
        ("wav2vec2", "Wav2Vec2ForSequenceClassification", {}, "lora", "fp16-amp", 99),
        ("hubert", "HubertForCTC", NORMLESS, "lora", "bf16", 333),
        ("data2vec-audio", "Data2VecAudioForCTC", {}, "full", "fp32", 101),
        ("wavlm", "WavLMForCTC", {}, "full", "bf16", 333),
        ("wavlm", "WavLMForCTC", LARGE, "full", "fp16-amp", 333),
        ("wavlm", "WavLMForSequenceClassification", LARGE, "full", "bf16-autocast", 101),
    ],
)
def test_the_peak_of_samples_is_that_of_the_traced_step(
    kind: str, architecture: str, changed: dict[str, Any], method: str, precision: str, length: int
) -> None:
    case = Case(
        config={"model_type": kind, "architectures": [architecture], **SAMPLES, **changed},
        method=method,
        precision=precision,
        checkpointing=precision == "fp16-amp",
        attention="auto",
        sequence=length,
        optimizer="adamw-fused",
    )
    cell = compare(kind, case)
    assert abs(cell.difference) <= CLOSE, f"{cell.difference:+.3%}"


def test_seconds_of_sound_are_steps_of_the_encoder() -> None:
    found = estimate({"model_type": "wav2vec2", **SAMPLES}, audio="10s")
    assert found.config.sequence_length == 499  # of 160,000 samples, as Conv1d counts them
    ops = (op for run in found.step.runs for op in run.block.ops)
    samples = next(op for op in ops if op.name == "samples").outputs[0].axes
    assert [Bindings({"s": 499, "b": 1})(size) for size in samples] == [1, 160_000]


def test_the_convolutions_are_frozen() -> None:
    found = estimate({"model_type": "hubert", **SAMPLES}, audio="2s")
    weights = {w.path: w for run in found.step.runs for w in run.block.weights}
    assert not weights["hubert.feature_extractor.conv_layers.0.conv.weight"].trainable
    assert weights["hubert.feature_projection.projection.weight"].trainable


def test_a_length_is_given_once() -> None:
    with pytest.raises(InputError, match="both say how long"):
        estimate({"model_type": "wav2vec2", **SAMPLES}, audio="2s", ctx=64)
    with pytest.raises(InputError, match="reads no sounds"):
        estimate("gpt2", audio="2s")


def test_the_table_of_the_encoders_positions_is_not_trained() -> None:
    found = estimate({**WHISPER, "encoder_layers": 1}, ctx=64)
    weights = {w.path: w for run in found.step.runs for w in run.block.weights}
    assert not weights["model.encoder.embed_positions.weight"].trainable
    assert weights["model.decoder.embed_positions.weight"].trainable
    assert any("3 s of sound" in said for said in found.assumptions)


def test_layers_left_out_at_random_are_refused() -> None:
    with pytest.raises(InputError, match="encoder_layerdrop"):
        estimate({**WHISPER, "encoder_layerdrop": 0.1})


def test_generating_from_sounds_is_refused() -> None:
    with pytest.raises(InputError, match="reads sounds"):
        cached_stages(read_config(WHISPER))


@pytest.mark.parametrize("asked", [{"method": "lora"}, {"method": "qlora"}])
def test_what_sits_on_the_projections_of_wavlm_is_refused(asked: dict[str, str]) -> None:
    with pytest.raises(InputError, match="past their modules; leave them out"):
        _ = estimate({"model_type": "wavlm", **SAMPLES}, audio="2s", **asked).phase_peaks
