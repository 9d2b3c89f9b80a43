"""Inference engines, one row each: what they take of a GPU, how they batch, and what they launch."""

from __future__ import annotations

from napkinmath.base.dtypes import INT8
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.record import Record
from napkinmath.base.units import GIB, MIB
from napkinmath.catalog.quantization import ALIASES, FORMATS
from napkinmath.ir.weight_format import Grouping, WeightFormat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.config.hardware import Gpu


class BatchDefaults(Record):
    """What an engine takes where nothing is said, on GPUs of `memory_bytes` or more."""

    memory_bytes: int
    prefill_tokens: int
    """Tokens of prompts that one forward reads at most."""
    sequences: int
    """Sequences that run at once at most."""
    graphs_to: int
    """Largest batch for which a CUDA graph is captured."""
    reserved_bytes: int = 0
    """What is left free of the memory, where that and no share is the default."""


class Engine(Record):
    """An inference engine."""

    name: str
    meaning: str
    source: str
    memory_share: float = 0.0
    """Of the whole device: weights, the profiled forward and cache. 0: what is left free decides."""
    share_holds_graphs: bool = False
    """CUDA graphs are made within the share, not beside it."""
    block_tokens: int = 0
    """Tokens of a page of the cache; 0: the cache grows with the sequences, without pages."""
    defaults: tuple[BatchDefaults, ...] = ()
    """From the largest GPUs to the smallest."""
    small_gpus: tuple[str, ...] = ()
    """Names of GPUs that take the smallest row whatever their memory."""
    sleeps_in_powers_of_two: bool = False
    """While it sleeps its weights lie in blocks of torch's pinned memory, which are powers of two (vllm 0.11
    device_allocator/cumem.py CuMemAllocator.sleep, a block for each segment of the weights' pool; torch
    aten/src/ATen/core/CachingHostAllocator.h allocate)."""
    graphs: bool = True
    family_graphs: tuple[tuple[str, int], ...] = ()
    """Families of models that have graphs for larger batches than its defaults."""
    graph_step: int = 8
    """Every so many sequences a graph is captured, after 1, 2 and 4."""
    graph_bytes: tuple[int, int] = (200 * MIB, 8 * MIB)
    """Of all graphs together, and of each captured size more: 0.31 GiB for 11 sizes and 0.96 GiB
    for 67 of a larger model in vLLM's own logs ("Graph capturing finished"). Rests on few runs."""
    merges: bool = True
    """Queries, keys and values are one product, gates and values of the feed-forward another."""
    runs_encoders: bool = True
    """It serves a text encoder beside a decoder (BART, T5). vLLM 0.11 has none (its pull request
    24907)."""
    mixes: bool = False
    """Prompts are read in one forward with the tokens of running sequences (chunked prefill); else in
    forwards of their own while the others wait."""
    reads_chosen: bool = False
    """Kernels read only the keys that an indexer chooses; transformers masks the others."""
    reads_few_whole: bool = False
    """Prompts of no more keys than may be chosen are read by plain attention (sglang 0.5.9
    srt/layers/attention/nsa_backend.py set_nsa_prefill_impl)."""
    trtllm_since: tuple[int, ...] | None = None
    """The release since which experts in FP8 by blocks run in TRT-LLM's kernel on data-centre Blackwell,
    in Triton's before (aiconfigurator's moe_perf of vLLM 0.22 and 0.24; sglang 0.5.9 srt/server_args.py sets
    moe_runner_backend)."""
    trtllm_routes_minimax_since: tuple[int, ...] = ()
    """The release since which that kernel routes as MiniMax M2 does, by sigmoids with a bias and without
    groups: before, its experts in NVFP4 ran in CUTLASS' (vllm-project/vllm#39141)."""
    sinks_by_triton: bool = False
    """Attention with a sink a head runs in its Triton kernel, but for Hopper and data-centre Blackwell
    (vllm 0.11 platforms/cuda.py get_attn_backend_cls)."""
    release: tuple[int, ...] = ()
    """Its own; () is the newest that is known."""
    left_open: str = ""
    """What its releases or installs do differently and the price of its cache does not know."""
    polls: bool = False
    """New requests can be looked for after every so many tokens (sglang 0.5 srt/managers
    scheduler_recv_skipper.py: a forward that reads prompts counts as 1,000)."""
    formats: tuple[tuple[str, float], ...] = ()
    """Formats of weights that it serves on NVIDIA's GPUs, each with the least compute capability that
    its kernels have; () where any runs."""
    least_capability: float = 0.0
    layer_issue_s: float = 0.0
    """The host's time to issue a layer without experts in a forward that no graph holds. Rests on Llama
    3.1 70B in FP8 on 8 B200, which InferenceX serves with graphs of decoding alone (its
    benchmarks/70b_fp8_b200_docker.sh of October 2025); shown on the others."""
    experts_issue_s: float = 0.0
    """The host's time to issue a layer of experts in a forward that reads prompts and that no graph
    holds. Rests on MiniMax M2.5 (vLLM) and DeepSeek R1 (SGLang) on 8 H200 with prompts of 1,024 tokens,
    whose first tokens do not get faster with more GPUs (SemiAnalysisAI/InferenceX by
    ai-dynamo/aiconfigurator silicon_sample.csv); shown on others by benchmarks/accuracy/decoding.py."""
    step_s: float = 0.0
    """Between two forwards: scheduling, sampling and the copy of the tokens to the host."""
    front_s: float = 0.0
    """Of a server, before a request's first forward: its text taken in, and its wait for the
    scheduler. Rests on Llama 3.1 70B and gpt-oss on H100 with prompts of 1,024 tokens
    (ai-dynamo/aiconfigurator silicon_sample.csv)."""
    text_s: float = 0.0
    """Of a token of a prompt that comes as text: Hugging Face's tokenizers take 2.6 MiB/s on a core of
    5.4 GHz (gist.github.com/benvanik 9090b155, English prose of 4.2 bytes a token), servers' cores
    turn at about 3."""

    @property
    def spelling(self) -> str:
        """As `--engine` takes it: the name, and the release where one was named."""
        return (
            "-".join([self.name, ".".join(map(str, self.release))]) if self.release else self.name
        )

    def attends_by_triton(self, gpu: Gpu, family: str) -> bool:
        """Whether a family's attention runs in its Triton kernel for the sake of sinks."""
        capability = _capability(gpu)
        others = capability >= 8 and capability != 9 and not 10 <= capability < 11
        return self.sinks_by_triton and family == "gpt_oss" and others

    def runs_trtllm_experts(self, gpu: Gpu, family: str, *, by_blocks: bool) -> bool:
        """Whether a family's experts in FP8 by blocks, or in NVFP4, run in TRT-LLM's kernel."""
        if self.trtllm_since is None or not 10 <= _capability(gpu) < 11:
            return False
        since = self.trtllm_since if by_blocks else ()
        if family == "minimax_m2":
            since = max(since, self.trtllm_routes_minimax_since)
        return not self.release or self.release >= since

    def lacks(self, gpu: Gpu, name: str) -> str:
        """Why it serves weights in a format ('' for 16 bits) on no such GPU; '' where it does, and
        where the GPU's capability is not known."""
        capability = _capability(gpu)
        least = dict(self.formats).get(name)
        if name and self.formats and least is None:
            return f"{self.name} does not serve it"
        least = max(self.least_capability, least or 0.0)
        if not capability or capability >= least:
            return ""
        return (
            f"{self.name} takes it from compute capability {least:.1f} on, and {gpu.name}"
            f" has {capability:.1f}"
        )

    def served_on(self, gpu: Gpu, names: Sequence[str]) -> list[str]:
        """Those of some formats that it serves on a GPU."""
        return [name for name in names if not self.lacks(gpu, name)]

    def computes_in(self, gpu: Gpu) -> str:
        """The type of activations, and of weights without a format, where nothing is said (vllm 0.11
        config/model.py _resolve_auto_dtype; sglang 0.5 model_runner.py load_model)."""
        return "fp16" if gpu.dense_flops and not gpu.supports("bf16") else "bf16"

    def captured(self, largest: int) -> int:
        """Batch sizes for which graphs are captured, up to `largest`."""
        return sum(size <= largest for size in (1, 2, 4)) + largest // self.graph_step

    def graphs_to(self, gpu: Gpu, family: str, asked: int = 0) -> int:
        """The largest batch of a family's models for which a graph is captured, where `asked` (0:
        nothing) is set."""
        return asked or dict(self.family_graphs).get(family, self.defaults_on(gpu).graphs_to)

    def defaults_on(self, gpu: Gpu) -> BatchDefaults:
        """The defaults on a GPU."""
        if any(name in gpu.name.lower() for name in self.small_gpus):
            return self.defaults[-1]
        fitting = (row for row in self.defaults if gpu.memory_bytes >= row.memory_bytes)
        return next(fitting, self.defaults[-1])


