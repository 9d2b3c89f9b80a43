"""Components: what the device figure is made of at one moment, read off a Timeline.

Every tensor belongs to exactly one row, so the rows sum to the moment's bytes; with allocator slack and device context
they sum to the device figure. The phrase that says where a row comes from is made from its tensors.
"""

from __future__ import annotations

from napkinmath.dtypes import find_dtype
from napkinmath.errors import InputError
from napkinmath.expr import Expr, product, render
from napkinmath.ledger import Role
from napkinmath.record import Record
from napkinmath.report.formula import simplify
from napkinmath.units import format_bytes, format_count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.dtypes import DType
    from napkinmath.estimate import Estimate, Range
    from napkinmath.expr import Size
    from napkinmath.timeline import Point, TensorInfo, Timeline


class Component(Record):
    """A row: bytes at a moment, how many tensors hold them, and where they come from in one phrase."""

    key: str
    label: str
    role: Role
    nbytes: int
    num_tensors: int
    origin: str


# Key -> label, in the order of the table.
LABELS: dict[str, str] = {
    "weights.layers": "weights of the layers",
    "weights.other": "embeddings, norms, head",
    "quantization": "quantization constants",
    "adapters": "adapter weights",
    "master": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations.residual": "activations: residual",
    "activations.attention": "activations: attention",
    "activations.mlp": "activations: mlp",
    "activations.norm": "activations: norms",
    "activations.other": "activations: other",
    "activation_gradients": "activation gradients",
    "logits": "logits and loss",
    "workspace": "temporaries",
    "communication": "communication buffers",
    "unexplained": "unknown",
    "slack": "allocator slack",
    "managed": "paged optimizer states",
    "context": "device context",
}
_BY_ROLE: dict[Role, str] = {
    Role.QUANTIZATION: "quantization",
    Role.ADAPTERS: "adapters",
    Role.MASTER: "master",
    Role.GRADIENTS: "gradients",
    Role.OPTIMIZER: "optimizer",
    Role.ACTIVATION_GRADIENTS: "activation_gradients",
    Role.LOGITS: "logits",
    Role.WORKSPACE: "workspace",
    Role.COMMUNICATION: "communication",
    Role.UNEXPLAINED: "unexplained",
    Role.SLACK: "slack",
    Role.CONTEXT: "context",
}
# Words in a module path that say what a layer's tensor is for; the innermost part that has one decides.
_PARTS = (
    ("norm", "norm"), ("ln_", "norm"), ("attn", "attention"), ("attention", "attention"), ("mixer", "attention"), ("rotary", "attention"), ("mlp", "mlp"), ("ffn", "mlp"), ("feed_forward", "mlp"),
    ("feedforward", "mlp"), ("expert", "mlp"), ("moe", "mlp"), ("intermediate", "mlp"), ("denserelu", "mlp"), ("densegated", "mlp"),
)  # fmt: skip
_LAYERS = frozenset(("layers", "layer", "h", "block", "blocks"))  # what families call their list of layers
_KINDS = (
    ("linear", "linears"),
    ("bias", "biases"),
    ("expert", "expert stacks"),
    ("norm", "norms"),
    ("router", "routers"),
    ("conv", "convolutions"),
    ("embedding", "embeddings"),
)
LONGEST_SHAPE = 30  # characters of a formula that still fit a phrase
SMALL_SHARE = 0.01  # of a row, below which a group of tensors is only counted
RESIDUAL_NAMES = ("hidden states", "hidden states between blocks")


class Facts(Record):
    """What an estimate knows beyond its timeline: `weights` maps a parameter's path to (kind, elements of one copy)."""

    weights: dict[str, tuple[str, int]] = {}  # noqa: RUF012
    recomputes: bool = False
    num_trained: int = 0


NO_FACTS = Facts()


def facts_of(estimate: Estimate) -> Facts:
    """The facts of an analytic estimate."""
    from napkinmath.expr import Bindings

    step = estimate.step
    top = Bindings(step.symbols)
    weights: dict[str, tuple[str, int]] = {}
    for run in step.runs:
        bind = top.extended(dict(run.stage.symbols))
        for weight in run.block.weights:
            weights[weight.path] = weight.kind, bind(weight.elements)
    return Facts(weights=weights, recomputes=step.policy.recomputes, num_trained=estimate.num_trained)


