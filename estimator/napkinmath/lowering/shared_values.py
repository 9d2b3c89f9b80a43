"""What all blocks share, and when it goes: rotary tables, masks, encoder states, keys and values of
another layer."""

from __future__ import annotations

from napkinmath.ir.ledger import BATCH, Block, Phase, Tensor, Value
from napkinmath.ir.step import Run
from napkinmath.lowering.forward import made_again, saved_tensors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.policy import Policy

    Releases = dict[tuple[Phase, int], list[Tensor]]  # before which run a tensor is dropped

END = (Phase.STEP, 0)  # of the micro-step, in a table of releases


def shared_releases(runs: list[Run], shared: dict[str, Value], policy: Policy) -> Releases:
    """Where each shared tensor dies: with the backward of the first run that keeps it, or as the
    head starts; inputs stay.

    A checkpointed run holds what it reads until it is recomputed, and makes anew what it made; a
    leaf with a gradient is held by its node. The model's own forward holds the rest until it
    returns.
    """
    found: Releases = {}
    for name, value in shared.items():
        found.setdefault(_release_of(name, value, runs, policy), []).append(value.tensor)
    return found


def _release_of(name: str, value: Value, runs: list[Run], policy: Policy) -> tuple[Phase, int]:
    tensor, last = value.tensor, runs[-1]
    leaf = any(value in leaves_of(run.block) for run in runs)
    stays = tensor.source == BATCH or tensor in last.block.last_use or last.stage.checkpointed
    if leaf or stays:
        return END
    loss = last.block.output
    if loss is not None and loss.requires_grad:
        made = _stored_by(value, runs) if policy.recomputes and not policy.reentrant else None
        if made is not None:
            return Phase.BACKWARD, made + 1  # then the recomputation's takes its place
        keepers = (i for i, run in enumerate(runs) if _keeps(run, tensor, policy))
        first = next(keepers, None)
        if first is not None:
            return Phase.BACKWARD, first
    if any(name in run.stage.returned for run in runs):
        return Phase.FORWARD, len(runs)
    closed = [i + 1 for i, run in enumerate(runs[:-1]) if name in run.stage.closes]
    return Phase.FORWARD, closed[-1] if closed else len(runs) - 1


def leaves_of(block: Block) -> list[Value]:
    """What a block shares that needs a gradient and that nothing made."""
    shared = [value for value in block.externals if value.requires_grad]
    return [x for x in shared if any(x in op.outputs and not op.inputs for op in block.ops)]


def _stored_by(value: Value, runs: list[Run]) -> int | None:
    """Which run puts the value into a container of the model's."""
    return next((i for i, run in enumerate(runs) if value in run.block.stored), None)


def _keeps(run: Run, tensor: Tensor, policy: Policy) -> bool:
    """Whether a run keeps a shared tensor for its backward."""
    if policy.recomputes and run.stage.checkpointed:
        output = run.block.output
        if output is not None and (tensor is output.tensor or not output.requires_grad):
            return False  # its own result, or there is no graph that holds what it reads
        return tensor in run.block.last_use and tensor not in made_again(run.block)
    return tensor in saved_tensors(run.block)
