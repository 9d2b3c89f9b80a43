"""Where a row of the component table comes from, in one phrase made from its tensors."""

from __future__ import annotations

from napkinmath.answers.parameters import count_parameters
from napkinmath.base.dtypes import UINT8
from napkinmath.base.expr import Bindings
from napkinmath.base.record import Record
from napkinmath.base.units import format_bytes, format_count
from napkinmath.report.parts import RESIDUAL_NAMES, in_layer, is_norm
from napkinmath.report.tensors import num_elements, shape_text, stored_type, type_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.timeline import TensorInfo

    Held = list[tuple[TensorInfo, int]]  # tensors and how many copies are alive

_KINDS = (
    ("linear", "linears"),
    ("bias", "biases"),
    ("expert", "expert stacks"),
    ("norm", "norms"),
    ("router", "routers"),
    ("conv", "convolutions"),
    ("embedding", "embeddings"),
)
SMALL_SHARE = 0.01  # of a row, below which a group of tensors is only counted


class Facts(Record):
    """What an estimate knows beyond its timeline: `weights` maps a parameter's path to (kind,
    elements of one copy)."""

    weights: dict[str, tuple[str, int]] = {}  # noqa: RUF012
    recomputes: bool = False
    num_trained: int = 0


NO_FACTS = Facts()


def facts_of(estimate: Estimate) -> Facts:
    """The facts of an analytic estimate."""
    step = estimate.step
    top = Bindings(step.symbols)
    weights: dict[str, tuple[str, int]] = {}
    for run in step.runs:
        bind = top.extended(dict(run.stage.symbols))
        for weight in run.block.weights:
            weights[weight.path] = weight.kind, bind(weight.elements)
    return Facts(
        weights=weights, recomputes=step.policy.recomputes, num_trained=count_parameters(step)[1]
    )


def origin_of(key: str, held: Held, nbytes: int, facts: Facts) -> str:
    """The phrase of a row."""
    if key == "weights.layers":
        return _layers_origin(held, nbytes, facts)
    if key == "weights.other":
        return _named_parts(held)
    if key == "quantization":
        return _constants_origin(held, nbytes, facts)
    if key in ("adapters", "master", "gradients"):
        return _per_element(held)
    if key == "optimizer":
        return _states_origin(held, nbytes, facts)
    if key == "engine":
        return ", ".join(
            f"{t.name.removeprefix('engine ')} {format_bytes(t.nbytes)}" for t, _ in held
        )
    return _shapes(held, "checkpoints" if facts.recomputes else "")


def _layers_origin(held: Held, nbytes: int, facts: Facts) -> str:
    elements = 0
    kinds: dict[str, int] = {}
    for tensor, count in held:
        kind, size = facts.weights.get(tensor.module, ("", 0))
        packed = stored_type(tensor) in (UINT8, None)  # else each element is there as it is
        elements += (size if packed else num_elements(tensor)) * count
        word = next((plural for stem, plural in _KINDS if stem in kind), "others")
        kinds[word] = kinds.get(word, 0) + count
    if any(
        tensor.module not in facts.weights for tensor, _ in held
    ):  # parts of many parameters in one buffer
        return _per_element(held)
    what = " + ".join(
        f"{number} {word}" for word, number in sorted(kinds.items(), key=lambda item: -item[1])
    )
    return f"{what}, {format_count(elements)} x {_short(nbytes / elements)} B"


def _named_parts(held: Held) -> str:
    totals: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for tensor, count in held:
        name = "norms" if is_norm(tensor.module) else _last_module(tensor.module) or tensor.name
        totals[name] = totals.get(name, 0) + tensor.requested * count
        dtypes[type_name(tensor)] = dtypes.get(type_name(tensor), 0) + tensor.requested * count
    parts = sorted(totals.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts[:3]) + (
        f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    )
    main = max(dtypes, key=lambda d: dtypes[d])
    return f"{main}: {text}" if main else text


