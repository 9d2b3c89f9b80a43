"""Vocabularies as a training tool leaves them: embeddings and head resized to its tokenizer once
the tokens that it misses are added.

Odd lengths matter beyond their few rows: the logits and their shifted copy then round to segments
of two sizes, of which one cannot serve the other.
"""

from __future__ import annotations

import re

# Model -> (tokens of its tokenizer, and how many of padding, unknown, beginning and end it has
# not). Source: the models' tokenizer_config.json.
_TOKENIZERS = (
    (r"llama-?3|llama3", 128256, 2),
    (r"llama|vicuna|mistral-7b-v0\.[12]|mixtral-8x7b|tinyllama", 32000, 1),
    (r"santacoder", 49157, 1),
    (r"starcoder(base)?\b", 49152, 1),
    (r"^gpt-?2|distilgpt2", 50257, 1),
)


def resized_vocabulary(model: str) -> int | None:
    """Rows of the embedding after a tool has added what the model's tokenizer misses; None for a
    tokenizer that is not known."""
    name = model.lower().replace("_", "-").replace(" ", "-")
    found = next(
        ((length, missing) for pattern, length, missing in _TOKENIZERS if re.search(pattern, name)),
        None,
    )
    return sum(found) if found is not None else None
