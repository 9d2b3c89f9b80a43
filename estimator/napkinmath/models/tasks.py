"""Tasks: which head a model ends in, as the first name of a config's `architectures` says it, and
the same model under another head.

Source: transformers 5.23 models/auto/modeling_auto.py, whose mappings say which classes there are.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


CAUSAL, MASKED, SEQ2SEQ = "causal-lm", "masked-lm", "seq2seq-lm"
SEQUENCE, TOKENS, ANSWERS = (
    "sequence-classification",
    "token-classification",
    "question-answering",
)
IMAGES, FEATURES, CTC = "image-classification", "feature-extraction", "ctc"
VIDEOS, SPECTROGRAMS = "video-classification", "audio-classification"
PICTURED = {IMAGES: "images", VIDEOS: "videos", SPECTROGRAMS: "spectrograms"}
"""Tasks of models without text or samples of sound, and what one of a batch is: its size is the
config's."""
LABELLED = (SEQUENCE, TOKENS, ANSWERS, FEATURES)
"""Tasks whose labels are not the tokens: a model is said to be for them."""
# Task -> what its classes' names end in, the usual ending first.
ENDINGS: dict[str, tuple[str, ...]] = {
    CAUSAL: ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
    MASKED: ("ForMaskedLM",),
    SEQ2SEQ: ("ForConditionalGeneration", "WithLMHeadModel", "MTModel"),
    SEQUENCE: ("ForSequenceClassification",),
    TOKENS: ("ForTokenClassification",),
    ANSWERS: ("ForQuestionAnswering",),
    IMAGES: ("ForImageClassification",),
    VIDEOS: ("ForVideoClassification",),
    SPECTROGRAMS: ("ForAudioClassification",),
    CTC: ("ForCTC",),
    FEATURES: ("Model",),
}
_ALL = (SEQUENCE, TOKENS, ANSWERS)
# Model type of the families -> the tasks it has a class of in transformers 5.23, where not all have.
_TASKS: dict[str, tuple[str, ...]] = {
    "minimax": _ALL,
    "zamba2": (SEQUENCE,),
    "llama": _ALL,
    "gemma": (SEQUENCE, TOKENS),
    "gemma2": (SEQUENCE, TOKENS),
    "gemma3_text": (SEQUENCE,),
    "starcoder2": (SEQUENCE, TOKENS),
    "olmo": (SEQUENCE,),
    "olmo2": (SEQUENCE,),
    "olmo3": (SEQUENCE,),
    "exaone4": _ALL,
    "smollm3": _ALL,
    "arcee": _ALL,
    "nemotron": _ALL,
    "helium": (SEQUENCE, TOKENS),
    "hunyuan_v1_dense": (SEQUENCE,),
    "hunyuan_v1_moe": (SEQUENCE,),
    "glm": (SEQUENCE, TOKENS),
    "glm4": (SEQUENCE, TOKENS),
    "phi3": (SEQUENCE, TOKENS),
    "persimmon": (SEQUENCE, TOKENS),
    "gpt_neox": _ALL,
    "gpt2": _ALL,
    "gpt_bigcode": (SEQUENCE, TOKENS),
    "gpt_neo": _ALL,
    "gptj": (SEQUENCE, ANSWERS),
    "opt": (SEQUENCE, ANSWERS),
    "biogpt": (SEQUENCE, TOKENS),
    "bloom": _ALL,
    "mpt": _ALL,
    "falcon": _ALL,
    "phi": (SEQUENCE, TOKENS),
    "stablelm": (SEQUENCE, TOKENS),
    "seed_oss": _ALL,
    "ministral3": _ALL,
    "mistral4": (SEQUENCE, TOKENS),
    "minicpm3": (SEQUENCE,),
    "mistral": _ALL,
    "ministral": _ALL,
    "qwen2": _ALL,
    "qwen3": _ALL,
    "albert": _ALL,
    "bert": _ALL,
    "roberta": _ALL,
    "xlm-roberta": _ALL,
    "camembert": _ALL,
    "distilbert": _ALL,
    "modernbert": _ALL,
    "deberta-v2": _ALL,
    "bart": (SEQUENCE, ANSWERS),
    "mbart": (SEQUENCE, ANSWERS),
    "plbart": (SEQUENCE,),
    "t5": _ALL,
    "mt5": _ALL,
    "umt5": _ALL,
    "gemma3": (SEQUENCE,),
    "qwen3_next": _ALL,
    "qwen3_5": (SEQUENCE, TOKENS),
    "qwen3_5_text": (SEQUENCE,),
    "jamba": (SEQUENCE,),
    "deepseek_v2": (SEQUENCE,),
    "deepseek_v3": (SEQUENCE, TOKENS),
    "gpt_oss": (SEQUENCE, TOKENS),
    "mixtral": _ALL,
    "qwen2_moe": _ALL,
    "qwen3_moe": _ALL,
    "phimoe": (SEQUENCE,),
    "apertus": (TOKENS,),
}
CLASSES = {
    task: frozenset(model_type for model_type, tasks in _TASKS.items() if task in tasks)
    for task in _ALL
}


def named_task(architecture: str, own: str) -> str:
    """The task of an architecture's name in a family whose usual task is `own`; '' for a name that
    no task's classes have."""
    if not architecture or any(architecture.endswith(end) for end in ENDINGS[own]):
        return own
    ends = ((task, end) for task, found in ENDINGS.items() for end in found)
    return next((task for task, end in ends if architecture.endswith(end)), "")


def for_task(config: Mapping[str, object], task: str) -> dict[str, object]:
    """The config with the architecture of a task (of two towers, both); InputError for a task that
    is not known."""
    if task not in ENDINGS:
        raise InputError(
            f"--task {shown(task)} is not known{suggest(task, list(ENDINGS))}; known:"
            f" {', '.join(ENDINGS)}"
        )
    both = task == CAUSAL and "vision_config" in config
    return {**config, "architectures": [ENDINGS[task][-1 if both else 0]]}
