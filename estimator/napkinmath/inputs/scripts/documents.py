"""Files that a script writes with here-documents before it names them in a launch line."""

from __future__ import annotations

from napkinmath.inputs.scripts.launchers import base_name
from napkinmath.inputs.scripts.shell_words import UNKNOWN, raw_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.scripts.shell_words import Word
    from napkinmath.inputs.scripts.source import Source

_NAMED_BY = ("deepspeed", "deepspeed_config")


def with_documents(source: Source, documents: Mapping[str, Word]) -> Source:
    """A source with DeepSpeed's file in the place of its name, where the script itself writes it;
    what only a run knows in it is null."""
    from napkinmath.base.json_text import loads

    if not documents:
        return source
    content = dict(source.content)
    for key in _NAMED_BY:
        made = source.computed.get(key)
        name = content.get(key)
        word = documents.get(str(name)) if made is None else None
        if word is None and isinstance(name, str):
            last = base_name(name)
            word = next((w for file, w in documents.items() if base_name(file) == last), None)
        if word is None:
            continue
        try:
            found = loads(raw_of(word).replace(UNKNOWN, "null"))
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            content[key] = found
    return source.replace(content=content)
