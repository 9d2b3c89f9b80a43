"""One span of recorded operations written as a block of data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from napkinmath.lowering.linears import TASK_HEAD, TOKEN_HEAD
from napkinmath.models.learned_stages import STAGE_RESULT

from napkinmath_profiler.tracing.learning.composites import LINEAR
from napkinmath_profiler.tracing.learning.forward_recorder import RecordedOp
from napkinmath_profiler.tracing.learning.pieces import WrittenBlock
from napkinmath_profiler.tracing.learning.probing import Probed
from napkinmath_profiler.tracing.learning.rows import (
    PRODUCTS,
    Shape,
    branch_row,
    dtype_name,
    made_row,
    steps_text,
)
from napkinmath_profiler.tracing.trace_errors import TraceError

if TYPE_CHECKING:
    from napkinmath_profiler.tracing.learning.blocks import Cut

CHAIN = "x"


class BlockMaker:
    """Writes one span of operations as a block."""

    def __init__(
        self,
        cut: Cut,
        span: tuple[int, int],
        chain: int | None,
        handed_on: int | None,
    ) -> None:
        self.cut, self.span, self.chain, self.handed_on = cut, span, chain, handed_on
        self.prefix = ""
        place = cut.places[span[0]] if span[0] < span[1] else None
        if place is not None:
            self.prefix = cut.prefixes[place]
        self.block = WrittenBlock()
        self.numbers: dict[int, int] = {}
        self.weight_numbers: dict[str, int] = {}
        self.num_values = 0

    def _path(self, name: str) -> str:
        """The path of a weight within the block; a tied one has the head's after the layers."""
        if name == self.cut.rows.tied and self.span[1] == len(self.cut.r.ops):
            return f"{self.cut.head}.weight"
        return name.removeprefix(self.prefix)

    def make(self) -> WrittenBlock:
        """The block."""
        values, ops = self.cut.r.values, self.cut.r.ops[self.span[0] : self.span[1]]
        made = {v for op in ops for v in op.outputs}
        for op in ops:
            for v in op.inputs:
                if v not in made and v not in self.numbers and not values[v].name.startswith("w:"):
                    self._take(v)
        if self.chain is not None and self.chain not in self.numbers:
            self._take(self.chain)
        if self.prefix:
            self._declare_all()
        for op_index in range(*self.span):
            self._write(op_index)
        self._ends()
        if self.handed_on is not None and self.handed_on in self.numbers:
            self.block.output = self.numbers[self.handed_on]
        if self.span[1] == len(self.cut.r.ops) and self.cut.r.hidden is not None:
            self.block.hidden = self.numbers[self.cut.r.hidden]
        self._share()
        return self.block

    def _take(self, value: int) -> None:
        name = self.cut.r.values[value].name
        if value == self.chain:
            label = CHAIN
        elif name:
            label = name
        else:
            maker = self.cut.maker.get(value)
            if maker is None:
                raise TraceError(
                    "it reads a tensor that is no weight and that its forward did not make"
                )
            inner = self.cut.places[maker] is not None and value != self.cut.encoded
            if inner and not self.prefix:
                raise TraceError(
                    f"its last part reads what {self.cut.r.ops[maker].module} made, beside the"
                    " hidden states"
                )
            label = self.cut.label(value)
        self.block.inputs.append(label)
        self.numbers[value] = self.num_values
        self.num_values += 1

    def _declare_all(self) -> None:
        """Every weight of a layer, in the module's order, whether its forward reads it or not."""
        for name, tensor in self.cut.rows.weights():
            if name.startswith(self.prefix):
                self._weight(name, tensor)

    def _weight(self, name: str, tensor: torch.Tensor | None = None) -> int:
        if name not in self.weight_numbers:
            source = self.cut.rows.tensor(name)
            path = self._path(name)
            if name in self.cut.used and path == name:
                self.block.again.append(len(self.block.weights))
            self.cut.used.add(name)
            self.weight_numbers[name] = -1 - len(self.block.weights)
            self.block.weights.append(self.cut.rows.row(name, path, source))
        return self.weight_numbers[name]

    def _number(self, value: int) -> int:
        name = self.cut.r.values[value].name
        return self._weight(name[2:]) if name.startswith("w:") else self.numbers[value]

    def _write(self, index: int) -> None:
        op, probed = self.cut.r.ops[index], self.cut.r.probed[index]
        read = [self._number(v) for v in op.inputs]
        module = op.module + "."
        module = module.removeprefix(self.prefix).rstrip(".")
        if probed is None:
            row = self._composite(op, read, module)
        else:
            row = self._generic(op, probed, read, module)
        for v in op.outputs:
            self.numbers[v] = self.num_values
            self.num_values += 1
        self.block.ops.append(row)

    def _composite(self, op: RecordedOp, read: list[int], module: str) -> list[Any]:
        values, facts = self.cut.r.values, dict(op.facts)
        if "window" in facts:
            facts["window"] = Shape((facts["window"],))
        if op.name == LINEAR:
            facts["kind"] = self._linear_kind(values[op.inputs[1]].name[2:])
            if len(read) > 2:  # which may be shared under another name
                weight, bias = (self.block.weights[-1 - n] for n in read[1:3])
                bias[0] = f"{weight[0].rpartition('.')[0]}.bias"
        outs = [[Shape(values[v].shape), dtype_name(values[v].dtype)] for v in op.outputs]
        return [op.name, module, read, outs, facts, []]

    def _linear_kind(self, name: str) -> str:
        kind: str = self.block.weights[-1 - self.weight_numbers[name]][1]
        scores = kind in ("head", TASK_HEAD, TOKEN_HEAD)
        return kind if scores else self.cut.rows.linear_kind(name.rpartition(".")[0])

    def _generic(self, op: RecordedOp, probed: Probed, read: list[int], module: str) -> list[Any]:
        values = self.cut.r.values
        outs = [
            [Shape(values[v].shape), dtype_name(values[v].dtype), kind + str(number)]
            for v, (kind, number) in zip(op.outputs, probed.outputs, strict=True)
        ]
        facts: dict[str, Any] = {"made": [made_row(m) for m in probed.made]}
        if probed.forward != [("+", i) for i in range(len(probed.made))]:
            facts["steps"] = steps_text(probed.forward)
        facts["branches"] = {
            choice: branch_row(branch)
            for choice, branch in probed.branches.items()
            if "1" in choice
        }
        if op.name in PRODUCTS:
            left, right = (list(values[op.inputs[i]].shape) for i in PRODUCTS[op.name])
            rows = left[-2] if len(left) > 1 else 1
            count = left[0] if len(left) == 3 else 1
            facts["product"] = Shape((rows, right[-1], left[-1], count))
        name = op.name.removeprefix("aten.").removesuffix(".default")
        return [name, module, read, outs, facts, []]

    def _ends(self) -> None:
        """Storages that Python holds longer than operations use them."""
        start, end = self.span
        r = self.cut.r
        last: dict[int, int] = {}
        number: dict[int, int] = {}
        given = {value.storage for value in r.values if value.name}
        for index in range(start, end):
            op = r.ops[index]
            for v in (*op.inputs, *op.outputs):
                if r.values[v].storage not in given:
                    last[r.values[v].storage] = index
                    number.setdefault(r.values[v].storage, self.numbers[v])
        handed = r.values[self.handed_on].storage if self.handed_on is not None else None
        own = {r.values[v].storage for op in r.ops[start:end] for v in op.outputs}
        own -= {r.values[v].storage for op in r.ops[:start] for v in op.outputs if v != self.chain}
        for storage, index in last.items():
            died = r.died.get(storage, len(r.ops))
            if died >= end:
                chain = self.chain is not None and storage == r.values[self.chain].storage
                if storage in own and storage != handed:
                    self.block.outlives.append(number[storage])
                elif chain and index < end - 1:
                    self.block.ops[-1][5].append(number[storage])
            elif died > index:
                self.block.ops[died - start][5].append(number[storage])

    def _share(self) -> None:
        """What this block makes and others than the next one read."""
        r, (start, end) = self.cut.r, self.span
        made = {v for op in r.ops[start:end] for v in op.outputs}
        later = dict.fromkeys(v for op in r.ops[end:] for v in op.inputs if v in made)
        for v in later:
            if v not in (self.handed_on, self.cut.encoded):
                self.block.shares.append([self.numbers[v], self.cut.label(v)])
        shared = {r.values[v].storage for v in later}
        if self.prefix and self.chain is not None:  # a layer's input, which others have made
            shared.add(r.values[self.chain].storage)
        kept = [n for n in self.block.outlives if self._storage_of(n) not in shared]
        self.block.returns = [n for n in kept if self._dies_with_the_next(n)]
        self.block.outlives = []
        kept = [n for n in kept if n not in self.block.returns]
        inside = (i for i, place in enumerate(self.cut.places) if place is not None)
        last = max(inside, default=-1)  # none where no layers are told apart
        stage = self._stage()
        for number in kept:
            value = next(v for v, n in self.numbers.items() if n == number)
            if self.cut.encoder.is_there and not self.prefix and self._goes_early(value, last):
                self.block.shares.append([number, self.cut.label(value)])
                continue
            if stage is not None and self.cut.died(value) < len(r.ops):
                self.block.shares.append([number, f"{STAGE_RESULT} {stage}"])
                continue
            self.block.outlives.append(number)
            if self.cut.died(value) < last and not self.cut.in_stages:
                # what outlives a layer is held until the whole forward is over
                raise TraceError(
                    "its layers return more than hidden states, held as the next one runs"
                )

    def _stage(self) -> int | None:
        """The stage that ends with this block, where it is not the last."""
        before = [place for place in self.cut.places[: self.span[0]] if place is not None]
        ends = [stack.stop for stack in self.cut.stack[:-1]] if self.cut.in_stages else []
        done = before[-1] + 1 if before and not self.prefix else 0
        return ends.index(done) if done in ends else None

    def _goes_early(self, value: int, last: int) -> bool:
        """Whether a stack's own forward holds a value, of an encoder or of a decoder."""
        died = self.cut.died(value)
        return self.cut.encoder.lets_go(died) or last <= died < len(self.cut.r.ops)

    def _dies_with_the_next(self, number: int) -> bool:
        """Whether a value of a layer goes as the next layer has returned."""
        places, start = self.cut.places, self.span[0]
        place = places[start] if start < len(places) else None
        ends = [i for i, p in enumerate(places) if place is not None and p == place + 1]
        died = self.cut.r.died.get(self._storage_of(number))
        return bool(ends) and died == ends[-1]

    def _storage_of(self, number: int) -> int:
        value = next(v for v, n in self.numbers.items() if n == number)
        return self.cut.r.values[value].storage
