"""What is priced, in words: model, method, batch, recomputation, attention, optimizer; GPUs by
size."""

from __future__ import annotations

from napkinmath.answers.figures import Verdict
from napkinmath.answers.images import drawn, images_of
from napkinmath.answers.ranges import headroom, returnable_bytes
from napkinmath.answers.verdict import host_verdict
from napkinmath.base.dtypes import BF16
from napkinmath.base.units import GIB, MIB, format_bytes, format_count
from napkinmath.catalog.gpus import load_gpus
from napkinmath.config.job_keys import KeyUse
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.config.train_config import (
    BITSANDBYTES_4BIT,
    AdapterKind,
    Attention,
    Kernels,
    Loss,
    RecomputeKind,
)
from napkinmath.ir.step import reads_tokens
from napkinmath.models.tasks import LABELLED
from napkinmath.ops.whole_scores import MATH_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.answers.figures import Fit, Range
    from napkinmath.config.hardware import Hardware
    from napkinmath.config.train_config import TrainConfig

_MOST_NAMES, _MOST_SIZES = 2, 6  # of one size of GPU, and sizes
_LONGEST = 64  # characters of targets: seven names of a decoder layer
SMALL_CACHE = 64 * MIB  # not worth a word
_ADAPTERS = {
    AdapterKind.LORA: "LoRA",
    AdapterKind.DORA: "DoRA",
    AdapterKind.QALORA: "QA-LoRA",
    AdapterKind.IA3: "IA3",
    AdapterKind.PROMPT: "prompt tuning",
    AdapterKind.PREFIX: "prefix tuning",
}
HELD_BY_HOST = ("optimizer", "parameters", "activations", "checkpoints", "embeddings")
_RANKED = (AdapterKind.LORA, AdapterKind.DORA, AdapterKind.QALORA)


def printable(text: str) -> str:
    """Text from a file or a flag without control characters, so that it cannot move the cursor or
    end a line."""
    return "".join(c if c.isprintable() else "?" for c in text)


def headline(estimate: Estimate) -> list[str]:
    """What is priced, in phrases: 'QLoRA nf4 + double quant, r16 all-linear', 'batch 4 x 2048',
    ..."""
    config = estimate.config
    phrases = [
        _method(config),
        _batch(estimate),
        config.precision.value,
        _recompute(config),
        _attention(estimate),
        estimate.step.update.optimizer.name,
    ]
    if config.loss is not Loss.HF:
        phrases.append(f"{config.loss.value} loss")
    if config.kernels is not Kernels.HF:
        parts = f" ({', '.join(config.kernel_parts)})" if config.kernel_parts else ""
        phrases.append(f"{config.kernels.value} kernels{parts}")
    if config.mlp_tiles:
        phrases.append(f"MLP in {'' if config.mlp_tiles < 0 else f'{config.mlp_tiles} '}tiles")
    if config.optimizer_in_backward:
        phrases.append("optimizer in backward")
    if config.compile:
        phrases.append("compiled")
    offload = config.offload
    held = [name for name in HELD_BY_HOST if getattr(offload, name)]
    if held:
        phrases.append(f"{' and '.join(held)} in host memory")
    if not config.training_mode:
        phrases.append("eval mode")
    return [printable(p) for p in phrases if p]


def mesh(estimate: Estimate) -> list[str]:
    """How the step is spread, in phrases: '8 x A100-80 in 1 node', 'fsdp2 full over 8'; nothing on
    one GPU."""
    parallel, cluster = estimate.config.parallel, estimate.cluster
    if parallel.world_size == 1:
        return []
    nodes = (
        f" in {cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
        if cluster is not None
        else ""
    )
    phrases = [f"one of {parallel.world_size} ranks{nodes}"]
    if parallel.data_parallel_size > 1:
        sharding = f" {parallel.sharding.value}" if parallel.data_parallel.is_fsdp else ""
        copies = (
            f", {parallel.replica_degree} copies"
            if parallel.shard_degree > 1 and parallel.replica_degree > 1
            else ""
        )
        over = parallel.shard_degree if copies else parallel.data_parallel_size
        phrases.append(f"{parallel.data_parallel.value}{sharding} over {over}{copies}")
    for name, size in (
        ("tensor", parallel.tensor_parallel_size),
        ("pipeline", parallel.pipeline_parallel_size),
        (f"context ({parallel.context_parallel.value})", parallel.context_parallel_size),
        (
            "tokens sent once, expert"
            if parallel.expert_tokens_once
            else "tokens gathered, expert"
            if parallel.expert_tokens_gathered
            else "expert",
            parallel.expert_parallel_size,
        ),
    ):
        if size > 1:
            phrases.append(f"{name} {size}{_schedule(parallel) if name == 'pipeline' else ''}")
    if parallel.expert_tensor_ranks != parallel.tensor_parallel_size:
        phrases.append(f"expert tensor {parallel.expert_tensor_ranks}")
    return phrases