ENGINES: dict[str, Engine] = {
    row.name: row
    for row in (
        Engine(
            name="vllm",
            meaning="vLLM's server, version 1 of its engine",
            source=(
                "vllm 0.11 config/cache.py CacheConfig.gpu_memory_utilization, block_size;"
                " engine/arg_utils.py EngineArgs.get_batch_defaults; config/compilation.py"
                " cudagraph_capture_sizes; model_executor/models/config.py GptOssForCausalLMConfig;"
                " v1/worker/gpu_worker.py determine_available_memory; v1/sample/ops"
                " topk_topp_sampler.py forward_native and forward_cuda;"
                " layers/quantization/*.py get_min_capability, as its page of supported hardware"
                " (docs.vllm.ai/en/v0.11.2/features/quantization) has it; hqq_marlin.py for 4 bits;"
                " docs/getting_started/installation/gpu.md"
            ),
            sleeps_in_powers_of_two=True,
            least_capability=7.0,
            formats=(
                *((name, 7.0) for name in ("nf4", "fp4", "int8", "gptq-int4", "gptq-int8")),
                ("awq-int4", 7.5),
                *((name, 8.0) for name in ("fp8", "fp8-block", "hqq-int4", "nvfp4", "mxfp4")),
                *((name, 8.0) for name in ("mxfp4-marlin", "mxfp4-fp8")),
            ),
            memory_share=0.9,
            block_tokens=16,
            defaults=(
                BatchDefaults(
                    memory_bytes=70 * GIB, prefill_tokens=8192, sequences=1024, graphs_to=512
                ),
                BatchDefaults(memory_bytes=0, prefill_tokens=2048, sequences=256, graphs_to=512),
            ),
            small_gpus=("a100",),
            mixes=True,
            reads_chosen=True,
            runs_encoders=False,
            family_graphs=(("gpt_oss", 1024),),
            left_open=(
                "tokens are drawn by a kernel of FlashInfer; where vLLM sorts all logits instead, its"
                " profile leaves less for the cache (5 GiB less was seen for Qwen3 235B in vLLM 0.9)"
            ),
            sinks_by_triton=True,
            trtllm_since=(0, 24),
            trtllm_routes_minimax_since=(0, 20),
            layer_issue_s=0.6e-3,
            experts_issue_s=1.1e-3,
            step_s=0.4e-3,
            front_s=15e-3,
            text_s=2.7e-6,
        ),
        Engine(
            name="sglang",
            meaning="SGLang's server with overlapped scheduling",
            source=(
                "sglang 0.5 srt/server_args.py ServerArgs (mem_fraction_static, chunked_prefill_size,"
                " cuda_graph_max_bs by memory of the GPU); 0.5.5 model_executor/model_runner.py"
                " load_model (7.5 at least), layers/quantization/*.py get_min_capability"
            ),
            least_capability=7.5,
            formats=(
                *((name, 7.5) for name in ("nf4", "fp4", "int8", "gptq-int4", "gptq-int8")),
                ("awq-int4", 7.5),
                *((name, 8.0) for name in ("fp8", "fp8-block", "mxfp4")),
                *((name, 8.0) for name in ("mxfp4-marlin", "mxfp4-fp8")),
                ("nvfp4", 10.0),
            ),
            share_holds_graphs=True,
            block_tokens=1,
            defaults=(
                BatchDefaults(
                    memory_bytes=160 * GIB,
                    prefill_tokens=16384,
                    sequences=4096,
                    graphs_to=512,
                    reserved_bytes=32 * GIB,
                ),
                BatchDefaults(
                    memory_bytes=90 * GIB,
                    prefill_tokens=8192,
                    sequences=4096,
                    graphs_to=256,
                    reserved_bytes=18 * GIB,
                ),
                BatchDefaults(
                    memory_bytes=60 * GIB,
                    prefill_tokens=8192,
                    sequences=4096,
                    graphs_to=256,
                    reserved_bytes=12 * GIB,
                ),
                BatchDefaults(
                    memory_bytes=35 * GIB,
                    prefill_tokens=4096,
                    sequences=2048,
                    graphs_to=32,
                    reserved_bytes=6 * GIB,
                ),
                BatchDefaults(
                    memory_bytes=0,
                    prefill_tokens=2048,
                    sequences=2048,
                    graphs_to=24,
                    reserved_bytes=4 * GIB,
                ),
            ),
            polls=True,
            reads_chosen=True,
            reads_few_whole=True,
            trtllm_since=(0, 5, 9),
            experts_issue_s=3.2e-3,
            step_s=0.2e-3,
            front_s=15e-3,
            text_s=2.7e-6,
        ),
        Engine(
            name="hf",
            meaning="transformers' generate: one batch, a cache that grows, no graphs",
            source="transformers 5.23 generation/utils.py GenerationMixin._sample",
            memory_share=1.0,
            defaults=(
                BatchDefaults(
                    memory_bytes=0, prefill_tokens=1 << 40, sequences=1 << 20, graphs_to=0
                ),
            ),
            graphs=False,
            merges=False,
            step_s=0.5e-3,
        ),
    )
}

