"""The family of learned architectures: data of a traced forward becomes a ModelSpec, whose parts
record the library's operations one by one."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Bindings
from napkinmath.base.values import whole
from napkinmath.catalog.learned_forms import forms_of
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.config import Config, runs
from napkinmath.models.image_models import VISION, derived_sizes
from napkinmath.models.layers.learned_parts import (
    LearnedEntrance,
    LearnedExit,
    LearnedHead,
    LearnedPart,
    keep_form,
)
from napkinmath.models.layers.learned_replay import CARRIED, ENCODED
from napkinmath.models.layers.learned_sizes import size_of
from napkinmath.models.learned_stages import depth_of, staged, with_stages
from napkinmath.models.tasks import CAUSAL, LABELLED, MASKED, named_task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

ENCODER, DECODER = "", "decoder "
"""What a form's fields of the layers begin with: of the only stack, or of the first, and of the
second."""
LABELS = "num_labels"
"""A size that configs say by the names of the labels."""


def read_learned(config: Mapping[str, object], *, name: str, source: str = "") -> ModelSpec:
    """The model of a config whose type was learned; raises InputError naming the field under which
    none of its forms was seen."""
    c = Config(config, name, source)
    kind = str(config["model_type"])
    forms = forms_of(kind)
    tasks = dict.fromkeys(str(form["task"]) for form in forms)
    own = MASKED if MASKED in tasks else next(iter(tasks))
    named = c.names("architectures")
    task = named_task(named[0], own) if named else own
    if task in tasks:
        return _first_that_holds([form for form in forms if form["task"] == task], c)
    if CAUSAL in tasks and task in LABELLED and MASKED not in tasks:
        return _first_that_holds([form for form in forms if form["task"] == CAUSAL], c)
    raise InputError(
        f"the learned form of {shown(kind)} is of {' and '.join(tasks)}, not of"
        f" {shown(named[0])}; use `estimate trace`, or --task {own}"
    )


def _first_that_holds(forms: Sequence[Mapping[str, Any]], c: Config) -> ModelSpec:
    reasons: list[str] = []
    for form in forms:
        c = _renamed(form, c)
        reason = _mismatch(form, c.values)
        if not reason:
            return _under_named_task(form, c)
        reasons.append(reason)
    raise InputError(
        f"model_type {shown(c.values['model_type'])} was learned, but not with {reasons[0]}; run"
        " `estimate learn` on this config"
    )


def spec_of(form: Mapping[str, Any], config: Mapping[str, object], *, name: str) -> ModelSpec:
    """The model of a config by this form; raises InputError where it was not learned under its
    fields."""
    c = _renamed(form, Config(config, name))
    reason = _mismatch(form, c.values)
    if reason:
        raise InputError(f"the form of {form['model_type']} was not learned with {reason}")
    return _under_named_task(form, c)


def _renamed(form: Mapping[str, Any], c: Config) -> Config:
    """The config with its class's own names for fields that have others too (attribute_map)."""
    aliases: Mapping[str, str] = form["aliases"]
    c = _flat(form, c)
    others = {aliases[k]: v for k, v in c.values.items() if aliases.get(k, k) not in c.values}
    return Config({**c.values, **others}, c.name, c.source) if others else c


def _flat(form: Mapping[str, Any], c: Config) -> Config:
    """The config with fields of its vision config by dotted names, where the form has such."""
    if "stages" in form:
        return Config(with_stages(form, c.values), c.name, c.source)
    vision: Any = c.values.get("vision_config")
    if not isinstance(vision, dict) or not any("." in name for name in form["symbols"]):
        return c
    dotted: dict[str, Any] = {f"{VISION}{name}": vision[name] for name in map(str, vision)}  # pyright: ignore[reportUnknownArgumentType]
    return Config({**c.values, **dotted}, c.name, c.source)


def _under_named_task(form: Mapping[str, Any], c: Config) -> ModelSpec:
    """The model of a form; of a causal one also under the head that the architecture's name says."""
    spec, named = _spec(form, c), c.names("architectures")
    task = named_task(named[0], form["task"]) if named else form["task"]
    if task == form["task"]:
        return spec
    from napkinmath.models.other_heads import under_task

    return under_task(spec, c, task, form["classes"])


def _mismatch(form: Mapping[str, Any], config: Mapping[str, object]) -> str:
    """The first field whose value the form was not learned under; '' where it holds."""
    defaults: Mapping[str, object] = form["defaults"]
    for field, values in form["must"].items():
        found = (
            rope_type(config) if field == "rope_type" else config.get(field, defaults.get(field))
        )
        if found not in values:
            known = ", ".join(shown(value) for value in values)
            return f"{field}={shown(found)} (seen: {known})"
    if LABELS in form["symbols"] and _labels(form, config) == 1:
        return f"{LABELS}=1 (seen: 2 and more)"
    for field in (*form["symbols"], *form["ties"]):
        if field in config and config[field] is None and field not in form["null_is_default"]:
            return f"{field}=null"
    for field, nonzero in form["nonzero"].items():
        if bool(config.get(field, defaults.get(field))) != nonzero:
            seen = "other than 0" if nonzero else "0"
            return f"{field}={shown(config.get(field, defaults.get(field)))} (seen: {seen})"
    for one, other in form["unequal"]:
        size = config.get(one, defaults.get(one))
        if size == config.get(other, defaults.get(other)):
            return f"{one}={other}={size} (seen: sizes that differ)"
    return _untied(form, Config(config, str(form["model_type"])))


