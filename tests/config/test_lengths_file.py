"""A file of lengths is read whole or refused by one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from napkinmath.base.errors import InputError
from napkinmath.config import lengths

if TYPE_CHECKING:
    from pathlib import Path

BAD = {
    "utf-16": ("512 1024".encode("utf-16"), "UTF-8"),
    "bytes": (b"512 \xff", "UTF-8"),
    "deep": (b'{"length": ' + b"[" * 200_000, "nested too deeply"),
    "too long": (b"8 " * 41, "more than 80 characters"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content, said = BAD[name]
    if name == "too long":
        monkeypatch.setattr(lengths, "MOST_LENGTHS", 10)
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as error:
        lengths.read_lengths(str(path))
    assert "\n" not in str(error.value)
