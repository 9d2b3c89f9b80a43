"""``watch()``: follow a real training's memory step by step, warn before it runs out, and explain
it when it has.

    with watch(model, optimizer, predicted=estimate("llama-3-8b", ...)) as watching:
        for batch in loader: ...
    print(watching.summary())

At four moments a step (the model's forward begins and ends, the optimizer's step begins and ends)
the allocator's peaks are read and reset; PyTorch's own peak statistics therefore cover a phase, and
``Watching.peak`` the whole training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from napkinmath.base.errors import InputError
from napkinmath.estimate import Estimate
from torch import nn

from napkinmath_profiler.measuring.device_memory import CudaMemory, DeviceMemory
from napkinmath_profiler.measuring.device_names import device_named
from napkinmath_profiler.measuring.exhaustion import is_exhaustion
from napkinmath_profiler.measuring.watch_defaults import DEFAULT_REPORT
from napkinmath_profiler.measuring.watching import Watching, log


@contextmanager
def watch(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    predicted: Estimate | int | None = None,
    limit_bytes: int | None = None,
    report: str | os.PathLike[str] = DEFAULT_REPORT,
    device: str = "cuda",
    memory: DeviceMemory | None = None,
    warn: Callable[[str], None] = log.warning,
    announced: bool = False,
) -> Generator[Watching]:
    """Follow the training inside the block.

    ``predicted`` is an ``Estimate`` or bytes; ``limit_bytes`` what may be allocated (the GPU's
    memory unless given); ``report`` the file written when memory runs out; ``warn`` is called with
    each warning; ``announced`` as in ``Watching``. ``memory`` replaces the GPU's allocator, such as
    ``CpuMemory()`` to try this out without one.
    """
    books = memory if memory is not None else _books_of(device)
    watching = Watching(
        books,
        model=model,
        optimizer=optimizer,
        predicted=predicted,
        limit_bytes=limit_bytes,
        report=report,
        warn=warn,
        announced=announced,
    )
    with books:
        if model is not None:
            books.adopt([*model.parameters(), *model.buffers()])
        try:
            watching.start()
            yield watching
        except (RuntimeError, MemoryError) as error:
            # of whoever asks past the allocator, too: it tells no observer
            if is_exhaustion(error):
                watching.report_exhaustion()
            raise
        finally:
            watching.stop()


def _books_of(device: str) -> DeviceMemory:
    """The allocator of a GPU; InputError without one says what can be watched instead."""
    found = device_named(device)
    if found.type != "cuda":
        raise InputError(
            f"watch(device={device!r}) has no allocator to read; pass memory=CpuMemory() to keep"
            " the books that a GPU's would keep"
        )
    return CudaMemory(found)


class WholeTraining:
    """A watch that a trainer's callback opens and closes; a training is not stopped for want of
    something to watch."""

    watching: Watching | None = None
    _block: Any = None

    @property
    def is_open(self) -> bool:
        """Whether something is being watched."""
        return self._block is not None

    def begin(self, block: Any) -> None:
        """Enters what `watch` returned, or says why there is nothing to watch."""
        try:
            self.watching = block.__enter__()
        except Exception as reason:  # nothing here may end a training
            log.warning("not watched: %s", reason)
        else:
            self._block = block

    def end(self, error: BaseException | None) -> None:
        """Leaves it, with what ended the training, and logs its summary."""
        block, self._block = self._block, None
        if block is not None and self.watching is not None:
            try:
                block.__exit__(type(error) if error is not None else None, error, None)
                log.info("memory of the training:\n%s", self.watching.summary())
            except Exception as reason:  # the trainer raises its own error itself
                if reason is not error:
                    log.warning("the watch could not end: %s", reason)


def _harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """A callback's method that never ends the training: its first failure ends the watch."""

    @wraps(hook)
    def guarded(self: WholeTraining, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as reason:  # of what the framework hands over, which may be anything
            if self.watching is None:
                log.warning("not watched: %s: %s", type(reason).__name__, reason)
            elif self.watching.failure is None:
                self.watching.give_up(reason)

    return guarded


def trainer_callback(**options: Any) -> Any:
    """A ``transformers.TrainerCallback`` that watches a Trainer's run; ``options`` are those of
    ``watch``.

    The report is written when memory runs out; the summary goes to the log at the end.
    """
    from transformers import TrainerCallback

    class WatchCallback(WholeTraining, TrainerCallback):
        """Follows the training between on_train_begin and on_train_end."""

        @_harmless
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begin(watch(kwargs.get("model"), kwargs.get("optimizer"), **options))

        @_harmless
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end(None)

    return WatchCallback()


class _WatchedFit(WholeTraining):
    """Follows a fit. It is called at each beginning, since Lightning calls no module and runs forward and
    backward inside the optimizer's step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    @_harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        self.begin(watch(pl_module, optimizer, announced=True, **self._options))

    @_harmless
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.watching is not None and self.is_open:
            named = dict(batch) if isinstance(batch, Mapping) else {}
            is_many = isinstance(batch, (list, tuple, Mapping))
            self.watching.forward_begins([*named.values()] or batch if is_many else (batch,), named)

    @_harmless
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.watching is not None and self.is_open:
            self.watching.forward_ends()

    @_harmless
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.watching is not None and self.is_open:
            self.watching.update_begins()

    @_harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end(None)

    @_harmless
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end(exception)


def lightning_callback(**options: Any) -> Any:
    """A callback of PyTorch Lightning that watches a fit; ``options`` are those of ``watch``. The
    summary goes to the log at the end."""
    try:
        from lightning.pytorch.callbacks import Callback  # type: ignore[import-not-found]
    except ImportError:
        from pytorch_lightning.callbacks import Callback

    class WatchCallback(_WatchedFit, Callback):  # type: ignore[misc, valid-type]
        """Lightning asks that it be one of its own."""

    return WatchCallback(**options)


__all__ = ["Watching", "lightning_callback", "trainer_callback", "watch"]
