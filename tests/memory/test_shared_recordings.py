"""A configuration that differs in what is decided after the recording is priced by the first's."""

from __future__ import annotations

import pytest
from agreement.tiny_configs import TINY
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Loss,
    OffloadConfig,
    TrainConfig,
)
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.lowering.choices import resolve
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.record import Recording
from napkinmath.memory import pipeline_ranks
from napkinmath.memory.pipeline_ranks import PipelineRanks
from napkinmath.models.families import read_config

OWN = TrainConfig(
    micro_batch_size=4, sequence_length=64, adapter=AdapterConfig(), attention=Attention.EAGER
)


@pytest.mark.parametrize(
    ("changes", "records"),
    [
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 2}, 1),
        ({"micro_batch_size": 1, "gradient_accumulation_steps": 4}, 2),  # products of one sequence
        ({"optimizer": "adamw-8bit"}, 1),
        ({"offload": OffloadConfig(optimizer=True, parameters=True)}, 1),
        ({"offload": OffloadConfig(activations=True)}, 2),
        ({"loss": Loss.CHUNKED}, 2),
        ({"sequence_length": 32}, 2),
    ],
)
def test_what_is_decided_later_is_not_recorded_anew(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], records: int
) -> None:
    spec, asked = read_config(TINY["llama"]), list[Policy]()
    record = pipeline_ranks.record_model

    def recorded(spec: ModelSpec, policy: Policy) -> Recording:
        asked.append(policy)
        return record(spec, policy)

    monkeypatch.setattr(pipeline_ranks, "record_model", recorded)
    own = PipelineRanks(spec, resolve(spec, OWN, None))
    own.worst_step()
    policy = resolve(spec, OWN.replace(**changes), None)
    found = own.under(policy).worst_peak()
    assert len(asked) == records
    assert found == PipelineRanks(spec, policy).worst_peak()


def test_siblings_share_what_one_of_them_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, asked = read_config(TINY["llama"]), list[Policy]()
    record = pipeline_ranks.record_model

    def recorded(spec: ModelSpec, policy: Policy) -> Recording:
        asked.append(policy)
        return record(spec, policy)

    monkeypatch.setattr(pipeline_ranks, "record_model", recorded)
    own, chunked = PipelineRanks(spec, resolve(spec, OWN, None)), OWN.replace(loss=Loss.CHUNKED)
    for optimizer in ("adamw", "adamw-8bit", "sgd"):
        policy = resolve(spec, chunked.replace(optimizer=optimizer), None)
        assert own.under(policy).worst_peak() == PipelineRanks(spec, policy).worst_peak()
    assert len(asked) == 1 + 3  # one that siblings share, and three on their own
