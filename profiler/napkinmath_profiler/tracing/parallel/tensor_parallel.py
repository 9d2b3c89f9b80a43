"""A transformers model split over tensor-parallel ranks by the libraries themselves: its own plan,
or torch's styles with a split sequence."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from napkinmath_profiler.trace import build, optimizer_of, prepared
from napkinmath_profiler.tracing.meta_model import config_from, example_inputs
from napkinmath_profiler.tracing.observation import observe
from napkinmath_profiler.tracing.parallel.pretended_ranks import (
    meta_mesh,
    meta_positions,
    pretended_ranks,
)
from napkinmath_profiler.tracing.trace_options import TraceOptions
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import TrainingLoop

COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def trace_tensor_parallel(
    config: Any, degree: int, options: TraceOptions, *, sequence: bool = False
) -> TraceResult:
    """Two steps of rank 0 of ``degree``, by transformers' ``tp_plan``, or with ``sequence`` by
    torch's styles and ``loss_parallel``."""
    with pretended_ranks(degree):
        mesh = meta_mesh((degree,), ("tp",))
        config = config_from(config)
        model = build(config, options)
        inputs = example_inputs(
            model,
            config,
            micro_batch_size=options.micro_batch_size,
            sequence_length=options.sequence_length,
        )
        if sequence:
            split_with_sequence(model, mesh)
            inputs["position_ids"] = meta_positions(options.sequence_length)
        else:
            split_by_plan(model, mesh)
        model = prepared(model, options)
        loop = TrainingLoop(model, optimizer_of(model, options), inputs, options.loop)
        with loss_parallel() if sequence else nullcontext():
            return observe(model, loop.run, inputs=inputs, settings=options.settings)


def split_by_plan(model: Any, mesh: Any) -> None:
    """The model's own ``tp_plan``, parameters sharded and forwards wrapped as
    ``from_pretrained(tp_plan=...)`` does."""
    from transformers.distributed.tensor_parallel import (
        ALL_PARALLEL_STYLES,
        apply_tensor_parallelism,
    )

    plan = model.tp_plan
    named = [
        (name, plan[star])
        for name, _ in [*model.named_modules(), *model.named_parameters()]
        if (star := re.sub(r"\d+", "*", name)) in plan
    ]
    modules = dict(model.named_modules())
    for name, style in named:
        if name in modules:
            for parameter, _ in list(modules[name].named_parameters(recurse=False)):
                ALL_PARALLEL_STYLES[style].shard_param(modules[name], parameter, mesh)
    apply_tensor_parallelism(model, mesh, dict(named))
    model.tie_weights()


def split_with_sequence(model: nn.Module, mesh: Any) -> None:
    """torch's styles as torchtitan composes them for Llama: norms and residuals on a share of the
    sequence, logits on one of the vocabulary."""
    top: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, top)
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, _sequence_plan(layer))


def _sequence_plan(layer: Any) -> dict[str, Any]:
    """The styles of one decoder layer."""
    part: dict[str, Placement] = {"hidden_states": Shard(1)}
    whole: dict[str, Placement] = {"hidden_states": Replicate()}
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(use_local_output=True),
        "post_attention_layernorm": SequenceParallel(use_local_output=True),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=part, desired_input_kwarg_layouts=whole
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    for scope in ("self_attn", "mlp"):
        for name, child in getattr(layer, scope).named_children():
            if isinstance(child, nn.Linear):
                by_rows = name not in COLUMNS
                style = RowwiseParallel(output_layouts=Shard(1)) if by_rows else ColwiseParallel()
                plan[f"{scope}.{name}"] = style
    return plan
