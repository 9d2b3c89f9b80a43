"""Learns the form of a causal language model: recorded at several batches, lengths and sizes of its
config, and made one piece of data in which sizes are symbols."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from napkinmath.base.progress import counted
from torch import nn

from napkinmath_profiler.tracing.layer_stacks import find_stacks
from napkinmath_profiler.tracing.learning.blocks import Pieces, cut
from napkinmath_profiler.tracing.learning.composites import Recorded
from napkinmath_profiler.tracing.learning.config_fields import (
    Found,
    default_samples,
    examine,
    full_config,
    layers_field,
    per_layer_fields,
    resolves_null,
    rope_types,
    shortened,
)
from napkinmath_profiler.tracing.learning.recording import outline, record
from napkinmath_profiler.tracing.learning.symbols import (
    Fitting,
    Recognising,
    UnknownSizeError,
    coded,
    joined,
)
from napkinmath_profiler.tracing.meta_model import build_model, config_from, set_use_cache
from napkinmath_profiler.tracing.observation import installed_versions
from napkinmath_profiler.tracing.trace_errors import TraceError

BASE, ONE = (2, 320), (1, 320)
# (batch, length) beside the base; an odd length shows what is padded.
OTHERS = ((3, 320), (2, 448), (2, 333))
# name -> (type of the weights, autocast): the types that a policy computes in.
VARIANTS: dict[str, tuple[str, torch.dtype | None]] = {
    "half": ("bf16", None),
    "fp32": ("fp32", None),
    "autocast": ("fp32", torch.bfloat16),
    "autocast over quantized": ("fp32", torch.bfloat16),
}
OVER_QUANTIZED = "autocast over quantized"
"""Quantized linears hand back the type that they are given, whatever autocast says (bitsandbytes
nn/modules.py Linear4bit.forward)."""
MODES: dict[str, tuple[str, Recorded]] = {
    "rows": ("sdpa", Recorded()),
    "heads": ("eager", Recorded()),
    "eager": ("eager", Recorded(attention=False)),
}
SINGLE = "single "
"""Before a mode: its form for a batch of one row, where the library runs other operations."""
"""Attention and what is recorded of it. Fused kernels leave the gradients of queries and keys with
the rows outside, other kernels with the heads; eager attention is operations like any other."""
RAW = Recorded(attention=False, masks=False)


@dataclass(frozen=True, slots=True)
class Sizes:
    """One sample: a config, a batch and a length, and what they bind."""

    config: Mapping[str, Any]
    place: tuple[int, int]
    symbols: Mapping[str, int]

    @property
    def bound(self) -> dict[str, int]:
        """Every symbol's value."""
        return {"b": self.place[0], "s": self.place[1], **self.symbols}


def _pieces(model: nn.Module, batch: int, length: int, variant: str, recorded: Recorded) -> Pieces:
    layers, head = landmarks(model)
    recording = record(
        model,
        batch=batch,
        length=length,
        autocast=VARIANTS[variant][1],
        how=replace(recorded, keeps_type=variant == OVER_QUANTIZED),
    )
    return cut(recording, model, layers, head)


def _built(config: Mapping[str, Any], dtype: str, attention: str) -> nn.Module:
    built = config_from(copy.deepcopy(dict(config)))
    model = build_model(built, dtype=dtype, attn_implementation=attention)
    set_use_cache(model, False)
    return model.train()


def landmarks(model: nn.Module) -> tuple[str, str]:
    """Paths of the repeated layers and of the head."""
    stacks = find_stacks(model)
    if not stacks:
        raise TraceError("it has no list of layers that repeat")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    paths = [path for path, module in model.named_modules() if module is head]
    if head is None or not paths:
        raise TraceError("it has no head over a vocabulary")
    return stacks[0].path, paths[0]


class _How:
    """How a class is run while it is learned: the modes that it has; `raw`: its masks are recorded
    operation by operation, because its forward does something with them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.modes = dict(MODES)
        self.eager_only = False
        try:
            _built(config, "bf16", "sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            self.modes, self.eager_only = {"eager": MODES["eager"]}, True
        self.plain = ("bf16", next(iter(self.modes.values()))[0])
        self.raw = False
        try:
            self.trial(config)
        except Exception:  # whatever a forward does with a mask that is not there
            self.raw = True
            self.modes = {k: (v[0], RAW) for k, v in self.modes.items() if k != "heads"}

    def trial(self, config: Mapping[str, Any]) -> Any:
        """The outline of a config's forward, in every mode."""
        found = [
            outline(_built(config, "bf16", attention), batch=BASE[0], length=BASE[1], how=recorded)
            for attention, recorded in self.modes.values()
        ]
        return [[op for ops, _ in found for op in ops], found[0][1]]


