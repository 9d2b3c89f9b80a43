"""Order: what runs after what, with repetitions as counts: a micro-step that comes a million times
is one row."""

from __future__ import annotations

from bisect import bisect_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any, Generic, TypeVar, overload

    T = TypeVar("T")

    class _Of(Generic[T]):
        pass
else:

    class _Of:
        def __class_getitem__(cls, _: object) -> type:
            return cls


class Order(_Of["T"]):
    """A sequence written as rows of items, each row some times in a row.

    It is indexed, sliced and gone through as if it were spelled out. Whoever adds something up goes
    through `rows` or `placed()`, whose length does not depend on the counts.
    """

    __slots__ = ("_ends", "rows")

    def __init__(self, rows: Iterable[tuple[int, Sequence[T]]]) -> None:
        self.rows: list[tuple[int, Sequence[T]]] = []
        self._ends: list[int] = []
        end = 0
        for times, items in rows:
            if times > 0 and items:
                end += times * len(items)
                self.rows.append((times, items))
                self._ends.append(end)

    def placed(self) -> Iterator[tuple[int, int, Sequence[T]]]:
        """(index of its first item, times, items) of every row."""
        start = 0
        for (times, items), end in zip(self.rows, self._ends, strict=True):
            yield start, times, items
            start = end

    def counted(self) -> Iterator[tuple[int, T]]:
        """(times, item) of every item of every row."""
        for times, items in self.rows:
            for item in items:
                yield times, item

    def place(self, index: int) -> tuple[int, int, int]:
        """(row, time, position in the row) of an index from 0 on."""
        row = bisect_right(self._ends, index)
        start = self._ends[row - 1] if row else 0
        time, position = divmod(index - start, len(self.rows[row][1]))
        return row, time, position

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[T]:
        for times, items in self.rows:
            for _ in range(times):
                yield from items

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, index: int) -> T: ...
        @overload
        def __getitem__(self, index: slice) -> Order[T]: ...
        def __getitem__(self, index: Any) -> Any: ...

    else:

        def __getitem__(self, index):
            if isinstance(index, slice):
                start, stop, _ = index.indices(len(self))
                return Order(self._cut(start, stop))
            length = len(self)
            if not -length <= index < length:
                raise IndexError(f"{index} of an order of {length}")
            row, _, position = self.place(index % length)
            return self.rows[row][1][position]

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, Sequence[T]]]:
        """The rows between two indices; rows that the cut goes through are taken apart."""
        for at, times, items in self.placed():
            length = len(items)
            first, last = max(start - at, 0), min(stop - at, times * length)
            if first >= last:
                continue
            begun, ended = -(-first // length), last // length  # whole times
            if ended < begun:
                yield 1, items[first % length : last % length]
                continue
            yield 1, items[first % length :] if first % length else ()
            yield ended - begun, items
            yield 1, items[: last % length]
