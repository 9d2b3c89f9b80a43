"""Attention over keys that an indexer chooses, against kernels of SGLang 0.5.14 that ran alone
(ai-dynamo/aiconfigurator 095f58a5, GLM 5, one prompt)."""

from __future__ import annotations

import pytest
from napkinmath.answers.generation import Generation
from napkinmath.answers.generation_config import GenerationConfig
from napkinmath.catalog.gpus import find_hardware
from napkinmath.lowering.rollout.served import LayerCache, Serving, served
from napkinmath.models.read import read_model
from napkinmath.timing.chosen_keys import chosen_prompt_s
from napkinmath.timing.efficiency import default_efficiency

# H200's and B200's constants are one: their tables lie so far apart.
SPREAD = 0.12


def glm_cache(ranks: int, cache_format: str = "auto") -> tuple[LayerCache, int]:
    how = Serving(ranks=ranks, cache_format=cache_format)
    layers = served(read_model("glm-5"), how).layers
    layer = next(layer for layer in layers if layer.cache is not None)
    assert layer.cache is not None
    return layer.cache, layer.heads


def test_a_layer_keeps_what_its_indexer_chooses_from() -> None:
    cache, heads = glm_cache(8)
    assert (heads, cache.chosen) == (8, 2048)
    assert (cache.chosen_bytes, cache.token_bytes) == (2 * 576, 2 * (576 + 128))
    assert cache.choosing_flops == 2 * 32 * 128
    # GLM 5.2: layers that see the keys that the one before chose score none
    layers = served(read_model("glm-5.2"), Serving()).layers
    scored = {layer.cache.choosing_flops for layer in layers if layer.cache is not None}
    assert scored == {0, 2 * 32 * 128}


@pytest.mark.parametrize(
    ("gpu", "ranks", "cache_format", "tokens", "measured_ms"),
    [
        # attention + scores + choice of the kernels' own tables, 64 heads
        ("h100", 1, "auto", 8192, 3.82 + 0.289 + 0.391),
        ("h200", 1, "auto", 8192, 3.96 + 0.290 + 0.389),
        ("h200", 1, "auto", 16384, 7.94 + 1.222 + 1.006),
        ("b200", 1, "auto", 8192, 4.03 + 0.148 + 0.334),
        ("b200", 1, "auto", 16384, 8.01 + 0.566 + 0.874),
        # ranks pad their heads: as long as for 64
        ("h200", 8, "auto", 8192, 3.96 + 0.290 + 0.389),
        # of whole modules: what FP8 rows take more on H200, what TRT-LLM's kernel takes on B200
        ("h200", 8, "fp8", 8192, 3.96 + (7.43 - 5.16) + 0.290 + 0.389),
        ("b200", 8, "fp8", 8192, 2.35 - (4.69 - 4.03) + 0.148 + 0.334),
    ],
)
def test_a_prompt_takes_as_long_as_the_kernels(
    gpu: str, ranks: int, cache_format: str, tokens: int, measured_ms: float
) -> None:
    cache, heads = glm_cache(ranks, cache_format)
    speed = default_efficiency(find_hardware(gpu).gpu)
    priced = 1e3 * chosen_prompt_s(cache, heads, 1, tokens, 0, speed)
    assert priced == pytest.approx(measured_ms, rel=SPREAD)


def attention_s(engine: str, prompt: int) -> float:
    config = GenerationConfig(
        engine=engine, prompt=prompt, ranks=8, quantization="fp8", prefill_tokens=16384
    )
    ((_, forward),) = Generation(read_model("glm-5"), config, find_hardware("h200")).chunks()
    return forward.attention_s


def test_sglang_reads_short_prompts_whole_and_vllm_none() -> None:
    # dense attention of few keys is quick; every chosen row costs the same, chosen or not
    assert attention_s("vllm", 2048) == pytest.approx(attention_s("vllm", 8192) / 4, rel=0.2)
    assert attention_s("sglang", 2048) < attention_s("vllm", 2048) / 5
    assert attention_s("sglang", 8192) == attention_s("vllm", 8192)


def test_a_token_reads_the_chosen_rows_alone() -> None:
    def read(context: int) -> float:
        config = GenerationConfig(engine="sglang", ranks=8, quantization="fp8")
        clock = Generation(read_model("glm-5"), config, find_hardware("h200")).clock
        assert clock is not None
        return clock.decode(64, context).attention_s

    # beyond 2,048 rows grow the indexer's keys alone: 256 bytes of 1,408
    more = (read(32768) - read(16384)) / (read(2000) - read(1000))
    assert more == pytest.approx(16.384 * 256 / 1408, rel=0.5)
