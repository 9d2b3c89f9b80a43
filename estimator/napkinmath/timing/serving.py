"""Seconds of an engine's forwards: prompts in chunks, and one token of each running sequence.

A forward is its products, attention over the cache, the small kernels between them, sums over
tensor-parallel ranks, and what the engine does between two forwards. Decoding reads every weight
once for all sequences.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.config.cluster import Cluster
from napkinmath.config.parallel_config import ASSUMED_NODE
from napkinmath.ir.costs import LAYER_DISPATCHES
from napkinmath.timing.attainable import has_wgmma
from napkinmath.timing.attention import attention_s
from napkinmath.timing.chosen_keys import choice_s, chosen_prompt_s, chosen_read
from napkinmath.timing.collectives import fabric
from napkinmath.timing.efficiency import bytes_of, dequantize_s, gemm_s
from napkinmath.timing.engine_sums import engine_sum_s
from napkinmath.timing.served_products import (
    experts_more_s,
    experts_start_s,
    most_of_experts,
    multiplies_narrow,
    quantize_s,
    unpacks_first,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.catalog.engines import Engine
    from napkinmath.config.hardware import Hardware
    from napkinmath.lowering.rollout.served import (
        LayerCache,
        ServedLayer,
        ServedModel,
        ServedProduct,
    )
    from napkinmath.timing.efficiency import Efficiency

# Of a kernel replayed from a graph (te42kyfo/gpu-benches gpu-small-kernels, A100 and H200).
_GRAPH_KERNEL_S = 1.3e-6
# Kernels of a layer beside products and attention: two norms with the residual, rotation and the
# write to the cache, the gate of the feed-forward.
_SMALL_KERNELS = 5
# Share of the products' rate that queries against cached rows reach.
DECODE_FLOPS_SHARE = 0.5


class DecodeKernel(Record):
    """Attention of one token a sequence over its pages."""

    start_s: float
    """Of the kernel that splits the keys and of the one that joins the parts."""
    tile_s: float
    """By tiles (sequences x key/value heads) on each SM."""
    stream: float
    """Share of the memory's bandwidth."""


# Fitted to vLLM's decoding attention of that time (ai-dynamo/aiconfigurator generation_attention:
# flash 3 on H100 and H200, flash 4 on B200, flash 2 on A100 and L40S). `decoding.py --held-out` fits
# them to one GPU and shows the others.
DECODE_KERNELS = {
    "flash2": DecodeKernel(start_s=15e-6, tile_s=2.0e-6, stream=0.87),
    "flash3": DecodeKernel(start_s=10.4e-6, tile_s=2.0e-6, stream=1.0),
    "flash4": DecodeKernel(start_s=9e-6, tile_s=1.0e-6, stream=1.0),
}


# (tokens of each prompt, prompts, tokens of each that were read earlier)
# (tokens drawn, sequences, tokens of each before)
if TYPE_CHECKING:
    from typing import TypeAlias

    Read: TypeAlias = tuple[int, int, int]
    Decoded: TypeAlias = tuple[int, int, int]
NOTHING = (0, 0, 0)


class ForwardTime(Record):
    """Seconds of a forward by what they go into."""

    products_s: float = 0.0
    attention_s: float = 0.0
    other_s: float = 0.0
    network_s: float = 0.0
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return self.products_s + self.attention_s + self.other_s + self.network_s + self.host_s

    def __add__(self, other: ForwardTime) -> ForwardTime:
        return ForwardTime(
            products_s=self.products_s + other.products_s,
            attention_s=self.attention_s + other.attention_s,
            other_s=self.other_s + other.other_s,
            network_s=self.network_s + other.network_s,
            host_s=self.host_s + other.host_s,
        )


