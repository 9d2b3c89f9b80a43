"""The step of an estimate at other batches and lengths: recorded and laid out once, its sizes bound
anew."""

from __future__ import annotations

from napkinmath.base.expr import Bindings
from napkinmath.base.record import Record
from napkinmath.ir.step import side
from napkinmath.lowering.build import build_step
from napkinmath.lowering.choices import resolve
from napkinmath.memory.allocator_settings import UNLIMITED
from napkinmath.memory.replay import replayed
from napkinmath.memory.simulate import Layout, Scopes, peak_bytes, steps_priced
from napkinmath.models.read import read_teacher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.step import Step
    from napkinmath.memory.replay import Replay


class Trial(Record):
    """One size tried: whether it fits, and the bytes that were left, or, negative, missing."""

    fits: bool
    left: int
    lacks_more: bool = False
    """Whether more may be missing: a replay under a limit ends at the first request that fails."""


def judged(found: Replay, limit: int) -> Trial:
    """A replay under the limit as a trial."""
    if found.out_of_memory:
        return Trial(fits=False, left=-found.bytes_missing, lacks_more=not found.is_followed)
    return Trial(fits=True, left=limit - found.peak_unreturnable)


class BoundSteps:
    """The step of an estimate at other sizes: recorded and laid out once, its sizes bound anew."""

    def __init__(self, e: Estimate, most_events: int) -> None:
        self._own_events = e.replay.num_events
        self._events_left = most_events - self._own_events
        self.e, self._steps_priced = e, steps_priced(e.config)
        bind = Bindings(e.step.symbols)
        batch, length = bind(e.step.symbols["b"]), bind(e.step.symbols["s"])
        own = e.config.sequence_length
        self._virtual = length - own if isinstance(own, int) else 0  # a prompt's tokens
        # each with the sizes that it was recorded at
        self._recorded: list[tuple[Step, dict[str, int]]] = [(e.step, {"b": batch, "s": length})]
        self._laid_out: dict[Step, Layout] = {}

    @property
    def may_replay(self) -> bool:
        """Whether a replay as long as the estimate's own is within the events that may be played."""
        return self._events_left >= self._own_events

    def trial(self, config: TrainConfig, limit: int) -> Trial:
        """The step of a configuration under the limit, as the verdict replays it."""
        return judged(self._replayed(config, limit), limit)

    def need(self, config: TrainConfig) -> int:
        """Bytes with which it would fit: the first request that fails under a limit says less."""
        return self._replayed(config, UNLIMITED).peak_unreturnable

    def _replayed(self, config: TrainConfig, limit: int) -> Replay:
        step, scopes = self._at(config)
        layout = self._laid_out.get(step)
        if layout is None:
            layout = self._laid_out[step] = Layout(step, scopes, steps=self._steps_priced)
        settings = self.e.settings.replace(limit_bytes=limit)
        found = replayed(layout.segments, layout.nbytes(scopes), settings, layout.uses)
        self._events_left -= found.num_events
        return found

    def peak(self, config: TrainConfig) -> int:
        """Requested bytes at the peak."""
        step, scopes = self._at(config)
        return peak_bytes(step, steps=self._steps_priced, scopes=scopes)

    def _at(self, config: TrainConfig) -> tuple[Step, Scopes]:
        """A configuration's step, and its sizes bound."""
        batch, length = config.micro_batch_size, config.sequence_length
        assert isinstance(batch, int) and isinstance(length, int)
        sizes = {"b": batch, "s": length + self._virtual}
        target = config.batch.target_length or sizes["s"]
        step = self._step(config, sizes)
        return step, Scopes({**step.symbols, **sizes, "st": target})

    def _step(self, config: TrainConfig, sizes: dict[str, int]) -> Step:
        """The record that holds at these sizes: on the same side of its own thresholds."""
        for step, own in self._recorded:
            if side(step.thresholds, sizes) == side(step.thresholds, own):
                return step
        e = self.e
        made = build_step(e.spec, resolve(e.spec, config, e.hardware, teacher=read_teacher(config)))
        self._recorded.append((made, sizes))
        return made
