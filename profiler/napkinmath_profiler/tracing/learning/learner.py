"""Learns the form of a causal language model: recorded at several batches, lengths and sizes of its
config, and made one piece of data in which sizes are symbols."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from napkinmath.base.progress import counted
from torch import nn

from napkinmath_profiler.tracing.layer_stacks import find_stacks
from napkinmath_profiler.tracing.learning.blocks import ModelPieces, cut
from napkinmath_profiler.tracing.learning.composites import Recorded
from napkinmath_profiler.tracing.learning.config_fields import (
    FoundFields,
    default_samples,
    examine,
    fields_read,
    full_config,
    layers_field,
    resolves_null,
    rope_types,
    shortened,
)
from napkinmath_profiler.tracing.learning.layer_kinds import kinds_rule
from napkinmath_profiler.tracing.learning.recording import outline, record
from napkinmath_profiler.tracing.learning.samples import BASE, SampleSizes, Sizes
from napkinmath_profiler.tracing.learning.symbols import (
    Fitting,
    Recognising,
    UnknownSizeError,
    joined,
)
from napkinmath_profiler.tracing.meta_model import build_model, config_from, set_use_cache
from napkinmath_profiler.tracing.observation import installed_versions
from napkinmath_profiler.tracing.trace_errors import TraceError

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


def _pieces(
    model: nn.Module, batch: int, length: int, variant: str, recorded: Recorded
) -> ModelPieces:
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


def landmarks(model: Any) -> tuple[str, str]:
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
        landmarks(_built(config, "bf16", "eager"))
        try:
            _built(config, "bf16", "sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            self.modes, self.eager_only = {"eager": MODES["eager"]}, True
        self.plain = ("bf16", next(iter(self.modes.values()))[0])
        self.raw = False
        try:
            self.read_by(config)
        except Exception:  # whatever a forward does with a mask that is not there
            self.raw = True
            self.modes = {k: (v[0], RAW) for k, v in self.modes.items() if k != "heads"}

    def trial(self, config: Mapping[str, Any]) -> Any:
        """The outline of a config's forward in the eager mode, which says most: its products
        refuse heads that do not go together. Recordings of all modes are compared later."""
        attention, recorded = self.modes["eager"]
        model = _built(config, "bf16", attention)
        return outline(model, batch=BASE[0], length=BASE[1], how=recorded)

    def read_by(self, config: Mapping[str, Any]) -> set[str]:
        """The fields that a class asks for, in any mode."""
        read = set[str]()
        for attention, recorded in self.modes.values():
            with fields_read(config) as names:
                model = _built(config, "bf16", attention)
                outline(model, batch=BASE[0], length=BASE[1], how=recorded)
            read |= names
        return read


def learn(config: Mapping[str, Any]) -> dict[str, Any]:
    """The learned form of a causal language model's config; raises TraceError with what it cannot
    express."""
    whole = full_config(config)
    short = shortened(whole)
    how = _How(short)
    base = how.trial(short)
    found = examine(short, base, how.trial, how.read_by(short))
    ropes = rope_types(short, base, how.trial)
    names = _Names(short, how)
    document: dict[str, Any] = {
        "model_type": str(config["model_type"]),
        "versions": {
            k: v for k, v in installed_versions().items() if k in ("torch", "transformers")
        },
        **names.facts,
        "symbols": {name: moves.letter for name, moves in found.symbols.items()},
        "ties": found.ties,
        "thresholds": found.thresholds,
        "null_is_default": [n for n in (*found.symbols, *found.ties) if resolves_null(config, n)],
        "must": {**found.must, **({"rope_type": ropes} if ropes else {})},
        "nonzero": found.nonzero,
        "defaults": _defaults(whole, found),
        "pads": _pads(short, how),
        "raw": how.raw,
        "eager_only": how.eager_only,
        "pad_default": short.get("pad_token_id") is not None,
        "tied_default": bool(whole.get("tie_word_embeddings")),
    }
    document["variants"], kinds = _variants(SampleSizes(short, found, how.trial), how)
    document["kinds"] = rule = kinds_rule(whole, short, kinds)
    for name in (rule["lead"], rule["every"]):
        document["must"].pop(name, None)
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


def _defaults(whole: Mapping[str, Any], found: FoundFields) -> dict[str, Any]:
    """What a field is where a config leaves it out: an expression in the others, or a value."""
    defaults: dict[str, Any] = {}
    given = {"model_type": whole["model_type"]}
    for name in (*found.symbols, *found.ties):
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
    for name in (*found.must, *found.nonzero, *found.thresholds):
        defaults[name] = plain.get(name)
    return defaults


def _pads(short: Mapping[str, Any], how: _How) -> bool:
    """Whether the embedding has a padding index where the config has one."""
    return any(
        getattr(module, "padding_idx", None) is not None
        for module in _built({**short, "pad_token_id": 0}, *how.plain).modules()
        if isinstance(module, nn.Embedding)
    )


def _variants(samples: SampleSizes, how: _How) -> tuple[dict[str, Any], list[int]]:
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
    samples: SampleSizes, fitting: Fitting, run: tuple[str, str, Recorded], *, single: bool
) -> dict[str, Any]:
    """One form: by few samples where those that moved alone have shown every size already."""
    few_samples = samples.single_few if single else samples.few
    if fitting.expressions():
        few = Recognising([one.bound for one in few_samples], fitting)
        try:
            return _joined(few_samples, few, run)
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


def _samples(
    sizes: Sequence[Sizes], variant: str, attention: str, recorded: Recorded
) -> list[ModelPieces]:
    dtype = VARIANTS[variant][0]
    models: list[tuple[Mapping[str, Any], nn.Module]] = []
    found: list[ModelPieces] = []
    for one in sizes:
        model = next((m for config, m in models if config == one.config), None)
        if model is None:
            model = _built(one.config, dtype, attention)
            models.append((one.config, model))
        found.append(_pieces(model, *one.place, variant, recorded))
    return found


def _plain(pieces: ModelPieces) -> dict[str, Any]:
    return {
        "entrance": pieces.entrance.plain(),
        "layers": [layer.plain() for layer in pieces.layers],
        "exit": pieces.exit.plain(),
        "after": pieces.after.plain(),
        "head": {"rows": pieces.head["rows"]},
    }
