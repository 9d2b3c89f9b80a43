"""A model as one tensor-parallel rank of an inference engine holds it: its products, its weights
and what it caches, in numbers.

Engines merge projections that read the same input (vllm 0.11 model_executor/layers/linear.py
QKVParallelLinear, MergedColumnParallelLinear). Heads, widths and the vocabulary are split over the
ranks; latent rows are whole on each.
"""

from __future__ import annotations

from napkinmath.base.dtypes import find_dtype
from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Bindings
from napkinmath.base.record import Record
from napkinmath.catalog.cache_formats import find_cache_format
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import Attention, Precision, TrainConfig
from napkinmath.ir.cache import Cached, Grows, cached_stages, has_encoder
from napkinmath.lowering.forwards import NoGradForward
from napkinmath.lowering.parallel.tensor_share import mentions, rank_share, shared_symbols
from napkinmath.lowering.parallel.tensor_style import ENGINE
from napkinmath.lowering.policy import Policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Weight
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Run
    from napkinmath.ir.weight_format import WeightFormat

_PRECISIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16, "fp32": Precision.FP32}
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_PACKED = (
    "linear",
    "linear without adapter",
    "unquantized linear",
    "linear subclass",
    "linear that adds its bias",
    "experts",
    "scan",
)


class ServedProduct(Record):
    """A weight that multiplies tokens: rows of the result, of the input, and bytes stored; `experts`
    of them of which a token visits `visited`."""

    name: str
    n: int
    k: int
    nbytes: int
    experts: int = 0
    visited: int = 0
    last_tokens: bool = False
    """Only the last token of each sequence goes through it."""
    packed: bool = False
    """Stored in the format asked for, not in the type of what generates."""


class LayerCache(Record):
    """What a layer caches on a rank: bytes of a token, bytes that do not grow, numbers for its
    attention."""

    token_bytes: int
    state_bytes: int
    encoder_bytes: int
    window: int
    score_flops: int
    """FLOP of a query of all heads against one cached row, while decoding."""
    chosen: int = 0
    """Rows that a query sees at most, by an indexer's choice; 0: all."""
    chosen_bytes: int = 0
    """Of `token_bytes` those of the rows that are chosen from."""
    choosing_flops: int = 0
    """FLOP of an indexer's query against one row."""


class ServedLayer(Record):
    """`count` equal layers, or an end of the model."""

    name: str
    count: int
    products: tuple[ServedProduct, ...]
    other_bytes: int
    """Weights that multiply nothing: norms, tables, embeddings."""
    cache: LayerCache | None
    heads: int
    kv_heads: int
    head_size: int
    is_layer: bool
    sums: int
    """Results that tensor-parallel ranks sum."""
    norm_sums: int
    """Sums of squares, a number a token: one group's norm over the heads of all ranks."""
    inner_sum: int = 0
    """Numbers a token that ranks sum inside a mixer: a selective scan's steps, B and C."""


class ServedModel(Record):
    """One rank's part of a model in an engine."""

    name: str
    family: str
    layers: tuple[ServedLayer, ...]
    hidden: int
    vocabulary: int
    """Of all ranks."""
    ranks: int
    dtype: str
    encoder: bool
    packing: WeightFormat | None = None
    """How packed products are stored."""

    @property
    def weight_bytes(self) -> int:
        """Of one rank."""
        return sum(
            layer.count * (layer.other_bytes + sum(p.nbytes for p in layer.products))
            for layer in self.layers
        )

    @property
    def num_layers(self) -> int:
        """Layers that repeat."""
        return sum(layer.count for layer in self.layers if layer.is_layer)

    def cached(self, tokens: int, encoder_tokens: int = 0) -> int:
        """Bytes that a rank keeps of one sequence, without pages."""
        total = 0
        for layer in self.layers:
            if layer.cache is not None:
                seen = min(tokens, layer.cache.window) if layer.cache.window else tokens
                one = layer.cache.state_bytes + seen * layer.cache.token_bytes
                total += layer.count * (one + encoder_tokens * layer.cache.encoder_bytes)
        return total


class Serving(Record):
    """How weights and cache are stored, and over how many ranks."""

    weights: WeightFormat | None = None
    """None: the type of what generates."""
    dtype: str = "bf16"
    cache_format: str = "auto"
    ranks: int = 1
    merges: bool = True
    paged: bool = True


