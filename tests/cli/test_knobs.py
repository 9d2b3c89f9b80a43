"""Every knob moves a figure: bytes of some phase, seconds, or what is trained; one that moves
nothing is a promise not kept."""

from __future__ import annotations

import pytest
from cli.test_flags import parse
from napkinmath.estimate import estimate
from napkinmath.inputs.options import train_config

# (command line, the same with one knob turned)
TURNS: list[tuple[str, str]] = [
    ("", "--lora"),
    ("--lora", "--method ia3"),
    ("--lora", "--method dora"),
    ("--lora", "--lora --adapters 4"),
    ("--lora", "--qlora"),
    ("--qlora", "--method qalora"),
    ("--lora", "--method prompt"),
    ("--method prompt", "--method prefix"),
    ("--method prompt", "--method prompt --virtual-tokens 500"),
    ("--method prefix", "--method prefix --virtual-tokens 500"),
    ("--lora --targets q_proj", "--lora --targets q_proj,embed_tokens"),
    ("--lora", "--lora --rank 64"),
    ("--lora", "--lora --targets q_proj"),
    ("--lora", "--lora --dropout 0.1"),
    ("--lora", "--lora --adapter-dtype bf16"),
    ("--lora", "--lora --train-modules lm_head"),
    ("", "--freeze embed_tokens"),
    ("--qlora", "--lora --quant int8"),
    ("--qlora", "--qlora --no-double-quant"),
    ("--lora --quant gptq", "--lora --quant gptq --group-size 32"),
    ("--qlora", "--qlora --no-kbit"),
    ("--qlora", "--qlora --keep-modules lm_head,q_proj"),
    ("", "--bs 2"),
    ("", "--ctx 1k"),
    ("", "--grad-accum 2"),
    ("", "--precision bf16-amp"),
    ("", "--precision bf16"),
    ("", "--precision fp8"),
    ("--precision fp8", "--precision fp8-block"),
    ("--precision fp32", "--precision tf32"),
    ("", "--optimizer lion"),
    ("--optimizer adamw-8bit", "--optimizer paged-adamw-8bit"),
    ("", "--optimizer-in-backward"),
    ("", "--no-clip"),
    ("", "--checkpointing full"),
    ("--checkpointing full", "--checkpointing every:4"),
    ("--checkpointing full", "--checkpointing sqrt"),
    ("--checkpointing full", "--checkpointing selective"),
    ("--checkpointing full", "--checkpointing interleaved:2"),
    ("--checkpointing full", "--checkpointing offload"),
    ("--checkpointing full", "--checkpointing full --reentrant"),
    ("", "--offload optimizer"),
    ("--lora", "--lora --offload parameters"),
    ("", "--offload activations"),
    ("--offload activations", "--offload activations --no-pinned"),
    ("--offload activations", "--offload activations --offload-style torchtune"),
    ("--lora --offload parameters", "--lora --offload parameters --prefetch 4"),
    ("", "--attention eager"),
    ("", "--attention math"),
    ("", "--attention efficient"),
    ("", "--loss chunked"),
    ("", "--loss fused"),
    ("", "--stack hf-2024"),
    ("--checkpointing full", "--checkpointing full --eval"),
    ("", "--compile"),
    ("", "--lengths 100,200"),
    ("", "--packing"),
    ("--lengths 100,200", "--lengths 100,200 --packing"),
    ("--packing", "--packing --attention sdpa"),
    ("--packing --lengths 100,200", "--packing --lengths 1000,2000"),
    ("", "--kernels liger"),
    ("", "--kernels napkinmath"),
    ("--lora", "--lora --kernels napkinmath"),
    ("--qlora", "--qlora --kernels unsloth"),
]
OF_OTHER_MODELS = [("", "--target-ctx 64", "t5-small"), ("", "--images 3", "qwen2-vl-2b")]


def figures(line: str, model: str = "llama-3.2-1b") -> tuple[object, ...]:
    """What a configuration costs: bytes of each part of each phase, trained parameters, seconds."""
    found = estimate(model, train_config(parse(line)), hardware="A100-80")
    assert found.time is not None
    return (
        tuple(point.nbytes for point in found.timeline.segment_peaks()),
        found.num_trained,
        found.time.seconds,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("base", "turned"), TURNS, ids=[turned for _, turned in TURNS])
def test_knob_moves_a_figure(base: str, turned: str) -> None:
    assert figures(base) != figures(turned)


@pytest.mark.parametrize(("base", "turned", "model"), OF_OTHER_MODELS)
def test_knob_of_other_models_moves_a_figure(base: str, turned: str, model: str) -> None:
    assert figures(base, model) != figures(turned, model)
