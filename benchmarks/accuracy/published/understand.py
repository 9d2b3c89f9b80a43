"""From a row to what is priced: model, training configuration, stack, GPU, and what had to be
assumed on the way."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import cast

from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.cluster import Cluster
from napkinmath.config.hardware import Hardware
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import (
    AdapterKind,
    Attention,
    Batch,
    Kernels,
    Loss,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.model_spec import ModelSpec

from published.data_sets import named_lengths
from published.dates import arxiv_date
from published.era import Era
from published.identify import hardware_of, model_of
from published.machines import ONE_GPU, machine_of, place_of, supplemented
from published.methods import adapter_of, precision_of, quantization_of, workload_of
from published.optimizers import offload_of_row, optimizer_of
from published.parallel import batch_of, in_fsdp_types, offload_of, spread_of, under_engine
from published.rows import Row, Unreadable
from published.sources import era_of

_LENGTHS = r"mean\s+(?:about\s+|~\s*)?([\d.]+)\s*(?:(?:\+-|\+/-|±)\s*([\d.]+)\s+)?tokens"
# Standard deviation over mean of the lengths of instructions where only the mean is said: Alpaca's is
# 0.6 (published/data_sets.py), those that tables give 0.3 to 0.7.
_USUAL_SPREAD = 0.5
_CAP = re.compile(
    r"\bcap of lengths\b|\b(?:capped|cut|truncated) at\b|\bmax(?:imum)? (?:sequence )?length\b"
)
_STEPS = re.compile(r"\b\d+ steps\b")
_USUAL_LENGTH = 2048  # where neither the table nor the tool says
_NO = r"^(no(ne)?|off|false|0|disabled?|without|w/o|n/a|-|not used|no .*)$"
# What selective checkpointing by operation keeps: attention and every second product (torchtitan
# parallelize_llama.py _apply_ac_to_transformer_block).
_EVERY_SECOND_PRODUCT = ("sdpa", "q_proj", "v_proj", "gate_proj", "down_proj")
# Operations of a GPT layer outside of attention's scores, which Megatron-LM's selective
# recomputation keeps.
_ALL_BUT_SCORES = ("linear", "norm", "gelu", "gate", "bias", "add")
_FLASH_SINCE = (2022, 5)  # arXiv 2205.14135, FlashAttention
_NEGATED = r"^(no\b|none\b|off\b|false\b|without\b|w/o\b|disabled\b)"


@dataclass(frozen=True)
class Job:
    """A row understood: everything that `estimate` needs, and what was assumed on the way (kind of
    assumption -> sentence)."""

    row: Row
    spec: ModelSpec
    config: TrainConfig
    hardware: Hardware
    era: Era
    assumed: dict[str, str] = field(default_factory=dict)
    cluster: Cluster | None = None
    """The machines of a run on several GPUs."""
    place: str = ONE_GPU


def understand(row: Row, *, blind: bool = False, memory: bool = False) -> Job:
    """The job of a row; raises Unreadable with the reason where it cannot be expressed. `blind`
    uses the generic rules only; `memory` is for the row's memory, else for its speed."""
    row = supplemented(row, blind=blind)
    if memory and "empty_cache" in row.words("notes"):
        # the longest batch then finds no fragments of others, and is what memory is needed for
        row = Row({**row.cells, "notes": _without_lengths(row["notes"])})
    if memory:  # the longest batch needs it, not the mean one
        row = Row({**row.cells, "notes": row["notes"].replace("samples/s total", "")})
    try:
        return _understand(row, blind)
    except InputError as error:
        raise Unreadable(str(error)) from error


