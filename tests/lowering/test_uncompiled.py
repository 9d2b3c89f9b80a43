"""Layers that --compile leaves eager: those whose checkpoint the compiler cannot trace."""

from __future__ import annotations

import pytest
from napkinmath.estimate import Estimate
from napkinmath.inputs.jobs import priced

LAYERS = {"arch": "L4 h64 a4 kv2 f128 v256", "ctx": 64, "gpu": "H100", "compile": True}
BROKEN = {**LAYERS, "attention": "flash2", "checkpointing": "full"}


def of(options: dict[str, object]) -> Estimate:
    (found,) = priced(options, [])
    return found


def layer_names(e: Estimate) -> list[str]:
    return [op.name for run in e.step.runs if run.stage.checkpointed for op in run.block.ops]


@pytest.mark.parametrize(
    ("change", "is_eager"),
    [
        ({}, True),
        ({"bs": 2}, False),
        ({"bs": 2, "stack": "hf-4.48"}, True),
        ({"bs": 2, "stack": "hf-2023"}, False),
        ({"bs": 2, "packing": True}, True),
        ({"attention": "sdpa"}, False),
        ({"attention": "flash3"}, True),
        ({"checkpointing": "none"}, False),
        ({"stack": "torchtitan"}, False),
        ({"arch": "L4 h64 a4 f128 v256 gelu learned-pos"}, False),
    ],
    ids=str,
)
def test_a_checkpoint_that_reads_position_ids_runs_eagerly(
    change: dict[str, object], is_eager: bool
) -> None:
    e = of({**BROKEN, **change})
    said = any("reaches no checkpointed layer" in f.text for f in e.findings)
    plain = of({**BROKEN, **change, "compile": False})
    assert said == is_eager
    assert (layer_names(e) == layer_names(plain)) == is_eager or "learned-pos" in str(change)


@pytest.mark.torch
def test_dynamo_compiles_no_frame_of_a_checkpoint_with_a_read() -> None:
    torch = pytest.importorskip("torch")
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.utils.checkpoint import checkpoint

    def layer(x: object, positions: object) -> object:
        read = bool((positions - torch.arange(4)).abs().sum())
        return torch.relu(x * 2) if read else torch.relu(x * 3)

    def whole(x: object, positions: object) -> object:
        return torch.relu(x * 3) + positions.sum()

    frames = []
    for body in (layer, whole):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")

        def wrapped(x: object, positions: object, body: object = body) -> object:
            return checkpoint(body, x, positions, use_reentrant=False)

        torch.compile(wrapped, backend=counter)(
            torch.ones(4, requires_grad=True), torch.arange(4)
        ).sum().backward()
        frames.append(counter.frame_count)
    assert frames == [0, 1]
