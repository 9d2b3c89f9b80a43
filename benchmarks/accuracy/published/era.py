"""How a library of a time trains: which stack of napkinmath's catalog it is, and what its runs do
where a table is silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Era:
    """A library at a time, as the published runs used it."""

    name: str
    pattern: str
    """Regular expression on "source | notes", lower case."""
    stack: str
    evidence: str
    when: str = ""
    """Regular expression on "method | precision" that the row must match too."""
    autocast: bool = True
    """A plain 'bf16' or 'fp16' means weights of that type under autocast (a Trainer's bf16=True),
    not everything in it."""
    adapter_dtype: str = "auto"
    adapter_dropout: float = 0.0
    double_quant: bool = True
    prepares: bool = True
    """k-bit preparation runs on quantized models (embeddings, norms and head in fp32)."""
    unquantized: tuple[str, ...] = ("lm_head",)
    default_rank: int = 8
    default_targets: str = ""
    """Linears under adapters where the table does not say; '' is all of them."""
    eight_bit_optimizer: str = "adamw-8bit"
    """What a plain 8-bit AdamW is."""
    optimizer: str = "auto"
    """Optimizer of full training where a row names none."""
    quantized_optimizer: str = ""
    """Optimizer of quantized models, where the script picks another for them."""
    drops_long_samples: bool = False
    """Samples longer than the limit are left out rather than cut."""
    offload_style: str = "trl"
    """Implementation of activation offloading (a row of napkinmath's lowering/saved_offload.py)."""
    clips: bool = True
    adds_tokens: bool = False
    """Tokens that the tokenizer misses (padding, unknown) are added, and embeddings and head
    resized to its length."""
    lazy_modules: bool = True
    recomputes: bool = False
    """Checkpointing is on where a table does not say."""
    distributed_optimizer: bool = False
    """Full training spreads the optimizer over data-parallel ranks where no engine is named."""
    compiles_fp8: bool = False
    """FP8 comes with compilation, which the library asks for."""
    without_autocast: bool = False
    """Under FSDP the types are those of its mixed precision: sharded in fp32, gathered in 16 bits,
    reduced in fp32."""
    first_flash: bool = False
    """A plain 'flash' attention is flash-attn 1 (until August 2023)."""
    sequence_length: int = 0
    sequence_reason: str = ""
    full_weights: str = ""
    """Weights that full training keeps where only a compute type is named: 'fp32' (under autocast),
    or '' as `autocast` says."""
    own_loop: bool = False
    """The loop is the source's own, and what else it does between steps is in its speed."""
    kernels: str = "hf"
    """Kernels patched into the model (napkinmath's Kernels)."""
    logs: str = ""
    """What memory the tool's own log prints: 'allocated' or 'reserved'; '' where it prints none."""
    allocator: str = ""
    """What the tool puts into PYTORCH_CUDA_ALLOC_CONF by itself."""
    fsdp2: bool = False
    """A plain 'fsdp' is fully_shard."""
    units: str = "layer"
    """Which units its fully_shard makes (napkinmath's `wrap`)."""
    syncs_each_batch: bool = False
    """Gradients are reduced in every micro-step."""
    known: bool = False
    """The library that ran is known, not assumed."""
    guess: str = ""
    """What a source that nobody looked into leaves open: "library" where it names none, "version"
    where it does."""
