"""DataLoaderConfig: how fast samples are prepared on the host."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record


class DataLoaderConfig(Record):
    """What is said of the data loader. It moves no memory of the GPU; a step waits for its samples."""

    samples_per_s: float = 0.0
    """Samples that one process prepares in a second; 0 where it is not said."""
    workers: int = 0
    """Processes of one GPU that prepare beside the step; 0 prepares in the training process, between
    steps (torch utils/data/dataloader.py)."""

    def validate(self) -> None:
        """Raises InputError for a negative rate or number."""
        if self.samples_per_s < 0 or self.workers < 0:
            raise InputError(
                f"a data loader of {self.workers} workers and {self.samples_per_s:g} samples a"
                " second cannot work; use 0 workers or more and a rate above 0"
            )

    def waits_s(self, samples: int, step_s: float) -> float:
        """Seconds that a step of so many samples waits for them."""
        if not self.samples_per_s:
            return 0.0
        alone = samples / self.samples_per_s
        return max(0.0, alone / self.workers - step_s) if self.workers else alone

    def enough_workers(self, samples: int, step_s: float) -> int:
        """The fewest workers with which no step waits."""
        return max(1, -int(-samples / self.samples_per_s / step_s // 1))
