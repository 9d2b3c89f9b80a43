"""Record: a frozen, slotted, keyword-only base class with the semantics of a dataclass and none of
its start-up cost.

`import dataclasses` takes 10 ms and each decorated class 0.3 ms, more than the whole estimate may
take; type checkers see an ordinary frozen keyword-only dataclass through `dataclass_transform`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, ClassVar, TypeVar

    from typing_extensions import Self, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_: object) -> Callable[[T], T]:
        return lambda cls: cls


_set = object.__setattr__


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=True)
class RecordMeta(type):
    """Turns a class body's annotated names into slots, and its assigned values into defaults."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> RecordMeta:
        own: dict[str, str] = namespace.get("__annotations__", {})
        fields: list[str] = [f for base in bases for f in getattr(base, "__record_fields__", ())]
        defaults: dict[str, Any] = {
            k: v for base in bases for k, v in getattr(base, "__record_defaults__", {}).items()
        }
        for field in own:
            if "ClassVar" in str(own[field]):
                continue
            if field not in fields:
                fields.append(field)
            if field in namespace:
                defaults[field] = namespace.pop(field)
        inherited = {f for base in bases for f in getattr(base, "__record_fields__", ())}
        namespace["__slots__"] = tuple(f for f in fields if f not in inherited)
        namespace["__record_fields__"] = tuple(fields)
        namespace["__record_defaults__"] = defaults
        namespace.setdefault("__match_args__", tuple(fields))
        return super().__new__(mcls, name, bases, namespace)


class Record(metaclass=RecordMeta):
    """Base of the nouns: subclass with annotated fields; override `validate` to reject bad
    combinations."""

    __record_fields__: ClassVar[tuple[str, ...]]
    __record_defaults__: ClassVar[dict[str, object]]

    def __init__(self, **values: Any) -> None:
        given, fields = self.__record_defaults__ | values, self.__record_fields__
        for field in fields:
            if field not in given:
                raise TypeError(f"{type(self).__name__} needs {field}=...")
            _set(self, field, given[field])
        if len(given) > len(fields):
            unknown = [repr(name) for name in given if name not in fields]
            raise TypeError(
                f"{type(self).__name__} has no field {', '.join(unknown)}; it has"
                f" {', '.join(fields)}"
            )
        self.validate()

    def validate(self) -> None:
        """Raises InputError where the fields contradict each other."""

    def replace(self, **changes: Any) -> Self:
        """The same record with some fields changed, validated again."""
        values = {f: getattr(self, f) for f in self.__record_fields__}
        values.update(changes)
        return type(self)(**values)

    def items(self) -> Iterator[tuple[str, Any]]:
        """(field, value) pairs in the order of declaration."""
        for field in self.__record_fields__:
            yield field, getattr(self, field)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; use .replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self is other or all(
            getattr(self, f) == getattr(other, f) for f in self.__record_fields__
        )

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, f) for f in self.__record_fields__)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{f}={v!r}' for f, v in self.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self.items()))


def _restore(cls: type[Any], values: dict[str, Any]) -> Any:
    return cls(**values)
