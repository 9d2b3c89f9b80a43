"""What is off about a configuration: what costs memory without being asked for, or would fail."""

from __future__ import annotations

from napkinmath.answers.changes import LEAST_SAVING, adapter_bf16
from napkinmath.answers.figures import Finding, Verdict
from napkinmath.answers.idle import idle_switches
from napkinmath.answers.refused import refused_runs
from napkinmath.answers.verdict import host_verdict
from napkinmath.answers.whole_run import has_unknown_rows
from napkinmath.base.dtypes import BF16, FP32
from napkinmath.base.expr import Bindings
from napkinmath.base.units import format_bytes
from napkinmath.catalog.stacks import latest_before
from napkinmath.config.job_keys import Difference, KeyUse
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import Attention, Loss, Precision, RecomputeKind
from napkinmath.config.workload_config import Head
from napkinmath.ir.ledger import Phase, Role
from napkinmath.lowering.choices import is_of_today
from napkinmath.lowering.precision import computes, words_of_fp16
from napkinmath.ops.whole_scores import MATH_PATH, MATH_PATH_SINGLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.job_keys import JobKey


def findings(e: Estimate) -> tuple[Finding, ...]:
    """What costs memory without being asked for, most expensive first."""
    found = [
        finding
        for rule in (
            _withheld,
            _starved,
            _unknown_rows,
            _too_long,
            _two_vocabularies,
            _no_flash,
            _left_eager,
            _inactive_checkpointing,
            _no_wheel,
            _no_bf16,
            _no_fp8,
            _scaled_loss,
            _left_whole,
            _wide_adapters,
            _step_peak,
            _packed_whole,
            _host_too_small,
            _scores,
            _logits,
        )
        if (finding := rule(e)) is not None
    ]
    found += idle_switches(e)
    return (*_not_priced(e), *refused_runs(e), *sorted(found, key=lambda f: -f.nbytes))


def _not_priced(e: Estimate) -> list[Finding]:
    """What two job files say differently, and the keys that change memory or time and are left out
    of the figures."""
    if e.job_keys is None:
        return []
    return [
        *(Finding(text=sentence) for sentence in e.job_keys.differing),
        *(
            Finding(text=f"{key.name} is not priced: {key.why}{_differs(key)}")
            for key in e.job_keys.of(KeyUse.NOT_PRICED)
        ),
    ]


def _differs(key: JobKey) -> str:
    """'; a run takes more memory, less time'."""
    parts = [
        f"{change.value} {what}"
        for change, what in ((key.memory, "memory"), (key.time, "time"))
        if change is not Difference.NONE
    ]
    return f"; a run takes {', '.join(parts)}" if parts else ""


def _unknown_rows(e: Estimate) -> Finding | None:
    if not has_unknown_rows(e):
        return None
    return Finding(
        text=f"how many packed rows {e.config.run.samples:,} samples make is not known, so neither"
        " are the steps of the run; add --lengths FILE, or --max-steps"
    )


def _withheld(e: Estimate) -> Finding | None:
    if not e.withheld:
        return None
    way = (
        "measure the speeds again on an idle device with `estimate calibrate`"
        if e.calibration is not None
        else "report this configuration"
    )
    return Finding(text=f"time is withheld: {e.withheld}; {way}")


def _starved(e: Estimate) -> Finding | None:
    """A step that waits for its samples, which the step's time does not have in it."""
    loader = e.config.loader
    if loader.workers and not loader.samples_per_s:
        return Finding(
            text="--dataloader-workers says nothing of a step without --samples-per-s-per-worker"
        )
    if not loader.samples_per_s or e.time is None or e.hardware is None:
        return None
    from napkinmath.answers.waiting_for_samples import starved

    return starved(e, e.time, e.hardware)


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


