"""What a config.json says of stored weights is priced, widened by name, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.models.stored_weights import stored_weights

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SAID: list[tuple[dict[str, Any], tuple[str, bool | None, str]]] = [
    (NF4, ("nf4", False, "")),
    ({**NF4, "bnb_4bit_use_double_quant": True}, ("nf4", True, "")),
    ({"load_in_8bit": True}, ("int8", None, "")),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ("gptq-int4", None, "")),
    ({"quant_method": "awq", "bits": 4}, ("awq-int4", None, "")),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("", None, "FP8")),
    ({"quant_method": "mxfp4"}, ("", None, "MXFP4")),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("nvfp4", None, "")),
]


@pytest.mark.parametrize(("said", "expected"), SAID)
def test_a_config_says_how_its_weights_are_stored(
    said: dict[str, Any], expected: tuple[str, bool | None, str]
) -> None:
    for config in ({"quantization_config": said}, {"text_config": {"quantization_config": said}}):
        found = stored_weights(config)
        assert (found.format, found.double_quant, found.widened) == expected


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "aqlm"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ],
)
def test_another_method_is_refused_by_its_name(said: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"'{said['quant_method']}.*leave that field out"):
        estimate({**LLAMA, "quantization_config": said}, method="lora")


def test_stored_weights_are_priced_and_not_trained_themselves() -> None:
    stored = {**LLAMA, "quantization_config": NF4}
    lora, qlora = (
        estimate(stored, method="lora", ctx=64),
        estimate(LLAMA, method="qlora", ctx=64, double_quant=False),
    )
    assert lora.peak.nbytes == qlora.peak.nbytes
    with pytest.raises(InputError, match="stored in nf4"):
        estimate(stored, ctx=64)


def test_a_config_of_kimi_k2_is_deepseeks() -> None:
    sizes = {"first_k_dense_replace": 1, "n_routed_experts": 8, "moe_intermediate_size": 32}
    config = {**LLAMA, **sizes, "architectures": ["DeepseekV3ForCausalLM"]}
    one, other = (
        estimate({**config, "model_type": kind}, ctx=64).peak.nbytes
        for kind in ("kimi_k2", "deepseek_v3")
    )
    assert one == other