def learn(config: Mapping[str, Any]) -> dict[str, Any]:
    """The learned form of a causal language model's config; raises TraceError with what it cannot
    express."""
    whole = full_config(config)
    short = shortened(whole)
    how = _How(short)
    base = how.trial(short)
    found = examine(short, base, how.trial)
    ropes = rope_types(short, base, how.trial)
    names = _Names(short, how)
    document: dict[str, Any] = {
        "model_type": str(config["model_type"]),
        "versions": {
            k: v for k, v in installed_versions().items() if k in ("torch", "transformers")
        },
        **names.facts,
        "symbols": {name: letter for name, (letter, _, _) in found.symbols.items()},
        "null_is_default": [n for n in found.symbols if resolves_null(config, n)],
        "must": {**found.must, **({"rope_type": ropes} if ropes else {})},
        "nonzero": found.nonzero,
        "defaults": _defaults(whole, found),
        "pads": _pads(short, how),
        "raw": how.raw,
        "eager_only": how.eager_only,
        "pad_default": short.get("pad_token_id") is not None,
        "tied_default": bool(whole.get("tie_word_embeddings")),
    }
    document["variants"], kinds = _variants(_Samples(short, found), how)
    document["kinds"] = kinds_rule(whole, short, kinds)
    _settle_head(document)
    return document


def _settle_head(document: dict[str, Any]) -> None:
    """What all variants say alike of the head, and of a table of learned positions."""
    forms = [form for modes in document["variants"].values() for form in modes.values()]
    document["head"]["rows"] = forms[0]["head"]["rows"][0]
    document["head"]["rescaled"] = bool(forms[0]["after"]["ops"])
    for form in forms:
        del form["head"]
    for path, kind, _, _, axes in forms[0]["entrance"]["weights"]:
        if kind == "embedding" and "pos" in path and "max_position" in str(axes[0]):
            document["positions"] = "max_position_embeddings"


class _Names:
    """Where layers, head and embedding are in the module tree, and whether layers are
    checkpointed."""

    def __init__(self, config: Mapping[str, Any], how: _How) -> None:
        model = _built(config, *how.plain)
        layers, head = landmarks(model)
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        path = next(p for p, m in model.named_modules() if m is embedding)
        layer = model.get_submodule(layers)[0]  # type: ignore[index]
        head_module = model.get_submodule(head)
        self.facts = {
            "layers": layers,
            "head": {"name": head, "bias": getattr(head_module, "bias", None) is not None},
            "tied_to": f"{path}.weight",
            "checkpointed": hasattr(layer, "gradient_checkpointing"),
        }


class _Samples:
    """The samples of a config: `alone` moves one symbol at a time, `together` as few samples as
    tell the symbols apart."""

    def __init__(self, short: Mapping[str, Any], found: Found) -> None:
        self.short, self.found = short, found
        names = list(found.symbols)
        self.single_alone = [
            self._one(ONE, ()),
            *(self._one((1, length), ()) for _, length in OTHERS[1:]),
            *(self._one(ONE, (name,)) for name in names),
        ]
        self.single_together = [
            self._one(ONE, ()),
            self._one((1, OTHERS[-1][1]), ()),
            *(
                self._one(
                    (1, OTHERS[1][1] if "s" in moved else ONE[1]), [n for n in names if n in moved]
                )
                for moved in coded(("s", *names))
            ),
        ]
        self.alone = [
            self._one(BASE, ()),
            *(self._one(place, ()) for place in OTHERS),
            *(self._one(BASE, (name,)) for name in names),
        ]
        self.together = [self._one(BASE, ()), self._one(OTHERS[-1], ())]
        for moved in coded(("b", "s", *names)):
            place = (
                OTHERS[0][0] if "b" in moved else BASE[0],
                OTHERS[1][1] if "s" in moved else BASE[1],
            )
            self.together.append(self._one(place, tuple(n for n in names if n in moved)))

    def _one(self, place: tuple[int, int], moved: Sequence[str]) -> Sizes:
        symbols = self.found.symbols
        values = {name: value for name, (_, value, _) in symbols.items()}
        changes = {name: symbols[name][2] for name in moved}
        bound = {symbols[name][0]: value for name, value in {**values, **changes}.items()}
        return Sizes({**self.short, **changes}, place, bound)


