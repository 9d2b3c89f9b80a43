"""Which fields of a config a model's form turns on: found by changing each one and recording
again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from unittest import mock

from napkinmath.base.progress import counted
from napkinmath.models.image_models import VISION, derived_sizes
from napkinmath.models.learned import rope_type

from napkinmath_profiler.tracing.learning.image_fields import with_side
from napkinmath_profiler.tracing.learning.layer_fields import (
    IGNORED,
    decoders_field,
    index_fields,
    layers_field,
    per_layer_fields,
)
from napkinmath_profiler.tracing.learning.stage_fields import (
    are_entries,
    is_depth,
    is_entry,
    was_read,
    with_entries,
)
from napkinmath_profiler.tracing.meta_model import config_from

OWN_RULE = frozenset({"tie_word_embeddings", "pad_token_id", "rope_parameters", "rope_scaling"})
"""Fields that the family reads itself."""
ROPE_TYPES = ("linear", "yarn", "llama3", "dynamic")
# Letters that reports and other rules know, for the usual names.
LETTERS = {
    "hidden_size": "h",
    "n_embd": "h",
    "d_model": "h",
    "num_attention_heads": "a",
    "n_head": "a",
    "num_key_value_heads": "k",
    "head_dim": "dh",
    "intermediate_size": "f",
    "n_inner": "f",
    "vocab_size": "v",
    "num_local_experts": "e",
    "num_experts": "e",
    "n_routed_experts": "e",
    "num_experts_per_tok": "topk",
    "moe_intermediate_size": "fe",
    "shared_expert_intermediate_size": "fs",
    "sliding_window": "w",
    "image_size": "i",
    "patch_size": "p",
}
TIED = ("num_key_value_heads", "head_dim", "n_kv_heads", "num_kv_heads", "hidden_size", "d_model")
"""Fields that may follow from other sizes."""
SHORT_OF_TRIALS = 64
"""A number below the length of every trial."""
Trial = Callable[[Mapping[str, Any]], Any]
"""The outline of a config's forward; raises where its model cannot be built or run."""


@dataclass(frozen=True, slots=True)
class Moves:
    """A size of the config: its letter, and three values at which the form is one; `ties` are
    fields that move with it, by the power of their factor."""

    letter: str
    base: int
    second: int
    third: int
    ties: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class FoundFields:
    """`must`: field -> values under which the form was seen to be the same. `nonzero`: fields of
    which only this matters. `ties`: field -> expression in the symbols, the one value at which the
    form holds. `thresholds`: fields that a length may not exceed. Others change nothing. `tokens`:
    those of an image beside its patches (image_models.py)."""

    symbols: dict[str, Moves] = field(default_factory=dict)
    must: dict[str, list[Any]] = field(default_factory=dict)
    nonzero: dict[str, bool] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    thresholds: list[str] = field(default_factory=list)
    tokens: int | None = None

    def changes(self, config: Mapping[str, Any], values: Mapping[str, int]) -> dict[str, Any]:
        """The config's fields where symbols take other values, with what is tied to them."""
        made: dict[str, Any] = dict(values)
        for name, value in values.items():
            moves = self.symbols[name]
            for tied, power in moves.ties.items():
                now = Fraction(made.get(tied, config[tied]))
                made[tied] = now * Fraction(value, moves.base) ** power
        if any(int(v) != v for v in made.values()):
            raise ValueError("a tied field would be no whole number")
        return {name: int(v) for name, v in made.items()}

    def bound(self, values: Mapping[str, int]) -> dict[str, int]:
        """Every symbol's value where some take others."""
        found = {moves.letter: values.get(name, moves.base) for name, moves in self.symbols.items()}
        return {**found, **derived_sizes(found, self.tokens)}


