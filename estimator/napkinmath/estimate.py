"""estimate(): one call from a model and a training configuration to an Estimate."""

from __future__ import annotations

from napkinmath.answers.estimate import Estimate as Estimate
from napkinmath.answers.estimate import as_accumulated, estimate_of
from napkinmath.answers.figures import Verdict as Verdict
from napkinmath.base.divisors import largest_divisor
from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.gpus import find_hardware
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.hardware import Gpu, Hardware
from napkinmath.config.train_config import TrainConfig
from napkinmath.inputs.asked import refuse_idle
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.lowering.choices import as_loaded, resolve
from napkinmath.lowering.precision import on_gpu
from napkinmath.memory.allocator_settings import parse_settings
from napkinmath.memory.pipeline_ranks import PipelineRanks
from napkinmath.models.read import read_model, read_teacher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.calibration.calibration import Calibration
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.memory.allocator_settings import AllocatorSettings
    from napkinmath.timing.efficiency import Efficiency


def estimate(
    model: str | Mapping[str, object] | ModelSpec | None = None,
    config: TrainConfig | None = None,
    *,
    hardware: str | Gpu | Hardware | Cluster | None = None,
    efficiency: Efficiency | None = None,
    allocator: str | AllocatorSettings = "",
    calibration: str | Calibration | None = None,
    **changes: Any,
) -> Estimate:
    """Prices one training step of a model.

    `model`: a catalogued name, the path of a config.json or its folder, a config as a mapping, or a
    ModelSpec. `config` or its fields as keywords say how it is trained. `hardware` is a GPU by
    name, or the Cluster whose GPUs train together. Without it, a `calibration` (a file, or what was
    read of one) prices on the device it was measured on. `efficiency` replaces the GPU's default
    speeds by calibrated ones. Every flag of the command is a keyword too (`method="qlora", bs=4,
    gpu="A100-80"`) and means there what it means as a flag; keys of TrainConfig stay its fields.
    Raises InputError for anything that cannot be understood.
    """
    if model is None or any(not _is_field(name, changes[name]) for name in changes):
        return _of_options(model, config, hardware, efficiency, allocator, calibration, changes)
    spec = model if isinstance(model, ModelSpec) else read_model(model)
    if config is None:
        config = as_loaded(spec.stored_type, spec.family, TrainConfig(**changes), changes)
        config = _on_machine(config, hardware, changes, [])
    elif changes:
        config = config.replace(**changes)
    return _priced(spec, config, hardware, efficiency, allocator, calibration)


def _on_machine(
    config: TrainConfig,
    hardware: str | Gpu | Hardware | Cluster | None,
    given: Mapping[str, object],
    notes: list[str],
) -> TrainConfig:
    """The training in a precision that the GPU has where none is given."""
    machine, _ = _hardware(hardware)
    if machine is None or "precision" in given:
        return config
    return on_gpu(config, machine.gpu, notes)


def _is_field(name: str, value: object) -> bool:
    from napkinmath.inputs.keywords import is_field

    return is_field(name, value)


def _of_options(
    model: str | Mapping[str, object] | ModelSpec | None,
    config: TrainConfig | None,
    hardware: str | Gpu | Hardware | Cluster | None,
    efficiency: Efficiency | None,
    allocator: str | AllocatorSettings,
    calibration: str | Calibration | None,
    keywords: dict[str, Any],
) -> Estimate:
    """The estimate where keywords are options of the command."""
    from warnings import warn

    from napkinmath.inputs.keywords import read_keywords

    name = next(iter(keywords), "model")
    if config is not None:
        raise InputError(
            f"config= and the option {name}= both say how it is trained; give fields of"
            " TrainConfig beside config=, or options alone"
        )
    said = {"allocator": allocator, "calibration": calibration}
    texts = {name: value for name, value in said.items() if value and isinstance(value, str)}
    asked = read_keywords(model, {**keywords, **texts})
    if hardware is not None and asked.hardware is not None:
        raise InputError(
            f"hardware={shown(hardware)} and the options of the machine both name the GPU; give"
            " one of them"
        )
    notes = [*asked.notes]
    hardware = hardware if asked.hardware is None else asked.hardware
    training = _on_machine(asked.config, hardware, keywords, notes)
    for note in notes:
        warn(note, stacklevel=3)
    found = _priced(
        asked.spec,
        training,
        hardware,
        efficiency,
        asked.allocator if isinstance(allocator, str) else allocator,
        calibration if asked.calibration is None else asked.calibration,
    )
    refuse_idle(found, asked.options)
    return found