# Weight formats that engines serve and no trainer loads, beside those of catalog/quantization.py.
# MXFP4's product is a switch of vLLM (0.18 model_executor/layers/quantization/mxfp4.py
# get_mxfp4_backend, Mxfp4Config.get_quant_method: experts alone are packed, as in sglang): 16-bit
# inputs by default, FP8 ones on Blackwell with
# VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8, Marlin with VLLM_MXFP4_USE_MARLIN. Experts of AWQ and GPTQ are
# Marlin's (quantization/awq_marlin.py, gptq_marlin.py).
# What the kernels pad: mxfp4.py Mxfp4MoEMethod.create_weights of vLLM at 007d5005.
_MXFP4 = FORMATS["mxfp4"].replace(packs_linears=False, packs_experts=True)
_FP8 = FORMATS["fp8"].replace(
    meaning="8-bit float, one scale a row",
    source="vllm 0.11 model_executor/layers/quantization/fp8.py Fp8LinearMethod",
    group_size=1,
    grouping=Grouping.ROW,
    byte_dtype=INT8,
    multiplied_in="fp8",
    packs_experts=True,
    dequantize_kernel="nf4",
    widened_rest=True,
    multiplies_fp8=False,
)
SERVED_FORMATS: dict[str, WeightFormat] = {
    **FORMATS,
    **{name: FORMATS[name].replace(by_marlin=True) for name in ("awq-int4", "gptq-int4")},
    "mxfp4": _MXFP4,
    "mxfp4-fp8": _MXFP4.replace(name="mxfp4-fp8", multiplied_in="fp8", pads=(256, 256)),
    "mxfp4-marlin": _MXFP4.replace(name="mxfp4-marlin", by_marlin=True, pads=(256, 128)),
    "fp8": _FP8,
    "fp8-block": _FP8.replace(
        name="fp8-block",
        meaning="8-bit float, one scale for 128 x 128 weights, as DeepSeek publishes it",
        group_size=128,
        grouping=Grouping.SQUARE,
        by_blocks=True,
    ),
}