def component_key(tensor: TensorInfo) -> str:
    """The row a tensor belongs to."""
    role = tensor.role
    if role is Role.WEIGHTS:
        return "weights.layers" if _in_layer(tensor.module) and not _is_norm(tensor.module) else "weights.other"
    if role is Role.ACTIVATIONS:
        return "activations." + _activation_part(tensor)
    return _BY_ROLE.get(role, "unexplained")


def _in_layer(module: str) -> bool:
    return any(part in _LAYERS for part in module.split("."))


def _is_norm(module: str) -> bool:
    return any("norm" in part or part.startswith("ln_") for part in module.lower().split("."))


def _activation_part(tensor: TensorInfo) -> str:
    if tensor.name in RESIDUAL_NAMES:
        return "residual"
    for part in reversed(tensor.module.lower().split(".")):
        for word, meaning in _PARTS:
            if word in part:
                return meaning
    return "residual" if _in_layer(tensor.module) else "other"


# ---------------------------------------------------------------- rows


Held = list[tuple["TensorInfo", int]]


def held_by_component(timeline: Timeline, point: Point) -> dict[str, Held]:
    """(tensor, copies alive on the device) at a moment, by row, in the order of the table."""
    held: dict[str, Held] = {}
    for tensor, count in zip(timeline.tensors, timeline.live_counts(point), strict=True):
        if count and (tensor.requested or not tensor.host_bytes):
            held.setdefault(component_key(tensor), []).append((tensor, count))
    return {key: held[key] for key in LABELS if key in held}


def held_on_host(timeline: Timeline, point: Point) -> Held:
    """(tensor, copies alive in host or unified memory) at a moment."""
    return [(t, n) for t, n in zip(timeline.tensors, timeline.live_counts(point), strict=True) if n and t.host_bytes]


def components_at(timeline: Timeline, point: Point, facts: Facts = NO_FACTS) -> tuple[Component, ...]:
    """The rows of a moment; their bytes sum to the point's."""
    rows: list[Component] = []
    for key, held in held_by_component(timeline, point).items():
        nbytes = sum(t.requested * n for t, n in held)
        rows.append(
            Component(
                key=key,
                label=LABELS[key],
                role=held[0][0].role,
                nbytes=nbytes,
                num_tensors=sum(n for _, n in held),
                origin=_origin(key, held, nbytes, facts),
            )
        )
    return tuple(rows)


def components_of(estimate: Estimate) -> tuple[Component, ...]:
    """The rows of an estimate's peak with allocator slack and device context; they sum to the device figure."""
    rows = list(components_at(estimate.timeline, estimate.peak, facts_of(estimate)))
    memory = estimate.memory
    requested, allocated, reserved, device = (
        sum(r.nbytes for r in rows),
        int(memory.allocated.value),
        int(memory.reserved.value),
        int(memory.device.value),
    )
    rows.append(
        _extra(
            "slack",
            Role.SLACK,
            reserved - requested,
            f"rounding {format_bytes(allocated - requested)} + cache {format_bytes(reserved - allocated)}",
        )
    )
    outside, hardware = device - reserved, estimate.hardware
    context = min(outside, hardware.context_bytes) if hardware is not None else outside
    if outside > context:
        rows.append(_extra("managed", Role.OPTIMIZER, outside - context, "unified memory, on the device while there is room"))
    where = hardware.gpu.name if hardware is not None else "no GPU named"
    rows.append(_extra("context", Role.CONTEXT, context, f"CUDA context, kernels: {where}"))
    return tuple(rows)


def headroom(estimate: Estimate) -> Range | None:
    """Bytes left beside tensors and context once the allocator has returned its cache, and its range; None where no device is named."""
    from napkinmath.estimate import Range

    hardware, allocated = estimate.hardware, estimate.memory.allocated
    if hardware is None:
        return None
    low, high = hardware.usable_range
    return Range(low=low - allocated.high, value=hardware.usable_bytes - allocated.value, high=high - allocated.low)


def _extra(key: str, role: Role, nbytes: int, origin: str) -> Component:
    return Component(key=key, label=LABELS[key], role=role, nbytes=nbytes, num_tensors=0, origin=origin)


# ---------------------------------------------------------------- where it comes from


def _origin(key: str, held: Held, nbytes: int, facts: Facts) -> str:
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
    return _shapes(held, "checkpoints" if facts.recomputes else "")


