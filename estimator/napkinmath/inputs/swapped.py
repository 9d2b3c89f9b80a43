"""Blocks of a denoiser that wait on the host, as stages of their own: sd-scripts' and musubi-tuner's
blocks_to_swap."""

from __future__ import annotations

from napkinmath.base.errors import InputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.canvas import DrawnPictures
    from napkinmath.ir.model_spec import ModelSpec, Stage


def with_swapped(spec: ModelSpec, canvas: DrawnPictures, config: TrainConfig) -> ModelSpec:
    """The model whose last blocks of each list start the step on the host.

    Of two lists half the blocks are of the first, and twice the rest of the second. Source:
    kohya-ss/sd-scripts library/flux_models.py enable_block_swap, kohya-ss/musubi-tuner
    modules/custom_offloading_utils.py.
    """
    asked = config.offload.blocks
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
    half = asked // 2
    counts = (asked,) if len(canvas.lists) == 1 else (half, 2 * (asked - half))
    stages = list(spec.stages)
    for path, count in zip(canvas.lists, counts, strict=True):
        stages = _marked(stages, path, count, spec, asked)
    return spec.replace(stages=tuple(stages))


def _marked(stages: list[Stage], path: str, count: int, spec: ModelSpec, asked: int) -> list[Stage]:
    """The stages with the last `count` blocks of a list apart."""
    own = [s for s in stages if s.path == path or s.path.startswith(f"{path}.")]
    whole = sum(stage.count for stage in own)
    if count >= whole:
        raise InputError(
            f"--blocks-to-swap {asked}: {spec.name} has {whole} blocks in {path}, of which at"
            f" least one stays; use {max(asked * (whole - 1) // count, 1)} or fewer"
        )
    found: list[Stage] = []
    for stage in reversed(stages):
        taken = min(count, stage.count) if stage in own else 0
        count -= taken
        if taken:
            found.append(stage.replace(count=taken, swapped=True))
        if stage.count > taken:
            found.append(stage.replace(count=stage.count - taken))
    return found[::-1]


def share_of_blocks(model: str, share: float) -> int:
    """What --blocks-to-swap is for a share of a model's blocks; 0 where its config has no count of
    them."""
    from napkinmath.catalog.models import find_row

    row = find_row(model)
    config: dict[str, int] = {} if row is None else row["config"]
    first, second = (config.get(name, 0) for name in ("num_layers", "num_single_layers"))
    most = min(2 * first, second) if second else first
    return max(min(round(share * most), most - 2 if second else most - 1), 0)