def _schedule(parallel: ParallelConfig) -> str:
    """The order of a pipeline's work where it is not the usual one: ' (interleaved, 2 chunks)'."""
    if parallel.pipeline_schedule is ParallelConfig().pipeline_schedule:
        return ""
    chunks = (
        f", {parallel.virtual_pipeline_size} chunks" if parallel.virtual_pipeline_size > 1 else ""
    )
    return f" ({parallel.pipeline_schedule.value}{chunks})"


def host_memory(estimate: Estimate) -> list[str]:
    """What one machine's memory has to take, in phrases: 'loading 120 GiB (8 x 15.0)', 'training
    33.6 GiB (8 x 4.2)'; nothing on one GPU."""
    known = estimate.cluster is not None and estimate.cluster.host_bytes
    if estimate.config.parallel.world_size == 1 and not known:
        return []
    host = estimate.host_memory
    each = (
        f"{host.loading_by} x {format_bytes(host.loading // host.loading_by)}"
        if host.loading_by > 1
        else "one process"
    )
    phrases = [f"loading {format_bytes(host.loading)} ({each})"] if host.loading else []
    if host.asleep:
        phrases.append(f"sleeping engines beside it {format_bytes(host.asleep)}")
    if host.training:
        phrases.append(f"training {format_bytes(host.training)}")
    if host.saving:
        phrases.append(f"saving {format_bytes(host.saving)} on rank 0")
    if host.nvme:
        phrases.append(f"on NVMe {format_bytes(host.nvme)}")
    if host.capacity:
        phrases.append(f"{host.processes} processes {format_bytes(host.own)}")
        phrases.append(f"of {format_bytes(host.capacity)} a node: {_enough(host.used)}")
    elif phrases:
        phrases.append("a node")
    return phrases


def _enough(used: float) -> str:
    return "TOO LITTLE" if used > 1 else f"{used:.0%} of what may be taken"


def model_name(estimate: Estimate) -> str:
    """'llama-7b (6.74B parameters)'."""
    task = f", {estimate.spec.task}" if estimate.spec.task in LABELLED else ""
    parameters = format_count(estimate.num_parameters)
    return f"{printable(estimate.spec.name)} ({parameters} parameters{task})"


def _method(config: TrainConfig) -> str:
    adapter, quantization = config.adapter, config.quantization
    stored = ""
    if quantization is not None:
        doubled = quantization.double_quant and quantization.format in BITSANDBYTES_4BIT
        stored = f"{quantization.format}{' + double quant' if doubled else ''}"
        stored += " with experts" if quantization.experts else ""
    if adapter is None:
        return f"full, base in {stored}" if stored else "full fine-tuning"
    name = _ADAPTERS[adapter.kind]
    if stored:
        name = f"Q{name} {stored}" if adapter.kind is AdapterKind.LORA else f"{name} over {stored}"
    if adapter.kind in _RANKED:
        targets, many = ",".join(adapter.targets), f"on {len(adapter.targets)} names of modules"
        return f"{name}, r{adapter.rank} {targets if len(targets) <= _LONGEST else many}"
    return (
        f"{name}, {adapter.num_virtual_tokens} tokens"
        if adapter.kind in (AdapterKind.PROMPT, AdapterKind.PREFIX)
        else name
    )


