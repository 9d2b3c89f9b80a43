"""What ms-swift 1 and 2 call models: `--model_type qwen1half-7b-chat-int4`.

The names are those of the weights in lower case but for what stands here (modelscope/ms-swift
swift/llm/utils/model.py at v1.7.3 and v2.6.1: ModelType beside the ids of register_model).
"""

from __future__ import annotations

import re

# A pattern of a name -> what its publisher calls the same; each row is tried once, in this order.
_WORDS = (
    (r"(?<=\d)_(?=\d)", "."),
    (r"qwen1half", "qwen1.5"),
    (r"^mixtral-moe-7b", "mixtral-8x7b"),
    (r"^mixtral-moe", "mixtral"),
    (r"^(mi[sx]tral-.*)-v(\d)$", r"\1-v0.\2"),
    (r"^llava1\.(\d)-yi-(.*)-instruct$", r"llava-v1.\1-\2"),
    (r"^llava1\.(\d)-(.*)-instruct$", r"llava-v1.\1-\2"),
    (r"^phi2-3b$", "phi-2"),
    (r"^phi3-4b-", "phi-3-mini-"),
    (r"^codegeex4-9b-chat$", "codegeex4-all-9b"),
    (r"^((?:qwen|yi|llama).*)(?<!awq)(?<!gptq)-(int[48])$", r"\1-gptq-\2"),
)


def model_named(model_type: str) -> str:
    """A model by the words that its publisher uses."""
    name = model_type.strip().lower()
    for pattern, words in _WORDS:
        name = re.sub(pattern, words, name)
    return name
