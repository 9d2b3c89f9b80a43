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
    table = _Table(runs, {value.tensor for value in shared.values()}, policy)
    for name, value in shared.items():
        found.setdefault(_release_of(name, value, runs, table), []).append(value.tensor)
    return found


class _Table:
    """Looked up once for all shared values: leaves, and the first run that stores a value or that
    keeps a tensor for its backward."""

    __slots__ = ("keeper", "leaves", "storing")

    def __init__(self, runs: list[Run], tensors: set[Tensor], policy: Policy) -> None:
        self.leaves = {leaf for run in runs for leaf in leaves_of(run.block)}
        self.storing: dict[Value, int] = {}
        self.keeper: dict[Tensor, int] = {}
        stores = policy.recomputes and not policy.reentrant
        for index in range(len(runs) - 1, -1, -1):
            run = runs[index]
            if stores:
                self.storing.update(dict.fromkeys(run.block.stored, index))
            self.keeper.update(dict.fromkeys(tensors & _kept(run, policy), index))


def _release_of(name: str, value: Value, runs: list[Run], table: _Table) -> tuple[Phase, int]:
    tensor, last = value.tensor, runs[-1]
    stays = tensor.source == BATCH or tensor in last.block.last_use or last.stage.checkpointed
    if value in table.leaves or stays:
        return END
    loss = last.block.output
    if loss is not None and loss.requires_grad:
        if value in table.storing:  # then the recomputation's takes its place
            return Phase.BACKWARD, table.storing[value] + 1
        if tensor in table.keeper:
            return Phase.BACKWARD, table.keeper[tensor]
    if any(name in run.stage.returned for run in runs):
        return Phase.FORWARD, len(runs)
    closed = [i + 1 for i, run in enumerate(runs[:-1]) if name in run.stage.closes]
    return Phase.FORWARD, closed[-1] if closed else len(runs) - 1


def leaves_of(block: Block) -> list[Value]:
    """What a block shares that needs a gradient and that nothing made."""
    shared = [value for value in block.externals if value.requires_grad]
    if not shared:
        return shared
    made = {value for op in block.ops if not op.inputs for value in op.outputs}
    return [value for value in shared if value in made]


def _kept(run: Run, policy: Policy) -> set[Tensor]:
    """What a run keeps of others for its backward."""
    if policy.recomputes and run.stage.checkpointed:
        output, read = run.block.output, set(run.block.last_use)
        if output is None:
            return read - made_again(run.block).keys()
        if not output.requires_grad:  # there is no graph that holds what it reads
            return set()
        return read - made_again(run.block).keys() - {output.tensor}  # its own result
    return saved_tensors(run.block)
