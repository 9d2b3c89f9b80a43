"""Launch lines of transformers' example scripts, which the Trainer runs without TRL: `run_clm.py`,
`run_glue.py`, ..., and scripts of somebody's own with their arguments.

Arguments and defaults: huggingface/transformers examples/pytorch (language-modeling,
text-classification, token-classification, question-answering, image-classification).
"""

from __future__ import annotations

from typing import NamedTuple

from napkinmath.inputs.trained_by import PLAIN_TRAINER
from napkinmath.models.tasks import ANSWERS, CTC, IMAGES, MASKED, SEQ2SEQ, SEQUENCE, TOKENS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.source import Source


class _Example(NamedTuple):
    task: str = ""
    """The head; '' for the next token."""
    key: str = "max_seq_length"
    length: int | None = None
    """Tokens where the line says nothing; None: as many as the tokenizer's."""


_EXAMPLES = {
    "run_clm": _Example(key="block_size", length=1024),
    "run_fim": _Example(key="block_size", length=1024),
    "run_mlm": _Example(MASKED),
    "run_glue": _Example(SEQUENCE, length=128),
    "run_classification": _Example(SEQUENCE, length=128),
    "run_xnli": _Example(SEQUENCE, length=128),
    "run_ner": _Example(TOKENS),
    "run_qa": _Example(ANSWERS, length=384),
    "run_summarization": _Example(SEQ2SEQ, "max_source_length", 1024),
    "run_translation": _Example(SEQ2SEQ, "max_source_length", 1024),
    "run_image_classification": _Example(IMAGES),
    "run_speech_recognition_ctc": _Example(CTC),
}
# Arguments of these scripts that no TRL script has, and of TRL's that they have not.
_SIGNS = frozenset(
    [
        *("block_size", "dataset_config_name", "validation_file", "task_name", "doc_stride"),
        *("pad_to_max_length", "max_train_samples", "do_preprocess"),
    ]
)
_OF_TRL = frozenset(
    [
        *("dataset_text_field", "packing", "use_peft", "completion_only_loss", "max_length"),
        *("assistant_only_loss", "activation_offloading", "loss_type", "dataset_config"),
    ]
)


def as_example(source: Source, script: str) -> Source:
    """The source of a line whose script is one of these, or has their arguments; else as it is."""
    if source.trained_by:
        return source
    stem = script.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    found = _EXAMPLES.get(stem.removesuffix("_no_trainer"))
    keys = {*source.content, *source.computed}
    if found is None:
        plain = bool(_SIGNS & keys) and not _OF_TRL & keys
        return source.replace(trained_by=PLAIN_TRAINER) if plain else source
    content: dict[str, object] = dict(source.content)
    if found.task:
        content["model_task"] = found.task
    if found.length is not None and found.key not in keys:
        content[found.key] = found.length
    return source.replace(content=content, trained_by=PLAIN_TRAINER)
