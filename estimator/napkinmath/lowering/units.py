"""Units: how one run of equal blocks goes forward and backward under recomputation and offload."""

from __future__ import annotations

from napkinmath.ir.costs import (
    CHECKPOINT_DISPATCHES,
    HOOK_DISPATCHES,
    REENTRANT_DISPATCHES,
    Dispatch,
    HostCopy,
)
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Block, Role, Tensor, Work
from napkinmath.lowering.autograd import Backward
from napkinmath.lowering.forward import Forward, forward_events, saved_tensors, stored_graph
from napkinmath.lowering.gradient_hooks import gradient_hook
from napkinmath.lowering.recompute import selected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.ir.model_spec import Stage
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.saved_offload import SavedOffload


class LoweredBlock:
    """A block with what happens to its activations: kept, recomputed, partly kept, or in host
    memory."""

    __slots__ = (
        "block",
        "checkpoint_dispatches",
        "checkpointed",
        "forwarded",
        "hook",
        "hooked",
        "host_input",
        "is_layer",
        "offload",
        "pinned",
        "pipelined",
        "reentrant",
        "selected",
        "training",
    )

    def __init__(self, block: Block, stage: Stage, policy: Policy) -> None:
        offload = policy.config.offload
        self.block, self.reentrant, self.pinned = block, policy.reentrant, offload.pinned
        self.hook = gradient_hook(policy)
        alone = policy.stack.engine.parameter_hooks and policy.config.parallel.world_size == 1
        self.hooked = sum(not w.buffer and not w.tied_to for w in block.weights) if alone else 0
        self.pipelined, self.training = policy.keeps_stage_buffers, policy.training
        self.is_layer = stage.checkpointed
        output = block.output
        # a graph without gradients holds no checkpoint (a frozen tower's layers)
        in_graph = output is None or output.requires_grad
        self.checkpointed = policy.recomputes and stage.checkpointed and in_graph
        self.checkpoint_dispatches = policy.stack.loop.checkpoint_dispatches or (
            REENTRANT_DISPATCHES if self.reentrant else CHECKPOINT_DISPATCHES
        )
        self.selected = self._selected(policy) if self.checkpointed else {}
        self.offload = (
            self._saved_offload(policy) if offload.activations and not self.checkpointed else None
        )
        self.host_input = self._host_input(policy) if self.checkpointed else None
        self.forwarded: Forward | None = None

    def _host_input(self, policy: Policy) -> Tensor | None:
        """The checkpoint in host memory, where offload sends it there."""
        given, output, offload = self.block.input, self.block.output, policy.config.offload
        if not (offload.checkpoints or offload.activations):
            return None
        if given is None or output is None or not output.requires_grad:
            return None
        name, role, module = "checkpoint in host memory", Role.ACTIVATIONS, self.block.name
        return Tensor(name, given.axes, given.dtype, role, module, host=True)

    def _selected(self, policy: Policy) -> dict[Tensor, None]:
        output = self.block.output
        if output is not None and not output.requires_grad:  # no graph holds what would be kept
            return {}
        kept = selected(self.block, policy.config.recompute)
        if self.block.handed_on is not None:
            kept[self.block.handed_on] = None
        if output is not None:
            kept.pop(output.tensor, None)
        return kept

    def _saved_offload(self, policy: Policy) -> SavedOffload | None:
        if self.block.output is None or not self.block.output.requires_grad:
            return None
        from napkinmath.lowering.saved_offload import SavedOffload, find_style

        return SavedOffload(self.block, find_style(policy.config.offload.style), pinned=self.pinned)

    def forward(self) -> Forward:
        """The block's forward, made once."""
        if self.forwarded is None:
            self.forwarded = self._forward()
        return self.forwarded

    def _forward(self) -> Forward:
        """The input, if a checkpoint, goes to the host once the next layer has its own."""
        checkpointed = self.checkpointed
        forward = forward_events(
            self.block,
            keep=not checkpointed,
            holds_input=checkpointed,
            cached=self._outliving(),
            selected=self.selected,
            offload=self.offload,
            is_layer=self.is_layer,
        )
        if checkpointed or self.hooked:
            forward.events.append(self._bookkeeping(backward=False))
        if self.host_input is not None and self.block.input is not None:
            forward.events += [
                (ALLOC, self.host_input),
                self._copy(to_host=True, backward=False),
                (FREE, self.block.input.tensor),
            ]
        return forward

    def _outliving(self) -> tuple[Tensor, ...]:
        """What the model's forward holds longer than the block; what is kept for the backward stays
        longer still."""
        held = (*self.block.cached, self.block.returned)
        return tuple(t for t in held if t is not None and t not in self.selected)

    def backward(
        self,
        incoming: Tensor | None,
        *,
        accumulate: bool,
        filled: dict[str, Tensor],
        with_gradient: frozenset[int] = frozenset(),
        stream: Tensor | None = None,
    ) -> tuple[Backward, Tensor | None]:
        """The block's backward from the gradient of its output, or from those of what it shares
        alone; returns it with the gradient of its input."""
        checkpointed, output = self.checkpointed, self.block.output
        recompute, unreached, held = self._run_again() if checkpointed else ([], [], True)
        stays = checkpointed and not self.reentrant and bool(self.block.stored)
        backward = Backward(
            self.block,
            accumulate=accumulate,
            filled=filled,
            with_gradient=with_gradient,
            hook=self.hook,
            keeps_input=checkpointed and held,
            recompute=() if self.reentrant else recompute,
            offload=self.offload,
            staying=stored_graph(self.block) if stays else set(),
            holds_incoming=checkpointed and self.reentrant,
            stream=stream,
        )
        if checkpointed or self.hooked:
            backward.events.append(self._bookkeeping(backward=True))
        if self.reentrant:  # CheckpointFunction.backward runs the forward first
            backward.events += recompute
        result = backward.run(incoming)
        if stays:
            backward.left += unreached
        else:  # the cache of kept results goes with the graph
            backward.events += [(FREE, tensor) for tensor in unreached]
        # the recomputed output is a local of CheckpointFunction.backward
        if checkpointed and self.reentrant and output is not None:
            backward.events.append((FREE, output.tensor))
        return backward, result

    def _run_again(self) -> tuple[list[Event], list[Tensor], bool]:
        """(the recomputation, what of it goes with the graph, whether the input stays to the
        end). What the next layer took as an argument went with that layer's checkpoint."""
        handed = self.block.handed_on
        again = forward_events(
            self.block,
            keep=True,
            holds_input=True,
            stop_early=not self.reentrant,
            selected=[tensor for tensor in self.selected if tensor is not handed],
            replay=True,
        )
        recompute, held = self._fetched(again.events)
        if handed is not None and handed in self.selected:
            recompute.insert(0, (FREE, handed))
        return recompute, again.unreached, held

    def _fetched(self, recompute: list[Event]) -> tuple[list[Event], bool]:
        """The recomputation with its input brought back first; whether the input stays to the end
        of the backward.

        Without reentrance the copy is an argument of the recomputation and lives on only where it
        is saved again.
        """
        if self.host_input is None or self.block.input is None:
            return recompute, True
        copy = self.block.input.tensor
        recompute = [
            (ALLOC, copy),
            self._copy(to_host=False, backward=True),
            (FREE, self.host_input),
            *recompute,
        ]
        if self.reentrant:
            return recompute, True
        if copy not in saved_tensors(self.block):
            recompute.append((FREE, copy))
        return recompute, False

    def _bookkeeping(self, *, backward: bool) -> Event:
        """What a checkpoint, and hooks around every parameter, take the host besides its
        operations: Python in either direction."""
        count = (
            self.checkpoint_dispatches[backward] * self.checkpointed
            + HOOK_DISPATCHES[backward] * self.hooked
        )
        return RUN, Work(None, (Dispatch(count, bookkeeping=True),), False)

    def _copy(self, *, to_host: bool, backward: bool) -> Event:
        assert self.host_input is not None
        return RUN, Work(
            None,
            (
                HostCopy(
                    self.host_input.host_bytes,
                    to_host=to_host,
                    pinned=self.pinned,
                    overlaps=self.reentrant,
                ),
            ),
            backward,
        )
