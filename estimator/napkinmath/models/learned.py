"""The family of learned architectures: data of a traced forward becomes a ModelSpec, whose parts
record the library's operations one by one."""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Bindings
from napkinmath.catalog.learned_forms import forms_of
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import DECODER_TOKENS, ModelSpec, Part, Stage
from napkinmath.ir.symbols import b, s
from napkinmath.ir.tape import Tape
from napkinmath.models.families.config import Config, runs
from napkinmath.models.layers.attend import runs_eager
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.learned_composites import INPUT_IDS
from napkinmath.models.layers.learned_sizes import size_of
from napkinmath.models.layers.replay import Replay, gradients_lie_by_heads, variant_of
from napkinmath.ops.index import model_input

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_FORMS: dict[str, Mapping[str, Any]] = {}  # by digest, which parts carry instead of the data


class LearnedPart(Part):
    """A block of a learned form: `piece` is 'entrance', 'exit', 'after' or the number of a layer's
    kind."""

    digest: str
    piece: str

    def block(self, t: Tape, shared: dict[str, Value]) -> Mapping[str, Any]:
        """The block's data as the policy's variant has it."""
        return block_of(self.digest, self.piece, t, shared)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        return Replay(t, self.block(t, shared), shared, eager_only=self.eager_only).run(x)

    @property
    def eager_only(self) -> bool:
        """Whether the class has no attention but transformers' own operations."""
        return _FORMS[self.digest]["eager_only"]


class LearnedEntrance(LearnedPart):
    """What runs before the first layer: embeddings, masks, tables."""

    padded: bool = False
    """The token embedding has a padding index."""
    positions: int = 0
    """Rows of a table of learned positions."""

    @property
    def virtual_tokens(self) -> str:
        return DECODER_TOKENS

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        if t.policy.config.batch.packing:
            raise InputError(
                "packed sequences of a learned architecture are not priced: it was learned from"
                " whole rows; leave packing out"
            )
        shared[INPUT_IDS] = model_input(t, "input ids", (b, s), INT64)
        shared["labels"] = model_input(t, "labels", (b, s), INT64)
        replay = Replay(
            t, self.block(t, shared), shared, padded=self.padded, eager_only=self.eager_only
        )
        return replay.run(x)

    @property
    def longest_sequence(self) -> int:
        return self.positions


class LearnedHead(CausalLmHead):
    """What follows the layers, the head over the vocabulary, and the loss."""

    digest: str

    def _narrowed(self, t: Tape, x: Value) -> Value:
        found = Replay(t, block_of(self.digest, "exit", t, {}), {}).run(x)
        assert found is not None
        return found

    def _rescaled(self, t: Tape, logits: Value) -> Value:
        found = Replay(t, block_of(self.digest, "after", t, {}), {}).run(logits)
        assert found is not None
        found.tensor.role = Role.LOGITS
        return found


def block_of(digest: str, piece: str, t: Tape, shared: dict[str, Value]) -> Mapping[str, Any]:
    """The data of a piece under the policy's types and its attention's gradients."""
    form = _FORMS[digest]
    modes = form["variants"][variant_of(t.policy)]
    if runs_eager(t, form["eager_only"]):
        return _piece(_by_batch(modes, "eager", t), piece)
    rows = _piece(_by_batch(modes, "rows", t), piece)
    if "heads" in modes and gradients_lie_by_heads(t, rows, shared):
        return _piece(_by_batch(modes, "heads", t), piece)
    return rows


def _by_batch(modes: Mapping[str, Any], mode: str, t: Tape) -> Mapping[str, Any]:
    """The form of a mode; a batch of one row may have one of its own."""
    own = modes.get(f"single {mode}")
    return modes[mode] if own is None or t.at_least("b", 2) else own


def _piece(form: Mapping[str, Any], piece: str) -> Mapping[str, Any]:
    return form["layers"][int(piece)] if piece.isdigit() else form[piece]


def read_learned(config: Mapping[str, object], *, name: str, source: str = "") -> ModelSpec:
    """The model of a config whose type was learned; raises InputError naming the field under which
    none of its forms was seen."""
    reasons: list[str] = []
    for form in forms_of(str(config["model_type"])):
        reason = _mismatch(form, config)
        if not reason:
            return _spec(form, Config(config, name, source))
        reasons.append(reason)
    raise InputError(
        f"model_type {shown(config['model_type'])} was learned, but not with {reasons[0]}; run"
        " `estimate learn` on this config"
    )


