"""Intercept and slope per layer, for the seconds and the bytes of each phase, from runs of one to
three layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
from napkinmath.calibration.measured_layers import KindStretches, LayerMemory, Linear, Stretch, Turn
from napkinmath.ir.ledger import Phase

from napkinmath_profiler.calibration.layer_plan import LayerPlan
from napkinmath_profiler.calibration.layer_stretches import Bytes, CutRun, Piece
from napkinmath_profiler.calibration.op_classes import OpClasses


def fit_linear(
    counts: Sequence[Sequence[int]], found: Sequence[float], *, not_negative: bool = False
) -> Linear:
    """Least squares over the numbers of layers of each kind; what the runs do not tell apart is
    shared evenly.

    ``not_negative``: a slope below zero is noise; it becomes zero and the intercept is fitted
    again.
    """
    rows = numpy.array([[1.0, *row] for row in counts])
    solution = numpy.linalg.lstsq(rows, numpy.array(found, dtype=float), rcond=None)[0]
    if not_negative and (solution < 0).any():
        keep = solution[1:] > 0
        if keep.any() and not keep.all():
            solution[1:][~keep] = 0.0
        elif not keep.any():
            solution[1:] = 0.0
        else:
            kept = rows[:, 1:]
            slopes = numpy.linalg.lstsq(kept, numpy.array(found, dtype=float), rcond=None)[0]
            return Linear(intercept=0.0, slopes=tuple(float(max(0.0, s)) for s in slopes))
        solution[0] = max(0.0, float(numpy.mean(numpy.array(found) - rows[:, 1:] @ solution[1:])))
    return Linear(intercept=float(solution[0]), slopes=tuple(float(s) for s in solution[1:]))


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


def fit_memory(plan: LayerPlan, runs: Mapping[tuple[int, ...], CutRun]) -> tuple[LayerMemory, int]:
    """The bytes of a whole model from short runs, and by how many bytes the runs themselves miss
    the fit; raises NotAligned.

    A run of one layer, which is first and last at once, takes no part: its single layer is another
    context.
    """
    deepest = max(plan.runs, key=len)
    if deepest not in runs:
        raise NotAligned(f"no run had {len(deepest)} layers")
    deep = {run: found for run, found in runs.items() if len(run) > 1 or len(deepest) == 1}
    counts = [plan.counts(run) for run in deep]
    missed = 0.0

    def line(values: Sequence[int]) -> Linear:
        nonlocal missed
        fit = fit_linear(counts, values)
        missed = max(
            [missed, *(abs(fit.at(row) - value) for row, value in zip(counts, values, strict=True))]
        )
        return fit

    turns: list[Turn] = []
    for pieces in _aligned([found.pieces for found in deep.values()]):
        whole = pieces[list(deep).index(deepest)]
        if whole.outside is not None:
            stretches = [piece.outside or Bytes() for piece in pieces]
            outside = Stretch(
                net=line([b.net for b in stretches]), high=line([b.high for b in stretches])
            )
            turns.append(Turn(step=whole.step, phase=whole.phase.value, outside=outside))
        else:
            layers = _layers(plan, deepest, whole)
            turns.append(
                Turn(
                    step=whole.step,
                    phase=whole.phase.value,
                    layers=layers,
                    descending=any(piece.descending for piece in pieces),
                )
            )
    base = line([found.base for found in deep.values()])
    return LayerMemory(base=base, turns=tuple(turns)), round(missed)


def _layers(plan: LayerPlan, run: tuple[int, ...], piece: Piece) -> tuple[KindStretches, ...]:
    """What the first, those between and the last of each kind do in a sweep; nothing where the
    sweep leaves a layer out."""
    found = dict(piece.layers)
    flat = (0.0,) * len(set(plan.order))
    kinds: list[KindStretches] = []
    for kind in range(len(flat)):
        own = [
            found.get(position, Bytes())
            for position, layer in enumerate(run)
            if plan.order[layer] == kind
        ]
        stretches = [
            Stretch(
                net=Linear(intercept=b.net, slopes=flat), high=Linear(intercept=b.high, slopes=flat)
            )
            for b in own
        ]
        kinds.append(
            KindStretches(
                first=stretches[0],
                between=stretches[1] if len(stretches) > 2 else None,
                last=stretches[-1],
            )
        )
    return tuple(kinds)


def _aligned(runs: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Pieces of all runs, those that correspond side by side."""
    shapes = [[(piece.step, piece.phase, piece.outside is None) for piece in run] for run in runs]
    if any(shape != shapes[0] for shape in shapes):
        lengths = ", ".join(str(len(shape)) for shape in shapes)
        raise NotAligned(f"runs of different depth have pieces that do not correspond ({lengths})")
    return [list(pieces) for pieces in zip(*runs, strict=True)]
