"""A tensor-parallel rank's share of a model: which sizes are split, over how many ranks, and which
layers cannot be.

A rank's share of a layer is the same layer with fewer heads, a narrower feed-forward and a shorter
vocabulary.
"""

from __future__ import annotations

from napkinmath.base.divisors import divisors
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Expr
from napkinmath.lowering.parallel.tensor_style import MEGATRON, TensorStyle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Weight
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Run

SPLIT = ("a", "k", "kg", "f", "fe", "fs", "v")  # symbols that a rank has a share of
_EXPERT_WIDTH = "fe"
MIXED = ("ma", "mg", "lk", "lv")  # and of state-space and linear-attention layers
WIDTHS = ("mi",)  # and of mixers that have no heads
NAMES = {
    "a": "num_attention_heads",
    "k": "num_key_value_heads",
    "kg": "num_global_key_value_heads",
    "f": "intermediate_size",
    "fe": "moe_intermediate_size",
    "fs": "shared_expert_intermediate_size",
    "ma": "mamba_num_heads",
    "mg": "mamba_n_groups",
    "mi": "the mixer width",
    "lk": "linear_num_key_heads",
    "lv": "linear_num_value_heads",
}
MATRICES = (
    "linear",
    "linear without adapter",
    "unquantized linear",
    "linear subclass",
    "linear that adds its bias",
    "conv",
)
# Linears that every rank holds whole: down-projections of latent attention, gates and projections
# around experts, projections of per-layer embeddings.
WHOLE = (
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "shared_expert_gate",
    "fc1_latent_proj",
    "fc2_latent_proj",
    "per_layer_model_projection",
    "per_layer_input_gate",
    "per_layer_projection",
    "router",
    "gate",
)


def rank_share(spec: ModelSpec, degree: int, style: TensorStyle = MEGATRON) -> ModelSpec:
    """The model with the sizes of one tensor-parallel rank; raises InputError where they do not
    divide."""
    check_degree(spec, degree, style)
    return _divided(spec, degree, shared_symbols(style))


def expert_share(
    spec: ModelSpec, tensor: int, experts: int, style: TensorStyle = MEGATRON
) -> ModelSpec:
    """The same where fewer or more ranks share an expert's products than share all else."""
    width = dict(spec.symbols).get(_EXPERT_WIDTH, experts)
    if width % experts:
        raise InputError(
            f"{NAMES[_EXPERT_WIDTH]}={width} of {spec.name} does not divide by"
            f" expert_tensor_parallel_size={experts}; use one of {divisors(width)}"
        )
    names = shared_symbols(style)
    others = tuple(name for name in names if name != _EXPERT_WIDTH)
    symbols = tuple(item for item in spec.symbols if item[0] != _EXPERT_WIDTH)
    check_degree(spec.replace(symbols=symbols), tensor, style)
    return _divided(_divided(spec, tensor, others), experts, (_EXPERT_WIDTH,))


def _divided(spec: ModelSpec, degree: int, names: tuple[str, ...]) -> ModelSpec:
    stages = tuple(
        stage.replace(symbols=_share(stage.symbols, degree, names)) for stage in spec.stages
    )
    return spec.replace(symbols=_share(spec.symbols, degree, names), stages=stages)


def shared_symbols(style: TensorStyle) -> tuple[str, ...]:
    """The symbols that a rank of a library has a share of."""
    mixed = MIXED if style.splits_mixers else ()
    return (*SPLIT, *mixed, *(WIDTHS if style.splits_widths else ()))


def _share(
    symbols: tuple[tuple[str, Any], ...], degree: int, names: tuple[str, ...]
) -> tuple[tuple[str, Any], ...]:
    """Heads, widths and vocabulary over ranks; key/value heads that are fewer than ranks are on
    several of them."""
    return tuple(
        (name, max(1, -(-value // degree)) if name in names else value) for name, value in symbols
    )


def divides(symbols: dict[str, int], degree: int, style: TensorStyle) -> str:
    """The symbol that a degree does not divide; '' where it divides all. The vocabulary is padded,
    key/value heads fewer than ranks may be copied."""
    shared = shared_symbols(style)
    for name in ("a", "f", "fe", "fs", *(m for m in (*MIXED, *WIDTHS) if m in shared)):
        copied = name == "mg" and symbols.get(name) == 1 and style.copies_group
        if symbols.get(name, 0) % degree and not copied:
            return name
    for name in ("k", "kg"):
        heads = symbols.get(name, degree)
        if heads % degree and (degree % heads or not style.copies_heads):
            return name
    return ""


def valid_degrees(
    spec: ModelSpec, limit: int = 1024, *, style: TensorStyle = MEGATRON
) -> list[int]:
    """The tensor-parallel degrees that divide a model's heads and widths."""
    symbols = dict(spec.symbols)
    most = min(limit, symbols.get("a", symbols.get("ma", symbols.get("mi", 1))))
    return [n for n in range(1, most + 1) if not divides(symbols, n, style)]


def check_degree(spec: ModelSpec, degree: int, style: TensorStyle) -> None:
    """Raises InputError, naming the valid degrees, where the model's sizes do not divide."""
    symbols = dict(spec.symbols)
    failed = divides(symbols, degree, style)
    if failed:
        raise InputError(
            f"{NAMES[failed]}={symbols[failed]} of {spec.name} does not divide by"
            f" tensor_parallel_size={degree}; use"
            f" {listed(valid_degrees(spec, style=style))}"
        )


def listed(numbers: list[int]) -> str:
    """'1, 2, 4 or 8'."""
    texts = [str(n) for n in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def check_layers(runs: list[Run], splits: Callable[[Size], bool], name: str) -> None:
    """Raises InputError for layers that hold a matrix which is neither split nor meant to be whole
    on every rank; `splits` says whether an extent is counted in what ranks share."""
    for run in runs:
        if not run.stage.checkpointed or run.stage.modality:
            continue
        for weight in run.block.weights:
            if _unsplit(weight, splits):
                module = weight.path.rpartition(".")[0]
                why = (
                    "normalizes over all heads"
                    if weight.kind == "norm"
                    else "is not counted in heads or feed-forward"
                )
                raise InputError(
                    f"{name} cannot be split by tensor parallelism: {module} {why}; use"
                    " tensor_parallel_size=1"
                )


def _unsplit(weight: Weight, splits: Callable[[Size], bool]) -> bool:
    if weight.kind == "norm":  # a norm over all heads needs the sums of every rank
        alone = len(weight.axes) == 1 and splits(weight.axes[0])
        return alone and not mentions(weight.axes[0], "ma")  # a mixer's is one of each group
    if weight.kind not in MATRICES or any(splits(axis) for axis in weight.axes):
        return False
    return not any(part in WHOLE for part in weight.path.split("."))


def mentions(size: Size, *names: str) -> bool:
    """Whether one of some symbols is in an extent."""
    if not isinstance(size, Expr):
        return False
    return (
        size.args[0] in names if size.op == "sym" else any(mentions(x, *names) for x in size.args)
    )
