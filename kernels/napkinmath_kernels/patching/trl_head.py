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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import KernelInputError
from ..ops.log_probabilities import linear_log_probabilities
from . import trl_divergence

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
        ours = _is_ours(weight) and bias is None and outputs is not None
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
    """Whether one of those trainers makes the loss of this call's logits: they alone train without
    labels, ORPO's and CPO's with `use_cache=False`. Their function is ours from then on."""
    if options.get("fused_lm_head"):
        return False
    compares = trl_divergence.compares_logits()
    if compares:
        _install_divergences()
    if options.get("use_cache") is not False:
        return compares
    loaded: list[Any] = [sys.modules[name] for name in LOGITS_MODULES if name in sys.modules]
    for module in loaded:
        _replace(module, LOGITS_NAME, ChosenSelection)
    return compares or bool(loaded)


def teaches(options: dict[str, Any]) -> bool:
    """Whether this call without gradients is of a teacher, whose logits GKD's trainer compares with
    a student's; generation has a cache."""
    generates = "use_cache" in options or "past_key_values" in options
    wanted = options.get("labels") is None and not generates and not torch.is_grad_enabled()
    return wanted and trl_divergence.compares_logits()


@dataclass(eq=False)
class FusedHeadWatch:
    """A hook in front of a patched model's forward, and of its decoder's: TRL is there by the time it
    asks for its fused head, or compares hidden states with a teacher's."""

    def __call__(
        self, _module: torch.nn.Module, _arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if options.get("fused_lm_head"):
            _install()
        _install_divergences()


def take_head(weight: torch.Tensor) -> None:
    """From now on the log-probabilities of this head are ours."""
    key = id(weight)
    _heads[key] = weakref.ref(weight, lambda _: _heads.pop(key, None))
    _install_divergences()


def leave_head(weight: torch.Tensor) -> None:
    """They are TRL's again, and with the last head TRL's modules are as they were."""
    _heads.pop(id(weight), None)
    if _heads:
        return
    places = ((MODULE, NAME), *((path, LOGITS_NAME) for path in LOGITS_MODULES))
    homes = [(sys.modules.get(path), name) for path, name in places]
    for home, name in (*homes, *trl_divergence.homes()):
        installed = getattr(home, name, None)
        if isinstance(installed, _STAND_INS):
            given_back = installed.theirs
            setattr(home, name, staticmethod(given_back) if isinstance(home, type) else given_back)


_STAND_INS = (
    ChosenFunction,
    ChosenSelection,
    trl_divergence.ChosenDivergence,
    trl_divergence.ChosenChunks,
)


def _install() -> None:
    _replace(sys.modules.get(MODULE), NAME, ChosenFunction)


def _install_divergences() -> None:
    (trainer, loss), (module, chunked) = trl_divergence.homes()
    _replace(trainer, loss, trl_divergence.ChosenDivergence)
    _replace(module, chunked, lambda theirs: trl_divergence.ChosenChunks(theirs, _is_ours))


def _is_ours(weight: torch.Tensor) -> bool:
    head = _heads.get(id(weight))
    return head is not None and head() is weight


def _replace(home: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
    theirs = getattr(home, name, None)
    if theirs is not None and not isinstance(theirs, _STAND_INS):
        setattr(home, name, stand_in(theirs))
