"""DeBERTa's table of relative positions where no LayerNorm stands between it and the layers."""

from __future__ import annotations

import pytest
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import AdapterConfig
from napkinmath.estimate import estimate
from napkinmath.models.families import read_config

UNNORMED = {
    "model_type": "deberta-v2",
    "architectures": ["DebertaV2ForMaskedLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "none",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}


def test_a_trained_table_without_a_norm_is_refused_and_a_frozen_one_is_priced() -> None:
    spec = read_config(UNNORMED)
    with pytest.raises(InputError, match="norm_rel_ebd"):
        estimate(spec, sequence_length=32)
    assert estimate(spec, sequence_length=32, adapter=AdapterConfig()).peak.nbytes > 0