def full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field, defaults of the class filled in; by dotted names where some are given so."""
    made = dict(config_from(copy.deepcopy(dict(config))).to_dict())
    made["model_type"] = config["model_type"]
    if are_entries(config):
        return with_entries(with_side(made))
    return with_side(made) if _is_dotted(config) else made


def examine(
    config: Mapping[str, Any],
    base: Any,
    trial: Trial,
    read: set[str],
    frozen: Callable[[str], bool] = lambda name: False,
) -> FoundFields:
    """Changes every field of a short config, one at a time; `read` are those that its class asks
    for, the others matter where other fields follow them. Sizes that are `frozen` keep their
    value."""
    found, counts = FoundFields(), [layers_field(config), decoders_field(config)]
    layers = [config[count] for count in counts if count]
    lists = [
        one for n in layers for of in (per_layer_fields, index_fields) for one in of(config, n)
    ]
    for name, value in counted(config.items(), "fields of its config", len(config)):
        if name.rpartition(".")[2] in IGNORED or name in OWN_RULE or name in (*counts, *lists):
            continue
        if name.endswith("_token_id") or is_depth(name):
            continue
        if not was_read(name, read) and _is_alone(config, name):
            continue
        if isinstance(value, bool) or value is None or isinstance(value, (str, list, dict)):
            _examine_plain(found, config, name, base, trial)
        elif isinstance(value, int) and "chunk" in name:
            others = (SHORT_OF_TRIALS, 2 * value, None)
            if not all(_same(config, name, other, base, trial) for other in others):
                found.must[name] = [value]  # a length is counted in it
        elif isinstance(value, int) and frozen(name):
            found.must[name] = [value]
        elif isinstance(value, int):
            _examine_size(found, config, name, base, trial)
        elif isinstance(value, float):
            _examine_number(found, config, name, base, trial)
    _tie(found, config, base, trial)
    return found


def _is_alone(config: Mapping[str, Any], name: str) -> bool:
    """Whether no other field follows this one."""
    value = config[name]
    other = not value if isinstance(value, bool) else 2 * value if value else 1
    if not isinstance(value, (bool, int, float)):
        return True
    try:
        made = full_config({**config, name: other})
    except Exception:  # whatever a class raises of a value that it does not take
        return False
    return {k: v for k, v in made.items() if k != name} == {
        k: v for k, v in full_config(config).items() if k != name
    }


def _examine_size(
    found: FoundFields, config: Mapping[str, Any], name: str, base: Any, trial: Trial
) -> None:
    value, seen = int(config[name]), list[int]()
    for other in _other_sizes(name, value):
        made = _tried({**config, name: other}, trial)
        if made is None:
            continue
        if made == base:
            _examine_threshold(found, config, name, base, trial)
            return
        if same_form(made, base):
            seen.append(other)
            if len(seen) == 2:
                break
    if seen:
        found.symbols[name] = Moves(_letter(found, name), value, seen[0], seen[-1])
    else:
        found.must[name] = [value]


def _letter(found: FoundFields, name: str) -> str:
    plain = name.rpartition(".")[2]
    if is_entry(name):
        return name.replace(".", "_")
    letter, taken = LETTERS.get(plain, plain), {moves.letter for moves in found.symbols.values()}
    return name.replace(".", "_") if letter in taken else letter


def _examine_threshold(
    found: FoundFields, config: Mapping[str, Any], name: str, base: Any, trial: Trial
) -> None:
    """A number that matters only where a sequence is longer than it."""
    if config[name] > SHORT_OF_TRIALS and not _same(config, name, SHORT_OF_TRIALS, base, trial):
        found.thresholds.append(name)


def _other_sizes(name: str, value: int) -> Iterator[int]:
    """Values to try. Heads above a size of 256 would run another kernel: theirs shrink."""
    if "head_dim" in name and value % 32 == 0:
        yield from (value // 2, value * 3 // 4)
    elif value > 0:
        yield from (2 * value, 3 * value)
        if value % 2 == 0:
            yield value // 2


def _tie(found: FoundFields, config: Mapping[str, Any], base: Any, trial: Trial) -> None:
    """Sizes that move only together: heads with their groups where each has its own, a head's size
    with the width. The first of them that frees another is said by the others."""
    for tied in [n for n in TIED if n in found.must and type(config.get(n)) is int]:
        moved: dict[str, tuple[int, int]] = {}
        others = [n for n, v in found.must.items() if n != tied and type(v[0]) is int and v[0] > 1]
        for name in others:
            for times, power in ((2, 1), (2, -1), (Fraction(1, 2), -1)):
                new, follows = config[name] * times, config[tied] * times**power
                if int(new) != new or int(follows) != follows:
                    continue
                made = _tried({**config, name: int(new), tied: int(follows)}, trial)
                if made is not None and made != base and same_form(made, base):
                    moved[name] = (int(new), power)
                    break
        for name, (second, power) in moved.items():
            del found.must[name]
            letter, value = _letter(found, name), config[name]
            found.symbols[name] = Moves(letter, value, second, second, {tied: power})
        if moved:
            del found.must[tied]
            found.ties[tied] = _tied_text(found, config, tied)


def _tied_text(found: FoundFields, config: Mapping[str, Any], tied: str) -> str:
    factor, above, below = Fraction(config[tied]), list[str](), list[str]()
    for moves in found.symbols.values():
        power = moves.ties.get(tied, 0)
        if power:
            (above if power > 0 else below).append(moves.letter)
            factor /= Fraction(moves.base) ** power
    if factor.numerator != 1 or not above:
        above.insert(0, str(factor.numerator))
    if factor.denominator != 1:
        below.append(str(factor.denominator))
    return "//".join(["*".join(above), *below])


def _examine_number(
    found: FoundFields, config: Mapping[str, Any], name: str, base: Any, trial: Trial
) -> None:
    value = config[name]
    if value and not _same(config, name, value * 1.5, base, trial):
        found.must[name] = [value]
        return
    for other in (0.0, None) if value else (0.125,):
        if not _same(config, name, other, base, trial):
            found.nonzero[name] = bool(value)
            return


def _examine_plain(
    found: FoundFields, config: Mapping[str, Any], name: str, base: Any, trial: Trial
) -> None:
    value = config[name]
    if isinstance(value, bool):
        if not _same(config, name, not value, base, trial):
            found.must[name] = [value]
        return
    others: tuple[Any, ...] = (64, 0.5, True, "none") if value is None else ()
    if others and all(_same(config, name, other, base, trial) for other in others):
        return
    found.must[name] = [value]


def _same(config: Mapping[str, Any], name: str, other: Any, base: Any, trial: Trial) -> bool:
    made = _tried({**config, name: other}, trial)
    return made is not None and made == base


def rope_types(config: Mapping[str, Any], base: Any, trial: Trial) -> list[str]:
    """The rotary types under which the form stays: the config's own and what was tried."""
    own = config.get("rope_parameters")
    if not isinstance(own, dict):
        return []
    found = [rope_type(config)]
    for kind in ROPE_TYPES if "rope_type" in own else ():
        more = {
            "rope_type": kind,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        if kind not in found and _same(config, "rope_parameters", {**own, **more}, base, trial):
            found.append(kind)
    return found


def _tried(config: Mapping[str, Any], trial: Trial) -> Any:
    try:
        return trial(config)
    except Exception:  # whatever a class raises of a value that it does not take
        return None


def same_form(one: list[Any], other: list[Any]) -> bool:
    """Whether two outlines differ in nothing but sizes."""
    return _without_sizes(one) == _without_sizes(other)


def _without_sizes(outline: list[Any]) -> Any:
    ops, weights = outline
    bare = [
        (name, module, {k: v for k, v in facts.items() if k != "window"}, names, kinds)
        for name, module, facts, names, shapes in ops
        for kinds in ([(len(shape), dtype) for shape, dtype in shapes],)
    ]
    return bare, [(name, len(shape), dtype) for name, shape, dtype in weights]


def resolves_null(given: Mapping[str, Any], name: str) -> bool:
    """Whether the class puts a size in the place of a null."""
    try:
        return type(full_config({**given, name: None}).get(name)) is int
    except Exception:  # the class refuses it
        return False


def default_samples(
    given: Mapping[str, Any], name: str, found: FoundFields
) -> list[tuple[dict[str, int], Any]]:
    """What a class makes of a field that a config does not give: for the base, for each other size
    changed, and for all. Empty where it gives nothing."""
    rest = {key: value for key, value in given.items() if key != name}
    others = [other for other in found.symbols if other != name and not is_entry(other)]
    samples = []
    for changed in ([], *([other] for other in others), others):
        values = {other: found.symbols[other].base for other in others}
        values |= {other: found.symbols[other].second for other in changed}
        try:
            made = full_config({**rest, **{k: v for k, v in values.items() if k != name}})
        except Exception:  # the class refuses the combination
            return []
        samples.append((found.bound(values), made.get(name)))
    return samples


@contextmanager
def fields_read(config: Mapping[str, Any]) -> Generator[set[str]]:
    """The fields that are asked for of any config of this type inside the block."""
    whole, names = config_from(copy.deepcopy(dict(config))), set[str]()
    nested = {VISION: whole.vision_config} if _is_dotted(config) else {}
    with ExitStack() as stack:
        for prefix, one in {"": whole, **nested}.items():
            noted = _noted(type(one), prefix, names)
            stack.enter_context(mock.patch.object(type(one), "__getattribute__", noted))
        yield names


def _is_dotted(config: Mapping[str, Any]) -> bool:
    return any(name.startswith(VISION) for name in config)


def _noted(kind: Any, prefix: str, names: set[str]) -> Callable[[Any, str], Any]:
    plain: Any = kind.__getattribute__

    def noted(self: Any, name: str) -> Any:
        names.add(prefix + name)
        names.add(prefix + kind.attribute_map.get(name, name))
        return plain(self, name)

    return noted
