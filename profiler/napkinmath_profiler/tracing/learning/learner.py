"""Learns the form of a causal language model: recorded at several batches, lengths and sizes of its
config, and made one piece of data in which sizes are symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from napkinmath.models.learned_stages import DEPTHS
from napkinmath.models.tasks import CAUSAL, PICTURED, SEQ2SEQ
from torch import nn

from napkinmath_profiler.tracing.layer_stacks import find_stacks
from napkinmath_profiler.tracing.learning.composites import embeddings_of
from napkinmath_profiler.tracing.learning.config_fields import (
    examine,
    fields_read,
    full_config,
    resolves_null,
    rope_types,
    same_form,
)
from napkinmath_profiler.tracing.learning.document_fields import (
    classes_of,
    defaults_of,
    for_learning,
    moved_names,
)
from napkinmath_profiler.tracing.learning.equal_sizes import unequal_pairs
from napkinmath_profiler.tracing.learning.image_fields import (
    embedding_of,
    extra_tokens,
    has_stages,
    inputs_of,
    is_no_count_of_labels,
    is_no_side,
    is_of_images,
    is_scale,
    moves_in_time,
    tokens_of,
)
from napkinmath_profiler.tracing.learning.landmarks import built, landmarks
from napkinmath_profiler.tracing.learning.layer_fields import layers_field, shortened
from napkinmath_profiler.tracing.learning.layer_kinds import by_kind, carries, rules_of
from napkinmath_profiler.tracing.learning.recording import outline, refused_attention
from napkinmath_profiler.tracing.learning.samples import BASE, TARGET, SampleSizes, refuse_loops
from napkinmath_profiler.tracing.learning.stage_fields import (
    is_scale_of_stages,
    is_scale_or_side,
    stages_of,
    with_entries,
)
from napkinmath_profiler.tracing.learning.variants import MODES, RAW, variants_of
from napkinmath_profiler.tracing.meta_model import config_from, example_inputs
from napkinmath_profiler.tracing.observation import installed_versions
from napkinmath_profiler.tracing.trace_errors import TraceError

POSITIONS = "max_position_embeddings"
PAST, SPARE = 8, 4
"""Tokens by which a sequence is too long: tables have a few rows more than positions; and by which it
may have to be shorter."""


class _How:
    """How a class is run while it is learned: the modes that it has; `raw`: its masks are recorded
    operation by operation, because its forward does something with them."""

    def __init__(self, whole: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        model = _built_short(config)
        if model is None:
            config, model = whole, built(whole, "bf16", "eager")
        self.short = config
        self.task, self.refused_attention = landmarks(model).task, refused_attention(model)
        loss = self.task != CAUSAL
        masks = self.task != SEQ2SEQ  # of a length of their own, which no layer written by hand has
        self.modes = {k: (v[0], replace(v[1], loss=loss, masks=masks)) for k, v in MODES.items()}
        self.eager_only = False
        try:
            built(config, "bf16", "sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            self.modes, self.eager_only = {"eager": self.modes["eager"]}, True
        self.plain = ("bf16", next(iter(self.modes.values()))[0])
        self.raw = False
        self.shifts = self.task == SEQ2SEQ and self._shifts_labels()
        try:
            self.read_by(config)
        except Exception:  # whatever a forward does with a mask that is not there
            self.raw = True
            raw = replace(RAW, loss=loss)
            self.modes = {k: (v[0], raw) for k, v in self.modes.items() if k != "heads"}

    def of_images(self, bound: Mapping[str, int]) -> dict[str, Any]:
        """Tokens of an image beside those of its patches and registers; its input embedding."""
        model = built(self.short, *self.plain)
        given = example_inputs(model, model.config, micro_batch_size=2, sequence_length=1)
        marks = landmarks(model)

        def run() -> None:
            model(**given)

        return {
            "tokens": extra_tokens(tokens_of(model, marks.layers, run), bound),
            **embedding_of(model, run),
        }

    def trial(self, config: Mapping[str, Any], length: int = BASE[1]) -> Any:
        """The outline of a config's forward in the eager mode, which says most: its products
        refuse heads that do not go together. Recordings of all modes are compared later."""
        attention, recorded = self.modes["eager"]
        model = built(config, "bf16", attention)
        return outline(model, batch=BASE[0], length=length, how=recorded)

    def _shifts_labels(self) -> bool:
        """Whether what a decoder reads is made of the labels, not of the encoder's tokens."""
        attention, recorded = self.modes["eager"]
        model = built(self.short, "bf16", attention)
        try:
            outline(model, batch=BASE[0], length=BASE[1], target=TARGET, how=recorded)
        except Exception:  # whatever a class raises of labels of another length
            return False
        return True

    def limit(self, base: Any) -> int:
        """Length up to which its positions go: above, the class raises or runs otherwise; 0 where
        nothing limits it. A few may be those of padding."""
        longest = self.short.get(POSITIONS)
        if type(longest) is not int:
            return 0
        for length in (longest + PAST, *range(longest, longest - SPARE, -1)):
            try:
                alike = same_form(self.trial(self.short, length), base)
            except Exception:  # whatever a class raises of a length that it does not take
                continue
            if alike:
                return 0 if length > longest else length
        raise TraceError(f"it takes no sequence as long as its {POSITIONS}")

    def read_by(self, config: Mapping[str, Any]) -> set[str]:
        """The fields that a class asks for, in any mode."""
        read = set[str]()
        for attention, recorded in self.modes.values():
            with fields_read(config) as names:
                model = built(config, "bf16", attention)
                outline(model, batch=BASE[0], length=BASE[1], how=recorded)
            read |= names
        return read


