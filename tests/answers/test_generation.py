"""Inference on its own: pages as vLLM counts them, weights of a rank, and times that servers
measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agreement.tiny_configs import TINY
from napkinmath.answers.generation import Generation
from napkinmath.answers.generation_config import GenerationConfig
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.base.units import GIB
from napkinmath.catalog.gpus import find_hardware
from napkinmath.cli.main import main
from napkinmath.lowering.rollout.pages import pages_of
from napkinmath.lowering.rollout.served import Serving, served
from napkinmath.models.read import read_model
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.serving import decode_attention_s, kernel_of

# The median error of experts on H200, to which nothing was fitted, is 0.14.
HELD_OUT_EXPERTS = 0.2


def generation(model: str, gpu: str = "h100", **config: object) -> Generation:
    return Generation(read_model(model), GenerationConfig(**config), find_hardware(gpu))


# vLLM 0.11 v1/kv_cache_interface.py FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec:
# block_size x heads x (key + value) x bytes, times the layers of a group.
@pytest.mark.parametrize(
    ("model", "block_tokens", "block_bytes"),
    [
        ("llama-3.1-8b", 16, 16 * 8 * 256 * 2 * 32),
        ("deepseek-v2-lite", 16, 16 * 576 * 2 * 27),
        ("gemma-3-27b", 16, 16 * 16 * 256 * 2 * 10),  # 10 full layers, 52 with a window
    ],
)
def test_pages_are_those_of_vllm(model: str, block_tokens: int, block_bytes: int) -> None:
    pages = pages_of(served(read_model(model), Serving()), 16)
    assert (pages.block_tokens, pages.block_bytes) == (block_tokens, block_bytes)


def test_windows_take_the_pages_that_they_see() -> None:
    # 6 tables: one of full layers, five (52 of 10 each, the last padded: six) of windows of 1,024
    pages = pages_of(served(read_model("gemma-3-27b"), Serving()), 16)
    tables = {group.window: group.tables for group in pages.groups}
    assert tables == {1024: 6, 0: 1}
    assert pages.of_sequence(8192) == 8192 // 16 + 6 * (1024 // 16 + 1)


def test_a_block_of_a_hybrid_is_as_large_as_a_state() -> None:
    # vllm platforms/interface.py: the attention block grows until its page holds a scan's state
    model = served(read_model(dict(TINY["granitemoehybrid"])), Serving())
    pages = pages_of(model, 16)
    states = max(x.cache.state_bytes for x in model.layers if x.cache and not x.cache.token_bytes)
    token = max(x.cache.token_bytes for x in model.layers if x.cache)
    assert pages.block_tokens % 16 == 0
    assert pages.block_tokens * token >= states > (pages.block_tokens - 16) * token


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mixtral", "deepseek_v2", "lfm2"])
def test_weights_in_an_engine_are_the_models(family: str) -> None:
    spec = read_model(dict(TINY[family]))
    from napkinmath.estimate import estimate

    e = estimate(spec)
    assert served(spec, Serving()).weight_bytes == 2 * e.num_parameters


def test_ranks_have_their_share_and_eight_bits_are_half() -> None:
    spec = read_model("llama-3.1-8b")
    whole, half = (served(spec, Serving(ranks=n)).weight_bytes for n in (1, 2))
    assert whole / 2 == pytest.approx(half, rel=1e-3)
    small = generation("llama-3.1-8b", quantization="fp8").model.weight_bytes
    embeddings = 2 * 2 * 128256 * 4096
    assert small - embeddings == pytest.approx((whole - embeddings) / 2, rel=2e-3)


def test_the_cache_is_what_the_share_leaves() -> None:
    # vLLM's own log of this model on this GPU by default: "GPU KV cache size: 4xx,xxx tokens"
    g = generation("llama-3.1-8b")
    assert g.pages is not None
    assert g.pages.number(g.cache_bytes) * 16 == pytest.approx(445_000, rel=0.03)
    assert g.cache_bytes + g.fixed_bytes == int(0.9 * g.hardware.memory_bytes)
    assert g.longest_context
    assert (
        g.sequence_bytes(g.longest_context)
        <= g.cache_bytes
        < g.sequence_bytes(g.longest_context + 16)
    )


@pytest.mark.parametrize(("model", "longest"), [("mistral-7b-v0.1", 32768), ("mamba-2.8b", None)])
def test_a_cache_that_stops_growing_is_limited_by_the_models_positions(
    model: str, longest: int | None
) -> None:
    g = generation(model)
    assert g.sequence_bytes(1 << 22) == g.sequence_bytes(1 << 23)
    assert g.longest_context == longest


# ai-dynamo/aiconfigurator systems/silicon_sample.csv at 095f58a5: (model, GPU, format, tensor-parallel
# GPUs, requests at once, prompt, completion) and milliseconds between tokens of vLLM. Half of such
# rows are within 10.4% (benchmarks/accuracy/decoding.py); these are not the best ones.
MEASURED = {
    ("llama-3.1-70b", "h100", "fp8", 4, 16, 1024, 1024): 13.19,
    ("llama-3.1-70b", "h100", "fp8", 4, 32, 1024, 1024): 16.49,
    ("llama-3.1-70b", "h100", "fp8", 8, 64, 1024, 1024): 15.45,
}


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_time_between_tokens_is_that_of_a_server(case: tuple[object, ...]) -> None:
    model, gpu, quant, ranks, batch, prompt, completion = case
    g = generation(
        str(model),
        str(gpu),
        quantization=quant,
        ranks=ranks,
        prompt=prompt,
        completion=completion,
    )
    assert isinstance(batch, int)
    assert g.speed(batch).token_s * 1e3 == pytest.approx(MEASURED[case], rel=0.15)


def test_decoding_attention_reads_the_cache_once() -> None:
    speed = default_efficiency(find_hardware("h100").gpu)
    short, long = (
        decode_attention_s(kernel_of(speed), 64, nbytes, 0, "bf16", speed)
        for nbytes in (1 << 30, 1 << 31)
    )
    assert long - short == pytest.approx((1 << 30) / speed.stream_bytes_per_s)


def test_beams_copy_the_cache_and_a_shared_prefix_is_there_once() -> None:
    one = generation("llama-3.1-8b")
    assert generation("llama-3.1-8b", beams=4).sequence_bytes(1280) == 4 * one.sequence_bytes(1280)
    shared = generation("llama-3.1-8b", shared_prefix=1024)
    assert shared.sequence_bytes(1280) == 256 // 16 * 2 * (1 << 20)
    assert shared.prompt_s() < one.prompt_s()


def test_experts_cost_more_than_dense_products_of_their_sizes() -> None:
    """With many tokens a layer's experts take their share's inverse of dense products' time
    (benchmarks/accuracy/decoding.py --held-out compares them with measured layers)."""
    spec = read_model("qwen3-30b-a3b")
    g = Generation(spec, GenerationConfig(), find_hardware("h200"))
    assert g.clock is not None
    product = next(p for layer in g.model.layers for p in layer.products if p.experts)
    dense = product.replace(experts=0, visited=0, n=product.n * product.visited)
    many = 8192
    assert g.clock.product_s(product, many, 1) > 2 * g.clock.product_s(dense, many, 1)


def test_prompts_are_read_with_the_tokens_of_running_sequences() -> None:
    """vLLM mixes them, so weights are read once for both; SGLang reads prompts by themselves."""
    vllm, sglang = (
        generation("llama-3.1-70b", ranks=4, engine=name).clock for name in ("vllm", "sglang")
    )
    assert vllm is not None and sglang is not None
    alone, token = vllm.prefill(1024).seconds, vllm.decode(32, 2048).seconds
    assert alone < vllm.mixed(1024, 0, 32, 2048).seconds < alone + 0.8 * token
    apart = sglang.prefill(1024).seconds + sglang.decode(32, 2048).seconds
    assert sglang.mixed(1024, 0, 32, 2048).seconds == pytest.approx(apart)


def test_a_first_token_waits_for_text_and_for_others() -> None:
    alone, many = (generation("llama-3.1-70b", ranks=4).speed(n).first_token_s for n in (1, 64))
    assert many > 1.1 * alone
    server, inside = generation("llama-3.1-8b"), generation("llama-3.1-8b", engine="hf")
    text = server.engine.text_s * server.config.prompt
    assert text > 0 == inside.engine.text_s
    assert server.speed(1).first_token_s > server.prompt_s() + text


def test_what_multiplies_mxfp4_decides_how_long_prompts_take() -> None:
    def prompt_s(gpu: str, name: str) -> float:
        return generation("gpt-oss-120b", gpu, quantization=name, prompt=8192).prompt_s()

    assert prompt_s("h100", "mxfp4-marlin") > 1.2 * prompt_s("h100", "mxfp4")
    assert prompt_s("b200", "mxfp4-fp8") < 0.8 * prompt_s("b200", "mxfp4")
    assert prompt_s("h100", "mxfp4-fp8") == prompt_s("h100", "mxfp4")  # units for 4 bits are needed
    assert generation("llama-3.1-70b", "b200", quantization="nvfp4", prompt=8192).prompt_s() < (
        0.75 * generation("llama-3.1-70b", "b200", quantization="fp8", prompt=8192).prompt_s()
    )


def test_drafted_tokens_and_other_formats(capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafted = (generation("llama-3.1-8b", draft=d) for d in (None, (3, 0.8)))
    assert plain.token_s(1) > 1.8 * drafted.token_s(1)
    assert drafted.token_s(256) > 0.6 * plain.token_s(256)  # products are no longer free
    assert main(["generate", "llama-3.1-8b", "--gpu", "h200", "--token-time", "40ms"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--quant fp8" in out and "requests/s within 40" in out and "--tp 2" in out


def test_graphs_and_transformers_are_priced_apart() -> None:
    graphs, eager, hf = (
        generation("llama-3.1-8b", graphs=True),
        generation("llama-3.1-8b", graphs=False),
        generation("llama-3.1-8b", engine="hf", sequences=8),
    )
    assert eager.graph_bytes == 0 < graphs.graph_bytes < GIB
    assert graphs.speed(1).token_s < eager.speed(1).token_s < hf.speed(1).token_s
    assert hf.device_bytes - hf.fixed_bytes == 8 * hf.model.cached(1280)


def test_a_name_that_stands_for_another_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "deepseek-r1", "--gpus", "8xh200"]) == 0
    found = capsys.readouterr()
    assert "model 'deepseek-r1' taken as deepseek-v3" in found.err
    assert main(["generate", "deepseek-v3", "--gpus", "8xh200"]) == 0
    assert not capsys.readouterr().err


def test_every_family_that_generates_is_served() -> None:
    """None of them asks for a symbol that its layers do not have."""
    for family in ("mamba", "qwen3_next", "gpt_oss", "t5", "falcon_40b", "gpt_neo", "nemotron_h"):
        config = GenerationConfig(engine="hf" if family == "t5" else "vllm")
        g = Generation(read_model(dict(TINY[family])), config, find_hardware("h100"))
        assert g.speeds() and g.longest_context != 0
    with pytest.raises(InputError, match="generates nothing"):
        served(read_model(dict(TINY["bert"])), Serving())
    halves = served(read_model(dict(TINY["mamba"])), Serving(ranks=2))
    assert all(la.inner_sum for la in halves.layers if la.is_layer)


def test_cached_bytes_of_a_rank_are_those_of_the_rule() -> None:
    spec = read_model("llama-3.1-8b")
    model = served(spec, Serving(cache_format="fp8", ranks=2))
    bind = Bindings(dict(spec.symbols))
    assert model.cached(100) == 100 * bind.values["k"] * 128 * 2 * 32 // 2


BAD = {
    "llama-3.1-8b": "no GPU",
    "llama-3.1-8b --gpu h100 --engine vlm": "did you mean vllm",
    "llama-3.1-8b --gpu h100 --quant fp9": "fp8",
    "llama-3.1-8b --gpu h100 --cache-format x": "nvfp4",
    "llama-3.1-8b --gpu h100 --tp 3": "3",
    "llama-3.1-8b --gpu h100 --memory-share 3": "--memory-share",
    "llama-3.1-8b --gpu h100 --prompt 0": "--prompt",
    "llama-3.1-8b --gpu h100 --token-time 50": "50ms",
    "llama-3.1-8b gpt2 --gpu h100": "left over",
    "bert-base --gpu h100": "generates nothing",
    "qwen3-embedding-0.6b --gpu h100": "is for feature-extraction and generates nothing",
    "t5-small --gpu h100": "use engine hf",
    "llama-3.1-8b --gpu h100 --shared-prefix 2000": "shorter",
    "llama-3.1-8b --gpus 2xh100 --tp 4": "give --tp 2",
    "llama-3.1-8b --gpu h100 --ctx 200": "more than 256",
    "llama-3.1-8b --gpu h100 --ctx 2048 --prompt 8": "give one of them",
    "gpt2 --gpu t4 --prompt 1000": "learned positions for 1,024 tokens",
    "llama-3.1-8b --gpu v100-32 --quant awq": "from compute capability 7.5 on",
    "llama-3.1-8b --gpu t4 --quant fp8": "use --quant awq-int4, gptq-int4, nf4 or none",
    "gpt-oss-20b --gpu t4": "weights in mxfp4",
    "llama-3.1-8b --gpu a100-80 --quant quanto-int4": "vllm does not serve it",
    "llama-3.1-8b --gpu v100-32 --engine sglang": "takes GPUs from compute capability 7.5 on",
    "llama-3.1-8b --gpu h100 --quant mxfp4": "packs experts alone",
}


def test_formats_that_a_gpu_has_kernels_for_are_offered() -> None:
    offered = {
        gpu: [g.config.quantization for g in generation("llama-3.1-8b", gpu).formats()]
        for gpu in ("v100-32", "t4", "h100")
    }
    assert offered == {
        "v100-32": ["gptq-int4"],
        "t4": ["awq-int4"],
        "h100": ["fp8", "awq-int4"],
    }


def test_mxfp4_packs_experts_alone() -> None:
    """4 bits and a byte for 32 of them in the experts' products, 16 bits elsewhere."""
    whole = generation("gpt-oss-20b").model.weight_bytes
    experts = 24 * 32 * 3 * 2880 * 2880
    weights = generation("gpt-oss-20b", quantization="mxfp4").model.weight_bytes
    assert weights == whole - experts * 2 + experts * 17 // 32


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *line.split()]) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1 and BAD[line] in told.err and not told.out


