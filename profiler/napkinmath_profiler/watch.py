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

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from napkinmath.base.errors import InputError
from napkinmath.estimate import Estimate
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from napkinmath_profiler.measuring import drift
from napkinmath_profiler.measuring.device_memory import CudaMemory, DeviceMemory, MemoryFigures
from napkinmath_profiler.measuring.device_names import device_named
from napkinmath_profiler.measuring.drift import DriftWarning, StepRecord
from napkinmath_profiler.measuring.exhaustion import is_exhaustion
from napkinmath_profiler.measuring.held import held_tensors
from napkinmath_profiler.measuring.live_tensors import Live, live_tensors, module_on_stack
from napkinmath_profiler.measuring.watch_report import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    OPTIMIZER,
    out_of_memory_lines,
    summary_lines,
)

log = logging.getLogger("napkinmath.watch")
TOKENS = ("input_ids", "inputs_embeds", "pixel_values")
DEFAULT_REPORT = "napkinmath-out-of-memory.txt"


class Watching:
    """What ``watch`` records; ``records`` has one entry a step, ``warnings`` what was warned of."""

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        predicted: Estimate | int | None = None,
        limit_bytes: int | None = None,
        report: str | os.PathLike[str] = DEFAULT_REPORT,
        warn: Callable[[str], None] = log.warning,
        told: bool = False,
    ) -> None:
        """``told``: a framework says what begins (``forward_begins``, ``forward_ends``,
        ``update_begins``); else hooks do."""
        self._told = told
        self.records: list[StepRecord] = []
        self.warnings: list[DriftWarning] = []
        self.seconds_spent = 0.0
        """Spent in here, of the training's time."""
        self.report_path: str | None = None
        self._memory, self._model, self._optimizer, self._predicted = (
            memory,
            model,
            optimizer,
            predicted,
        )
        self._limit, self._report, self._warn = limit_bytes or _device_limit(memory), report, warn
        self._phase, self._record = BETWEEN, StepRecord(0)
        self._hooks = ExitStack()

    # ------------------------------------------------------------ reading

    @property
    def peak(self) -> int:
        """Highest allocated bytes of all steps."""
        return max((record.peak for record in self.records), default=0)

    @property
    def predicted_bytes(self) -> int | None:
        """The predicted peak of allocated bytes, the upper end of its range."""
        return (
            round(self._predicted.memory.allocated.high)
            if isinstance(self._predicted, Estimate)
            else self._predicted
        )

    def summary(self) -> str:
        """Peaks by phase over the training, beside what was predicted, and the warnings."""
        return "\n".join(
            summary_lines(self.records, self.warnings, self._predicted, self.seconds_spent)
        )

    # ------------------------------------------------------------ following

    def start(self) -> None:
        """Begin to follow; the first module called with gradients on, and parameters to train, is
        the model if none was named."""
        if self._model is not None and not self._told:
            self._follow(self._model)
        elif not self._told:
            self._finder = register_module_forward_pre_hook(self._find_model)
            self._hooks.callback(self._finder.remove)
        if not self._told:
            self._hooks.callback(
                register_optimizer_step_pre_hook(lambda *_: self.update_begins()).remove
            )
        self._hooks.callback(register_optimizer_step_post_hook(self._optimizer_done).remove)
        self._hooks.callback(self._memory.on_out_of_memory(self._ran_out))
        self._memory.reset_peaks()

    def stop(self) -> None:
        """Follow no longer."""
        self._hooks.close()

    def _find_model(self, module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self._finder.remove()
            self._model = module
            self._follow(module)
            self._enter(FORWARD)  # of this very call, which has gathered its hooks already

    def _follow(self, model: nn.Module) -> None:
        self._hooks.callback(
            model.register_forward_pre_hook(self._model_called, with_kwargs=True).remove
        )
        self._hooks.callback(model.register_forward_hook(lambda *_: self.forward_ends()).remove)

    def _model_called(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (
            torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled()
        ):  # neither a recompute nor an evaluation
            self.forward_begins(args, kwargs)

    def forward_begins(self, args: Any, kwargs: dict[str, Any]) -> None:
        """A training forward over these inputs begins."""
        self._enter(FORWARD)
        started = time.perf_counter()
        tokens = _num_tokens(args, kwargs)
        self._record.tokens += tokens
        self._record.longest = max(self._record.longest, tokens)
        self._tell(drift.longer_batch(self.records, tokens, self._limit))
        self.seconds_spent += time.perf_counter() - started

    def forward_ends(self) -> None:
        """What follows is the backward, or another forward."""
        if self._phase == FORWARD:
            self._enter(BACKWARD)

    def update_begins(self) -> None:
        """The optimizer's step begins."""
        self._enter(OPTIMIZER)

    def _enter(self, phase: str) -> None:
        """What was going on ends with these peaks."""
        started = time.perf_counter()
        allocated, reserved = self._memory.peaks()
        record = self._record
        record.peaks[self._phase] = max(record.peaks.get(self._phase, 0), allocated)
        record.peak_reserved = max(record.peak_reserved, reserved)
        self._memory.reset_peaks()
        self._phase = phase
        self.seconds_spent += time.perf_counter() - started

    def _optimizer_done(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = optimizer
        self._enter(BETWEEN)
        self.end_step()

    def end_step(self) -> None:
        """A step is over: note what is left, look for drift, begin the next."""
        started = time.perf_counter()
        record = self._record
        record.end_allocated, record.end_reserved = self._memory.current()
        self.records.append(record)
        self._record = StepRecord(record.step + 1)
        for found in (
            drift.leak(self.records, self._limit),
            drift.fragmentation(self.records),
            drift.beyond_prediction(
                self.records, self.predicted_bytes, _tokens_of(self._predicted)
            ),
        ):
            self._tell(found)
        self.seconds_spent += time.perf_counter() - started

    def _tell(self, found: DriftWarning | None) -> None:
        """Warn of each kind once."""
        if found is not None and all(before.kind != found.kind for before in self.warnings):
            self.warnings.append(found)
            self._warn(f"step {found.step}: {found.kind}: {found.text}")

    # ------------------------------------------------------------ out of memory

    def _ran_out(self, asked: int) -> None:
        self.write_report(asked, self._memory.figures())

    def write_report(self, asked: int | None, figures: MemoryFigures) -> None:
        """What was there and what to change, into the report file; only once, and never an error of
        its own."""
        if self.report_path is not None:
            return
        try:
            lines = out_of_memory_lines(
                asked,
                figures,
                phase=self._phase,
                record=self._record,
                records=self.records,
                warnings=self.warnings,
                model=self._model,
                optimizer=self._optimizer,
                predicted=self._predicted,
                limit=self._limit,
                module=module_on_stack(self._model),
                live=self._live(),
            )
            with open(self._report, "w", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
            self.report_path = os.fspath(self._report)
            self._warn(f"out of memory; what was there is in {self.report_path}: {lines[0]}")
        except Exception as error:  # the training's own error must be the one that is seen
            self._warn(
                f"out of memory, and no report could be written: {type(error).__name__}: {error}"
            )

    def _live(self) -> Live | None:
        """Activations and other tensors that are alive; None where this torch does not let them be
        read."""
        try:
            known = [tensor for _, tensor in held_tensors(self._model, self._optimizer)]
            return live_tensors(self._model, known, self._memory.address_of)
        except Exception:  # the rest of the report is worth having without them
            log.debug("live tensors could not be read", exc_info=True)
            return None


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
    told: bool = False,
) -> Iterator[Watching]:
    """Follow the training inside the block.

    ``predicted`` is an ``Estimate`` or bytes; ``limit_bytes`` what may be allocated (the GPU's
    memory unless given); ``report`` the file written when memory runs out; ``warn`` is called with
    each warning; ``told`` as in ``Watching``. ``memory`` replaces the GPU's allocator, such as
    ``CpuMemory()`` to try this out without one.
    """
    books = memory if memory is not None else _books_of(device)
    how: dict[str, Any] = {
        "predicted": predicted,
        "limit_bytes": limit_bytes,
        "report": report,
        "warn": warn,
        "told": told,
    }
    watching = Watching(books, model=model, optimizer=optimizer, **how)
    with books:
        if model is not None:
            books.adopt([*model.parameters(), *model.buffers()])
        watching.start()
        try:
            yield watching
        except (RuntimeError, MemoryError) as error:
            if is_exhaustion(
                error
            ):  # of whoever asks past the allocator, too: it tells no observer
                watching.write_report(None, books.figures())
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


def _device_limit(memory: DeviceMemory) -> int | None:
    """What this process may take of the device: what is free now and what it holds."""
    figures = memory.figures()
    if figures.device_total is None or figures.device_used is None:
        return None
    return figures.device_total - figures.device_used + figures.reserved


def _num_tokens(args: Any, kwargs: dict[str, Any]) -> int:
    """Tokens of the model's main input: of ids (b, s) or embeddings (b, s, h) b·s, of anything else
    its first dimension."""
    found = next(
        (kwargs[name] for name in TOKENS if isinstance(kwargs.get(name), torch.Tensor)), None
    )
    if found is None:
        found = next((value for value in args if isinstance(value, torch.Tensor)), None)
    if found is None or found.dim() == 0:
        return 0
    is_sequence = found.dim() == 3 or (found.dim() == 2 and not found.is_floating_point())
    return found.shape[0] * found.shape[1] if is_sequence else found.shape[0]


def _tokens_of(predicted: Estimate | int | None) -> int | None:
    """Tokens of one step that the prediction is for."""
    if not isinstance(predicted, Estimate):
        return None
    config = predicted.config
    tokens = config.micro_batch_size * config.sequence_length * config.gradient_accumulation_steps
    return tokens if isinstance(tokens, int) else None


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
        except InputError as reason:
            log.warning("not watched: %s", reason)
        else:
            self._block = block

    def end(self, error: BaseException | None) -> None:
        """Leaves it, with what ended the training, and logs its summary."""
        block, self._block = self._block, None
        if block is not None and self.watching is not None:
            with suppress(RuntimeError, MemoryError):  # the trainer raises it itself
                block.__exit__(type(error) if error is not None else None, error, None)
            log.info("memory of the training:\n%s", self.watching.summary())


def trainer_callback(**options: Any) -> Any:
    """A ``transformers.TrainerCallback`` that watches a Trainer's run; ``options`` are those of
    ``watch``.

    The report is written when memory runs out; the summary goes to the log at the end.
    """
    from transformers import TrainerCallback

    class WatchCallback(WholeTraining, TrainerCallback):
        """Follows the training between on_train_begin and on_train_end."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begin(watch(kwargs.get("model"), kwargs.get("optimizer"), **options))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end(None)

    return WatchCallback()


def lightning_callback(**options: Any) -> Any:
    """A callback of PyTorch Lightning that watches a fit; ``options`` are those of ``watch``. The
    summary goes to the log at the end."""
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback

    class WatchCallback(WholeTraining, Callback):  # type: ignore[misc, valid-type]
        """Follows a fit; told what begins, since Lightning calls no module and runs forward and
        backward inside the optimizer's step."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            optimizer = trainer.optimizers[0] if trainer.optimizers else None
            self.begin(watch(pl_module, optimizer, told=True, **options))

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if self.watching is not None and self.is_open:
                named = dict(batch) if isinstance(batch, Mapping) else {}
                self.watching.forward_begins(
                    (
                        [*named.values()] or batch
                        if isinstance(batch, (list, tuple, Mapping))
                        else (batch,)
                    ),
                    named,
                )

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if self.watching is not None and self.is_open:
                self.watching.forward_ends()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if self.watching is not None and self.is_open:
                self.watching.update_begins()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.end(None)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.end(exception)

    return WatchCallback()


__all__ = ["Watching", "lightning_callback", "trainer_callback", "watch"]
