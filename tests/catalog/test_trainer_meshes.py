"""Which meshes a stack's trainer runs: what plans, answers and guidelines read off one record."""

from __future__ import annotations

from collections import Counter

import pytest
from napkinmath import estimate
from napkinmath.catalog.stacks import STACKS
from napkinmath.catalog.trainer_meshes import (
    TRAINER_MESHES,
    not_run,
    stacks_that_run,
    strategies_of,
)
from napkinmath.inputs.options import train_config
from published.stacks import PUBLISHED

OWN_LOOPS = {"hf-bare", "hf-bare-fp32", "hf-loop", "torch-loop", "diffusers", "sd-scripts"}
"""Nothing but their author says which meshes they run."""


def test_every_stack_of_a_trainer_has_one_row() -> None:
    rows = Counter(stack for row in TRAINER_MESHES for stack in row.stacks)
    catalogued = set(STACKS) - set(PUBLISHED)  # which other tests may have added
    assert set(rows) == catalogued - OWN_LOOPS and set(rows.values()) == {1}
    for row in TRAINER_MESHES:
        axes = (*row.tensor, *row.pipeline, *row.ring, *row.ulysses, *row.expert)
        assert row.source and set(axes) <= set(row.strategies)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 2, "data_parallel": "fsdp2"}, []),
        ({"tp": 8}, []),
        ({"tp": 2, "data_parallel": "zero1"}, ["--tp without fsdp2"]),
        ({"tp": 2}, ["--tp without fsdp2"]),
        ({"pp": 2, "data_parallel": "fsdp2"}, ["--pp"]),
        ({"cp": 2, "data_parallel": "ddp"}, ["--cp without fsdp2"]),
        ({"cp": 2, "cp_kind": "ulysses", "data_parallel": "zero3"}, []),
        ({"stack": "hf-4.45", "data_parallel": "fsdp2"}, ["--data-parallel fsdp2"]),
        ({"stack": "megatron", "tp": 2, "pp": 2, "data_parallel": "zero1"}, []),
        ({"stack": "torchtitan", "pp": 2, "data_parallel": "ddp"}, ["--pp without fsdp2"]),
        ({"stack": "torchtune", "tp": 2, "data_parallel": "fsdp2"}, []),
        (
            {"stack": "torchtune", "tp": 2, "data_parallel": "fsdp2", "method": "lora"},
            ["--tp with adapters"],
        ),
        ({"stack": "hf-loop", "pp": 2, "tp": 2}, []),
    ],
)
def test_what_a_trainer_does_not_run_is_named(options: dict[str, object], said: list[str]) -> None:
    config = train_config({"gpus": 8, "ctx": 1024, **options})
    assert [lacking.what for lacking in not_run(config)] == said
    for stack in stacks_that_run(config):
        assert not any(not_run(config.replace(stack=stack)))


def test_a_plan_tries_the_strategies_of_the_trainer() -> None:
    tried = ("ddp", "zero1", "zero3", "fsdp2")
    assert strategies_of("hf", tried) == strategies_of("hf-bare", tried) == tried
    assert strategies_of("hf-4.45", tried) == ("ddp", "zero1", "zero3", "fsdp1")
    assert strategies_of("torchtitan", tried) == ("ddp", "fsdp2")
    assert strategies_of("torchtune", tried) == ("fsdp2",)
    assert strategies_of("megatron", tried) == ("ddp", "zero1", "fsdp2")
    assert strategies_of("nanotron", ("zero3", "fsdp2")) == ("zero1",)


def test_an_estimate_names_the_stacks_that_run_its_mesh() -> None:
    options = {"gpu": "h100", "gpus": 4, "pp": 2, "ctx": 512, "bs": 2, "grad_accum": 4}
    texts = [f.text for f in estimate("llama-3.2-1b", **options).findings]
    (said,) = [text for text in texts if "does not run" in text]
    assert "transformers' Trainer does not run --pp" in said and "--stack megatron" in said
    texts = [f.text for f in estimate("llama-3.2-1b", **options, stack="megatron").findings]
    assert not [text for text in texts if "does not run" in text]
