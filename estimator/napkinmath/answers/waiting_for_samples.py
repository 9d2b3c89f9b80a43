"""A data loader that is slower than the step: what waits, and how many workers would do."""

from __future__ import annotations

from napkinmath.answers.figures import Finding
from napkinmath.base.units import format_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.data_loader import DataLoaderConfig
    from napkinmath.config.hardware import Hardware
    from napkinmath.timing.schedule import StepTime


def samples_of_a_step(e: Estimate) -> int:
    """Rows that one GPU's loader hands to a step, a pair being one; packed rows count once."""
    config = e.config
    assert isinstance(config.micro_batch_size, int)
    micro_steps = config.parallel.num_micro_batches or config.gradient_accumulation_steps
    return max(1, config.micro_batch_size // config.workload.sequences) * micro_steps


def starved(e: Estimate, time: StepTime, hardware: Hardware) -> Finding | None:
    """The finding where a step waits for samples; None where the loader keeps up."""
    loader, samples = e.config.loader, samples_of_a_step(e)
    waits = loader.waits_s(samples, time.seconds)
    if not waits:
        return None
    lost = 100 * waits / (time.seconds + waits)
    return Finding(
        text=(
            f"each step of {format_seconds(time.seconds)} waits {format_seconds(waits)} more for"
            f" its {samples} samples, which costs {lost:.0f}% of the tokens/s: {_who(loader)};"
            f" {_way(e, hardware, loader.enough_workers(samples, time.seconds))}"
        )
    )


def _who(loader: DataLoaderConfig) -> str:
    rate = f"{loader.samples_per_s:g} a second"
    if not loader.workers:
        return f"the training process prepares {rate} between steps"
    return (
        f"one worker prepares {rate}"
        if loader.workers == 1
        else f"{loader.workers} workers prepare {rate} each"
    )


def _way(e: Estimate, hardware: Hardware, workers: int) -> str:
    gpus = e.cluster.gpus_per_node if e.cluster is not None else 1
    host = hardware.gpu.host
    gpus, cores = host.ranks(gpus), host.cores
    keeps_up = f"--dataloader-workers {workers} keeps up"
    if workers * gpus <= cores:
        return keeps_up
    return (
        f"{keeps_up}, which on {gpus} GPUs is more than the machine's {cores} cores: prepare the"
        " samples before the training"
    )
