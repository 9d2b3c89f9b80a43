"""A recorded forward cut into what the estimator repeats: the entrance, each layer, the exit before
the head, and what follows the head. Plain data, sizes as numbers of this recording."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from napkinmath.models.layers.learned_replay import CARRIED, ENCODED
from napkinmath.models.tasks import CAUSAL
from torch import nn

from napkinmath_profiler.tracing.learning.block_maker import BlockMaker
from napkinmath_profiler.tracing.learning.composites import LINEAR
from napkinmath_profiler.tracing.learning.forward_recorder import RecordedOp
from napkinmath_profiler.tracing.learning.layer_places import places, prefixes
from napkinmath_profiler.tracing.learning.pieces import ModelPieces, WrittenBlock
from napkinmath_profiler.tracing.learning.recording import RecordedForward
from napkinmath_profiler.tracing.learning.rows import Shape
from napkinmath_profiler.tracing.learning.weight_rows import Landmarks, WeightRows
from napkinmath_profiler.tracing.trace_errors import TraceError

LABELS = "labels"
VIEWS = ("aten.slice.Tensor", "aten.view.default", "aten.alias.default", "aten.expand.default")


class Cut:
    """Cuts one recording."""

    def __init__(self, recording: RecordedForward, model: nn.Module, marks: Landmarks) -> None:
        self.r, self.head, self.task = recording, marks.head, marks.task
        self.rows = WeightRows(model, marks)
        self.places = places(recording.ops, marks.stacks, model)
        self.prefixes = prefixes(marks.stacks, model)
        self.stack = [_numbers_of(stack, self.prefixes) for stack in marks.stacks]
        self.head_at = self._find_head() if self.task == CAUSAL else len(recording.ops)
        self.maker: dict[int, int] = {}
        for index, op in enumerate(recording.ops):
            for value in op.outputs:
                self.maker[value] = index
        self._read_whole_slices_as_what_they_are_of()
        self.in_stages = bool(marks.stages)
        self.labels: dict[int, str] = {}
        self.encoded: int | None = None  # what an encoder hands to its decoder
        self.encoder = Encoder(recording.ops, self.places, marks, self.stack)
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
        if not self.stack:
            return self._two_parts()
        spans = self._spans()
        chains = self._chains(spans)
        handed_on = [*chains[1:], self.r.result]
        if self.task == CAUSAL:
            handed_on[-2] = self.r.ops[self.head_at].inputs[0]
        if self.encoded is not None:
            handed_on[self._middle_at - 1] = self.encoded
        blocks = [
            BlockMaker(self, span, chain, handed).make()
            for span, chain, handed in zip(spans, chains, handed_on, strict=True)
        ]
        blocks[0].weights += self._unused()
        first, end, middle, last = blocks[0], None, None, blocks[-1]
        if self.encoder.is_there:
            middle = blocks.pop(self._middle_at)
            end = blocks.pop(self._middle_at - 1) if self.encoder.has_end else None
        between = [blocks.pop(at) for at in reversed(self._between_at)][::-1]
        layers = blocks[1 : len(self.prefixes) + 1]
        for stack in self.stack:
            _hand_back_alike(layers[stack.start : stack.stop])
        if self.task != CAUSAL:
            return ModelPieces(first, layers, last, None, {}, end, middle, between)
        return ModelPieces(first, layers, blocks[-2], last, self._head_facts())

    @property
    def _middle_at(self) -> int:
        """The place of a decoder's entrance among the spans; 0 where there is no encoder."""
        return self.stack[0].stop + 1 + self.encoder.has_end if self.encoder.is_there else 0

    @property
    def _between_at(self) -> list[int]:
        """The places of what runs between two stages among the spans."""
        later = [] if self.encoder.is_there else self.stack[1:]
        return [stack.start + 1 + number for number, stack in enumerate(later)]

    def _spans(self) -> list[tuple[int, int]]:
        """The operations of each block: from one to before another."""
        numbers = [place for place in self.places if place is not None]
        if not numbers or numbers != sorted(numbers):
            raise TraceError("its layers do not run one after the other, once each")
        ranges = list[tuple[int, int]]()
        for layer in range(len(self.prefixes)):
            at = [i for i, place in enumerate(self.places) if place == layer]
            if not at:
                raise TraceError(f"its layer {layer} does not run")
            ranges.append((at[0], at[-1] + 1))
        for number, (before, after) in enumerate(itertools.pairwise(ranges)):
            inside = number + 1 not in [stack.stop for stack in self.stack]
            if inside and before[1] != after[0]:
                op = self.r.ops[before[1]]
                raise TraceError(f"{op.name} runs between two of its layers")
        first, last = ranges[0][0], ranges[-1][1]
        if self.encoder.is_there:
            at = self.stack[1].start
            begin, stop, after = ranges[at - 1][1], self.encoder.stop, ranges[at][0]
            ranges[at:at] = [(begin, stop)] * self.encoder.has_end + [(stop, after)]
        for at in self._between_at:
            ranges.insert(at - 1, (ranges[at - 2][1], ranges[at - 1][0]))
        spans = [(0, first), *ranges, (last, self.head_at)]
        if self.task == CAUSAL:
            spans.append((self.head_at + 1, len(self.r.ops)))
        return spans

    def _two_parts(self) -> ModelPieces:
        """A model without layers that are checkpointed: what runs before the labels are read, and
        the loss."""
        values, ops = self.r.values, self.r.ops
        at = next(i for i, op in enumerate(ops) if any(values[v].name == LABELS for v in op.inputs))
        made = self._made_in(0, at)
        after = (v for op in ops[at:] for v in op.inputs)  # labels may be viewed first
        chain = next(v for v in after if v in made and values[v].needs_grad)
        first = BlockMaker(self, (0, at), None, chain).make()
        last = BlockMaker(self, (at, len(ops)), chain, self.r.result).make()
        first.weights += self._unused()
        return ModelPieces(first, [], last, None, {})

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
            if following[0] == following[1]:  # a bare encoder that ends in its layers
                chains.append(self.r.result)
                continue
            made = self._made_in(start, end)
            if index + 1 == self._middle_at:
                self.encoded = next(iter(self._read_of(made, (following[0], len(ops)))), None)
                chains.append(None)
                continue
            floating = self._read_of(made, following)
            entrances = [0, *([self._middle_at] if self._middle_at else self._between_at)]
            if index in entrances:
                floating = self._entrance_chain(floating, self.stack[entrances.index(index)])
            if not floating:
                raise TraceError("a layer reads nothing of the one before it")
            chains.append(floating[0])
        return chains

    def _read_of(self, made: set[int], span: tuple[int, int]) -> list[int]:
        """Of values that were made, those with a gradient that a span reads."""
        read = dict.fromkeys(v for op in self.r.ops[slice(*span)] for v in op.inputs if v in made)
        return [v for v in read if self.r.values[v].needs_grad]

    def _entrance_chain(self, floating: list[int], stack: range) -> list[int]:
        """Of what the first layer of a stack reads: the hidden states, not what all layers read."""
        once = [
            v
            for v in floating
            if len({self.places[i] for i, op in enumerate(self.r.ops) if v in op.inputs} & {*stack})
            < len(stack)
        ]
        return once if len(stack) > 1 else floating

    def _made_in(self, start: int, end: int) -> set[int]:
        return {v for op in self.r.ops[start:end] for v in op.outputs}

    def died(self, value: int) -> int:
        """After which operation Python lets go of a value's storage; as many as there are where it
        does not."""
        return self.r.died.get(self.r.values[value].storage, len(self.r.ops))

    def label(self, value: int) -> str:
        """The name under which a value is shared; of what a layer made for a later one, the same
        name in every layer."""
        if value not in self.labels:
            at = self.maker[value]
            op, place = self.r.ops[at], self.places[at]
            what = op.name.split(".")[1] if op.func is not None else op.name
            of_encoder = "encoder " if self.encoder.lets_go(self.died(value)) else ""
            if value == self.encoded:
                name = ENCODED
            elif place is None:
                name = f"{of_encoder}{op.module.rpartition('.')[2]} {what} {len(self.labels)}"
            else:
                inside = f"{op.module}.".removeprefix(self.prefixes[place]).rstrip(".")
                own = (op.name, op.module, place)
                before = zip(self.r.ops[:at], self.places, strict=False)
                number = sum((one.name, one.module, where) == own for one, where in before)
                name = f"{CARRIED} {of_encoder}{inside} {what} {number}.{op.outputs.index(value)}"
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
            inside = name.startswith(tuple(self.prefixes))
            of_head = bool(self.head) and name.startswith(f"{self.head}.")
            if not inside and name not in self.used and not of_head:
                found.append(self.rows.row(name, name, tensor))
        return found


