"""Measured layers: what one to three real layers of a model took, as intercept + slope per layer,
and the whole model that follows.

Seconds are linear in the number of layers of each kind. Bytes are not, since the moment of the peak
moves. What is linear is each stretch of the step (its net change and how high it goes), so the
stretches of all layers are laid end to end and the peak is read off them.
"""

from __future__ import annotations

from hashlib import sha256

from napkinmath.base import values
from napkinmath.base.cuda import ALLOCATION_GRANULE
from napkinmath.base.errors import InputError, plain, shown
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec

MAX_LAYERS = 100_000


class Linear(Record):
    """`intercept` for what is there once, and a slope for each kind of layer."""

    intercept: float
    slopes: tuple[float, ...]

    def at(self, counts: Sequence[int]) -> float:
        """The value with so many layers of each kind."""
        return self.intercept + sum(
            slope * count for slope, count in zip(self.slopes, counts, strict=True)
        )


class Stretch(Record):
    """Bytes over a stretch of the step, from its start: the change at its end, and the highest
    point."""

    net: Linear
    high: Linear


class KindStretches(Record):
    """What layers of one kind do in a sweep: the first of them, those between, and the last."""

    first: Stretch
    last: Stretch
    between: Stretch | None = None


class Turn(Record):
    """Either one stretch outside the layers, or a sweep over them, by kind."""

    step: int
    phase: str
    outside: Stretch | None = None
    layers: tuple[KindStretches, ...] = ()
    descending: bool = False