def _understand(row: Row, blind: bool) -> Job:
    era = era_of(row, blind=blind)
    assumed: dict[str, str] = {} if era.known else {"stack": f"stack {era.stack}: {era.name}"}
    if era.guess:
        assumed[era.guess] = f"{era.guess} of {era.name}: nobody has looked into this source"
    if era.own_loop:
        assumed["loop"] = "what a loop of one's own does between steps is not stated"
    spec, key = model_of(row, era, assumed)
    hardware = hardware_of(row, era, assumed)
    adapter = adapter_of(row, key, spec, era, assumed)
    if (
        adapter is None
        and not era.known
        and not re.search(r"amp|mixed|true|pure|fp32|float32|weights", row.words("precision"))
    ):
        assumed["weights"] = (
            "weights of the type computed in: the table does not say whether fp32 ones are kept"
        )
    in_backward = bool(
        re.search(r"in[_ -]b(?:ac)?kwd|in[_ -]bwd|in[_ -]backward|lomo", row.words("optimizer"))
    )
    steps = row.whole_or("grad_accum", 1, assumed)
    quantization = quantization_of(row, adapter, era)
    recompute = _recompute(
        row, era, assumed, prepared=quantization is not None and quantization.kbit_preparation
    )
    if in_backward and steps > 1:
        assumed["accumulation"] = "no accumulation: gradients are freed in the backward"
        steps = 1
    if (
        adapter is not None
        and adapter.kind is AdapterKind.PREFIX
        and recompute.kind is not RecomputeKind.NONE
    ):
        assumed["checkpointing"] = "no checkpointing: PEFT refuses it with prefix tuning"
        recompute = RecomputeConfig()
    config = TrainConfig(
        micro_batch_size=row.whole("micro_batch", 1),
        sequence_length=_sequence(row, era, assumed),
        gradient_accumulation_steps=steps,
        precision=precision_of(row, era, adapter, hardware),
        adapter=adapter,
        quantization=quantization,
        recompute=recompute,
        offload=offload_of_row(row, era, full=adapter is None, assumed=assumed),
        optimizer=optimizer_of(row, era, assumed),
        optimizer_in_backward=in_backward,
        attention=_attention(row, era, assumed),
        loss=_loss(row, era),
        kernels=Kernels(era.kernels),
        compile=_compiles(row, era),
        stack=era.stack,
        batch=_batch(row, _attention(row, era, assumed)),
        clip_gradients=era.clips,
        workload=workload_of(row),
    )
    length = cast(int, config.sequence_length)  # a row's sizes are numbers, never symbols
    if config.batch.lengths:
        lengths = shorter_than(length, config.batch.lengths, era, assumed)
        config = config.replace(batch=config.batch.replace(lengths=lengths))
    cluster = None
    if row.whole("n_gpus", 1) > 1:
        spread = spread_of(row, hardware, spec, config, era, assumed, machine_of(row, blind=blind))
        cluster, hardware = spread.cluster, spread.cluster.hardware
        micro, steps = batch_of(row, spread.parallel, length, assumed)
        config = config.replace(
            parallel=spread.parallel,
            offload=offload_of(row, config.offload, spread.parallel.data_parallel),
            micro_batch_size=micro,
            gradient_accumulation_steps=steps,
        )
        config = under_engine(in_fsdp_types(config, era), row)
    elif re.search(r"fsdp-?2|fully_shard", row.words("sharding")):
        # on one rank too it keeps, casts and reduces its units (torch _fsdp_param_group.py)
        alone = config.parallel.replace(data_parallel=DataParallel.FSDP2)
        config = in_fsdp_types(config.replace(parallel=alone), era)
    return Job(row, spec, config, hardware, era, assumed, cluster, place_of(row, blind=blind))


def _compiles(row: Row, era: Era) -> bool:
    """Whether the model is compiled: where the row says so, or its library's FP8 asks for it."""
    if not row.words("compile").strip() and era.compiles_fp8:
        return bool(re.search(r"fp8|float8", row.words("precision")))
    return _is_on(row.words("compile"))


def _is_on(text: str) -> bool:
    return bool(
        re.search(r"\b(yes|true|on|y|1|compile[d]?|inductor|max-autotune|default)\b", text)
    ) and not re.search(_NEGATED, text.strip())


# ---------------------------------------------------------------- lengths


def _sequence(row: Row, era: Era, assumed: dict[str, str]) -> int:
    if row.number("seq_len") is not None:
        if _CAP.search(row.words("notes")) and row.words("packed").strip() in ("", "no", "none"):
            assumed["cap"] = "sequences as long as the limit: lengths below it are not stated"
        return row.whole("seq_len")
    samples = re.search(r"([\d.]+) samples/s total", row.words("notes"))
    tokens = row.number("tokens_per_s_per_gpu")
    if samples and tokens and float(samples[1]):  # what a sample's tokens are, padding included
        if re.search(r"variable length", row.words("notes")) and _STEPS.search(row.words("notes")):
            assumed["first batch"] = (
                "tokens/s of a Trainer of so many steps: the tokens of its first batch stand for"
                " those of all (transformers trainer.py num_tokens)"
            )
        return max(1, round(tokens * row.whole("n_gpus", 1) / float(samples[1])))
    if era.sequence_length:
        known = re.search("sample|review|truncated|comparison", era.sequence_reason)
        assumed["sequence" if known else "length"] = (
            f"sequence length {era.sequence_length}: {era.sequence_reason}"
        )
        return era.sequence_length
    assumed["length"] = f"sequence length {_USUAL_LENGTH}: not stated"
    return _USUAL_LENGTH


