"""Answers read off an estimate: does it fit, on what, what would help, what is off, what was
assumed."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32
from napkinmath.base.expr import Bindings
from napkinmath.base.units import MIB, format_bytes
from napkinmath.catalog.models import read_teacher
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Kernels,
    Loss,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import Change, Estimate, Finding, Fit, Verdict, steps_priced
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.step import reads_tokens
from napkinmath.lowering.choices import resolve
from napkinmath.memory.allocator import replay
from napkinmath.memory.pipeline_ranks import PipelineRanks
from napkinmath.ops.attention import MATH_PATH, MATH_PATH_SINGLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.config.hardware import Hardware

LEAST_SAVING = 0.02  # share of the peak below which a change is not worth a line
MOST_CHANGES = 5


# ---------------------------------------------------------------- fits


def verdict_on(e: Estimate, hardware: Hardware) -> Verdict:
    """Fits, does not, or the range straddles what the device offers.

    The allocator returns cached segments before it gives up, so what must fit is not its peak
    reservation but the replay under the device's limit; that is tried with the range's upper end,
    then with its lower end.
    """
    return _verdict(e, hardware, _passes)


def _verdict(e: Estimate, hardware: Hardware, passes: Callable[[Estimate, float], bool]) -> Verdict:
    allocated = e.memory.allocated
    low_usable, high_usable = hardware.usable_range
    if passes(e, low_usable * allocated.value / allocated.high):
        return Verdict.FITS
    return (
        Verdict.UNKNOWN
        if passes(e, high_usable * allocated.value / allocated.low)
        else Verdict.DOES_NOT_FIT
    )


def _passes(e: Estimate, limit: float) -> bool:
    """Whether the replay goes through with so many bytes to reserve."""
    if limit >= e.replay.peak_reserved:
        return True
    if limit < e.replay.peak_allocated:
        return False
    return not replay(e.timeline, e.settings.replace(limit_bytes=int(limit))).out_of_memory


def _would_pass(e: Estimate, limit: float) -> bool:
    """The same without another replay: whether what could not have been returned stays below the
    limit."""
    return limit >= e.replay.peak_unreturnable


def fits_on(e: Estimate) -> tuple[Fit, ...]:
    """Every catalogued GPU, from small to large."""
    from napkinmath.catalog.gpus import load_gpus
    from napkinmath.config.hardware import Hardware

    allocated = int(e.memory.allocated.value)
    found: list[Fit] = []
    for gpu in sorted(load_gpus(), key=lambda g: (g.memory_bytes, g.name)):
        hardware = Hardware(gpu=gpu, memory_bytes=gpu.memory_bytes)
        headroom = gpu.memory_bytes - allocated - hardware.context_bytes
        found.append(
            Fit(
                gpu=gpu.name,
                capacity_bytes=gpu.memory_bytes,
                headroom_bytes=headroom,
                verdict=_verdict(e, hardware, _would_pass),
            )
        )
    return tuple(found)


# ---------------------------------------------------------------- what would help


class Candidate:
    """A change to try: the flag, what it means, and the configuration it makes (None where it does
    not apply)."""

    __slots__ = ("apply", "flag", "meaning")

    def __init__(
        self, flag: str, meaning: str, apply: Callable[[TrainConfig], TrainConfig | None]
    ) -> None:
        self.flag, self.meaning, self.apply = flag, meaning, apply


def _checkpointing(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(recompute=RecomputeConfig(kind=RecomputeKind.FULL))
        if c.recompute.kind is RecomputeKind.NONE
        else None
    )


def _training_mode(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(training_mode=True)
        if not c.training_mode and c.recompute.kind is not RecomputeKind.NONE
        else None
    )


def _chunked(c: TrainConfig) -> TrainConfig | None:
    return c.replace(loss=Loss.CHUNKED) if c.loss is Loss.HF and c.kernels is Kernels.HF else None


def _flash(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(attention=Attention.AUTO)
        if c.attention in (Attention.EAGER, Attention.MATH)
        else None
    )


def _adapter_bf16(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(adapter=c.adapter.replace(dtype="bf16"))
        if c.adapter is not None
        and c.adapter.dtype in ("auto", "fp32")
        and c.precision is not Precision.FP32
        else None
    )


def _eight_bit(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(optimizer="adamw-8bit")
        if "8bit" not in c.optimizer and c.adapter is None
        else None
    )


def _fused(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(optimizer="adamw-fused")
        if c.optimizer in ("adamw", "adamw-foreach", "adamw_torch")
        else None
    )


def _lora(c: TrainConfig) -> TrainConfig | None:
    return c.replace(adapter=AdapterConfig()) if c.adapter is None else None


def _qlora(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(quantization=QuantizationConfig())
        if c.adapter is not None and c.quantization is None
        else None
    )


def _halved(c: TrainConfig) -> TrainConfig | None:
    b = c.micro_batch_size
    return (
        c.replace(
            micro_batch_size=b // 2, gradient_accumulation_steps=c.gradient_accumulation_steps * 2
        )
        if isinstance(b, int)
        and b > 1
        and not b % 2
        and not c.optimizer_in_backward
        and c.workload.sequences == 1
        else None
    )


def _in_backward(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(optimizer_in_backward=True, clip_gradients=False)
        if c.adapter is None
        and c.gradient_accumulation_steps == 1
        and not c.optimizer_in_backward
        and not c.offload.optimizer
        and c.parallel.data_parallel is DataParallel.NONE
        else None
    )


def _double_quant(c: TrainConfig) -> TrainConfig | None:
    q = c.quantization
    return (
        c.replace(quantization=q.replace(double_quant=True))
        if q is not None and not q.double_quant and q.format in ("nf4", "fp4")
        else None
    )


def _sharded(c: TrainConfig) -> TrainConfig | None:
    parallel = c.parallel
    if parallel.data_parallel not in (DataParallel.DP, DataParallel.DDP):
        return None
    return c.replace(parallel=parallel.replace(data_parallel=DataParallel.FSDP2))


CANDIDATES = (
    Candidate("--fsdp", "parameters, gradients and states in shards over the ranks", _sharded),
    Candidate(
        "--train-mode", "call model.train(): checkpointing is inactive in eval mode", _training_mode
    ),
    Candidate("--checkpointing full", "gradient checkpointing", _checkpointing),
    Candidate("--attention auto", "a fused attention kernel instead of stored scores", _flash),
    Candidate("--loss chunked", "chunked loss: never all logits at once", _chunked),
    Candidate("--adapter-dtype bf16", "adapters in bf16", _adapter_bf16),
    Candidate("--optimizer adamw-fused", "fused optimizer: no parameter-sized temporary", _fused),
    Candidate("--optimizer adamw-8bit", "8-bit optimizer states", _eight_bit),
    Candidate(
        "--optimizer-in-backward", "update in the backward: gradients never all alive", _in_backward
    ),
    Candidate("--double-quant", "double quantization of the constants", _double_quant),
    Candidate("--qlora", "4-bit base weights", _qlora),
    Candidate("--lora", "LoRA instead of full fine-tuning", _lora),
    Candidate("--bs {bs} --grad-accum {accum}", "half the batch, twice the accumulation", _halved),
)


def changes(e: Estimate) -> tuple[Change, ...]:
    """The candidates that lower the peak, largest saving first, each with the speed it leaves."""
    from napkinmath.base.errors import InputError

    found: list[tuple[int, Candidate, TrainConfig]] = []
    for candidate in CANDIDATES:
        changed = candidate.apply(e.config)
        if changed is None:
            continue
        try:
            saved = _saved(e, changed)
        except InputError:
            continue  # the family refuses this change (no fused attention, say)
        if saved >= max(LEAST_SAVING * e.peak.nbytes, 16 * MIB):
            found.append((saved, candidate, changed))
    found.sort(key=lambda item: -item[0])
    return tuple(_change(e, *item) for item in found[:MOST_CHANGES])


def _change(e: Estimate, saved: int, candidate: Candidate, changed: TrainConfig) -> Change:
    ratio = None
    if e.priced_time is not None:
        other = _tokens_per_s(e, changed, _compared(e, changed)[1])
        ratio = other / e.priced_time.tokens_per_s if other is not None else None
    flag = candidate.flag.format(
        bs=changed.micro_batch_size, accum=changed.gradient_accumulation_steps
    )
    return Change(flag=flag, meaning=candidate.meaning, saved_bytes=saved, speed_ratio=ratio)


def _tokens_per_s(e: Estimate, changed: TrainConfig, ranks: PipelineRanks) -> float | None:
    """What another configuration leaves; of a pipeline out of its stages' kernels alone, where
    neither lengths nor pages have a part in it."""
    from napkinmath.estimate import estimate_of
    from napkinmath.lowering.optimizer import chosen_optimizer

    apart = changed.batch.lengths or chosen_optimizer(ranks.policy).paged
    if (
        changed.parallel.pipeline_parallel_size > 1
        and e.speed is not None
        and e.cluster is not None
        and not apart
    ):
        from napkinmath.timing.collectives import network_on
        from napkinmath.timing.pipeline_time import pipelined_tokens_per_s
        from napkinmath.timing.schedule import Clock

        tokens = (
            Bindings(e.step.symbols)(changed.micro_batch_size * changed.sequence_length)
            * changed.gradient_accumulation_steps
        )
        clock = Clock(e.speed, ranks.policy, network_on(e.cluster, changed.parallel))
        return pipelined_tokens_per_s(ranks, clock, tokens)
    other = estimate_of(
        ranks,
        changed,
        hardware=e.hardware,
        speed=e.speed,
        settings=e.settings,
        cluster=e.cluster,
    ).time
    return None if other is None else other.tokens_per_s


def _saved(e: Estimate, changed: TrainConfig) -> int:
    """Bytes that the peak would be lower (or, negative, higher) under another configuration."""
    return _compared(e, changed)[0]


def _compared(e: Estimate, changed: TrainConfig) -> tuple[int, PipelineRanks]:
    found = e.compared.get(changed)
    if found is None:
        policy = resolve(e.spec, changed, e.hardware, teacher=read_teacher(changed))
        ranks = PipelineRanks(e.spec, policy)
        peak = ranks.worst_peak(steps=steps_priced(changed))
        found = e.compared[changed] = (e.peak.nbytes - peak, ranks)
    return found


# ---------------------------------------------------------------- what is off


def findings(e: Estimate) -> tuple[Finding, ...]:
    """What costs memory without being asked for, most expensive first."""
    found = [
        finding
        for rule in (
            _too_long,
            _no_flash,
            _inactive_checkpointing,
            _no_bf16,
            _whole_experts,
            _wide_adapters,
            _step_peak,
            _scores,
            _logits,
        )
        if (finding := rule(e)) is not None
    ]
    return tuple(sorted(found, key=lambda f: -f.nbytes))


def _too_long(e: Estimate) -> Finding | None:
    length, longest = Bindings(e.step.symbols)(e.config.sequence_length), e.spec.longest_sequence
    if not 0 < longest < length:
        return None
    return Finding(
        text=(
            f"{e.spec.name} has learned positions for {longest:,} tokens: a sequence of {length:,}"
            " fails with an index error"
        )
    )


def _no_flash(e: Estimate) -> Finding | None:
    if e.config.attention is not Attention.FLASH2:
        return None
    policy = e.step.policy
    if policy.attended_dtype(policy.rule.parameters) is FP32:
        return Finding(
            text=(
                "flash-attn takes fp16 and bf16 alone and q, k, v are fp32, so a run fails; priced"
                " with SDPA's kernels"
            )
        )
    if e.hardware is None:
        return None
    gpu = e.hardware.gpu
    if (
        gpu.vendor != "nvidia"
        or not gpu.compute_capability
        or int(gpu.compute_capability.split(".")[0]) >= 8
    ):
        return None
    return Finding(
        text=(
            f"flash-attn 2 needs compute capability 8.0 and {gpu.name} has"
            f" {gpu.compute_capability}: use --attention sdpa"
        )
    )


def _inactive_checkpointing(e: Estimate) -> Finding | None:
    config = e.config
    if config.training_mode or config.recompute.kind is RecomputeKind.NONE:
        return None
    cost = _saved(e, config.replace(training_mode=True))
    return Finding(
        text=(
            "checkpointing was requested but the model is in eval mode, so it is inactive:"
            f" {format_bytes(cost)} more; call model.train()"
        ),
        nbytes=cost,
    )


def _no_bf16(e: Estimate) -> Finding | None:
    if e.hardware is None or not e.hardware.gpu.dense_flops or e.hardware.gpu.supports("bf16"):
        return None
    if (e.step.policy.autocast or e.step.policy.loaded_dtype) is not BF16:
        return None
    return Finding(
        text=(
            f"{e.hardware.gpu.name} has no matrix units for bf16, which runs without them or fails:"
            " use --precision fp16-amp"
        )
    )


def _whole_experts(e: Estimate) -> Finding | None:
    if e.config.quantization is None:
        return None
    bind, held, dtype = Bindings(e.step.symbols), 0, ""
    for run in e.step.runs:
        for weight in run.block.weights:
            if weight.kind == "experts" and not weight.constants and not weight.trainable:
                held += run.count * bind.extended(dict(run.stage.symbols))(weight.tensor.nbytes)
                dtype = weight.tensor.dtype.name
    if not held:
        return None
    return Finding(
        text=(
            "experts are 3-D parameters, which quantization leaves alone (it replaces nn.Linear):"
            f" they take {format_bytes(held)} in {dtype}"
        ),
        nbytes=held,
    )


def _wide_adapters(e: Estimate) -> Finding | None:
    changed = _adapter_bf16(e.config)
    if changed is None:
        return None
    cost = _saved(e, changed)
    if cost < LEAST_SAVING * e.peak.nbytes:
        return None
    return Finding(
        text=(
            "adapters are fp32, so the input of each adapted linear is kept in fp32 too: bf16"
            f" adapters save {format_bytes(cost)}"
        ),
        nbytes=cost,
    )


def _step_peak(e: Estimate) -> Finding | None:
    winner = next(iter(e.phase_peaks))
    copies = e.step.update.optimizer.foreach_copies
    if winner is not Phase.STEP or not copies:
        return None
    peaks = list(e.phase_peaks.values())
    cost = peaks[0].nbytes - peaks[1].nbytes
    return Finding(
        text=(
            "the optimizer step, not the backward, sets the peak: a fused optimizer saves up to"
            f" {format_bytes(cost)}"
        ),
        nbytes=cost,
    )


def _scores(e: Estimate) -> Finding | None:
    config, policy = e.config, e.step.policy
    if config.attention in (Attention.EAGER, Attention.MATH):
        return None
    products = {op.name for run in e.step.runs for op in run.block.ops}
    if MATH_PATH_SINGLE in products:
        return Finding(
            text=(
                "a single key/value head is broadcast, which no fused kernel takes, so SDPA falls"
                " to the math path and holds b·a·s² scores"
            )
        )
    if MATH_PATH not in products or policy.sdpa_choice is Attention.MATH:
        return None
    scores = "SDPA falls to the math path and holds b·a·s² scores"
    if policy.sdpa_choice is Attention.EFFICIENT:
        text = f"the memory-efficient kernel takes no grouped heads, so {scores}"
        cost, way = _saved(e, config.replace(attention=Attention.AUTO)), "--attention auto"
    else:
        text = f"q, k, v are fp32 with grouped heads, so {scores}"
        cost, way = _saved(e, config.replace(precision=Precision.BF16_AUTOCAST)), "autocast"
    return Finding(
        text=f"{text}: {way} saves {format_bytes(cost)}" if cost > 0 else text, nbytes=max(cost, 0)
    )


def _logits(e: Estimate) -> Finding | None:
    held = e.breakdown.get(Role.LOGITS, 0)
    if held < 0.25 * e.peak.nbytes or e.config.loss is not Loss.HF:
        return None
    return Finding(
        text=(
            f"logits and their copies are {held / e.peak.nbytes:.0%} of the peak"
            f" ({format_bytes(held)}): a chunked or fused loss never holds them all"
        ),
        nbytes=held,
    )


# ---------------------------------------------------------------- what was assumed


def assumptions(e: Estimate) -> tuple[str, ...]:
    """What the configuration leaves open, with the value taken."""
    from napkinmath.lowering.precision import PRECISIONS

    config, policy = e.config, e.step.policy
    found = [
        f"stack {policy.stack.name}: {policy.stack.meaning}",
        f"precision {config.precision.value}: {PRECISIONS[config.precision].meaning}",
    ]
    if config.optimizer == "auto":
        found.append(f"optimizer {e.step.update.optimizer.name}: the stack's default")
    if config.attention in (Attention.AUTO, Attention.SDPA):
        found.append(f"attention: the {policy.sdpa_choice.value} kernel where its inputs allow")
    if config.adapter is not None and config.adapter.dtype == "auto":
        sharded = config.parallel.data_parallel.is_fsdp and policy.loaded_rule.autocast is not None
        how = "stored as PEFT makes them, gathered in" if sharded else "in"
        found.append(
            f"adapters {how} {policy.adapter_dtype}: what"
            f" {'FSDP with mixed precision' if sharded else 'PEFT'} does"
        )
    if not config.batch.lengths and reads_tokens(e.step):
        found.append("every sequence is as long as the context")
    return tuple(found)
