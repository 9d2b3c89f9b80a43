"""The policy's weights on their way to an engine, against TRL's own walk over a model that torch's
fully_shard has split on pretended ranks: how large each is when it is whole."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from napkinmath.estimate import estimate
from napkinmath.ir.ledger import ALLOC, Role, Tensor
from napkinmath_profiler.trace import build, prepared
from napkinmath_profiler.tracing.meta_model import TrainMethod, config_from
from napkinmath_profiler.tracing.parallel.fully_sharded import (
    ShardingOptions,
    meta_streams,
    shard,
)
from napkinmath_profiler.tracing.parallel.pretended_ranks import pretended_ranks
from napkinmath_profiler.tracing.trace_options import TraceOptions
from parallel.spread_llama import LLAMA

MODEL = {**LLAMA, "tie_word_embeddings": False}


def sent_by_trl(dtype: str, mixed: str | None) -> list[int]:
    """Bytes of each parameter as TRL 1.16 hands it over, sorted."""
    from trl.generation.vllm_generation import VLLMGeneration

    options = TraceOptions(
        method=TrainMethod.FULL, dtype=dtype, micro_batch_size=1, sequence_length=16
    )
    engine = SimpleNamespace(_fix_param_name_to_vllm=lambda name, **_: name)
    with warnings.catch_warnings(), pretended_ranks(4), meta_streams():
        warnings.simplefilter("ignore")
        model = prepared(build(config_from(MODEL), options), options)
        shard(model, ShardingOptions(shard_degree=4, mixed_dtype=mixed))
        walked = VLLMGeneration._iter_fsdp2_params(engine, model)
        return sorted(whole.numel() * whole.element_size() for _, whole in walked)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "mixed"), [("bf16-autocast", "bf16"), ("fp32", None)])
def test_each_parameter_is_whole_in_the_type_that_is_kept(
    precision: str, mixed: str | None
) -> None:
    e = estimate(
        MODEL,
        workload="grpo",
        reference=False,
        rollout="vllm",
        gpus="4xH100",
        data_parallel="fsdp2",
        bs=1,
        ctx=64,
        precision=precision,
    )
    ours: list[int] = []
    for segment in e.step.micro_steps[0][1]:
        for action, tensor in segment.events if "to the engine" in segment.name else ():
            if action == ALLOC and isinstance(tensor, Tensor) and tensor.role is Role.COMMUNICATION:
                bind = next(
                    t
                    for t in e.timeline.tensors
                    if t.module == tensor.module and t.name == tensor.name
                )
                ours += [bind.nbytes] * segment.repeat
    theirs = sent_by_trl("fp32" if precision == "fp32" else "bf16", mixed)
    assert sorted(ours) == theirs