def _batch(row: Row, attention: Attention) -> Batch:
    """Packed, or padded with the lengths that "mean A +- B tokens" in the notes describes.

    Only flash-attn knows where packed samples end. Elsewhere they run as one sequence, without a
    mask of their own: blocks of concatenated text, or torchtune's flex attention
    (modules/attention_utils.py _sdpa_or_flex_attention).
    """
    if not (attention is Attention.FLASH1 or attention.needs_no_mask) and re.match(
        r"yes|true|packed|on|1", row.words("packed").strip()
    ):
        return Batch()
    if re.match(r"yes|true|packed|on|1", row.words("packed").strip()):
        # Documents of a pack are told apart by a mask, which SDPA's flash kernel refuses: where it
        # ran, sequences are simply full.
        return Batch(packing=not re.search(r"sdpa.*flash", row.words("attention")))
    found = re.search(_LENGTHS, row.words("notes"))
    if found and float(found[1]) > 0:
        mean, spread = float(found[1]), float(found[2] or 0)
        if spread:
            return Batch(lengths=sample_lengths(mean, spread))
        # a limit is set where some samples reach it
        longest = (row.whole("seq_len", 1),) if row.states("seq_len") else ()
        return Batch(lengths=(*sample_lengths(mean, mean * _USUAL_SPREAD), *longest))
    return Batch(lengths=named_lengths(row))


def _without_lengths(notes: str) -> str:
    return re.sub(_LENGTHS, "", notes, flags=re.IGNORECASE)


def sample_lengths(mean: float, deviation: float, count: int = 400) -> tuple[int, ...]:
    """A sample of a gamma distribution of that mean and deviation, whose shape token counts of
    documents roughly have."""
    from random import Random

    draw = Random(0)
    shape = (mean / deviation) ** 2
    return tuple(max(1, round(draw.gammavariate(shape, mean / shape))) for _ in range(count))


def shorter_than(
    limit: int, lengths: tuple[int, ...], era: Era, assumed: dict[str, str]
) -> tuple[int, ...]:
    """The lengths that a limit leaves: longer samples are left out, or cut to it."""
    if era.drops_long_samples:
        assumed["lengths"] = (
            "samples longer than the limit left out, the others padded to the batch's longest"
        )
        return tuple(n for n in lengths if n <= limit) or (limit,)
    return tuple(min(n, limit) for n in lengths)


# ---------------------------------------------------------------- step


def _recompute(row: Row, era: Era, assumed: dict[str, str], *, prepared: bool) -> RecomputeConfig:
    text = (
        row.words("checkpointing").strip()
        if row.states("checkpointing") or row.words("checkpointing").strip() in ("none", "-")
        else ""
    )
    if not text and (
        era.recomputes
        or (find_stack(era.stack).model.library == "litgpt" and row.whole("n_gpus", 1) > 1)
    ):  # lit-gpt finetune/lora.py: FSDPStrategy(activation_checkpointing_policy={Block})
        assumed["checkpointing"] = "full checkpointing: not stated, the tool's default"
        return RecomputeConfig(kind=RecomputeKind.FULL)
    if (
        not text and prepared
    ):  # peft utils/other.py prepare_model_for_kbit_training(use_gradient_checkpointing=True)
        assumed["checkpointing"] = "full checkpointing: not stated, what k-bit preparation turns on"
        return RecomputeConfig(kind=RecomputeKind.FULL)
    if not text:
        assumed["checkpointing"] = "no checkpointing: not stated"
        return RecomputeConfig()
    if re.match(_NEGATED, text) or re.search(_NO, text):
        return RecomputeConfig()
    one_of = re.search(r"every (?:(\d+)(?:nd|rd|th)|other|second)\b|selective layer\b", text)
    if (
        one_of
    ):  # torchtitan distributed/activation_checkpoint.py: layers 0, k, 2k, ..., by default k = 2
        return RecomputeConfig(kind=RecomputeKind.INTERLEAVED, every=int(one_of[1] or 2))
    every = re.search(r"every[ :_-]*(\d+)", text)
    if every:
        return RecomputeConfig(kind=RecomputeKind.EVERY, every=int(every[1]))
    if "sqrt" in text:
        return RecomputeConfig(kind=RecomputeKind.SQRT)
    if "selective" in text and find_stack(era.stack).engine.own_stages:
        return _core_attention(row, era, assumed)
    if "selective" in text:
        return RecomputeConfig(
            kind=RecomputeKind.SELECTIVE,
            keep=_EVERY_SECOND_PRODUCT if re.search(r"\bop\b|\bsac\b", text) else ("sdpa",),
        )
    return RecomputeConfig(
        kind=RecomputeKind.FULL,
        reentrant=bool(re.search(r"(?<!non)(?<!non-)(?<!no[ _-])\breentrant", text)),
    )