def find_served_format(name: str) -> WeightFormat:
    """The row of a weight format; raises InputError for one that is not there."""
    plain = name.lower()
    row = SERVED_FORMATS.get(ALIASES.get(plain, plain))
    if row is None:
        raise InputError(
            f"--quant {shown(name)} is unknown{suggest(name, list(SERVED_FORMATS))}; use one of"
            f" {', '.join(SERVED_FORMATS)}"
        )
    return row


def _capability(gpu: Gpu) -> float:
    """NVIDIA's number; 0 where it is not known, and of other vendors, who name architectures."""
    return float(gpu.compute_capability or 0) if gpu.vendor == "nvidia" else 0.0


def kernels_of(row: WeightFormat, gpu: Gpu) -> WeightFormat:
    """The format as its kernels on a GPU store it: MXFP4 is Triton's on Hopper, FlashInfer's on
    Blackwell's data-centre GPUs and Marlin's elsewhere (get_mxfp4_backend)."""
    capability = _capability(gpu)
    if row is not _MXFP4 or not capability or 9 <= capability < 10:
        return row
    if 10 <= capability < 11:
        return row.replace(pads=(256, 256))
    return SERVED_FORMATS["mxfp4-marlin"]


def find_engine(name: str) -> Engine:
    """The row of an engine, of a release where one is named (vllm-0.19, vllm==0.19.0); raises
    InputError for one that is not there."""
    plain, _, release = name.lower().replace("==", "-").partition("-")
    row, numbers = ENGINES.get(plain), release.split(".") if release else []
    if row is None or not all(number.isdecimal() and number.isascii() for number in numbers):
        raise InputError(
            f"engine {shown(name)} is unknown{suggest(name, list(ENGINES))}; use one of"
            f" {', '.join(ENGINES)}, or a release as in vllm-0.19"
        )
    if not numbers:
        return row
    return row.replace(
        release=tuple(map(int, numbers)), meaning=f"{row.meaning}, release {release}"
    )
