"""The phases of a step in which an inference engine generates: on the policy's GPUs, or on its own.

Sources: trl 1.16 generation/vllm_generation.py VLLMGeneration: one engine for
`tensor_parallel_size` ranks in the same process. vllm 0.11 v1/worker/gpu_worker.py sleep, wake_up:
level 1 keeps the weights in host memory, level 2 drops them. Both free the cache, graphs stay.
"""

from __future__ import annotations

from napkinmath.base.dtypes import UINT8
from napkinmath.ir.costs import EngineRun, HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, StreamUse, Tensor, Work
from napkinmath.ir.step import Run, Segment, Step
from napkinmath.lowering.rollout.asleep import asleep_bytes
from napkinmath.lowering.rollout.plan import EnginePlan
from napkinmath.lowering.rollout.waiting import waits_on_host
from napkinmath.lowering.rollout.weights_sent import state_dict, weights_sent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


# vllm 0.11 device_allocator/cumem.py CuMemAllocator: a pool of its own, whose pages sleep returns to
# the device; it empties torch's cache too, as trainers do before the engine wakes.
_POOL = StreamUse(8, empties=True)


class _Held:
    """The engine's tensors on a rank of the policy."""

    def __init__(self, plan: EnginePlan) -> None:
        def tensor(name: str, nbytes: int, use: StreamUse | None = _POOL) -> Tensor:
            return Tensor(name, (nbytes,), UINT8, Role.ENGINE, source=plan.engine.source, use=use)

        self.weights = tensor("engine weights", plan.weight_bytes)
        self.cache = tensor("engine cache", max(plan.cache_bytes, 0))
        self.graphs = tensor("engine CUDA graphs", plan.graph_bytes)
        self.forward = tensor("engine forward", plan.forward_bytes, None)


def engine_phases(
    plan: EnginePlan, step: Step, runs: list[Run], policy: Policy, sizes: tuple[Size, Size, Size]
) -> tuple[list[Segment], list[Segment]]:
    """(what is loaded, what each step's rollout is) for `sizes` of rows, prompt and completion."""
    held = _Held(plan)
    rows, prompt, tokens = sizes
    work: Event = (RUN, Work(None, (EngineRun(plan, rows, prompt, tokens),), False))
    made, dropped = state_dict(plan, runs, policy)
    weights = [*weights_sent(plan, runs, policy), *dropped]
    if plan.apart:
        return [], [*made, *weights, _segment("generation", [work])]
    sleeps = plan.sleep > 0
    woken = _copied(plan, to_host=False) if plan.sleep == 1 else []
    together = plan.trainer.wakes_whole
    cache: list[Event] = [(ALLOC, held.cache)] if sleeps else []
    woken = [(ALLOC, held.weights), *(cache if together else ()), *woken]
    wakes = [_segment("engine wakes", woken)] if sleeps else []
    opened, closed = waits_on_host(step, plan.offload, "states")
    sent, back = waits_on_host(step, plan.offload, "parameters")
    run: list[Event] = [
        *(() if together else cache),
        (ALLOC, held.forward),
        work,
        (FREE, held.forward),
    ]
    rollout = [*opened, *made, *wakes, *weights, *sent]
    rollout.append(_segment("generation", run))
    if sleeps:
        asleep = _copied(plan, to_host=True) if plan.sleep == 1 else []
        ends: list[Event] = [(FREE, held.cache), *asleep, (FREE, held.weights)]
        rollout.append(_segment("engine sleeps", ends))
    return _loaded(plan, held), [*rollout, *back, *closed]


def _loaded(plan: EnginePlan, held: _Held) -> list[Segment]:
    """What the engine keeps while the policy trains."""
    events: list[Event] = [] if plan.sleep else [(ALLOC, held.weights), (ALLOC, held.cache)]
    events.append((ALLOC, held.graphs))
    if plan.sleep == 1:
        kept = Tensor("engine weights asleep", (asleep_bytes(plan),), UINT8, Role.ENGINE, host=True)
        events.append((ALLOC, kept))
    return [Segment(f"{plan.engine.name} engine", Phase.LOAD, events)]


def _segment(name: str, events: list[Event]) -> Segment:
    return Segment(f"rollout: {name}", Phase.ROLLOUT, events)


def _copied(plan: EnginePlan, *, to_host: bool) -> list[Event]:
    """Sleep level 1 keeps the weights in pinned host memory."""
    return [
        (RUN, Work(None, (HostCopy(plan.weight_bytes, to_host=to_host, overlaps=False),), False))
    ]
