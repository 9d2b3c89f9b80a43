"""estimate(): one call from a model and a training configuration to an Estimate, whose every figure
is read off one Timeline."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.expr import Bindings
from napkinmath.base.record import Record
from napkinmath.config.train_config import TrainConfig
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.ir.step import Step
from napkinmath.ir.timeline import Point, Timeline
from napkinmath.memory.allocator import AllocatorSettings, Replay, replay
from napkinmath.memory.pipeline_ranks import (
    PipelineRanks,
    StageFigures,
    WholeModel,
    stage_figures,
)
from napkinmath.memory.simulate import simulate
from napkinmath.timing.schedule import Clock, StepTime, phase_times

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from napkinmath.answers.host_memory import HostMemory
    from napkinmath.answers.throughput import Throughput
    from napkinmath.calibration.calibration import Calibration
    from napkinmath.calibration.measured_layers import MeasuredLayers
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.hardware import Gpu, Hardware
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.costs import Collective
    from napkinmath.timing.efficiency import Efficiency
    from napkinmath.timing.schedule import PhaseTime


class Range(Record):
    """A figure and the span in which nine of ten measurements are expected."""

    low: float
    value: float
    high: float


class Memory(Record):
    """Peak bytes: `requested` by the program, `allocated` and `reserved` by the allocator, `device`
    as nvidia-smi shows it."""

    requested: int
    allocated: Range
    reserved: Range
    device: Range


class Verdict(str, Enum):
    """Whether a step fits a device; each value has the command's exit code."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "cannot tell"
    NOT_ASKED = "no device named"

    @property
    def exit_code(self) -> int:
        """0 fits or nothing asked, 1 does not fit, 3 cannot tell."""
        return {"fits": 0, "no device named": 0, "does not fit": 1, "cannot tell": 3}[self.value]


class Fit(Record):
    """One GPU's answer: its memory, what the step needs of it, and the verdict."""

    gpu: str
    capacity_bytes: int
    headroom_bytes: int
    verdict: Verdict


class Change(Record):
    """Something to turn on: what it saves at the peak, and the speed it leaves (ratio of tokens/s;
    None without a GPU)."""

    flag: str
    meaning: str
    saved_bytes: int
    speed_ratio: float | None = None


class Finding(Record):
    """Something off about the configuration, in one sentence, with the bytes it costs where
    known."""

    text: str
    nbytes: int = 0


