"""Encoder-decoders learned from one recording: the same step as their families written by hand, where
the decoder's length is another than the encoder's, and as the traced step where no family is."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from agreement.mixed_configs import MIXED
from napkinmath.catalog import learned_forms
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import Attention, Batch, TrainConfig
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath.models.learned import spec_of
from napkinmath.models.tasks import SEQ2SEQ
from napkinmath_profiler.trace import trace_options
from napkinmath_profiler.tracing.learning.blocks import cut
from napkinmath_profiler.tracing.learning.checking import Cell, agreement
from napkinmath_profiler.tracing.learning.composites import Recorded
from napkinmath_profiler.tracing.learning.config_fields import full_config
from napkinmath_profiler.tracing.learning.landmarks import built, landmarks
from napkinmath_profiler.tracing.learning.layer_kinds import carries, rules_of
from napkinmath_profiler.tracing.learning.pieces import ModelPieces
from napkinmath_profiler.tracing.learning.recording import record
from napkinmath_profiler.tracing.learning.symbols import Fitting, joined
from napkinmath_profiler.tracing.learning.variants import merge_layers, plain
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_options import options_from

LAYERS = 3
ROWS, LENGTH, TARGET = 2, 48, 23
COUNTS = {
    "bart": {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_layerdrop": 0.0},
    "pegasus": {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_layerdrop": 0.0},
    "t5": {"num_layers": LAYERS, "num_decoder_layers": LAYERS},
}
ENDINGS = {"bart": "Bart", "pegasus": "Pegasus", "t5": "T5"}
SMALL = 0.002  # of a tiny model: rounded scales of its quantized weights
CLOSE = 0.0001  # a few allocations of 512 bytes that the trace rounds otherwise


def _config(kind: str) -> dict[str, Any]:
    name = f"{ENDINGS[kind]}ForConditionalGeneration"
    tiny = {**MIXED["t5" if kind == "t5" else "bart"], **COUNTS[kind]}
    return full_config({**tiny, "model_type": kind, "architectures": [name]})


def _pieces(
    config: dict[str, Any], attention: str, target: int = TARGET
) -> tuple[Any, ModelPieces]:
    model = built(config, "bf16", attention)
    how = Recorded(attention=attention != "eager", masks=False, loss=True)
    seen = record(model, batch=ROWS, length=LENGTH, target=target, how=how)
    return model, cut(seen, model, landmarks(model))


def _form(config: dict[str, Any], attention: str, target: int) -> dict[str, Any]:
    """A form of this size alone."""
    model, pieces = _pieces(config, attention, target)
    written: Any = joined([plain(pieces)], Fitting([{"b": ROWS}]))
    kinds = merge_layers([written])
    marks = landmarks(model)
    variants = {"half": {"eager" if attention == "eager" else "rows": written}}
    return {
        "model_type": config["model_type"],
        "digest": f"{config['model_type']} {attention}",
        "task": marks.task,
        "inputs": {"input ids": [ROWS, LENGTH], "labels": [ROWS, target]},
        "versions": {},
        "layers": marks.layers,
        "decoder layers": marks.decoder,
        "checkpointed": True,
        "tied_to": "model.shared.weight" if "t5" not in config["model_type"] else "shared.weight",
        "tied_default": True,
        "defaults": {"layers": LAYERS, "decoder layers": LAYERS},
        **{name: {} for name in ("symbols", "ties", "must", "nonzero", "aliases", "moved", "head")},
        **{name: [] for name in ("thresholds", "unequal", "null_is_default", "classes")},
        "pads": config["model_type"] != "t5",
        "pad_default": True,
        "eager_only": False,
        "variants": variants,
        "carries": carries(variants),
        **rules_of(config, config, kinds, LAYERS),
    }


def _peak(spec: ModelSpec, config: TrainConfig) -> int:
    policy = Policy(config, STACKS["hf-bare"], sdpa_choice=Attention.FLASH)
    peaks = simulate(build_step(spec, policy), steps=2).phase_peaks().values()
    return max(point.nbytes for point in peaks)


@pytest.mark.parametrize(
    ("kind", "attention", "target"),
    [
        ("bart", "sdpa", TARGET),
        ("bart", "eager", TARGET),
        ("t5", "sdpa", TARGET),
        ("t5", "eager", TARGET),
        ("pegasus", "sdpa", TARGET),
        ("pegasus", "eager", LENGTH),
    ],
)
def test_a_learned_encoder_decoder_is_its_family_to_the_byte(
    kind: str, attention: str, target: int
) -> None:
    config = _config(kind)
    learned = spec_of(_form(config, attention, target), config, name=kind)
    assert learned.task == SEQ2SEQ
    step = Cell("full", False, ROWS, LENGTH, attention=attention).train_config()
    step = step.replace(batch=Batch(images=0, target_length=target))
    assert _peak(learned, step) == _peak(read_config(config), step)


@pytest.mark.parametrize(("kind", "has_end"), [("bart", False), ("pegasus", True)])
def test_a_decoder_reads_what_its_encoder_ends_in(kind: str, has_end: bool) -> None:
    """BART's last layer, the norm behind Pegasus's."""
    _, pieces = _pieces(_config(kind), "eager")
    assert (pieces.end is not None) == has_end
    assert pieces.middle is not None and "x" not in pieces.middle.inputs
    readers = [layer for layer in pieces.layers if "encoder states" in layer.inputs]
    assert readers == pieces.layers[LAYERS:]


def test_a_buffer_behind_a_head_keeps_the_type_in_which_it_was_loaded() -> None:
    """Preparing a quantized model widens its parameters alone (peft other.py): under autocast, half
    logits and a half bias stay half."""
    config = {**_config("bart"), "vocab_size": 8192}
    step = Cell("qlora", True, 2, 128, "bf16-amp").train_config()
    traced = trace_options(config_from(dict(config)), options_from(step)).peak_bytes
    assert abs(_peak(read_config(config), step) / traced - 1) < SMALL


def test_a_shipped_encoder_decoder_is_the_traced_step() -> None:
    """MVP over quantized weights under autocast: its bias behind the head keeps the type in which
    it was loaded."""
    (form,) = learned_forms.forms_of("mvp")
    cell = Cell("qlora", True, 2, 96, "bf16-amp")
    config = {"model_type": "mvp", "architectures": ["MvpForConditionalGeneration"]}
    found = agreement(config, form, [cell])[0]
    assert not found.refused and abs(found.difference) < CLOSE