def _two_vocabularies(e: Estimate) -> Finding | None:
    """Distillation compares logits word by word; trl gkd_trainer.py divides tensors of one shape."""
    teacher = e.ranks.policy.teacher
    if teacher is None or e.config.workload.rule.head is not Head.STUDENT:
        return None
    own, taught = (dict(spec.symbols).get("v", 0) for spec in (e.spec, teacher))
    if own == taught:
        return None
    return Finding(
        text=(
            f"the teacher {teacher.name} has a vocabulary of {taught:,} and {e.spec.name} of"
            f" {own:,}: their logits cannot be compared and a run fails; take a teacher with the"
            " same tokenizer"
        )
    )


def _no_flash(e: Estimate) -> Finding | None:
    if e.config.attention not in (Attention.FLASH2, Attention.FLASH3):
        return None
    policy = e.step.policy
    if policy.attended_dtype(policy.rule.parameters) is FP32:
        return Finding(
            text=(
                "flash-attn takes fp16 and bf16 alone and q, k, v are fp32, so a run fails; priced"
                " with SDPA's kernels"
            )
        )
    gpu = e.hardware.gpu if e.hardware is not None else None
    if gpu is None or gpu.vendor != "nvidia" or not gpu.compute_capability:
        return None
    if e.config.attention is Attention.FLASH3 and gpu.architecture != "hopper":
        return Finding(
            text=(
                f"flash-attn 3 is for Hopper and {gpu.name} has {gpu.compute_capability}: priced as"
                " flash-attn 2; use --attention flash2"
            )
        )
    if int(gpu.compute_capability.split(".")[0]) >= 8:
        return None
    return Finding(
        text=(
            f"flash-attn 2 needs compute capability 8.0 and {gpu.name} has"
            f" {gpu.compute_capability}: use --attention sdpa"
        )
    )


def _left_eager(e: Estimate) -> Finding | None:
    if not e.config.compile:
        return None
    from napkinmath.lowering.uncompiled import leaves_layers_eager

    if not leaves_layers_eager(e.step, e.ranks.policy):
        return None
    return Finding(
        text=(
            "--compile reaches no checkpointed layer: in each, transformers reads position ids on"
            " the host before flash-attn, and torch runs a checkpoint eagerly that it cannot trace;"
            " use --attention sdpa, no checkpointing, or unpacked batches of two and more"
        )
    )


def _inactive_checkpointing(e: Estimate) -> Finding | None:
    config = e.config
    if config.training_mode or config.recompute.kind is RecomputeKind.NONE:
        return None
    cost = e.compared(config.replace(training_mode=True))[0]
    inactive = "checkpointing was requested but the model is in eval mode, so it is inactive"
    if cost <= 0:  # in training mode dropout's masks would take more than checkpointing saves
        return Finding(text=f"{inactive}; call model.train()")
    return Finding(
        text=f"{inactive}: {format_bytes(cost)} more; call model.train()",
        nbytes=cost,
    )


def _no_wheel(e: Estimate) -> Finding | None:
    """torch's default wheels of today are for CUDA 13, which ends Volta and what came before; those
    for CUDA 12.6 have kernels from 5.0 on (pytorch .ci/manywheel/build_cuda.sh)."""
    gpu = e.hardware.gpu if e.hardware is not None else None
    if gpu is None or gpu.vendor != "nvidia" or not is_of_today(e.step.policy.stack):
        return None
    if gpu.compute_capability not in ("6.0", "6.1", "7.0"):
        return None
    return Finding(
        text=(
            f"torch's default wheels since 2.11 are for CUDA 13, which has no kernels for"
            f" {gpu.name} (compute capability {gpu.compute_capability}): install those for CUDA 12.6"
        )
    )


def _no_bf16(e: Estimate) -> Finding | None:
    if e.hardware is None or computes(e.hardware.gpu, "bf16"):
        return None
    if (e.step.policy.autocast or e.step.policy.loaded_dtype) is not BF16:
        return None
    return Finding(
        text=(
            f"{e.hardware.gpu.name} has no matrix units for bf16, which runs without them or fails:"
            f" use {words_of_fp16(e.config)}, whose loss is scaled, since fp16 ends at 65,504 and"
            " loses gradients below 6e-8"
        )
    )


