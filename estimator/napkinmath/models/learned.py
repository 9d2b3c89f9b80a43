"""The family of learned architectures: data of a traced forward becomes a ModelSpec, whose parts
record the library's operations one by one."""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Bindings
from napkinmath.catalog.learned_forms import forms_of
from napkinmath.config.train_config import RecomputeKind
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import DECODER_TOKENS, ModelSpec, Part, Stage
from napkinmath.ir.symbols import b, s
from napkinmath.ir.tape import Tape
from napkinmath.models.families.config import Config, runs
from napkinmath.models.layers.attend import runs_eager
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.learned_composites import INPUT_IDS
from napkinmath.models.layers.learned_replay import (
    LearnedReplay,
    gradients_lie_by_heads,
    variant_of,
)
from napkinmath.models.layers.learned_sizes import size_of
from napkinmath.models.tasks import CAUSAL, named_task
from napkinmath.ops.index import model_input

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_FORMS: dict[str, Mapping[str, Any]] = {}  # by digest, which parts carry instead of the data


LEARNED_SINCE = (5, 0)
"""First version of transformers whose classes run as those that were recorded."""


class LearnedPart(Part):
    """A block of a learned form: `piece` is 'entrance', 'exit', 'after' or the number of a layer's
    kind."""

    digest: str
    piece: str

    def block(self, t: Tape, shared: dict[str, Value]) -> Mapping[str, Any]:
        """The block's data as the policy's variant has it."""
        return block_of(self.digest, self.piece, t, shared)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        return LearnedReplay(t, self.block(t, shared), shared, eager_only=self.eager_only).run(x)

    @property
    def cached(self) -> tuple[Any, ...]:
        raise InputError(
            "generation of a learned architecture is not priced: its form was recorded without a"
            " cache"
        )

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
    limit: int = 0
    """Length up to which the form was recorded: above, `limit_field` changes the operations."""
    limit_field: str = ""

    @property
    def virtual_tokens(self) -> str:
        return DECODER_TOKENS

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        _refuse_unseen(t)
        if self.limit and t.at_least("s", self.limit + 1):
            raise InputError(
                f"sequences longer than {self.limit_field}={self.limit} run other operations, which"
                f" the learned form does not have; take --ctx {self.limit}, or `estimate trace`"
            )
        shared[INPUT_IDS] = model_input(t, "input ids", (b, s), INT64)
        shared["labels"] = model_input(t, "labels", (b, s), INT64)
        replay = LearnedReplay(
            t, self.block(t, shared), shared, padded=self.padded, eager_only=self.eager_only
        )
        return replay.run(x)

    @property
    def longest_sequence(self) -> int:
        return self.positions


class LearnedHead(CausalLmHead):
    """What follows the layers, the head over the vocabulary, and the loss."""

    digest: str

    def hidden(self, t: Tape, x: Value) -> Value:
        found = LearnedReplay(t, block_of(self.digest, "exit", t, {}), {}).run(x)
        assert found is not None
        return found

    def _rescaled(self, t: Tape, logits: Value) -> Value:
        found = LearnedReplay(t, block_of(self.digest, "after", t, {}), {}).run(logits)
        assert found is not None
        found.tensor.role = Role.LOGITS
        return found


def _refuse_unseen(t: Tape) -> None:
    """Raises InputError for what changes a model's operations and was not recorded."""
    config, stack = t.policy.config, t.policy.stack
    asked = {
        "packed sequences": config.batch.packing,
        f"--stack {config.stack}": stack.model.transformers < LEARNED_SINCE,
        "torch.compile": config.compile,
        "selective checkpointing": config.recompute.kind is RecomputeKind.SELECTIVE,
        "context parallelism": config.parallel.context_parallel_size > 1,
        "expert parallelism": config.parallel.expert_parallel_size > 1,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise InputError(
                f"{what} of a learned architecture is not priced: its operations were recorded"
                " without; leave it out, or use `estimate trace`"
            )


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
    c = Config(config, name, source)
    named = c.names("architectures")
    if named and named_task(named[0], CAUSAL) != CAUSAL:
        raise InputError(
            f"the learned form of {shown(config['model_type'])} is of its {CAUSAL} class, not of"
            f" {shown(named[0])}; use `estimate trace`, or --task {CAUSAL}"
        )
    reasons: list[str] = []
    for form in forms_of(str(config["model_type"])):
        reason = _mismatch(form, config)
        if not reason:
            return _spec(form, c)
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
    for field in (*form["symbols"], *form["ties"]):
        if field in config and config[field] is None and field not in form["null_is_default"]:
            return f"{field}=null"
    for field, nonzero in form["nonzero"].items():
        if bool(config.get(field, defaults.get(field))) != nonzero:
            seen = "other than 0" if nonzero else "0"
            return f"{field}={shown(config.get(field, defaults.get(field)))} (seen: {seen})"
    return _untied(form, Config(config, str(form["model_type"])))


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


def layer_key(
    columns: Sequence[Sequence[object]], layer: int, lead: int | None, every: int | None
) -> str:
    """By what a layer's kind is found: its entries in the config's lists, whether it is one of the
    first, its place in a period."""
    words = [str(column[layer]) for column in columns]
    if lead is not None:
        words.append("first" if layer < lead else "later")
    if every is not None:
        words.append(str(layer % every))
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
    lead, every = (
        c.size(field, rule["defaults"][field], low=0) if field else None
        for field in (rule["lead"], rule["every"])
    )
    kinds: list[int] = []
    for layer in range(count):
        key = layer_key(columns, layer, lead, every)
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
