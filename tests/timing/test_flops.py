"""Floating-point work of a step: what the model needs is what is done, where nothing is done twice."""

from __future__ import annotations

import pytest
from napkinmath.inputs.jobs import priced

METHODS = ("full", "lora", "qlora", "dora", "ia3", "prompt", "prefix")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"),
    [
        *(
            (model, method)
            for model in ("gpt2", "tinyllama-1.1b", "mixtral-8x7b")
            for method in METHODS
        ),
        *(("t5-small", method) for method in METHODS if method != "prefix"),
    ],
)
def test_without_recomputation_all_work_is_needed(model: str, method: str) -> None:
    """Nothing below the first layer is trained by an adapter, so that layer's input gets no
    gradient: that product is neither done nor needed."""
    options = {"model": model, "method": method, "checkpointing": "none", "ctx": "128"}
    time = priced(options | {"gpu": "H100"}, [])[0].time
    assert time is not None
    assert time.model_flops == time.hardware_flops


@pytest.mark.parametrize("method", [method for method in METHODS if method != "prefix"])
def test_with_recomputation_more_is_done(method: str) -> None:
    options = {"model": "gpt2", "method": method, "checkpointing": "full", "ctx": "128"}
    time = priced(options | {"gpu": "H100"}, [])[0].time
    assert time is not None
    assert time.model_flops < time.hardware_flops <= 2 * time.model_flops
