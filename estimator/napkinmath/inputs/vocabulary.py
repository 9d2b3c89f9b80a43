"""A model whose embeddings a script resizes: the model's own config with another vocabulary."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.catalog.models import find_row
from napkinmath.config.job_keys import Difference
from napkinmath.models.read import config_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.foreign import ForeignJob

_SIZE = "vocab_size"
_TEXT = "text_config"


def read_vocabulary(job: ForeignJob) -> None:
    """Gives the config with `resized_vocabulary` rows, or with the model's own and `added_tokens`,
    rounded up to `vocabulary_multiple` (transformers 5.23 modeling_utils.py
    _get_resized_embeddings)."""
    size, added = job.take("resized_vocabulary"), job.take("added_tokens")
    multiple = values.count(job.take("vocabulary_multiple") or 1, "pad_to_multiple_of")
    if size is None and added is None:
        return
    name = str(job.options.get("model", ""))
    row = find_row(name)
    config = config_in(name) or (row["config"] if row else None)
    own = None if config is None else _of(config).get(_SIZE)
    key = "added_tokens" if size is None else "resized_vocabulary"
    if config is None or not isinstance(own, int) or job.is_settled("model"):
        job.leave_out(
            key,
            "embeddings of another size are not priced with this model",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
        return
    if size is None and not added and multiple == 1:
        job.note(f"resized to the tokenizer's length, at most the {own} rows that are priced")
        return
    wanted = (
        values.count(size, "resize_token_embeddings") if added is None else own + int(str(added))
    )
    rows = -(-wanted // multiple) * multiple
    most = "at most " if size is None else ""
    job.note(f"embeddings resized to {most}{rows} rows, {own} in {name}")
    if rows == own:
        return
    named = {**config, "_name_or_path": row["name"] if row else name}
    del job.options["model"]
    job.give("config", _with_rows(named, rows))


def _of(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config that has the vocabulary."""
    inner = config.get(_TEXT)
    return values.mapping(inner, _TEXT) if _SIZE not in config and inner else config


def _with_rows(config: Mapping[str, object], rows: int) -> dict[str, object]:
    if _SIZE in config:
        return {**config, _SIZE: rows}
    return {**config, _TEXT: {**_of(config), _SIZE: rows}}
