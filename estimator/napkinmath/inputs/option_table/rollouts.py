"""Options of the engine that generates rollouts beside a training."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.inputs.option_table.option import CHOICE, COUNT, NUMBER, Option


def _engines() -> tuple[str, ...]:
    from napkinmath.catalog.engines import ENGINES

    return tuple(ENGINES)


def _engine(value: object, what: str) -> str:
    from napkinmath.catalog.engines import find_engine

    return find_engine(values.text(value, what)).name


ROLLOUTS = (
    Option(
        key="rollout",
        help="what generates rollouts: {choices} [hf]",
        kind=CHOICE,
        metavar="ENGINE",
        sets="workload.rollout",
        choices=_engines,
        reader=_engine,
    ),
    Option(
        key="rollout_memory",
        help="share of the GPU that the engine takes [0.3; 0.9 on GPUs of its own]",
        kind=NUMBER,
        metavar="X",
        sets="workload.rollout_memory",
        low=0.01,
        high=1,
    ),
    Option(
        key="rollout_tp",
        help="tensor-parallel GPUs of an engine [1]",
        kind=COUNT,
        metavar="N",
        sets="workload.rollout_tp",
    ),
    Option(
        key="rollout_sleep",
        help=(
            "while the policy trains the engine frees its cache and 1: keeps its weights on the"
            " host, 2: drops them [0: keeps all]"
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
)
