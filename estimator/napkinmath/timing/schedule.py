"""The clock: prices every operation of a step on a GPU, and adds up a step with what bounds it."""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention as FlashAttention
from napkinmath.ir.costs import (
    AttentionCost,
    Collective,
    Dequantize,
    Disk,
    Dispatch,
    EngineRun,
    Gemm,
    HostCopy,
    HostPass,
    Move,
    Repeated,
)
from napkinmath.ir.ledger import Phase
from napkinmath.ir.order import Order
from napkinmath.ir.timeline import Kernel
from napkinmath.timing import efficiency
from napkinmath.timing.attention import attention_s
from napkinmath.timing.grouped import host_waits, loops
from napkinmath.timing.host import disk_s, host_pass_s
from napkinmath.timing.issuing import host_by_phase, part_s
from napkinmath.timing.overlap import (
    ASIDE,
    COMMUNICATION,
    COMMUNICATION_STREAM,
    COPY_STREAM,
    parts_of,
    seconds_by_phase,
)
from napkinmath.timing.sent import Sent, sent_by_phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.base.expr import Bindings
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Work
    from napkinmath.ir.recording import RecordingPolicy
    from napkinmath.ir.timeline import Timeline
    from napkinmath.timing.collectives import MeshNetwork
    from napkinmath.timing.efficiency import Efficiency

COMPUTE, BANDWIDTH, LAUNCH, HOST_LINK = "compute", "bandwidth", "launch", "host link"
HOST_MEMORY, DISK, ROLLOUTS = "host memory", "NVMe", "rollouts"
# Kernels that one forward or backward call of an operation launches, where it is not one.
_ATTENTION_KERNELS = {False: 1, True: 4}
_DEQUANTIZE_KERNELS = 3


