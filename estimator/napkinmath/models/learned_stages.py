"""Learned models whose layers stand in stages of different widths, as Swin's and SegFormer's do:
entries of a config's lists are sizes of their own, and a piece of the form runs between two stages."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.model_spec import Stage
from napkinmath.models.families.config import runs
from napkinmath.models.layers.learned_parts import LearnedPart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from napkinmath.models.families.config import Config

STAGE_RESULT = "result of stage"
"""Begins the name of what a stage returns, which the loop over stages holds until the next one has
returned its own."""
DEPTHS = "depths"
"""The field that lists how many layers each stage has."""


def entries(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A config whose lists of `count` numbers are a field for each entry ('hidden_sizes.0')."""
    found: dict[str, Any] = {}
    for name, values in config.items():
        if isinstance(values, list) and len(values) == count and all(map(_is_number, values)):  # pyright: ignore[reportUnknownArgumentType]
            found |= {f"{name}.{i}": value for i, value in enumerate(values)}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        else:
            found[name] = values
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def with_stages(form: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with an entry for each stage of a form; raises InputError for another number of
    stages."""
    count = len(form["stages"])
    depths: Any = config.get(DEPTHS)
    if isinstance(depths, list) and len(depths) != count:  # pyright: ignore[reportUnknownArgumentType]
        raise InputError(
            f"model_type {form['model_type']!r} was learned with {count} stages, not with"
            f" {DEPTHS}={depths}; run `estimate learn` on this config"
        )
    return entries(config, count)


def depth_of(form: Mapping[str, Any], c: Config, number: int) -> int:
    """How many layers a stage has."""
    field = f"{DEPTHS}.{number}"
    return c.size(field, form["defaults"].get(field))


def staged(
    form: Mapping[str, Any], c: Config, digest: str, is_checkpointed: Callable[[int], bool]
) -> list[Stage]:
    """The layers of every stage, and what runs between two."""
    found: list[Stage] = []
    for number, rule in enumerate(form["stages"]):
        if number:
            between = LearnedPart(digest=digest, piece=f"between {number - 1}")
            found.append(Stage(part=between, closes=(f"{STAGE_RESULT} {number - 2}",)))
        layers = [
            Stage(
                part=LearnedPart(digest=digest, piece=str(kind)),
                path=rule["path"],
                checkpointed=is_checkpointed(kind),
            )
            for kind in _kinds(rule["kinds"], depth_of(form, c, number), rule["count"])
        ]
        found += layers if form.get("carries") else runs(layers)
    return found


def _kinds(known: Sequence[int], depth: int, field: str) -> list[int]:
    """The kind of each layer: of the first, of odd and of even ones, and of a last that was seen at
    an odd place alone."""
    first, odd, even, *last = known
    kinds = [first, *((odd if i % 2 else even) for i in range(1, depth))]
    if last and depth % 2:
        raise InputError(
            f"config field {field}={depth} was learned as an even number; run `estimate learn` on"
            " this config"
        )
    return [*kinds[:-1], *last] if last else kinds