def _batch(estimate: Estimate) -> str:
    config = estimate.config
    steps, lengths = config.gradient_accumulation_steps, config.batch.lengths
    images = images_of(estimate)
    each = (
        f" x {config.sequence_length}"
        if reads_tokens(estimate.step)
        else f" {drawn(estimate)}{'s' * (config.micro_batch_size != 1)}"
    )
    if lengths and not config.batch.packing:
        each = f", padded to the longest of each ({min(lengths)}-{min(max(lengths), config.sequence_length)} tokens)"  # type: ignore[type-var]
    return (
        f"batch {config.micro_batch_size}{each}"
        + (f", {steps} micro-steps" if steps > 1 else "")
        + (", packed" if config.batch.packing else "")
        + (f", {images.described} each" if images is not None else "")
    )


def without_bf16(estimate: Estimate) -> frozenset[str]:
    """The GPUs whose matrix units take no bf16, where the step computes in it; else none."""
    policy = estimate.step.policy
    if (policy.autocast or policy.loaded_dtype) is not BF16:
        return frozenset()
    return frozenset(g.name for g in load_gpus() if g.dense_flops and not g.supports(BF16))


def no_time(estimate: Estimate) -> str:
    """Why an estimate has no time."""
    if estimate.withheld:
        return f"withheld: {estimate.withheld}"
    if estimate.hardware is not None:
        return f"{printable(estimate.hardware.gpu.name)} has no known speed"
    return "name a GPU with --gpu to price time"


def rate(estimate: Estimate) -> str:
    """Tokens a second, or images or videos where the model reads nothing else."""
    time = estimate.time
    assert time is not None
    if reads_tokens(estimate.step):
        return f"{time.tokens_per_s:,.0f} tokens/s"
    config = estimate.config
    images: float = config.micro_batch_size * config.gradient_accumulation_steps / time.seconds  # type: ignore[operator,assignment]
    return f"{images:{',.0f' if images >= 10 else '.2g'}} {drawn(estimate)}s/s"


def speed_span(estimate: Estimate) -> str:
    """By how much the speed may be lower and higher, in whole per cent of it."""
    from napkinmath.answers.speed_range import tokens_range

    found, time = tokens_range(estimate), estimate.time
    assert found is not None and time is not None
    return f"{found.low / found.value - 1:.0%} to {found.high / found.value - 1:+.0%}"


def margin(estimate: Estimate) -> tuple[str, str]:
    """(by how much the step fits its GPU or does not, what else is to be said of the room)."""
    spare, hardware = headroom(estimate), estimate.hardware
    assert spare is not None and hardware is not None
    of = f"of {in_gib(hardware.memory_bytes)} GiB"
    if estimate.verdict is host_verdict(estimate) is not Verdict.FITS:
        host = estimate.host_memory
        lacking = host.needed - int(host.share * host.capacity)
        how = "too much for" if lacking > 0 else "to spare of"
        return (
            f"{format_bytes(abs(lacking))} {how} {format_bytes(host.capacity)} of host memory",
            "",
        )
    if estimate.verdict is not estimate.priced_verdict and estimate.job_keys is not None:
        keys = (k.name for k in estimate.job_keys.of(KeyUse.NOT_PRICED) if k.memory.value)
        left = f"{in_gib(abs(spare.value))} GiB {'to spare' if spare.value >= 0 else 'too much'}"
        return f"{left} {of}, without what is not priced", ", ".join(keys)
    if estimate.verdict is Verdict.DOES_NOT_FIT:
        lacking = f"{in_gib(-spare.value)} GiB too much for {of[3:]}"
        pieces = f"the allocator's pieces do not go into {of[3:]}"
        return lacking if spare.value < 0 else pieces, _in_pieces(estimate)
    if estimate.verdict is Verdict.UNKNOWN:
        return _unsure_margin(spare, of), _in_pieces(estimate)
    return (
        f"{in_gib(spare.value)} GiB to spare {of} ({in_gib(spare.low)}-{in_gib(spare.high)})",
        _cache(estimate, hardware),
    )


def _cache(estimate: Estimate, hardware: Hardware) -> str:
    if estimate.replay.peak_reserved > hardware.usable_bytes:
        return "only where the allocator returns its cache, which costs time"
    cache = returnable_bytes(estimate)
    return (
        f"the allocator's cache could give back {in_gib(cache)} GiB more"
        if cache >= SMALL_CACHE
        else ""
    )