@pytest.mark.parametrize(
    ("line", "stored"),
    [
        ("deepseek-r1 --gpus 8xh200", "fp8-block"),  # 671 GB in 8 bits; 16 do not fit
        ("MiniMaxAI/MiniMax-M2.5 --gpus 8xh200", "fp8-block"),
        ("gpt-oss-120b --gpu h100", "mxfp4"),
        ("unsloth/gpt-oss-20b-BF16 --gpu h100", ""),
        ("gpt-oss-20b --quant none --gpu h100", ""),
        ("qwen3-8b-fp8 --gpu h100", "fp8"),
        ("llama-3.1-8b-instruct-awq --gpu l4", "awq-int4"),
        ("llama-3.1-8b --quant awq --gpu l4", "awq-int4"),
        ("llama-3.1-8b --gpu h100", ""),
    ],
)
def test_weights_are_served_as_the_checkpoint_has_them(
    line: str, stored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *line.split()]) == 0
    said = stored or "bf16"
    assert f"weights {said}," in capsys.readouterr().out


def test_a_config_says_how_its_weights_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form: dict[str, object] = {"quant_method": "fp8", "fmt": "e4m3"}
    for more, stored in (({}, "fp8"), ({"weight_block_size": [128, 128]}, "fp8-block")):
        config = {**TINY["llama"], "quantization_config": {**form, **more}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["generate", str(tmp_path), "--gpu", "h100", "--prompt", "64"]) == 0
        assert f"weights {stored}," in capsys.readouterr().out


