"""Throughput: what a step's time means for all GPUs: tokens a second, waiting, GPU-hours, energy
and money per billion tokens."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate

# A server draws this much for each watt of its GPUs: DGX A100 6.5 kW for 8 x 400 W and DGX H100
# 10.2 kW for 8 x 700 W at most (their user guides); cooling and power distribution of the building
# are not counted.
_SERVER_PER_GPU_WATT = 1.9


class Throughput(Record):
    """A step over all GPUs; shares are of the step's seconds."""

    gpus: int
    seconds: float
    tokens: int
    """Of all replicas together in one step."""
    mfu: float
    hfu: float
    communication_share: float
    """What the step would be shorter by without communication: waiting, and what kernels lose
    beside it."""
    bubble_share: float
    """Pipeline stages waiting for each other."""
    gpu_watts: float

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """The mean over the run's GPUs."""
        return self.tokens_per_s / self.gpus

    @property
    def gpu_hours_per_billion(self) -> float:
        """GPU-hours for 10^9 tokens."""
        return gpu_hours_per_billion(self.tokens_per_s, self.gpus)

    @property
    def kwh_per_billion(self) -> float:
        """Electricity of the servers for 10^9 tokens, with GPUs at their rated power: an upper
        estimate."""
        return self.gpu_hours_per_billion * self.gpu_watts * _SERVER_PER_GPU_WATT / 1000

    def price_per_billion(self, price_per_gpu_hour: float) -> float:
        """Money for 10^9 tokens, in the currency of the price of one GPU for one hour."""
        if not 0 <= price_per_gpu_hour < 1e6:
            raise InputError(
                f"price {shown(price_per_gpu_hour)} is not a price of one GPU for one hour; give"
                " e.g. 2.50"
            )
        return self.gpu_hours_per_billion * price_per_gpu_hour


def gpu_hours_per_billion(tokens_per_s: float, gpus: int) -> float:
    """GPU-hours for 10^9 tokens at the speed of all GPUs together."""
    return 1e9 / tokens_per_s / 3600 * gpus


def throughput(e: Estimate) -> Throughput | None:
    """The throughput of an estimate; None where the hardware has no known speed."""
    time = e.time
    if time is None or e.hardware is None:
        return None
    parallel = e.config.parallel
    return Throughput(
        gpus=parallel.world_size,
        seconds=time.seconds,
        tokens=time.tokens * parallel.data_parallel_size,
        mfu=time.mfu,
        hfu=time.hfu,
        communication_share=time.share("communication"),
        bubble_share=time.bubble_s / time.seconds,
        gpu_watts=e.hardware.gpu.watts,
    )
