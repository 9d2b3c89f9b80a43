"""Time of a step whose batches are padded to their longest sequence: the mean over micro-steps of
several lengths."""

from __future__ import annotations

from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import AdapterKind
from napkinmath.ir.timeline import Stamp, Timeline
from napkinmath.memory.varied_lengths import VariedLayout, longest_lengths, micro_step_lengths
from napkinmath.timing.flops import hardware_flops, model_flops
from napkinmath.timing.schedule import phase_times
from napkinmath.timing.sent import Sent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.ledger import Phase
    from napkinmath.ir.recording import RecordingPolicy
    from napkinmath.ir.step import Step
    from napkinmath.timing.schedule import Clock, PhaseTime


_ADDED = ("device_s", "host_s", "waited_s", "aside_s")


def varied_time(
    step: Step, timeline: Timeline, clock: Clock, start: int
) -> tuple[tuple[PhaseTime, ...], int, int, int]:
    """Mean over micro-steps padded to their longest: (phases, tokens that are not padding, model
    FLOP, hardware FLOP) of a step.

    Where ranks meet in every micro-step, all of them take the time of the longest sequence of all.

    `timeline` is the step at its longest, whose update from segment `start` on does not depend on
    lengths.
    """
    config = step.policy.config
    assert isinstance(config.micro_batch_size, int)
    drawn = _drawn_lengths(config, config.micro_batch_size)
    spent: dict[Phase, PhaseTime] = {}
    done = 0.0
    for repeat, segments in step.micro_steps:
        layout, share = VariedLayout(step, clock), repeat / len(drawn)
        for length in drawn:
            layout.add(segments, length)
        varied = Timeline(layout.infos, layout.order, Stamp(origin="analytic"))
        for found in phase_times(varied, clock.speed, first_segment=0):
            spent[found.phase] = _added(spent.get(found.phase), found, share)
        done += share * hardware_flops(varied, 0)
    update = phase_times(timeline, clock.speed, first_segment=start)
    phases = (*spent.values(), *(found for found in update if found.phase not in spent))
    needed = sum(model_flops(step, length) for length in drawn) // len(drawn)
    tokens = _tokens(config, config.micro_batch_size, step.policy)
    return phases, tokens, needed, round(done)


def _drawn_lengths(config: TrainConfig, batch: int) -> list[int]:
    """The lengths that micro-steps are padded to: of one rank's batches, or of all ranks' where
    they meet in every micro-step."""
    parallel, lengths = config.parallel, config.batch.lengths
    gathers = parallel.data_parallel.is_fsdp or parallel.data_parallel is DataParallel.ZERO3
    if parallel.data_parallel_size > 1 and (gathers or config.gradient_accumulation_steps == 1):
        return longest_lengths(lengths, batch * parallel.data_parallel_size)
    return micro_step_lengths(lengths, batch, 0)


def _tokens(config: TrainConfig, batch: int, policy: RecordingPolicy) -> int:
    """Tokens of a step that are neither padding nor a prompt's virtual ones."""
    lengths = config.batch.lengths
    own = sum(lengths) / len(lengths) - policy.virtual_tokens(AdapterKind.PROMPT)
    return round(own * batch) * config.gradient_accumulation_steps


def _added(before: PhaseTime | None, found: PhaseTime, share: float) -> PhaseTime:
    """A share of a phase's time on top of what other micro-steps spent in it."""
    times = {name: getattr(found, name) * share for name in _ADDED}
    sent = before.sent if before is not None else Sent()
    return found.replace(
        sent=sent.plus(found.sent, share),
        **{
            name: value + (getattr(before, name) if before is not None else 0.0)
            for name, value in times.items()
        },
    )
