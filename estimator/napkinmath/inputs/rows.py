"""Most keys of a trainer's file are an option under another name: a row each, with the value that
the tool takes where the file says nothing."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from napkinmath.inputs.foreign import ForeignJob

# What torch's optimizers are called, in lower case.
OPTIMIZERS: dict[str, object] = {
    "adam": "adamw",
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion": "lion",
    "muon": "muon",
    "adamw8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "pagedadamw": "paged-adamw",
    "pagedadamw8bit": "paged-adamw-8bit",
}


# Modules of a language model that all-linear leaves alone.
_NO_LINEARS = {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings"}


class Row(NamedTuple):
    """One key, or several names of it separated by spaces, the newest first."""

    option: str
    keys: str
    default: object = None
    words: Mapping[str, object] | None = None
    """The tool's words in lower case -> ours; None where a value is taken as it is."""


_DISPATCHERS = ("allgather", "alltoall", "flex")
_MEGATRONS = "expert_model_parallel_size"
_DISPATCHER = "moe_token_dispatcher_type"
WITHIN = "expert_tensor_parallel_size"
"""Megatron-Core's ranks that share one expert."""


def give_targets(job: ForeignJob, targets: object, parameters: str) -> None:
    """The modules that have adapters, and with them the experts' own parameters under a key of
    `target_parameters` (peft tuners/lora/config.py). Those of single layers stay named."""
    named = [str(name) for name in values.listed(job.content.get(parameters) or [])]
    comma = [x for x in map(str, values.listed(targets or [])) if x.endswith(",")]
    if comma:
        job.note(
            f"{comma[0]!r} ends in a comma, and PEFT finds no module of that name: it adapts those"
            " of the other names alone; leave out the commas"
        )
    every = targets in ("all-linear", ["all-linear"])
    if not named or every or any(part.isdecimal() for name in named for part in name.split(".")):
        job.give("targets", targets)
        return
    job.take(parameters)
    experts = [x if "experts." in x or x.endswith(".weight") else f"experts.{x}" for x in named]
    job.give("targets", [*map(str, values.listed(targets or [])), *experts])


def give_both_targets(job: ForeignJob, targets: object, saved: object) -> None:
    """What axolotl's lora_target_linear has beside it: it adapts the linears and what is named
    (loaders/adapter.py _build_peft_lora_config), but for what is trained whole, which PEFT leaves
    without an adapter (peft tuners/tuners_utils.py inject_adapter)."""
    whole = {str(name) for name in values.listed(saved or [])}
    named = sorted({str(name) for name in values.listed(targets)} & _NO_LINEARS - whole)
    if not named:
        job.note("lora_target_linear and lora_target_modules both given: all linears taken")
        return
    job.leave_out(
        "lora_target_modules",
        f"beside all linears, which are priced, {', '.join(named)} have adapters; name all targets",
        memory=Difference.MORE,
        time=Difference.MORE,
        option="targets",
    )


def read_rows(job: ForeignJob, rows: Iterable[Row]) -> None:
    """Gives the options of rows; a default becomes a note."""
    for row in rows:
        names = row.keys.split()
        value = job.take(*names)
        if value is not None:
            job.give(row.option, value if row.words is None else word_of(job, row, value))
        elif row.default is not None:
            job.assume(row.option, row.default, f"{job.tool}'s {names[0]}")


def word_of(job: ForeignJob, row: Row, value: object) -> object:
    """Our word for a tool's; None where an option beside the file settles it. Raises InputError."""
    words = row.words or {}
    key = str(value).strip().lower()
    if key not in words:
        known = ", ".join(words)
        job.refuse(
            row.option,
            f"{row.keys.split()[0]} {shown(value)} of {job.tool} is not modelled (known: {known})",
        )
    return words.get(key)


def degree(job: ForeignJob, *keys: str) -> int:
    """Ranks of an axis of the mesh; 1 where it is absent, off, or what the others leave (-1)."""
    value = job.take(*keys)
    return 1 if value in (None, 0, -1, "0", "-1") else values.count(value, keys[0])


