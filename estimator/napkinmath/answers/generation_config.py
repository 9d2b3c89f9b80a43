"""How a model is served, as a user asks for it."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.catalog.engines import Engine
    from napkinmath.config.hardware import Hardware


class GenerationConfig(Record):
    """How a model is served. Zeros are the engine's own defaults."""

    engine: str = "vllm"
    prompt: int = 1024
    completion: int = 256
    sequences: int = 0
    """Sequences that run at once at most."""
    prefill_tokens: int = 0
    """Tokens of prompts that one forward reads at most."""
    memory_share: float = 0.0
    quantization: str = ""
    cache_format: str = "auto"
    dtype: str = ""
    """Of weights without a format, and of what is computed; empty is bf16, fp16 on a GPU without."""
    ranks: int = 1
    graphs: bool = True
    graphs_to: int = 0
    """Tokens of the largest forward that a CUDA graph holds."""
    graphs_decode: bool = False
    """Graphs hold forwards that read no prompt, and no others."""
    receive_every: int = 1
    """Forwards after which an engine looks for new requests."""
    beams: int = 1
    """Sequences that search for one completion; each keeps a cache of its own."""
    shared_prefix: int = 0
    """First tokens of all prompts that are the same: their pages are there once."""
    draft: tuple[int, float] | None = None
    """Speculative decoding: tokens drafted at a time, the share of them that is accepted."""

    def validate(self) -> None:
        """Raises InputError for lengths and shares that cannot be."""
        if min(self.prompt, self.completion, self.ranks, self.beams) < 1:
            raise InputError(
                f"prompt={self.prompt}, completion={self.completion}, tp={self.ranks},"
                f" beams={self.beams}: each must be at least 1"
            )
        if not 0 <= self.memory_share <= 1:
            raise InputError(f"a memory share of {self.memory_share:g} is not between 0 and 1")
        if not self.graphs and (self.graphs_to or self.graphs_decode):
            raise InputError(
                "estimate generate --no-graphs leaves no graphs for --graphs-to or"
                " --graphs-for-decoding; give one of them"
            )
        if self.shared_prefix > self.prompt:
            raise InputError(
                f"a shared prefix of {self.shared_prefix} tokens is longer than the prompt of"
                f" {self.prompt}; make it shorter"
            )


def computed_in(config: GenerationConfig, engine: Engine, hardware: Hardware) -> str:
    """The type of weights and activations. Raises InputError for bf16 where an engine refuses it
    (vllm 0.11 platforms/cuda.py check_if_supports_dtype; sglang model_runner.py takes fp16 below
    sm80)."""
    gpu = hardware.gpu
    own = engine.computes_in(gpu)
    if config.dtype == "bf16" != own and engine.block_tokens:
        raise InputError(
            f"--dtype bf16: {engine.name} takes none on a {gpu.name}, which has no bf16; use --dtype"
            " fp16"
        )
    return config.dtype or own


def check_format(config: GenerationConfig, engine: Engine, hardware: Hardware) -> None:
    """Raises InputError for a GPU that an engine does not run on, and for weights that it has no
    kernels for there."""
    gpu, name = hardware.gpu, config.quantization
    if lacking := engine.lacks(gpu, ""):
        raise InputError(f"--engine {engine.name}: {lacking.replace(' it ', ' GPUs ', 1)}; use hf")
    if lacking := engine.lacks(gpu, name):
        others = engine.served_on(gpu, ("fp8", "awq-int4", "gptq-int4", "nf4"))
        raise InputError(f"weights in {name}: {lacking}; use --quant {', '.join(others)} or none")
