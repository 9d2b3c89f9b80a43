"""Every pipeline schedule's record: its order against torch's own, its waiting against the order
played with forwards, input and weight gradients of one length, and what it makes a rank hold."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

pytest.importorskip("torch")

from napkinmath.base.errors import InputError
from napkinmath.config.parallel_config import ParallelConfig, PipelineSchedule
from napkinmath.config.pipeline_schedules import BACKWARD, FORWARD, INPUTS, SCHEDULES, WEIGHTS
from napkinmath.lowering.parallel.stage_order import (
    bubble_fraction,
    check_micro_batches,
    held_stages,
    layers_per_stage,
    num_stages,
    stage_order,
)
from torch.distributed.pipelining import schedules as torch_schedules

OF_TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
# Its record says how many micro-batches a rank holds and not which weight gradients fill its waits.
UNTOLD = "zero-bubble"
THIRDS = {FORWARD: 1, INPUTS: 1, WEIGHTS: 1, BACKWARD: 2}
KINDS = {"F": FORWARD, "I": INPUTS, "W": WEIGHTS, "B": BACKWARD}
Action = tuple[str, int, int]  # what, of which stage, of which micro-batch


def parallel_of(name: str, ranks: int) -> ParallelConfig:
    schedule = PipelineSchedule(name)
    return ParallelConfig(
        pipeline_parallel_size=ranks,
        pipeline_schedule=schedule,
        virtual_pipeline_size=schedule.record.usual_chunks,
    )


def recorded(name: str, ranks: int, rank: int, count: int) -> list[tuple[str, int, int]]:
    """(what, chunk, number of the chunk's micro-batch) of a rank's step."""
    chunks = SCHEDULES[name].usual_chunks
    done: dict[tuple[str, int], int] = {}
    found = []
    order = SCHEDULES[name].order(ranks, chunks, rank, count)
    for what, chunk in chain.from_iterable(turns * times for times, turns in order):
        parts = (INPUTS, WEIGHTS) if what == BACKWARD else (what,)
        found.append((what, chunk, done.get((parts[0], chunk), 0)))
        for part in parts:
            done[part, chunk] = done.get((part, chunk), 0) + 1
    return found


def of_torch(name: str, ranks: int, rank: int, count: int) -> list[tuple[str, int, int]]:
    """The same of torch's schedule, which is made without stages."""
    chunks = SCHEDULES[name].usual_chunks
    kind = getattr(torch_schedules, OF_TORCH[name])
    made: Any = object.__new__(kind)
    made.pp_group_size, made._n_microbatches, made.n_local_stages = ranks, count, chunks
    made._num_stages = made.num_stages = ranks * chunks
    made.number_of_rounds = max(1, count // ranks)
    made.microbatches_per_round = count // made.number_of_rounds
    if chunks == 1:
        actions = made._get_pipeline_order()[rank]
    else:
        actions = made._calculate_single_rank_operations(rank)
    held = SCHEDULES[name].holds(ranks, chunks, rank)
    single = chain.from_iterable((a.sub_actions or (a,)) for a in actions if a is not None)
    return [
        (KINDS[a.computation_type.value], held.index(a.stage_index), a.microbatch_index)
        for a in single
        if a.computation_type.value in KINDS
    ]


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (2, 5), (3, 6), (4, 8), (4, 11), (4, 16)])
def test_the_order_is_torch_s(name: str, ranks: int, count: int) -> None:
    if SCHEDULES[name].needs(ranks, SCHEDULES[name].usual_chunks, count):
        pytest.skip("refused, here and there")
    # torch 2.13 numbers the last 1F1B stage's forwards from 1: its one chunk runs them in order.
    shown = slice(None) if SCHEDULES[name].usual_chunks > 1 else slice(2)
    for rank in range(ranks):
        ours, theirs = (of(name, ranks, rank, count) for of in (recorded, of_torch))
        assert [turn[shown] for turn in ours] == [turn[shown] for turn in theirs]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_few_micro_batches_leave_the_v_unfilled(count: int) -> None:
    for rank in range(4):
        assert recorded("zbv", 4, rank, count) == of_torch("zbv", 4, rank, count)


def played(name: str, ranks: int, count: int) -> float:
    """Micro-batches that a rank waits at most, where its forward, input and weight gradients take
    one time each and every action begins as soon as what it reads is there."""
    parallel = parallel_of(name, ranks)
    third = 1 / (3 * parallel.virtual_pipeline_size)
    queues: list[list[list[Action]]] = []
    for rank in range(ranks):
        held = held_stages(parallel, rank)
        # Where two ranks hold a stage, micro-batches of one way pass it on one of them.
        way = [int(SCHEDULES[name].copies > 1 and stage != rank) * count for stage in held]
        actions = recorded(name, ranks, rank, count)
        queues.append(blocks(name, [(what, held[c], way[c] + i) for what, c, i in actions]))
    busy = [sum(third * THIRDS[what] for what, *_ in chain(*queue)) for queue in queues]
    clock, done = [0.0] * ranks, dict[Action, float]()
    while left := sum(map(len, queues)):
        for rank, queue in enumerate(queues):
            while queue:
                begins = [ready_at(*action, num_stages(parallel), done) for action in queue[0]]
                if None in begins:
                    break
                actions = queue.pop(0)
                clock[rank] = max(clock[rank], *(b for b in begins if b is not None))
                clock[rank] += sum(THIRDS[what] * third for what, *_ in actions)
                for what, stage, batch in actions:
                    done[INPUTS if what == BACKWARD else what, stage, batch] = clock[rank]
        assert sum(map(len, queues)) < left, "the ranks wait for one another"
    return max(clock) - min(busy)


