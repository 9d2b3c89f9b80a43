"""Transformer Engine's FusedAdam, whose states and own copy of a 16-bit weight have types of their
choice: `adamw-te:exp_avg=bf16,exp_avg_sq=fp8,master=remainders`.

Source: NVIDIA/TransformerEngine main (2.x) pytorch/optimizers/fused_adam.py: _initialize_state,
get_unscaled_state and step. A state of 16 or 8 bits is widened to fp32 for all parameters before
the kernel runs, but where both moments are bf16, which the kernel reads as they are (since 2.13;
before it every narrow state was widened).
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP16, FP32, INT16, UINT8
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.catalog.optimizer_states import Optimizer, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NAME = "adamw-te"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATES = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "fp8": UINT8}
_MASTERS = {"none": None, "fp32": FP32, "fp16": FP16, "remainders": INT16}
_WORDS = {"uint8": "fp8", "int16": "remainders"}  # torch's words for the same


def te_adam(row: Optimizer, given: str) -> Optimizer:
    """FusedAdam's row with `exp_avg=bf16,...`; what is not named is fp32, and `master` none: then masters are
    the trainer's, if it keeps some."""
    chosen = {**dict.fromkeys(_MOMENTS, "fp32"), "master": "none"}
    for part in filter(None, given.split(",")):
        name, _, word = part.partition("=")
        known = _MASTERS if name == "master" else _STATES
        word = _WORDS.get(word, word)
        if name not in chosen or word not in known:
            raise InputError(
                f"optimizer '{NAME}' has no {shown(part)}; use exp_avg or exp_avg_sq ="
                f" {'|'.join(_STATES)}, master = {'|'.join(_MASTERS)}"
                f"{suggest(name, [*chosen]) if name not in chosen else ''}"
            )
        chosen[name] = word
    types = {name: _STATES[chosen[name]] for name in _MOMENTS}
    master = _MASTERS[chosen["master"]]
    fused = all(dtype is BF16 for dtype in types.values())
    made = row.replace(
        name=te_name(**chosen),
        states=tuple(State(name=name, dtype=dtype) for name, dtype in types.items()),
        master=master,
    )
    return _widening(made, [] if fused else _narrow(made))


def before_fused_widening(row: Optimizer) -> Optimizer:
    """The same row of FusedAdam in Transformer Engine before 2.13."""
    return _widening(row, _narrow(row)) if row.name.partition(":")[0] == NAME else row


def _narrow(row: Optimizer) -> list[str]:
    return [state.name for state in row.states if state.dtype is not FP32]


def _widening(row: Optimizer, narrow: list[str]) -> Optimizer:
    """With those states, and masters of 16 bits, widened for all parameters at once."""
    narrow = [*narrow, *(["master"] if row.master is FP16 else [])]
    kept = [*_MOMENTS, *(["master"] if row.master else [])]
    return row.replace(
        foreach=tuple(f"wide {name}" for name in narrow),
        kernels=tuple(_kernels(kept, narrow)),
    )


def te_name(exp_avg: str = "fp32", exp_avg_sq: str = "fp32", master: str = "none") -> str:
    """The name of the row with those types, which leaves out what is its default."""
    given = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    parts = [f"{name}={word}" for name, word in given.items() if word != "fp32"]
    parts += [f"master={master}"] if master != "none" else []
    return f"{NAME}:{','.join(parts)}" if parts else NAME


def _kernels(kept: list[str], narrow: list[str]) -> Iterable[str]:
    """Each narrow one is widened and, after the update, measured, scaled and stored."""
    used = [f"wide {name}" if name in narrow else name for name in kept]
    yield from (f"wide {name} = {name}" for name in narrow)
    yield f"weight, {', '.join(used)} = weight, gradient, {', '.join(used)}"
    for name in narrow:
        yield f"= wide {name}"
        yield f"wide {name} = wide {name}"
        yield f"{name} = wide {name}"
