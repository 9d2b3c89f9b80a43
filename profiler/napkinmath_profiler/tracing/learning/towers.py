"""Learns the towers of a joint model: the weights beside its text model as data, with sizes of the
config as symbols. A batch of text runs none of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from napkinmath.base.progress import counted
from napkinmath.models.tasks import CAUSAL
from torch import nn

from napkinmath_profiler.tracing.learning.config_fields import full_config
from napkinmath_profiler.tracing.learning.layer_fields import IGNORED, LAYER_FIELDS, shortened
from napkinmath_profiler.tracing.learning.rows import Shape
from napkinmath_profiler.tracing.learning.symbols import Fitting, joined
from napkinmath_profiler.tracing.learning.weight_rows import Landmarks, WeightRows
from napkinmath_profiler.tracing.meta_model import build_model, config_from
from napkinmath_profiler.tracing.observation import installed_versions
from napkinmath_profiler.tracing.trace_errors import TraceError

TEXT = "text_config"
COUNT_MOST = 16  # layers of a tower while it is learned
Outline = list[list[Any]]
"""[path, copies, rows] of each list of equal modules, and of what is in none."""


class _TowerFitting(Fitting):
    """Sizes that are a product and one more, or a product and a size: a class token beside the
    patches, queries of all heads beside keys and values of some. `grids`: a name -> the letters of
    an image's side and a patch's, whose square of whole patches it is."""

    def __init__(
        self, samples: Sequence[Mapping[str, int]], grids: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__(samples)
        self.grids = grids

    def _found(self, numbers: tuple[int, ...]) -> str | int:
        samples = list(self.samples)
        for name, (side, patch) in self.grids.items():
            more = {n - (x[side] // x[patch]) ** 2 for n, x in zip(numbers, samples, strict=True)}
            if len(set(numbers)) > 1 and more <= {0, 1} and len(more) == 1:
                return name + "+1" * more.pop()
        try:
            return super()._found(numbers)
        except TraceError:
            for name in ("1", *samples[0]):
                less = [n - x.get(name, 1) for x, n in zip(samples, numbers, strict=True)]
                found = self._one_term(less, samples) if min(less) > 0 else None
                if found is not None:
                    return f"{found}+{name}"
            raise


def learn_towers(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The towers of a joint config's class, and those with each switch that changes them turned;
    raises TraceError with what they cannot be said by."""
    whole = full_config({**config, "architectures": config.get("architectures") or []})
    first = _form(whole)
    found = [first]
    for field, (value,) in first["must"].items():
        if isinstance(value, bool):
            try:
                found.append(_form(with_field(whole, field, not value)))
            except Exception:  # whatever its class raises of the turned switch
                continue
    return found


def shortened_towers(whole: Mapping[str, Any]) -> dict[str, Any]:
    """A joint config with few layers of text and of towers."""
    return _short(whole, TEXT if isinstance(whole.get(TEXT), dict) else "")


def _form(whole: Mapping[str, Any]) -> dict[str, Any]:
    nested = TEXT if isinstance(whole.get(TEXT), dict) else ""
    short = _short(whole, nested)
    base = outline(short, nested)
    if not any(rows for _, _, rows in base):
        raise TraceError("it has no weights beside its text model")
    moves, must = _examined(short, base, nested)
    letters = {field: f"x{number}" for number, field in enumerate(moves)}
    towers, grids = None, _grids(letters, moves)
    while towers is None:
        samples = _samples(short, moves, nested)
        bound = [{letters[f]: v for f, v in values.items()} for values, _ in samples]
        try:
            towers = joined([made for _, made in samples], _TowerFitting(bound, grids))
        except TraceError:
            field = _unsaid(short, moves, nested, {f for f in moves if _in_grid(letters[f], grids)})
            must[field] = [at(short, field)]
            del moves[field]
            grids = _grids(letters, moves)
    used = _used(towers)
    read = used | {letter for name in grids if name in used for letter in grids[name]}
    default = full_config({"model_type": whole["model_type"]})
    return {
        "model_type": str(whole["model_type"]),
        "versions": {"transformers": installed_versions()["transformers"]},
        "text": nested,
        "text_type": "",
        "loss": "shared",
        "text_path": text_path(config_model(short)),
        "symbols": {field: letters[field] for field in moves if letters[field] in read},
        "grids": {name: pair for name, pair in grids.items() if name in used},
        "must": must,
        "defaults": {field: at(default, field) for field in (*moves, *must)},
        "aliases": _aliases(config_from(copy.deepcopy(short))),
        "towers": towers,
    }


