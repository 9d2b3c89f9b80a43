"""A pickle of plain values, read in one pass over a memory map: no code is run, and what a listener has taken is dropped.

``pickle.load`` of a 1 GB snapshot builds ten times its bytes in objects and would call whatever the file names. Here only
the opcodes that plain dicts, lists, tuples, strings and numbers need are known; any other one is refused with its offset.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from mmap import mmap
from typing import Any

from napkinmath.errors import InputError

Listener = Callable[[dict[Any, Any]], bool]
"""Called with every dict as soon as it is complete; True drops it."""
MAX_DEPTH = 10_000_000

_MARK = object()
_CODE = {
    b"c"[0]: "GLOBAL",
    b"\x93"[0]: "STACK_GLOBAL",
    b"R"[0]: "REDUCE",
    b"b"[0]: "BUILD",
    b"i"[0]: "INST",
    b"o"[0]: "OBJ",
    b"\x81"[0]: "NEWOBJ",
    b"\x92"[0]: "NEWOBJ_EX",
    b"P"[0]: "PERSID",
    b"Q"[0]: "BINPERSID",
    b"\x82"[0]: "EXT1",
    b"\x83"[0]: "EXT2",
    b"\x84"[0]: "EXT4",
}
# A list of nothing but references to earlier objects: the frames of a call stack seen before.
_REFERENCES = re.compile(rb"\](\x94|q.|r....)\(((?:h.|j....)+)e", re.DOTALL)
_REFERENCE = re.compile(rb"h(.)|j(....)", re.DOTALL)


class StreamedPickle:
    """One pass over ``data``: ``load()`` gives the value, after ``listener`` has seen and perhaps taken dicts out of it."""

    def __init__(self, data: bytes | mmap, name: str, listener: Listener | None = None) -> None:
        self._data, self._name, self._listener = data, name, listener
        self._memo: list[Any] = []
        self._lists: dict[bytes, list[Any]] = {}

    def load(self) -> Any:
        """The value; raises InputError naming the offset of what is corrupt, truncated or not plain."""
        stack: list[Any] = []
        position = 0
        data = self._data
        try:
            while True:
                code = data[position]
                handler = _HANDLERS[code]
                if handler is None:
                    if code == 0x2E:  # STOP
                        return stack.pop()
                    raise self._refusal(code, position)
                position = handler(self, data, position + 1, stack)
        except IndexError:
            raise InputError(
                f"{self._name} ends at offset {len(data)} in the middle of a value; it is truncated: record the snapshot again"
            ) from None
        except (struct.error, UnicodeDecodeError, TypeError, ValueError, AttributeError, KeyError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self._name} is corrupt at offset {position}: {error}; record the snapshot again") from None

    def _refusal(self, code: int, position: int) -> InputError:
        if code in _CODE:
            return InputError(
                f"{self._name} wants code run at offset {position} ({_CODE[code]}); a memory snapshot is plain data, so this file is refused"
            )
        return InputError(f"{self._name} has an unknown opcode 0x{code:02x} at offset {position}; it is no pickle of a memory snapshot")

    # Each handler takes (data, position after the opcode, stack) and gives the next opcode's position.

    def _skip_protocol(self, data: Any, at: int, stack: list[Any]) -> int:
        return at + 1

    def _skip_frame(self, data: Any, at: int, stack: list[Any]) -> int:
        return at + 8

    def _mark(self, data: Any, at: int, stack: list[Any]) -> int:
        stack.append(_MARK)
        return at

    def _memoize(self, data: Any, at: int, stack: list[Any]) -> int:
        self._memo.append(stack[-1])
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
        stack.append({})
        return at

    def _empty_list(self, data: Any, at: int, stack: list[Any]) -> int:
        found = _REFERENCES.match(data, at - 1)
        if found is None:
            stack.append([])
            return at
        body = found.group(2)
        value = self._lists.get(body)
        if value is None:
            value = self._lists[body] = [self._memo[m[0][0] if m[0] else int.from_bytes(m[1], "little")] for m in _REFERENCE.findall(body)]
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

    def _text(self, data: Any, at: int, stack: list[Any], width: int) -> int:
        start = at + width
        end = start + int.from_bytes(data[at:start], "little")
        if end > len(data):
            raise IndexError
        stack.append(data[start:end].decode("utf-8", "surrogatepass"))
        return end

    def _text1(self, data: Any, at: int, stack: list[Any]) -> int:
        return self._text(data, at, stack, 1)

    def _text4(self, data: Any, at: int, stack: list[Any]) -> int:
        return self._text(data, at, stack, 4)

    def _text8(self, data: Any, at: int, stack: list[Any]) -> int:
        return self._text(data, at, stack, 8)

    def _bytes(self, data: Any, at: int, stack: list[Any], width: int) -> int:
        start = at + width
        end = start + int.from_bytes(data[at:start], "little")
        if end > len(data):
            raise IndexError
        stack.append(bytes(data[start:end]))
        return end

    def _bytes1(self, data: Any, at: int, stack: list[Any]) -> int:
        return self._bytes(data, at, stack, 1)

    def _bytes4(self, data: Any, at: int, stack: list[Any]) -> int:
        return self._bytes(data, at, stack, 4)

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
        stack[-1][key] = value
        return at

    def _setitems(self, data: Any, at: int, stack: list[Any]) -> int:
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        target = stack[mark - 1]
        if type(target) is not dict:
            raise ValueError("items are set on what is no dict")
        target.update(zip(stack[mark + 1 :: 2], stack[mark + 2 :: 2], strict=True))
        del stack[mark:]
        if self._listener is not None and self._listener(target):
            target.clear()
        return at

    def _append(self, data: Any, at: int, stack: list[Any]) -> int:
        value = stack.pop()
        if value != {}:
            stack[-1].append(value)
        return at

    def _appends(self, data: Any, at: int, stack: list[Any]) -> int:
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        target = stack[mark - 1]
        if type(target) is not list:
            raise ValueError("items are appended to what is no list")
        target.extend(value for value in stack[mark + 1 :] if value != {})  # dropped dicts are empty
        del stack[mark:]
        return at

    def _tuple(self, stack: list[Any], count: int) -> None:
        if len(stack) < count:
            raise IndexError
        values = tuple(stack[-count:])
        del stack[-count:]
        stack.append(values)

    def _tuple1(self, data: Any, at: int, stack: list[Any]) -> int:
        self._tuple(stack, 1)
        return at

    def _tuple2(self, data: Any, at: int, stack: list[Any]) -> int:
        self._tuple(stack, 2)
        return at

    def _tuple3(self, data: Any, at: int, stack: list[Any]) -> int:
        self._tuple(stack, 3)
        return at

    def _tuple_of_mark(self, data: Any, at: int, stack: list[Any]) -> int:
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        values = tuple(stack[mark + 1 :])
        del stack[mark:]
        stack.append(values)
        return at


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
    0x8C: StreamedPickle._text1,
    0x58: StreamedPickle._text4,
    0x8D: StreamedPickle._text8,
    0x43: StreamedPickle._bytes1,
    0x42: StreamedPickle._bytes4,
    0x4B: StreamedPickle._int1,
    0x4D: StreamedPickle._int2,
    0x4A: StreamedPickle._int4,
    0x8A: StreamedPickle._long1,
    0x47: StreamedPickle._float,
    0x73: StreamedPickle._setitem,
    0x75: StreamedPickle._setitems,
    0x61: StreamedPickle._append,
    0x65: StreamedPickle._appends,
    0x85: StreamedPickle._tuple1,
    0x86: StreamedPickle._tuple2,
    0x87: StreamedPickle._tuple3,
    0x74: StreamedPickle._tuple_of_mark,
}
_HANDLERS: list[Any] = [_BY_CODE.get(code) for code in range(256)]