def test_sequences_longer_than_a_model_was_made_for_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "gpt2", "--gpu", "t4"]) == 0  # learned positions bound the default
    assert "prompts of 768 tokens" in capsys.readouterr().out
    for prompt, is_beyond in ((130_000, False), (132_000, True)):
        main(["generate", "llama-3.1-8b", "--gpu", "h100", "--prompt", str(prompt)])
        said = " ".join(capsys.readouterr().out.split())  # as if no line were broken
        assert ("has positions for 131,072" in said) is is_beyond


def test_the_spellings_of_a_training_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[str] = []
    for line in (
        "--gpus 2xh100 --ctx 2048 --completion 512",
        "--gpu h100 --tp 2 --prompt 1536 --completion 512",
        "--gpu h100 --tensor-parallel-size 2 --max-model-len 2k --max-new-tokens 512",
    ):
        assert main(["generate", "llama-3.1-8b", *line.split(), "--json"]) == 0
        answers.append(capsys.readouterr().out)
    assert len(set(answers)) == 1 and json.loads(answers[0])["tp"] == 2


def test_the_command_answers_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "llama-3.1-8b", "--gpu", "h100", "--price", "2"]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "fits" and answer["speeds"][0]["money"] > 0
    assert main([*asked, "--csv"]) == 0
    assert capsys.readouterr().out.startswith("sequences,first token")
    assert main([*asked, "--explain", "--token-time", "20ms"]) == 0
    assert "within 20" in capsys.readouterr().out
    assert main(["generate", "llama-3.1-70b", "--gpu", "h100"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_an_engine_over_several_machines_sums_across_the_network() -> None:
    """Sixteen ranks are two machines of eight; a rack of GB200 is one."""
    gpus = ("H100-SXM5-80GB", "GB200")
    one, several = (
        [generation("llama-3.1-405b", gpu=gpu, ranks=ranks).clock for gpu in gpus]
        for ranks in (8, 16)
    )
    nodes = [[c.fabric.nodes for c in row if c and c.fabric] for row in (one, several)]
    assert nodes == [[1, 1], [2, 1]]
    network = [[c.decode(64, 1024).network_s for c in row if c] for row in (one, several)]
    assert network[1][0] > 1.5 * max(network[0][0], network[1][1])


STRETCHES = 2e-3  # relative: tiles of attention begin within a stretch


@pytest.mark.parametrize("running", [0, 3])
def test_a_prompt_in_very_many_chunks_is_priced_in_stretches(
    monkeypatch: pytest.MonkeyPatch, running: int
) -> None:
    """`generate gpt-oss-120b --prefill-tokens 2` took 28 s, as every chunk priced its products."""
    from napkinmath.answers import generation as module

    settings = {"prompt": 5001, "prefill_tokens": 8}
    few = generation("gpt-oss-20b", **settings)
    asked: list[object] = []
    assert few.clock is not None
    plain = few.clock.product_s
    monkeypatch.setattr(few.clock, "product_s", lambda *of: asked.append(of) or plain(*of))
    found = few.chunks(1, running)
    assert sum(times for times, _ in found) == -(-5001 // (8 - running))
    assert len(found) <= module._MOST_CHUNKS + 1
    assert len(asked) == 2 * sum(len(layer.products) for layer in few.model.layers)
    took = few.prompt_s(1, running)
    monkeypatch.setattr(module, "_MOST_CHUNKS", 1 << 20)
    assert took == pytest.approx(
        generation("gpt-oss-20b", **settings).prompt_s(1, running), rel=STRETCHES
    )


def test_a_gpu_without_bf16_serves_in_fp16() -> None:
    """vLLM refuses bf16 below sm80 (platforms/cuda.py check_if_supports_dtype); it was priced at the
    rate of no product, six times too slow."""
    old, new = generation("llama-3.1-8b", "v100-32"), generation("llama-3.1-8b", "h100")
    assert (old.config.dtype, new.config.dtype) == ("fp16", "bf16")
    bandwidth = old.hardware.gpu.bandwidth_bytes_per_s
    assert bandwidth is not None
    # one sequence is bound by its weights: between the data sheet's bandwidth and half of it
    least = old.model.weight_bytes / bandwidth
    assert least < old.token_s(1) < 2 * least
    with pytest.raises(InputError, match="has no bf16; use --dtype fp16"):
        generation("llama-3.1-8b", "v100-32", dtype="bf16")
    assert generation("llama-3.1-8b", "v100-32", dtype="bf16", engine="hf").config.dtype == "bf16"


@pytest.mark.parametrize(("length", "said"), [("200k", True), ("128k", False)])
def test_sequences_beyond_the_positions_are_said(
    length: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", "llama-3.1-8b", "--gpu", "h100", "--ctx", length, "--json"])
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    assert any("has positions for 131,072" in line for line in assumed) is said


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("llama-3.1-405b --gpu rtx4090", "no format on 1 to 8 GPUs holds a sequence of 1,280"),
        ("gpt2 --gpu t4 --sequences 99999", "1 to 4 GPUs holds 99,999 sequences of 1,024"),
        ("llama-7b --gpu rtx4090 --token-time 1ms", "nothing that fits keeps 1.00 ms between"),
    ],
)
def test_a_plan_without_rows_says_why(
    asked: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", *asked.split(), "--plan"])
    said = capsys.readouterr().out
    assert told in said and "placement" not in said


def test_a_time_in_another_unit_is_quoted_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "gpt2", "--gpu", "t4", "--token-time", "5us"]) == 2
    assert "--token-time '5us' is not in s or ms; write e.g. 50ms" in capsys.readouterr().err


def test_a_plan_has_every_size_and_format_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    line = "llama-3.1-70b --gpu rtx4090 --price 0.4"
    assert main(["generate", *line.split()]) == 1
    told = capsys.readouterr().out
    assert "--tp 2 --quant awq-int4" in told and "--tp 1 --quant awq-int4" not in told
    assert main(["generate", *line.split(), "--plan", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["plan"]
    placed = {(row["tp"], row["quant"]) for row in rows}
    assert placed == {
        *((n, "awq-int4") for n in (2, 4, 8)),
        *((n, "fp8") for n in (4, 8)),
        (8, "none"),
    }
    money = [row["money"] for row in rows]
    assert money == sorted(money) and money[0] > 0
    for row in rows:
        dear = 0.4 * row["tp"] / (row["tokens_per_s"] * 3600) * 1e6
        assert row["money"] == pytest.approx(dear, rel=1e-6)
    assert main(["generate", *line.split(), "--plan", "--token-time", "100ms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["plan"]
    assert rows and all(row["token_s"] <= 0.1 for row in rows)
    assert main(["generate", "llama-3.1-8b", "--vram", "24GiB", "--plan"]) == 2
    assert "orders by speed" in capsys.readouterr().err


def test_the_host_sets_the_pace_of_short_prompts_of_experts() -> None:
    """No graph holds a forward of many tokens: more GPUs do not make it faster than the host issues
    its layers; forwards that a graph holds, and long ones, are the device's."""
    few, many = (
        generation("deepseek-r1", "h200", quantization="fp8", ranks=8, engine="sglang", prompt=n)
        for n in (256, 32768)
    )
    issued = (61 - 3) * few.engine.experts_issue_s
    assert few.prompt_s() == pytest.approx(issued, rel=0.05)
    assert many.prompt_s() > 2 * issued * 32768 / many.chunk
    assert few.token_s(8) < issued / 4
    small = generation("deepseek-r1", "h200", quantization="fp8", ranks=8, prompt=256)
    assert small.prompt_s() < issued / 4  # vLLM's graphs hold 512 tokens


def test_graphs_hold_prompts_as_far_as_an_engine_captures() -> None:
    """vLLM captures forwards of up to 512 tokens, of gpt-oss up to 1,024 (its GptOssForCausalLMConfig),
    or what is asked for; with graphs of decoding alone the host issues every prompt."""

    def prompt_s(model: str, tokens: int, **config: object) -> float:
        return generation(model, "b200", ranks=8, prompt=tokens, **config).prompt_s()

    issued = 36 * 1.1e-3
    assert prompt_s("gpt-oss-120b", 1000) < issued / 3
    assert prompt_s("gpt-oss-120b", 1100) > issued
    assert prompt_s("gpt-oss-120b", 1100, graphs_to=2048) < issued / 3
    assert prompt_s("gpt-oss-120b", 1000, graphs_decode=True) > issued
    token = {
        only: generation("gpt-oss-120b", "b200", ranks=8, graphs_decode=only).token_s(8)
        for only in (False, True)
    }
    assert token[True] == token[False]
    dense = prompt_s("llama-3.1-8b", 256, graphs_decode=True)
    assert dense == pytest.approx(32 * 0.6e-3, rel=0.1)
    assert prompt_s("llama-3.1-8b", 256) < dense / 2


def test_sglang_may_look_for_requests_rarely() -> None:
    """--scheduler-recv-interval: a request waits for half of the tokens until it is looked for, and those
    that came in between are read together."""
    often, rarely = (
        generation(
            "deepseek-r1", "h200", quantization="fp8", ranks=8, engine="sglang", receive_every=n
        )
        for n in (1, 30)
    )
    waits = rarely.speed(8).first_token_s - often.speed(8).first_token_s
    assert waits == pytest.approx(29 / 2 * often.token_s(8), rel=0.01)
    # 127 others of 256 tokens each: 15 prompts come in 30 tokens, and 8 of them fill a chunk
    assert rarely.speed(128).token_s < often.speed(128).token_s / 2


def test_what_the_price_of_a_cache_leaves_open_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = {}
    for engine in ("vllm", "sglang"):
        main(["generate", "llama-3.1-8b", "--gpu", "h100", "--engine", engine])
        told[engine] = " ".join(capsys.readouterr().out.split())
    assert "sorts all logits" in told["vllm"] and "sorts all logits" not in told["sglang"]


def test_settings_that_an_engine_lacks_are_refused() -> None:
    with pytest.raises(InputError, match="looks for requests before every forward"):
        generation("llama-3.1-8b", receive_every=10)
    with pytest.raises(InputError, match="leaves no graphs"):
        generation("llama-3.1-8b", graphs=False, graphs_to=64)


def test_ranks_share_the_width_of_experts_and_not_their_rows() -> None:
    """A layer of MiniMax M2's experts over 8,192 tokens on H200 in vLLM 0.18: 3.94 ms on one rank, 1.42 ms
    on each of four (ai-dynamo/aiconfigurator moe_perf, FP8 by blocks, balanced)."""

    def layer_s(ranks: int) -> float:
        served = generation("minimax-m2.5", "h200", quantization="fp8", ranks=ranks)
        layer = next(layer for layer in served.model.layers if layer.is_layer)
        assert served.clock is not None
        return sum(served.clock.product_s(p, 8192, 1) for p in layer.products if p.experts)

    assert layer_s(1) == pytest.approx(3.94e-3, rel=HELD_OUT_EXPERTS)
    assert layer_s(4) == pytest.approx(1.42e-3, rel=HELD_OUT_EXPERTS)


@pytest.mark.parametrize(
    ("engine", "measured_ms"),
    [("vllm-0.19", 1.89), ("vllm-0.22", 1.89), ("vllm", 1.04), ("sglang", 1.04)],
)
def test_experts_in_blocks_of_fp8_run_in_the_kernel_of_a_release(
    engine: str, measured_ms: float
) -> None:
    """A layer of Qwen3 235B's experts over 8,192 tokens on each of four B200 (ai-dynamo/aiconfigurator
    moe_perf, FP8 by blocks, skewed): Triton's kernel in vLLM 0.19 and 0.22, TRT-LLM's in 0.24 and in
    SGLang 0.5.14."""
    served = generation("qwen3-235b-a22b", "b200", quantization="fp8-block", ranks=4, engine=engine)
    layer = next(layer for layer in served.model.layers if layer.is_layer)
    assert served.clock is not None
    time = sum(served.clock.product_s(p, 8192, 1) for p in layer.products if p.experts)
    assert time * 1e3 == pytest.approx(measured_ms, rel=HELD_OUT_EXPERTS)


def test_a_release_of_an_engine_is_read_and_bad_ones_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for spelling in ("vllm-0.19", "vllm==0.19.0", "VLLM-0.19"):
        assert main(["generate", "llama-3.1-8b", "--gpu", "h100", "--engine", spelling]) == 0
        assert ", vllm-0.19" in capsys.readouterr().out
    assert main(["generate", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm-new"]) == 2
    assert "engine 'vllm-new' is unknown" in capsys.readouterr().err
    line = ["qwen2.5-0.5b", "--workload", "grpo", "--rollout", "vllm-0.19", "--gpu", "h100"]
    assert main(line) == 2
    assert "use vllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "tokens", "measured_ms"),
    [
        ("minimax-m2", 512, 0.144),
        ("minimax-m2", 2048, 0.199),
        ("qwen3-235b-a22b", 512, 0.116),
        ("qwen3-235b-a22b", 2048, 0.170),
    ],
)
def test_experts_in_nvfp4_start_a_kernel(model: str, tokens: int, measured_ms: float) -> None:
    """A layer of experts on each of four B200 in vLLM 0.19, whose rows the start was not fitted to
    (ai-dynamo/aiconfigurator moe_perf, skewed)."""
    served = generation(model, "b200", quantization="nvfp4", ranks=4, engine="vllm")
    layer = next(layer for layer in served.model.layers if layer.is_layer)
    assert served.clock is not None
    time = sum(served.clock.product_s(p, tokens, 1) for p in layer.products if p.experts)
    assert time * 1e3 == pytest.approx(measured_ms, rel=HELD_OUT_EXPERTS)


def test_minimax_in_nvfp4_ran_in_cutlass_before_its_routing_was_known() -> None:
    """Layers of experts over 8,192 tokens on each of two B200: 1.27 ms in FlashInfer's kernel of CuTe DSL
    (ai-dynamo/aiconfigurator moe_perf, SGLang 0.5.9)."""

    def layer_ms(model: str, engine: str) -> float:
        served = generation(model, "b200", quantization="nvfp4", ranks=2, engine=engine)
        layer = next(layer for layer in served.model.layers if layer.is_layer)
        assert served.clock is not None
        return 1e3 * sum(served.clock.product_s(p, 8192, 1) for p in layer.products if p.experts)

    assert layer_ms("minimax-m2", "vllm-0.19") == pytest.approx(1.27, rel=HELD_OUT_EXPERTS)
    assert layer_ms("minimax-m2", "vllm-0.20") == layer_ms("minimax-m2", "vllm")
    assert layer_ms("minimax-m2", "sglang") == layer_ms("minimax-m2", "vllm")
    assert layer_ms("qwen3-235b-a22b", "vllm-0.19") == layer_ms("qwen3-235b-a22b", "vllm")


def test_kernels_of_data_centre_blackwell_are_not_those_of_other_blackwell() -> None:
    def layer_s(form: str, engine: str) -> float:
        served = generation("minimax-m2", "rtx5090", quantization=form, ranks=8, engine=engine)
        layer = next(layer for layer in served.model.layers if layer.is_layer)
        assert served.clock is not None
        return sum(served.clock.product_s(p, 8192, 1) for p in layer.products if p.experts)

    assert layer_s("fp8-block", "vllm-0.19") == layer_s("fp8-block", "vllm")
    assert layer_s("fp8-block", "vllm") == pytest.approx(layer_s("fp8", "vllm"), rel=0.05)


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        ("gpt-oss-20b", "a100-80", True),
        ("gpt-oss-20b", "rtx4090", True),
        ("gpt-oss-20b", "h100", False),  # FlashAttention 3 knows sinks
        ("gpt-oss-20b", "b200", False),  # and so does TRT-LLM's kernel
        ("qwen3-8b", "a100-80", False),
    ],
)
def test_attention_with_sinks_in_triton_is_named(
    model: str, gpu: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", model, "--gpu", gpu, "--json"])
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    assert any("Triton's kernel on this GPU" in line for line in assumed) is said
