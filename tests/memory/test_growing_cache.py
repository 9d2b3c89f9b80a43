"""The sizes of a growing cache that the allocator is shown hold what every token would."""

from __future__ import annotations

import pytest
from agreement.tiny_configs import TINY
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import estimate
from napkinmath.lowering.generation import _SIZES_SHOWN, makes_all_logits
from napkinmath.lowering.policy import Policy
from napkinmath.memory.allocator import CachingAllocator
from napkinmath.models.families import read_config

# A tensor that grows by more than 8 MiB passes sizes that are not shown.
SHOWN_GROWTH = 8 << 20
TOLERANCE = 0.2
LAYERS = 4


def held(token: int, first: int, points: list[int]) -> int:
    """Reserved after keys and values of all layers have had these lengths, one after the other."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(first * token) for _ in range(2 * LAYERS)]
    for length in points:
        for index, old in enumerate(blocks):
            blocks[index] = allocator.malloc(length * token)
            allocator.free(old)
    return allocator.peak_reserved


@pytest.mark.parametrize(
    ("token", "first", "last"),
    [(8192, 2049, 3072), (8192, 100, 1100), (512, 200, 456), (4096, 512, 1024), (2048, 1000, 5000)],
)
def test_shown_sizes_hold_what_every_token_does(token: int, first: int, last: int) -> None:
    assert (last - first) * token <= SHOWN_GROWTH
    grown = [
        last - first - (last - first) * (_SIZES_SHOWN - n) // _SIZES_SHOWN
        for n in range(1, _SIZES_SHOWN + 1)
    ]
    every = held(token, first, list(range(first + 1, last + 1)))
    shown = held(token, first, [first + more for more in grown])
    assert shown == pytest.approx(every, rel=TOLERANCE)


def test_one_jump_holds_much_less() -> None:
    every = held(8192, 2049, list(range(2050, 3073)))
    assert held(8192, 2049, [3072]) < 0.5 * every


@pytest.mark.parametrize("family", ["llama", "t5", "granitemoehybrid", "gemma3_text", "mamba2"])
def test_what_does_not_grow_stays_and_all_is_returned(family: str) -> None:
    """States and an encoder's keys are made once."""
    found = estimate(dict(TINY[family]), bs=2, ctx=64, generate=40).replay
    assert found.end_allocated < found.peak_allocated <= found.peak_reserved


def test_releases_before_4_46_make_all_logits_of_the_prompts() -> None:
    """transformers 4.44.2 models/llama/modeling_llama.py forward (`logits.float()`), and 4.51.3
    generation/utils.py _supports_logits_to_keep, which Qwen2.5-VL of it does not."""
    vocabulary, rows, length = 65_536, 4, 512
    model = dict(TINY["llama"], vocab_size=vocabulary)

    def generating(stack: str) -> int:
        options = {"bs": rows, "ctx": length, "checkpointing": "full", "loss": "fused"}
        return estimate(model, stack=stack, generate=16, precision="bf16", **options).peak.nbytes

    old, new = generating("hf-4.45"), generating("hf-4.57")
    assert old - new > 4 * rows * length * vocabulary
    vision = next(row for name, row in TINY.items() if name == "qwen2_5_vl")
    spec = read_config(dict(vision))
    verdicts = {
        stack: makes_all_logits(spec, Policy(TrainConfig(micro_batch_size=1), find_stack(stack)))
        for stack in ("trl-0.18", "hf-4.57", "hf")
    }
    assert verdicts == {"trl-0.18": True, "hf-4.57": False, "hf": False}
