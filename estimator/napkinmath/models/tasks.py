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
    CTC: ("ForCTC",),
    FEATURES: ("Model",),
}
# Model types of the families that have a class of a task in transformers 5.23, where not all have.
CLASSES: dict[str, frozenset[str]] = {
    SEQUENCE: frozenset(
        [
            "minimax",
            "zamba2",
            "llama",
            "gemma",
            "gemma2",
            "gemma3_text",
            "starcoder2",
            "olmo",
            "olmo2",
            "olmo3",
            "exaone4",
            "smollm3",
            "arcee",
            "nemotron",
            "helium",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "glm",
            "glm4",
            "phi3",
            "persimmon",
            "gpt_neox",
            "gpt2",
            "gpt_bigcode",
            "gpt_neo",
            "gptj",
            "opt",
            "biogpt",
            "bloom",
            "mpt",
            "falcon",
            "phi",
            "stablelm",
            "seed_oss",
            "ministral3",
            "mistral4",
            "minicpm3",
            "mistral",
            "ministral",
            "qwen2",
            "qwen3",
            "albert",
            "bert",
            "roberta",
            "xlm-roberta",
            "camembert",
            "distilbert",
            "modernbert",
            "deberta-v2",
            "bart",
            "mbart",
            "plbart",
            "t5",
            "mt5",
            "umt5",
            "gemma3",
            "qwen3_next",
            "qwen3_5",
            "qwen3_5_text",
            "jamba",
            "deepseek_v2",
            "deepseek_v3",
            "gpt_oss",
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "phimoe",
        ]
    ),
    TOKENS: frozenset(
        [
            "minimax",
            "llama",
            "gemma",
            "gemma2",
            "starcoder2",
            "exaone4",
            "smollm3",
            "arcee",
            "nemotron",
            "apertus",
            "helium",
            "glm",
            "glm4",
            "phi3",
            "persimmon",
            "gpt_neox",
            "gpt2",
            "gpt_bigcode",
            "gpt_neo",
            "biogpt",
            "bloom",
            "mpt",
            "falcon",
            "phi",
            "stablelm",
            "seed_oss",
            "ministral3",
            "mistral4",
            "mistral",
            "ministral",
            "qwen2",
            "qwen3",
            "albert",
            "bert",
            "roberta",
            "xlm-roberta",
            "camembert",
            "distilbert",
            "modernbert",
            "deberta-v2",
            "t5",
            "mt5",
            "umt5",
            "qwen3_next",
            "qwen3_5",
            "deepseek_v3",
            "gpt_oss",
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
        ]
    ),
    ANSWERS: frozenset(
        [
            "minimax",
            "llama",
            "exaone4",
            "smollm3",
            "arcee",
            "nemotron",
            "gpt_neox",
            "gpt2",
            "gpt_neo",
            "gptj",
            "opt",
            "bloom",
            "mpt",
            "falcon",
            "seed_oss",
            "ministral3",
            "mistral",
            "ministral",
            "qwen2",
            "qwen3",
            "albert",
            "bert",
            "roberta",
            "xlm-roberta",
            "camembert",
            "distilbert",
            "modernbert",
            "deberta-v2",
            "bart",
            "mbart",
            "t5",
            "mt5",
            "umt5",
            "qwen3_next",
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
        ]
    ),
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