def _core_attention(row: Row, era: Era, assumed: dict[str, str]) -> RecomputeConfig:
    """Megatron-LM's selective recomputation: scores and softmax (core/transformer/attention.py
    _checkpointed_attention_forward), which a fused kernel does itself."""
    if _attention(row, era, assumed) not in (Attention.EAGER, Attention.MATH):
        return RecomputeConfig()
    return RecomputeConfig(kind=RecomputeKind.SELECTIVE, keep=_ALL_BUT_SCORES)


def _early_nemo(row: Row) -> bool:
    """Whether a container of NeMo is named, of before its documents had cuDNN's attention on Hopper
    beside FlashAttention 2 (NVIDIA/NeMo PR 9188 of May 2024, memory_optimizations.rst)."""
    found = re.search(r"\bnemo[ _:-]?(2\d)\.(\d\d)", row.words("source", "notes"))
    return found is not None and (int(found[1]), int(found[2])) < (24, 6)


def _attention(row: Row, era: Era, assumed: dict[str, str]) -> Attention:
    text = row.words("attention")
    if re.search(r"\bte\b|transformer ?engine", text):
        named = re.search(r"flash[ _-]?(attn|attention)?[ _-]?2", text) or _early_nemo(row)
        # its own order of kernels, which the stack knows
        return Attention.FLASH2 if named else Attention.AUTO
    if "cudnn" in text:
        return Attention.CUDNN
    if re.search(r"flash|\bfa-?[234]?\b", text) and not re.search(r"(no|without|w/o) flash", text):
        if era.first_flash and not re.search(r"2|sdpa", text):
            return Attention.FLASH1
        if re.search(r"flash[ _-]?(attn|attention)?[ _-]?3|\bfa-?3\b", text):
            return Attention.FLASH3
        return Attention.FLASH if "sdpa" in text else Attention.FLASH2
    if "flex" in text:
        return Attention.FLEX
    if re.search(r"efficient|xformers|mem-eff", text):
        return Attention.EFFICIENT
    if re.search(r"eager|naive|vanilla|manual|(no|without|w/o) flash", text):
        return Attention.EAGER
    if "math" in text:
        return Attention.MATH
    if (
        not text.strip()
        and (arxiv_date(row.words("source", "notes")) or _FLASH_SINCE) < _FLASH_SINCE
    ):
        assumed["attention"] = (
            "attention: whole score matrices, the run is older than fused kernels"
        )
        return Attention.EAGER
    if not text.strip():
        assumed["attention"] = "attention: what the stack picks; not stated"
    return Attention.SDPA if re.search(r"sdpa|scaled_dot|torch", text) else Attention.AUTO


def _loss(row: Row, era: Era) -> Loss:
    notes = row.words("notes")
    if re.search(rf"\b(no|without|w/o|non)[- ]({_FUSED}|{_CHUNKED})\b", notes):
        return Loss.HF
    if _beside(_CHUNKED, rf"{_LOSS}|{_HEAD}", notes):
        return Loss.CHUNKED
    named = r"liger fused linear|foak-liger|kernels-liger|cut[- ]cross[- ]entropy|\bcce\b"
    both = _beside(_FUSED, _HEAD, notes) and re.search(_LOSS, notes)
    return Loss.FUSED if era.kernels == "liger" or both or re.search(named, notes) else Loss.HF


_FUSED, _CHUNKED = r"fused|liger", r"chunked|tiled"
_LOSS = r"cross[-_ ]?entropy|\bf?l?ce\b|\bloss\b"
_HEAD = r"linear|lm[-_ ]?head|\bhead\b|output layer|logits"


def _beside(word: str, other: str, text: str) -> bool:
    """Whether two words stand within three words of one another, in either order."""
    gap = r"(?:[\s_+&/-]+\w+){0,2}?[\s_+&/-]+"
    return bool(re.search(rf"(?:{word}){gap}(?:{other})|(?:{other}){gap}(?:{word})", text))