def _numbers_of(stack: str, prefixes: Sequence[str]) -> range:
    """The numbers of a stack's layers."""
    own = [i for i, prefix in enumerate(prefixes) if prefix.startswith(f"{stack}.")]
    return range(own[0], own[-1] + 1)


class Encoder:
    """Where the forward of an encoder before a decoder ends: before the operation `stop`. It
    `has_end` where operations follow its layers."""

    def __init__(
        self,
        ops: Sequence[RecordedOp],
        places: Sequence[int | None],
        marks: Landmarks,
        stacks: Sequence[range],
    ) -> None:
        self.is_there, self.has_end, self.stop, self._layers = bool(marks.decoder), False, 0, 0
        if not self.is_there:
            return
        root = f"{marks.layers.rpartition('.')[0]}."
        inside = [place is not None and place in stacks[0] for place in places]
        own = [i for i, op in enumerate(ops) if inside[i] or f"{op.module}.".startswith(root)]
        self._layers, self.stop = len(ops) - inside[::-1].index(True), own[-1] + 1
        self.has_end = self.stop > self._layers

    def lets_go(self, died: int) -> bool:
        """Whether what goes after an operation goes as the encoder returns."""
        return self.is_there and self._layers - 1 <= died < self.stop


def _hand_back_alike(layers: Sequence[WrittenBlock]) -> None:
    """The last layer's second result, which no other layer's takes the place of."""
    for number in layers[-2].returns if len(layers) > 1 else ():
        if number in layers[-1].outlives:
            layers[-1].outlives.remove(number)
            layers[-1].returns.append(number)


def cut(recording: RecordedForward, model: nn.Module, marks: Landmarks) -> ModelPieces:
    """The recorded forward as blocks; raises TraceError for a form that the estimator does not have."""
    return Cut(recording, model, marks).pieces()
