"""A model too large for the device: measure the fewest layers that show every context, and write
out the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from napkinmath.base.errors import InputError
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Timeline

from napkinmath_profiler.measuring.measurement import Measurement
from napkinmath_profiler.trace import TraceOptions, build
from napkinmath_profiler.tracing.extrapolation import NotRepeating, extrapolated
from napkinmath_profiler.tracing.layer_stacks import LayerStack, find_stacks, kept_layers
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import timeline_of


def num_layers_of(config: Any) -> int:
    """Layers of a transformers config's text model."""
    return int(config.get_text_config().num_hidden_layers)


def with_kept(config: Any, kept: Sequence[int]) -> Any:
    """A copy of ``config`` with only the ``kept`` layers; lists with one entry a layer are cut with
    them."""
    config = copy.deepcopy(config_from(config))
    text = config.get_text_config()
    total = num_layers_of(config)
    if not kept or not all(0 <= index < total for index in kept):
        raise InputError(
            f"{len(kept)} layers cannot be measured of a model with {total}; use 1 to {total}"
        )
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(text, name, type(value)(value[index] for index in kept))
    text.num_hidden_layers = len(kept)
    return config


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Which layers to measure: ``kept``, and beside them the shorter ``slope`` that tells seconds a
    layer; () where all are measured."""

    kept: tuple[int, ...]
    slope: tuple[int, ...]
    stack: LayerStack | None

    @property
    def is_whole(self) -> bool:
        """Whether every layer is measured."""
        return self.stack is None


def plan_layers(
    config: Any, options: TraceOptions, fits: Callable[[int], bool], *, wanted: int | None = None
) -> LayerChoice:
    """All layers if they fit (or ``wanted`` of them), else the fewest that show every context, else
    as many as fit.

    ``fits`` says whether a model of so many layers can be measured.
    """
    config = config_from(config)
    total = num_layers_of(config)
    if wanted is not None and wanted > total:
        raise InputError(
            f"{wanted} layers cannot be measured of a model with {total}; use 1 to {total}"
        )
    if wanted == total or (wanted is None and fits(total)):
        return LayerChoice(tuple(range(total)), (), None)
    stacks = find_stacks(build(copy.deepcopy(config), options))
    if len(stacks) != 1 or len(stacks[0].kinds) != total:
        kept = tuple(range(wanted or _largest(fits, total)))
        return LayerChoice(
            kept,
            kept[: len(kept) // 2],
            None if len(kept) == total else LayerStack("", tuple(range(total))),
        )
    kept = tuple(kept_layers(stacks[0].kinds))
    if wanted is not None:
        kept = tuple(range(wanted)) if wanted < len(kept) else _spread(kept, wanted, total)
    elif not fits(len(kept)):
        kept = tuple(range(_largest(fits, len(kept))))
    if len(kept) == total:
        return LayerChoice(kept, (), None)
    return LayerChoice(kept, kept[: max(1, len(kept) // 2)] if len(kept) > 1 else (), stacks[0])


def _spread(kept: tuple[int, ...], wanted: int, total: int) -> tuple[int, ...]:
    """``kept`` with more layers of the middle, up to ``wanted``."""
    more = [index for index in range(total) if index not in kept]
    return tuple(sorted((*kept, *more[: wanted - len(kept)])))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    return next((count for count in range(most, 0, -1) if fits(count)), 1)


@dataclass(frozen=True, slots=True)
class ExtrapolatedModel:
    """The whole model from measured layers: its events where they repeat (else only the peak of
    each phase), and its seconds by phase."""

    result: TraceResult | None
    phase_peaks: dict[Phase, int]
    seconds: dict[Phase, float]
    num_written: int


def whole_model(
    measured: Measurement, shorter: Measurement | None, plan: LayerChoice
) -> ExtrapolatedModel:
    """What ``measured`` says of all layers; ``shorter`` gives the slope of seconds and, where
    events do not repeat, of bytes."""
    assert plan.stack is not None and measured.result is not None and measured.timeline is not None
    missing = len(plan.stack.kinds) - len(plan.kept)
    seconds = _lines(_seconds(measured), shorter and _seconds(shorter), plan, missing)
    try:
        result = extrapolated(measured.result, plan.stack, plan.kept)
        return ExtrapolatedModel(result, _peaks(timeline_of(result)), seconds, missing)
    except NotRepeating:
        there = None
        if shorter is not None and shorter.timeline is not None:
            there = _peaks(shorter.timeline)
        lines = _lines(_peaks(measured.timeline), there, plan, missing)
        peaks = {phase: round(value) for phase, value in lines.items()}
        return ExtrapolatedModel(None, peaks, seconds, missing)


def _peaks(timeline: Timeline) -> dict[Phase, int]:
    return {phase: point.nbytes for phase, point in timeline.phase_peaks().items()}


def _seconds(measurement: Measurement) -> dict[Phase, float]:
    return {phase: summary.seconds.median_s for phase, summary in measurement.phases.items()}


def _lines(
    here: Mapping[Phase, float],
    shorter: Mapping[Phase, float] | None,
    plan: LayerChoice,
    missing: int,
) -> dict[Phase, float]:
    """Each phase's line through two numbers of layers, at all of them; nothing without a second
    point.

    More layers never take less: where noise says so, the line is level.
    """
    step = len(plan.kept) - len(plan.slope)
    if not shorter or not plan.slope or step == 0:
        return {}
    return {
        phase: value + missing * max(0.0, value - shorter.get(phase, value)) / step
        for phase, value in here.items()
    }
