"""Which module a tensor operation belongs to, in forward, recompute and backward."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def repeated_module(path: str) -> str:
    """The part of a module's path up to its first number (``model.layers.3``), or the whole path
    without one."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ""


def next_sequence() -> int:
    """The number that this thread's next autograd node gets."""
    autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - a module without stubs
    return autograd._get_sequence_nr()


def _nothing() -> None:
    """What ``on_root_call`` does until somebody listens."""


class ModulePaths:
    """The stack of modules being called, and the module each autograd node was recorded in.

    An autograd node carries the sequence number it was made with; whatever numbers were handed out
    while a module was on top of the stack belong to it, so a backward op finds its module by its
    node's number.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._stack: list[str] = [""]
        self._path_of_sequence: list[str] = []
        self._loss_sequences: set[int] = set()
        self.in_loss = False
        self.module = ""
        """In a compiled backward: the module its running node came from."""
        self._first_sequence = next_sequence()
        self._parameter_names: dict[int, str] = {}
        self.on_root_call: Callable[[], None] = _nothing
        self._original_call = nn.Module.__call__

    def name_modules(self, root: nn.Module, prefix: str = "") -> None:
        """Give every submodule of ``root`` its dotted path; a module reached twice keeps its first
        path."""
        for path, module in root.named_modules():
            self._names.setdefault(id(module), f"{prefix}{path}")
        for path, parameter in root.named_parameters():
            self._parameter_names.setdefault(id(parameter), f"{prefix}{path}")

    @property
    def current(self) -> str:
        """Dotted path of the innermost module being called; empty at the root or outside any."""
        return self._stack[-1]

    @property
    def depth(self) -> int:
        """How many modules are being called, one inside the other."""
        return len(self._stack) - 1

    def note_sequence(self) -> None:
        """Assign every autograd sequence number handed out since the last call to the module on top
        of the stack."""
        num_new = next_sequence() - self._first_sequence - len(self._path_of_sequence)
        if num_new > 0:
            if self.in_loss:
                self._loss_sequences.update(
                    range(len(self._path_of_sequence), len(self._path_of_sequence) + num_new)
                )
            self._path_of_sequence.extend([self._stack[-1]] * num_new)

    def of_node(self, node: Any) -> str:
        """Dotted path of the module whose forward recorded autograd ``node``; empty when
        unknown."""
        if self.module:
            return self.module
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameter_names.get(id(variable), "").rpartition(".")[0]
        index = node._sequence_nr() - self._first_sequence
        return self._path_of_sequence[index] if 0 <= index < len(self._path_of_sequence) else ""

    @contextmanager
    def inside(self, path: str) -> Generator[None]:
        """Say that what happens in the block belongs to the module at ``path``; nothing said when
        that is not known."""
        if not path:
            yield
            return
        self.note_sequence()
        self._stack.append(path)
        try:
            yield
        finally:
            self.note_sequence()
            self._stack.pop()

    @contextmanager
    def unfollowed(self) -> Generator[None]:
        """One call of the root in which modules are left as they are: for code that is compiled
        from them."""
        self.on_root_call()
        following = nn.Module.__call__
        nn.Module.__call__ = self._original_call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = following  # type: ignore[method-assign]

    def is_of_loss(self, node: Any) -> bool:
        """Whether the loss recorded autograd ``node``."""
        return node._sequence_nr() - self._first_sequence in self._loss_sequences

    @contextmanager
    def followed(self) -> Generator[None]:
        """Follow every ``nn.Module`` call made inside the block, those of a recompute during
        backward included."""
        original_call = self._original_call = nn.Module.__call__
        names, stack = self._names, self._stack

        def named_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if name is None:
                return original_call(module, *args, **kwargs)
            if len(stack) == 1:
                self.on_root_call()
            self.note_sequence()
            stack.append(name)
            try:
                return original_call(module, *args, **kwargs)
            finally:
                self.note_sequence()
                stack.pop()

        nn.Module.__call__ = named_call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original_call  # type: ignore[method-assign]
