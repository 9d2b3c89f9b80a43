"""The whole training steps of the campaign: six architectures, ways to train them, attention,
checkpointing, contexts.

A case's options are the flags of `estimate` by name, so that the measured, the traced and the
priced step are one and the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_hidden_layers": 32,
    "architectures": ["LlamaForCausalLM"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "tinyllama": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 22,
        "architectures": ["LlamaForCausalLM"],
    },
    "llama3-8b": LLAMA3,
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
        "architectures": ["Qwen3ForCausalLM"],
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "num_hidden_layers": 26,
        "architectures": ["Gemma3ForCausalLM"],
    },
    "gpt2-xl": {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_head": 25,
        "n_layer": 48,
        "vocab_size": 50257,
        "n_positions": 1024,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "architectures": ["GPT2LMHeadModel"],
    },
    "mixtral-small": {
        "model_type": "mixtral",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "architectures": ["MixtralForCausalLM"],
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "head_dim": 16,
}
TINY_GPT2 = {"n_embd": 64, "n_head": 4, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
TINY_CONTEXT, TINY_LAYERS = 32, 2
DEFAULTS: dict[str, Any] = {
    "stack": "hf-bare",
    "clip": False,
    "bs": 1,
    "ctx": 2048,
    "precision": "bf16",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A step to measure; ``history`` keeps the allocator's events of it."""

    model: str
    layers: int
    options: tuple[tuple[str, Any], ...]
    history: bool = False

    @property
    def name(self) -> str:
        """What it is called in the results, and by which a resumed run knows it."""
        words = [
            f"{key}={value}" if value is not True else key
            for key, value in self.options
            if DEFAULTS.get(key) != value
        ]
        return f"{self.model}/L{self.layers}/" + ",".join(words)

    @property
    def flags(self) -> dict[str, Any]:
        """Options of `estimate`, the defaults of this campaign among them."""
        return {**DEFAULTS, **dict(self.options)}

    @property
    def config(self) -> dict[str, Any]:
        """The model's config with this many layers."""
        key = "n_layer" if "n_layer" in CONFIGS[self.model] else "num_hidden_layers"
        return {**CONFIGS[self.model], key: self.layers}

    @property
    def weight(self) -> float:
        """Roughly what it costs: parameters read, and times tokens multiplied."""
        config = self.config
        hidden = config.get("hidden_size", config.get("n_embd", 0))
        tokens = self.flags["bs"] * self.flags["ctx"]
        inner = config.get("intermediate_size", 4 * hidden) * config.get("num_local_experts", 1)
        parameters = (4 * hidden * hidden + 3 * hidden * inner) * self.layers + config[
            "vocab_size"
        ] * hidden
        return parameters * (50_000 + tokens)


def case(model: str, layers: int, *, history: bool = False, **options: Any) -> Case:
    """A case by flags."""
    return Case(model, layers, tuple(options.items()), history)


def all_cases() -> list[Case]:
    """Every case once, cheapest first."""
    found: dict[str, Case] = {}
    for made in (*_architectures(), *_methods(), *_contexts(), *_whole(), *_quantized()):
        found.setdefault(made.name, made)
    return sorted(found.values(), key=lambda c: c.weight)


def _architectures() -> Iterator[Case]:
    """Each architecture: full and LoRA, with checkpointing and without, eager and SDPA."""
    for model, layers in (
        ("tinyllama", 22),
        ("llama3-8b", 4),
        ("qwen3-8b", 4),
        ("gemma3-1b", 26),
        ("gpt2-xl", 12),
        ("mixtral-small", 4),
    ):
        for method, checkpointing, attention in (
            ("full", "none", "sdpa"),
            ("full", "full", "eager"),
            ("lora", "none", "eager"),
            ("lora", "full", "sdpa"),
        ):
            history = model in ("tinyllama", "gpt2-xl", "mixtral-small") and method == "full"
            yield case(
                model,
                layers,
                history=history,
                method=method,
                checkpointing=checkpointing,
                attention=attention,
                bs=2,
                ctx=1024,
            )


