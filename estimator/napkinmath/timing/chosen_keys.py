"""Seconds of attention over keys that an indexer chooses (DeepSeek V3.2, GLM 5), as engines run it.

The indexer's heads score all earlier keys, the best of each row are chosen, and queries are multiplied
with the latent rows of those alone. A query takes the time of as many rows as may be chosen, whether it
has so many or not. Kernels multiply 64 heads at once, on Blackwell 128, so ranks that share the heads do not
share this work (sglang srt/layers/attention/nsa_backend.py _forward_flashmla_sparse, vllm 0.24
flashmla_sparse.py). TRT-LLM's kernel, for a cache in 8 bits on Blackwell, pads nothing and waits for the
rows that it gathers.

All constants are read off kernels that ran alone: ai-dynamo/aiconfigurator at 095f58a5
sparse_attention/sglang/0.5.14, 8,192 and 16,384 tokens of GLM 5 (glm5_dsa_attn_module,
glm5_mqa_logits_module, glm5_topk_module, dsa_context_module).
"""

from __future__ import annotations

from napkinmath.timing.attainable import has_wgmma
from napkinmath.timing.efficiency import larger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.rollout.served import LayerCache
    from napkinmath.timing.efficiency import Efficiency

_HEADS_AT_ONCE = 64
_HEADS_AT_ONCE_ON_BLACKWELL = 128
# Share of dense products' rate in 16 bits: 0.77 on H200, 0.80 on H100, 0.76 on B200. Rows of 8 bits are
# widened first: 0.49 on H200, 0.50 on H100 (FlashMLA's own page has 640 and 410 TFLOP/s on H800).
_ROWS_SHARE = 0.77
_NARROW_ROWS_SHARE = 0.49
# Of the second-level cache's bandwidth, with 8 and 16 heads on B200.
_GATHERED_SHARE = 0.56
# Of dense products' rate in FP8: 0.69 to 0.72 on H200, 0.71 to 0.74 on B200.
_SCORED_SHARE = 0.72
# An SM chooses for one row at a time, and passes over its scores: 7.2 us and 0.22 ns on H200, 6.8 us
# and 0.24 ns on B200. Rows with no more keys than may be chosen are left out.
_ROW_S = 7e-6
_KEY_S = 0.23e-9


def chosen_prompt_s(
    cache: LayerCache, heads: int, prompts: int, prompt: int, before: int, speed: Efficiency
) -> float:
    """Seconds of a layer's attention for `prompts` prompts of `prompt` tokens, `before` of each read
    earlier; `heads` are a rank's."""
    tokens, whole = prompts * prompt, prompt + before
    choosing = min(prompt, max(0, whole - cache.chosen))
    time = _rows_s(cache, heads, tokens, speed)
    if cache.choosing_flops:
        time += _scores_s(cache, tokens * (before + prompt / 2), speed)
        time += choice_s(prompts * choosing, whole - choosing / 2, speed)
    return time


def _rows_s(cache: LayerCache, heads: int, tokens: int, speed: Efficiency) -> float:
    """Seconds of products with the chosen latent rows."""
    pairs = float(tokens * cache.chosen)
    each = cache.score_flops / heads
    narrow = cache.chosen_bytes < each / 2  # a latent row is key and value
    blackwell = speed.gpu.architecture == "blackwell" and has_wgmma(speed.gpu)
    if narrow and blackwell:
        gathered = pairs * cache.chosen_bytes / (_GATHERED_SHARE * speed.l2_bytes_per_s)
        return float(larger(gathered, pairs * heads * each / speed.matmul_rate("fp8")))
    at_once = _HEADS_AT_ONCE_ON_BLACKWELL if blackwell else _HEADS_AT_ONCE
    padded = -(-heads // at_once) * at_once
    share = _NARROW_ROWS_SHARE if narrow else _ROWS_SHARE
    return float(pairs * padded * each / (share * speed.matmul_rate("bf16")))


def _scores_s(cache: LayerCache, pairs: float, speed: Efficiency) -> float:
    dtype = "fp8" if speed.gpu.supports("fp8") else "bf16"
    return float(pairs * cache.choosing_flops / (_SCORED_SHARE * speed.matmul_rate(dtype)))


def choice_s(rows: float, keys: float, speed: Efficiency) -> float:
    """Seconds of choosing the best of `keys` scores for each of `rows` rows."""
    return rows / speed.gpu.num_sms * (_ROW_S + _KEY_S * keys)


def chosen_read(cache: LayerCache, context: int) -> tuple[int, int]:
    """(rows that one more token sees, bytes that it reads of a cache of `context` rows): the chosen
    rows, and the indexer's key of every row."""
    seen = min(context, cache.chosen)
    return seen, seen * cache.chosen_bytes + context * (cache.token_bytes - cache.chosen_bytes)