def config_model(config: Mapping[str, Any]) -> nn.Module:
    """The class of a config, without storage."""
    return build_model(
        config_from(copy.deepcopy(dict(config))), dtype="bf16", attn_implementation="eager"
    )


def text_path(model: Any) -> str:
    """Where the text model is in the module tree."""
    embedding = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embedding)
    return path.rpartition(".")[0]


def outline(config: Mapping[str, Any], nested: str) -> Outline:
    """The weights beside the text model, equal modules of a list once."""
    model: Any = config_model(config)
    text = [model.get_submodule(text_path(model))] if nested else _text_modules(model)
    inside = {id(x) for one in (*text, model.get_output_embeddings()) for x in _own_tensors(one)}
    rows = WeightRows(model, Landmarks("", "", CAUSAL))
    lists = {path: module for path, module in model.named_modules() if _repeats(module)}
    stacks = [p for p in lists if not any(p.startswith(f"{outer}.") for outer in lists)]
    found: dict[str, list[list[Any]]] = {}
    for name, tensor in rows.weights():
        if id(tensor) in inside:
            continue
        stack = next((path for path in stacks if name.startswith(f"{path}.")), "")
        number, _, rest = (
            name.removeprefix(f"{stack}.").partition(".") if stack else ("0", "", name)
        )
        if number == "0":
            found.setdefault(stack, []).append(rows.row(name, rest, tensor))
    return [[p, Shape((len(lists[p]) if p else 1,)), made] for p, made in found.items()]


