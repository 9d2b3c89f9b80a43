"""The model of the training example: a small Llama trained from nothing on English, then frozen in
NF4 with LoRA adapters on top."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the example's Llama."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 2
    num_key_value_heads: int = 1
    max_positions: int = 512


def base_config(size: ModelSize, vocabulary: int) -> Any:
    """transformers' configuration of the base model."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_key_value_heads,
        max_position_embeddings=size.max_positions,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def base_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    """A freshly initialised base model."""
    import transformers

    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


def load_base(path: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A pretrained causal model from a local folder."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True
    )
    return model.to(device)


def can_quantize() -> bool:
    """Whether bitsandbytes is here; without it the base stays as it is, and the adapters are
    LoRA's."""
    return find_spec("bitsandbytes") is not None


def quantize_linears(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Every linear but the head becomes bitsandbytes' NF4 with nested scales, as loading with a
    BitsAndBytesConfig would make it."""
    from bitsandbytes.nn.modules import Linear4bit

    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name == "lm_head":
            continue
        has_bias = module._parameters["bias"] is not None
        new = Linear4bit(
            module.in_features,
            module.out_features,
            bias=has_bias,
            compute_dtype=dtype,
            quant_type="nf4",
        )
        new.load_state_dict(
            {key: value.detach().cpu() for key, value in module.state_dict().items()}
        )
        model.set_submodule(name, new.to(device))
    setattr(model, "is_loaded_in_4bit", True)  # noqa: B010 - what PEFT looks at to choose its 4-bit layers
    return model


def add_adapters(model: nn.Module, *, rank: int, dropout: float, seed: int) -> nn.Module:
    """PEFT's LoRA on every linear of the layers."""
    import peft

    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # PEFT asks transformers for a renamed attribute
        return peft.get_peft_model(model, config)


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that training changes."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_trained_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Writes back what `trained_state` took; every trained parameter must be there."""
    own = trained_state(model)
    if own.keys() != state.keys():
        raise ValueError(
            f"the checkpoint holds {len(state)} trained tensors, this run trains {len(own)}: start"
            " with an empty --out or the same options"
        )
    for name, parameter in own.items():
        parameter.copy_(state[name])