def served(spec: ModelSpec, how: Serving) -> ServedModel:
    """The model as a rank of an engine has it. Raises InputError for models that generate nothing,
    and for ranks that do not divide it."""
    items = [item for stage in cached_stages(spec) for item in stage.part.cached]
    own = _rank_share(spec, items, how.ranks) if how.ranks > 1 else spec
    config = TrainConfig(precision=_PRECISIONS[how.dtype], attention=Attention.AUTO)
    forward = NoGradForward(own, Policy(config, find_stack(config.stack)), config, own=True)
    one_group = dict(spec.symbols).get("mg") == 1
    layers = tuple(
        _layer(
            run,
            Bindings({**dict(own.symbols), **dict(run.stage.symbols)}),
            how,
            one_group=one_group,
        )
        for run in forward.runs
        if run.stage.modality != "image"
    )
    return ServedModel(
        name=spec.name,
        family=spec.family,
        layers=layers,
        hidden=dict(own.symbols)["h"],
        vocabulary=dict(spec.symbols).get("v", 0),
        ranks=how.ranks,
        dtype=how.dtype,
        encoder=has_encoder(spec),
        packing=how.weights,
    )


def _rank_share(spec: ModelSpec, cached: list[Cached], ranks: int) -> ModelSpec:
    """One rank's part. Raises InputError for sizes that do not divide, and for states that are not
    counted in heads."""
    shared = shared_symbols(ENGINE)
    for item in cached:
        if item.grows is Grows.NOT and not any(mentions(axis, *shared) for axis in item.axes):
            raise InputError(
                f"{shown(spec.name)} keeps states that are not counted in heads, whose split over"
                " tensor-parallel ranks is not priced; use --tp 1"
            )
    return rank_share(spec, ranks, ENGINE)


def _summed(run: Run, *, one_group: bool) -> tuple[int, int]:
    """(results, sums of squares) that ranks sum in a layer: a module whose last product's input is
    split is summed once; the norm of a state-space layer's one group waits for all ranks (vllm 0.11
    layers/mamba/mamba_mixer2.py Mixer2RMSNormGated)."""
    shared, modules = shared_symbols(ENGINE), set[str]()
    for weight in run.block.weights:
        if _multiplies(weight) and mentions(weight.axes[-1], *shared):
            inner = weight.path.removeprefix(f"{run.stage.path}.").removeprefix("*.").split(".")
            modules.add(".".join(inner[: 2 if inner[1].isdecimal() else 1]))  # T5 numbers them
    norms = [w for w in run.block.weights if w.path.endswith("norm.weight")]
    return len(modules), sum(one_group and mentions(w.axes[0], "ma") for w in norms)


def _inner_sum(run: Run) -> Size:
    """Numbers a token of products that read a rank's share and do not end the module (vllm 0.11
    layers/mamba/mamba_mixer.py x_proj, a RowParallelLinear)."""
    shared = shared_symbols(ENGINE)
    return sum(
        weight.axes[-2]
        for weight in run.block.weights
        if weight.path.endswith("x_proj.weight")
        and _multiplies(weight)
        and mentions(weight.axes[-1], *shared)
    )


def _multiplies(weight: Weight) -> bool:
    """Whether tokens are multiplied by a weight; projections that transformers hands to a scan's
    kernel are an engine's own (vllm 0.11 layers/mamba/mamba_mixer2.py out_proj)."""
    if weight.buffer or len(weight.axes) < 2:
        return False
    if weight.kind == "scan":
        return weight.path.endswith("proj.weight")
    return weight.kind not in ("embedding", "conv", "bias")


def _layer(run: Run, bind: Bindings, how: Serving, *, one_group: bool) -> ServedLayer:
    """One run's weights, split into products and the rest."""
    products: list[ServedProduct] = []
    other, size = 0, find_dtype(how.dtype).bits // 8
    for weight in run.block.weights:
        product = _product(weight, bind, how, size)
        if product is not None:
            products.append(product)
        elif not weight.tied_to and not weight.buffer:
            other += bind(weight.elements) * size
    # vllm model_executor/layers/quantization/bitsandbytes.py runs a product for each part.
    apart = how.weights is not None and how.weights.of_bitsandbytes
    symbols = bind.values
    sums, norm_sums = _summed(run, one_group=one_group) if run.stage.checkpointed else (0, 0)
    heads, kv_heads = symbols.get("a", 1), symbols.get("k", symbols.get("a", 1))
    return ServedLayer(
        name=run.name,
        count=run.count,
        products=tuple(_merged(products) if how.merges and not apart else products),
        other_bytes=other,
        cache=_cache(run.stage.part.cached, bind, how, heads),
        heads=heads,
        kv_heads=kv_heads,
        head_size=symbols.get("dh", 1),
        is_layer=run.stage.checkpointed,
        sums=sums,
        norm_sums=norm_sums,
        inner_sum=bind(_inner_sum(run)) if run.stage.checkpointed else 0,
    )


