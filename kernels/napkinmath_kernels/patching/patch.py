"""`patch` and `unpatch`: this package's kernels inside a Hugging Face model, reversibly and one
model at a time.

Forwards are set on the model's own modules; attention and loss go through transformers'
registration interfaces. Importing does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..checkpoint import CheckpointHandle, Recompute, checkpoint_layers
from ..checkpoint.layers import set_forward
from ..checkpoint.tiled import TiledForward
from ..errors import KernelInputError
from ..ops.gated import ACTIVATIONS, Activation
from . import attention as attention_interface
from . import experts, forwards, heads, trl_head
from .deferred_logits import CausalLmLoss, HeadForward, LabelWatch
from .embeddings import EightBitEmbedding, HostEmbedding, move_to_host, quantize_in_place
from .families import FAMILIES, ModelFamily
from .linears import is_worth_fusing

_MARK = "_napkinmath_patch"
#: What transformers calls our implementations.
_ATTENTIONS = {"napkinmath": attention_interface.NAME, "auto": attention_interface.AUTO}


@dataclass
class PatchReport:
    """What was replaced, by kind, as module names, and what was left alone and why; of
    `attention="auto"` also what it picked so far, by shape."""

    replaced: dict[str, list[str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    picked: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        rows = [
            f"{kind:<12} {len(names):>4}  {names[0]}{' ...' if len(names) > 1 else ''}"
            for kind, names in self.replaced.items()
        ]
        kept = [f"kept         {name}: {reason}" for name, reason in self.kept.items()]
        picked = [f"picked       {shape}: {what}" for shape, what in self.picked.items()]
        return "\n".join(rows + kept + picked)

    def _note(self, kind: str, name: str) -> None:
        self.replaced.setdefault(kind, []).append(name)

    def _set_forward(
        self, kind: str, name: str, module: torch.nn.Module, forward: Callable[..., Any]
    ) -> None:
        self._replace(module, forward)
        self._note(kind, name)

    def _replace(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self._undo.append(functools.partial(set_forward, module, module.__dict__.get("forward")))
        module.forward = forward  # type: ignore[method-assign]


def _causal_model(model: Any) -> Any:
    """The transformers model inside PEFT's wrapper, or the model itself."""
    return (
        model.get_base_model()
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        else model
    )


def _family(model: torch.nn.Module) -> ModelFamily:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        given = f"model_type {kind!r} ({type(model).__name__})"
        raise KernelInputError(
            "patch",
            given,
            ", ".join(FAMILIES),
            "the model unpatched, or its modules replaced by hand",
        )
    return FAMILIES[kind]


def _activation(config: Any) -> Activation:
    name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if name not in ACTIVATIONS:
        raise KernelInputError(
            "patch", f"activation {name!r}", ", ".join(ACTIVATIONS), "patch(..., mlp=False)"
        )
    return ACTIVATIONS[name]


def _named(
    model: torch.nn.Module, class_name: str, required: bool = True
) -> list[tuple[str, torch.nn.Module]]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.removeprefix("Parametrized") == class_name
    ]
    if not found and required:
        raise KernelInputError(
            "patch",
            f"no {class_name} in {type(model).__name__}",
            "the classes of its model_type",
            "switch that part off",
        )
    return found


def _patch_norms(model: torch.nn.Module, family: ModelFamily, report: PatchReport) -> None:
    for name, module in _named(model, family.norm):
        report._set_forward(
            "rms_norm", name, module, forwards.NormForward.of(module, family.norm_offset)
        )


def _patch_rope(model: torch.nn.Module, family: ModelFamily, report: PatchReport) -> None:
    if "rope" in family.keeps:
        report.kept["rope"] = family.keeps["rope"]
        return
    for name, module in _named(model, family.attention):
        if forwards.RotatingForward.fits(module):
            report._set_forward("rope", name, module, forwards.RotatingForward(module))
        else:
            report.kept[f"{name} rope"] = "its forward does not call apply_rotary_pos_emb"


def _patch_mlp(model: torch.nn.Module, family: ModelFamily, report: PatchReport) -> None:
    if "mlp" in family.keeps:
        report.kept["mlp"] = family.keeps["mlp"]
        return
    activation = _activation(model.config)
    if family.experts:
        _patch_experts(model, family, activation, report)
    if not family.mlp:
        return
    make = forwards.FusedMlpForward if family.fused_gate_up else forwards.MlpForward
    for name, module in _named(model, family.mlp, required=not family.experts):
        report._set_forward("mlp", name, module, make(module, activation))


