"""What layers keep while they generate: transformers' own cache objects, and vLLM's blocks."""

from __future__ import annotations

import warnings

import pytest
from agreement.tiny_configs import TINY
from napkinmath.answers.inference import kv_cache_bytes
from napkinmath.base.errors import InputError
from napkinmath.catalog.engines import find_engine
from napkinmath.catalog.gpus import find_hardware
from napkinmath.lowering.rollout.served import Serving, served
from napkinmath.models.read import read_model
from napkinmath.timing.collectives import fabric
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.engine_sums import engine_sum_s
from napkinmath.timing.serving import EngineClock, engine_cluster

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

BATCH, PROMPT = 2, 100
EAGER = {"gpt_oss", "gemma2", "vaultgemma", "gpt_neo", "gptj", "codegen", "xglm", "bloom"}
EAGER |= {"mpt", "mamba", "mamba2", "gemma4"}
ENCODERS = {"bert", "roberta", "distilbert", "modernbert", "deberta_v2", "vit"}
# One step on storage-less tensors asks a mask of theirs for a value.
REAL = {"biogpt", "bart", "gemma4", "gemma4_unified"}


# Modules of transformers that define cache objects.
CACHES = ("transformers.cache_utils", "transformers.models.minimax.")


def cached_tensors(held: object, depth: int = 0) -> list[torch.Tensor]:
    """Every floating tensor that a cache object of transformers holds, each once."""
    if isinstance(held, torch.Tensor):
        return [held] if held.is_floating_point() else []
    if isinstance(held, dict):
        held = list(held.values())
    if isinstance(held, (list, tuple)):
        return [tensor for item in held for tensor in cached_tensors(item, depth + 1)]
    if depth > 6 or not type(held).__module__.startswith(CACHES):
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


def vllm_states(symbols: dict[str, int], ranks: int, sizes: tuple[int, int, int]) -> int:
    """Bytes of a rank's convolution (16 bits) and scan (fp32) states.

    Re-created from vllm 0.11 model_executor/layers/mamba/mamba_utils.py mamba2_state_shape,
    gated_delta_net_state_shape.
    """
    head, state, kernel = sizes
    if "lv" in symbols:
        keys, values = symbols["lk"] * head, symbols["lv"] * head
        channels, heads = (2 * keys + values) // ranks, symbols["lv"] // ranks
    else:
        groups = symbols["mg"] if symbols["mg"] % ranks == 0 else ranks
        channels = (symbols["ma"] * head + 2 * groups * state) // ranks
        heads = symbols["ma"] // ranks
    return 2 * channels * (kernel - 1) + 4 * heads * head * state


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "sizes", "sums"),
    [
        ("qwen3-next-80b-a3b", (128, 128, 4), {(2, 0)}),
        ("nemotron-h-8b", (64, 128, 4), {(1, 0)}),
        ("falcon-h1-7b", (128, 256, 4), {(3, 0)}),
        ("granite-4.0-h-small", (64, 128, 4), {(3, 1), (3, 0)}),
    ],
)
def test_states_are_split_over_ranks_as_vllm_does(
    name: str, sizes: tuple[int, int, int], sums: set[tuple[int, int]], ranks: int
) -> None:
    """One group is held by every rank, and its norm's squares are summed over them; a rank's weights
    are the whole ones' part but for those copies, routers and norms."""
    spec = read_model(name)
    one, alone = served(spec, Serving(ranks=ranks)), served(spec, Serving())
    states = {la.cache.state_bytes for la in one.layers if la.cache and la.cache.state_bytes}
    assert states == {vllm_states(dict(spec.symbols), ranks, sizes)}
    assert {(la.sums, la.norm_sums) for la in one.layers if la.is_layer} == sums
    assert alone.weight_bytes <= ranks * one.weight_bytes < 1.04 * alone.weight_bytes
    outputs = [p for la in one.layers for p in la.products if p.name == "out_proj"]
    assert outputs and len({p.k for p in outputs}) == 1


def test_ranks_with_a_group_each_normalize_alone() -> None:
    """Eight groups over eight ranks: no sum of squares crosses them."""
    layers = served(read_model("nemotron-h-8b"), Serving(ranks=8)).layers
    assert {la.norm_sums for la in layers} == {0}


def vllm_channel_states(width: int, ranks: int, state: int, kernel: int) -> int:
    """Bytes of a rank's convolution (16 bits) and scan (fp32) states of mixers without heads.

    Re-created from vllm 0.11 model_executor/layers/mamba/mamba_utils.py mamba1_state_shape,
    short_conv_state_shape.
    """
    channels, rest = divmod(width, ranks)
    assert rest == 0
    return 2 * channels * (kernel - 1) + 4 * channels * state


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "width", "state", "kernel", "inner_sum"),
    [
        ("mamba-2.8b", 5120, 16, 4, 160 + 2 * 16),
        ("falcon-mamba-7b", 8192, 16, 4, 256 + 2 * 16),
        ("jamba-v0.1", 8192, 16, 4, 256 + 2 * 16),
        ("lfm2-1.2b", 2048, 0, 3, 0),
    ],
)
def test_mixers_without_heads_are_split_by_their_channels(
    name: str, width: int, state: int, kernel: int, inner_sum: int, ranks: int
) -> None:
    """A rank's weights are the whole ones' part but for routers and norms; a scan's steps, B and C
    are summed over ranks before it runs."""
    spec = read_model(name)
    one, alone = served(spec, Serving(ranks=ranks)), served(spec, Serving())
    mixers = [la for la in one.layers if la.cache and la.cache.state_bytes]
    assert {la.cache.state_bytes for la in mixers if la.cache} == {
        vllm_channel_states(width, ranks, state, kernel)
    }
    assert {la.inner_sum for la in mixers} == {inner_sum}
    assert alone.weight_bytes <= ranks * one.weight_bytes < 1.001 * alone.weight_bytes


def test_a_scans_steps_are_summed_over_ranks_before_it_runs() -> None:
    """vllm 0.11 layers/mamba/mamba_mixer.py: x_proj and out_proj are RowParallelLinear."""
    model, h100 = served(read_model("mamba-2.8b"), Serving(ranks=2)), find_hardware("h100")
    cluster, tokens = engine_cluster(h100, 2), 4
    clock = EngineClock(model, find_engine("vllm"), default_efficiency(h100.gpu), cluster)
    network = fabric(cluster, 2)
    numbers, hidden = 160 + 2 * 16, 2560
    each = sum(engine_sum_s(2 * tokens * n, network, cluster) for n in (numbers, hidden))
    assert clock.decode(tokens, 100).network_s == pytest.approx(64 * each)


def test_channels_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match=r"mixer width=5120.*does not divide.*use 1, 2, 4"):
        served(read_model("mamba-2.8b"), Serving(ranks=3))
