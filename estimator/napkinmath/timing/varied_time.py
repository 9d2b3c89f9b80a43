"""Time of a step whose batches are padded to their longest sequence: the mean over micro-steps of
several lengths."""

from __future__ import annotations

from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.timeline import Stamp, Timeline
from napkinmath.memory.varied_lengths import VariedLayout, longest_lengths, micro_step_lengths
from napkinmath.timing.flops import model_flops
from napkinmath.timing.schedule import phase_times

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Phase
    from napkinmath.ir.step import Step
    from napkinmath.timing.schedule import Clock, PhaseTime


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
    batch = config.micro_batch_size
    assert isinstance(batch, int)
    drawn = micro_step_lengths(config.batch.lengths, batch, 0)
    parallel = config.parallel
    gathers = parallel.data_parallel.is_fsdp or parallel.data_parallel is DataParallel.ZERO3
    if parallel.data_parallel_size > 1 and (gathers or config.gradient_accumulation_steps == 1):
        drawn = longest_lengths(
            config.batch.lengths, batch * parallel.data_parallel_size
        )  # ranks meet in every micro-step
    spent: dict[Phase, PhaseTime] = {}
    done = 0.0
    for repeat, segments in step.micro_steps:
        layout, share = VariedLayout(step, clock), repeat / len(drawn)
        for length in drawn:
            layout.add(segments, length)
        for found in phase_times(
            Timeline(layout.infos, layout.order, Stamp(origin="analytic")),
            clock.speed,
            first_segment=0,
        ):
            spent[found.phase] = _added(spent.get(found.phase), found, share)
        done += share * sum(
            segment.repeat * sum(kernel.flops for kernel in segment.kernels)
            for segment in layout.order
        )
    phases = list(spent.values())
    phases += [
        found
        for found in phase_times(timeline, clock.speed, first_segment=start)
        if found.phase not in spent
    ]
    tokens = (
        round(sum(config.batch.lengths) / len(config.batch.lengths) * batch)
        * config.gradient_accumulation_steps
    )
    needed = sum(model_flops(step, length) for length in drawn) // len(drawn)
    return tuple(phases), tokens, needed, round(done)


def _added(before: PhaseTime | None, found: PhaseTime, share: float) -> PhaseTime:
    """A share of a phase's time on top of what other micro-steps spent in it."""
    times = {name: getattr(found, name) * share for name in ("device_s", "host_s", "waited_s")}
    return found.replace(
        **{
            name: value + (getattr(before, name) if before is not None else 0.0)
            for name, value in times.items()
        }
    )