class Clock:
    """Seconds of operations on one GPU under one policy; sizes are bound by the caller (ints, or
    arrays in a sweep)."""

    def __init__(
        self,
        speed: Efficiency,
        policy: RecordingPolicy,
        network: MeshNetwork | None = None,
        ranks_of_host: int = 1,
    ) -> None:
        self.given, self.policy = speed, policy
        self.speed = efficiency.at_pace(speed, policy.stack.loop.issue)
        self.ranks_of_host = ranks_of_host  # which share a machine's memory and disks
        self.network = network  # seconds of a collective on the cluster; None prices none
        self._gemm_dtype = (
            policy.rule.gemm if policy.rule.fp8_block is None else ""
        )  # FP8 products say so themselves

    def kernels(self, work: Work, bind: Bindings) -> list[Kernel]:
        """The kernels of an event with their seconds; the same for the same bindings."""
        found = bind.derived.get(work)
        if found is None:
            name, module = (work.op.name, work.op.module) if work.op is not None else ("update", "")
            found = bind.derived[work] = [
                self._kernel(name, module, cost, bind, by_autograd=work.backward)
                for cost in work.costs
            ]
        return found

    def _kernel(
        self, name: str, module: str, cost: Cost, bind: Bindings, *, by_autograd: bool
    ) -> Kernel:
        if isinstance(cost, Repeated):
            one = self._kernel(name, module, cost.cost, bind, by_autograd=by_autograd)
            return one.times(bind(cost.times))
        seconds, launches = self.seconds(cost, bind)
        flops, moved = bind(cost.flops), bind(cost.moved)
        return Kernel(
            cost.kind if isinstance(cost, Collective) else name,
            module,
            seconds,
            flops,
            moved,
            self._bound(cost, seconds, moved),
            launches,
            waits=host_waits(cost, self.speed.gpu),
            between_nodes=isinstance(cost, Collective) and self._leaves_node(cost),
            by_autograd=by_autograd,
        )

    def _leaves_node(self, cost: Collective) -> bool:
        """Whether a collective's ranks are in several nodes."""
        return self.network is not None and self.network.fabric_of(cost).nodes > 1

    def _bound(self, cost: Cost, seconds: Any, moved: Any) -> str:
        """What bounds a cost, or the stream that it has for itself."""
        if isinstance(cost, EngineRun) and cost.is_aside:
            return ASIDE
        if isinstance(cost, HostCopy):
            return COPY_STREAM if cost.overlaps else HOST_LINK
        if isinstance(cost, (HostPass, Disk)):
            return HOST_MEMORY if isinstance(cost, HostPass) else DISK
        if isinstance(cost, Collective):
            return COMMUNICATION_STREAM if cost.overlaps else COMMUNICATION
        computes = isinstance(cost, (Gemm, AttentionCost)) and not self._memory_bound(
            seconds, moved
        )
        return COMPUTE if computes else BANDWIDTH

    def _memory_bound(self, seconds: Any, moved: Any) -> bool:
        return moved / self.speed.stream_bytes_per_s > 0.8 * seconds

    def seconds(self, cost: Cost, bind: Bindings) -> tuple[Any, int]:
        """(seconds, kernel launches) of a cost; equal costs are priced once for the same
        bindings."""
        key = (cost.__class__, *[getattr(cost, slot) for slot in cost.__slots__])
        found = bind.derived.get(key)
        if found is None:
            found = bind.derived[key] = self._price(cost, bind)
        return found

    def _price(self, cost: Cost, bind: Bindings) -> tuple[Any, int]:
        speed = self.speed
        if isinstance(cost, Repeated):
            seconds, launches = self.seconds(cost.cost, bind)
            times = bind(cost.times)
            return seconds * times, launches * times
        if isinstance(cost, EngineRun):
            from napkinmath.timing.rollouts import engine_run_s

            return engine_run_s(cost, bind, self.given), 0
        if isinstance(cost, Gemm):
            return self._product_s(cost, bind), bind(cost.batch) if loops(cost, speed.gpu) else 1
        if isinstance(cost, Move):
            launches = bind(cost.launches)
            moved = bind(cost.moved) / cost.reach
            fused = self.policy.stack.model.streams
            return efficiency.elementwise_s(moved, speed, launches=launches, fused=fused), launches
        if isinstance(cost, AttentionCost):
            return self._attention_s(cost, bind), _ATTENTION_KERNELS[cost.backward]
        if isinstance(cost, Dequantize):
            launches = (
                efficiency.UNPACKING_OPERATIONS if cost.kind == "int4-ops" else _DEQUANTIZE_KERNELS
            )
            return efficiency.dequantize_s(cost.kind, bind(cost.elements), speed), launches
        if isinstance(cost, Collective):
            return self._collective_s(cost, bind), 1
        if isinstance(cost, Dispatch):
            share = speed.bookkeeping_share if cost.bookkeeping else 1.0
            return 0.0, round(cost.count * share)
        if isinstance(cost, HostPass):
            touched = bind(cost.touched)
            return host_pass_s(touched, cost.one_core, self.ranks_of_host, speed.gpu.host), 0
        if isinstance(cost, Disk):
            return disk_s(
                bind(cost.read), bind(cost.written), self.ranks_of_host, speed.gpu.host
            ), 0
        return efficiency.host_copy_s(bind(cost.moved), cost.pinned, speed), 1

    def _collective_s(self, cost: Collective, bind: Bindings) -> Any:
        """Seconds of a collective that no product hides."""
        whole = self.network.seconds(cost, bind) if self.network is not None else 0.0
        if not cost.beside:
            return whole
        hidden = cost.reach * sum(self.seconds(kernel, bind)[0] for kernel in cost.beside)
        first = 1 / cost.chunks if cost.chunks else 0.0
        return whole * first + efficiency.larger(whole - hidden, 0.0) * (1 - first)

    def _product_s(self, cost: Gemm, bind: Bindings) -> Any:
        m, n, k, batch = bind(cost.m), bind(cost.n), bind(cost.k), bind(cost.batch)
        if loops(cost, self.speed.gpu):
            return batch * self._product_s(cost.one, bind)
        dtype, bits, part = self._gemm_dtype or cost.dtype, cost.result_bits, cost.routed
        aligned = efficiency.rows_aligned(m, n, dtype) if cost.of_weight else None
        return efficiency.gemm_s(
            m, n, k, dtype, self.speed, batch=batch, aligned=aligned, result_bits=bits, routed=part
        )

    def _attention_s(self, cost: AttentionCost, bind: Bindings) -> Any:
        chosen = self.policy.config.attention
        versions = (FlashAttention.FLASH1, FlashAttention.FLASH3)
        return attention_s(
            chosen.value if cost.kernel == "flash" and chosen in versions else cost.kernel,
            bind(cost.rows),
            bind(cost.heads),
            bind(cost.kv_heads),
            bind(cost.s_q),
            bind(cost.s_kv),
            bind(cost.head_dim),
            cost.causal,
            bind(cost.window) if cost.window is not None else None,
            cost.dtype,
            cost.backward,
            self.speed,
        )