def _patch_tiles(
    model: torch.nn.Module, family: ModelFamily, tiles: int | Literal["auto"], report: PatchReport
) -> None:
    """Over the forwards that are there by now. A mixture keeps its own: a router's statistics are
    of whole batches, and experts see a part of the tokens each."""
    if family.experts:
        report.kept["experts tiles"] = "a mixture's products are of a part of the tokens already"
    num_tiles = 0 if tiles == "auto" else tiles
    for name, module in _named(model, family.mlp, required=False) if family.mlp else []:
        report._set_forward("mlp tiles", name, module, TiledForward(module.forward, num_tiles))


def _patch_experts(
    model: torch.nn.Module, family: ModelFamily, activation: Activation, report: PatchReport
) -> None:
    """Fuses the activation between the two products of all experts. The products themselves are
    transformers' own: by default one grouped product of all experts (`grouped_mm`).
    """
    for name, module in _named(model, family.experts):
        if not hasattr(module, "_apply_gate"):
            report.kept[f"{name} gate"] = "this transformers has no gate of experts to replace"
            continue
        before = module.__dict__.get("_apply_gate")
        report._undo.append(functools.partial(_set_gate, module, before))
        module._apply_gate = forwards.ExpertsGate(activation)  # type: ignore[assignment]
        report._note("experts gate", name)


def _set_gate(module: torch.nn.Module, gate: Any) -> None:
    module.__dict__.pop("_apply_gate", None)
    if gate is not None:
        module.__dict__["_apply_gate"] = gate


def _patch_expert_stacks(model: torch.nn.Module, family: ModelFamily, report: PatchReport) -> None:
    """Adapters on the experts' own parameters, and stacks in 4 bits; by the outermost of PEFT's
    wrappers."""
    known = {id(module) for _, module in _named(model, family.experts)}
    inner: set[int] = set()
    for name, module in model.named_modules():
        base = experts.experts_of(module)
        if id(base) not in known or id(base) in inner or not experts.is_worth_fusing(module):
            continue
        inner.add(id(base))
        if experts.grouped_forward() is None:
            report.kept[f"{name} stacks"] = "this transformers has no grouped forward of experts"
            continue
        forward = experts.ExpertsForward(module, module.forward)
        report._set_forward("experts qlora", name, module, forward)


def _patch_linears(model: torch.nn.Module, family: ModelFamily, report: PatchReport) -> None:
    if family.experts:
        _patch_expert_stacks(model, family, report)
    grouped: set[int] = set()
    for name, module in _named(model, family.attention):
        group: list[Any] = [getattr(module, part, None) for part in ("q_proj", "k_proj", "v_proj")]
        if any(linear is None or not is_worth_fusing(linear) for linear in group):
            continue
        shared = forwards.SharedProjections(group, [linear.forward for linear in group])
        for index, linear in enumerate(group):
            report._replace(linear, forwards.ProjectionForward(shared, index))
            grouped.add(id(linear))
        report._note("qlora_qkv", name)
    for name, module in model.named_modules():
        owner = name.rpartition(".")[0]
        if (
            ".lora_" in name
            or owner.endswith("base_layer")
            or name.endswith("base_layer")
            or id(module) in grouped
        ):
            continue
        if is_worth_fusing(module) and not name.endswith("lm_head"):
            report._set_forward(
                "qlora_linear", name, module, forwards.LinearForward(module, module.forward)
            )


def _patch_attention(model: Any, name: str, report: PatchReport) -> None:
    reason = attention_interface.refusal(model.config)
    if reason:
        report.kept["attention"] = reason
        return
    attention_interface.register()
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    report._undo.append(functools.partial(model.set_attn_implementation, before))
    report._note("attention", f"{before} -> {name}")
    if name == attention_interface.AUTO:
        report.picked = attention_interface.PICKER.picked


def _patch_loss(model: Any, report: PatchReport) -> None:
    head: Any = getattr(model, "lm_head", None)
    if not heads.reads_head(head):
        report.kept["loss"] = f"lm_head is {type(head).__name__}, not a linear without bias"
        return
    watch = LabelWatch()
    own = model.loss_function
    had_own = "_loss_function" in model.__dict__
    hook = model.register_forward_pre_hook(watch, with_kwargs=True)
    model.loss_function = CausalLmLoss(own)
    waits = trl_head.FusedHeadWatch()
    scored = [
        module.register_forward_pre_hook(waits, with_kwargs=True)
        for module in (model, model.get_decoder())
    ]
    report._undo += [hook.remove, functools.partial(_restore_loss, model, own if had_own else None)]
    report._undo += [*(one.remove for one in scored)]
    weight = heads.plain_weight(head)
    if weight is not None:  # TRL reads the base of a head with an adapter on it
        trl_head.take_head(weight)
        report._undo.append(functools.partial(trl_head.leave_head, weight))
    report._set_forward("loss", "lm_head", head, HeadForward(model, head, head.forward, watch))


