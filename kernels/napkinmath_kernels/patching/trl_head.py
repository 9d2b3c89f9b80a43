"""TRL's chunked log-probabilities of a patched model, computed by ours.

TRL's DPO, KTO, GRPO, RLOO and SFT trainers give a model a fused head: `model(..., labels=labels,
fused_lm_head=True)` returns log-probabilities, from an autograd function that makes each chunk of
logits twice (trl 1.16 trainer/utils.py add_fused_lm_head, kernels/chunked_logprob.py). The function
stands once in TRL's module, so a look at the head's weight decides there whose runs. What ours does
not do stays TRL's: a bias, sums of squared probabilities, a head in another type than its input.

Its trainers of preferences without a reference (ORPO; CPO, which SimPO is a loss of) ask a model
for logits without labels, and choose from them by a function that each of their modules has by its
name. A patched model's logits are not made there either (`DeferredLogits`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import KernelInputError
from ..ops.log_probabilities import linear_log_probabilities

MODULE, NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
#: Trainers that choose from logits, and the function that does (trl 1.16).
LOGITS_MODULES = ("trl.experimental.orpo.orpo_trainer", "trl.experimental.cpo.cpo_trainer")
LOGITS_NAME = "selective_log_softmax"
#: Heads of patched models, by the identity of their weights.
_heads: dict[int, weakref.ref[torch.Tensor]] = {}


class _WithoutGradient(torch.autograd.Function):
    """Entropies, which in TRL's function have a gradient: a bonus on them must not be dropped in
    silence."""

    @staticmethod
    def forward(ctx: Any, entropy: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return entropy.view_as(entropy)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[None, None]:
        if upstream[0] is not None:
            raise KernelInputError(
                "linear_log_probabilities",
                "a loss on entropies, such as GRPO's entropy_coef",
                "log-probabilities in the loss alone",
                "patch(model, loss=False)",
            )
        return None, None


@dataclass(frozen=True)
class ChosenFunction:
    """Stands in TRL's module for its function."""

    theirs: Any

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: Sequence[str] | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """(log-probabilities, entropies, None, mean logits, top-1) as TRL asks for them."""
        options = () if outputs is None else (outputs,)
        head = _heads.get(id(weight))
        ours = head is not None and head() is weight and bias is None and outputs is not None
        same = hidden.dtype is weight.dtype or torch.is_autocast_enabled(hidden.device.type)
        if not ours or not same or logit_scale <= 0 or "log_sum_sq_probs" in (outputs or ()):
            given = (hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale)
            return self.theirs.apply(*given, *options)
        found = linear_log_probabilities(
            hidden,
            weight,
            targets,
            ignore_index=None,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap or 0.0,
            statistics=len(outputs or ()) > 1,
        )
        asked = dict(zip(("entropy", "mean_logits", "is_top1"), found[1:], strict=True))
        asked = {name: x for name, x in asked.items() if name in (outputs or ())}
        entropy = asked.get("entropy")
        if entropy is not None and found.log_probs.requires_grad:
            entropy = _WithoutGradient.apply(entropy, found.log_probs)
        return found.log_probs, entropy, None, asked.get("mean_logits"), asked.get("is_top1")


@dataclass(frozen=True)
class ChosenSelection:
    """Stands in a trainer's module for TRL's choice of the labels' log-probabilities."""

    theirs: Any

    def __call__(
        self, logits: Any, index: torch.Tensor, temperature: float = 1.0, **options: Any
    ) -> Any:
        """Log-probabilities of `index`, without the logits where they are not made yet."""
        scored = getattr(logits, "log_probabilities", None)
        found = None if scored is None or options else scored(index, temperature)
        if found is not None:
            return found
        made = logits if scored is None else logits.materialize()
        return self.theirs(made, index, temperature, **options)


def scores_logits(options: dict[str, Any]) -> bool:
    """Whether one of those trainers makes the loss of this call's logits: they alone train with
    `use_cache=False` and no labels. Their module's function is ours from then on."""
    if options.get("use_cache") is not False or options.get("fused_lm_head"):
        return False
    loaded: list[Any] = [sys.modules[name] for name in LOGITS_MODULES if name in sys.modules]
    for module in loaded:
        _replace(module, LOGITS_NAME, ChosenSelection)
    return bool(loaded)


@dataclass(eq=False)
class FusedHeadWatch:
    """A hook in front of a patched model's forward: TRL is there by the time it asks for its fused
    head."""

    def __call__(
        self, _module: torch.nn.Module, _arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if options.get("fused_lm_head"):
            _install()


def take_head(weight: torch.Tensor) -> None:
    """From now on the log-probabilities of this head are ours."""
    key = id(weight)
    _heads[key] = weakref.ref(weight, lambda _: _heads.pop(key, None))


def leave_head(weight: torch.Tensor) -> None:
    """They are TRL's again, and with the last head TRL's modules are as they were."""
    _heads.pop(id(weight), None)
    if _heads:
        return
    for path, name in ((MODULE, NAME), *((path, LOGITS_NAME) for path in LOGITS_MODULES)):
        module: Any = sys.modules.get(path)
        installed = getattr(module, name, None)
        if isinstance(installed, ChosenFunction | ChosenSelection):
            setattr(module, name, installed.theirs)


def _install() -> None:
    _replace(sys.modules.get(MODULE), NAME, ChosenFunction)


def _replace(module: Any, name: str, stand_in: type[ChosenFunction | ChosenSelection]) -> None:
    theirs = getattr(module, name, None)
    if theirs is not None and not isinstance(theirs, stand_in):
        setattr(module, name, stand_in(theirs))