def spec_of(form: Mapping[str, Any], config: Mapping[str, object], *, name: str) -> ModelSpec:
    """The model of a config by this form; raises InputError where it was not learned under its
    fields."""
    reason = _mismatch(form, config)
    if reason:
        raise InputError(f"the form of {form['model_type']} was not learned with {reason}")
    return _spec(form, Config(config, name))


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
    for field in form["symbols"]:
        if field in config and config[field] is None and field not in form["null_is_default"]:
            return f"{field}=null"
    for field, nonzero in form["nonzero"].items():
        if bool(config.get(field, defaults.get(field))) != nonzero:
            seen = "other than 0" if nonzero else "0"
            return f"{field}={shown(config.get(field, defaults.get(field)))} (seen: {seen})"
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
    digest = str(form["digest"])
    _FORMS[digest] = form
    symbols = _symbols(form, c)
    layers = [
        Stage(
            part=LearnedPart(digest=digest, piece=str(kind)),
            path=form["layers"],
            checkpointed=form["checkpointed"],
        )
        for kind in _kinds(form["kinds"], c, symbols["L"])
    ]
    head = form["head"]
    tied = c.flag("tie_word_embeddings", form["tied_default"])
    exit_part = LearnedHead(
        digest=digest,
        norm=None,
        name=head["name"],
        bias=head["bias"],
        tied_to=form["tied_to"] if tied else "",
        scaled=head["rescaled"],
    )
    padded = (
        c.values.get("pad_token_id") is not None
        if "pad_token_id" in c.values
        else (form["pad_default"])
    )
    positions = form.get("positions")
    entrance = LearnedEntrance(
        digest=digest,
        piece="entrance",
        padded=form["pads"] and padded,
        positions=Bindings(symbols)(size_of(positions)) if positions else 0,
    )
    stages = (Stage(part=entrance), *runs(layers), Stage(part=exit_part))
    versions = ", ".join(f"{k} {v}" for k, v in form["versions"].items())
    source = f"{c.source}, learned from {versions}".removeprefix(", ")
    return ModelSpec(
        name=c.name,
        family=form["model_type"],
        stages=stages,
        symbols=tuple(symbols.items()),
        source=source,
    )


def _symbols(form: Mapping[str, Any], c: Config) -> dict[str, int]:
    """Every symbol's value: as the config gives it, else by the rule of the class's default."""
    names, defaults = form["symbols"], form["defaults"]
    found = {letter: c.size(field, low=0) for field, letter in names.items() if field in c}
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
    count = form["kinds"]["count"]
    found["L"] = c.size(count, defaults.get("layers")) if count else len(form["kinds"]["kinds"])
    found["v"] = Bindings(found)(size_of(form["head"]["rows"]))
    return found


def _is_settled(rule: object, open_: Mapping[str, str]) -> bool:
    if not isinstance(rule, (int, str)):
        return False
    words = str(rule).replace("//", " ").replace("*", " ").replace("+", " ").replace("-", " ")
    return not set(words.split()) & set(open_)


def _kinds(rule: Mapping[str, Any], c: Config, count: int) -> list[int]:
    """The kind of each layer."""
    if rule["rule"] == "alike":
        return [0] * count
    if rule["rule"] == "lead":
        first = c.size(rule["field"], rule.get("default"), low=0)
        return [0] * min(first, count) + [1] * max(0, count - first)
    if rule["rule"] == "lists":
        return _listed_kinds(rule, c, count)
    if count != len(rule["kinds"]):
        raise InputError(
            f"model_type {shown(c.values['model_type'])} was learned with {len(rule['kinds'])}"
            f" layers of several kinds, not with {count}; run `estimate learn` on this config"
        )
    return rule["kinds"]


def _listed_kinds(rule: Mapping[str, Any], c: Config, count: int) -> list[int]:
    columns: list[list[object]] = []
    for field in rule["lists"]:
        period = rule["period"][field]
        values = c.listed(field) or [period[i % len(period)] for i in range(count)]
        c.same_length(field, len(values), count)
        columns.append(values)
    kinds: list[int] = []
    for entries in zip(*columns, strict=True):
        key = "|".join(str(entry) for entry in entries)
        if key not in rule["of"]:
            raise InputError(
                f"config field {rule['lists'][0]} has a layer {shown(key)}, but the learned form"
                f" knows {', '.join(rule['of'])}; run `estimate learn` on this config"
            )
        kinds.append(rule["of"][key])
    return kinds
