"""A configuration whose micro-batches alone differ is priced by the recording of the first."""

from __future__ import annotations

import pytest
from agreement.tiny_configs import TINY
from napkinmath.config.train_config import AdapterConfig, Attention, Loss, TrainConfig
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
        ({"loss": Loss.CHUNKED}, 2),
        ({"sequence_length": 32}, 2),
    ],
)
def test_other_micro_batches_are_not_recorded_anew(
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
