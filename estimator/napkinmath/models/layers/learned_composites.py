"""Composites of learned blocks: linears, embeddings, attention, masks and dropout, recorded by the
functions of hand-written layers, so that adapters, quantized weights and kernels act alike."""

from __future__ import annotations

from napkinmath.base.dtypes import find_dtype
from napkinmath.ir.ledger import Role, Value, Weight
from napkinmath.ir.tape import Tape
from napkinmath.lowering.linears import ADAPTED_KINDS, TASK_HEAD, TOKEN_HEAD
from napkinmath.models.layers.attend import attend
from napkinmath.models.layers.learned_sizes import over, size_of
from napkinmath.models.layers.masks import causal_masks
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import dropout
from napkinmath.ops.index import constant, embedding, input_leaf
from napkinmath.ops.matmul import dense_linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol

    from napkinmath.models.layers.learned_experts import MovedAdapters

    class Playing(Protocol):
        """The block that is being recorded."""

        @property
        def t(self) -> Tape: ...
        @property
        def block(self) -> Mapping[str, Any]: ...
        @property
        def shared(self) -> dict[str, Value]: ...
        @property
        def values(self) -> list[Value]: ...
        @property
        def padded(self) -> bool: ...
        @property
        def eager_only(self) -> bool: ...
        @property
        def moved(self) -> MovedAdapters: ...
        def weight(self, number: int) -> Weight: ...


INPUT_IDS, PIXELS, SPECTROGRAM = "input ids", "pixel values", "spectrogram"
SCORES = ("head", TASK_HEAD, TOKEN_HEAD)
WITHOUT_ADAPTER = {
    "linear": "linear without adapter",
    "unquantized linear": "router",
    "linear subclass": "router",
}
"""Kinds of linears of which PEFT has moved the names to other parameters."""


def _linear(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    t, x = replay.t, replay.values[read[0]]
    if facts["copies"]:
        t.turned.add(x)
    weight = replay.weight(read[1])
    owner = replay.block["weights"][-1 - read[1]][0].rpartition(".")[0]
    whole = replay.moved.value(read[1], weight)
    with t.scope(owner):
        if whole is not weight.value:
            bias = replay.weight(read[2]).value if len(read) > 2 else None
            return [dense_linear(t, x, whole, bias)]
        kind = facts["kind"]
        name = owner.rpartition(".")[2]
        if kind in ADAPTED_KINDS and replay.moved.leaves_out(read[1], name):
            kind = WITHOUT_ADAPTER[kind]
        out = t.policy.linear(
            t,
            x,
            weight.axes[0],
            bias=len(read) > 2,
            kind=kind,
            role=Role.LOGITS if kind in SCORES else Role.ACTIVATIONS,
            weight=weight,
        )
        if facts["copies"]:
            t.touch(x.tensor)  # an argument of the call, beside its copy
    return [out]


def _embedding(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    t = replay.t
    # ids of positions may be a buffer of the class
    ids = replay.values[read[0]] if read[0] >= 0 else replay.weight(read[0]).value
    weight = replay.weight(read[1])
    owner = replay.block["weights"][-1 - read[1]][0].rpartition(".")[0]
    rows, width = weight.axes
    tokens = replay.shared.get(INPUT_IDS)
    of_tokens = tokens is not None and ids.tensor is tokens.tensor
    padded = replay.padded and of_tokens
    out = embedding(t, ids, owner, rows, width, padded=padded, weight=weight)
    return [out]


def _leaf(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    from napkinmath.models.layers.embedding import behind_virtual_tokens

    t, x = replay.t, replay.values[read[0]]
    if PIXELS in replay.shared or SPECTROGRAM in replay.shared:
        return [input_leaf(t, x) if t.policy.pixels_require_grad else x]
    return [behind_virtual_tokens(t, input_leaf(t, x), replay.shared)]


def _attend(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    t = replay.t
    q, k, v = (replay.values[n] for n in read)
    if facts.get("bidirectional"):
        return _attend_both_ways(replay, module, read, outs, facts)
    alike = t.known(q.axes[1]) == t.known(k.axes[1])
    with t.scope(module):
        out = attend(
            t,
            q,
            k,
            v,
            replay.shared,
            groups=1 if alike else over(q.axes[1], k.axes[1]),
            window=t.known(size_of(facts["window"][0])),
            dropout_p=facts["p"],
            capped=facts["capped"],
            eager_only=replay.eager_only,
            contiguous=facts["contiguous"],
        )
    out.axes = tuple(size_of(n) for n in outs[0][0])
    return [out]


def _attend_both_ways(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    t = replay.t
    q, k, v = (replay.values[n] for n in read)
    groups = 1 if t.known(q.axes[1]) == t.known(k.axes[1]) else over(q.axes[1], k.axes[1])
    with t.scope(module):
        out = sdpa(t, q, k, v, groups=groups, mask=None, causal=False, dropout_p=facts["p"])
    out.axes = tuple(size_of(n) for n in outs[0][0])
    return [out]


def _sdpa(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    t = replay.t
    q, k, v, *masks = (replay.values[n] for n in read)
    groups = over(q.axes[1], k.axes[1]) if facts["grouped"] else 1
    with t.scope(module):
        out = sdpa(
            t,
            q,
            k,
            v,
            groups=groups,
            mask=masks[0] if masks else None,
            causal=facts["causal"],
            dropout_p=facts["p"],
        )
    out.axes = tuple(size_of(n) for n in outs[0][0])
    return [out]


def _mask(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    t, shared = replay.t, replay.shared
    window = t.known(size_of(facts["window"][0]))
    dtype = next((v.dtype for v in replay.values if v.dtype.floating), t.policy.compute_dtype)
    causal_masks(
        t,
        shared,
        dtype,
        full=not window,
        windows=(window,) if window else (),
        eager_only=replay.eager_only,
    )
    return []


def _dropout(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    with replay.t.scope(module):
        return [dropout(replay.t, replay.values[read[0]], facts["p"])]


def _constant(
    replay: Playing, module: str, read: Sequence[int], outs: Sequence[Any], facts: Mapping[str, Any]
) -> list[Value]:
    axes, dtype = outs[0]
    return [constant(replay.t, "constant", tuple(size_of(n) for n in axes), find_dtype(dtype))]


COMPOSITES: dict[str, Callable[..., list[Value]]] = {
    "linear": _linear,
    "embedding": _embedding,
    "attend": _attend,
    "sdpa": _sdpa,
    "mask": _mask,
    "dropout": _dropout,
    "leaf": _leaf,
    "constant": _constant,
}