def learn(config: Mapping[str, Any]) -> dict[str, Any]:
    """The learned form of a config under the class of its architecture, by default the causal
    language model's; raises TraceError with what it cannot express."""
    frozen: list[Callable[[str], bool]] = [lambda name: False]
    if is_of_images(config):
        for keep in (is_scale_of_stages, is_scale_or_side) if DEPTHS in full_config(config) else ():
            try:
                return _learned(with_entries(for_learning(config)), keep)
            except TraceError:
                continue
        frozen += [is_scale, is_no_count_of_labels]
        if moves_in_time(full_config(config)):
            frozen = frozen[1:]
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
    limit = how.limit(base) if how.task == SEQ2SEQ else 0
    if how.task not in PICTURED:
        refuse_loops(base, lambda length: how.trial(short, length), limit)
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
    if how.task in PICTURED:
        document |= how.of_images(found.bound({}))
        found.tokens = document["tokens"]
    sizes = SampleSizes(short, found, how.trial, how.task, targets=how.shifts)
    document["variants"], kinds = variants_of(sizes, how.modes)
    if how.task in PICTURED:
        inputs, types = inputs_of(built(short, *how.plain), sizes.alone)
        document["inputs"], document["input types"] = inputs, types
    document["carries"] = carries(document["variants"])
    if names.stages:
        document["stages"] = stages_of(names.stages, kinds)
    else:
        document |= rules_of(whole, short, kinds, names.num_encoders)
    if names.checkpointed:
        document["checkpointed"] = by_kind(names.checkpointed, kinds)
    for rule in (document.get("kinds", {}), document.get("decoder kinds", {})):
        for name in (rule.get("lead"), rule.get("every")):
            document["must"].pop(name, None)
    _settle_head(document)
    if limit:
        letter, short_of = found.symbols[POSITIONS].letter, short[POSITIONS] - limit
        document["positions"] = f"{letter}-{short_of}" if short_of else letter
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
            document["positions"] = POSITIONS


def _built_short(config: Mapping[str, Any]) -> nn.Module | None:
    """The model of a shortened config; None where its layers are not what its class counts."""
    counted_by = layers_field(config)
    if not is_of_images(config) or not counted_by:
        return built(config, "bf16", "eager")
    try:
        model = built(config, "bf16", "eager")
    except Exception:  # whatever a class raises of lists that do not go with its count
        return None
    stacks = find_stacks(model)
    return model if stacks and len(stacks[0].kinds) == config[counted_by] else None


class _Names:
    """Where layers, head and embedding are in the module tree, and whether layers are
    checkpointed."""

    def __init__(self, config: Mapping[str, Any], how: _How) -> None:
        model = built(config, *how.plain)
        marks = landmarks(model)
        embedding = next(iter(embeddings_of(model)), None)
        path = next((p for p, m in model.named_modules() if m is embedding), "")
        stacks: list[Any] = [model.get_submodule(one) for one in marks.stacks]
        self.stages = marks.stages
        self.num_encoders = len(stacks[0]) if marks.decoder else 0
        layers = [layer for stack in stacks for layer in stack]
        self.checkpointed = [hasattr(layer, "gradient_checkpointing") for layer in layers]
        head = model.get_submodule(marks.head) if marks.head else None
        self.tied = getattr(head, "weight", None) is getattr(embedding, "weight", 0)
        self.facts = {
            "layers": marks.layers,
            "head": {"name": marks.head, "bias": getattr(head, "bias", None) is not None},
            "tied_to": f"{path}.weight",
            "checkpointed": False,
            **({"decoder layers": marks.decoder} if marks.decoder else {}),
        }


def _labels_of(short: Mapping[str, Any], how: _How) -> dict[str, list[str]]:
    """What a batch of text has beside the ids, and its axes."""
    if how.task == CAUSAL:
        return {"labels": ["b", "s"]}
    model = built(short, *how.plain)
    given = example_inputs(model, model.config, micro_batch_size=2, sequence_length=3)
    axes = ["b", "st" if how.shifts else "s"]
    return {name: axes[: x.dim()] for name, x in given.items() if name != "input_ids"}


def _pads(short: Mapping[str, Any], how: _How) -> bool:
    """Whether the embedding has a padding index where the config has one."""
    return any(
        getattr(module, "padding_idx", None) is not None
        for module in built({**short, "pad_token_id": 0}, *how.plain).modules()
        if isinstance(module, nn.Embedding)
    )