def blocks(name: str, actions: list[Action]) -> list[list[Action]]:
    """What runs as one: in the DualPipes a forward and the other chunk's whole backward."""
    found: list[list[Action]] = []
    for action in actions:
        last = found[-1] if found else []
        pair = [what for what, *_ in (*last, action)] == [FORWARD, BACKWARD]
        if pair and name.startswith("dualpipe") and last[0][1] != action[1]:
            last.append(action)
        else:
            found.append([action])
    return found


def ready_at(
    what: str, stage: int, batch: int, stages: int, done: dict[Action, float]
) -> float | None:
    """When what an action reads is there; None while it is not."""
    if what == FORWARD:
        return done.get((FORWARD, stage - 1, batch)) if stage else 0.0
    if what == WEIGHTS:
        return done.get((INPUTS, stage, batch))
    own = done.get((FORWARD, stage, batch))
    after = done.get((INPUTS, stage + 1, batch)) if stage + 1 < stages else own
    return None if own is None or after is None else max(own, after)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != UNTOLD])
@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 8), (4, 24), (6, 24)])
def test_a_rank_waits_as_the_record_says(name: str, ranks: int, count: int) -> None:
    parallel = parallel_of(name, ranks)
    assert played(name, ranks, count) == pytest.approx(bubble_fraction(parallel, count) * count)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 8), (4, 24), (6, 24)])
def test_every_stage_is_held_and_every_backward_follows_its_forward(
    name: str, ranks: int, count: int
) -> None:
    parallel = parallel_of(name, ranks)
    stages = [stage for rank in range(ranks) for stage in held_stages(parallel, rank)]
    assert sorted(stages) == sorted([*range(num_stages(parallel))] * SCHEDULES[name].copies)
    assert sum(layers_per_stage(48, parallel)) == 48
    for rank in range(ranks):
        chunks = len(held_stages(parallel, rank))
        order = stage_order(parallel, rank, count)
        turns = [turn for times, row in order for turn in row * times]
        live = dict.fromkeys(range(chunks), 0)
        for what, chunk in turns:
            live[chunk] += 1 if what == FORWARD else -1
            assert live[chunk] >= 0
        assert not any(live.values())
        assert len(turns) == 2 * count * parallel.virtual_pipeline_size


def most_held(name: str, ranks: int, count: int) -> list[int]:
    """The most chunks' activations that each rank holds at once."""
    parallel = parallel_of(name, ranks)
    most = []
    for rank in range(ranks):
        live = high = 0
        for times, row in stage_order(parallel, rank, count):
            for what, _ in row * times:
                live += 1 if what == FORWARD else -1
                high = max(high, live)
        most.append(high)
    return most


@pytest.mark.parametrize(("ranks", "count"), [(4, 16), (8, 32)])
def test_a_v_holds_what_its_papers_say(ranks: int, count: int) -> None:
    """ZB-V: as 1F1B's first rank (2p chunks of half a rank's layers; arXiv 2401.10241 section 6).
    DualPipeV: one of 2p chunks more (DeepSeek's README: PP + 1)."""
    assert max(most_held("zbv", ranks, count)) == 2 * ranks
    assert max(most_held("dualpipe-v", ranks, count)) == 2 * ranks + 1


def test_dualpipe_holds_two_copies_and_one_micro_batch_more() -> None:
    """DeepSeek's README: twice the parameters, PP + 1 activations."""
    assert max(most_held("dualpipe", 8, 32)) == 8 + 1
    held = [held_stages(parallel_of("dualpipe", 4), rank) for rank in range(4)]
    assert held == [[0, 3], [1, 2], [1, 2], [0, 3]]


REFUSED = [("dualpipe-v", 4, 7), ("interleaved", 4, 6), ("dualpipe", 4, 9), ("dualpipe", 4, 6)]


@pytest.mark.parametrize(("name", "ranks", "count"), REFUSED)
def test_what_a_schedule_cannot_run_is_refused(name: str, ranks: int, count: int) -> None:
    with pytest.raises(InputError, match=f"num_micro_batches={count} .*; use"):
        check_micro_batches(parallel_of(name, ranks), count)


@pytest.mark.parametrize("name", SCHEDULES)
def test_chunks_are_those_the_schedule_takes(name: str) -> None:
    row = SCHEDULES[name]
    for chunks in (row.least_chunks - 1, row.most_chunks + 1):
        with pytest.raises(InputError, match="virtual_pipeline_size"):
            ParallelConfig(
                pipeline_parallel_size=4,
                pipeline_schedule=PipelineSchedule(name),
                virtual_pipeline_size=chunks,
            )


def test_the_enum_has_a_record_each() -> None:
    assert [schedule.value for schedule in PipelineSchedule] == list(SCHEDULES)
