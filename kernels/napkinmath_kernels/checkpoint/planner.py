"""Which layers to recompute so that a step fits a byte budget in the least time: exact, by dynamic
programming.

Memory is that of the backward: when layer i runs its backward, what layers 0 to i saved is still
held, and what layer i had not saved is there again. A choice of options is feasible if, for every
layer,

    saved_0 + ... + saved_i + transient_i <= budget

and the cheapest feasible choice is found by walking the layers while keeping the states (bytes so
far, seconds so far) that no other state beats in both. A state that holds fewer bytes in less time
can be continued in every way that the other can. Compare Jain et al. 2020 (Checkmate, arXiv
1910.02653), which solves general graphs by integer programming; a chain needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import KernelInputError


@dataclass(frozen=True)
class LayerOption:
    """One way to run a layer: bytes held until its backward, further bytes that its backward needs,
    and seconds it adds to a step."""

    name: str
    saved_bytes: int
    transient_bytes: int
    extra_seconds: float


@dataclass(frozen=True)
class CheckpointPlan:
    """The options chosen, one a layer, the peak they reach and the seconds they add."""

    options: tuple[LayerOption, ...]
    peak_bytes: int
    extra_seconds: float

    @property
    def names(self) -> tuple[str, ...]:
        """The options' names, in the layers' order."""
        return tuple(option.name for option in self.options)


@dataclass(frozen=True)
class _State:
    held_bytes: int
    seconds: float
    peak_bytes: int
    option: LayerOption | None
    previous: _State | None


def _unbeaten(states: list[_State]) -> list[_State]:
    """States that no other matches or beats in bytes and seconds; of equals the one with the lower
    peak."""
    kept: list[_State] = []
    for state in sorted(
        states, key=lambda state: (state.held_bytes, state.seconds, state.peak_bytes)
    ):
        if not kept or state.seconds < kept[-1].seconds:
            kept.append(state)
    return kept


def _next(state: _State, option: LayerOption, budget_bytes: int) -> _State | None:
    held = state.held_bytes + option.saved_bytes
    peak = held + option.transient_bytes
    if peak > budget_bytes:
        return None
    return _State(
        held, state.seconds + option.extra_seconds, max(state.peak_bytes, peak), option, state
    )


def _trace(state: _State) -> tuple[LayerOption, ...]:
    chosen: list[LayerOption] = []
    step: _State | None = state
    while step is not None and step.option is not None:
        chosen.append(step.option)
        step = step.previous
    return tuple(reversed(chosen))


def smallest_peak(layers: Sequence[Sequence[LayerOption]]) -> int:
    """The lowest peak that any choice reaches."""
    held = peak = 0
    candidates = [(0, 0)]
    for options in layers:
        step = [
            (h + o.saved_bytes, max(p, h + o.saved_bytes + o.transient_bytes))
            for h, p in candidates
            for o in options
        ]
        candidates = []
        for held, peak in sorted(step):
            if not candidates or peak < candidates[-1][1]:
                candidates.append((held, peak))
    return min(peak for _, peak in candidates)


def plan_layers(layers: Sequence[Sequence[LayerOption]], budget_bytes: int) -> CheckpointPlan:
    """The choice of one option a layer that adds the fewest seconds within `budget_bytes`; of equal
    ones the one that holds least.

    Raises KernelInputError, with the smallest budget that would do, if none fits.
    """
    if any(not options for options in layers):
        raise KernelInputError(
            "plan_layers",
            "a layer without options",
            "at least one option a layer",
            "LayerOption('keep', ...)",
        )
    for options in layers:
        for o in options:
            if not (o.saved_bytes >= 0 and o.transient_bytes >= 0 and o.extra_seconds >= 0):
                raise KernelInputError(
                    "plan_layers",
                    str(o),
                    "bytes and seconds of 0 or more",
                    "LayerOption('keep', ...)",
                )
    states = [_State(0, 0.0, 0, None, None)]
    for options in layers:
        found = (_next(state, option, budget_bytes) for state in states for option in options)
        states = _unbeaten([state for state in found if state is not None])
        if not states:
            needed = smallest_peak(layers)
            raise KernelInputError(
                "plan_layers",
                f"a budget of {budget_bytes} bytes",
                f"at least {needed} bytes",
                "Recompute.OFFLOAD for some layers, or a smaller batch",
            )
    best = min(states, key=lambda state: (state.seconds, state.held_bytes))
    return CheckpointPlan(_trace(best), best.peak_bytes, best.seconds)


def __getattr__(name: str) -> object:
    """The name that the plan had in 0.1, until 0.3.0."""
    if name != "Plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from warnings import warn

    warn(
        f"{__name__}.Plan is CheckpointPlan; the old name ends with napkinmath 0.3.0",
        DeprecationWarning,
        stacklevel=2,
    )
    return CheckpointPlan
