"""Learned forms as files: what repeats is written once."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from napkinmath.base.whole_file import write_whole
from napkinmath.catalog.learned_forms import SCHEMA, own_folder

from napkinmath_profiler.tracing.learning.references import with_references
from napkinmath_profiler.tracing.learning.single_rows import with_rows_shared

SHORTEST = 80
"""Letters of a piece that is worth a number. Compressed, shorter ones are smaller as they are: of the
59 types 236 KB with 80, 246 KB with 48, 325 KB with 8 (bz2, as the page packs them)."""


def written(documents: Sequence[Mapping[str, Any]]) -> str:
    """The file of a type's learned forms (catalog/learned_forms.py reads it)."""
    pieces, documents = _Pieces(), [_shared(one) for one in documents]
    for document in documents:
        pieces.count(document)
    forms = [pieces.replaced(document, whole=True) for document in documents]
    text = _compact({"schema": SCHEMA, "forms": forms})
    lines = ",\n".join(_compact(piece) for piece in pieces.made)
    return f'{text[:-1]},"pieces":[\n{lines}\n]}}\n'


def _shared(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A learned form whose equal blocks are written once; towers (of no blocks) as they are."""
    return with_rows_shared(with_references(document)) if "variants" in document else document


def keep(documents: Sequence[Mapping[str, Any]], path: str = "") -> str:
    """Writes the file, by default among this machine's own, named by its content; returns its
    path."""
    text = written(documents)
    if not path:
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        os.makedirs(own_folder(), exist_ok=True)
        path = os.path.join(own_folder(), f"{documents[0]['model_type']}.{digest}.json")
    write_whole(path, text, force=True, what="learned form")
    return path


class _Pieces:
    """Lists and mappings that occur more than once, each after those that it holds."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}
        self.made: list[Any] = []

    def count(self, node: Any) -> None:
        """Counts every list and mapping of a document; of one that was seen, not what it holds."""
        if not isinstance(node, (list, dict)):
            return
        text = _compact(node)
        self._times[text] += 1
        if self._times[text] == 1:
            for item in node.values() if isinstance(node, dict) else node:
                self.count(item)

    def replaced(self, node: Any, *, whole: bool = False) -> Any:
        """The node with what repeats as numbers."""
        if not isinstance(node, (list, dict)):
            return node
        text = _compact(node)
        repeats = self._times[text] > 1 and len(text) >= SHORTEST and not whole
        if repeats and text in self._numbers:
            return f"@{self._numbers[text]}"
        if isinstance(node, dict):
            made: Any = {k: self.replaced(v) for k, v in node.items()}
        else:
            made = [self.replaced(item) for item in node]
        if not repeats:
            return made
        self.made.append(made)
        self._numbers[text] = len(self.made) - 1
        return f"@{self._numbers[text]}"


def _compact(node: Any) -> str:
    return json.dumps(node, separators=(",", ":"), ensure_ascii=False)
