"""Learns the form of a causal language model: recorded at several batches, lengths and sizes of its
config, and made one piece of data in which sizes are symbols."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from napkinmath.base.progress import counted
from napkinmath.models.tasks import CAUSAL, IMAGES, named_task
from torch import nn

from napkinmath_profiler.tracing.layer_stacks import find_stacks
from napkinmath_profiler.tracing.learning.blocks import cut
from napkinmath_profiler.tracing.learning.composites import Recorded, embeddings_of
from napkinmath_profiler.tracing.learning.config_fields import (
    examine,
    fields_read,
    resolves_null,
    rope_types,
)
from napkinmath_profiler.tracing.learning.document_fields import (
    classes_of,
    defaults_of,
    for_learning,
    moved_names,
)
from napkinmath_profiler.tracing.learning.equal_sizes import unequal_pairs
from napkinmath_profiler.tracing.learning.image_fields import (
    extra_tokens,
    fitting_of,
    has_stages,
    inputs_of,
    is_no_count_of_labels,
    is_no_side,
    is_of_images,
    is_scale,
    tokens_of,
)
from napkinmath_profiler.tracing.learning.layer_fields import layers_field, shortened
from napkinmath_profiler.tracing.learning.layer_kinds import by_kind, carries, kinds_rule
from napkinmath_profiler.tracing.learning.pieces import ModelPieces
from napkinmath_profiler.tracing.learning.recording import outline, record, refused_attention
from napkinmath_profiler.tracing.learning.samples import (
    BASE,
    SampleSizes,
    Sizes,
    chunks_of,
    refuse_loops,
    telling_apart,
)
from napkinmath_profiler.tracing.learning.symbols import (
    Fitting,
    Recognising,
    UnknownSizeError,
    joined,
)
from napkinmath_profiler.tracing.learning.weight_rows import Landmarks
from napkinmath_profiler.tracing.meta_model import (
    build_model,
    config_from,
    example_inputs,
    set_use_cache,
)
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
    recording = record(
        model,
        batch=batch,
        length=length,
        autocast=VARIANTS[variant][1],
        how=replace(recorded, keeps_type=variant == OVER_QUANTIZED),
    )
    return cut(recording, model, landmarks(model))


def _built(config: Mapping[str, Any], dtype: str, attention: str) -> nn.Module:
    built = config_from(copy.deepcopy(dict(config)))
    model = build_model(built, dtype=dtype, attn_implementation=attention)
    set_use_cache(model, False)
    return model.train()


def landmarks(model: Any) -> Landmarks:
    """Where the repeated layers and the head are, and which task the class is of."""
    stacks = find_stacks(model)
    task = named_task(type(model).__name__, CAUSAL)
    if task == IMAGES:
        apart = [x for x in stacks if len(x.kinds) == len(stacks[0].kinds)]
        return Landmarks(stacks[0].path if len(apart) == 1 else "", "", task)
    if not stacks:
        raise TraceError("it has no list of layers that repeat")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    paths = [path for path, module in model.named_modules() if module is head]
    if task == CAUSAL and (head is None or not paths):
        raise TraceError("it has no head over a vocabulary")
    return Landmarks(stacks[0].path, paths[0] if head is not None and paths else "", task)


class _How:
    """How a class is run while it is learned: the modes that it has; `raw`: its masks are recorded
    operation by operation, because its forward does something with them."""

    def __init__(self, whole: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        model = _built_short(config)
        if model is None:
            config, model = whole, _built(whole, "bf16", "eager")
        self.short = config
        self.task, self.refused_attention = landmarks(model).task, refused_attention(model)
        loss = self.task != CAUSAL
        self.modes = {k: (v[0], replace(v[1], loss=loss)) for k, v in MODES.items()}
        self.eager_only = False
        try:
            _built(config, "bf16", "sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            self.modes, self.eager_only = {"eager": self.modes["eager"]}, True
        self.plain = ("bf16", next(iter(self.modes.values()))[0])
        self.raw = False
        try:
            self.read_by(config)
        except Exception:  # whatever a forward does with a mask that is not there
            self.raw = True
            raw = replace(RAW, loss=loss)
            self.modes = {k: (v[0], raw) for k, v in self.modes.items() if k != "heads"}

    def extra_tokens(self, bound: Mapping[str, int]) -> int | None:
        """Tokens of an image beside those of its patches and registers."""
        model = _built(self.short, *self.plain)
        given = example_inputs(model, model.config, micro_batch_size=2, sequence_length=1)
        marks = landmarks(model)
        return extra_tokens(tokens_of(model, marks.layers, lambda: model(**given)), bound)

    def trial(self, config: Mapping[str, Any], length: int = BASE[1]) -> Any:
        """The outline of a config's forward in the eager mode, which says most: its products
        refuse heads that do not go together. Recordings of all modes are compared later."""
        attention, recorded = self.modes["eager"]
        model = _built(config, "bf16", attention)
        return outline(model, batch=BASE[0], length=length, how=recorded)

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
    """The learned form of a config under the class of its architecture, by default the causal
    language model's; raises TraceError with what it cannot express."""
    frozen: list[Callable[[str], bool]] = [lambda name: False]
    if is_of_images(config):
        frozen += [is_scale, is_no_count_of_labels]
        if has_stages(for_learning(config)):  # whose widths and depths are lists
            frozen = [is_no_side, is_no_count_of_labels]
    for keep in frozen[:-1]:
        try:
            return _learned(config, keep)
        except TraceError:
            continue
    return _learned(config, frozen[-1])