class Estimate:
    """The priced training step. Figures are computed when first asked for."""

    def __init__(
        self,
        ranks: PipelineRanks,
        config: TrainConfig,
        step: Step,
        timeline: Timeline,
        *,
        hardware: Hardware | None,
        speed: Efficiency | None,
        settings: AllocatorSettings,
        cluster: Cluster | None = None,
    ) -> None:
        self.ranks, self.spec = ranks, ranks.spec
        self.config, self.step, self.timeline = config, step, timeline
        self.hardware, self.speed, self.settings, self.cluster = hardware, speed, settings, cluster
        self.calibration: Calibration | None = None
        self.price_per_gpu_hour: float | None = None
        self._cache: dict[str, Any] = {}
        # What other configurations would save, and how they are lowered, as the answers ask for it.
        self.compared: dict[TrainConfig, tuple[int, PipelineRanks]] = {}

    def _once(self, key: str, make: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    # ------------------------------------------------------------ memory

    @property
    def peak(self) -> Point:
        """The moment of most requested bytes."""
        return self._once("peak", self.timeline.peak)

    @property
    def phase_peaks(self) -> dict[Phase, Point]:
        """The highest point of each phase, highest first: the winner and the runners-up."""
        return self._once("phases", self.timeline.phase_peaks)

    @property
    def replay(self) -> Replay:
        """The allocator's books over loading and two steps; the median of several orders where
        lengths vary."""
        return self.replays[len(self.replays) // 2]

    @property
    def replays(self) -> list[Replay]:
        """The books over the steps priced, or over several orders of the batch's lengths, least
        reserved first."""
        return self._once("replays", self._replays)

    def _replays(self) -> list[Replay]:
        batch = self.config.micro_batch_size
        if not self._lengths_change or not isinstance(batch, int):
            return [replay(self.timeline, self.settings)]
        from napkinmath.memory.varied_lengths import replays

        return replays(self.step, self.step.policy.config.batch.lengths, batch, self.settings)

    @property
    def _lengths_change(self) -> bool:
        """Whether every batch is padded to its own longest; stages of a schedule exchange tensors
        of one shape, padded to the limit."""
        from napkinmath.config.parallel_config import PipelineSchedule

        batch, parallel = self.config.batch, self.config.parallel
        scheduled = (
            parallel.pipeline_parallel_size > 1
            and parallel.pipeline_schedule is not PipelineSchedule.NAIVE
        )
        return bool(batch.lengths) and not batch.packing and not scheduled

    @property
    def memory(self) -> Memory:
        """Requested, allocated, reserved and device peaks with their ranges."""
        from napkinmath.answers.ranges import memory_ranges

        return self._once("memory", lambda: memory_ranges(self))

    @property
    def breakdown(self) -> dict[Role, int]:
        """Bytes by role at the peak; with allocator slack and device context they sum to the device
        figure."""
        return self._once("breakdown", lambda: self.timeline.breakdown(self.peak))

    @property
    def host_bytes(self) -> int:
        """Host memory of everything offloaded, at its peak; 0 where nothing is."""
        return self._once("host", self.timeline.host_peak)

    @property
    def host_memory(self) -> HostMemory:
        """Host memory of one machine with all its ranks: loading, training, NVMe."""
        from napkinmath.answers.host_memory import host_memory

        return self._once("host memory", lambda: host_memory(self))

    @property
    def managed_bytes(self) -> int:
        """Unified memory of paged optimizer states: on the device while there is room, outside the
        allocator's books."""
        return self._once("managed", lambda: self.timeline.host_peak(managed=True))

    @property
    def num_parameters(self) -> int:
        """Parameters of the base model, tied ones once."""
        return self._counted[0]

    @property
    def num_trained(self) -> int:
        """Parameters that get a gradient, adapters included."""
        return self._counted[1]

    @property
    def _counted(self) -> tuple[int, int]:
        parallel = self.config.parallel
        spread = (
            parallel.tensor_parallel_size > 1
            or parallel.pipeline_parallel_size > 1
            or parallel.expert_parallel_size > 1
        )
        return self._once(
            "parameters",
            lambda: count_parameters(
                WholeModel(self.spec, self.ranks.policy) if spread else self.step
            ),
        )

    @property
    def stages(self) -> tuple[StageFigures, ...]:
        """Figures of every pipeline rank; this estimate is that of the one that needs the most
        memory."""
        return self._once(
            "stages",
            lambda: stage_figures(self.ranks, steps=steps_priced(self.config)),
        )

    # ------------------------------------------------------------ time

    @property
    def time(self) -> StepTime | None:
        """The steady step's time, by its measured layers where a calibration has them; None where
        the hardware has no known speed."""
        return self._once("time", self._calibrated)

    @property
    def priced_time(self) -> StepTime | None:
        """The steady step's time as its operations add up, to be held against another
        configuration's."""
        return self._once("priced time", self._time)

    def _calibrated(self) -> StepTime | None:
        if self.priced_time is None or self.measured_layers is None:
            return self.priced_time
        from napkinmath.calibration.calibrated_time import calibrated_time

        return calibrated_time(self.priced_time, self.measured_layers, self)

    def _time(self) -> StepTime | None:
        if self.speed is None or self.hardware is None:
            return None
        from napkinmath.timing.flops import hardware_flops, model_flops

        config = self.config
        rule = self.step.policy.rule
        peak = self.hardware.gpu.dense_flops_per_s(
            rule.gemm
            or (
                rule.autocast or self.step.policy.compute_dtype
                if config.quantization
                else rule.autocast or rule.parameters
            )
        )
        start, bind = self.timeline.step_starts[-1], Bindings(self.step.symbols)
        if (
            self._lengths_change
            and isinstance(config.micro_batch_size, int)
            and config.parallel.pipeline_parallel_size == 1
        ):
            from napkinmath.memory.varied_lengths import varied_time

            clock = Clock(self.speed, self.step.policy, _network(self.cluster, config))
            phases, tokens, needed, done = varied_time(self.step, self.timeline, clock, start)
            return StepTime(
                phases=self._paced(phases),
                tokens=tokens,
                model_flops=needed,
                hardware_flops=done,
                peak_flops_per_s=peak,
                paging_s=self._paging_s(self.speed),
            )
        phases, bubble = self._phases(start)
        lengths = () if config.batch.packing else self.step.policy.config.batch.lengths
        filled = sum(lengths) / (len(lengths) * max(lengths)) if lengths else 1.0
        return StepTime(
            phases=phases,
            bubble_s=bubble,
            paging_s=self._paging_s(self.speed),
            tokens=round(bind(config.micro_batch_size * config.sequence_length) * filled)
            * config.gradient_accumulation_steps,
            model_flops=model_flops(self.step),
            hardware_flops=hardware_flops(self.timeline, start),
            peak_flops_per_s=peak,
        )

    def _paging_s(self, speed: Efficiency) -> float:
        if not self.managed_bytes or self.hardware is None:
            return 0.0
        from napkinmath.timing.paging import paging_s

        return paging_s(self.managed_bytes, self.peak.nbytes, self.hardware, speed)

    def _phases(self, start: int) -> tuple[tuple[PhaseTime, ...], float]:
        """(phases, seconds of waiting for other pipeline stages)."""
        assert self.speed is not None
        if self.config.parallel.pipeline_parallel_size == 1:
            return self._paced(phase_times(self.timeline, self.speed, first_segment=start)), 0.0
        from napkinmath.timing.pipeline_time import pipeline_time

        network = _network(self.cluster, self.config)
        clock = Clock(self.speed, self.step.policy, network)
        phases, bubble = pipeline_time(self.ranks, clock)
        return self._paced(phases), bubble

    def _paced(self, phases: tuple[PhaseTime, ...]) -> tuple[PhaseTime, ...]:
        """At the pace of the slowest of several ranks."""
        ranks = self.config.parallel.world_size
        if ranks == 1:
            return phases
        from napkinmath.timing.stragglers import at_the_slowest_pace

        return at_the_slowest_pace(phases, ranks)

    @property
    def throughput(self) -> Throughput | None:
        """The step's time over all GPUs: tokens a second, communication, bubble, GPU-hours; None
        where the hardware has no known speed."""
        from napkinmath.answers.throughput import throughput

        return self._once("throughput", lambda: throughput(self))

    @property
    def measured_layers(self) -> MeasuredLayers | None:
        """The calibration's measurement of this very step's layers, if it has one."""
        if self.calibration is None or not self.calibration.layers:
            return None
        from napkinmath.calibration.calibrated_time import matching_layers

        calibration = self.calibration
        return self._once("measured layers", lambda: matching_layers(calibration, self))

    # ------------------------------------------------------------ answers

    @property
    def verdict(self) -> Verdict:
        """Whether it fits the hardware named."""
        from napkinmath.answers.answers import verdict_on

        hardware = self.hardware
        return (
            Verdict.NOT_ASKED
            if hardware is None
            else self._once("verdict", lambda: verdict_on(self, hardware))
        )

    @property
    def fits_on(self) -> tuple[Fit, ...]:
        """The catalogued GPUs from small to large, each with its verdict."""
        from napkinmath.answers.answers import fits_on

        return self._once("fits_on", lambda: fits_on(self))

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes that would save most at the peak, best first."""
        from napkinmath.answers.answers import changes

        return self._once("changes", lambda: changes(self))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is off about the configuration."""
        from napkinmath.answers.answers import findings

        return self._once("findings", lambda: findings(self))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Every value that was not given but assumed."""
        from napkinmath.answers.answers import assumptions

        return self._once("assumptions", lambda: assumptions(self))


def estimate(
    model: str | Mapping[str, object] | ModelSpec,
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
    ModelSpec. `config` or its fields as keywords say how it is trained; `hardware` is a GPU by
    name, or the Cluster whose GPUs train together; without it, a `calibration` (a file, or what was
    read of one) prices on the device it was measured on. `efficiency` replaces the GPU's default
    speeds by calibrated ones. Raises InputError for anything that cannot be understood.
    """
    from napkinmath.catalog.models import read_teacher
    from napkinmath.lowering.choices import resolve
    from napkinmath.memory.allocator import parse_settings

    spec = model if isinstance(model, ModelSpec) else _read(model)
    config = (config or TrainConfig()).replace(**changes) if changes else config or TrainConfig()
    machine, cluster = _hardware(hardware)
    if machine is None and calibration is not None:
        machine = _measured_hardware(calibration)
    if cluster is not None:
        config = config.replace(parallel=on_cluster(config.parallel, cluster))
        machine = _with_communicators(cluster, config)
    if (
        config.parallel.num_micro_batches
    ):  # a pipelined step's micro-batches are its accumulation steps
        config = config.replace(gradient_accumulation_steps=config.parallel.num_micro_batches)
    measured = _calibration(calibration, machine)
    speed = efficiency or (
        measured.efficiency(machine.gpu)
        if measured is not None and machine is not None
        else _default_speed(machine)
    )
    settings = parse_settings(allocator) if isinstance(allocator, str) else allocator
    policy = resolve(spec, config, machine, teacher=read_teacher(config))
    found = estimate_of(
        PipelineRanks(spec, policy),
        config,
        hardware=machine,
        speed=speed,
        settings=settings,
        cluster=cluster,
    )
    found.calibration = measured
    return found


def estimate_of(
    ranks: PipelineRanks,
    config: TrainConfig,
    *,
    hardware: Hardware | None,
    speed: Efficiency | None,
    settings: AllocatorSettings,
    cluster: Cluster | None,
) -> Estimate:
    """The estimate of a configuration whose model is spread over these ranks; what they have
    recorded and built of a pipeline serves again."""
    step = ranks.worst_step(steps=steps_priced(config))
    clock = Clock(speed, ranks.policy, _network(cluster, config)) if speed is not None else None
    timeline = simulate(step, clock, steps=steps_priced(config))
    return Estimate(
        ranks,
        config,
        step,
        timeline,
        hardware=hardware,
        speed=speed,
        settings=settings,
        cluster=cluster,
    )


def _with_communicators(cluster: Cluster, config: TrainConfig) -> Hardware:
    """The GPU less the buffers that its communicators hold."""
    if cluster.num_gpus == 1:
        return cluster.hardware
    from napkinmath.timing.collectives import communicator_bytes, group_sizes

    return cluster.hardware.replace(
        communicator_bytes=communicator_bytes(group_sizes(config.parallel))
    )


def _network(
    cluster: Cluster | None, config: TrainConfig
) -> Callable[[Collective, Bindings], float] | None:
    if cluster is None or cluster.num_gpus == 1:
        return None
    from napkinmath.timing.collectives import network_on

    return network_on(cluster, config.parallel)


def on_cluster(parallel: ParallelConfig, cluster: Cluster) -> ParallelConfig:
    """The mesh with hybrid groups as large as a node; raises InputError where it has not as many
    ranks as there are GPUs."""
    from napkinmath.base.errors import InputError
    from napkinmath.config.parallel_config import largest_divisor

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


def steps_priced(config: TrainConfig) -> int:
    """Two steps, or one later one with adapters, whose states are too small for it to matter in
    which holes the first step puts them."""
    return 2 if config.adapter is None else 1


def _read(model: str | Mapping[str, object]) -> ModelSpec:
    from napkinmath.catalog.models import read_model

    return read_model(model)


def _hardware(
    given: str | Gpu | Hardware | Cluster | None,
) -> tuple[Hardware | None, Cluster | None]:
    """(the GPU, the cluster it is one of, if one was given)."""
    if given is None:
        return None, None
    from napkinmath.base.errors import InputError, shown
    from napkinmath.catalog.gpus import find_hardware
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.hardware import Gpu, Hardware

    if isinstance(given, str):
        return find_hardware(given), None
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
    from napkinmath.config.hardware import Hardware

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


def count_parameters(step: Step | WholeModel) -> tuple[int, int]:
    """(base parameters, trained parameters), tied ones once, buffers not counted."""
    base = trained = 0
    top = Bindings(step.symbols)
    for run in step.runs:
        bind = top.extended(dict(run.stage.symbols))
        for weight in run.block.weights:
            if not weight.tied_to and not weight.buffer:
                count = bind(weight.elements) * run.count
                base += count if weight.kind != "adapter" else 0
                trained += count if weight.trainable else 0
    return base, trained