def _product(weight: Weight, bind: Bindings, how: Serving, size: int) -> ServedProduct | None:
    """The product of a weight; None where it multiplies nothing."""
    if not _multiplies(weight):
        return None
    axes = tuple(bind(axis) for axis in weight.axes)
    *stack, n, k = axes
    count = 1
    for axis in stack:
        count *= axis
    packed = how.weights is not None and weight.kind in (
        _PACKED if how.weights.packs_linears else ("experts",)
    )
    nbytes = count * n * k * size
    if packed:
        assert how.weights is not None
        stored = _padded(weight, axes, how.weights.pads)
        tensor, constants = how.weights.pack(weight.path, stored, weight.path)
        nbytes = sum(bind(t.nbytes) for t in (tensor, *constants))
    experts = count if weight.kind == "experts" else 0
    return ServedProduct(
        name=weight.path.removesuffix(".weight").rpartition(".")[2],
        n=n,
        k=k,
        nbytes=0 if weight.tied_to else nbytes,
        experts=experts,
        visited=min(bind.values.get("topk", 1), experts),
        last_tokens=weight.kind == "head",
        packed=packed,
    )


def _padded(weight: Weight, axes: tuple[int, ...], pads: tuple[int, int]) -> tuple[int, ...]:
    """The sizes that experts are stored at; gates and values side by side are padded each."""
    if weight.kind != "experts" or pads == (1, 1):
        return axes
    hidden, own = pads
    own *= 2 if "gate_up" in weight.path else 1
    shared = shared_symbols(ENGINE)
    each = [own if mentions(axis, *shared) else hidden for axis in weight.axes[-2:]]
    sizes = (-(-n // pad) * pad for n, pad in zip(axes[-2:], each, strict=True))
    return (*axes[:-2], *sizes)


def _merged(products: list[ServedProduct]) -> list[ServedProduct]:
    """Products of the same input as one."""
    found: list[ServedProduct] = []
    for product in products:
        group = next((names for names in _MERGED if product.name in names), None)
        last = found[-1] if found else None
        if (
            group is not None
            and last is not None
            and last.name in group
            and (last.k, last.packed, last.experts) == (product.k, product.packed, product.experts)
        ):
            found[-1] = last.replace(n=last.n + product.n, nbytes=last.nbytes + product.nbytes)
        else:
            found.append(product)
    return found


def _cache(
    items: tuple[Cached, ...], bind: Bindings, how: Serving, heads: int
) -> LayerCache | None:
    """The cached tensors of a layer, in bytes."""
    if not items:
        return None
    row, dtype = find_cache_format(how.cache_format), find_dtype(how.dtype)

    def nbytes(item: Cached) -> int:
        return bind(row.nbytes(item, 1, _state_type(item, dtype, how), paged=how.paged))

    by = {kind: [item for item in items if item.grows is kind] for kind in Grows}
    growing = by[Grows.TOKENS]
    chosen = [item for item in growing if item.chosen]
    widths = [bind(item.axes[-1]) for item in growing]
    latent = bool(growing) and growing[0].name == "latent"
    scored = (2 * widths[0] + widths[1] if latent else sum(widths)) if growing else 0
    return LayerCache(
        token_bytes=sum(nbytes(item) for item in growing),
        state_bytes=sum(nbytes(item) for item in by[Grows.NOT]),
        encoder_bytes=sum(nbytes(item) for item in by[Grows.ENCODER]),
        window=growing[0].window if growing else 0,
        score_flops=2 * heads * scored,
        chosen=chosen[0].chosen if chosen else 0,
        chosen_bytes=sum(nbytes(item) for item in chosen),
        choosing_flops=sum(2 * i.choosing_heads * bind(i.axes[-1]) for i in growing),
    )


def _state_type(item: Cached, dtype: DType, how: Serving) -> DType:
    return dtype if item.dtype is None else item.dtype