def _layers_origin(held: Held, nbytes: int, facts: Facts) -> str:
    elements = 0
    kinds: dict[str, int] = {}
    for tensor, count in held:
        kind, size = facts.weights.get(tensor.module, ("", 0))
        elements += size * count
        word = next((plural for stem, plural in _KINDS if stem in kind), "others")
        kinds[word] = kinds.get(word, 0) + count
    what = " + ".join(f"{number} {word}" for word, number in sorted(kinds.items(), key=lambda item: -item[1]))
    if not elements:
        return _per_element(held)
    return f"{what}, {format_count(elements)} x {_short(nbytes / elements)} B"


def _named_parts(held: Held) -> str:
    totals: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for tensor, count in held:
        name = "norms" if _is_norm(tensor.module) else _last_module(tensor.module)
        totals[name] = totals.get(name, 0) + tensor.requested * count
        dtypes[type_name(tensor)] = dtypes.get(type_name(tensor), 0) + tensor.requested * count
    parts = sorted(totals.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts[:3]) + (
        f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    )
    main = max(dtypes, key=lambda d: dtypes[d])
    return f"{main}: {text}" if main else text


def _last_module(path: str) -> str:
    parts = [p for p in path.split(".") if p not in ("weight", "bias", "*") and not p.isdigit()]
    return parts[-1] if parts else path or "?"


def _constants_origin(held: Held, nbytes: int, facts: Facts) -> str:
    copies: dict[str, int] = {}
    first: dict[str, str] = {}
    for tensor, count in held:
        if first.setdefault(tensor.module, tensor.name) == tensor.name:  # one constant of each parameter counts its copies
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
            f"{number}, {format_count(elements)} x {_short(nbytes / elements)} B ({dtype})" if elements else f"{number} {dtype}".rstrip()
        )
    return "; ".join(texts[:2])


def stored_type(tensor: TensorInfo) -> DType | None:
    """The type of a tensor's elements, by our name or torch's; None where it is unknown."""
    try:
        return find_dtype(tensor.dtype)
    except InputError:
        return None


def type_name(tensor: TensorInfo) -> str:
    """'bf16' for bfloat16; what the timeline says where the type is unknown."""
    dtype = stored_type(tensor)
    return dtype.name if dtype is not None else tensor.dtype


def num_elements(tensor: TensorInfo) -> int:
    """Elements as stored, from bytes and type; 0 where the type is unknown."""
    dtype = stored_type(tensor)
    return tensor.nbytes * 8 // dtype.bits if dtype is not None else 0


def _states_origin(held: Held, nbytes: int, facts: Facts) -> str:
    names: dict[str, int] = {}
    for tensor, count in held:
        name = tensor.name.partition(" of ")[0].rpartition(".")[2]
        names[name] = names.get(name, 0) + tensor.requested * count
    text = ", ".join(sorted(names, key=lambda n: -names[n])[:2])
    return f"{_short(nbytes / facts.num_trained)} B a trained parameter: {text}" if facts.num_trained else text


def _shapes(held: Held, checkpoints: str) -> str:
    """'32 x b·s·h bf16 + 2 x b·s·f fp32': the two largest groups of equal size, and how many other tensors."""
    groups: dict[tuple[int, str], list[int]] = {}
    texts: dict[tuple[int, str], str] = {}
    kept: dict[tuple[int, str], int] = {}
    for tensor, count in held:
        key = tensor.nbytes, type_name(tensor)
        texts.setdefault(key, shape_text(tensor))
        groups.setdefault(key, [0])[0] += count
        if checkpoints and tensor.name in RESIDUAL_NAMES and _in_layer(tensor.module):
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


def shape_text(tensor: TensorInfo) -> str:
    """'b·s·h' where the axes are symbols, '4·2048·4096' where they are numbers, else the size."""
    axes = tensor_axes(tensor)
    if not axes:
        return format_bytes(tensor.nbytes)
    if any(isinstance(axis, Expr) for axis in axes):
        text = render(simplify(product(axes)))
        return text if len(text) <= LONGEST_SHAPE else format_bytes(tensor.nbytes)
    return "·".join(str(axis) for axis in axes if axis != 1) or "1"


def tensor_axes(tensor: TensorInfo) -> tuple[Size, ...]:
    """The axes of a tensor; empty where the timeline does not know them."""
    axes: Any = tensor.axes
    return tuple(axes) if type(axes) in (tuple, list) else ()


def _short(value: float) -> str:
    """Three figures without trailing zeros: 0.516, 2, 4.13."""
    text = f"{value:.3f}" if value < 1 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
