"""The pieces that a recorded forward is cut into, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class WrittenBlock:
    """One piece of the model. Values are numbered: first the inputs, then what the operations make.
    A weight is -1 - its place in `weights`.

    As data, an operation counts backwards from itself what it reads and holds, so that the same few
    operations are the same text wherever they stand.
    """

    inputs: list[str] = field(default_factory=list)
    weights: list[list[Any]] = field(default_factory=list)
    ops: list[list[Any]] = field(default_factory=list)
    output: int | None = None
    shares: list[list[Any]] = field(default_factory=list)
    outlives: list[int] = field(default_factory=list)
    hidden: int | None = None
    """The last hidden states, in the exit of a bare encoder."""
    again: list[int] = field(default_factory=list)
    """Weights that an earlier block has declared."""
    returns: list[int] = field(default_factory=list)
    """A second result of a layer, which the loop over layers holds until the next has returned."""

    def plain(self) -> dict[str, Any]:
        """As data."""
        written, number = list[list[Any]](), len(self.inputs)
        for name, module, read, outs, facts, held in self.ops:
            back = [n if n < 0 else number - n for n in read]
            written.append([name, module, back, outs, facts, [number - n for n in held]])
            number += len(outs)
        return {
            "inputs": self.inputs,
            "weights": self.weights,
            "ops": written,
            "output": self.output,
            "shares": self.shares,
            "outlives": self.outlives,
            **({"again": self.again} if self.again else {}),
            **({"returns": self.returns} if self.returns else {}),
            **({"hidden": self.hidden} if self.hidden is not None else {}),
        }


@dataclass(slots=True)
class ModelPieces:
    """The model's blocks in order; `head` says how its linear is called. With the loss of another
    task than the next token the exit has everything after the layers, and nothing is `after`."""

    entrance: WrittenBlock
    layers: list[WrittenBlock]
    exit: WrittenBlock
    after: WrittenBlock | None
    head: dict[str, Any]
    end: WrittenBlock | None = None
    """Of an encoder, behind its layers."""
    middle: WrittenBlock | None = None
    """Before the layers of a decoder that reads an encoder."""
    between: list[WrittenBlock] = field(default_factory=list)
    """From the layers of a stage to those of the next one."""
