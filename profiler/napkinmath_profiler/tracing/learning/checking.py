"""How well a learned form agrees with the traced step of the class that it was learned from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Batch,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.ledger import Phase
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.image_models import tokens_of
from napkinmath.models.learned import spec_of
from napkinmath.models.tasks import PICTURED

from napkinmath_profiler.trace import trace_options
from napkinmath_profiler.tracing.learning.document_fields import for_learning
from napkinmath_profiler.tracing.learning.layer_fields import shortened
from napkinmath_profiler.tracing.learning.stage_fields import with_entries
from napkinmath_profiler.tracing.learning.symbols import evaluated
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.op_handlers import SMALL_GEMM_TOKENS
from napkinmath_profiler.tracing.trace_options import options_from


@dataclass(frozen=True, slots=True)
class Cell:
    """One training step to compare: what is trained, how, over which batch."""

    method: str
    checkpointing: bool
    batch: int
    length: int
    precision: str = "bf16"
    attention: str = "sdpa"

    @property
    def name(self) -> str:
        """'lora checkpointed 1 x 1000 bf16 sdpa'."""
        words = [self.method, *(["checkpointed"] if self.checkpointing else [])]
        return " ".join([*words, f"{self.batch} x {self.length}", self.precision, self.attention])

    def train_config(self) -> TrainConfig:
        """The step as both sides take it."""
        adapted = self.method != "full"
        quantized = self.method == "qlora"
        kind = RecomputeKind.FULL if self.checkpointing else RecomputeKind.NONE
        return TrainConfig(
            micro_batch_size=self.batch,
            sequence_length=self.length,
            precision=Precision(self.precision),
            stack="hf-bare",
            adapter=AdapterConfig(rank=16) if adapted else None,
            quantization=QuantizationConfig() if quantized else None,
            recompute=RecomputeConfig(kind=kind),
            optimizer="adamw-fused",
            attention=Attention(self.attention),
            clip_gradients=False,
            batch=Batch(images=0),
        )


UNSEEN = (Cell("full", False, 3, 200), Cell("lora", True, 1, 1234))
"""For configs that no recording saw."""
QUICK = (Cell("full", False, 1, 333), Cell("lora", True, 2, 128))
WHOLE = (
    Cell("full", False, 2, 128),
    Cell("full", True, 2, 333),
    Cell("full", False, 1, 17, "bf16-amp"),
    Cell("full", False, 2, 128, "fp32"),
    Cell("full", False, 2, 128, attention="eager"),
    Cell("lora", False, 2, 17),
    Cell("lora", True, 1, 1000),
    Cell("qlora", False, 2, 1000),
    Cell("qlora", True, 2, 896, "bf16-amp"),
)


UNTRACED = (Phase.LOAD, Phase.SAVE)
"""What no trace of steps has: loading, whose peak may be the highest where experts are joined."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One comparison: peaks in bytes as requested, or why the library does not run the step."""

    name: str
    learned: int
    traced: int
    refused: str = ""

    @property
    def difference(self) -> float:
        """Relative difference of the peak; 0 where the library refuses."""
        return self.learned / self.traced - 1 if self.traced else 0.0


def agreement(
    config: Mapping[str, Any],
    form: Mapping[str, Any],
    cells: Iterable[Cell] = QUICK,
    unseen_cells: Iterable[Cell] = UNSEEN,
) -> list[Agreement]:
    """Compares at the config's own sizes, with as few layers as show every kind, and at sizes that
    no recording saw."""
    short, other = shorter(config, form), unseen(config, form)
    found = [_compared(short, form, cell) for cell in _that_run(cells, form)]
    more = [_compared(other, form, cell) for cell in _that_run(unseen_cells, form)]
    return found + [replace(one, name=f"unseen {one.name}") for one in more]


def _that_run(cells: Iterable[Cell], form: Mapping[str, Any]) -> list[Cell]:
    """The cells, each once, under the attention that the class has."""
    if form["eager_only"]:
        cells = [replace(cell, attention="eager") for cell in cells]
    return list(dict.fromkeys(cells))


def shorter(config: Mapping[str, Any], form: Mapping[str, Any], more: int = 0) -> dict[str, Any]:
    """The config with few layers, where its form goes for any number of them."""
    whole = for_learning(config)
    if "stages" in form:
        return shortened(with_entries(whole), more)
    return shortened(whole, more) if form["kinds"]["count"] else whole


FACTORS = {"i": 2, "p": 1, "h": 4, "a": 4, "k": 2, "dh": 1, "topk": 1, "w": 1}
OTHER_FACTOR = 5
"""By what an unseen config is larger: learning multiplied by 2 and 3 at most. Heads of a size
above 256 would run another kernel, so widths and heads grow alike."""


def unseen(config: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the type that no recording saw: other depth, width, heads, vocabulary."""
    short = shorter(config, form, more=2)
    sizes, bound = dict[str, int](), dict[str, int]()
    for field, letter in form["symbols"].items():
        base = short.get(field)
        if isinstance(base, int):
            usual = FACTORS["a"] if field.endswith("heads") else OTHER_FACTOR
            sizes[field] = base * FACTORS.get(letter, usual)
            bound[letter] = sizes[field]
    for field, rule in form["ties"].items():
        sizes[field] = evaluated(rule, bound)
    return {**short, **sizes}


def _unpacked_from(spec: ModelSpec) -> int:
    """Images with which 4-bit weights are surely unpacked, as they are priced: bitsandbytes may run
    its fused product over fewer rows. An image that is no sequence is one row of the head."""
    return SMALL_GEMM_TOKENS // (tokens_of(spec) or 1) + 1


def _compared(config: Mapping[str, Any], form: Mapping[str, Any], cell: Cell) -> Agreement:
    spec = spec_of(form, config, name=str(config["model_type"]))
    longest = spec.longest_sequence or cell.length
    if cell.method == "qlora" and form["task"] in PICTURED:
        cell = replace(cell, batch=_unpacked_from(spec))
    wanted = replace(cell, length=min(cell.length, longest)).train_config()
    try:
        options = options_from(wanted)
        traced = trace_options(config_from(dict(config)), options)
    except Exception as error:  # whatever the library raises: it does not run this step
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Agreement(cell.name, 0, 0, first)
    policy = Policy(wanted, STACKS["hf-bare"], sdpa_choice=Attention.FLASH)
    timeline = simulate(build_step(spec, policy), steps=2)
    ours = max(
        point.nbytes for phase, point in timeline.phase_peaks().items() if phase not in UNTRACED
    )
    return Agreement(cell.name, ours, traced.peak_bytes)
