"""A model under the head of another task than its family's usual one."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Size
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b, s
from napkinmath.models.families.config import Config, pads
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.score_head import (
    HiddenStatesMean,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from napkinmath.models.layers.task_heads import MaskedLmHead
from napkinmath.models.tasks import ANSWERS, CLASSES, ENDINGS, FEATURES, SEQUENCE, TOKENS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

LABELS: dict[str, tuple[Size, ...]] = {
    SEQUENCE: (b,),
    TOKENS: (b, s),
    ANSWERS: (b, 2),
    FEATURES: (0,),
}
# The fields that say the dropout before the scores of tokens, and the default, by class.
DROPOUT = (("classifier_dropout", "hidden_dropout", "hidden_dropout_prob"), 0.1)
DROPOUT_OF: dict[str, tuple[tuple[str, ...], float]] = {
    **dict.fromkeys(("bloom", "stablelm", "persimmon", "falcon"), (DROPOUT[0], 0.0)),
    **dict.fromkeys(("modernbert", "t5", "mt5", "umt5"), (DROPOUT[0][:1], 0.0)),
    "gpt_neox": (DROPOUT[0][:1], 0.1),
    "distilbert": (("dropout",), 0.1),
    "albert": (("classifier_dropout_prob",), 0.1),
}
ANSWER_DROPOUT = {"distilbert": ("qa_dropout", 0.1), "modernbert": ("classifier_dropout", 0.0)}
# Their losses over tokens are the classes' own, without fp32 (ForTokenClassification in each).
OWN_TOKEN_LOSS = ("gpt2", "gpt_bigcode", "gpt_neo", "biogpt", "bloom", "mpt", "falcon")


def under_task(spec: ModelSpec, c: Config, task: str, classes: Collection[str] = ()) -> ModelSpec:
    """The model with the head of a task in the place of its own; `classes` are tasks of which
    transformers has a class, beside those of the table.

    Raises InputError where transformers has no such class, or its head is not priced.
    """
    kind = str(c.values.get("model_type"))
    lacks = task in CLASSES and kind not in CLASSES[task] and task not in classes
    if not task or lacks:
        raise _no_class(c, kind, spec.task, task, classes)
    head = _head(spec, c, task, kind)
    if head is None:
        raise InputError(
            f"the {task} head of model type {kind} is not priced; run `estimate trace`, or give"
            f" --task {spec.task}"
        )
    stages = [stage.replace(part=stage.part.labelled(LABELS[task])) for stage in _body(spec)]
    return spec.replace(stages=(*stages, Stage(part=head)))


def _no_class(c: Config, kind: str, own: str, task: str, classes: Collection[str]) -> InputError:
    has = [own, FEATURES, *classes]
    has += [other for other, kinds in CLASSES.items() if kind in kinds]
    what = f"architecture {shown(c.names('architectures')[0])} ends in a head that has no rules"
    if task:
        what = f"transformers has no class of model type {kind} for {task}"
    return InputError(f"{what}; give --task with one of {', '.join(has)}")


def _body(spec: ModelSpec) -> list[Stage]:
    """All stages before the exit; of an encoder-decoder the encoder alone."""
    stages = list(spec.stages[:-1])
    ends = [i for i, stage in enumerate(stages) if stage.publishes]
    if spec.task == "seq2seq-lm" and ends:
        stages = stages[: ends[0] + 1]
        stages[-1] = stages[-1].replace(publishes="", closes=())
    return stages


def _head(spec: ModelSpec, c: Config, task: str, kind: str) -> Part | None:
    """The exit of a task; None for one without rules."""
    last = spec.stages[-1].part
    if isinstance(last, (CausalLmHead, MaskedLmHead)):
        decoder = isinstance(last, CausalLmHead)
        before = last if decoder or (kind == "modernbert" and task != FEATURES) else None
    elif spec.family == "t5" and (task == TOKENS or _is_encoder_alone(c)):
        decoder, before = False, None
    else:
        return None
    if task not in LABELS:
        return None
    if task == FEATURES:
        return HiddenStatesMean(exit=before)
    if task == TOKENS:
        return TokenClassificationHead(
            exit=before,
            labels=c.num_labels(),
            dropout=_token_dropout(c, kind),
            upcast=decoder and kind not in OWN_TOKEN_LOSS,
        )
    if task == ANSWERS:
        field, default = ANSWER_DROPOUT.get(kind, ("", 0.0))
        own = c.probability(field, default) if field else default
        return QuestionAnsweringHead(exit=before, dropout=own)
    if decoder:
        default = bool(getattr(spec.stages[0].part, "padded", False))
        return SequenceClassificationHead(exit=before, labels=c.num_labels(), pads=pads(c, default))
    return None


def _is_encoder_alone(c: Config) -> bool:
    """T5EncoderModel; T5Model has the decoder too."""
    name = c.names("architectures")[0]
    return name == ENDINGS[FEATURES][0] or name.endswith("EncoderModel")


def _token_dropout(c: Config, kind: str) -> float:
    """classifier_dropout, or the dropout of hidden states under the family's name for it."""
    names, default = DROPOUT_OF.get(kind, DROPOUT)
    found = next((name for name in names if name in c), "")
    return c.probability(found, default) if found else default
