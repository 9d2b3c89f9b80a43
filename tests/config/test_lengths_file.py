"""A file of lengths is read whole or refused by one line."""

from __future__ import annotations

import os
import threading
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


def test_a_pipe_that_nobody_writes_holds_no_lengths(tmp_path: Path) -> None:
    """And one with a writer, as `--lengths <(command)` is, those that come."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InputError, match="holds no lengths"):
        lengths.read_lengths(str(path))
    writer = threading.Thread(target=path.write_text, args=("64 32",))
    held = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer does not wait
    writer.start()
    writer.join(10)
    assert lengths.read_lengths(f"/dev/fd/{held}") == (64, 32)
    os.close(held)