def _no_fp8(e: Estimate) -> Finding | None:
    gpu = e.hardware.gpu if e.hardware is not None else None
    if e.step.policy.rule.fp8_block is None or gpu is None:
        return None
    if not gpu.dense_flops or gpu.supports("fp8"):
        return None
    way = "--precision bf16" if gpu.supports("bf16") else words_of_fp16(e.config)
    return Finding(
        text=(
            f"{gpu.name} has no matrix units for FP8, so a run fails: use {way}; products"
            " are priced at the rate of 16 bits"
        )
    )


def _scaled_loss(e: Estimate) -> Finding | None:
    if e.config.precision is not Precision.FP16 or e.config.quantization is not None:
        return None
    masters = (
        e.step.policy.stack.optimizer.master_weights or e.config.parallel.data_parallel.is_zero
    )
    if e.config.adapter is not None or masters:  # such engines scale the loss of fp16 themselves
        return None
    return Finding(
        text=(
            "fp16 weights with fp16 gradients take no loss scaling, so gradients below 6e-8 are"
            " lost and values above 65,504 overflow: --precision fp16-amp scales the loss"
        )
    )


# by kind of weight, why quantization leaves it as it is
_LEFT_WHOLE = {
    "experts": (
        "experts are 3-D parameters, which quantization leaves alone (it replaces nn.Linear;"
        " --quantize-experts is axolotl's quantize_moe_experts)"
    ),
    "linear subclass": (
        "linears are a subclass of nn.Linear, which transformers 5 does not quantize (transformers 4"
        " did: --stack hf-4.48)"
    ),
}
_LEFT_WHOLE["linear that adds its bias"] = _LEFT_WHOLE["linear subclass"]


def _left_whole(e: Estimate) -> Finding | None:
    if e.config.quantization is None:
        return None
    bind, held, dtype, found = Bindings(e.step.symbols), 0, "", ""
    for run in e.step.runs:
        for weight in run.block.weights:
            if weight.kind in _LEFT_WHOLE and not weight.constants and not weight.trainable:
                held += run.count * bind.extended(dict(run.stage.symbols))(weight.tensor.nbytes)
                dtype, found = weight.tensor.dtype.name, _LEFT_WHOLE[weight.kind]
    if not held:
        return None
    return Finding(text=f"{found}: they take {format_bytes(held)} in {dtype}", nbytes=held)


def _wide_adapters(e: Estimate) -> Finding | None:
    changed = adapter_bf16(e.config)
    if changed is None or e.step.policy.stack.model.bare_adapters:
        return None
    cost = e.compared(changed)[0]
    if cost < LEAST_SAVING * e.peak.nbytes:
        return None
    return Finding(
        text=(
            "adapters are fp32, so the input of each adapted linear is kept in fp32 too: bf16"
            f" adapters save {format_bytes(cost)}"
        ),
        nbytes=cost,
    )


def _host_too_small(e: Estimate) -> Finding | None:
    if host_verdict(e) is not Verdict.DOES_NOT_FIT:
        return None
    from napkinmath.answers.host_memory import host_too_small

    return host_too_small(e)


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


def _packed_whole(e: Estimate) -> Finding | None:
    winner, kind = next(iter(e.phase_peaks)), e.config.parallel.data_parallel
    if winner is not Phase.LOAD or not (kind.is_fsdp or kind is DataParallel.ZERO3):
        return None
    from napkinmath.lowering.data_parallel.stored import packs_on_device

    if not packs_on_device(e.ranks.policy):
        return None
    peaks = list(e.phase_peaks.values())
    cost = peaks[0].nbytes - peaks[1].nbytes
    return Finding(
        text=(
            "loading sets the peak: transformers 5 packs the whole model on every GPU before it is"
            " sharded; transformers 4, which keeps it in host memory until then (--stack"
            f" {latest_before((5, 0)).name}), saves {format_bytes(cost)}"
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
        cost, way = e.compared(config.replace(attention=Attention.AUTO))[0], "--attention auto"
    else:
        text = f"q, k, v are fp32 with grouped heads, so {scores}"
        cost, way = e.compared(config.replace(precision=Precision.BF16_AUTOCAST))[0], "autocast"
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
