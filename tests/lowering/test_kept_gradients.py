"""A stack that keeps its gradients differs from one that drops them in the gradients alone, whatever
the mesh."""

from __future__ import annotations

from collections import Counter

import pytest
from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, PipelineSchedule
from napkinmath.config.train_config import AdapterConfig, OffloadConfig, TrainConfig
from napkinmath.ir.costs import Collective, HostCopy
from napkinmath.ir.ledger import RUN, Phase, Role, Work
from napkinmath.ir.step import Step
from napkinmath.ir.timeline import Point, Timeline
from napkinmath.lowering.build import build_step
from napkinmath.lowering.gradient_hooks import keeps_gradients
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def pipeline(schedule: PipelineSchedule, chunks: int = 1) -> ParallelConfig:
    return ParallelConfig(
        pipeline_parallel_size=2, pipeline_schedule=schedule, virtual_pipeline_size=chunks
    )


DDP = ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=2)
PIPELINES = {
    "gpipe": {"parallel": pipeline(PipelineSchedule.GPIPE), "gradient_accumulation_steps": 4},
    "1f1b": {"parallel": pipeline(PipelineSchedule.ONE_F_ONE_B), "gradient_accumulation_steps": 4},
    "interleaved": {
        "parallel": pipeline(PipelineSchedule.INTERLEAVED, 2),
        "gradient_accumulation_steps": 4,
    },
}
KEPT = {
    "one GPU": {},
    "micro-steps": {"gradient_accumulation_steps": 3},
    "DDP": {"parallel": DDP},
    "DP": {"parallel": ParallelConfig(data_parallel_size=2, data_parallel=DataParallel.DP)},
    "streamed parameters": {"offload": OffloadConfig(parameters=True), "adapter": AdapterConfig()},
    **PIPELINES,
    "pipeline and DDP": {
        "parallel": pipeline(PipelineSchedule.ONE_F_ONE_B).replace(
            data_parallel=DataParallel.DDP, data_parallel_size=2
        ),
        "gradient_accumulation_steps": 4,
    },
}
TAKEN = {
    "bucket views": {"parallel": DDP.replace(gradient_as_bucket_view=True)},
    "ZeRO": {"parallel": ParallelConfig(data_parallel_size=2, data_parallel=DataParallel.ZERO2)},
    "FSDP": {"parallel": ParallelConfig(data_parallel_size=2, data_parallel=DataParallel.FSDP2)},
    "update in the backward": {"optimizer_in_backward": True},
    "update on the host": {"offload": OffloadConfig(optimizer=True)},
}


def step_of(fields: dict[str, object], *, keeps: bool) -> Step:
    row = STACKS["hf-2022"]
    row = row.replace(optimizer=row.optimizer.replace(keeps_gradients=keeps))
    config = TrainConfig(micro_batch_size=2, sequence_length=32).replace(**fields)
    return build_step(read_config(LLAMA), Policy(config, row))


def moved(step: Step) -> Counter[tuple[str, int]]:
    """How often each transfer runs in a step, by what it is and its bytes."""
    found: Counter[tuple[str, int]] = Counter()
    for times, segments in step.micro_steps:
        for segment in segments:
            bind = Bindings({**step.symbols, **dict(segment.symbols)})
            for action, work in segment.events:
                for cost in work.costs if action == RUN and isinstance(work, Work) else ():
                    if isinstance(cost, (Collective, HostCopy)):
                        what = cost.kind if isinstance(cost, Collective) else "host copy"
                        found[what, bind(cost.moved)] += times * segment.repeat
    return found


def forwards(step: Step) -> Counter[str]:
    found: Counter[str] = Counter()
    for times, segments in step.micro_steps:
        for segment in segments:
            if segment.phase is Phase.FORWARD:
                found[segment.name] += times * segment.repeat
    return found


def order(step: Step) -> list[str]:
    """Phases of the micro-steps as they follow each other."""
    phases = [
        segment.phase.value
        for times, segments in step.micro_steps
        for _ in range(times)
        for segment in segments
    ]
    return [p for i, p in enumerate(phases) if i == 0 or phases[i - 1] != p]


@pytest.mark.parametrize("fields", [*KEPT.values(), *TAKEN.values()], ids=[*KEPT, *TAKEN])
def test_it_runs_and_sends_the_same(fields: dict[str, object]) -> None:
    kept, dropped = step_of(fields, keeps=True), step_of(fields, keeps=False)
    assert forwards(kept) == forwards(dropped)
    assert moved(kept) == moved(dropped)
    assert order(kept) == order(dropped)


def held_gradients(timeline: Timeline) -> list[int]:
    """Bytes of gradients after loading and after each step."""
    found: list[int] = []
    for start in [*timeline.step_starts, len(timeline.segments)]:
        last = max(i for i in range(start) if timeline.segments[i].events)
        segment = timeline.segments[last]
        point = Point(
            segment=last, repetition=segment.repeat - 1, event=len(segment.events) - 1, nbytes=0
        )
        found.append(timeline.breakdown(point).get(Role.GRADIENTS, 0))
    return found


@pytest.mark.parametrize("fields", KEPT.values(), ids=KEPT)
def test_gradients_are_there_from_the_load_to_the_end(fields: dict[str, object]) -> None:
    step = step_of(fields, keeps=True)
    bind = Bindings(step.symbols)
    trained = sum(
        run.count * bind(weight.tensor.requested) for run in step.runs for weight in run.trained
    )
    assert keeps_gradients(step.policy)  # type: ignore[arg-type]
    assert held_gradients(simulate(step)) == [trained] * 3


@pytest.mark.parametrize("fields", TAKEN.values(), ids=TAKEN)
def test_what_hooks_and_engines_take_is_not_kept(fields: dict[str, object]) -> None:
    kept, dropped = (simulate(step_of(fields, keeps=keeps)) for keeps in (True, False))
    assert kept.peak().nbytes == dropped.peak().nbytes
