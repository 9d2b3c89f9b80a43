"""Joint models on text: the text model by its own family, the weights of the towers beside it by
data that was learned from the class."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Bindings
from napkinmath.catalog.learned_towers import towers_of
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families import read_config
from napkinmath.models.families.config import Config
from napkinmath.models.families.remote_code import OWN_LOSS
from napkinmath.models.families.vision_language import joined, text_spec
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.idle import IdleLinear, IdleModule, IdleWeight
from napkinmath.models.layers.learned_sizes import size_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


OWN: dict[str, Any] = {"shared_loss_since": OWN_LOSS, "own_loss_shifts": True}
# whose loss it is: transformers' for all, or the class's own over logits as they are or in fp32
LOSSES: dict[str, dict[str, Any]] = {
    "shared": {},
    "own": {**OWN, "own_loss_upcasts": False},
    "own in fp32": OWN,
}


def on_text(c: Config) -> ModelSpec:
    """The model of a joint config whose towers were learned; raises InputError naming the field
    under whose value they were not."""
    kind = str(c.values["model_type"])
    forms = towers_of(kind)
    reasons = [_mismatch(form, _flat(c, form)) for form in forms]
    if all(reasons):
        raise InputError(f"towers of {kind} are not known with {reasons[0]}; use `estimate trace`")
    form = forms[reasons.index("")]
    values = _flat(c, form)
    bound = {x: _whole(field, values[field]) for field, x in form["symbols"].items()}
    grids = {g: (bound[side] // bound[patch]) ** 2 for g, (side, patch) in form["grids"].items()}
    sizes = Bindings(bound | grids)
    if form["text"]:
        text = text_spec(c, form["text_type"])
    else:
        own = {**c.values, "model_type": form["text_type"]}
        text = read_config(own, name=c.name, source=c.source)
    towers = [_stage(path, int(sizes(size_of(count[0]))), rows, sizes)
              for path, count, rows in form["towers"]]  # fmt: skip
    spec = joined(c, towers, text, kind, text_path=form["text_path"], idle=True)
    return _with_own_loss(spec, **LOSSES[form["loss"]])


def _with_own_loss(spec: ModelSpec, **how: Any) -> ModelSpec:
    *stages, last = spec.stages
    if not how or not isinstance(last.part, CausalLmHead):
        return spec
    return spec.replace(stages=(*stages, last.replace(part=last.part.replace(**how))))


def _mismatch(form: Mapping[str, Any], values: Mapping[str, object]) -> str:
    """The first field under whose value the towers were not seen; '' where the form holds."""
    for field, seen in form["must"].items():
        if values[field] not in seen:
            known = ", ".join(map(shown, seen))
            return f"{field}={shown(values[field])} (seen: {known})"
    return ""


def _whole(field: str, value: object) -> int:
    name = field.rpartition(".")[2]
    return Config({name: value}, field).size(name, low=0)


def _flat(c: Config, form: Mapping[str, Any]) -> dict[str, object]:
    """Each field that the towers follow: as the config has it under any of its names, else the
    class's default."""
    others: dict[str, list[str]] = {}
    for other, name in form["aliases"].items():
        others.setdefault(name, []).append(other)
    found: dict[str, object] = {}
    for field, default in form["defaults"].items():
        given = [at(c.values, name) for name in (field, *others.get(field, ()))]
        found[field] = next((value for value in given if value is not None), default)
    return found


def at(values: Mapping[str, object], dotted: str) -> object:
    """A field by its dotted name, None where it is absent."""
    name, _, rest = dotted.partition(".")
    found = values.get(name)
    if not rest:
        return found
    return at(found, rest) if isinstance(found, dict) else None  # type: ignore[reportUnknownArgumentType]


def _stage(path: str, count: int, rows: Sequence[Sequence[Any]], sizes: Bindings) -> Stage:
    """Copies of one module; a bias goes with its linear."""
    linears: dict[str, IdleLinear] = {}
    weights: list[IdleWeight] = []
    for name, kind, dtype, buffer, axes in rows:
        extents = tuple(int(sizes(size_of(axis))) for axis in axes)
        owner, _, leaf = name.rpartition(".")
        if kind.startswith("linear") and leaf == "weight" and len(extents) == 2:
            linears[owner] = IdleLinear(name=owner, outputs=extents[0], inputs=extents[1])
        elif leaf == "bias" and owner in linears:
            linears[owner] = linears[owner].replace(bias=True)
        else:
            weights.append(
                IdleWeight(name=name, axes=extents, kind=kind, buffer=bool(buffer), dtype=dtype)
            )
    part = IdleModule(linears=tuple(linears.values()), weights=tuple(weights))
    return Stage(part=part, path=path, count=count, modality="idle")
