"""The loss of a sentence-transformers script: which workload it is, and the mini-batches of a cached
one.

Source: sentence-transformers 6.2 sentence_transformer/losses/*, base/losses/gradcache.py.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.inputs.scripts.python_keys import ScriptKeys
from napkinmath.inputs.scripts.python_values import Made, Unknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EMBEDDING_TRAINER = "SentenceTransformerTrainer"
# Loss -> our workload. A symmetric one has one more product of (rows, rows).
_LOSSES = {
    "MultipleNegativesRankingLoss": "contrastive",
    "MultipleNegativesSymmetricRankingLoss": "contrastive",
    "CachedMultipleNegativesRankingLoss": "contrastive-cached",
    "CachedMultipleNegativesSymmetricRankingLoss": "contrastive-cached",
}
_AROUND = ("MatryoshkaLoss",)
"""Losses that ask another one again for the same embeddings, cut."""
_GATHERS = "gather_across_devices"
_MINI_BATCH = 32  # CachedMultipleNegativesRankingLoss mini_batch_size
_PAIRS = 2
_BATCH, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"


def embeddings_of(keys: ScriptKeys, trainer: Made, notes: list[str]) -> str:
    """The workload of a trainer of embeddings, whose mini-batches become the batch. Raises InputError
    for a loss that is not priced."""
    loss: Any = trainer.keys.get("loss")
    if isinstance(loss, Made) and loss.name in _AROUND:
        loss = loss.keys.get("loss")
    name = loss.name if isinstance(loss, Made) else ""
    if name not in _LOSSES:
        said = f"{name} of line {loss.line}" if name else "its loss, which is not followed,"
        raise InputError(
            f"{EMBEDDING_TRAINER}: {said} is not priced; known losses are {', '.join(_LOSSES)}; give"
            " the nearest run with flags (--workload contrastive, `estimate --help`)"
        )
    found = _LOSSES[name]
    if loss.keys.get(_GATHERS):
        keys.set(_GATHERS, loss.keys[_GATHERS], loss.lines.get(_GATHERS, loss.line))
    texts = "the dataset's columns are not read: pairs are taken"
    if found == "contrastive":
        notes.append(f"{texts}; add --columns 3 for triplets")
        return found
    mini, whole = loss.keys.get("mini_batch_size", _MINI_BATCH), keys.content.get(_BATCH, 8)
    steps = keys.content.get(_STEPS, 1)
    if all(type(n) is int and n > 0 for n in (mini, whole, steps)):
        rows = min(mini, whole)  # type: ignore[type-var]
        line = loss.lines.get("mini_batch_size", loss.line)
        keys.set(_BATCH, rows, line)
        keys.set(_STEPS, steps * _PAIRS * -(-whole // rows), line)  # type: ignore[operator]
        notes.append(f"mini-batches of {rows} texts, of {whole} rows; {texts}")
    else:
        keys.set(_BATCH, Unknown(source="mini_batch_size", line=loss.line), loss.line)
    return found
