"""What would help: changes of the configuration that lower the peak, and the speed each leaves."""

from __future__ import annotations

from napkinmath.answers.figures import Change
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.base.units import MIB
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import (
    BITSANDBYTES_4BIT,
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
from napkinmath.lowering.optimizer import chosen_optimizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.answers.estimate import Estimate
    from napkinmath.memory.pipeline_ranks import PipelineRanks

LEAST_SAVING = 0.02  # share of the peak below which a change is not worth a line
MOST_CHANGES = 5


class TriedChange:
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
    patched = c.kernels not in (Kernels.HF, Kernels.AXOLOTL)  # axolotl's own are of adapters
    patched = "loss" in c.kernel_parts if c.kernel_parts else patched
    whole = c.loss is Loss.HF and not patched
    return c.replace(loss=Loss.CHUNKED) if whole and c.workload.rule.takes_chunked_loss else None


def _flash(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(attention=Attention.AUTO)
        if c.attention in (Attention.EAGER, Attention.MATH)
        else None
    )


def adapter_bf16(c: TrainConfig) -> TrainConfig | None:
    """Adapters in bf16, where fp32 ones were not needed; the scaler of fp16 takes no bf16 gradients
    (torch aten/src/ATen/native/cuda/AmpKernels.cu dispatches on floats and half)."""
    if c.adapter is None or c.adapter.dtype not in ("auto", "fp32"):
        return None
    if c.precision is Precision.FP32 or c.precision.value.startswith("fp16"):
        return None
    return c.replace(adapter=c.adapter.replace(dtype="bf16"))


def _eight_bit(c: TrainConfig) -> TrainConfig | None:
    # an engine with gradient buffers of its own has its own optimizers, none of 8 bits
    if "8bit" in c.optimizer or c.adapter is not None:
        return None
    own = find_stack(c.stack).optimizer.main_gradients
    return None if own else c.replace(optimizer="adamw-8bit")


def _fused(c: TrainConfig) -> TrainConfig | None:
    return (
        c.replace(optimizer="adamw-fused")
        if c.optimizer in ("adamw", "adamw-foreach", "adamw_torch")
        else None
    )


def _lora(c: TrainConfig) -> TrainConfig | None:
    return c.replace(adapter=AdapterConfig()) if c.adapter is None else None


def _qlora(c: TrainConfig) -> TrainConfig | None:
    """As --qlora is run: with checkpointing."""
    return (
        c.replace(
            quantization=QuantizationConfig(), recompute=RecomputeConfig(kind=RecomputeKind.FULL)
        )
        if c.adapter is not None and c.quantization is None
        else None
    )


def halved(c: TrainConfig) -> TrainConfig | None:
    """Half the micro-batch in twice the accumulation steps: the same step."""
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
        if q is not None and not q.double_quant and q.format in BITSANDBYTES_4BIT
        else None
    )


def _states_sharded(c: TrainConfig) -> TrainConfig | None:
    ddp = c.parallel.data_parallel is DataParallel.DDP
    return _under(c, DataParallel.ZERO1) if ddp and c.adapter is None else None


def _sharded(kind: DataParallel) -> Callable[[TrainConfig], TrainConfig | None]:
    """All in shards by one engine, where the trainer has none of those before it."""

    def apply(c: TrainConfig) -> TrainConfig | None:
        if c.parallel.data_parallel not in (DataParallel.DP, DataParallel.DDP):
            return None
        before = SHARDING[: SHARDING.index(kind)]
        return None if any(_under(c, other) for other in before) else _under(c, kind)

    return apply


def _under(c: TrainConfig, kind: DataParallel) -> TrainConfig | None:
    """The configuration with another strategy; None where the stack's trainer lacks that or, beside
    it, a part of the mesh that it has now."""
    from napkinmath.catalog.trainer_meshes import not_run

    found = c.replace(parallel=c.parallel.replace(data_parallel=kind))
    lacked = [lacking.what for lacking in not_run(c)]
    return found if all(lacking.what in lacked for lacking in not_run(found)) else None


SHARDING = (DataParallel.FSDP2, DataParallel.FSDP1, DataParallel.ZERO3)
_SHARDED = "parameters, gradients and states in shards over the ranks"