def _restore_loss(model: Any, own: Any) -> None:
    model.__dict__.pop("_loss_function", None)
    if own is not None:
        model.loss_function = own


def _patch_checkpointing(
    model: Any, policies: Recompute | Sequence[Recompute], report: PatchReport
) -> None:
    layers = list(model.get_decoder().layers)
    chosen = [policies] * len(layers) if isinstance(policies, Recompute) else list(policies)
    handle: CheckpointHandle = checkpoint_layers(layers, chosen)
    report._undo.append(handle.remove)
    report.replaced["checkpoint"] = [f"layers.{i} {how.value}" for i, how in enumerate(chosen)]


def _patch_embeddings(model: Any, how: str, report: PatchReport) -> None:
    if how == "int8":
        embedding, dtype, back = quantize_in_place(model)
        kind, forward = "embedding in int8", EightBitEmbedding(embedding, dtype)
    else:
        embedding, back = move_to_host(model)
        kind, forward = "embedding on the host", HostEmbedding(embedding)
    report._undo.append(back)
    name = next(name for name, module in model.named_modules() if module is embedding)
    report._set_forward(kind, name, embedding, forward)


def patch(
    model: torch.nn.Module,
    *,
    norm: bool = True,
    rope: bool = True,
    mlp: bool = True,
    qlora: bool = True,
    loss: bool = True,
    attention: Literal["keep", "sdpa", "napkinmath", "auto"] = "keep",
    checkpoint: Recompute | Sequence[Recompute] | None = None,
    mlp_tiles: int | Literal["auto"] | None = None,
    embeddings: Literal["keep", "host", "int8"] = "keep",
) -> PatchReport:
    """Replaces parts of a llama, mistral, qwen2/3, gemma2/3, phi3, mixtral, qwen3-moe or gpt-oss
    model, with PEFT on top or not; returns what was replaced.

    `attention` keeps the model's by default, names torch's or ours, or is "auto": picked for each
    shape by cost or by timing both once. `checkpoint` gives a policy for all layers or one for
    each. `mlp_tiles` runs each MLP over so many tiles of the tokens ("auto": of about hidden-size
    tokens). `embeddings="host"` moves a frozen input embedding to host memory, on one GPU; "int8" keeps it
    in 8 bits, which `unpatch` decodes and does not undo. Raises KernelInputError for a model it does not know, one that is patched already, or a
    part it cannot name.
    """
    target = _causal_model(model)
    family = _family(target)
    if _MARK in target.__dict__:
        raise KernelInputError(
            "patch", "a model that is patched already", "an unpatched one", "unpatch(model) first"
        )
    if attention not in ("keep", "sdpa", *_ATTENTIONS):
        accepted = "'keep', 'sdpa', 'napkinmath', 'auto'"
        raise KernelInputError("patch", f"attention={attention!r}", accepted, 'attention="sdpa"')
    is_count = isinstance(mlp_tiles, int) and not isinstance(mlp_tiles, bool) and mlp_tiles > 0
    if mlp_tiles not in (None, "auto") and not is_count:
        accepted = "a number of tiles, 1 or more, or 'auto'"
        raise KernelInputError("patch", f"mlp_tiles={mlp_tiles!r}", accepted, "mlp_tiles=None")
    if embeddings not in ("keep", "host", "int8"):
        given = f"embeddings={embeddings!r}"
        raise KernelInputError("patch", given, "'keep', 'host', 'int8'", 'embeddings="keep"')
    report = PatchReport()
    try:
        for wanted, step in (
            (norm, _patch_norms),
            (rope, _patch_rope),
            (mlp, _patch_mlp),
            (qlora, _patch_linears),
        ):
            if wanted:
                step(target, family, report)
        if mlp_tiles is not None:
            _patch_tiles(target, family, mlp_tiles, report)
        if attention in _ATTENTIONS:
            _patch_attention(target, _ATTENTIONS[attention], report)
        elif attention == "sdpa":
            before = target.config._attn_implementation
            target.set_attn_implementation("sdpa")
            report._undo.append(functools.partial(target.set_attn_implementation, before))
        if loss:
            _patch_loss(target, report)
        if checkpoint is not None:
            _patch_checkpointing(target, checkpoint, report)
        if embeddings != "keep":
            _patch_embeddings(target, embeddings, report)
    except BaseException:
        _undo(report)
        raise
    target.__dict__[_MARK] = report
    return report


def _undo(report: PatchReport) -> None:
    while report._undo:
        report._undo.pop()()


def unpatch(model: torch.nn.Module) -> None:
    """Takes everything that `patch` put in out again; does nothing to a model that is not
    patched."""
    report = _causal_model(model).__dict__.pop(_MARK, None)
    if report is not None:
        _undo(report)
