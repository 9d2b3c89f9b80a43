"""Makes one call of the file system fail: the n-th that opens, writes, sends to the disk, renames or
removes a file under a folder. A write that fails has written half."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from napkinmath.base.errors import NapkinError

FULL, BROKEN = (OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EIO))
FAULTS = (FULL, KeyboardInterrupt())
MOST_CALLS = 200
_OPEN, _WRITE = builtins.open, os.write


class Faults:
    """Patches what writes; `hit` says whether the n-th call came."""

    def __init__(self, folder: Path, number: int, fault: BaseException) -> None:
        self._folder, self._left, self._fault = str(folder), number, fault
        self.hit = False

    def _call(self) -> bool:
        """Counts a call; whether it is the one that fails."""
        self._left -= 1
        self.hit = self.hit or self._left == 0
        return self._left == 0

    def _in_folder(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and str(path).startswith(self._folder)

    def _raise(self) -> None:
        if isinstance(self._fault, OSError):
            raise OSError(*self._fault.args)
        raise type(self._fault)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until the patches are undone."""
        for name in ("replace", "unlink"):
            monkeypatch.setattr(os, name, self._of_paths(getattr(os, name)))
        for name in ("fsync", "truncate", "ftruncate"):
            monkeypatch.setattr(os, name, self._of_all(getattr(os, name)))
        monkeypatch.setattr(os, "write", self._write)
        monkeypatch.setattr(builtins, "open", self._open)

    def _of_paths(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def patched(path: Any, *rest: Any, **named: Any) -> Any:
            if self._in_folder(path) and self._call():
                self._raise()
            return call(path, *rest, **named)

        return patched

    def _of_all(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def patched(*given: Any) -> Any:
            if self._call():
                self._raise()
            return call(*given)

        return patched

    def _write(self, handle: int, data: Any) -> int:
        if self._call():
            _WRITE(handle, bytes(data)[: len(data) // 2])
            self._raise()
        return _WRITE(handle, data)

    def _open(self, file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if not self._in_folder(file) or not set(mode) & set("wax+"):
            return _OPEN(file, mode, *given, **named)
        if self._call():
            self._raise()
        raw = _Raw(file, mode, named.get("opener"), self)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, named.get("encoding"), newline=named.get("newline"))


class _Raw(io.FileIO):
    """A file whose writes are counted."""

    def __init__(self, path: Any, mode: str, opener: Any, faults: Faults) -> None:
        super().__init__(path, mode.replace("b", "").replace("t", ""), opener=opener)
        self._faults = faults

    def write(self, data: Any) -> int:
        if self._faults._call():
            super().write(bytes(data)[: len(data) // 2])
            self._faults._raise()
        return super().write(data)


def ended(action: Callable[[], object]) -> tuple[int, str]:
    """(exit code, message) of a function, as the command line would end."""
    try:
        action()
    except KeyboardInterrupt:
        return 130, ""
    except NapkinError as error:
        return error.exit_code, str(error)
    except OSError as error:
        return 2, str(error)
    return 0, ""


def each_fault(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prepare: Callable[[Path], None],
    act: Callable[[Path], tuple[int, str]],
    check: Callable[[Path], None],
    faults: Sequence[BaseException] = FAULTS,
) -> int:
    """Calls `act` in a prepared folder with every call failing once in every way, and `check` on
    what it left; returns the number of calls."""
    number = 0
    for fault in faults:
        for number in range(1, MOST_CALLS):
            folder = tmp_path / f"{type(fault).__name__}-{getattr(fault, 'errno', 0)}-{number}"
            folder.mkdir()
            prepare(folder)
            calls = Faults(folder, number, fault)
            with monkeypatch.context() as patched:
                calls.install(patched)
                code, said = act(folder)
            if not calls.hit:
                assert code in (0, 2), said
                break
            assert_ended(code, said, fault)
            check(folder)
        else:
            raise AssertionError("it never came to an end")
    return number - 1


def assert_ended(code: int, said: str, fault: BaseException) -> None:
    """130 for an interrupt; else 0 where the call did not matter, or 2 with one line."""
    if isinstance(fault, KeyboardInterrupt):
        assert code == 130, (code, said)
    else:
        assert code in (0, 2), (code, said)
        assert code == 0 or (said.strip() and "\n" not in said.strip()), said
        assert "Traceback" not in said and "defect" not in said