def _priced(
    spec: ModelSpec,
    config: TrainConfig,
    hardware: str | Gpu | Hardware | Cluster | None,
    efficiency: Efficiency | None,
    allocator: str | AllocatorSettings,
    calibration: str | Calibration | None,
) -> Estimate:
    machine, cluster = _hardware(hardware)
    if machine is None and calibration is not None:
        machine = _measured_hardware(calibration)
    if cluster is not None:
        config = config.replace(parallel=on_cluster(config.parallel, cluster))
        machine = _with_communicators(cluster, config)
    config = as_accumulated(config)
    measured = _calibration(calibration, machine)
    speed = efficiency or (
        measured.efficiency(machine.gpu)
        if measured is not None and machine is not None
        else _default_speed(machine)
    )
    settings = parse_settings(allocator) if isinstance(allocator, str) else allocator
    policy = resolve(spec, config, machine, teacher=read_teacher(config))
    return estimate_of(
        PipelineRanks(spec, policy),
        config,
        hardware=machine,
        speed=speed,
        settings=settings,
        cluster=cluster,
        calibration=measured,
    )


def _with_communicators(cluster: Cluster, config: TrainConfig) -> Hardware:
    """The GPU less the buffers that its communicators hold."""
    if cluster.num_gpus == 1:
        return cluster.hardware
    from napkinmath.timing.communicators import communicator_bytes

    held = communicator_bytes(cluster, config.parallel, find_stack(config.stack))
    return cluster.hardware.replace(communicator_bytes=held)


def on_cluster(parallel: ParallelConfig, cluster: Cluster) -> ParallelConfig:
    """The mesh with hybrid groups as large as a node; raises InputError where it has fewer ranks than
    there are GPUs."""
    if parallel.world_size != cluster.num_gpus:
        raise InputError(
            f"a mesh of {parallel.world_size} ranks does not fit {cluster.num_gpus} GPUs; make the"
            f" product of the degrees {cluster.num_gpus}"
        )
    if parallel.is_hybrid and not parallel.shard_size:
        within = max(
            1,
            cluster.gpus_per_node
            // (parallel.tensor_parallel_size * parallel.context_parallel_size),
        )
        return parallel.replace(shard_size=largest_divisor(parallel.data_parallel_size, within))
    return parallel


def _hardware(
    given: str | Gpu | Hardware | Cluster | None,
) -> tuple[Hardware | None, Cluster | None]:
    """(the GPU, the cluster it is one of, if one was given)."""
    if given is None:
        return None, None
    if isinstance(given, str):
        return find_hardware(given), None
    from napkinmath.config.cluster import Cluster

    if isinstance(given, Cluster):
        return given.hardware, given
    if isinstance(given, Gpu):
        return Hardware(gpu=given, memory_bytes=given.memory_bytes), None
    if not isinstance(given, Hardware):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"hardware {shown(given)} is neither a GPU's name nor a Gpu, Hardware or Cluster; write"
            " e.g. hardware='A100-80'"
        )
    return given, None


def _measured_hardware(given: str | Calibration) -> Hardware:
    """The device that a calibration was measured on."""
    from napkinmath.calibration.calibration import device_gpu, load_calibration

    gpu = device_gpu(load_calibration(given) if isinstance(given, str) else given)
    return Hardware(gpu=gpu, memory_bytes=gpu.memory_bytes)


def _calibration(given: str | Calibration | None, machine: Hardware | None) -> Calibration | None:
    if not isinstance(given, str) or machine is None:
        return given if not isinstance(given, str) else None
    from napkinmath.calibration.calibration import read_calibration

    return read_calibration(given, machine.gpu)


def _default_speed(hardware: Hardware | None) -> Efficiency | None:
    if hardware is None or not hardware.gpu.dense_flops or not hardware.gpu.bandwidth_bytes_per_s:
        return None
    from napkinmath.timing.efficiency import default_efficiency

    return default_efficiency(hardware.gpu)


if not TYPE_CHECKING:

    def __getattr__(name):
        """Names of 0.1 that are elsewhere now."""
        import napkinmath

        return napkinmath.moved_name(__name__, name)