def _last_module(path: str) -> str:
    parts = [
        p for p in path.split(".") if p not in ("", "weight", "bias", "*") and not p.isdecimal()
    ]
    return parts[-1] if parts else path


def _constants_origin(held: Held, nbytes: int, facts: Facts) -> str:
    copies: dict[str, int] = {}
    first: dict[str, str] = {}
    for tensor, count in held:
        if (
            first.setdefault(tensor.module, tensor.name) == tensor.name
        ):  # one constant of each parameter counts its copies
            copies[tensor.module] = copies.get(tensor.module, 0) + count
    total = sum(facts.weights.get(module, ("", 0))[1] * count for module, count in copies.items())
    text = ", ".join(_largest_names(held, 2))
    return f"{_short(8 * nbytes / total)} bit a parameter: {text}" if total else text


def _largest_names(held: Held, limit: int) -> list[str]:
    totals: dict[str, int] = {}
    for tensor, count in held:
        totals[tensor.name] = totals.get(tensor.name, 0) + tensor.requested * count
    return sorted(totals, key=lambda n: -totals[n])[:limit]


def _per_element(held: Held) -> str:
    by_dtype: dict[str, list[int]] = {}
    for tensor, count in held:
        sums = by_dtype.setdefault(type_name(tensor), [0, 0, 0])
        sums[0] += count
        sums[1] += tensor.requested * count
        sums[2] += num_elements(tensor) * count
    texts: list[str] = []
    for dtype, (count, nbytes, elements) in sorted(by_dtype.items(), key=lambda item: -item[1][1]):
        number = f"{count} tensor{'' if count == 1 else 's'}"
        texts.append(
            f"{number}, {format_count(elements)} x {_short(nbytes / elements)} B ({dtype})"
            if elements
            else f"{number} {dtype}".rstrip()
        )
    return "; ".join(texts[:2])


def _states_origin(held: Held, nbytes: int, facts: Facts) -> str:
    names: dict[str, int] = {}
    for tensor, count in held:
        name = tensor.name.partition(" of ")[0].rpartition(".")[2]
        names[name] = names.get(name, 0) + tensor.requested * count
    text = ", ".join(sorted(names, key=lambda n: -names[n])[:2])
    return (
        f"{_short(nbytes / facts.num_trained)} B a trained parameter: {text}"
        if facts.num_trained
        else text
    )


def _shapes(held: Held, checkpoints: str) -> str:
    """'32 x b·s·h bf16 + 2 x b·s·f fp32': the two largest groups of equal size, and how many other
    tensors."""
    groups: dict[tuple[int, str], list[int]] = {}
    texts: dict[tuple[int, str], str] = {}
    kept: dict[tuple[int, str], int] = {}
    for tensor, count in held:
        key = tensor.nbytes, type_name(tensor)
        texts.setdefault(key, shape_text(tensor))
        groups.setdefault(key, [0])[0] += count
        if checkpoints and tensor.name in RESIDUAL_NAMES and in_layer(tensor.module):
            kept[key] = kept.get(key, 0) + count
    order = sorted(groups, key=lambda k: -k[0] * groups[k][0])
    total = sum(key[0] * count for key, (count,) in groups.items())
    named = [key for key in order[:2] if key[0] * groups[key][0] >= SMALL_SHARE * total]
    parts: list[str] = []
    rest = sum(groups[key][0] for key in order[len(named) :])
    for key in named:
        shape = f"{texts[key]} {key[1]}".strip()
        inside, count = kept.get(key, 0), groups[key][0]
        parts.append(f"{inside} {checkpoints} {shape}" if inside > 1 else f"{count} x {shape}")
        rest += count - inside if inside > 1 else 0
    return " + ".join(parts) + (f" + {rest} more" if rest else "")


def _short(value: float) -> str:
    """Three figures without trailing zeros: 0.516, 2, 4.13."""
    text = f"{value:.3f}" if value < 1 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