def _own_tensors(module: Any) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _text_modules(model: Any) -> list[nn.Module]:
    """A text model that is no module of its own: embedding, layers, norm and rotary tables."""
    inner = model.get_submodule(text_path(model))
    return [inner.get_submodule(name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")]


def _repeats(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
        return False
    told = [
        [(name, tuple(x.shape), x.dtype) for name, x in layer.state_dict(keep_vars=True).items()]
        for layer in module
    ]
    return bool(told[0]) and all(one == told[0] for one in told) and len({*map(type, module)}) == 1


def fields_of(config: Mapping[str, Any], nested: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field of a joint config; of its text the sizes that others may
    follow."""
    for name, value in config.items():
        dotted = f"{path}{name}"
        if path and name == "model_type":
            yield dotted, value
        if name in IGNORED or name.endswith(("_token_id", "_token_index")):
            continue
        if dotted == nested and isinstance(value, dict):
            yield from ((f"{dotted}.{n}", value.get(n)) for n in ("hidden_size", "vocab_size"))
        elif isinstance(value, dict) and "model_type" in value:
            yield from fields_of(value, nested, f"{dotted}.")
        elif not isinstance(value, dict):
            yield dotted, value


def at(config: Mapping[str, Any], dotted: str) -> Any:
    """A field by its dotted name."""
    found: Any = config
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def with_field(config: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """The config with another value of a field."""
    name, _, rest = dotted.partition(".")
    return {**config, name: with_field(config[name], rest, value) if rest else value}


def _short(whole: Mapping[str, Any], nested: str) -> dict[str, Any]:
    """The config with two layers of text."""
    found = dict(whole)
    if nested:
        found[nested] = shortened(found[nested])
    for name, value in whole.items():
        if name == nested or not isinstance(value, dict):
            continue
        for count in LAYER_FIELDS:
            number = value.get(count)
            if isinstance(number, int) and number > COUNT_MOST:
                found = _if_it_builds(found, f"{name}.{count}", 4, nested)
    return found


def _if_it_builds(config: dict[str, Any], field: str, value: int, nested: str) -> dict[str, Any]:
    changed = with_field(config, field, value)
    return config if _tried(changed, nested) is None else changed


def _examined(
    short: Mapping[str, Any], base: Outline, nested: str
) -> tuple[dict[str, tuple[int, int, int]], dict[str, list[Any]]]:
    """Sizes with two further values each at which the towers have the same weights, and fields
    under whose own value alone they are known."""
    moves: dict[str, tuple[int, int, int]] = {}
    must: dict[str, list[Any]] = {}
    fields = list(fields_of(short, nested))
    for name, value in counted(fields, "fields of its config", len(fields)):
        if name.endswith("model_type"):
            must[name] = [value]
        elif isinstance(value, bool) or value is None or isinstance(value, (str, list)):
            others: list[Any] = [not value] if isinstance(value, bool) else []
            others = [[*value, *value[-1:]], value[:-1]] if isinstance(value, list) else others
            others = [64, True] if value is None else others
            made = [_tried(with_field(short, name, other), nested) for other in others]
            if any(one is not None and one != base for one in made):
                must[name] = [value]
        elif isinstance(value, int):
            seen = list[int]()
            for other in _others(value):
                one = _tried(with_field(short, name, other), nested)
                if one is None:
                    continue
                if one == base:
                    break
                if _bare(one) == _bare(base):
                    seen.append(other)
            else:
                if seen:
                    moves[name] = (value, seen[0], seen[-1])
                else:
                    must[name] = [value]
    return moves, must


def _others(value: int) -> tuple[int, ...]:
    """Other values of a size: those that divide what it divides."""
    other = value // 2 if value > 1 and value % 2 == 0 else 3 * value
    return (2 * value, other) if value > 0 else (1,)


def _bare(made: Outline) -> list[Any]:
    return [[path, [(*row[:4], len(row[4])) for row in rows]] for path, _, rows in made]


def _tried(config: Mapping[str, Any], nested: str) -> Outline | None:
    try:
        return outline(config, nested)
    except Exception:  # whatever a class raises of a value that it does not take
        return None


def _samples(
    short: Mapping[str, Any], moves: Mapping[str, tuple[int, int, int]], nested: str
) -> list[tuple[dict[str, int], Outline]]:
    """The base, each size moved alone by both values, and all that go together."""
    plain = {field: values[0] for field, values in moves.items()}
    changes: list[dict[str, int]] = [{}]
    changes += [{field: values[1]} for field, values in moves.items()]
    changes += [{f: v[2]} for f, v in moves.items() if v[2] != v[1]]
    pairs = itertools.pairwise(moves)
    changes += [{one: moves[one][1], two: moves[two][1]} for one, two in pairs]
    found: list[tuple[dict[str, int], Outline]] = []
    for changed in changes:
        made: Mapping[str, Any] = short
        for field, value in changed.items():
            made = with_field(made, field, value)
        weights = _tried(made, nested)
        if weights is not None:
            found.append(({**plain, **changed}, weights))
    return found


def _unsaid(
    short: Mapping[str, Any],
    moves: Mapping[str, tuple[int, int, int]],
    nested: str,
    in_grids: set[str],
) -> str:
    """A field whose own moves follow no rule, or the first where each does; those of a grid last,
    which move together."""
    unsaid = list[str]()
    for field in moves:
        samples = _samples(short, {field: moves[field]}, nested)
        bound = [{"x": values[field]} for values, _ in samples]
        try:
            joined([made for _, made in samples], _TowerFitting(bound, {}))
        except TraceError:
            unsaid.append(field)
    return min(unsaid or moves, key=lambda field: field in in_grids)


def _grids(letters: Mapping[str, str], moves: Mapping[str, Any]) -> dict[str, list[str]]:
    """Squares of patches that an image is cut into, by the letters of both sizes."""
    pairs = [
        (f, f.removesuffix("image_size") + "patch_size") for f in moves if f.endswith("image_size")
    ]
    known = [(f, patch) for f, patch in pairs if patch in moves]
    return {f"g{n}": [letters[f], letters[patch]] for n, (f, patch) in enumerate(known)}


def _in_grid(letter: str, grids: Mapping[str, Sequence[str]]) -> bool:
    return any(letter in pair for pair in grids.values())


def _used(node: Any) -> set[str]:
    if isinstance(node, str):
        pieces = node.replace("+", "*").replace("-", "*").replace("//", "*").split("*")
        return {piece for piece in pieces if piece[:1] in "xg" and piece[1:].isdecimal()}
    if isinstance(node, list):
        return set().union(*map(_used, node)) if node else set()
    return set()


def _aliases(config: Any, path: str = "") -> dict[str, str]:
    """Other names of fields (attribute_map), dotted."""
    found = {f"{path}{k}": f"{path}{v}" for k, v in type(config).attribute_map.items()}
    for name in type(config).sub_configs:
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "attribute_map"):
            found |= _aliases(inner, f"{path}{name}.")
    return found
