"""Intercept and slope per layer, for the seconds and the bytes of each phase, from runs of one to
three layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from napkinmath.calibration.measured_layers import KindStretches, LayerMemory, Linear, Stretch, Turn
from napkinmath.ir.ledger import Phase

from napkinmath_profiler.calibration.layer_plan import LayerPlan
from napkinmath_profiler.calibration.layer_stretches import Bytes, CutRun, StretchPiece
from napkinmath_profiler.calibration.op_classes import OpClasses


def fit_linear(
    counts: Sequence[Sequence[int]], found: Sequence[float], *, not_negative: bool = False
) -> Linear:
    """Least squares over the numbers of layers of each kind; what the runs do not separate is
    shared evenly.

    ``not_negative``: a slope below zero is noise; it becomes zero and the intercept is fitted
    again.
    """
    rows = numpy.array([[1.0, *row] for row in counts])
    solution = _least_squares(rows, found)
    if not_negative and (solution < 0).any():
        keep = solution[1:] > 0
        if keep.any() and not keep.all():
            solution[1:][~keep] = 0.0
        elif not keep.any():
            solution[1:] = 0.0
        else:
            slopes = _least_squares(rows[:, 1:], found)
            return Linear(intercept=0.0, slopes=tuple(float(max(0.0, s)) for s in slopes))
        solution[0] = max(0.0, float(numpy.mean(numpy.array(found) - rows[:, 1:] @ solution[1:])))
    return Linear(intercept=float(solution[0]), slopes=tuple(float(s) for s in solution[1:]))


def _least_squares(rows: Any, found: Sequence[float]) -> Any:
    return numpy.linalg.lstsq(rows, numpy.array(found, dtype=float), rcond=None)[0]


def fit_seconds(
    plan: LayerPlan, runs: Mapping[tuple[int, ...], Mapping[Phase, float]]
) -> dict[str, Linear]:
    """Seconds of each phase that every run has; the loss counts as part of the forward."""
    counts = [plan.counts(run) for run in runs]
    joined = [_with_loss(figures) for figures in runs.values()]
    phases = [phase for phase in Phase if all(phase in figures for figures in joined)]
    return {
        phase.value: fit_linear(counts, [figures[phase] for figures in joined], not_negative=True)
        for phase in phases
    }


def _with_loss(figures: Mapping[Phase, float]) -> dict[Phase, float]:
    found = dict(figures)
    if Phase.LOSS in found and Phase.FORWARD in found:
        found[Phase.FORWARD] += found.pop(Phase.LOSS)
    return found


def fit_classes(
    plan: LayerPlan, runs: Mapping[tuple[int, ...], OpClasses]
) -> tuple[tuple[str, tuple[tuple[str, Linear], ...]], ...]:
    """Seconds of each phase by kind of operation; a kind that some runs lack took no time there."""
    counts = [plan.counts(run) for run in runs]
    found: list[tuple[str, tuple[tuple[str, Linear], ...]]] = []
    for phase in Phase:
        kinds = sorted({kind for classes in runs.values() for kind in classes.get(phase, {})})
        fits = {
            kind: fit_linear(
                counts, [c.get(phase, {}).get(kind, 0.0) for c in runs.values()], not_negative=True
            )
            for kind in kinds
        }
        if fits:
            found.append((phase.value, tuple(fits.items())))
    return tuple(found)


class NotAligned(Exception):
    """The runs' pieces do not correspond; their memory cannot be carried over to other depths."""


class _Lines:
    """Lines through the runs' values, and by how much the worst run misses its line."""

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        self._counts = counts
        self.missed = 0.0

    def through(self, values: Sequence[int]) -> Linear:
        """The line through one value a run."""
        fit = fit_linear(self._counts, values)
        misses = (abs(fit.at(row) - value) for row, value in zip(self._counts, values, strict=True))
        self.missed = max([self.missed, *misses])
        return fit

    def stretch(self, runs: Sequence[Bytes]) -> Stretch:
        """The lines of a stretch's two figures."""
        net = self.through([found.net for found in runs])
        return Stretch(net=net, high=self.through([found.high for found in runs]))


def fit_memory(plan: LayerPlan, runs: Mapping[tuple[int, ...], CutRun]) -> tuple[LayerMemory, int]:
    """The bytes of a whole model from short runs, and by how many bytes the runs themselves miss
    the fit; raises NotAligned.

    A run of one layer, which is first and last at once, takes no part: its single layer is another
    context.
    """
    deepest = max(plan.runs, key=len)
    if deepest not in runs:
        raise NotAligned(f"no run had {len(deepest)} layers")
    deep: dict[tuple[int, ...], CutRun] = {
        run: found for run, found in runs.items() if len(run) > 1 or len(deepest) == 1
    }
    lines = _Lines([plan.counts(run) for run in deep])
    turns: list[Turn] = []
    for pieces in _aligned([found.pieces for found in deep.values()]):
        whole = pieces[list(deep).index(deepest)]
        turn = Turn(step=whole.step, phase=whole.phase.value)
        if whole.outside is not None:
            outside = lines.stretch([piece.outside or Bytes() for piece in pieces])
            turns.append(turn.replace(outside=outside))
        else:
            descending = any(piece.descending for piece in pieces)
            layers = _layers(plan, deepest, whole)
            turns.append(turn.replace(layers=layers, descending=descending))
    base = lines.through([found.base for found in deep.values()])
    return LayerMemory(base=base, turns=tuple(turns)), round(lines.missed)


def _layers(
    plan: LayerPlan, run: tuple[int, ...], piece: StretchPiece
) -> tuple[KindStretches, ...]:
    """What the first, those between and the last of each kind do in a sweep; nothing where the
    sweep leaves a layer out."""
    found = dict(piece.layers)
    flat = (0.0,) * len(set(plan.order))

    def stretch(position: int) -> Stretch:
        own = found.get(position, Bytes())
        net = Linear(intercept=own.net, slopes=flat)
        return Stretch(net=net, high=Linear(intercept=own.high, slopes=flat))

    kinds: list[KindStretches] = []
    for kind in range(len(flat)):
        places = [position for position, layer in enumerate(run) if plan.order[layer] == kind]
        first, last = stretch(places[0]), stretch(places[-1])
        between = stretch(places[1]) if len(places) > 2 else None
        kinds.append(KindStretches(first=first, between=between, last=last))
    return tuple(kinds)


def _aligned(runs: Sequence[Sequence[StretchPiece]]) -> list[list[StretchPiece]]:
    """Pieces of all runs, those that correspond side by side."""
    shapes = [[(piece.step, piece.phase, piece.outside is None) for piece in run] for run in runs]
    if any(shape != shapes[0] for shape in shapes):
        lengths = ", ".join(str(len(shape)) for shape in shapes)
        raise NotAligned(f"runs of different depth have pieces that do not correspond ({lengths})")
    return [list(pieces) for pieces in zip(*runs, strict=True)]