class EngineClock:
    """Prices forwards of a model in an engine on one GPU, or on tensor-parallel ranks of a
    cluster."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        speed: Efficiency,
        cluster: Cluster | None = None,
        *,
        graphs: bool = True,
        prompts_held: int | None = None,
        draft: tuple[int, float] | None = None,
        host_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.model, self.engine, self.speed = model, engine, speed
        self.graphs = graphs and engine.graphs
        own = engine.graphs_to(speed.gpu, model.family) if prompts_held is None else prompts_held
        self.prompts_held = own if engine.mixes else 0  # tokens of a forward with prompts
        self.draft, self.host_s = draft, host_s
        self.cluster = cluster
        wide = cluster is not None and model.ranks > 1
        self.fabric = fabric(cluster, model.ranks) if wide and cluster is not None else None
        self.kernel = kernel_of(speed)
        self._known: dict[tuple[Read, Decoded], ForwardTime] = {}
        self._of_rows: dict[tuple[int, int], tuple[float, float]] = {}

    def decode(self, sequences: int, context: int) -> ForwardTime:
        """One token of each of `sequences`, which have `context` tokens before it."""
        return self._forward(NOTHING, (sequences, sequences, context))

    def token_s(self, sequences: int, context: int) -> float:
        """Seconds for one more token of each sequence. Drafted tokens come from a head of one layer
        and are read together: of `n` with a share `a` accepted (1 - a^(n+1)) / (1 - a) stay
        (Leviathan et al. 2023, equation 1)."""
        plain = self.decode(sequences, context)
        if self.draft is None:
            return plain.seconds
        drafted, accepted = self.draft
        read = self._forward(NOTHING, (sequences * (1 + drafted), sequences, context))
        layer = (plain.seconds - plain.host_s) / max(1, self.model.num_layers)
        stay = (1 - accepted ** (drafted + 1)) / (1 - accepted)
        return (read.seconds + drafted * layer) / stay

    def prefill(self, tokens: int, before: int = 0, *, prompts: int = 1) -> ForwardTime:
        """`prompts` prompts of `tokens` tokens together, `before` tokens of each read earlier."""
        return self._forward((tokens, prompts, before), NOTHING)

    def mixed(
        self, tokens: int, before: int, sequences: int, context: int, *, prompts: int = 1
    ) -> ForwardTime:
        """The two in one forward, where the engine does so: weights are read once for both."""
        if not self.engine.mixes:
            one, other = (
                self.prefill(tokens, before, prompts=prompts),
                self.decode(sequences, context),
            )
            return one + other
        return self._forward((tokens, prompts, before), (sequences, sequences, context))

    def _forward(self, read: Read, decoded: Decoded) -> ForwardTime:
        key = read, decoded
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._priced(read, decoded)
        return found

    def _priced(self, read: Read, decoded: Decoded) -> ForwardTime:
        prompt, prompts, before = read
        drawn, sequences, context = decoded
        tokens, ends = prompt * prompts + drawn, prompts + drawn
        products, other = self._rows_s(tokens, ends)
        attention = kernels = 0.0
        for layer in self.model.layers:
            small = _SMALL_KERNELS if layer.is_layer else 0
            kernels += layer.count * (len(layer.products) + small)
            if layer.is_layer and not self.graphs:
                kernels += layer.count * LAYER_DISPATCHES[0]
            if layer.cache is not None:
                if prompts:
                    attention += layer.count * self._prompt_s(layer, prompts, before, prompt)
                if drawn:
                    each = drawn // sequences
                    attention += layer.count * self._decode_s(layer, sequences, context, each)
                kernels += layer.count
        network = self._network_s(tokens)
        device = products + attention + other + network
        return ForwardTime(
            products_s=products,
            attention_s=attention,
            other_s=other,
            network_s=network,
            host_s=self._host_s(kernels, device, tokens if prompts else 0)
            + self.host_s[0]
            + self.host_s[1] * ends,
        )

    def _rows_s(self, tokens: int, ends: int) -> tuple[float, float]:
        """Products and small kernels: of so many rows alike, whatever was read before them."""
        found = self._of_rows.get((tokens, ends))
        if found is None:
            products = other = 0.0
            for layer in self.model.layers:
                for product in layer.products:
                    products += layer.count * self.product_s(product, tokens, ends)
                if layer.is_layer:
                    other += layer.count * self._small_s(layer, tokens)
            found = self._of_rows[tokens, ends] = products, other + self._sampling_s(ends)
        return found

    def product_s(self, product: ServedProduct, tokens: int, sequences: int) -> float:
        """Seconds of one product. Packed weights are read packed, and multiplied in 8 bits where
        they are FP8 and the GPU can; those of bitsandbytes are unpacked first for many rows."""
        packing = self.model.packing if product.packed else None
        rows = sequences if product.last_tokens else tokens
        dtype, batch = self.model.dtype, 1
        narrow = packing is not None and multiplies_narrow(packing, self.speed)
        if product.experts:
            missed = (1 - product.visited / product.experts) ** rows
            batch = max(1, round(product.experts * (1 - missed)))
            rows = -(-rows * product.visited // batch)
        if packing is not None and narrow:
            dtype = packing.multiplied_in
        size = (rows, product.n, product.k)
        time = gemm_s(*size, dtype, self.speed, batch=batch, result_bits=16 if narrow else 0)
        if narrow:
            time += quantize_s(tokens * product.k, self.model.dtype, self.speed)
        if packing is not None and unpacks_first(packing, rows, product.n, self.speed):
            elements = batch * product.n * product.k
            time += dequantize_s(packing.dequantize_kernel, elements, self.speed, nested=False)
        elif product.packed:
            full = batch * product.n * product.k * bytes_of(dtype)
            share = product.nbytes / max(1, (product.experts or 1) * product.n * product.k)
            saved = full - batch * product.n * product.k * share
            arithmetic = 2 * rows * batch * product.n * product.k / self.speed.matmul_rate(dtype)
            least = self.speed.gemm_start_s + arithmetic
            time = max(least, time - saved / self.speed.stream_bytes_per_s)
        if product.experts and self.engine.merges:
            flops = 2.0 * rows * batch * product.n * product.k
            gpu, by_blocks = self.speed.gpu, packing is not None and packing.by_blocks
            trtllm = self.engine.runs_trtllm_experts(gpu, self.model.family, by_blocks=by_blocks)
            most = most_of_experts(packing, gpu, trtllm=trtllm)
            moved = rows * batch * (product.n + product.k)
            start_s = experts_start_s(packing)
            time += experts_more_s(flops, moved, dtype, self.speed, start_s=start_s, most=most)
        return float(time)

    def _prompt_s(self, layer: ServedLayer, prompts: int, before: int, prompt: int) -> float:
        cache = layer.cache
        assert cache is not None
        if not cache.token_bytes:  # a scan: its inputs and outputs pass through memory
            moved = 6 * prompts * prompt * sum(p.n for p in layer.products[:1])
            return 8 * self.kernel_s + moved * bytes_of(self.model.dtype) / self._stream
        whole = prompt + before <= cache.chosen and self.engine.reads_few_whole
        if cache.chosen and self.engine.reads_chosen and not whole:
            return chosen_prompt_s(cache, layer.heads, prompts, prompt, before, self.speed)
        window = cache.window or None
        return float(
            attention_s(
                self.kernel,
                prompts,
                layer.heads,
                layer.kv_heads,
                prompt,
                prompt + before,
                max(layer.head_size, 1),
                True,
                window,
                self.model.dtype,
                False,
                self.speed,
            )
        )

    def _decode_s(self, layer: ServedLayer, sequences: int, context: int, each: int) -> float:
        cache = layer.cache
        assert cache is not None
        if not cache.token_bytes:
            return self._states_s(cache, sequences)
        rows = min(context + 1, cache.window) if cache.window else context + 1
        read, chosen = sequences * rows * cache.token_bytes, 0.0
        if cache.chosen and self.engine.reads_chosen:
            if context >= cache.chosen and cache.choosing_flops:
                chosen = 2 * self.kernel_s + choice_s(
                    max(each * sequences, self.speed.gpu.num_sms), context + 1, self.speed
                )
            rows, each_read = chosen_read(cache, context + 1)
            read = sequences * each_read
        return (
            chosen
            + self._states_s(cache, sequences)
            + decode_attention_s(
                self.kernel,
                sequences * layer.kv_heads,
                read,
                each * sequences * rows * cache.score_flops,
                self.model.dtype,
                self.speed,
            )
        )

    def _states_s(self, cache: LayerCache, sequences: int) -> float:
        """A scan's states, read and written; beside attention in layers that have both."""
        if not cache.state_bytes:
            return 0.0
        return 2 * self.kernel_s + 2 * sequences * cache.state_bytes / self._stream

    def _small_s(self, layer: ServedLayer, tokens: int) -> float:
        """Norms, rotation, writes to the cache and gates: about as many values as products make."""
        made = sum((p.visited or 1) * p.n for p in layer.products)
        moved = bytes_of(self.model.dtype) * tokens * (8 * self.model.hidden + 1.5 * made)
        return _SMALL_KERNELS * self.kernel_s + moved / self._stream

    def _sampling_s(self, sequences: int) -> float:
        """Logits cast to fp32, the softmax and the draw: five passes."""
        return 5 * (self.kernel_s + 4 * sequences * self.model.vocabulary / self._stream)

    def _network_s(self, tokens: int) -> float:
        if self.fabric is None or self.cluster is None:
            return 0.0
        layers = self.model.layers
        size = bytes_of(self.model.dtype)
        results = tokens * self.model.hidden * size
        numbers = 4 * tokens  # in fp32
        return float(
            sum(layer.count * layer.sums for layer in layers)
            * engine_sum_s(results, self.fabric, self.cluster)
            + sum(layer.count * layer.norm_sums for layer in layers)
            * engine_sum_s(numbers, self.fabric, self.cluster)
            + sum(
                layer.count
                * engine_sum_s(layer.inner_sum * tokens * size, self.fabric, self.cluster)
                for layer in layers
                if layer.inner_sum
            )
        )

    def _host_s(self, kernels: float, device: float, read: int) -> float:
        """What the engine does between forwards, and the host's time to issue kernels where no
        graph holds them, as far as it is longer than the device's. Graphs hold no forward that
        reads more than so many tokens; without chunks among other sequences' tokens none that reads
        (vllm 0.11 v1/cudagraph_dispatcher.py; sglang 0.5 forward_mode.py is_cuda_graph)."""
        if self.graphs:
            issued = self._layers_issued_s if read > self.prompts_held else 0.0
        else:
            issued = kernels * self.speed.dispatch_forward_s
        return self.engine.step_s + max(0.0, issued - device)

    @property
    def _layers_issued_s(self) -> float:
        """The host's time to issue all layers one by one."""
        engine = self.engine
        return sum(
            layer.count
            * (
                engine.experts_issue_s
                if any(p.experts for p in layer.products)
                else engine.layer_issue_s
            )
            for layer in self.model.layers
            if layer.is_layer
        )

    @property
    def kernel_s(self) -> float:
        """Start of a small kernel."""
        return _GRAPH_KERNEL_S if self.graphs else self.speed.kernel_start_s

    @property
    def _stream(self) -> float:
        return self.speed.stream_bytes_per_s


def engine_cluster(hardware: Hardware, ranks: int) -> Cluster:
    """The machines of an engine's tensor-parallel ranks: one, or several as large as usual."""
    each = min(ranks, ASSUMED_NODE)
    return Cluster(hardware=hardware, gpus_per_node=each, num_nodes=-(-ranks // each))


def kernel_of(speed: Efficiency) -> str:
    """The attention kernel that engines choose on a GPU."""
    if not has_wgmma(speed.gpu):
        return "flash2"
    return "flash4" if speed.gpu.architecture == "blackwell" else "flash3"


def decode_attention_s(
    kernel: str, tiles: int, read: float, flops: float, dtype: str, speed: Efficiency
) -> float:
    """Seconds of attention of one token a sequence: `tiles` sequences times key/value heads, `read`
    bytes of cache."""
    row = DECODE_KERNELS[kernel]
    start = row.start_s + row.tile_s * tiles / speed.gpu.num_sms
    moved = read / (speed.stream_bytes_per_s * row.stream)
    return start + max(moved, flops / (DECODE_FLOPS_SHARE * speed.matmul_rate(dtype)))
