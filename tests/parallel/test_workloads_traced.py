"""Every workload's step against TRL's own order of forwards, on pretended ranks under torch's
fully_shard: peaks and collectives."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("trl")

from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Kernels,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.forwards import Beside
from napkinmath.lowering.patching import settle_patch
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from parallel.spread_llama import LLAMA, SEQUENCE, collectives
from parallel.workload_steps import HEADS, traced_on_ranks

# A few counters and a loss; SFT's is held to 0.1% too.
TOLERANCE = 0.001
# The estimate scores the last of 128 positions too, in three tensors.
PAIRS_TOLERANCE = 0.003
RANKS = 8
MODEL = {**LLAMA, "tie_word_embeddings": False}

CASES: list[dict[str, Any]] = [
    {"kind": "dpo"},
    {"kind": "dpo", "precision": "fp32"},
    {"kind": "dpo", "checkpointing": True},
    {"kind": "dpo", "accumulation": 3},
    {"kind": "dpo", "method": "lora"},
    {"kind": "kto"},
    {"kind": "kto", "method": "lora"},
    {"kind": "orpo"},
    {"kind": "orpo", "precision": "fp32"},
    {"kind": "simpo"},
    {"kind": "reward", "precision": "fp32"},
    {"kind": "prm", "precision": "fp32"},
    {"kind": "distill"},
    {"kind": "distill", "precision": "fp32"},
    {"kind": "grpo"},
    {"kind": "grpo", "method": "lora"},
    {"kind": "rloo"},
]


QUICK = ("dpo", "dpo lora", "kto", "orpo", "distill fp32", "orpo fp32")
SLOW = pytest.mark.slow


def named(case: dict[str, Any]) -> str:
    return " ".join(str(value) for value in case.values())


def some_slow(cases: list[dict[str, Any]]) -> list[Any]:
    """Cases of which the quick suite runs a few."""
    return [
        pytest.param(case, id=named(case), marks=() if named(case) in QUICK else SLOW)
        for case in cases
    ]


def second_model(case: dict[str, Any]) -> str:
    """How TRL's trainer has the other model under FSDP."""
    if case["kind"] == "distill":
        return "whole"
    refers = case["kind"] in ("dpo", "kto", "grpo", "rloo") and case.get("method") != "lora"
    return "prepared" if refers else ""


def adapter_of(case: dict[str, Any]) -> AdapterConfig:
    return AdapterConfig(rank=8, targets=case.get("targets", ("all-linear",)))


def priced(case: dict[str, Any], batch: int, ranks: int = RANKS) -> Step:
    kind, spec = WorkloadKind(case["kind"]), read_config(MODEL)
    teaches = kind is WorkloadKind.DISTILL
    refers = True if kind is WorkloadKind.GRPO else None
    workload = Workload(kind=kind, teacher="itself" if teaches else "", reference=refers)
    config = TrainConfig(
        micro_batch_size=batch,
        sequence_length=SEQUENCE,
        precision=Precision(case.get("precision", "bf16-autocast")),
        adapter=adapter_of(case) if case.get("method") == "lora" else None,
        recompute=RecomputeConfig(
            kind=RecomputeKind.FULL if case.get("checkpointing") else RecomputeKind.NONE
        ),
        optimizer="adamw-fused",
        attention=Attention.EAGER,
        clip_gradients=False,
        gradient_accumulation_steps=case.get("accumulation", 1),
        parallel=ParallelConfig(
            data_parallel=DataParallel.FSDP2,
            data_parallel_size=ranks,
            wrap="layer" if kind.value in HEADS else "carved",
        )
        if ranks > 1
        else ParallelConfig(),
        workload=workload,
        kernels=Kernels(case.get("kernels", "hf")),
    )
    patch = None
    if config.kernels is not Kernels.HF:
        patch, config = settle_patch(spec, config)
    taught = spec if teaches else None
    with mock.patch.object(Beside, "runs_first", False):  # the traced step does not generate
        step = build_step(spec, Policy(config, STACKS["hf-bare"], teacher=taught, patch=patch))
    without_rollouts(step)
    return step


def without_rollouts(step: Step) -> None:
    """Takes the generation out, which is no part of the trainers' training phases."""
    step.micro_steps = [
        (times, [s for s in segments if not s.name.startswith("rollout")])
        for times, segments in step.micro_steps
    ]


@pytest.mark.parametrize("case", some_slow(CASES))
def test_peaks_and_collectives_are_those_of_the_trainers_forwards(case: dict[str, Any]) -> None:
    batch = 4 if case["kind"] in ("orpo", "reward") else 2
    step = priced(case, batch)
    truth, traffic = traced_on_ranks(
        MODEL, ranks=RANKS, batch=batch, length=SEQUENCE, second=second_model(case), **case
    )
    ours = simulate(step, steps=2).peak().nbytes
    assert ours == pytest.approx(truth, rel=TOLERANCE)
    calls, moved = collectives(step)
    if case.get("method") != "lora":
        assert {kind: 2 * n for kind, n in calls.items()} == traffic.num_calls
        assert {kind: 2 * n for kind, n in moved.items()} == traffic.num_bytes
    else:  # the root of a model in PEFT's wrapper gathers the last norm by itself
        assert {kind: 2 * n for kind, n in moved.items()} == pytest.approx(
            traffic.num_bytes, rel=TOLERANCE
        )


ALONE = [
    {"kind": kind, "precision": precision}
    for kind in ("dpo", "kto", "orpo", "simpo", "distill", "rloo")
    for precision in ("bf16-autocast", "fp32")
]


