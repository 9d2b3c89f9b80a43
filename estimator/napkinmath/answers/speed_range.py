"""The span of a step's seconds: each thing that is not known of the machine and the libraries, by
name, and how much shorter or longer it may make the step.

What the kernels themselves err is one width for all. A host, a network or a slot that no option
names prices the step again with a slower and a faster one, so that a doubt counts as far as its
part of the machine sets the pace. `benchmarks/accuracy/held_out_speed.py` prints how many
measurements lie inside where the source is left out of setting the widths.
"""

from __future__ import annotations

from napkinmath.answers.figures import Range
from napkinmath.base.record import Record
from napkinmath.config.train_config import Precision
from napkinmath.timing.attainable import matmul_flops_per_s
from napkinmath.timing.collectives import has_links_for, has_peer_access
from napkinmath.timing.sent import Sent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from napkinmath.answers.estimate import Estimate
    from napkinmath.timing.schedule import StepTime


class SpeedDoubt(Record):
    """One thing that is not known, and how much of the step's seconds it may take away or add."""

    name: str
    meaning: str
    below: float
    above: float


KERNELS = "kernels"
# Published steps of NeMo-RL take 0.98 to 2.2 times as long as they are priced, in the median 1.2, nine
# of ten up to 2.0 times (benchmarks/accuracy/rl_steps.py): three releases of one source, so half of
# that is added for trainers that publish none.
_ROLLOUTS = (0.0, 1.5)
_LEAST = 0.005  # what is less is not shown, and would not show
# Kernels, libraries and GPUs of one kind differ: the narrowest widths, in steps of 0.01, with which
# nine of ten speeds lie inside on average over sources, and four of five in each of at least ten
# (held_out_speed.py).
_KERNELS_BELOW, _KERNELS_ABOVE = 0.18, 0.25
# Rules that rest on one source or on none: how far that source's runs lie from the rule without it.
# FP8 of torchao: one scale a tensor is priced, a scale a row takes 1.14 times as long (torchao
# float8/README.md, 8 H100) and up to 1.5 with tensor parallelism (torchtitan). Rings of torch:
# four and eight ranks of a sequence take 1.4 times as long (torchtitan). Experts: 2,048 H800 of
# DeepSeek-V3 (DualPipe,
# arXiv 2412.19437) are twice as fast as without all-to-alls beside other micro-batches. Six steps of
# Moonlight on 8 H100 (Megatron-Bridge) take 1.37 to 1.51 times as long, five of Megatron-SWIFT's examples
# 1.0 to 2.7 times.
_FP8, _FP8_SPLIT = (0.15, 0.15), (0.15, 0.4)
_RING = (0.0, 0.35)
_EXPERTS, _HIDDEN_EXPERTS = (0.5, 0.6), (0.2, 0.3)
# Experts on one rank: prime-rl's mixtures on H100 and H200 take 0.9 to 1.3 times as long, FlagPerf's
# Mixtral on 32 H100 1.29, on B200 1.4 to 1.5 (two sources); loops and sorting differ by library.
_OWN_EXPERTS = (0.1, 0.5)
_COMPILED = (0.1, 0.1)
_LENGTHS = (0.05, 0.1)
# Plain loops of PyTorch are slower on newer GPUs than their products: by 17 to 50% on H100, 55 to
# 82% on MI300X, 65 to 99% on B200, where A100 is met; no table here has such runs. Compiled ones are
# met on Hopper (torchtitan, prime-rl), and lag as far on MI300X (torchao: 35 to 45%).
_PLAIN_ON_HOPPER, _PLAIN_ON_NEWER = 0.25, 0.7
# Hosts: published ones take 0.8 to 1.2 times as long as is priced, the rented machine of the H200 1.2 to
# 2.2 times (napkinmath.timing.efficiency); a fast core with new libraries half.
_FAST_HOST, _SLOW_HOST = 0.5, 2.2
# Clouds of A100 and H100 offer an eighth to the whole of the adapters that a DGX has
# (AWS p4d: 400 of 1,600 Gbit/s a node), and rings over many nodes lose to contention.
_SLOW_NETWORK = 3.0
_NAMED_NETWORK = 1.3
# A card's slot: generation 3 with 8 lanes beside generation 4 with 16 (AnswerDotAI/fsdp_qlora). More
# than two cards may cross a link between processors: of two machines in nccl-tests (ai-dynamo/
# aiconfigurator) four RTX PRO 6000 reach 23 GB/s each and four L40S 5, where pairs reach 32 and 20.
_SLOW_SLOT = {True: 3.0, False: 1.5}
_SLOW_BRIDGE = 4.0
# The host's update: other machines have half or twice the memory bandwidth, and a rank has from one
# to all cores (DeepSpeed issues 1635 and 6834, pull request 7474: 2 to 136 GB/s).
_ON_HOST_BELOW, _ON_HOST_ABOVE = 0.5, 1.0


