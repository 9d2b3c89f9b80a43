"""What is put before the micro-steps of a step, and a second model's step joined with it."""

from __future__ import annotations

from napkinmath.config.workload_config import Placement, RolloutOffload
from napkinmath.lowering.generation import batches_of_rollouts, rows_at_once
from napkinmath.lowering.parallel.pipeline import num_micro_batches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.step import Run, Segment, Step
    from napkinmath.lowering.forwards import Beside
    from napkinmath.lowering.policy import Policy

    Row = tuple[int, list[Segment]]


def put_first(step: Step, times: int, segments: list[Segment]) -> None:
    """Adds segments before the first of the micro-steps; once they are a part of it."""
    if times > 1:
        step.micro_steps[:0] = [(times, segments)]
        return
    repeat, first = step.micro_steps[0]
    rest = [(repeat - 1, first)] if repeat > 1 else []
    step.micro_steps[:1] = [(1, segments + first), *rest]


def passes_first(
    step: Step, runs: list[Run], around: Beside, policy: Policy, config: TrainConfig
) -> None:
    """Puts what runs `around` the micro-batches of some runs before them: all of it in a pipeline,
    else the models that come once."""
    if config.parallel.pipeline_parallel_size > 1:
        rows = around.passes(runs, policy, num_micro_batches(policy))
    else:
        times, first = batches_of_rollouts(config), around.first
        sizes = (("b", rows_at_once(config)),) if config.workload.scored_rows else ()
        rows = [row for forward in first for row in forward.passes(runs, policy, times, sizes)]
    workload = config.workload
    if rows and workload.teacher_topk and workload.teacher_at is Placement.AUTO:
        rows = _in_turn(step, rows)
    step.micro_steps[:0] = rows


def _in_turn(step: Step, rows: list[Row]) -> list[Row]:
    """Rows that have the GPUs to themselves: what is trained waits on the host meanwhile, gradients
    are not there yet (NeMo-RL 7ea279ab algorithms/distillation.py distillation_train:
    offload_before_refit, offload_after_refit, prepare_for_training)."""
    from napkinmath.lowering.rollout.waiting import waits_on_host

    found = rows
    for what in ("parameters", "states"):
        gone, back = waits_on_host(step, RolloutOffload.POLICY, what, "student")
        found = [(1, gone), *found, (1, back)] if gone else found
    return found


def join(step: Step, other: Step) -> None:
    """A second model trained in the same step: its micro-step after the first's, or, in a pipeline,
    all of its micro-batches before them (verl 0.5 trainer/ppo/ray_trainer.py fit updates the critic
    first); its update beside it."""
    step.load += other.load
    step.runs = step.runs + other.runs
    if step.policy.config.parallel.pipeline_parallel_size > 1:
        step.micro_steps = other.micro_steps + step.micro_steps
    else:
        ahead = len(other.micro_steps) - len(step.micro_steps)  # what passes before them
        step.micro_steps = other.micro_steps[:ahead] + [
            (repeat, mine + theirs)
            for (repeat, mine), (_, theirs) in zip(
                step.micro_steps, other.micro_steps[ahead:], strict=True
            )
        ]
    for part in ("clip", "states", "work", "zero"):
        own: list[Segment] = getattr(step.update, part)
        setattr(step.update, part, own + getattr(other.update, part))
    step.save = step.save + other.save
    step.note(other.thresholds)