CANDIDATES = (
    TriedChange("--zero 1", "optimizer states in shards over the ranks", _states_sharded),
    TriedChange("--fsdp", _SHARDED, _sharded(DataParallel.FSDP2)),
    TriedChange("--data-parallel fsdp1", _SHARDED, _sharded(DataParallel.FSDP1)),
    TriedChange("--zero 3", _SHARDED, _sharded(DataParallel.ZERO3)),
    TriedChange(
        "--train-mode", "call model.train(): checkpointing is inactive in eval mode", _training_mode
    ),
    TriedChange("--checkpointing full", "gradient checkpointing", _checkpointing),
    TriedChange("--attention auto", "a fused attention kernel instead of stored scores", _flash),
    TriedChange("--loss chunked", "chunked loss: never all logits at once", _chunked),
    TriedChange("--adapter-dtype bf16", "adapters in bf16", adapter_bf16),
    TriedChange("--optimizer adamw-fused", "fused optimizer: no parameter-sized temporary", _fused),
    TriedChange("--optimizer adamw-8bit", "8-bit optimizer states", _eight_bit),
    TriedChange(
        "--optimizer-in-backward --no-clip",
        "update in the backward: gradients never all alive",
        _in_backward,
    ),
    TriedChange("--double-quant", "double quantization of the constants", _double_quant),
    TriedChange("--qlora --checkpointing full", "4-bit base weights", _qlora),
    TriedChange("--lora", "LoRA instead of full fine-tuning", _lora),
    TriedChange("--bs {bs} --grad-accum {accum}", "half the batch, twice the accumulation", halved),
)


METHODS = ("--lora", "--qlora")
_OVER_HALVES = {
    Precision.BF16_AMP: Precision.BF16_AUTOCAST,
    Precision.FP16_AMP: Precision.FP16_AUTOCAST,
}


def on_model(e: Estimate, candidates: tuple[TriedChange, ...]) -> tuple[TriedChange, ...]:
    """The candidates as their flags are run on the model: below adapters no weights in fp32, which
    fp16 and trainers of denoisers need for those that are trained; a denoiser's adapters are on the
    modules of its trainers' scripts."""
    canvas, precision = e.spec.canvas, e.config.precision
    if e.config.adapter is not None or (canvas is None and precision is not Precision.FP16_AMP):
        return candidates
    precision = _OVER_HALVES.get(precision, precision)
    dtype = "fp32" if precision.value.startswith("fp16") else "base"

    def drawn(candidate: TriedChange) -> TriedChange:
        def apply(c: TrainConfig) -> TrainConfig | None:
            found = candidate.apply(c)
            if found is None or found.adapter is None or c.adapter is not None:
                return found
            adapter = found.adapter
            if canvas is not None:
                kept = dtype if found.quantization is None else adapter.dtype
                adapter = adapter.replace(targets=canvas.targets, dtype=kept)
            return found.replace(adapter=adapter, precision=precision)

        is_other = precision is not e.config.precision
        more = f" --precision {precision.value}" if is_other else ""
        return TriedChange(f"{candidate.flag}{more}", candidate.meaning, apply)

    return tuple(drawn(c) if c.flag.startswith(METHODS) else c for c in candidates)


def changes(e: Estimate) -> tuple[Change, ...]:
    """The candidates that lower the peak, largest saving first, each with the speed it leaves."""
    found: list[tuple[int, TriedChange, TrainConfig]] = []
    for candidate in on_model(e, CANDIDATES):
        changed = candidate.apply(e.config)
        if changed is None:
            continue
        try:
            saved = e.compared(changed)[0]
        except InputError:
            continue  # the family refuses this change (no fused attention, say)
        if saved >= max(LEAST_SAVING * e.peak.nbytes, 16 * MIB):
            found.append((saved, candidate, changed))
    found.sort(key=lambda item: -item[0])
    return tuple(_change(e, *item) for item in found[:MOST_CHANGES])


def _change(e: Estimate, saved: int, candidate: TriedChange, changed: TrainConfig) -> Change:
    ratio = None
    if e.priced_time is not None:
        other = _tokens_per_s(e, changed, e.compared(changed)[1])
        ratio = other / e.priced_time.tokens_per_s if other is not None else None
    flag = candidate.flag.format(
        bs=changed.micro_batch_size, accum=changed.gradient_accumulation_steps
    )
    return Change(flag=flag, meaning=candidate.meaning, saved_bytes=saved, speed_ratio=ratio)


def _tokens_per_s(e: Estimate, changed: TrainConfig, ranks: PipelineRanks) -> float | None:
    """What another configuration leaves; of a pipeline out of its stages' kernels alone, where
    neither lengths nor pages have a part in it."""
    parallel = changed.parallel
    apart = changed.batch.lengths or chosen_optimizer(ranks.policy).paged
    if (parallel.pipeline_parallel_size == 1 or e.speed is None or e.cluster is None) or apart:
        other = e.under(changed, ranks).time
        return None if other is None else other.tokens_per_s
    from napkinmath.answers.step_time import clock_on
    from napkinmath.timing.pipeline_time import pipelined_tokens_per_s

    tokens = (
        Bindings(e.step.symbols)(changed.micro_batch_size * changed.sequence_length)
        * changed.gradient_accumulation_steps
    )
    clock = clock_on(e.cluster, parallel, e.speed, ranks.policy)
    return pipelined_tokens_per_s(ranks, clock, tokens)
