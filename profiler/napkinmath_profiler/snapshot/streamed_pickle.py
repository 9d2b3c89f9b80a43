"""A pickle of plain values, read in one pass over a memory map: no code is run, and what a listener
has taken is dropped.

``pickle.load`` of a 1 GB snapshot builds ten times its bytes in objects and would call whatever the
file names. Here only the opcodes that plain dicts, lists, tuples, strings and numbers need are
known; any other one is refused with its offset.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from mmap import mmap
from typing import Any

from napkinmath.base.errors import InputError

from napkinmath_profiler.snapshot.plain_values import KEY_TYPES, RUNS_CODE, require_shallow

Listener = Callable[[dict[Any, Any]], bool]
"""Called with every dict as soon as it is complete; True drops it."""
# What reading a byte that is not what was written there raises.
_DAMAGE = (
    struct.error,
    UnicodeDecodeError,
    TypeError,
    ValueError,
    AttributeError,
    KeyError,
    OverflowError,
)
_MARK = object()
# A list of nothing but references to earlier objects: the frames of a call stack seen before.
_REFERENCES = re.compile(rb"\](\x94|q.|r....)\(((?:h.|j....)+)e", re.DOTALL)
_REFERENCE = re.compile(rb"h(.)|j(....)", re.DOTALL)
# A value inside a dict that is like the one before: a reference, an integer, a constant, a list of
# references or an empty list.
_VALUE = (
    rb"(h.|j....|K.|M..|J....|"
    + b"|".join(rb"\x8a%c.{%d}" % (n, n) for n in range(1, 9))
    + rb"|N|\x88|\x89|\]\x94\((?:h.|j....)+e|\]\x94)"
)


def _reference_to(index: int) -> bytes:
    return b"h" + bytes([index]) if index < 256 else b"j" + index.to_bytes(4, "little")


class StreamedPickle:
    """One pass over ``data``: ``load()`` gives the value, after ``listener`` has seen and perhaps
    taken dicts out of it.

    Once the listener has taken a dict, the ones like it are given to it with their ``wanted`` keys
    only.
    """

    def __init__(
        self,
        data: bytes | mmap,
        name: str,
        listener: Listener | None = None,
        wanted: tuple[str, ...] = (),
    ) -> None:
        self._data, self._name, self._listener, self._wanted = data, name, listener, wanted
        self._memo: list[Any] = []
        self._lists: dict[bytes, list[Any]] = {}
        self._text_indices: dict[str, int] = {}
        # keys of the dicts that the listener takes, and what their bytes look like
        self._layout: tuple[str, ...] = ()
        self._taken: list[tuple[str, int]] = []
        self._like: re.Pattern[bytes] | None = None

    def load(self) -> Any:
        """The value; raises InputError naming the offset of what is corrupt, truncated or not
        plain."""
        stack: list[Any] = []
        position = 0
        data = self._data
        try:
            while True:
                code = data[position]
                handler = _HANDLERS[code]
                if handler is None:
                    if code == 0x2E:  # STOP
                        require_shallow(stack[-1])
                        return stack[-1]
                    raise self._refusal(code, position)
                position = handler(self, data, position + 1, stack)
        except IndexError:
            raise InputError(
                f"{self._name} ends at offset {len(data)} in the middle of a value; it is"
                " truncated: record the snapshot again"
            ) from None
        except _DAMAGE as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{self._name} is corrupt at offset {position}: {error}; record the snapshot again"
            ) from None

    def _refusal(self, code: int, position: int) -> InputError:
        if code in RUNS_CODE:
            return InputError(
                f"{self._name} wants code run at offset {position} ({RUNS_CODE[code]}); a memory"
                " snapshot is plain data, so this file is refused"
            )
        return InputError(
            f"{self._name} has an unknown opcode 0x{code:02x} at offset {position}; it is no pickle"
            " of a memory snapshot"
        )

    # Each handler takes (data, position after the opcode, stack) and gives the next opcode's
    # position.

    def _skip_protocol(self, data: Any, at: int, stack: list[Any]) -> int:
        return at + 1

    def _skip_frame(self, data: Any, at: int, stack: list[Any]) -> int:
        return at + 8

    def _mark(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(_MARK)
        return at

    def _memoize(self, data: Any, at: int, stack: list[Any]) -> int:
        value = stack[-1]
        if type(value) is str:
            self._text_indices.setdefault(value, len(self._memo))
        self._memo.append(value)
        return at

    def _put(self, index: int, value: Any) -> None:
        memo = self._memo
        if index == len(memo):
            memo.append(value)
            return
        if index > len(memo):
            if index > len(self._data):
                raise ValueError(f"memo index {index} is beyond the file's size")
            memo.extend([None] * (index + 1 - len(memo)))
        memo[index] = value

    def _binput(self, data: Any, at: int, stack: list[Any]) -> int:
        self._put(data[at], stack[-1])
        return at + 1

    def _long_binput(self, data: Any, at: int, stack: list[Any]) -> int:
        self._put(int.from_bytes(data[at : at + 4], "little"), stack[-1])
        return at + 4

    def _binget(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(self._memo[data[at]])
        return at + 1

    def _long_binget(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(self._memo[int.from_bytes(data[at : at + 4], "little")])
        return at + 4

    def _empty_dict(self, data: Any, at: int, stack: list[Any]) -> int:
        if self._like is not None:
            found = self._like.match(data, at - 1)
            if found is not None:
                return self._take_alike(found, stack)
        stack.append({})
        return at

    def _learn(self, keys: tuple[str, ...]) -> None:
        """Dicts with these keys will come in numbers: from now on match each in one piece."""
        self._layout = keys
        self._taken = [(key, keys.index(key)) for key in self._wanted if key in keys]
        if all(key in self._text_indices for key in keys):
            items = [re.escape(_reference_to(self._text_indices[key])) + _VALUE for key in keys]
            self._like = re.compile(rb"\}\x94\(" + b"".join(items) + b"u", re.DOTALL)

    def _take_alike(self, found: re.Match[bytes], stack: list[Any]) -> int:
        self._memo.append(None)
        values = found.groups()
        for value in values:
            if value[0] == 0x5D:  # a list has a place in the memo
                self._memo.append(None)
        entry = {key: self._value(values[index]) for key, index in self._taken}
        if self._listener is not None and not self._listener(entry):
            entry = {
                key: self._value(value) for key, value in zip(self._layout, values, strict=True)
            }
            stack.append(entry)
        else:
            stack.append({})
        return found.end()

    def _value(self, text: bytes) -> Any:
        code = text[0]
        if code == 0x68:
            return self._memo[text[1]]
        if code == 0x5D:
            return self._references(text[3:-1]) if len(text) > 2 else []
        if code == 0x8A:
            return int.from_bytes(text[2:], "little", signed=True)
        if code in (0x4B, 0x4D):
            return int.from_bytes(text[1:], "little")
        if code == 0x4A:
            return int.from_bytes(text[1:], "little", signed=True)
        if code == 0x6A:
            return self._memo[int.from_bytes(text[1:], "little")]
        return {0x4E: None, 0x88: True, 0x89: False}[code]

    def _references(self, body: bytes) -> list[Any]:
        value = self._lists.get(body)
        if value is None:
            value = self._lists[body] = [
                self._memo[m[0][0] if m[0] else int.from_bytes(m[1], "little")]
                for m in _REFERENCE.findall(body)
            ]
        return value

    def _empty_list(self, data: Any, at: int, stack: list[Any]) -> int:
        found = _REFERENCES.match(data, at - 1)
        if found is None:
            stack.append([])
            return at
        value = self._references(found.group(2))
        put = found.group(1)
        if put == b"\x94":
            self._memo.append(value)
        else:
            self._put(put[1] if len(put) == 2 else int.from_bytes(put[1:], "little"), value)
        stack.append(value)
        return found.end()

    def _empty_tuple(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(())
        return at

    def _none(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(None)
        return at

    def _true(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(True)
        return at

    def _false(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(False)
        return at

    def _int1(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(data[at])
        return at + 1

    def _int2(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(data[at] | data[at + 1] << 8)
        return at + 2

    def _int4(self, data: Any, at: int, stack: list[Any]) -> int:
        data[at + 3]
        stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
        return at + 4

    def _long1(self, data: Any, at: int, stack: list[Any]) -> int:
        end = at + 1 + data[at]
        data[end - 1]
        stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
        return end

    def _float(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(struct.unpack(">d", data[at : at + 8])[0])
        return at + 8

    def _setitem(self, data: Any, at: int, stack: list[Any]) -> int:
        value, key = stack.pop(), stack.pop()
        if type(stack[-1]) is not dict or type(key) not in KEY_TYPES:
            raise ValueError("an item is set on what is no dict, or under what is no key")
        stack[-1][key] = value
        return at

    def _setitems(self, data: Any, at: int, stack: list[Any]) -> int:
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        target = stack[mark - 1]
        if type(target) is not dict:
            raise ValueError("items are set on what is no dict")
        if any(type(key) not in KEY_TYPES for key in stack[mark + 1 :: 2]):
            raise ValueError("a key is neither a text nor a number")
        target.update(zip(stack[mark + 1 :: 2], stack[mark + 2 :: 2], strict=True))
        del stack[mark:]
        if self._listener is not None:
            keys = tuple(target) if self._like is None else ()
            if self._listener(target):
                target.clear()
                if keys and keys != self._layout and all(type(key) is str for key in keys):
                    self._learn(keys)
        return at

    def _append(self, data: Any, at: int, stack: list[Any]) -> int:
        value = stack.pop()
        if type(stack[-1]) is not list:
            raise ValueError("an item is appended to what is no list")
        if type(value) is not dict or value:
            stack[-1].append(value)
        return at

    def _appends(self, data: Any, at: int, stack: list[Any]) -> int:
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        target = stack[mark - 1]
        if type(target) is not list:
            raise ValueError("items are appended to what is no list")
        # dropped ones are empty
        target.extend(v for v in stack[mark + 1 :] if type(v) is not dict or v)
        del stack[mark:]
        return at

    def _tuple_of_mark(self, data: Any, at: int, stack: list[Any]) -> int:
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        values = tuple(stack[mark + 1 :])
        del stack[mark:]
        stack.append(values)
        return at


def _span(data: Any, at: int, width: int) -> tuple[int, int]:
    """Where bytes begin and end whose number stands before them in ``width`` bytes."""
    start = at + width
    end = start + int.from_bytes(data[at:start], "little")
    if end > len(data):
        raise IndexError
    return start, end


def _text_after(width: int) -> Any:
    def read(_: StreamedPickle, data: Any, at: int, stack: list[Any]) -> int:
        start, end = _span(data, at, width)
        stack.append(data[start:end].decode("utf-8", "surrogatepass"))
        return end

    return read


def _bytes_after(width: int) -> Any:
    def read(_: StreamedPickle, data: Any, at: int, stack: list[Any]) -> int:
        start, end = _span(data, at, width)
        stack.append(bytes(data[start:end]))
        return end

    return read


def _tuple_of(count: int) -> Any:
    def read(_: StreamedPickle, data: Any, at: int, stack: list[Any]) -> int:
        if len(stack) < count:
            raise IndexError
        values = tuple(stack[-count:])
        del stack[-count:]
        stack.append(values)
        return at

    return read


_BY_CODE: dict[int, Any] = {
    0x80: StreamedPickle._skip_protocol,
    0x95: StreamedPickle._skip_frame,
    0x28: StreamedPickle._mark,
    0x94: StreamedPickle._memoize,
    0x71: StreamedPickle._binput,
    0x72: StreamedPickle._long_binput,
    0x68: StreamedPickle._binget,
    0x6A: StreamedPickle._long_binget,
    0x7D: StreamedPickle._empty_dict,
    0x5D: StreamedPickle._empty_list,
    0x29: StreamedPickle._empty_tuple,
    0x4E: StreamedPickle._none,
    0x88: StreamedPickle._true,
    0x89: StreamedPickle._false,
    0x8C: _text_after(1),
    0x58: _text_after(4),
    0x8D: _text_after(8),
    0x43: _bytes_after(1),
    0x42: _bytes_after(4),
    0x4B: StreamedPickle._int1,
    0x4D: StreamedPickle._int2,
    0x4A: StreamedPickle._int4,
    0x8A: StreamedPickle._long1,
    0x47: StreamedPickle._float,
    0x73: StreamedPickle._setitem,
    0x75: StreamedPickle._setitems,
    0x61: StreamedPickle._append,
    0x65: StreamedPickle._appends,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x74: StreamedPickle._tuple_of_mark,
}
_HANDLERS: list[Any] = [_BY_CODE.get(code) for code in range(256)]
