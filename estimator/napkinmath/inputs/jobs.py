"""priced: the estimates that options ask for, one for each GPU they name."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import Difference, JobKey, JobKeys, KeyUse
from napkinmath.config.run_length import RunLength
from napkinmath.config.workload_config import Workload
from napkinmath.estimate import estimate
from napkinmath.inputs.asked import model_and_training, refuse_idle
from napkinmath.inputs.hardware_options import (
    allocator_text,
    calibration_on,
    cluster_of,
    machines,
)
from napkinmath.lowering.precision import on_gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.hardware import Hardware
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec


def priced(options: Mapping[str, object], notes: list[str]) -> list[Estimate]:
    """One estimate, or one for each GPU named; `notes` receives what was decided for the user.
    Raises InputError."""
    spec, config = model_and_training(options, notes)
    keys = options.get("job_keys")
    assert keys is None or isinstance(keys, JobKeys)
    if keys is not None:
        from napkinmath.inputs.patched_runs import known_kernels

        config, keys = known_kernels(spec, config, keys)
    gpus = machines(options)
    config, keys = _with_placed_engine(spec, config, keys, gpus)
    if keys is not None:
        config = config.replace(run=_run(config.run, keys.run, options))
        if config.loader.samples_per_s and "dataloader_workers" not in options:
            config = config.replace(loader=config.loader.replace(workers=keys.workers))
    allocator = allocator_text(options)
    found: list[Estimate] = []
    for machine in gpus:
        calibration, there, said = calibration_on(machine, options, notes), config, keys
        if keys is not None and keys.follows_gpu and machine is not None:
            from napkinmath.inputs.patched_runs import in_its_halves

            there, said = in_its_halves(spec, config, keys, machine.gpu, notes)
        elif machine is not None and "precision" not in options:
            there = on_gpu(config, machine.gpu, notes)
        made = estimate(
            spec,
            there,
            hardware=cluster_of(machine, options),
            allocator=allocator,
            calibration=calibration,
        )
        if said is not None and said.by_unsloth:
            from napkinmath.inputs.patched_runs import name_unseen

            said = name_unseen(made, str(options.get("model", "")), said)
        found.append(made if said is None else made.of_job(said))
    refuse_idle(found[0], options)
    return found


def _run(given: RunLength, said: RunLength, options: Mapping[str, object]) -> RunLength:
    """A file's length of the run under what flags say of it; samples that a flag gives count before
    the file's steps."""
    kept = {
        key: getattr(given if key in options else said, key)
        for key in ("samples", "epochs", "max_steps")
    }
    if "samples" in options and "max_steps" not in options:
        kept["max_steps"] = 0
    return RunLength(**kept)


def _with_placed_engine(
    spec: ModelSpec, config: TrainConfig, keys: JobKeys | None, gpus: list[Hardware | None]
) -> tuple[TrainConfig, JobKeys | None]:
    """A job file's inference engine where it can be placed and priced; else the update of the
    policy alone, with the reason."""
    if keys is None or not keys.engine or not config.workload.has_engine:
        return config, keys
    from napkinmath.lowering.rollout.plan import engine_plan

    try:
        for machine in gpus:
            engine_plan(spec, config, machine)
    except InputError as error:
        alone = JobKey(
            name=keys.engine,
            use=KeyUse.NOT_PRICED,
            why=f"the update of the policy alone is priced, since its engine cannot be: {error}",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
        return config.replace(workload=Workload()), keys.replace(keys=(*keys.keys, alone))
    return config, keys
