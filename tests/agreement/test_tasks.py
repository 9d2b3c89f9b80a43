"""Heads of other tasks: `architectures` decides in both paths, which agree; what transformers has
no class for is refused by both."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from agreement.tiny_configs import TINY
from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath import InputError, estimate
from napkinmath.models.families import FAMILIES, read_config
from napkinmath.models.tasks import CLASSES, ENDINGS, FEATURES
from napkinmath_profiler.tracing.trace_errors import TraceError
from transformers.models.auto import modeling_auto

TOLERANCE = 0.001
MAPPINGS = {
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
}
# One of each head's making: generic classes, classes of their own, encoders, and T5's encoder. All
# families, methods and lengths: benchmarks/accuracy/tasks.py.
CELLS = [
    ("llama", "sequence-classification", "full", 17),
    ("llama", "token-classification", "qlora", 333),
    ("mixtral", "question-answering", "lora", 333),
    ("gpt2", "sequence-classification", "lora", 333),
    ("bloom", "token-classification", "full", 333),
    ("opt_projected", "sequence-classification", "full", 333),
    ("qwen3", FEATURES, "full", 333),
    ("bert", "sequence-classification", "lora", 333),
    ("bert", "token-classification", "full", 333),
    ("bert", "causal-lm", "full", 333),
    ("roberta", "causal-lm", "lora", 333),
    ("distilbert", "question-answering", "qlora", 333),
    ("deberta_v2", "sequence-classification", "full", 333),
    ("modernbert", "sequence-classification", "lora", 17),
    ("modernbert", "question-answering", "full", 333),
    ("t5", "token-classification", "full", 333),
    ("t5", "sequence-classification", "lora", 333),
    ("umt5", "seq2seq-lm", "full", 333),
    ("bart", "sequence-classification", "lora", 333),
    ("bart", "causal-lm", "full", 333),
]


def under(family: str, task: str) -> dict[str, object]:
    """The tiny config of a family with a padding token, for a task."""
    ending = ENDINGS[task][0]
    base = TINY.get(family) or {**TINY["t5"], "model_type": family}
    return {"pad_token_id": 3, **base, "architectures": [f"Its{ending}"]}


@pytest.mark.parametrize(("family", "task", "method", "length"), CELLS)
def test_a_head_agrees_with_the_traced_step(
    family: str, task: str, method: str, length: int
) -> None:
    case = Case(
        config=under(family, task),
        method=method,
        attention="auto",
        sequence=length,
        optimizer="adamw-fused",
    )
    assert abs(compare(family, case).difference) <= TOLERANCE


def test_a_decoder_of_berts_kin_keeps_its_causal_mask() -> None:
    config = {**under("bert", "causal-lm"), "is_decoder": True}
    case = Case(config=config, attention="eager", checkpointing=True, sequence=333)
    assert abs(compare("bert", case).difference) <= TOLERANCE
    assert read_config({**config, "architectures": ["BertLMHeadModel"]}).task == "causal-lm"


@pytest.mark.parametrize("task", MAPPINGS)
def test_the_classes_are_those_of_transformers(task: str) -> None:
    known = getattr(modeling_auto, f"MODEL_FOR_{MAPPINGS[task]}_MAPPING_NAMES")
    assert CLASSES[task] == {kind for kind in FAMILIES if kind in known}


def test_a_classifier_has_no_vocabulary_of_logits() -> None:
    config = under("llama", "sequence-classification")
    peaks = [estimate(c, bs=4, ctx=512).peak.nbytes for c in (TINY["llama"], config)]
    assert peaks[0] > peaks[1]


@pytest.mark.parametrize("architecture", ["LlamaForRewards", "LlamaForMaskedLM"])
def test_an_unknown_head_is_refused_with_those_known(architecture: str) -> None:
    with pytest.raises(InputError, match="--task"):
        read_config({**TINY["llama"], "architectures": [architecture]})


def test_a_task_that_transformers_has_no_class_for_is_refused_by_both() -> None:
    config = under("granite", "sequence-classification")
    with pytest.raises(InputError, match="no class of model type granite"):
        read_config(config)
    with pytest.raises(TraceError, match="no class of GraniteConfig"):
        Case(config=config).traced()