def _unsure_margin(spare: Range, of: str) -> str:
    if spare.low < 0 < spare.high:
        return (
            f"between {in_gib(-spare.low)} GiB too much and {in_gib(spare.high)} GiB to spare {of}"
        )
    if spare.high <= 0:
        return f"{in_gib(-spare.value)} GiB too much for {of[3:]}, if the allocator keeps its cache"
    return f"{in_gib(spare.value)} GiB to spare {of} ({in_gib(spare.low)}-{in_gib(spare.high)}), in pieces"


def _in_pieces(estimate: Estimate) -> str:
    """Said where the tensors alone would go in, and the allocator's pieces do not."""
    hardware, allocated = estimate.hardware, estimate.memory.allocated.high
    assert hardware is not None
    left = hardware.usable_bytes - allocated
    if left < 0:
        return ""
    advice = (
        ""
        if estimate.settings.expandable_segments
        else "; try --allocator expandable_segments:True"
    )
    return f"tensors alone would leave {in_gib(left)} GiB (fragmentation){advice}"


def in_gib(value: float) -> str:
    """GiB with as many decimals as a reader needs."""
    return f"{value / GIB:,.{1 if abs(value) >= 10 * GIB else 2}f}"


def _recompute(config: TrainConfig) -> str:
    recompute = config.recompute
    if recompute.kind is RecomputeKind.NONE:
        return "no checkpointing"
    name = {
        RecomputeKind.FULL: "checkpointing",
        RecomputeKind.EVERY: f"checkpointing every {recompute.every}",
    }.get(recompute.kind, f"checkpointing {recompute.kind.value}")
    return name if config.training_mode else f"{name} (inactive)"


def _attention(estimate: Estimate) -> str:
    """The attention kernels that the recorded step runs."""
    names: dict[str, None] = {}
    for run in estimate.step.runs:
        for op in run.block.ops:
            if op.name.startswith("sdpa "):
                kind = estimate.config.attention
                names["flex attention" if kind is Attention.FLEX else op.name] = None
            elif op.name.startswith(MATH_PATH):
                names["sdpa math"] = None
            elif "q k^T" in op.name:
                names["stored attention scores"] = None
    return " and ".join(names)


def machine(hardware: Hardware) -> str:
    """'RTX 4090, 24 GiB', and the watts that its board is held to."""
    limit = hardware.gpu.power_limit_w
    name = f"{printable(hardware.gpu.name)}, {hardware.memory_bytes / GIB:.1f} GiB"
    return f"{name}, held to {limit:g} W" if limit else name


def speed_source(estimate: Estimate) -> str:
    """Whether the speeds were measured, where and when, or come from the datasheet."""
    calibration = estimate.calibration
    if calibration is None:
        return "uncalibrated"
    date = f" {calibration.date}" if calibration.date else ""
    if estimate.measured_layers is not None:
        return f"calibrated{date} on real layers of this model"
    return f"calibrated{date}"


def by_size(fits: list[Fit], lacking: frozenset[str]) -> list[str]:
    """'16 GiB A16, T4 (no bf16) +9': GPUs of one size together, those with the shortest names
    first, but those `lacking` the type that is computed in last; the smallest few sizes."""
    nominal = {gpu.name: gpu.nominal_bytes for gpu in load_gpus()}
    sizes: dict[int, list[str]] = {}
    for fit in fits:
        sizes.setdefault(round(nominal.get(fit.gpu, fit.capacity_bytes) / GIB), []).append(fit.gpu)
    order = sorted(sizes)
    texts: list[str] = []
    for size in order[:_MOST_SIZES]:
        able = sorted((name for name in sizes[size] if name not in lacking), key=len)
        unable = sorted((name for name in sizes[size] if name in lacking), key=len)
        names = [*able, *(f"{name} (no bf16)" for name in unable)]
        more = f" +{len(names) - _MOST_NAMES}" if len(names) > _MOST_NAMES else ""
        texts.append(f"{size} GiB {', '.join(names[:_MOST_NAMES])}{more}")
    larger = sum(len(sizes[size]) for size in order[_MOST_SIZES:])
    if not larger:
        return texts
    low, high = order[_MOST_SIZES], order[-1]
    return [
        *texts,
        f"and {larger} of {low} GiB" if low == high else f"and {larger} from {low} to {high} GiB",
    ]
