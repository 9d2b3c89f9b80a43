"""Estimate: the priced training step, whose every figure is read off one Timeline."""

from __future__ import annotations

from functools import cached_property

from napkinmath.answers.assumptions import assumptions
from napkinmath.answers.changes import changes
from napkinmath.answers.figures import Verdict
from napkinmath.answers.findings import findings
from napkinmath.answers.parameters import count_parameters
from napkinmath.answers.possible import impossible_memory, impossible_time
from napkinmath.answers.ranges import memory_ranges
from napkinmath.answers.verdict import fits_on, open_verdict, verdict_on
from napkinmath.answers.whole_run import WholeRun, whole_run
from napkinmath.base.errors import ImpossibleFigure
from napkinmath.lowering.choices import resolve
from napkinmath.memory.pipeline_ranks import PipelineRanks, WholeModel, stage_figures
from napkinmath.memory.replay import replay
from napkinmath.memory.simulate import simulate, steps_priced
from napkinmath.models.read import read_teacher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.answers.figures import Change, Finding, Fit, Memory, Remedy
    from napkinmath.answers.host_memory import HostMemory
    from napkinmath.answers.shown import ShownComparison, ShownDrawing
    from napkinmath.answers.throughput import Throughput
    from napkinmath.calibration.calibration import Calibration
    from napkinmath.calibration.measured_layers import MeasuredLayers
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.hardware import Hardware
    from napkinmath.config.job_keys import JobKeys
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.ledger import Phase, Role
    from napkinmath.ir.step import Step
    from napkinmath.ir.timeline import Point, Timeline
    from napkinmath.memory.allocator_settings import AllocatorSettings
    from napkinmath.memory.pipeline_ranks import StageFigures
    from napkinmath.memory.replay import Replay
    from napkinmath.timing.efficiency import Efficiency
    from napkinmath.timing.schedule import StepTime


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
        calibration: Calibration | None = None,
        price_per_gpu_hour: float | None = None,
    ) -> None:
        self.ranks, self.spec = ranks, ranks.spec
        self.config, self.step, self.timeline = config, step, timeline
        self.hardware, self.speed, self.settings, self.cluster = hardware, speed, settings, cluster
        self.calibration, self.price_per_gpu_hour = calibration, price_per_gpu_hour
        self.job_keys: JobKeys | None = None
        self._compared: dict[TrainConfig, tuple[int, PipelineRanks]] = {}

    def with_price(self, per_gpu_hour: float) -> Estimate:
        """The same estimate with money for one hour of one GPU; it keeps what was computed."""
        return self._with(price_per_gpu_hour=per_gpu_hour)

    def of_job(self, keys: JobKeys) -> Estimate:
        """The same estimate as that of a job file, whose keys that are not priced leave the verdict
        open; what rests on it is judged again."""
        found = self._with(job_keys=keys)
        for judged in ("verdict", "memory", "fits_on", "remedy", "findings"):
            vars(found).pop(judged, None)
        return found

    def _with(self, **changes: object) -> Estimate:
        found = Estimate.__new__(Estimate)
        vars(found).update(vars(self), **changes)
        return found

    # ------------------------------------------------------------ memory

    @cached_property
    def peak(self) -> Point:
        """The moment of most requested bytes."""
        return self.timeline.peak()

    @cached_property
    def phase_peaks(self) -> dict[Phase, Point]:
        """The highest point of each phase, highest first: the winner and the runners-up."""
        return self.timeline.phase_peaks()

    @property
    def replay(self) -> Replay:
        """The allocator's books over loading and two steps; the median of several orders where
        lengths vary."""
        return self.replays[len(self.replays) // 2]

    @cached_property
    def replays(self) -> list[Replay]:
        """The books over the steps priced, or over several orders of the batch's lengths, least
        reserved first."""
        batch = self.config.micro_batch_size
        if not self.lengths_change or not isinstance(batch, int):
            return [replay(self.timeline, self.settings)]
        from napkinmath.memory.varied_lengths import replays

        found = replays(self.step, self.step.policy.config.batch.lengths, batch, self.settings)
        # which lengths follow the longest differs between orders: the longest after itself is one
        most = max(self.peak.nbytes, *(books.peak_allocated for books in found))
        return [books if books.out_of_memory else books.holding(most) for books in found]

    @property
    def lengths_change(self) -> bool:
        """Whether every batch is padded to its own longest; stages of a schedule exchange tensors
        of one shape, padded to the limit."""
        batch, parallel = self.config.batch, self.config.parallel
        scheduled = (
            parallel.pipeline_parallel_size > 1 and parallel.pipeline_schedule.record.is_pipelined
        )
        return bool(batch.lengths) and not batch.packing and not scheduled

    @cached_property
    def memory(self) -> Memory:
        """Requested, allocated, reserved and device peaks with their ranges. Raises
        ImpossibleFigure for what no memory can be."""
        found = memory_ranges(self)
        if broken := impossible_memory(found):
            raise ImpossibleFigure(f"memory of {self.spec.name} is withheld: {broken}")
        return found

    @cached_property
    def breakdown(self) -> dict[Role, int]:
        """Bytes by role at the peak; with allocator slack and device context they sum to the device
        figure."""
        return self.timeline.breakdown(self.peak)

    @cached_property
    def host_bytes(self) -> int:
        """Host memory of everything offloaded, at its peak; 0 where nothing is."""
        return self.timeline.host_peak()

    @cached_property
    def host_memory(self) -> HostMemory:
        """Host memory of one machine with all its ranks: loading, training, NVMe."""
        from napkinmath.answers.host_memory import host_memory

        return host_memory(self)

    @cached_property
    def managed_bytes(self) -> int:
        """Unified memory of paged optimizer states: on the device while there is room, outside the
        allocator's books."""
        return self.timeline.host_peak(managed=True)

    @property
    def num_parameters(self) -> int:
        """Parameters of the base model, tied ones once."""
        return self._counted[0]

    @property
    def num_trained(self) -> int:
        """Parameters that get a gradient, adapters included."""
        return self._counted[1]

    @cached_property
    def _counted(self) -> tuple[int, int]:
        parallel = self.config.parallel
        spread = (
            parallel.tensor_parallel_size > 1
            or parallel.pipeline_parallel_size > 1
            or parallel.spreads_experts
        )
        return count_parameters(WholeModel(self.spec, self.ranks.policy) if spread else self.step)

    @cached_property
    def stages(self) -> tuple[StageFigures, ...]:
        """Figures of every pipeline rank; this estimate is that of the one that needs the most
        memory."""
        return stage_figures(self.ranks, steps=steps_priced(self.config))

    # ------------------------------------------------------------ time

    @cached_property
    def time(self) -> StepTime | None:
        """The steady step's time, by its measured layers where a calibration has them; None where
        the hardware has no known speed, or where the time is impossible (`withheld`)."""
        return None if self.withheld else self._time

    @cached_property
    def withheld(self) -> str:
        """Why the time is withheld: the rule that it breaks; empty where it is possible."""
        return impossible_time(self._time) if self._time is not None else ""

    @cached_property
    def _time(self) -> StepTime | None:
        priced, layers = self.priced_time, self.measured_layers
        if priced is None or layers is None:
            return priced
        from napkinmath.calibration.calibrated_time import calibrated_time

        return calibrated_time(priced, layers, self.spec, self.config, self._time_alone)

    def _time_alone(self, config: TrainConfig) -> StepTime | None:
        """The time of another configuration as its operations add up, without a network."""
        config = as_accumulated(config)
        return self._like(self._ranks_under(config), config, None).priced_time

    @cached_property
    def priced_time(self) -> StepTime | None:
        """The steady step's time as its operations add up, to be held against another
        configuration's."""
        if self.speed is None or self.hardware is None:
            return None
        from napkinmath.answers.step_time import step_time

        return step_time(self, self.speed, self.hardware)

    @cached_property
    def throughput(self) -> Throughput | None:
        """The step's time over all GPUs: tokens a second, communication, bubble, GPU-hours; None
        where the hardware has no known speed."""
        from napkinmath.answers.throughput import throughput

        return throughput(self)

    @cached_property
    def whole_run(self) -> WholeRun | None:
        """Steps and hours of the training, where its length is said; None without known speeds."""
        return whole_run(self)

    @cached_property
    def measured_layers(self) -> MeasuredLayers | None:
        """The calibration's measurement of this very step's layers, if it has one."""
        if self.calibration is None or not self.calibration.layers:
            return None
        from napkinmath.calibration.calibrated_time import matching_layers

        optimizer = self.step.update.optimizer.name
        return matching_layers(self.calibration, self.spec, self.config, optimizer)

    @property
    def measured_peaks(self) -> dict[str, int]:
        """Requested bytes at the peak of each phase by the measured layers; empty where this batch
        and length were not measured."""
        if self.measured_layers is None:
            return {}
        from napkinmath.calibration.calibrated_time import measured_peaks

        return measured_peaks(self.measured_layers, self.spec, self.config)

    # ------------------------------------------------------------ answers

    @cached_property
    def verdict(self) -> Verdict:
        """Whether it fits the hardware named; open where what is not priced could change it."""
        if self.hardware is None:
            return self.priced_verdict
        return open_verdict(self, self.hardware, self.priced_verdict)

    @property
    def takes_more(self) -> bool:
        """Whether its job file asks for memory that is not priced."""
        return self.job_keys is not None and self.job_keys.takes_more

    @cached_property
    def priced_verdict(self) -> Verdict:
        """Whether what is priced fits the hardware named."""
        return Verdict.NOT_ASKED if self.hardware is None else verdict_on(self, self.hardware)

    @cached_property
    def fits_on(self) -> tuple[Fit, ...]:
        """The catalogued GPUs from small to large, each with its verdict."""
        return fits_on(self)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The changes that would save most at the peak, best first."""
        return changes(self)

    @cached_property
    def remedy(self) -> Remedy | None:
        """The smallest set of changes under which it fits; None where it fits as it is, or where
        none is enough."""
        from napkinmath.answers.remedies import remedy

        return remedy(self)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is off about the configuration."""
        return findings(self)

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """Every value that was not given but assumed."""
        return assumptions(self)

    # ------------------------------------------------------------ other configurations

    def compared(self, config: TrainConfig) -> tuple[int, PipelineRanks]:
        """(bytes that the peak would be lower, or, negative, higher, under another configuration,
        and its ranks). Raises InputError where the model's family refuses it."""
        found = self._compared.get(config)
        if found is None:
            ranks = self._ranks_under(config)
            other = ranks.worst_peak(steps=steps_priced(config))
            found = self._compared[config] = self.peak.nbytes - other, ranks
        return found

    def under(self, config: TrainConfig, ranks: PipelineRanks) -> Estimate:
        """The same model on the same machine under another configuration, spread over `ranks`; no
        calibration's layers are of it."""
        return self._like(ranks, config, self.cluster)

    def _ranks_under(self, config: TrainConfig) -> PipelineRanks:
        policy = resolve(self.spec, config, self.hardware, teacher=read_teacher(config))
        return self.ranks.under(policy)

    def _like(self, ranks: PipelineRanks, config: TrainConfig, cluster: Cluster | None) -> Estimate:
        return estimate_of(
            ranks,
            config,
            hardware=self.hardware,
            speed=self.speed,
            settings=self.settings,
            cluster=cluster,
        )

    # ------------------------------------------------------------ in Python and notebooks

    def __repr__(self) -> str:
        return _views().text(self)

    def _repr_html_(self) -> str:
        return _views().html(self)

    def to_pandas(self) -> Any:
        """What is alive at the peak as a pandas DataFrame; raises InputError without pandas."""
        return _views().frame(self)

    def compare(self, other: Estimate) -> ShownComparison:
        """The settings in which two estimates differ, and the figures of both."""
        return _views().compared(self, other)

    def plot(self) -> ShownDrawing:
        """The timeline as a picture, which a notebook shows and `save(path)` writes."""
        return _views().Drawing(estimate=self)


def _views() -> Any:
    from napkinmath import views

    return views()


def estimate_of(
    ranks: PipelineRanks,
    config: TrainConfig,
    *,
    hardware: Hardware | None,
    speed: Efficiency | None,
    settings: AllocatorSettings,
    cluster: Cluster | None,
    calibration: Calibration | None = None,
) -> Estimate:
    """The estimate of a configuration whose model is spread over these ranks; what they have
    recorded and built of a pipeline serves again."""
    step = ranks.worst_step(steps=steps_priced(config))
    clock = None
    if speed is not None:
        from napkinmath.answers.step_time import clock_on

        clock = clock_on(cluster, config.parallel, speed, ranks.policy)
    return Estimate(
        ranks,
        config,
        step,
        simulate(step, clock, steps=steps_priced(config)),
        hardware=hardware,
        speed=speed,
        settings=settings,
        cluster=cluster,
        calibration=calibration,
    )


def as_accumulated(config: TrainConfig) -> TrainConfig:
    """A pipelined step's micro-batches are its accumulation steps."""
    micro_batches = config.parallel.num_micro_batches
    return config.replace(gradient_accumulation_steps=micro_batches) if micro_batches else config
