"""priced: the estimates that options ask for, one for each GPU they name."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference, JobKey, JobKeys, KeyUse
from napkinmath.config.train_config import Kernels, RecomputeKind
from napkinmath.estimate import estimate
from napkinmath.inputs.hardware_options import (
    allocator_text,
    calibration_on,
    cluster_of,
    machines,
)
from napkinmath.inputs.model_options import model_spec
from napkinmath.inputs.options import train_config
from napkinmath.lowering.recompute import is_kept

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec


_KEPT = ("sdpa", "linear", "o_proj")  # what is worth keeping, and is named alike in many models


def priced(options: Mapping[str, object], notes: list[str]) -> list[Estimate]:
    """One estimate, or one for each GPU named; `notes` receives what was decided for the user.
    Raises InputError."""
    config = train_config(options)
    spec = model_spec(options, notes)
    keys = options.get("job_keys")
    assert keys is None or isinstance(keys, JobKeys)
    config, keys = _with_known_kernels(spec, config, keys)
    longest = spec.longest_sequence
    if (
        "ctx" not in options
        and isinstance(config.sequence_length, int)
        and 0 < longest < config.sequence_length
    ):
        notes.append(f"--ctx {longest}: {spec.name} has learned positions for no more")
        config = config.replace(sequence_length=longest)
    allocator = allocator_text(options)
    found: list[Estimate] = []
    for machine in machines(options):
        calibration = calibration_on(machine, options, notes)
        found.append(
            estimate(
                spec,
                config,
                hardware=cluster_of(machine, options),
                allocator=allocator,
                calibration=calibration,
            )
        )
    if keys is not None:
        found = [e.of_job(keys) for e in found]
    _refuse_untrained(found[0])
    _refuse_idle(found[0], options)
    return found


def _with_known_kernels(
    spec: ModelSpec, config: TrainConfig, keys: JobKeys | None
) -> tuple[TrainConfig, JobKeys | None]:
    """A job file's kernels where they know the model; else without them, which its tool does too,
    or without what they would save."""
    from napkinmath.catalog.kernels import KERNEL_SETS

    if keys is None or config.kernels is Kernels.HF:
        return config, keys
    row = KERNEL_SETS[config.kernels.value]
    if spec.family in row.families:
        return config, keys
    left_out = JobKey(
        name=f"kernels {row.name}",
        use=KeyUse.NOT_PRICED,
        why=f"they are not modelled for {spec.family} models",
        memory=Difference.LESS,
        time=Difference.LESS,
    )
    return config.replace(kernels=Kernels.HF), keys.replace(keys=(*keys.keys, left_out))


def _refuse_idle(e: Estimate, options: Mapping[str, object]) -> None:
    """Raises where something was asked for that this model has not."""
    if (
        "images" in options
        and e.config.batch.images
        and not any(stage.modality == "image" for stage in e.spec.stages)
    ):
        raise InputError(
            f"--images {shown(options['images'])}: {e.spec.name} reads no images; leave it out"
        )
    if e.config.recompute.kind is RecomputeKind.SELECTIVE and e.step.policy.recomputes:
        _refuse_nothing_kept(e)


def _refuse_nothing_kept(e: Estimate) -> None:
    """Raises where selective checkpointing names no operation of the model; the hint names those
    that it has."""
    ops = [op for run in e.step.runs if run.stage.checkpointed for op in run.block.ops]

    def is_there(*names: str) -> bool:
        return any(is_kept(op, names) for op in ops)

    keep = e.config.recompute.keep
    if is_there(*keep):
        return
    others = [f"--checkpointing selective:{name}" for name in _KEPT if is_there(name)]
    raise InputError(
        f"selective checkpointing keeps {shown(', '.join(keep))}, which {e.spec.name} does not run"
        f" here; use {' or '.join([*others, '--checkpointing full'])}"
    )


def _refuse_untrained(e: Estimate) -> None:
    """Raises where the names given leave nothing that is trained."""
    if e.num_trained:
        return
    adapter = e.config.adapter
    if adapter is None:
        raise InputError(
            f"--freeze {shown(','.join(e.config.frozen))} leaves nothing of {e.spec.name} to train;"
            " freeze less"
        )
    if adapter.targets == ("all-linear",):
        raise InputError(
            f"--method {adapter.kind.value} leaves nothing of {e.spec.name} to train; use --lora,"
            " or --full"
        )
    names = shown(",".join(adapter.targets))
    raise InputError(
        f"--targets {names} matches no module of {e.spec.name}; use all-linear, or names such as"
        " q_proj,v_proj"
    )