def speed_doubts(e: Estimate) -> tuple[SpeedDoubt, ...]:
    """What is not known of an estimate's speed; () where it has none."""
    time = e.time
    if time is None:
        return ()
    return tuple(d for d in _doubts(e, time) if max(d.below, d.above) >= _LEAST)


def seconds_range(e: Estimate, doubt: tuple[float, float] = (0.0, 0.0)) -> Range | None:
    """Seconds of a steady step with their span; None where the hardware has no known speed.

    `doubt` is what assumptions add below and above, as shares of the figure. Doubts are of
    different things, so their squares add up.
    """
    found = e.time
    if found is None:
        return None
    value, named = found.seconds, speed_doubts(e)
    below = sum((d.below**2 for d in named), doubt[0] ** 2) ** 0.5
    above = sum((d.above**2 for d in named), doubt[1] ** 2) ** 0.5
    return Range(low=value * max(0.1, 1 - below), value=value, high=value * (1 + above))


def tokens_range(e: Estimate, doubt: tuple[float, float] = (0.0, 0.0)) -> Range | None:
    """Tokens a second, from the span of the seconds."""
    seconds, found = seconds_range(e, doubt), e.time
    return (
        None
        if seconds is None or found is None
        else Range(
            low=found.tokens / seconds.high,
            value=found.tokens / seconds.value,
            high=found.tokens / seconds.low,
        )
    )


def _doubts(e: Estimate, time: StepTime) -> Iterator[SpeedDoubt]:
    yield SpeedDoubt(
        name=KERNELS,
        meaning="clocks, versions of libraries and single GPUs differ",
        below=_KERNELS_BELOW,
        above=_KERNELS_ABOVE,
    )
    fast, slow = (_with_host(time, factor) / time.seconds for factor in (_FAST_HOST, _SLOW_HOST))
    if e.calibration is None and (slow > 1 or fast < 1):
        yield SpeedDoubt(
            name="host",
            meaning="the processor that issues the kernels is not named",
            below=1 - fast,
            above=slow - 1,
        )
    yield from _power(e)
    yield from _network(e, time)
    yield from _rules(e)
    on_host = time.share("host memory") + time.share("NVMe")
    if on_host:
        yield SpeedDoubt(
            name="host memory",
            meaning="bandwidth and cores that update on the host",
            below=_ON_HOST_BELOW * on_host,
            above=_ON_HOST_ABOVE * on_host,
        )


def _power(e: Estimate) -> Iterator[SpeedDoubt]:
    """A GPU that is sold at several powers is priced at the most of them."""
    gpu = e.hardware.gpu if e.hardware is not None else None
    if gpu is None or e.calibration or gpu.power_limit_w or not gpu.least_tdp_w:
        return
    held = gpu.replace(power_limit_w=gpu.least_tdp_w)
    yield SpeedDoubt(
        name="power",
        meaning=(
            f"{'laptops' if gpu.is_laptop else 'machines'} give this GPU {gpu.least_tdp_w:g} to"
            f" {gpu.tdp_w:g} W: --power-limit"
        ),
        below=0.0,
        above=matmul_flops_per_s(gpu, "fp16") / matmul_flops_per_s(held, "fp16") - 1,
    )