class LayerMemory(Record):
    """Bytes before the first step, and the turns of the steps in order."""

    base: Linear
    turns: tuple[Turn, ...]

    def phase_peaks(self, order: Sequence[int]) -> dict[str, int]:
        """The highest bytes of each phase over all steps, for layers of these kinds in this order;
        whole allocation granules."""
        counts = counts_of(order, len(self.base.slopes))
        live = self.base.at(counts)
        peaks: dict[str, float] = {}
        for turn in self.turns:
            for stretch in _stretches(turn, order):
                peaks[turn.phase] = max(
                    peaks.get(turn.phase, 0.0), live, live + stretch.high.at(counts)
                )
                live += stretch.net.at(counts)
        return {
            phase: -(-round(nbytes) // ALLOCATION_GRANULE) * ALLOCATION_GRANULE
            for phase, nbytes in peaks.items()
        }


class LayerPoint(Record):
    """One batch and sequence length: seconds of each phase of a micro-step's worth of work, and
    bytes where they were recorded."""

    micro_batch_size: int
    sequence_length: int
    seconds: tuple[tuple[str, Linear], ...]
    memory: LayerMemory | None = None
    num_runs: int = 0
    classes: tuple[tuple[str, tuple[tuple[str, Linear], ...]], ...] = ()
    """Seconds of each phase by kind of operation as a profiler splits them, where it was asked:
    shares, since it slows the host."""


class MeasuredLayers(Record):
    """A model's layers as measured: `key` says of which model and training step, `order` the kind
    of each layer of the whole."""

    key: str
    model: str
    what: str
    order: tuple[int, ...]
    points: tuple[LayerPoint, ...]

    def order_in(self, spec: ModelSpec) -> tuple[int, ...] | None:
        """The kinds of a model's layers in order, numbered as measured; None where that is not
        known."""
        own = layer_order(spec)
        if len(set(own)) == len(set(self.order)):
            return own
        return self.order if len(own) == len(self.order) else None


def layer_order(spec: ModelSpec) -> tuple[int, ...]:
    """The kind of each layer of a model, numbered as they first occur."""
    kinds: dict[object, int] = {}
    found: list[int] = []
    for stage in spec.stages:
        if stage.checkpointed:
            found += [kinds.setdefault(stage.part, len(kinds))] * stage.count
    return tuple(found)


def counts_of(order: Sequence[int], kinds: int) -> list[int]:
    """How many layers of each kind."""
    return [sum(kind == number for kind in order) for number in range(kinds)]


def layers_key(spec: ModelSpec, config: TrainConfig, optimizer: str) -> str:
    """What two steps have in common whose layers cost the same: all but number of layers, batch,
    length and micro-steps.

    `optimizer` is the one that 'auto' came to.
    """
    kinds: list[object] = []
    for stage in spec.stages:
        if stage.part not in kinds:
            kinds.append(stage.part)
    plain = dict(
        config.replace(
            micro_batch_size=1,
            sequence_length=1,
            gradient_accumulation_steps=1,
            optimizer=optimizer,
        ).items()
    )
    usual = dict(
        type(config)().items()
    )  # a knob that a later version adds, left alone, changes no key
    changed = [(name, value) for name, value in plain.items() if value != usual[name]]
    sizes = tuple((name, value) for name, value in spec.symbols if name != "L")
    return sha256(repr((kinds, sizes, changed)).encode()).hexdigest()[:16]


def _stretches(turn: Turn, order: Sequence[int]) -> list[Stretch]:
    """The stretches of a turn, one for each layer in the order visited."""
    if turn.outside is not None:
        return [turn.outside]
    left = {kind: order.count(kind) for kind in set(order)}
    seen: set[int] = set()
    found: list[Stretch] = []
    for kind in order:
        left[kind] -= 1
        own = turn.layers[kind]
        stretch = own.first if kind not in seen else own.last if not left[kind] else own.between
        if stretch is None:
            raise InputError(
                "the measured layers lack one that stands between others; calibrate this model"
                " again"
            )
        seen.add(kind)
        found.append(stretch)
    return found[::-1] if turn.descending else found


# ---------------------------------------------------------------- as JSON


def to_json(layers: MeasuredLayers) -> dict[str, Any]:
    """The JSON object of measured layers."""
    return {
        "key": layers.key,
        "model": layers.model,
        "what": layers.what,
        "order": list(layers.order),
        "points": [_point_to_json(point) for point in layers.points],
    }


def from_json(value: object, what: str) -> MeasuredLayers:
    """Measured layers from their JSON object; InputError for anything else."""
    content = values.mapping(value, what)
    order = tuple(
        values.count(kind, f"{what}: order", low=0, high=1000)
        for kind in _listed(content.get("order"), f"{what}: order")
    )
    kinds = len(set(order))
    if not order or len(order) > MAX_LAYERS or set(order) != set(range(kinds)):
        raise InputError(
            f"{what}: order {shown(content.get('order'))} does not number the kinds of layers from"
            " 0; calibrate again"
        )
    return MeasuredLayers(
        key=values.text(content.get("key"), f"{what}: key"),
        model=plain(values.text(content.get("model"), f"{what}: model")),
        what=plain(values.text(content.get("what"), f"{what}: what")),
        order=order,
        points=tuple(
            _point_from_json(point, kinds, what)
            for point in _listed(content.get("points"), f"{what}: points")
        ),
    )


def _point_to_json(point: LayerPoint) -> dict[str, Any]:
    found: dict[str, Any] = {
        "micro_batch_size": point.micro_batch_size,
        "sequence_length": point.sequence_length,
        "seconds": {phase: _linear_to_json(fit) for phase, fit in point.seconds},
        "num_runs": point.num_runs,
    }
    if point.classes:
        found["classes"] = {
            phase: {kind: _linear_to_json(fit) for kind, fit in kinds}
            for phase, kinds in point.classes
        }
    if point.memory is not None:
        turns = [_turn_to_json(turn) for turn in point.memory.turns]
        found["memory"] = {"base": _linear_to_json(point.memory.base), "turns": turns}
    return found


def _point_from_json(value: object, kinds: int, what: str) -> LayerPoint:
    content = values.mapping(value, f"{what}: point")
    seconds = values.mapping(content.get("seconds"), f"{what}: seconds")
    memory = content.get("memory")
    return LayerPoint(
        micro_batch_size=values.count(content.get("micro_batch_size"), f"{what}: micro_batch_size"),
        sequence_length=values.count(content.get("sequence_length"), f"{what}: sequence_length"),
        seconds=tuple(
            (phase, _linear_from_json(fit, kinds, f"{what}: {phase}"))
            for phase, fit in seconds.items()
        ),
        num_runs=values.count(content.get("num_runs", 0), f"{what}: num_runs", low=0),
        memory=None if memory is None else _memory_from_json(memory, kinds, f"{what}: memory"),
        classes=tuple(
            (phase, _classes_from_json(own, kinds, what))
            for phase, own in values.mapping(content.get("classes", {}), what).items()
        ),
    )


def _classes_from_json(value: object, kinds: int, what: str) -> tuple[tuple[str, Linear], ...]:
    return tuple(
        (kind, _linear_from_json(fit, kinds, f"{what}: {kind}"))
        for kind, fit in values.mapping(value, f"{what}: classes").items()
    )


def _memory_from_json(value: object, kinds: int, what: str) -> LayerMemory:
    content = values.mapping(value, what)
    return LayerMemory(
        base=_linear_from_json(content.get("base"), kinds, what),
        turns=tuple(
            _turn_from_json(turn, kinds, what) for turn in _listed(content.get("turns"), what)
        ),
    )


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    place: dict[str, Any] = {"step": turn.step, "phase": turn.phase}
    if turn.outside is not None:
        return {**place, "outside": _stretch_to_json(turn.outside)}
    kinds = [
        [_stretch_to_json(stretch) for stretch in (own.first, own.between, own.last)]
        for own in turn.layers
    ]
    return {**place, "descending": turn.descending, "layers": kinds}


def _turn_from_json(value: object, kinds: int, what: str) -> Turn:
    content = values.mapping(value, what)
    step, phase = (
        values.count(content.get("step"), what, low=0),
        values.text(content.get("phase"), what),
    )
    outside = _stretch_from_json(content.get("outside"), kinds, what)
    layers = tuple(
        _kind_from_json(own, kinds, what) for own in _listed(content.get("layers", []), what)
    )
    if outside is None and len(layers) != kinds:
        raise InputError(
            f"{what}: a turn has neither a stretch outside the layers nor one for each kind of"
            " them; calibrate again"
        )
    return Turn(
        step=step,
        phase=phase,
        outside=outside,
        layers=layers,
        descending=content.get("descending") is True,
    )


def _kind_from_json(value: object, kinds: int, what: str) -> KindStretches:
    three = [_stretch_from_json(item, kinds, what) for item in _listed(value, what)]
    if len(three) != 3 or three[0] is None or three[2] is None:
        raise InputError(
            f"{what}: {shown(value)} is not [first, between, last] of a kind of layer; calibrate"
            " again"
        )
    return KindStretches(first=three[0], between=three[1], last=three[2])


def _stretch_to_json(stretch: Stretch | None) -> list[Any] | None:
    return (
        None if stretch is None else [_linear_to_json(stretch.net), _linear_to_json(stretch.high)]
    )


def _stretch_from_json(value: object, kinds: int, what: str) -> Stretch | None:
    if value is None:
        return None
    pair = _listed(value, what)
    if len(pair) != 2:
        raise InputError(f"{what}: stretch {shown(value)} is not [net, high]; calibrate again")
    return Stretch(
        net=_linear_from_json(pair[0], kinds, what), high=_linear_from_json(pair[1], kinds, what)
    )


def _linear_to_json(fit: Linear) -> list[float]:
    return [fit.intercept, *fit.slopes]


def _linear_from_json(value: object, kinds: int, what: str) -> Linear:
    numbers = _listed(value, what)
    if len(numbers) != kinds + 1 or any(
        isinstance(n, bool) or not isinstance(n, (int, float)) or not abs(n) < 1e30 for n in numbers
    ):
        raise InputError(
            f"{what}: {shown(value)} is not an intercept and {kinds} slope{'s' * (kinds > 1)};"
            " calibrate again"
        )
    return Linear(intercept=numbers[0], slopes=tuple(numbers[1:]))


def _listed(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{what}: {shown(value)} is not a list; calibrate again")
    return value  # pyright: ignore[reportUnknownVariableType]
