"""A recorded forward cut into what the estimator repeats: the entrance, each layer, the exit before
the head, and what follows the head. Plain data, sizes as numbers of this recording."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from napkinmath.lowering.linears import TASK_HEAD, TOKEN_HEAD
from napkinmath.models.layers.learned_replay import CARRIED
from napkinmath.models.tasks import CAUSAL
from torch import nn

from napkinmath_profiler.tracing.learning.composites import EMBEDDING, LINEAR
from napkinmath_profiler.tracing.learning.forward_recorder import RecordedOp
from napkinmath_profiler.tracing.learning.layer_places import places
from napkinmath_profiler.tracing.learning.pieces import ModelPieces, WrittenBlock
from napkinmath_profiler.tracing.learning.probing import Probed
from napkinmath_profiler.tracing.learning.recording import RecordedForward
from napkinmath_profiler.tracing.learning.rows import (
    PRODUCTS,
    Shape,
    branch_row,
    dtype_name,
    linear_kind,
    made_row,
    steps_text,
)
from napkinmath_profiler.tracing.learning.weight_rows import Landmarks, WeightRows
from napkinmath_profiler.tracing.trace_errors import TraceError

CHAIN = "x"
VIEWS = ("aten.slice.Tensor", "aten.view.default", "aten.alias.default", "aten.expand.default")


class _Cut:
    """Cuts one recording."""

    def __init__(self, recording: RecordedForward, model: nn.Module, marks: Landmarks) -> None:
        self.r, self.layers, self.head, self.task = recording, marks.layers, marks.head, marks.task
        self.rows = WeightRows(model, marks)
        self.places = places(recording.ops, marks.layers, model)
        self.head_at = self._find_head() if self.task == CAUSAL else len(recording.ops)
        self.maker: dict[int, int] = {}
        for index, op in enumerate(recording.ops):
            for value in op.outputs:
                self.maker[value] = index
        self._read_whole_slices_as_what_they_are_of()
        self.labels: dict[int, str] = {}
        self.used: set[str] = set()

    def _read_whole_slices_as_what_they_are_of(self) -> None:
        """A layer that slices a whole mask makes the same tensor anew, under which later layers
        would read it."""
        for index, op in enumerate(self.r.ops):
            op.inputs = [self._whole(v, self.places[index]) for v in op.inputs]

    def _whole(self, value: int, place: int | None) -> int:
        maker = self.maker.get(value)
        while maker is not None and self.places[maker] not in (None, place):
            op = self.r.ops[maker]
            if op.name not in VIEWS or not self._same(op.inputs[0], value):
                break
            value = op.inputs[0]
            maker = self.maker.get(value)
        return value

    def _same(self, one: int, other: int) -> bool:
        x, y = self.r.values[one], self.r.values[other]
        return (x.storage, x.shape, x.stride) == (y.storage, y.shape, y.stride)

    def _find_head(self) -> int:
        for index in range(len(self.r.ops) - 1, -1, -1):
            op = self.r.ops[index]
            if op.name == LINEAR and op.module == self.head:
                return index
        raise TraceError(f"its head {self.head!r} is not called as a linear")

    def pieces(self) -> ModelPieces:
        """The blocks, in order."""
        numbers = [place for place in self.places if place is not None]
        if not numbers or numbers != sorted(numbers):
            raise TraceError("its layers do not run one after the other, once each")
        ranges, count = list[tuple[int, int]](), max(numbers) + 1
        for layer in range(count):
            at = [i for i, place in enumerate(self.places) if place == layer]
            ranges.append((at[0], at[-1] + 1))
        for before, after in itertools.pairwise(ranges):
            if before[1] != after[0]:
                op = self.r.ops[before[1]]
                raise TraceError(f"{op.name} runs between two of its layers")
        first, last = ranges[0][0], ranges[-1][1]
        spans = [(0, first), *ranges, (last, self.head_at)]
        if self.task == CAUSAL:
            spans.append((self.head_at + 1, len(self.r.ops)))
        chains = self._chains(spans)
        handed_on = [*chains[1:], self.r.result]
        if self.task == CAUSAL:
            handed_on[-2] = self.r.ops[self.head_at].inputs[0]
        blocks = [
            _BlockMaker(self, span, chain, handed).make()
            for span, chain, handed in zip(spans, chains, handed_on, strict=True)
        ]
        blocks[0].weights += self._unused()
        layers = blocks[1 : count + 1]
        _hand_back_alike(layers)
        if self.task != CAUSAL:
            return ModelPieces(blocks[0], layers, blocks[-1], None, {})
        return ModelPieces(blocks[0], layers, blocks[-2], blocks[-1], self._head_facts())

    def _chains(self, spans: Sequence[tuple[int, int]]) -> list[int | None]:
        """The value that each span hands to the next one."""
        ops = self.r.ops
        chains: list[int | None] = [None]
        for index, (start, end) in enumerate(spans[:-1]):
            following = spans[index + 1]
            if (
                self.task == CAUSAL and index == len(spans) - 2
            ):  # what the head reads, then what it makes
                chains.append(ops[self.head_at].outputs[0])
                if ops[self.head_at].inputs[0] not in self._made_in(start, end):
                    raise TraceError("its head reads what its last part does not make")
                continue
            made = self._made_in(start, end)
            read = dict.fromkeys(
                v for op in ops[following[0] : following[1]] for v in op.inputs if v in made
            )
            floating = [v for v in read if self.r.values[v].needs_grad]
            if index == 0:
                floating = self._entrance_chain(floating)
            if not floating:
                raise TraceError("a layer reads nothing of the one before it")
            chains.append(floating[0])
        return chains

    def _entrance_chain(self, floating: list[int]) -> list[int]:
        """Of what the first layer reads: the hidden states, not what all layers read."""
        layers = max(p for p in self.places if p is not None) + 1
        once = [
            v
            for v in floating
            if len({self.places[i] for i, op in enumerate(self.r.ops) if v in op.inputs}) < layers
        ]
        return once if layers > 1 else floating

    def _made_in(self, start: int, end: int) -> set[int]:
        return {v for op in self.r.ops[start:end] for v in op.outputs}

    def label(self, value: int) -> str:
        """The name under which a value is shared; of what a layer made for a later one, the same
        name in every layer."""
        if value not in self.labels:
            at = self.maker[value]
            op, place = self.r.ops[at], self.places[at]
            what = op.name.split(".")[1] if op.func is not None else op.name
            if place is None:
                name = f"{op.module.rpartition('.')[2]} {what} {len(self.labels)}"
            else:
                inside = op.module.removeprefix(f"{self.layers}.{place}").lstrip(".")
                own = (op.name, op.module, place)
                before = zip(self.r.ops[:at], self.places, strict=False)
                number = sum((one.name, one.module, where) == own for one, where in before)
                name = f"{CARRIED} {inside} {what} {number}.{op.outputs.index(value)}"
            self.labels[value] = name.strip()
        return self.labels[value]

    def _head_facts(self) -> dict[str, Any]:
        op = self.r.ops[self.head_at]
        weight = self.r.values[op.inputs[1]].name.removeprefix("w:")
        own = f"{self.head}.weight"
        return {
            "name": self.head,
            "bias": len(op.inputs) > 2,
            "tied": "" if weight == own else weight,
            "rows": Shape((self.r.values[op.inputs[1]].shape[0],)),
        }

    def _unused(self) -> list[list[Any]]:
        """Weights of the model that its forward does not read, those of its layers apart."""
        found = []
        for name, tensor in self.rows.weights():
            inside = name.startswith(f"{self.layers}.")
            of_head = bool(self.head) and name.startswith(f"{self.head}.")
            if not inside and name not in self.used and not of_head:
                found.append(self.rows.row(name, name, tensor))
        return found


class _BlockMaker:
    """Writes one span of operations as a block."""

    def __init__(
        self,
        cut: _Cut,
        span: tuple[int, int],
        chain: int | None,
        handed_on: int | None,
    ) -> None:
        self.cut, self.span, self.chain, self.handed_on = cut, span, chain, handed_on
        self.prefix = ""
        place = cut.places[span[0]] if span[0] < span[1] else None
        if place is not None:
            self.prefix = f"{cut.layers}.{place}."
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
            if self.cut.places[maker] is not None and not self.prefix:
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
        if op.name in (LINEAR, EMBEDDING):
            owner = self.cut.rows.modules.get(values[op.inputs[1]].name[2:].rpartition(".")[0])
            if op.name == LINEAR:
                facts["kind"] = self._linear_kind(values[op.inputs[1]].name[2:], owner)
                if len(read) > 2:  # which may be shared under another name
                    weight, bias = (self.block.weights[-1 - n] for n in read[1:3])
                    bias[0] = f"{weight[0].rpartition('.')[0]}.bias"
        outs = [[Shape(values[v].shape), dtype_name(values[v].dtype)] for v in op.outputs]
        return [op.name, module, read, outs, facts, []]

    def _linear_kind(self, name: str, owner: nn.Module | None) -> str:
        row = self.block.weights[-1 - self.weight_numbers[name]]
        return row[1] if row[1] in ("head", TASK_HEAD, TOKEN_HEAD) else linear_kind(owner)

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
        r, (start, end) = self.cut.r, self.span
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
            if v != self.handed_on:
                self.block.shares.append([self.numbers[v], self.cut.label(v)])
        shared = {r.values[v].storage for v in later}
        kept = [n for n in self.block.outlives if self._storage_of(n) not in shared]
        self.block.returns = [n for n in kept if self._dies_with_the_next(n)]
        if len(self.block.returns) > 1:
            raise TraceError("its layers return more than one tensor beside the hidden states")
        self.block.outlives = kept = [n for n in kept if n not in self.block.returns]
        last = max(i for i, place in enumerate(self.cut.places) if place is not None)
        if any(r.died.get(self._storage_of(n), len(r.ops)) < last for n in kept):
            # what outlives a layer is held until the whole forward is over
            raise TraceError("its layers return more than hidden states, held as the next one runs")

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


def _hand_back_alike(layers: Sequence[WrittenBlock]) -> None:
    """The last layer's second result, which no other layer's takes the place of."""
    for number in layers[-2].returns if len(layers) > 1 else ():
        if number in layers[-1].outlives:
            layers[-1].outlives.remove(number)
            layers[-1].returns.append(number)


def cut(recording: RecordedForward, model: nn.Module, marks: Landmarks) -> ModelPieces:
    """The recorded forward as blocks; raises TraceError for a form that the estimator does not have."""
    return _Cut(recording, model, marks).pieces()