@pytest.mark.parametrize("case", some_slow([*ALONE, {"kind": "kto", "method": "lora"}]))
def test_one_gpu_holds_what_the_trainers_step_does(case: dict[str, Any]) -> None:
    batch = 4 if case["kind"] == "orpo" else 2
    step = priced(case, batch, ranks=1)
    second = "whole" if second_model(case) else ""
    truth, _ = traced_on_ranks(MODEL, ranks=1, batch=batch, length=SEQUENCE, second=second, **case)
    assert simulate(step, steps=2).peak().nbytes == pytest.approx(truth, rel=TOLERANCE)


PATCHED = [
    {"kind": kind, "precision": precision, "method": method, "kernels": "napkinmath"}
    for kind in ("orpo", "simpo")
    for precision, method in (("bf16-autocast", "full"), ("fp32", "full"), ("bf16", "lora"))
]


@pytest.mark.parametrize("case", PATCHED, ids=named)
def test_patched_models_make_no_logits_of_a_pair(case: dict[str, Any]) -> None:
    step = priced(case, 4, ranks=1)
    truth, _ = traced_on_ranks(MODEL, ranks=1, batch=4, length=SEQUENCE, second="", **case)
    assert simulate(step, steps=2).peak().nbytes == pytest.approx(truth, rel=TOLERANCE)


DISTILLED = [
    {"kind": "distill", "precision": precision, "method": method, "kernels": "napkinmath"}
    for precision, method in (("bf16-autocast", "full"), ("fp32", "full"), ("bf16", "lora"))
]
DISTILLED += [{**DISTILLED[-1], "targets": ("q_proj", "lm_head")}]


@pytest.mark.parametrize("case", DISTILLED, ids=named)
def test_a_patched_student_and_its_teacher_make_no_logits(case: dict[str, Any]) -> None:
    step = priced(case, 2, ranks=1)
    truth, _ = traced_on_ranks(MODEL, ranks=1, batch=2, length=SEQUENCE, second="whole", **case)
    assert simulate(step, steps=2).peak().nbytes == pytest.approx(truth, rel=TOLERANCE)


# How a release divides by the temperature, reads entropy, and asks for a prompt's logits.
RELEASES = {"grpo": "trl-0.18", "grpo in place": "trl-1.9", "grpo of all": "trl-0.15"}


@pytest.mark.parametrize("kind", RELEASES)
@pytest.mark.parametrize("precision", ["bf16-autocast", "fp32", "bf16"])
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=SLOW)])
def test_rollouts_before_the_fused_head_hold_the_completions_logits(
    kind: str, precision: str, method: str
) -> None:
    batch = 2
    adapter = AdapterConfig(rank=8) if method == "lora" else None
    config = TrainConfig(
        micro_batch_size=batch,
        sequence_length=SEQUENCE,
        precision=Precision(precision),
        adapter=adapter,
        optimizer="adamw-fused",
        attention=Attention.EAGER,
        clip_gradients=False,
        workload=Workload(kind=WorkloadKind.GRPO, reference=True),
    )
    bare, release = STACKS["hf-bare"], STACKS[RELEASES[kind]].loss
    loss = bare.loss.replace(
        temperature=release.temperature,
        reads_entropy=release.reads_entropy,
        all_rollout_logits=release.all_rollout_logits,
    )
    step = build_step(read_config(MODEL), Policy(config, bare.replace(loss=loss)))
    without_rollouts(step)
    truth, _ = traced_on_ranks(
        MODEL,
        kind,
        ranks=1,
        batch=batch,
        length=SEQUENCE,
        second="" if adapter else "whole",
        precision=precision,
        method=method,
    )
    assert simulate(step, steps=2).peak().nbytes == pytest.approx(truth, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["verl", "verl entropy", "openrlhf", "openrlhf entropy"])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=SLOW)])
def test_rollouts_scored_by_one_kernel_hold_all_logits_once(kind: str, precision: str) -> None:
    trainer, _, entropy = kind.partition(" ")
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=SEQUENCE,
        precision=Precision(precision),
        optimizer="adamw-fused",
        attention=Attention.EAGER,
        clip_gradients=False,
        workload=Workload(
            kind=WorkloadKind.GRPO,
            reference=True,
            rollout="hf",
            rollout_trainer=trainer,
            entropy_loss=bool(entropy),
        ),
    )
    step = build_step(read_config(MODEL), Policy(config, STACKS["hf-bare"]))
    without_rollouts(step)
    truth, _ = traced_on_ranks(
        MODEL, kind, ranks=1, batch=2, length=SEQUENCE, second="whole", precision=precision
    )
    assert simulate(step, steps=2).peak().nbytes == pytest.approx(truth, rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=SLOW)])
def test_a_trainer_of_pairs_keeps_the_policys_logits_while_the_reference_runs(
    precision: str,
) -> None:
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=SEQUENCE,
        precision=Precision(precision),
        optimizer="adamw-fused",
        attention=Attention.EAGER,
        clip_gradients=False,
        workload=Workload(kind=WorkloadKind.DPO),
    )
    keeps = STACKS["llama-factory"].loss.pairs_keep_logits
    bare = STACKS["hf-bare"]
    stack = bare.replace(loss=bare.loss.replace(pairs_keep_logits=keeps))
    step = build_step(read_config(MODEL), Policy(config, stack))
    truth, _ = traced_on_ranks(
        MODEL, "dpo kept", ranks=1, batch=2, length=SEQUENCE, second="whole", precision=precision
    )
    assert simulate(step, steps=2).peak().nbytes == pytest.approx(truth, rel=PAIRS_TOLERANCE)
