"""Options of the engine that generates rollouts beside a training."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.workload_config import ELSEWHERE, RolloutOffload, RolloutSync
from napkinmath.inputs.option_table.option import CHOICE, COUNT, NUMBER, SIZE, Option


def _engines() -> tuple[str, ...]:
    from napkinmath.catalog.engines import ENGINES

    return (*ENGINES, ELSEWHERE)


def _trainers() -> tuple[str, ...]:
    from napkinmath.catalog.rollout_trainers import ROLLOUT_TRAINERS

    return tuple(ROLLOUT_TRAINERS)


def _trainer(value: object, what: str) -> str:
    from napkinmath.catalog.rollout_trainers import find_rollout_trainer

    return find_rollout_trainer(values.text(value, what)).name


def _engine(value: object, what: str) -> str:
    from napkinmath.catalog.engines import find_engine

    name = values.text(value, what)
    if name.lower() == ELSEWHERE:
        return ELSEWHERE
    engine = find_engine(name)
    if engine.release:
        raise InputError(
            f"{what} {shown(name)}: only `estimate generate` reads an engine's release; use"
            f" {engine.name}"
        )
    return engine.name


ROLLOUTS = (
    Option(
        key="rollout",
        help="what generates rollouts: {choices}; none leaves them out [hf; vllm with"
        " --rollout-trainer]",
        kind=CHOICE,
        metavar="ENGINE",
        sets="workload.rollout",
        choices=_engines,
        reader=_engine,
    ),
    Option(
        key="rollout_trainer",
        help="whose placement decides what the options below leave open: {choices} [trl]",
        kind=CHOICE,
        metavar="NAME",
        sets="workload.rollout_trainer",
        choices=_trainers,
        reader=_trainer,
    ),
    Option(
        key="rollout_memory",
        help="share of the GPU that the engine takes [the trainer's; trl 0.3, 0.9 on its own GPUs]",
        kind=NUMBER,
        metavar="X",
        sets="workload.rollout_memory",
        low=0.01,
        high=1,
    ),
    Option(
        key="rollout_tp",
        help="tensor-parallel GPUs of an engine [the trainer's; trl 1]",
        kind=COUNT,
        metavar="N",
        sets="workload.rollout_tp",
    ),
    Option(
        key="rollout_sleep",
        help=(
            "while the policy trains the engine frees its cache and 1: keeps its weights on the"
            " host, 2: drops them, 0: keeps all [the trainer's; trl 0]"
        ),
        kind=COUNT,
        metavar="LEVEL",
        sets="workload.rollout_sleep",
        low=0,
        high=2,
    ),
    Option(
        key="rollout_gpus",
        help="GPUs of the engines' own, e.g. 2xH100 [the policy's]",
        metavar="NxTYPE",
        sets="workload.rollout_gpus",
    ),
    Option(
        key="rollout_sync",
        help="what is whole at once of weights on their way to the engine: {choices} [the trainer's]",
        kind=CHOICE,
        metavar="WHAT",
        sets="workload.rollout_sync",
        members=RolloutSync,
    ),
    Option(
        key="rollout_batches",
        help="batches in which layers go to the engine, each whole at once [one layer a batch]",
        kind=COUNT,
        sets="workload.rollout_batches",
    ),
    Option(
        key="rollout_bucket",
        help="the buffer in which weights are sent, e.g. 512MiB [2GiB with --rollout-sync bucket]",
        kind=SIZE,
        metavar="SIZE",
        sets="workload.rollout_bucket",
    ),
    Option(
        key="rollout_offload",
        help=(
            "what of the policy waits on the host while an engine on its GPUs generates: {choices}"
            " [the trainer's]"
        ),
        kind=CHOICE,
        metavar="WHAT",
        sets="workload.rollout_offload",
        members=RolloutOffload,
    ),
    Option(
        key="rollout_staleness",
        help=(
            "steps that rollouts may be behind: engines on GPUs of their own generate while the"
            " policy trains [the trainer's; 0 is one after the other]"
        ),
        kind=COUNT,
        metavar="N",
        sets="workload.rollout_staleness",
        low=0,
    ),
    Option(
        key="rollout_group",
        help="completions of one prompt, which an engine reads once for them [1]",
        kind=COUNT,
        metavar="N",
        sets="workload.rollout_group",
    ),
    Option(
        key="rollout_draft",
        help="speculative decoding: tokens drafted at a time and the share accepted, e.g. 3:0.7",
        metavar="N:X",
        sets="workload.rollout_draft",
        reader=values.draft,
    ),
)
