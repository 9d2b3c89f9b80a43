"""Recompute: which layers form a checkpoint unit, and which results a selective policy keeps inside
one.

FULL checkpoints every layer. EVERY k treats k neighbouring layers as one unit (Megatron-LM's
uniform method), SQRT takes k near the square root of the depth (arXiv 1604.06174). INTERLEAVED
checkpoints each k-th layer and leaves the rest alone (transformers 5.23 modeling_utils.py
every_n_layers, torchtitan's selective option). SELECTIVE keeps the outputs of named operations
(torch 2.13 utils/checkpoint.py create_selective_checkpoint_contexts).
"""

from __future__ import annotations

from napkinmath.config.train_config import RecomputeConfig, RecomputeKind
from napkinmath.ir.ledger import ALLOC, FREE, Block, Op, Tensor, Value
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.tape import Tape

INPUTS = "inputs"
"""Among the words of a selective policy: what the modules of a layer read."""


class LayerGroup(Part):
    """Layers that are checkpointed together: run in a row, only the first one's input is kept."""

    parts: tuple[Part, ...]

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        for index, part in enumerate(self.parts):
            with t.scope(str(index)):
                x = part.record(t, x, shared)
        return x


def unit_size(config: RecomputeConfig, num_layers: int) -> int:
    """Layers in one checkpoint unit."""
    if config.kind is RecomputeKind.EVERY:
        return min(config.every, num_layers)
    if config.kind is RecomputeKind.SQRT:
        return max(1, round(num_layers**0.5))
    return 1


def arrange(spec: ModelSpec, config: RecomputeConfig) -> tuple[Stage, ...]:
    """The model's stages with checkpoint units of the configured size; what is left over forms a
    smaller last unit."""
    if config.kind is RecomputeKind.INTERLEAVED:
        return _interleaved(spec.stages, config.every)
    if config.kind not in (RecomputeKind.EVERY, RecomputeKind.SQRT):
        return spec.stages
    arranged: list[Stage] = []
    for tower in _towers(spec.stages):
        depth = sum(stage.count for stage in tower)
        arranged += _grouped(tower, unit_size(config, depth)) if tower[0].checkpointed else tower
    return tuple(arranged)


def _towers(stages: tuple[Stage, ...]) -> list[list[Stage]]:
    """Neighbouring checkpointable stages of one tower together, every other stage alone."""
    towers: list[list[Stage]] = []
    for stage in stages:
        last = towers[-1][-1] if towers else None
        joins = (
            last is not None
            and stage.checkpointed
            and last.checkpointed
            and (last.path, last.symbols, last.publishes) == (stage.path, stage.symbols, "")
        )
        if joins:
            towers[-1].append(stage)
        else:
            towers.append([stage])
    return towers


def _grouped(tower: list[Stage], size: int) -> list[Stage]:
    layers = [stage.part for stage in tower for _ in range(stage.count)]
    units: list[Stage] = []
    for start in range(0, len(layers), size):
        part = LayerGroup(parts=tuple(layers[start : start + size]))
        if units and units[-1].part == part:
            units[-1] = units[-1].replace(count=units[-1].count + 1)
        else:
            units.append(tower[0].replace(part=part, count=1, publishes=""))
    if tower[-1].publishes:  # only the last unit does
        last = units.pop()
        units += [last.replace(count=last.count - 1)] if last.count > 1 else []
        units.append(last.replace(count=1, publishes=tower[-1].publishes))
    return units


def _interleaved(stages: tuple[Stage, ...], every: int) -> tuple[Stage, ...]:
    """Layers 0, k, 2k, ... of the model checkpointed; the count runs through all towers."""
    arranged: list[Stage] = []
    index = 0
    for stage in stages:
        if not stage.checkpointed:
            arranged.append(stage)
            continue
        for _ in range(stage.count):
            checkpointed = index % every == 0
            if arranged and arranged[-1].replace(count=1) == stage.replace(
                count=1, checkpointed=checkpointed
            ):
                arranged[-1] = arranged[-1].replace(count=arranged[-1].count + 1)
            else:
                arranged.append(stage.replace(count=1, checkpointed=checkpointed, publishes=""))
            index += 1
        arranged[-1] = arranged[-1].replace(publishes=stage.publishes)
    return tuple(arranged)


def is_kept(op: Op, keep: tuple[str, ...]) -> bool:
    """Whether a selective policy keeps an operation's outputs: `keep` holds words of operation
    names, or modules' last names."""
    leaf = op.module.rpartition(".")[2]
    return any(word in keep for word in op.name.split()) or (
        leaf in keep and op.name.endswith("linear")
    )


def kept_ops(ops: list[Op], keep: tuple[str, ...]) -> list[Op]:
    """The operations whose outputs a selective policy keeps: those that `keep` names; with `INPUTS`
    what a layer's modules read, where they are checkpointed one by one: the layer's own sums, and the
    last result of each of its norms."""
    found = [op for op in ops if is_kept(op, keep)]
    if INPUTS not in keep or not ops:
        return found
    layer = min((op.module for op in ops), key=len)
    last = {op.module: op for op in ops if "norm" in op.module.removeprefix(f"{layer}.")}
    return [
        op
        for op in ops
        if op in found
        or (op.module == layer and op.name == "add")
        or (last.get(op.module) is op and "." not in op.module.removeprefix(f"{layer}."))
    ]


def own_results(op: Op) -> list[Tensor]:
    """The tensors an operation makes and leaves alive: outputs and what it keeps beside them."""
    freed = {t for action, t in op.forward if action == FREE}
    return [t for action, t in op.forward if action == ALLOC and t not in freed]


def selected(block: Block, config: RecomputeConfig) -> dict[Tensor, None]:
    """The tensors of a block that selective checkpointing keeps from its forward, in the order of
    their making."""
    if config.kind is not RecomputeKind.SELECTIVE:
        return {}
    return {t: None for op in kept_ops(block.ops, config.keep) for t in own_results(op)}