def _defaults(whole: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """What a field is where a config leaves it out: an expression in the others, or a value."""
    defaults: dict[str, Any] = {}
    given = {"model_type": whole["model_type"]}
    for name in found.symbols:
        samples = default_samples(given, name, found)
        numbers = [number for _, number in samples]
        if not numbers or not all(isinstance(n, int) for n in numbers):
            continue
        try:
            defaults[name] = Fitting([bound for bound, _ in samples]).fit(numbers)
        except TraceError:
            continue
    plain = full_config(given)
    counted = layers_field(plain)
    defaults["layers"] = plain.get(counted)
    for name in (*found.must, *found.nonzero):
        defaults[name] = plain.get(name)
    return defaults


def _pads(short: Mapping[str, Any], how: _How) -> bool:
    """Whether the embedding has a padding index where the config has one."""
    return any(
        getattr(module, "padding_idx", None) is not None
        for module in _built({**short, "pad_token_id": 0}, *how.plain).modules()
        if isinstance(module, nn.Embedding)
    )


def _variants(samples: _Samples, how: _How) -> tuple[dict[str, Any], list[int]]:
    fitting = Fitting([one.bound for one in samples.alone], _chunks(samples.short))
    variants: dict[str, Any] = {variant: {} for variant in VARIANTS}
    kinds: list[int] = []
    runs = [(variant, mode, False) for variant in VARIANTS for mode in how.modes]
    for mode, what in how.modes.items():
        if _is_other_at_one(samples.short, what):
            runs += [(variant, mode, True) for variant in VARIANTS]
    for variant, mode, single in counted(runs, "forms recorded", len(runs)):
        form = _form(samples, fitting, (variant, *how.modes[mode]), single=single)
        kinds = _merge_layers(form)
        variants[variant][SINGLE * single + mode] = form
    return variants, kinds


def _chunks(config: Mapping[str, Any]) -> list[int]:
    return [v for v in config.values() if type(v) is int and 1 < v <= BASE[1]]


def _form(
    samples: _Samples, fitting: Fitting, run: tuple[str, str, Recorded], *, single: bool
) -> dict[str, Any]:
    """One form: by few samples where those that moved alone have shown every size already."""
    together = samples.single_together if single else samples.together
    if fitting.expressions():
        few = Recognising([one.bound for one in together], fitting)
        try:
            return _joined(together, few, run)
        except (UnknownSizeError, ValueError):
            pass
    if not single:
        return _joined(samples.alone, fitting, run)
    own = Fitting([one.bound for one in samples.single_alone], _chunks(samples.short))
    return _joined(samples.single_alone, own, run)


def _is_other_at_one(config: Mapping[str, Any], mode: tuple[str, Recorded]) -> bool:
    """Whether a batch of one row runs other operations."""
    model = _built(config, "bf16", mode[0])
    names = [
        [(op[0], op[1]) for op in outline(model, batch=rows, length=BASE[1], how=mode[1])[0]]
        for rows in (1, BASE[0])
    ]
    return names[0] != names[1]


def _joined(
    sizes: Sequence[Sizes], fitting: Fitting, run: tuple[str, str, Recorded]
) -> dict[str, Any]:
    pieces = _samples(sizes, *run)
    return joined([_plain(one) for one in pieces], fitting)  # type: ignore[return-value]


def _merge_layers(form: dict[str, Any]) -> list[int]:
    """Keeps one layer of each kind; returns the kind of each layer."""
    seen: list[Any] = []
    kinds: list[int] = []
    for layer in form["layers"]:
        if layer not in seen:
            seen.append(layer)
        kinds.append(seen.index(layer))
    form["layers"] = seen
    return kinds


def kinds_rule(
    whole: Mapping[str, Any], short: Mapping[str, Any], kinds: Sequence[int]
) -> dict[str, Any]:
    """How a config says which kind each layer is: all alike, by its per-layer lists, the first
    ones, or these alone."""
    name = layers_field(short)
    rule: dict[str, Any] = {"count": name}
    if len(set(kinds)) == 1:
        return {**rule, "rule": "alike"}
    lists = per_layer_fields(short, short[name])
    by_list: dict[str, int] = {}
    for index, kind in enumerate(kinds):
        key = "|".join(str(short[field][index]) for field in lists)
        if by_list.setdefault(key, kind) != kind:
            break
    else:
        if lists:
            period = {f: _period(whole[f]) for f in lists}
            return {**rule, "rule": "lists", "lists": lists, "of": by_list, "period": period}
    default = full_config({"model_type": whole["model_type"]})
    lead = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
    fields = [k for k, v in short.items() if v == lead and type(v) is int and k != name]
    if len(set(kinds[lead:])) == 1 and fields:
        return {**rule, "rule": "lead", "field": fields[0], "default": default.get(fields[0])}
    return {**rule, "rule": "exact", "kinds": list(kinds)}


def _period(values: Sequence[Any]) -> list[Any]:
    """The shortest beginning that repeats through a list."""
    for length in range(1, len(values) + 1):
        if all(values[i] == values[i % length] for i in range(len(values))):
            return list(values[:length])
    return list(values)


def _samples(
    sizes: Sequence[Sizes], variant: str, attention: str, recorded: Recorded
) -> list[Pieces]:
    dtype = VARIANTS[variant][0]
    models: list[tuple[Mapping[str, Any], nn.Module]] = []
    found: list[Pieces] = []
    for one in sizes:
        model = next((m for config, m in models if config == one.config), None)
        if model is None:
            model = _built(one.config, dtype, attention)
            models.append((one.config, model))
        found.append(_pieces(model, *one.place, variant, recorded))
    return found


def _plain(pieces: Pieces) -> dict[str, Any]:
    return {
        "entrance": pieces.entrance.plain(),
        "layers": [layer.plain() for layer in pieces.layers],
        "exit": pieces.exit.plain(),
        "after": pieces.after.plain(),
        "head": {"rows": pieces.head["rows"]},
    }
