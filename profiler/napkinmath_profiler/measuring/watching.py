"""The record that ``watch`` keeps: peaks of each phase and step, warnings of drift, and a report if
memory runs out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from napkinmath.base.whole_file import write_whole
from napkinmath.estimate import Estimate
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from napkinmath_profiler.measuring import drift
from napkinmath_profiler.measuring.device_memory import DeviceMemory, MemoryFigures
from napkinmath_profiler.measuring.drift import DriftWarning, StepRecord
from napkinmath_profiler.measuring.held import held_tensors
from napkinmath_profiler.measuring.live_tensors import Live, live_tensors, module_on_stack
from napkinmath_profiler.measuring.watch_defaults import DEFAULT_REPORT
from napkinmath_profiler.measuring.watch_report import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    OPTIMIZER,
    OutOfMemory,
    out_of_memory_lines,
    summary_lines,
)

log = logging.getLogger("napkinmath.watch")
TOKENS = ("input_ids", "inputs_embeds", "pixel_values")


def harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """A method of `Watching` that never ends the training it is called from: the first failure
    switches the watch off, and it does nothing from then on."""

    @wraps(hook)
    def guarded(self: Watching, *args: Any, **kwargs: Any) -> None:
        if self.failure is None:
            try:
                hook(self, *args, **kwargs)
            except Exception as reason:  # the training has no part in it
                self.give_up(reason)

    return guarded


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
        announced: bool = False,
    ) -> None:
        """``announced``: a framework says what begins (``forward_begins``, ``forward_ends``,
        ``update_begins``); else hooks do."""
        self._announced = announced
        self.records: list[StepRecord] = []
        self.warnings: list[DriftWarning] = []
        self.seconds_spent = 0.0
        """Spent in here, of the training's time."""
        self.report_path: str | None = None
        self.failure: Exception | None = None
        """Why the watch was switched off before the training's end; None where it was not."""
        self._memory, self._model, self._optimizer = memory, model, optimizer
        self._predicted = predicted
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
        if self._model is not None and not self._announced:
            self._follow(self._model)
        elif not self._announced:
            self._finder = register_module_forward_pre_hook(self._find_model)
            self._hooks.callback(self._finder.remove)
        if not self._announced:
            self._hooks.callback(
                register_optimizer_step_pre_hook(lambda *_: self.update_begins()).remove
            )
        self._hooks.callback(register_optimizer_step_post_hook(self._optimizer_done).remove)
        self._hooks.callback(self._memory.on_out_of_memory(self._ran_out))
        self._memory.reset_peaks()

    def stop(self) -> None:
        """Follow no longer."""
        try:
            self._hooks.close()  # which goes on to the next hook where one cannot be removed
        except Exception as reason:
            self._say_failed(reason)

    def give_up(self, reason: Exception) -> None:
        """Switch the watch off for good and say why, once; the training goes on."""
        self._say_failed(reason)
        self.stop()

    def _say_failed(self, reason: Exception) -> None:
        if self.failure is None:
            self.failure = reason
            log.warning(
                "the watch is switched off, in step %d, %s: %s: %s; the training goes on",
                self._record.step,
                self._phase,
                type(reason).__name__,
                reason,
            )

    @harmless
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

    @harmless
    def _model_called(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (
            torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled()
        ):  # neither a recompute nor an evaluation
            self.forward_begins(args, kwargs)

    @harmless
    def forward_begins(self, args: Any, kwargs: dict[str, Any]) -> None:
        """A training forward over these inputs begins."""
        self._enter(FORWARD)
        started = time.perf_counter()
        tokens = _num_tokens(args, kwargs)
        self._record.tokens += tokens
        self._record.longest = max(self._record.longest, tokens)
        self._tell(drift.longer_batch(self.records, tokens, self._limit))
        self.seconds_spent += time.perf_counter() - started

    @harmless
    def forward_ends(self) -> None:
        """What follows is the backward, or another forward."""
        if self._phase == FORWARD:
            self._enter(BACKWARD)

    @harmless
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

    @harmless
    def _optimizer_done(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = optimizer
        self._enter(BETWEEN)
        self.end_step()

    @harmless
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

    @harmless
    def _ran_out(self, asked: int) -> None:
        self.write_report(asked, self._memory.figures())

    @harmless
    def report_exhaustion(self) -> None:
        """Memory ran out past the allocator, which reported nothing."""
        self.write_report(None, self._memory.figures())

    @harmless
    def write_report(self, asked: int | None, figures: MemoryFigures) -> None:
        """What was there and what to change, into the report file; only once, and never an error of
        its own."""
        if self.report_path is not None:
            return
        try:
            lines = out_of_memory_lines(self._out_of_memory(asked, figures))
            write_whole(self._report, "\n".join(lines) + "\n", force=True)
            self.report_path = os.fspath(self._report)
            self._warn(f"out of memory; what was there is in {self.report_path}: {lines[0]}")
        except Exception as error:  # the training's own error must be the one that is seen
            self._warn(
                f"out of memory, and no report could be written: {type(error).__name__}: {error}"
            )

    def _out_of_memory(self, asked: int | None, figures: MemoryFigures) -> OutOfMemory:
        return OutOfMemory(
            asked=asked,
            figures=figures,
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

    def _live(self) -> Live | None:
        """Activations and other tensors that are alive; None where this torch does not let them be
        read."""
        try:
            known = [tensor for _, tensor in held_tensors(self._model, self._optimizer)]
            return live_tensors(self._model, known, self._memory.address_of)
        except Exception:  # the rest of the report is worth having without them
            log.debug("live tensors could not be read", exc_info=True)
            return None


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
