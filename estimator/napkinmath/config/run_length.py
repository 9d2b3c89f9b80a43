"""RunLength: how many steps a training takes, by its data or by itself."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.expr import ceil_div
from napkinmath.base.record import Record


class RunLength(Record):
    """What is said of the length of a run. It moves neither memory nor time of a step."""

    samples: int = 0
    """Rows of the dataset, a pair being one; 0 where it is not said."""
    epochs: float = 1.0
    """Passes over the dataset; the last may be a part of one."""
    max_steps: int = 0
    """Optimizer steps, which count before samples and epochs; 0 where it is not said."""

    def validate(self) -> None:
        """Raises InputError for a length that is none."""
        if self.samples < 0 or self.max_steps < 0 or not 0 < self.epochs <= 1e6:
            raise InputError(
                f"a run of {self.samples} samples, {self.epochs:g} epochs and {self.max_steps}"
                " steps is none; use at least 1, and more than 0 epochs"
            )

    @property
    def is_known(self) -> bool:
        """Whether it says how many steps there are."""
        return bool(self.samples or self.max_steps)

    def steps(self, rows: int, micro_steps: int) -> int:
        """Optimizer steps, where a micro-step takes `rows` samples over all GPUs: the last batch and
        the last accumulation of an epoch may be short (transformers 5.23 trainer.py
        set_initial_training_values)."""
        if self.max_steps:
            return self.max_steps
        each = ceil_div(ceil_div(self.samples, rows), micro_steps)
        assert isinstance(each, int)
        return -int(-self.epochs * each // 1)
