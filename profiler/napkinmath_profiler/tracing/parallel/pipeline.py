"""One rank of a pipelined step: transformers' layers under torch.distributed.pipelining, over a
process group that only pretends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import pipelining

from napkinmath_profiler.trace import build, optimizer_of
from napkinmath_profiler.tracing.meta_model import config_from, example_inputs
from napkinmath_profiler.tracing.observation import mark_persistent, observe
from napkinmath_profiler.tracing.parallel.fully_sharded import (
    ShardingOptions,
    Traffic,
    counted,
    meta_streams,
    planning_unseen,
    resizes_seen,
    shard_by_layers,
)
from napkinmath_profiler.tracing.parallel.pretended_ranks import meta_mesh, pretended_ranks
from napkinmath_profiler.tracing.storage_tracker import StorageTracker
from napkinmath_profiler.tracing.trace_options import TraceOptions
from napkinmath_profiler.tracing.trace_result import TraceResult

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


class StageModule(nn.Module):
    """Some layers of a Llama-like model: the first stage with the embedding, the last with norm and
    head."""

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        core = model.model
        self.embed_tokens = core.embed_tokens if layers.start == 0 else None
        self.rotary_emb = core.rotary_emb
        self.layers = nn.ModuleList(core.layers[index] for index in layers)
        last = layers.stop == len(core.layers)
        self.norm, self.lm_head = (core.norm, model.lm_head) if last else (None, None)
        self._no_split_modules = model._no_split_modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids on the first stage, else hidden states; hidden states, or logits on the last
        stage."""
        hidden = x if self.embed_tokens is None else self.embed_tokens(x)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        tables = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=tables)
        return (
            hidden if self.norm is None or self.lm_head is None else self.lm_head(self.norm(hidden))
        )


def trace_pipeline(
    config: Any,
    layers: tuple[int, ...],
    stage: int,
    options: TraceOptions,
    *,
    schedule: str = "1f1b",
    num_micro_batches: int = 4,
    sharding: ShardingOptions | None = None,
    reference: bool = False,
) -> TraceResult:
    """Two steps of the rank that holds ``stage``; ``layers`` counts the layers of every stage,
    ``sharding`` puts FSDP2 over its ranks.

    ``reference``: before each step a frozen copy runs over all micro-batches, as verl's
    compute_log_prob does.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    degree = sharding.shard_degree if sharding is not None else 1
    with pretended_ranks(len(layers) * degree, rank=stage * degree), ExitStack() as seen:
        config = config_from(config)
        mesh = meta_mesh((len(layers), degree), ("pipeline", "shard"))
        model = build(config, options)
        dtype: Any = (
            model.dtype
        )  # of what stages exchange, whatever the parts of sharded parameters are
        first = sum(layers[:stage])
        module = StageModule(model, range(first, first + layers[stage])).train(options.training)
        if sharding is not None:
            for context in (meta_streams(), counted(Traffic()), resizes_seen(), planning_unseen()):
                seen.enter_context(context)
            shard_by_layers(module, mesh["shard"], sharding)
        batch = example_inputs(
            model,
            config,
            micro_batch_size=options.micro_batch_size * num_micro_batches,
            sequence_length=options.sequence_length,
        )
        exchanged = _exchanged(config, options, dtype, batch["input_ids"])
        part = _stage_of(module, stage, len(layers), exchanged, mesh["pipeline"].get_group())
        loss = partial(ForCausalLMLoss, vocab_size=config.vocab_size)
        schedule_of = getattr(pipelining, SCHEDULES[schedule])
        run = schedule_of(part, num_micro_batches, loss_fn=loss, scale_grads=False)
        given = {"input_ids": batch["input_ids"]} if stage == 0 else {}
        target = {"target": batch["labels"]} if stage == len(layers) - 1 else {}
        before: list[Callable[[], None]] = []
        if reference:
            frozen = StageModule(build(config, options), range(first, first + layers[stage]))
            scores = partial(loss, labels=batch["labels"][: options.micro_batch_size])
            came = exchanged.ids if stage == 0 else exchanged.hidden
            before = [partial(_reference_pass, frozen, came, scores if target else None)]
            before *= num_micro_batches
            before = [partial(_mark, frozen.requires_grad_(False).eval()), *before]
        steps = _Steps(run, optimizer_of(module, options), [*given.values()], target, before)
        loop = steps.run
        kept = given or ({"labels": batch["labels"]} if target else {})
        return observe(module, loop, inputs=kept, settings=options.settings)


class Exchanged(NamedTuple):
    """What one micro-batch is at a stage's ends: (b, s), (b, s, h) and (b, s, v)."""

    ids: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


def _exchanged(
    config: Any, options: TraceOptions, dtype: torch.dtype, ids: torch.Tensor
) -> Exchanged:
    shape = (options.micro_batch_size, options.sequence_length)
    meta: dict[str, Any] = {"dtype": dtype, "device": "meta"}
    hidden = torch.empty((*shape, config.hidden_size), requires_grad=True, **meta)
    logits = torch.empty((*shape, config.vocab_size), **meta)
    return Exchanged(ids[: options.micro_batch_size], hidden, logits)


def _stage_of(
    module: nn.Module, stage: int, num_stages: int, exchanged: Exchanged, group: Any
) -> Any:
    return pipelining.PipelineStage(
        module,
        stage,
        num_stages,
        torch.device("meta"),
        input_args=exchanged.ids if stage == 0 else exchanged.hidden,
        output_args=exchanged.logits if stage == num_stages - 1 else exchanged.hidden,
        group=group,
    )


def _mark(frozen: nn.Module) -> None:
    tracker = StorageTracker.active
    assert tracker is not None  # a trace runs
    mark_persistent(frozen, {}, tracker)


def _reference_pass(
    frozen: nn.Module, came: torch.Tensor, scores: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    """One micro-batch of a stage that trains nothing: received, and its result sent on or scored.

    Megatron-LM core/pipeline_parallel/schedules.py holds what was received until the score is there.
    """
    with torch.no_grad():
        received = torch.empty_like(came) if came.is_floating_point() else came
        result = frozen(received)
        if scores is not None:
            scores(result)


class _Steps(NamedTuple):
    """Two steps: what runs before the schedule, the schedule, the update."""

    schedule: Any
    optimizer: Any
    given: list[Any]
    target: dict[str, Any]
    before: list[Callable[[], None]]

    def run(self) -> None:
        for _ in range(2):
            for each in self.before:
                each()
            self.schedule.step(*self.given, **self.target, return_outputs=False)
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
