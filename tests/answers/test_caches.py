"""What layers keep while they generate: transformers' own cache objects, and vLLM's blocks."""

from __future__ import annotations

import warnings

import pytest
from agreement.tiny_configs import TINY
from napkinmath.answers.inference import kv_cache_bytes
from napkinmath.base.errors import InputError
from napkinmath.models.read import read_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

BATCH, PROMPT = 2, 100
EAGER = {"gpt_oss", "gemma2", "vaultgemma", "gpt_neo", "gptj", "codegen", "xglm", "bloom"}
EAGER |= {"mpt", "mamba", "mamba2", "gemma4"}
ENCODERS = {"bert", "roberta", "distilbert", "modernbert", "deberta_v2", "vit"}
# One step on storage-less tensors asks a mask of theirs for a value.
REAL = {"biogpt", "bart", "gemma4"}


def cached_tensors(held: object, depth: int = 0) -> list[torch.Tensor]:
    """Every floating tensor that a cache object of transformers holds, each once."""
    if isinstance(held, torch.Tensor):
        return [held] if held.is_floating_point() else []
    if isinstance(held, dict):
        held = list(held.values())
    if isinstance(held, (list, tuple)):
        return [tensor for item in held for tensor in cached_tensors(item, depth + 1)]
    if depth > 6 or not type(held).__module__.startswith("transformers.cache_utils"):
        return []
    return cached_tensors(vars(held), depth + 1)


@pytest.mark.parametrize("family", sorted(set(TINY) - ENCODERS))
def test_cache_bytes_are_those_of_transformers_own_cache(family: str) -> None:
    """After the prompt and one more token; the storage behind a window's slice is what is held."""
    from napkinmath_profiler.tracing.meta_model import build_model, config_from

    config = config_from(dict(TINY[family]))
    device = "cpu" if family in REAL else "meta"
    attention = "eager" if config.model_type in EAGER else "sdpa"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        made = build_model(config, dtype="bf16", attn_implementation=attention, device=device)
        made.eval()
        ids = torch.ones(BATCH, PROMPT, dtype=torch.long, device=device)
        more = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
        out = made(input_ids=ids, use_cache=True, **more)
        cache = getattr(out, "past_key_values", None) or out.cache_params
        named = "past_key_values" if hasattr(out, "past_key_values") else "cache_params"
        token = ids[:, :1]
        again = (
            {"decoder_input_ids": token, "encoder_outputs": (out.encoder_last_hidden_state,)}
            if config.is_encoder_decoder
            else {"input_ids": token}
        )
        made(use_cache=True, **{named: cache}, **again)
    held = sum(t.untyped_storage().nbytes() for t in cached_tensors(cache))
    spec = read_model(dict(TINY[family]))
    priced = kv_cache_bytes(spec, batch=BATCH, tokens=PROMPT + 1, encoder_tokens=PROMPT)
    assert held == priced


@pytest.mark.parametrize("family", sorted(ENCODERS))
def test_what_generates_nothing_is_refused(family: str) -> None:
    with pytest.raises(InputError, match="generates nothing"):
        kv_cache_bytes(read_model(dict(TINY[family])), batch=1, tokens=8)