class PhaseTime(Record):
    """One phase of the step: device seconds, host seconds to issue it, and shares of device time by
    bound."""

    phase: Phase
    device_s: float
    host_s: float
    shares: tuple[tuple[str, float], ...]
    waited_s: float = 0.0
    """The host's waiting for results that it reads: with it the device has nothing queued."""
    sent: Sent = Sent()
    """Seconds of its collectives, hidden or not."""
    aside_s: float = 0.0
    """Seconds of other GPUs, which run beside the whole step."""

    @property
    def issued_s(self) -> float:
        """Host seconds until everything is issued."""
        return self.host_s + self.waited_s

    @property
    def seconds(self) -> float:
        """The longer of device and host: the queue lets one run ahead of the other within a
        phase."""
        return max(self.device_s, self.issued_s)

    @property
    def bound(self) -> str:
        """What bounds the phase."""
        if self.issued_s > self.device_s:
            return LAUNCH
        return max(self.shares, key=lambda item: item[1])[0] if self.shares else BANDWIDTH


class StepTime(Record):
    """Seconds of one steady step, its floating-point work, and what bounds it by phase."""

    phases: tuple[PhaseTime, ...]
    tokens: int
    model_flops: int
    """Forward and backward without recomputation."""
    hardware_flops: int
    """Everything computed, recomputation too."""
    peak_flops_per_s: float
    measured_s: float = 0.0
    """The whole step where the phases are as measured, gaps included; 0 where its operations were
    priced."""
    micro_steps: int = 1
    """Micro-batches, one after the other: how often the phases come."""
    bubble_s: float = 0.0
    """Waiting for other pipeline stages."""
    paging_s: float = 0.0
    """Waiting for pages of unified memory (napkinmath.timing.paging)."""

    @property
    def seconds(self) -> float:
        """Its own, or those of other GPUs that run beside it, whichever are more."""
        return max(self.own_s, self.aside_s)

    @property
    def aside_s(self) -> float:
        """Seconds of other GPUs beside the step: rollouts of an asynchronous engine."""
        return sum(p.aside_s for p in self.phases)

    @property
    def own_s(self) -> float:
        """Device and host overlap within each part (issuing.part_s). What a pipeline waits comes
        on top, and what pages take."""
        found = self.issued_in(1.0)
        return (self.measured_s or found + self.bubble_s) + self.paging_s

    def issued_in(self, factor: float) -> float:
        """Seconds of the parts where the host takes `factor` times as long to issue a kernel."""
        found = 0.0
        for part in parts_of(p.phase for p in self.phases):
            own = [p for p in self.phases if p.phase in part]
            device, host = [p.device_s for p in own], [p.host_s * factor + p.waited_s for p in own]
            found += part_s(device, host, self.micro_steps, max)
        return found

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all micro-steps over the step's seconds."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the datasheet's dense peak, recomputation not counted."""
        return self.model_flops / self.seconds / self.peak_flops_per_s

    @property
    def hfu(self) -> float:
        """Hardware FLOP/s over the datasheet's dense peak, recomputation counted."""
        return self.hardware_flops / self.seconds / self.peak_flops_per_s

    def share(self, bound: str) -> float:
        """Share of the step that a bound explains."""
        device = sum(p.device_s for p in self.phases)
        if bound == LAUNCH:
            waits = self.bubble_s + self.paging_s
            return max(0.0, self.own_s - device - waits) / self.seconds
        if bound == ROLLOUTS:
            return max(0.0, self.aside_s - self.own_s) / self.seconds
        pages = self.paging_s if bound == HOST_LINK else 0.0
        return (
            sum(dict(p.shares).get(bound, 0.0) * p.device_s for p in self.phases) + pages
        ) / self.seconds


def phase_times(
    timeline: Timeline, speed: Efficiency, *, first_segment: int
) -> tuple[PhaseTime, ...]:
    """Device and host seconds of each phase from a segment on, in order of occurrence."""
    segments = Order(
        (times, [segment for segment in row if segment.phase is not Phase.SAVE])
        for times, row in timeline.segments[first_segment:].rows
    )
    host, waited = host_by_phase(segments, speed)
    sent = sent_by_phase(segments)
    times: list[PhaseTime] = []
    for phase, by_bound in seconds_by_phase(segments).items():
        aside = by_bound.pop(ASIDE, 0.0)
        exposed = by_bound.pop(COPY_STREAM, 0.0) - sum(by_bound.values())
        if exposed > 0:
            by_bound[HOST_LINK] = by_bound.get(HOST_LINK, 0.0) + exposed
        total = sum(by_bound.values())
        if total or aside:
            shares = tuple((name, value / total) for name, value in by_bound.items() if total)
            times.append(
                PhaseTime(
                    phase=phase,
                    device_s=total,
                    host_s=host[phase],
                    waited_s=waited[phase],
                    sent=sent[phase],
                    aside_s=aside,
                    shares=shares,
                )
            )
    return tuple(times)
