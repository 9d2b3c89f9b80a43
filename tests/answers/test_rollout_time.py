"""Seconds of rollouts: uneven completions, prompts of a group, drafted tokens, and engines that
generate while the policy trains."""

from __future__ import annotations

import pytest
from napkinmath.answers.estimate import Estimate
from napkinmath.answers.rollouts import Rollouts, rollouts_of
from napkinmath.base.errors import InputError
from napkinmath.estimate import estimate

BASE: dict[str, object] = {
    "workload": "grpo",
    "reference": False,
    "gpus": "4xH100",
    "data_parallel": "ddp",
    "bs": 4,
    "grad_accum": 4,
    "ctx": 1024,
    "completion": 512,
    "checkpointing": "full",
    "rollout": "vllm",
}


def priced(**options: object) -> Estimate:
    return estimate("qwen2.5-0.5b", **{**BASE, **options})


def rolled(e: Estimate) -> Rollouts:
    found = rollouts_of(e)
    assert found is not None
    return found


def test_the_longest_completion_keeps_an_engine_and_the_others_waiting() -> None:
    even = rolled(priced()).time
    # one in eight is as long as it may be, the others end after 64 tokens
    uneven = rolled(priced(lengths=[512 + 64] * 7 + [1024])).time
    assert (even.tail_s, even.waits_s) == (0, 0)
    assert uneven.tokens_s < even.tokens_s and 0.5 < uneven.tail_s / uneven.tokens_s < 1
    # of sixteen sequences one engine has the rare long one, which a usual engine does not have
    rare = rolled(priced(lengths=[512 + 64] * 63 + [1024])).time
    assert rare.waits_s == pytest.approx(rare.tail_s, rel=0.35) and rare.waits_s > 0


def test_places_are_taken_by_the_next_sequence() -> None:
    """With the cache of half of them the other half comes after: nearly twice the time a token."""
    whole = rolled(priced()).time
    plan = rolled(priced()).plan
    half = plan.replace(sequences=whole.sequences // 2)
    from napkinmath.timing.efficiency import default_efficiency
    from napkinmath.timing.rollouts import clock_of, rollout_time

    clock = clock_of(half, default_efficiency(half.hardware.gpu))
    slower = rollout_time(half, clock, 16, 512, 512)
    assert slower.at_once == whole.sequences // 2
    assert 1.7 < slower.tokens_s / whole.tokens_s < 2.05


def test_prompts_of_a_group_are_read_once() -> None:
    # long enough that the device's work, and not the host's launches, sets the time
    alone, group = (rolled(priced(rollout_group=n, ctx=8192)) for n in (1, 8))
    assert group.time.prompts_s < 0.25 * alone.time.prompts_s
    alone, group = (rolled(priced(rollout_group=n)) for n in (1, 8))
    assert group.plan.fitting(1024, 512) > 1.7 * alone.plan.fitting(1024, 512)


def test_drafted_tokens_that_stay() -> None:
    """Leviathan et al. 2023, equation 1; with none accepted drafting only costs."""
    plain, none, most = (rolled(priced(rollout_draft=d)) for d in (None, "3:0", "3:0.9"))
    gain = (1 - 0.9**4) / (1 - 0.9)
    assert none.time.tokens_s > plain.time.tokens_s
    assert none.time.tokens_s / most.time.tokens_s == pytest.approx(gain, rel=1e-6)


def test_an_asynchronous_engine_runs_beside_the_training() -> None:
    turns, beside = (priced(rollout_gpus="1xH100", rollout_staleness=steps) for steps in (0, 1))
    assert turns.time is not None and beside.time is not None
    rollout = rolled(beside).time.seconds
    assert rollout > beside.time.own_s  # one engine for four GPUs is what the step waits for
    assert beside.time.seconds == rollout
    assert turns.time.seconds == pytest.approx(rollout + beside.time.own_s, rel=0.05)
    assert rolled(beside).policy_waits_s == pytest.approx(rollout - beside.time.own_s)
    assert rolled(turns).engine_waits_s == pytest.approx(beside.time.own_s, rel=0.15)
    fast = priced(rollout_gpus="8xH100", rollout_staleness=1, completion=64)
    assert fast.time is not None and fast.time.seconds == fast.time.own_s
    assert rolled(fast).engine_waits_s > 0 == rolled(fast).policy_waits_s


def test_one_step_behind_prompts_start_together_unless_a_trainer_keeps_places_taken() -> None:
    """NeMo-RL has as many prompts under way as its steps behind have, and starts a step's once the
    weights before it are there; prime-rl takes every free place; OpenRLHF ends a batch first."""
    apart: dict[str, object] = {"rollout_gpus": "1xH100", "lengths": [576] * 7 + [1024]}

    def seconds(trainer: str, steps: int) -> float:
        return rolled(
            priced(rollout_trainer=trainer, rollout_staleness=steps, **apart)
        ).time.tokens_s

    assert seconds("nemo-rl", 1) == seconds("nemo-rl", 0) == seconds("openrlhf", 3)
    assert seconds("prime-rl", 1) < seconds("nemo-rl", 1)
    assert seconds("nemo-rl", 2) < seconds("nemo-rl", 1)


def test_a_sweep_waits_for_an_asynchronous_engine_too() -> None:
    from napkinmath.planning.sweep import sweep

    one: dict[str, object] = {"gpus": None, "gpu": "h100", "rollout_gpus": "1xH100"}
    options = {**one, "rollout_staleness": 1, "data_parallel": None}
    kept = {k: v for k, v in {**BASE, **options}.items() if v is not None}
    e = estimate("qwen2.5-0.5b", **kept)
    assert e.time is not None and e.time.seconds == e.time.aside_s
    found = sweep(e.spec, e.config, hardware=e.hardware)
    assert found.seconds is not None
    assert float(found.seconds.ravel()[0]) == pytest.approx(e.time.seconds, rel=1e-9)


def test_engines_on_the_policys_gpus_cannot_be_behind() -> None:
    with pytest.raises(InputError, match="add --rollout-gpus"):
        priced(rollout_staleness=1)
    with pytest.raises(InputError, match="says no share"):
        priced(rollout_draft="3")


def test_engines_see_whole_sequences_of_a_policy_that_splits_them() -> None:
    """Four context-parallel ranks have a quarter of each sequence; the engine has all of it."""
    mesh = {"gpus": "4xH100", "data_parallel": None}
    whole, parts = (rolled(priced(**mesh, **more)).time for more in ({}, {"cp": 4}))
    assert parts.sequences == whole.sequences // 4
    fewer = rolled(priced(**mesh, bs=priced().config.micro_batch_size // 4)).time
    assert parts.seconds == pytest.approx(fewer.seconds, rel=0.01)