def give_experts(
    job: ForeignJob,
    key: str,
    *,
    tensor: int,
    data: int,
    within: str = "",
    usual: int = 0,
    sends: str = "",
) -> None:
    """Ranks over which experts are spread, and ranks that share one: the key `within`, where it says
    nothing `usual`, else the tensor-parallel ones (Megatron-LM core/model_parallel_config.py
    expert_tensor_parallel_size). `data` ranks hold the same of all else; `sends` is the tool's
    usual dispatcher."""
    asked = degree(job, key)
    size, shared = asked, degree(job, within) if job.content.get(within) else usual or tensor
    ranks = data * tensor
    if asked == 1 or ranks % shared:
        shared = tensor
    if ranks // shared % asked:
        size = gcd(asked, ranks // shared)
        job.leave_out(
            key,
            f"experts on {asked} ranks need a multiple of {asked * shared} GPUs a stage, not"
            f" {ranks}; they are priced on {size}",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    job.give("ep", size if size > 1 else None)
    job.give("etp", shared if shared != tensor and size > 1 else None)
    own = key.removesuffix(_MEGATRONS)
    if own == key:
        return
    places = (own, f"{own}override_transformer_config.")
    said = [prefix for prefix in places if f"{prefix}{_DISPATCHER}" in job.content]
    for prefix in said or places[:1]:
        _give_dispatch(job, prefix, spread=size > 1, usual=sends)


def _give_dispatch(job: ForeignJob, prefix: str, *, spread: bool, usual: str) -> None:
    """How Megatron-Core sends tokens to experts: by all-to-all, once to a rank (token_dispatcher.py
    MoEFlexTokenDispatcher, whose backends are DeepEP and HybridEP), or all to all ranks."""
    name = f"{prefix}{_DISPATCHER}"
    kind = job.content.get(name, usual)
    if kind not in _DISPATCHERS:
        return
    job.take(name)
    if kind == "flex":
        job.take(f"{prefix}moe_enable_deepep", f"{prefix}moe_flex_dispatcher_backend")
    if name in job.content:
        job.give("deepep", kind == "flex" if spread else None)
    job.give("ep_all_gather", True if kind == "allgather" and spread else None)


_DEGREES = ("tp", "pp", "cp")  # which leave other data-parallel ranks to the same step


def give_step(job: ForeignJob, whole: int, *, rows: int, ranks: int | None) -> None:
    """Micro-steps of a step of `whole` samples over all data-parallel ranks. Where the file does
    not say how many there are, or flags say otherwise, the step is given, and they say the rest."""
    given = str(job.given.get("bs", rows))
    rows = int(given) if given.isdecimal() and int(given) else rows
    divides = ranks is None and whole % rows == 0
    if divides or any(option in job.given for option in _DEGREES):
        job.give("global_batch", whole)
    else:
        job.give("grad_accum", max(1, whole // (rows * (ranks or 1))))


def kernels_before_compiler(job: ForeignJob, key: str) -> None:
    """A library's kernels stay as they are under torch.compile, which fuses the rest: the kernels
    are priced, and `key`, which asks for the compiler, is named."""
    if "kernels" in job.options and job.options.pop("compile", False):
        job.leave_out(
            key,
            "what the compiler fuses beside the patched kernels is not priced",
            memory=Difference.EITHER,
            time=Difference.LESS,
            of_activations=True,
        )


def give_liger(job: ForeignJob, switches: Mapping[str, object]) -> None:
    """Liger's operations but for those that keywords of its functions switch off."""
    from napkinmath.catalog.kernels import LIGER_SWITCHES

    off = {part for name, part in LIGER_SWITCHES.items() if switches.get(name) is False}
    give_parts(job, "liger", set(LIGER_SWITCHES.values()) - off)
    if switches.get("cross_entropy") is True:
        name_ligers_loss(job, "cross_entropy")


def give_parts(job: ForeignJob, kernels: str, parts: Iterable[str]) -> None:
    """Operations of a set of kernels; nothing where none of them runs."""
    from napkinmath.catalog.kernels import KERNEL_SETS

    row, chosen = KERNEL_SETS[kernels], set(parts)
    if not chosen:
        return
    job.give("kernels", kernels)
    if chosen != set(row.parts):
        job.give("kernel_parts", [part for part in row.switches if part in chosen])


def name_ligers_loss(job: ForeignJob, key: str) -> None:
    """Liger's loss of whole logits writes their gradient over them, which is not priced."""
    job.leave_out(
        key,
        "Liger's loss of whole logits is priced as the library's",
        memory=Difference.LESS,
        time=Difference.LESS,
        option="loss",
    )


def world_size(job: ForeignJob, *, per_node: str = "", nodes: str = "") -> int | None:
    """GPUs in all: as given beside the file, else what its keys multiply to; None where neither
    says."""
    from napkinmath.inputs.parallel_options import number_and_type

    each = job.take(*per_node.split()) if per_node else None
    machines = job.take(*nodes.split()) if nodes else None
    if "gpus" in job.given:
        return number_and_type(job.given)[0]
    if each is None or str(each) in ("auto", "-1", "0"):
        return None
    several = 1 if machines is None else values.count(machines, nodes.split()[0])
    return values.count(each, per_node.split()[0]) * several
