"""Config: a config.json read field by field, each bad value refused by name."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.values import whole
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.layers.activations import ACTIVATIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_EXTENT = 1 << 31
MAX_LAYERS = 10_000
"""Families make a part for each layer before they merge equal ones."""


class Config:
    """Typed access to a config's fields with transformers' defaults given by the family."""

    def __init__(self, values: Mapping[str, object], name: str, source: str = "") -> None:
        self.values, self.name, self.source = values, name, source

    def __contains__(self, field: str) -> bool:
        return self.values.get(field) is not None

    def size(
        self, field: str, default: int | None = None, *, low: int = 1, high: int | None = None
    ) -> int:
        """A whole number of at least `low`, at most `high`."""
        value = self.values.get(field)
        if value is None:
            if default is None:
                raise InputError(
                    f"config of {shown(self.name)} lacks {field!r}; add it, or use a complete"
                    " config.json"
                )
            return default
        found = whole(value)
        if found is None:
            raise InputError(f"config field {field}={shown(value)} is not a whole number")
        counts_layers = ("layer" in field and "per_layer" not in field) or field == "depth"
        high = high or (MAX_LAYERS if counts_layers else MAX_EXTENT)
        if not low <= found <= high:
            raise InputError(
                f"config field {field}={shown(value)} is out of range; it must be from {low} to"
                f" {high}"
            )
        return found

    def whole(self, field: str, default: int) -> int:
        """A whole number that may be negative (an index from the end)."""
        value = self.values.get(field)
        if value is None:
            return default
        found = whole(value)
        if found is None or abs(found) > MAX_EXTENT:
            raise InputError(f"config field {field}={shown(value)} is not a whole number")
        return found

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"config field {field}={shown(value)} is not true or false")
        return value

    def text(self, field: str, default: str) -> str:
        """A string."""
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise InputError(f"config field {field}={shown(value)} is not a string")
        return value

    def number(self, field: str, default: float) -> float:
        """A finite number."""
        value = self.values.get(field)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not -1e300 < value < 1e300
        ):
            raise InputError(f"config field {field}={shown(value)} is not a number")
        return float(value)

    def number_or_none(self, field: str, default: float) -> float | None:
        """A finite number; None where the field is null, which switches off what it sets."""
        switched_off = field in self.values and self.values[field] is None
        return None if switched_off else self.number(field, default)

    def names(self, field: str) -> tuple[str, ...]:
        """A list of strings; empty where absent."""
        found = [item for item in self.listed(field) if isinstance(item, str)]
        if len(found) != len(self.listed(field)):
            raise InputError(
                f"config field {field}={shown(self.values[field])} is not a list of strings"
            )
        return tuple(found)

    def listed(self, field: str) -> list[object]:
        """The entries of a list, none where it is absent."""
        value = self.values.get(field)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise InputError(f"config field {field}={shown(value)} is not a list")
        return list(value)  # type: ignore[reportUnknownArgumentType]

    def sizes(self, field: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0; empty where absent."""
        items = [whole(item) for item in self.listed(field)]
        found = [item for item in items if item is not None and 0 <= item <= MAX_EXTENT]
        if len(found) != len(self.listed(field)):
            raise InputError(
                f"config field {field}={shown(self.values[field])} is not a list of whole numbers"
            )
        return tuple(found)

    def nested(self, field: str) -> Config:
        """A sub-config such as text_config."""
        value = self.values.get(field)
        if not isinstance(value, dict):
            raise InputError(f"config of {shown(self.name)} lacks the nested config {field!r}")
        return Config(value, f"{self.name}.{field}", self.source)  # type: ignore[reportUnknownArgumentType]

    def divides(self, field: str, divisor: str, value: int, by: int) -> None:
        """Raises unless `by` divides `value`."""
        if value % by:
            raise InputError(
                f"{field}={value} is not divisible by {divisor}={by}; change one of them"
            )

    def activation(self, field: str, default: str) -> str:
        """The name of an activation function that the layers know."""
        return self.known_activation(field, self.text(field, default))

    def known_activation(self, field: str, name: str) -> str:
        """The activation that a field names, if the layers know it."""
        if name not in ACTIVATIONS:
            raise InputError(
                f"config field {field}={shown(self.values.get(field))} is not a known activation;"
                f" known: {', '.join(sorted(ACTIVATIONS))}"
            )
        return name

    def probability(self, field: str, default: float = 0.0) -> float:
        """A dropout probability."""
        value = self.number(field, default)
        if not 0 <= value < 1:
            raise InputError(
                f"config field {field}={shown(value)} is not a probability; use 0 <= p < 1"
            )
        return value

    def layer_names(self, field: str, layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
        """What each layer is, of the kinds that are known; empty where absent."""
        found = self.names(field)
        unknown = [name for name in found if name not in known]
        if unknown:
            raise InputError(
                f"config field {field} has {shown(unknown[0])}; this family knows"
                f" {' and '.join(known)}"
            )
        if found:
            self.same_length(field, len(found), layers)
        return found

    def layer_sizes(self, field: str, layers: int) -> tuple[int, ...]:
        """A whole number of each layer; empty where absent."""
        found = self.sizes(field)
        if found:
            self.same_length(field, len(found), layers)
        return found

    def layer_indices(self, field: str, layers: int, default: Iterable[int] = ()) -> set[int]:
        """The layers that a field numbers from 0; the default where it is absent."""
        if field not in self:
            return set(default)
        found = set(self.sizes(field))
        if found and max(found) >= layers:
            raise InputError(
                f"config field {field} names layer {max(found)} but the model has {layers} layers,"
                " counted from 0; make them agree"
            )
        return found

    def sliding_layers(self, count: int, default: list[bool]) -> list[bool]:
        """Which layers see a window only, from `layer_types`."""
        if "layer_types" not in self:
            return default
        types = self.layer_names("layer_types", count, ("full_attention", "sliding_attention"))
        return [name == "sliding_attention" for name in types]

    def rotated(self, head_size: int, default: float = 1.0) -> int:
        """How many elements of each head are rotated, from `partial_rotary_factor`, at the top or
        in `rope_parameters`."""
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(self.values.get(name), dict):
                default = self.nested(name).number("partial_rotary_factor", default)
        fraction = self.number("partial_rotary_factor", default)
        if not 0 < fraction <= 1:
            raise InputError(
                f"config field partial_rotary_factor={shown(fraction)} is out of range; use more"
                " than 0 and at most 1"
            )
        return int(head_size * fraction)

    def renamed(self, names: dict[str, str]) -> Config:
        """The same config with a family's own field names replaced by the usual ones, which win
        where both are given."""
        values = dict(self.values)
        for own, usual in names.items():
            if own in values and values.get(usual) is None:
                values[usual] = values[own]
        return Config(values, self.name, self.source)

    def same_length(self, field: str, length: int, layers: int) -> None:
        """Raises unless a list has an entry for every layer."""
        if length != layers:
            raise InputError(
                f"config field {field} has {length} entries but the model has {layers} layers; make"
                " them agree"
            )

    def num_labels(self, default: int = 2) -> int:
        """Classes of a classification head: num_labels, or as many as id2label names."""
        named = self.nested("id2label").values if self.values.get("id2label") else ()
        return self.size("num_labels", len(named) or default)

    def spec(self, stages: tuple[Stage, ...], symbols: dict[str, int], *, family: str) -> ModelSpec:
        """The finished ModelSpec."""
        return ModelSpec(
            name=self.name,
            family=family,
            stages=stages,
            symbols=tuple(symbols.items()),
            positions=whole(self.values.get("max_position_embeddings")) or 0,
            source=self.source,
        )


def pads(c: Config, default: bool = False) -> bool:
    """Whether the token embedding has a padding index."""
    return c.values["pad_token_id"] is not None if "pad_token_id" in c.values else default


def runs(parts: list[Stage]) -> tuple[Stage, ...]:
    """Neighbouring equal layers merged into one stage with a count."""
    merged: list[tuple[Stage, int]] = []
    for stage in parts:
        one = stage if stage.count == 1 else stage.replace(count=1)
        if merged and merged[-1][0] == one:
            merged[-1] = merged[-1][0], merged[-1][1] + stage.count
        else:
            merged.append((one, stage.count))
    return tuple(one if count == 1 else one.replace(count=count) for one, count in merged)