def _labels(form: Mapping[str, Any], config: Mapping[str, object]) -> int:
    """Labels of a classifier; one alone is a number to regress, of which the loss is another."""
    return Config(config, str(form["model_type"])).num_labels()


def _untied(form: Mapping[str, Any], c: Config) -> str:
    """A field with another value than the one that follows from other sizes; '' where none has."""
    if not form["ties"]:
        return ""
    symbols = Bindings(_symbols(form, c))
    for field, rule in form["ties"].items():
        given = c.values.get(field)
        default = form["defaults"].get(field)
        found = given if given is not None else default and symbols(size_of(default))
        if found != symbols(size_of(rule)):
            return f"{field}={shown(found)} (seen: what other sizes give, {symbols(size_of(rule))})"
    return ""


def rope_type(config: Mapping[str, object]) -> str:
    """The rotary types of a config, joined where its layers differ; 'default' where it names
    none."""
    given: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        return "default"
    nested: list[Any] = [x for x in given.values() if isinstance(x, dict)]  # type: ignore[reportUnknownVariableType]
    tables: list[Any] = nested or [given]
    names = {str(x.get("rope_type") or x.get("type") or "default") for x in tables}
    return "+".join(sorted(names))


def _spec(form: Mapping[str, Any], c: Config) -> ModelSpec:
    digest = keep_form(form)
    symbols = _symbols(form, c)
    padded = (
        c.values.get("pad_token_id") is not None
        if "pad_token_id" in c.values
        else (form["pad_default"])
    )
    positions = form.get("positions")
    limits = {field: c.size(field, form["defaults"].get(field)) for field in form["thresholds"]}
    limit = min(limits, key=lambda field: limits[field], default="")
    entrance = LearnedEntrance(
        limit=limits.get(limit, 0),
        limit_field=limit,
        digest=digest,
        piece="entrance",
        padded=form["pads"] and padded,
        positions=Bindings(symbols)(size_of(positions)) if positions else 0,
    )
    if "stages" in form:
        body = staged(form, c, digest, lambda kind: _is_checkpointed(form, kind))
    else:
        body = _layers(form, c, digest, ENCODER)
    if f"{DECODER}kinds" in form:
        middle = Stage(part=LearnedPart(digest=digest, piece="middle"))
        body = [*_encoder(form, body, digest), middle, *_layers(form, c, digest, DECODER)]
    stages = (Stage(part=entrance), *body, Stage(part=_exit(form, c, digest)))
    versions = ", ".join(f"{k} {v}" for k, v in form["versions"].items())
    source = f"{c.source}, learned from {versions}".removeprefix(", ")
    return ModelSpec(
        name=c.name,
        family=form["model_type"],
        stages=stages,
        symbols=tuple(symbols.items()),
        positions=whole(c.values.get("max_position_embeddings")) or 0,
        source=source,
        refused_attention=tuple(form.get("refused_attention", ())),
    )


def _layers(form: Mapping[str, Any], c: Config, digest: str, side: str) -> list[Stage]:
    """The layers of a stack, equal ones as one stage; those that carry more than hidden states are
    recorded one by one."""
    rule = form[f"{side}kinds"]
    layers = [
        Stage(
            part=LearnedPart(digest=digest, piece=str(kind)),
            path=form[f"{side}layers"],
            checkpointed=_is_checkpointed(form, kind),
        )
        for kind in _kinds(rule, c, _count(form, c, side))
    ]
    return layers if form.get("carries") else list(runs(layers))


def _count(form: Mapping[str, Any], c: Config, side: str) -> int:
    """The layers of a stack; a decoder may have as many as its encoder."""
    rule, default = form[f"{side}kinds"], form["defaults"].get(f"{side}layers")
    if not rule["count"]:
        return len(rule["kinds"])
    if side and default is None:
        default = _count(form, c, ENCODER)
    return c.size(rule["count"], default)


def _encoder(form: Mapping[str, Any], layers: list[Stage], digest: str) -> list[Stage]:
    """An encoder's layers and what is behind them. The last of it shares what it makes, and its
    own values go."""
    forms = [mode for modes in form["variants"].values() for mode in modes.values()]
    if "end" in forms[0]:
        *before, last = [*layers, Stage(part=LearnedPart(digest=digest, piece="end"))]
    else:
        *before, last = layers
        before += [last.replace(count=last.count - 1)] if last.count > 1 else []
    names = [
        f"{label} of 0" if label.startswith(CARRIED) else label
        for mode in forms
        for block in (mode["entrance"], *mode["layers"])
        for _, label in block["shares"]
        if label.removeprefix(f"{CARRIED} ").startswith("encoder ")
    ]
    return [*before, last.replace(count=1, publishes=ENCODED, closes=tuple(dict.fromkeys(names)))]