def _methods() -> Iterator[Case]:
    """Precisions, optimizers and kernels of one architecture."""
    for method in ("full", "lora"):
        yield case("tinyllama", 22, method=method, precision="bf16-amp", bs=2, ctx=1024)
        yield case("llama3-8b", 4, method=method, precision="bf16-autocast", checkpointing="full")
    for optimizer in ("adamw", "adamw-fused", "sgd"):
        yield case(
            "tinyllama",
            22,
            history=optimizer == "adamw-fused",
            method="full",
            checkpointing="full",
            optimizer=optimizer,
            bs=4,
        )
    yield case("tinyllama", 22, method="full", grad_accum=4, bs=1, ctx=1024)
    yield case("tinyllama", 22, method="full", clip=True, bs=2, ctx=1024)
    yield case("tinyllama", 22, method="lora", dropout=0.05, bs=4, ctx=1024)
    for model in ("tinyllama", "llama3-8b", "qwen3-8b"):
        for method in ("full", "lora"):
            yield case(
                model,
                22 if model == "tinyllama" else 4,
                method=method,
                kernels="napkinmath",
                bs=2,
                ctx=1024,
            )


def _contexts() -> Iterator[Case]:
    for context in (512, 4096, 8192, 16384, 32768):
        yield case(
            "llama3-8b",
            4,
            history=context == 8192,
            method="lora",
            checkpointing="full",
            ctx=context,
        )
        if context <= 8192:
            yield case("llama3-8b", 4, history=context == 4096, method="full", ctx=context)


def _whole() -> Iterator[Case]:
    """One to eight layers, and whole models, for the extrapolation."""
    for layers in (1, 2, 3, 8):
        for method in ("full", "lora"):
            yield case(
                "llama3-8b", layers, history=layers == 2, method=method, checkpointing="full"
            )
    yield case("llama3-8b", 32, method="lora", checkpointing="full", bs=2)
    yield case("gpt2-xl", 48, history=True, method="full", ctx=1024)
    yield case("llama3-8b", 32, method="full", checkpointing="full", optimizer="sgd")


def _quantized() -> Iterator[Case]:
    """What needs bitsandbytes: skipped, and said so, where it is missing."""
    for eval_mode, checkpointing in (
        (True, "full"),
        (False, "full"),
        (False, "none"),
    ):  # the case of a talk of 2024
        for context in (1000, 1200):
            options = {"eval": True} if eval_mode else {}
            yield case(
                "tinyllama",
                22,
                method="qlora",
                quant="fp4",
                double_quant=False,
                checkpointing=checkpointing,
                reentrant=True,
                dropout=0.05,
                targets="q_proj,v_proj",
                ctx=context,
                **options,
            )
    for layers in (1, 2, 3, 4, 8):
        yield case(
            "llama3-8b",
            layers,
            history=layers == 2,
            method="qlora",
            checkpointing="full",
            precision="bf16-autocast",
        )
    yield case(
        "llama3-8b",
        4,
        method="qlora",
        kernels="napkinmath",
        kbit=False,
        checkpointing="none",
        bs=2,
        ctx=1024,
    )
    yield case(
        "llama3-8b", 32, method="qlora", checkpointing="full", precision="bf16-autocast", bs=4
    )


def tiny_cases() -> list[Case]:
    """One case an architecture, for trying the program out; ``tiny_config`` has their shapes."""
    ways: list[dict[str, Any]] = [
        {"method": "full"},
        {"method": "lora", "checkpointing": "full"},
        {"method": "full", "checkpointing": "full", "attention": "eager"},
        {"method": "lora"},
        {"method": "full", "clip": True},
        {"method": "full", "grad_accum": 2},
    ]
    small = {"precision": "fp32", "optimizer": "adamw-fused", "bs": 2, "ctx": TINY_CONTEXT}
    return [
        case(model, TINY_LAYERS, history=index == 0, **small, **way)
        for index, (model, way) in enumerate(zip(CONFIGS, ways, strict=True))
    ]


def tiny_config(found: Case) -> dict[str, Any]:
    """The architecture of ``found`` at a size that a CPU runs in milliseconds."""
    small = TINY_GPT2 if found.model == "gpt2-xl" else TINY
    return {
        **found.config,
        **{
            key: value
            for key, value in small.items()
            if key in found.config or found.model != "gpt2-xl"
        },
    }