def _learned(config: Mapping[str, Any], frozen: Callable[[str], bool]) -> dict[str, Any]:
    """The same where sizes that are `frozen` keep their value."""
    whole = for_learning(config)
    how = _How(whole, shortened(whole))
    short = how.short
    base = how.trial(short)
    if how.task != IMAGES:
        refuse_loops(base, lambda length: how.trial(short, length))
    found = examine(short, base, how.trial, how.read_by(short), frozen)
    ropes = rope_types(short, base, how.trial)
    names = _Names(short, how)
    document: dict[str, Any] = {
        "model_type": str(config["model_type"]),
        "task": how.task,
        "refused_attention": how.refused_attention,
        "classes": classes_of(str(config["model_type"])),
        "inputs": {"input ids": ["b", "s"], **_labels_of(short, how)},
        "versions": {
            k: v for k, v in installed_versions().items() if k in ("torch", "transformers")
        },
        **names.facts,
        "symbols": {name: moves.letter for name, moves in found.symbols.items()},
        "ties": found.ties,
        "thresholds": found.thresholds,
        "unequal": unequal_pairs(short, found, base, how.trial),
        "null_is_default": [n for n in (*found.symbols, *found.ties) if resolves_null(config, n)],
        "must": {**found.must, **({"rope_type": ropes} if ropes else {})},
        "nonzero": found.nonzero,
        "defaults": defaults_of(whole, found),
        "aliases": dict(type(config_from(dict(config))).attribute_map),
        "moved": moved_names(str(config["model_type"])),
        "pads": _pads(short, how),
        "raw": how.raw,
        "eager_only": how.eager_only,
        "pad_default": short.get("pad_token_id") is not None,
        "tied_default": bool(whole.get("tie_word_embeddings", names.tied)),
    }
    if how.task == IMAGES:
        document["tokens"] = found.tokens = how.extra_tokens(found.bound({}))
    sizes = SampleSizes(short, found, how.trial, of_images=how.task == IMAGES)
    document["variants"], kinds = _variants(sizes, how)
    if how.task == IMAGES:
        inputs, types = inputs_of(_built(short, *how.plain), sizes.alone)
        document["inputs"], document["input types"] = inputs, types
    document["carries"] = carries(document["variants"])
    document["kinds"] = rule = kinds_rule(whole, short, kinds)
    if names.checkpointed:
        document["checkpointed"] = by_kind(names.checkpointed, kinds)
    for name in (rule["lead"], rule["every"]):
        document["must"].pop(name, None)
    _settle_head(document)
    return document


def _settle_head(document: dict[str, Any]) -> None:
    """What all variants say alike of the head, and of a table of learned positions."""
    forms = [form for modes in document["variants"].values() for form in modes.values()]
    if document["task"] == CAUSAL:
        document["head"]["rows"] = forms[0]["head"]["rows"][0]
        document["head"]["rescaled"] = bool(forms[0]["after"]["ops"])
    for form in forms:
        del form["head"]
    for path, kind, _, _, axes in forms[0]["entrance"]["weights"]:
        if kind == "embedding" and "pos" in path and "max_position" in str(axes[0]):
            document["positions"] = "max_position_embeddings"


