"""Blocks that wait on the host: their linears are copied into the place of other blocks' once those
have run, which go to the host. As many blocks as stay are on the device at any time.

Weights of other modules, biases and adapters stay. Source: kohya-ss/musubi-tuner
modules/custom_offloading_utils.py ModelOffloader (prepare_block_devices_before_forward,
submit_move_blocks_forward, create_backward_hook).
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.canvas import DrawnPictures
    from napkinmath.ir.ledger import Event
    from napkinmath.ir.model_spec import ModelSpec, Stage
    from napkinmath.lowering.policy import Policy


def with_swapped(spec: ModelSpec, canvas: DrawnPictures, config: TrainConfig) -> ModelSpec:
    """The model whose last blocks of each list start the step on the host, whatever blocks did so
    before. Raises InputError where the model or its training has no such blocks.

    Of two lists half the blocks are of the first, and twice the rest of the second. Source:
    kohya-ss/sd-scripts library/flux_models.py enable_block_swap, kohya-ss/musubi-tuner
    modules/custom_offloading_utils.py.
    """
    asked = config.offload.blocks
    if any(stage.swapped for stage in spec.stages):
        spec = spec.replace(stages=_rejoined(spec.stages))
    if not asked:
        return spec
    if not canvas.lists:
        raise InputError(
            f"--blocks-to-swap {asked}: no trainer swaps blocks of {spec.name}; leave it out"
        )
    if config.adapter is None:
        raise InputError(
            f"--blocks-to-swap {asked}: there are no rules for blocks that are trained whole and"
            " swapped; use --lora"
        )
    most = most_swapped(spec, canvas)
    if asked > most:
        raise InputError(
            f"--blocks-to-swap {asked}: of the blocks of {spec.name} some stay on the device; use"
            f" {most} or fewer"
        )
    half = asked // 2
    counts = (asked,) if len(canvas.lists) == 1 else (half, 2 * (asked - half))
    stages = list(spec.stages)
    for path, count in zip(canvas.lists, counts, strict=True):
        stages = _marked(stages, path, count)
    return spec.replace(stages=tuple(stages))


def most_swapped(spec: ModelSpec, canvas: DrawnPictures) -> int:
    """The largest --blocks-to-swap; 0 where no trainer swaps blocks of the model.

    One block of a single list stays, two of each of two. Source: enable_block_swap of
    kohya-ss/musubi-tuner wan/modules/model.py, kohya-ss/sd-scripts library/flux_models.py.
    """
    held = [sum(stage.count for stage in _of(spec.stages, path)) for path in canvas.lists]
    if len(held) == 2:
        return max(0, min(2 * (held[0] - 2) + 1, (held[1] - 2) // 2 * 2))
    return max(0, held[0] - 1) if held else 0


def _of(stages: Sequence[Stage], path: str) -> list[Stage]:
    """The stages of a list of blocks."""
    return [s for s in stages if s.path == path or s.path.startswith(f"{path}.")]


def _marked(stages: list[Stage], path: str, count: int) -> list[Stage]:
    """The stages with the last `count` blocks of a list apart."""
    own = _of(stages, path)
    found: list[Stage] = []
    for stage in reversed(stages):
        taken = min(count, stage.count) if stage in own else 0
        count -= taken
        if taken:
            found.append(stage.replace(count=taken, swapped=True))
        if stage.count > taken:
            found.append(stage.replace(count=stage.count - taken))
    return found[::-1]


def _rejoined(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages as they were before some blocks were swapped."""
    found: list[Stage] = []
    for stage in stages:
        plain = stage.replace(swapped=False)
        if stage.swapped and found and found[-1].replace(count=stage.count) == plain:
            found[-1] = plain.replace(count=found[-1].count + stage.count)
        else:
            found.append(plain)
    return tuple(found)


def swapped_tensors(run: Run) -> list[Tensor]:
    """What of a run's block is swapped."""
    if not run.stage.swapped:
        return []
    return [
        w.tensor
        for w in run.block.weights
        if w.kind == "linear" and not w.tied_to and w.tensor.role is not Role.ADAPTERS
    ]


def hold_on_host(load: list[Segment], runs: list[Run]) -> list[Segment]:
    """The loading segments with swapped weights in host memory."""
    by_segment = {f"weights of {run.name}": set(swapped_tensors(run)) for run in runs}

    def moved(segment: Segment, event: Event) -> Event:
        action, tensor = event
        if action != ALLOC or tensor not in by_segment.get(segment.name, ()):
            return event
        t: Tensor = tensor  # type: ignore[assignment]
        return action, Tensor(t.name, t.axes, t.dtype, t.role, t.module, t.source, host=True)

    return [s.copy(events=[moved(s, event) for event in s.events], repeat=s.repeat) for s in load]


def swap(segments: list[Segment], runs: list[Run], policy: Policy) -> list[Segment]:
    """A micro-step's segments: with each swapped block another one goes to the host, forward and
    backward, beside what the device computes."""
    by_name = {run.name: swapped_tensors(run) for run in runs if run.stage.swapped}
    pinned, found = policy.config.offload.pinned, list[Segment]()
    for segment in segments:
        tensors = by_name.get(segment.run)
        if not tensors or segment.phase not in (Phase.FORWARD, Phase.BACKWARD):
            found.append(segment)
            continue
        backward = segment.phase is Phase.BACKWARD
        copies: list[Event] = [
            (RUN, Work(None, (HostCopy(t.nbytes, to_host=way, pinned=pinned),), backward))
            for t in tensors
            for way in (True, False)
        ]
        found.append(segment.copy(events=[*copies, *segment.events], repeat=segment.repeat))
    return found
