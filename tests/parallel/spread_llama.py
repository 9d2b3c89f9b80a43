"""A tiny Llama, priced for one of many ranks, and what its step's collectives carry."""

from __future__ import annotations

from collections import Counter

from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import Workload
from napkinmath.ir.costs import Collective
from napkinmath.ir.ledger import RUN, Work
from napkinmath.ir.stack import EngineCode, ModelCode
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import read_config

BATCH, SEQUENCE = 2, 128
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# Layers of two kinds take turns, so a model has many runs of the same path.
GEMMA: dict[str, object] = {
    **LLAMA,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 32,
    "sliding_window": 48,
    "num_hidden_layers": 5,
}


def spread(
    parallel: ParallelConfig,
    *,
    method: str = "full",
    precision: str = "bf16-autocast",
    checkpointing: bool = False,
    accumulation: int = 1,
    tied: bool = False,
    storage: str = "auto",
    batch: int = BATCH,
    around: bool = False,
    flat: bool = False,
    model: dict[str, object] = LLAMA,
    workload: Workload = Workload(),
) -> Step:
    """One rank's step with fused AdamW and eager attention, which torch runs alike on every device.

    `flat`: under FSDP1 adapters share their layer's flat parameter.
    `around`: checkpoints are reentrant and lie around the layers, as before transformers 4.53.
    """
    config = TrainConfig(
        micro_batch_size=batch,
        sequence_length=SEQUENCE,
        precision=Precision(precision),
        adapter=AdapterConfig(rank=8) if method != "full" else None,
        quantization=(
            QuantizationConfig(kbit_preparation=False, storage=storage)
            if method == "qlora"
            else None
        ),
        recompute=RecomputeConfig(
            kind=RecomputeKind.FULL if checkpointing else RecomputeKind.NONE, reentrant=around
        ),
        optimizer="adamw-fused",
        attention=Attention.EAGER,
        clip_gradients=False,
        gradient_accumulation_steps=accumulation,
        parallel=parallel,
        workload=workload,
    )
    stack = (
        STACKS["hf-bare"].replace(model=ModelCode(transformers=(4, 48)))
        if around
        else STACKS["hf-bare"].replace(engine=EngineCode(flat_adapters=flat))
    )
    return build_step(read_config({**model, "tie_word_embeddings": tied}), Policy(config, stack))


def collectives(step: Step) -> tuple[Counter[str], Counter[str]]:
    """(calls, bytes of whole messages) by kind, over the micro-steps of one step."""
    calls: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for times, segments in step.micro_steps:
        for segment in segments:
            bind = Bindings({**step.symbols, **dict(segment.symbols)})
            for action, payload in segment.events:
                if action == RUN and isinstance(payload, Work):
                    for cost in payload.costs:
                        if isinstance(cost, Collective):
                            calls[cost.kind] += times * segment.repeat
                            moved[cost.kind] += times * segment.repeat * bind(cost.moved)
    return calls, moved