def _built_short(config: Mapping[str, Any]) -> nn.Module | None:
    """The model of a shortened config; None where its layers are not what its class counts."""
    counted_by = layers_field(config)
    if not is_of_images(config) or not counted_by:
        return _built(config, "bf16", "eager")
    try:
        model = _built(config, "bf16", "eager")
    except Exception:  # whatever a class raises of lists that do not go with its count
        return None
    stacks = find_stacks(model)
    return model if stacks and len(stacks[0].kinds) == config[counted_by] else None


class _Names:
    """Where layers, head and embedding are in the module tree, and whether layers are
    checkpointed."""

    def __init__(self, config: Mapping[str, Any], how: _How) -> None:
        model = _built(config, *how.plain)
        marks = landmarks(model)
        embedding = next(iter(embeddings_of(model)), None)
        path = next((p for p, m in model.named_modules() if m is embedding), "")
        layers: Any = model.get_submodule(marks.layers) if marks.layers else []
        self.checkpointed = [hasattr(layer, "gradient_checkpointing") for layer in layers]
        head = model.get_submodule(marks.head) if marks.head else None
        self.tied = getattr(head, "weight", None) is getattr(embedding, "weight", 0)
        self.facts = {
            "layers": marks.layers,
            "head": {"name": marks.head, "bias": getattr(head, "bias", None) is not None},
            "tied_to": f"{path}.weight",
            "checkpointed": False,
        }


def _labels_of(short: Mapping[str, Any], how: _How) -> dict[str, list[str]]:
    """What a batch of text has beside the ids, and its axes."""
    if how.task == CAUSAL:
        return {"labels": ["b", "s"]}
    model = _built(short, *how.plain)
    given = example_inputs(model, model.config, micro_batch_size=2, sequence_length=3)
    return {name: ["b", "s"][: x.dim()] for name, x in given.items() if name != "input_ids"}


def _pads(short: Mapping[str, Any], how: _How) -> bool:
    """Whether the embedding has a padding index where the config has one."""
    return any(
        getattr(module, "padding_idx", None) is not None
        for module in _built({**short, "pad_token_id": 0}, *how.plain).modules()
        if isinstance(module, nn.Embedding)
    )


def _variants(samples: SampleSizes, how: _How) -> tuple[dict[str, Any], list[int]]:
    fittings = [
        fitting_of([one.bound for one in sizes], chunks_of(samples.short))
        for sizes in (samples.alone, samples.single_alone)
    ]
    variants: dict[str, Any] = {variant: {} for variant in VARIANTS}
    runs = [(variant, mode, False) for variant in VARIANTS for mode in how.modes]
    for mode, what in how.modes.items():
        if _is_other_at_one(samples.short, what):
            runs += [(variant, mode, True) for variant in VARIANTS]
    for variant, mode, single in counted(runs, "forms recorded", len(runs)):
        form = _form(samples, fittings[single], (variant, *how.modes[mode]), single=single)
        variants[variant][SINGLE * single + mode] = form
    return variants, _merge_layers([form for modes in variants.values() for form in modes.values()])


def _form(
    samples: SampleSizes, fitting: Fitting, run: tuple[str, str, Recorded], *, single: bool
) -> dict[str, Any]:
    """One form: by few samples where those that moved alone have shown every size already."""
    few = samples.single_few if single else samples.few
    alone = samples.single_alone if single else samples.alone
    if fitting.expressions():
        few = telling_apart(few, alone, fitting.expressions())
        try:
            return _joined(few, Recognising([one.bound for one in few], fitting), run)
        except (UnknownSizeError, ValueError):
            pass
    return _joined(alone, fitting, run)


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


def _merge_layers(forms: Sequence[dict[str, Any]]) -> list[int]:
    """Keeps one layer of each kind, alike in all forms; returns the kind of each layer."""
    seen: list[Any] = []
    kinds: list[int] = []
    for layer in zip(*(form["layers"] for form in forms), strict=True):
        if layer not in seen:
            seen.append(layer)
        kinds.append(seen.index(layer))
    for index, form in enumerate(forms):
        form["layers"] = [layer[index] for layer in seen]
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
        "after": pieces.after.plain() if pieces.after else None,
        "head": {"rows": pieces.head["rows"]} if pieces.head else {},
    }