def _is_checkpointed(form: Mapping[str, Any], kind: int) -> bool:
    found: bool | list[bool] = form["checkpointed"]
    return found if isinstance(found, bool) else found[kind]


def _exit(form: Mapping[str, Any], c: Config, digest: str) -> Part:
    """What follows the layers: a head over the vocabulary as every causal model has it, or the
    form's own to the loss."""
    head = form["head"]
    tied_to = form["tied_to"] if c.flag("tie_word_embeddings", form["tied_default"]) else ""
    if form["task"] != CAUSAL:
        return LearnedExit(digest=digest, piece="exit", tied_to=tied_to)
    return LearnedHead(
        digest=digest,
        norm=None,
        name=head["name"],
        bias=head["bias"],
        tied_to=tied_to,
        scaled=head["rescaled"],
    )


def _symbols(form: Mapping[str, Any], c: Config) -> dict[str, int]:
    """Every symbol's value: as the config gives it, else by the rule of the class's default."""
    names, defaults = form["symbols"], form["defaults"]
    found = {letter: c.size(field, low=0) for field, letter in names.items() if field in c}
    if LABELS in names:
        found[names[LABELS]] = c.num_labels()
    open_ = {letter: field for field, letter in names.items() if letter not in found}
    while open_:
        settled = [x for x, field in open_.items() if _is_settled(defaults.get(field), open_)]
        if not settled:
            raise InputError(
                f"config of {shown(c.name)} lacks {next(iter(open_.values()))!r}; add it, or use a"
                " complete config.json"
            )
        for letter in settled:
            found[letter] = Bindings(found)(size_of(defaults[open_.pop(letter)]))
    if "stages" in form:
        found["L"] = sum(depth_of(form, c, number) for number in range(len(form["stages"])))
    else:
        sides = (ENCODER, DECODER) if f"{DECODER}kinds" in form else (ENCODER,)
        found["L"] = sum(_count(form, c, side) for side in sides)
    found.update(derived_sizes(found, form.get("tokens")))
    if "rows" in form["head"]:
        found["v"] = Bindings(found)(size_of(form["head"]["rows"]))
    return found


def _is_settled(rule: object, open_: Mapping[str, str]) -> bool:
    if not isinstance(rule, (int, str)):
        return False
    words = str(rule).replace("//", " ").replace("*", " ").replace("+", " ").replace("-", " ")
    return not set(words.split()) & set(open_)


def layer_key(
    columns: Sequence[Sequence[object]],
    layer: int,
    lead: int | None,
    every: int | None,
    last: int | None = None,
    *,
    starts: bool = False,
) -> str:
    """By what a layer's kind is found: its entries in the config's lists, whether it is one of the
    first, its place in a period, whether it is the `last`."""
    words = [str(column[layer]) for column in columns]
    if lead is not None:
        words.append("first" if layer < lead else "later")
    if every is not None:
        words.append(str(layer % every))
    if last is not None:
        words.append("last" if layer == last else "inner")
    if starts:
        words.append("start" if layer == 0 else "inner")
    return "|".join(words)


def _kinds(rule: Mapping[str, Any], c: Config, count: int) -> list[int]:
    """The kind of each layer."""
    if "of" not in rule:
        return _same_kinds(rule["kinds"], c, count)
    columns: list[list[object]] = []
    for field, period in rule["lists"].items():
        values = c.listed(field) or [period[i % len(period)] for i in range(count)]
        c.same_length(field, len(values), count)
        columns.append(values)
    for field, usual in rule.get("indices", {}).items():
        listed = c.layer_indices(field, count, usual)
        columns.append([index in listed for index in range(count)])
    lead, every = (
        c.size(field, rule["defaults"][field], low=0) if field else None
        for field in (rule["lead"], rule["every"])
    )
    kinds: list[int] = []
    for layer in range(count):
        last, starts = count - 1 if rule.get("ends") else None, rule.get("starts", False)
        key = layer_key(columns, layer, lead, every, last, starts=starts)
        if key not in rule["of"]:
            raise InputError(
                f"{shown(c.name)} has a layer {layer} of kind {shown(key)}, but the learned form of"
                f" {c.values['model_type']} knows {', '.join(rule['of'])}; run `estimate learn` on"
                " this config"
            )
        kinds.append(rule["of"][key])
    return kinds


def _same_kinds(kinds: list[int], c: Config, count: int) -> list[int]:
    if count != len(kinds):
        raise InputError(
            f"model_type {shown(c.values['model_type'])} was learned with {len(kinds)} layers of"
            f" several kinds, not with {count}; run `estimate learn` on this config"
        )
    return kinds