def _rules(e: Estimate) -> Iterator[SpeedDoubt]:
    """Rules that few runs, or none, have checked."""
    config, policy = e.config, e.step.policy
    engine, gpu = policy.stack, e.hardware.gpu if e.hardware is not None else None
    for holds, name, meaning, (below, above) in (
        (
            config.precision in (Precision.FP8, Precision.FP8_ROW, Precision.FP8_BLOCK)
            and not engine.model.cached_fp8,
            "FP8",
            "how many scales a tensor has; casts of FP8 rest on one source",
            _FP8_SPLIT if config.parallel.tensor_parallel_size > 1 else _FP8,
        ),
        (
            config.parallel.context_parallel_size > 1 and not engine.engine.narrow_ring,
            "ring",
            "rings of context-parallel ranks rest on one source",
            _RING,
        ),
        (
            config.parallel.spreads_experts,
            "experts",
            "how engines send rows to experts, and hide it",
            _HIDDEN_EXPERTS if config.parallel.hides_experts else _EXPERTS,
        ),
        (
            "e" in e.step.symbols and not config.parallel.spreads_experts,
            "experts",
            "kernels of experts, and how rows are sorted for them, differ by library",
            _OWN_EXPERTS,
        ),
        (config.compile, "compiled", "which chains the compiler fuses", _COMPILED),
        (bool(config.batch.lengths), "lengths", "order of the lengths", _LENGTHS),
        (
            config.workload.has_engine,
            "rollouts",
            "controllers, servers and rewards around the engine rest on one source",
            _ROLLOUTS,
        ),
    ):
        if holds:
            yield SpeedDoubt(name=name, meaning=meaning, below=below, above=above)
    amd = gpu is not None and gpu.vendor == "amd"
    plain = not (engine.model.cached_fp8 or e.calibration or (config.compile and not amd))
    if gpu is not None and plain and (gpu.is_hopper_or_later or amd):
        older = gpu.architecture == "hopper" or not has_links_for(gpu, 2)
        yield SpeedDoubt(
            name="plain PyTorch",
            meaning="on newer GPUs its loops lag behind their products, why is not known",
            below=0.0,
            above=_PLAIN_ON_HOPPER if older else _PLAIN_ON_NEWER,
        )


def _network(e: Estimate, time: StepTime) -> Iterator[SpeedDoubt]:
    """What the links between GPUs may take, where no option names them."""
    if e.cluster is None:
        return
    sent = Sent()
    for phase in time.phases:
        sent = sent.plus(phase.sent)
    if e.cluster.num_nodes > 1:
        named = e.cluster.network is not None
        slower = _NAMED_NETWORK if named else _SLOW_NETWORK
        meaning = "contention between nodes" if named else "no --network is named"
        more = _with_links(time, sent, between=slower) / time.seconds - 1
        yield SpeedDoubt(name="network", meaning=meaning, below=0.0, above=more)
    gpu = e.cluster.hardware.gpu
    if not has_links_for(gpu, min(e.cluster.gpus_per_node, 2)) and not gpu.host_link.own_lanes:
        slower = _SLOW_SLOT[not has_peer_access(gpu)]
        if e.cluster.gpus_per_node > 2:
            slower = max(slower, _SLOW_BRIDGE)
        more = _with_links(time, sent, within=slower) / time.seconds - 1
        yield SpeedDoubt(
            name="slot",
            meaning="generation, lanes and switches of the cards' slots are not known",
            below=0.0,
            above=more,
        )


def _with_host(time: StepTime, factor: float) -> float:
    """Seconds of the step where issuing takes `factor` times as long."""
    if time.measured_s:
        return time.seconds

    own = time.issued_in(factor) + time.bubble_s + time.paging_s
    return max(own, time.aside_s)


def _with_links(time: StepTime, sent: Sent, *, within: float = 1.0, between: float = 1.0) -> float:
    """Seconds of the step where collectives within a node and between nodes take so many times as
    long: those in line add up, those beside kernels hide as far as there are kernels."""
    device = sum(p.device_s for p in time.phases)
    shown = time.share("communication") * time.seconds
    in_line = sent.within_node_in_line + sent.between_nodes_in_line
    beside = sent.within_node + sent.between_nodes
    hidden = max(0.0, in_line + beside - shown)
    more_in_line = (within - 1) * sent.within_node_in_line
    more_in_line += (between - 1) * sent.between_nodes_in_line
    more_beside = (within - 1) * sent.within_node + (between - 1) * sent.between_nodes
    room = max(0.0, device - shown - hidden)
    own = time.own_s + more_in_line + max(0.0, more_beside - room)
    return max(own, time.aside_s)
