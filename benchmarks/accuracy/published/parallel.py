"""How a row's step is spread over several GPUs, and on which machines: the columns `sharding`,
`offload` and `notes`, by their words.

Nothing here knows a source. Degrees are written as letters and numbers (tp8, dp=4), engines by
their names; where a table leaves out the stage of ZeRO, it is the lowest whose states fit the GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from napkinmath.catalog.links import find_network, network_named
from napkinmath.config.cluster import Cluster, NetworkLink
from napkinmath.config.hardware import Hardware, HostLink
from napkinmath.config.parallel_config import (
    ASSUMED_NODE,
    ContextParallel,
    DataParallel,
    ParallelConfig,
    PipelineSchedule,
    Sharding,
)
from napkinmath.config.train_config import OffloadConfig, Precision, TrainConfig
from napkinmath.estimate import estimate
from napkinmath.ir.model_spec import ModelSpec

from published.era import Era
from published.machines import Machine
from published.optimizers import names_optimizer
from published.rows import Row, Unreadable

# Megatron's name for optimizer states in parts: "Adam (distributed)", "distributed optimizer".
_DISTRIBUTED = r"distributed[ -]optimizer|dist[ -]?opt|adam\w*[ (_-]*distributed|distributed adam"
# A switch that is off: "fsdp=0", "fsdp: false".
_OFF = r"\b\w+\s*[=:]\s*(?:(?:0|false|no|none|off|n/a)(?![\w.])|(?=[\s,;]|$))"
# Engines by the words that name them; the first that occurs decides, so that "ddp (FSDP NO_SHARD)"
# is FSDP's way of it.
_ENGINES: tuple[tuple[str, DataParallel], ...] = (
    (r"no[_ -]?shard", DataParallel.FSDP1),
    (r"fsdp ?-?2\b|fully_shard|simplefsdp|fsdp \(v2\)", DataParallel.FSDP2),
    (r"fsdp|fully sharded|hsdp|hybrid[_ -]?shard", DataParallel.FSDP1),
    (r"zero[ -]*(?:stage)?[ -]*0\b", DataParallel.DDP),
    (rf"zero[ -]*(?:stage)?[ -]*1\b|{_DISTRIBUTED}", DataParallel.ZERO1),
    (r"zero[ -]*(?:stage)?[ -]*2\b|deepspeed.*stage[ -]*2", DataParallel.ZERO2),
    (
        r"zero[ -]*(?:stage)?[ -]*3\b|deepspeed.*stage[ -]*3|zero-?infinity|zero\+\+",
        DataParallel.ZERO3,
    ),
    (r"ddp|data[ -]parallel", DataParallel.DDP),
)
_STRATEGIES = (
    (r"no[_ -]?shard", Sharding.NO_SHARD),
    (r"hybrid.*grad[_ -]?op|hybrid_shard_zero2", Sharding.HYBRID_GRAD_OP),
    (r"hybrid|hsdp", Sharding.HYBRID),
    (r"grad[_ -]?op|shard_grad", Sharding.GRAD_OP),
)
_SCHEDULES = (
    (r"zero[ -]?bubble|\bzb", PipelineSchedule.ZERO_BUBBLE),
    (r"interleav|virtual", PipelineSchedule.INTERLEAVED),
    (r"naive|device_map|layer[ -]?split", PipelineSchedule.NAIVE),
    (r"gpipe", PipelineSchedule.GPIPE),
)
# "fp32 grad accum", "bf16 gradient reduction", "grad_reduce_in_bf16".
_SUMMED_IN = (
    r"(?:fp32|bf16|float32|bfloat16)[ -](?:grad\w*[ -])(?:accum|reduc|sum)"
    r"|grad\w*[ _-](?:accum|reduc|sum)\w*[ _-]in[ _-](?:fp32|bf16)"
)
# Tensor-parallel collectives beside products, as torchtitan, Megatron-LM and NeMo call it.
_TENSOR_OVERLAP = r"async[ _-]?tp\b|async tensor|tp[ _-]comm[ _-]overlap"
_USUAL_MICRO_BATCH = 4
# gradient (2) and fp32 master weight, momentum, variance (12) of a parameter trained in 16 bits
_BYTES_BESIDE_WEIGHTS = 14


@dataclass(frozen=True)
class Spread:
    """A mesh on a cluster."""

    parallel: ParallelConfig
    cluster: Cluster


def spread_of(
    row: Row,
    hardware: Hardware,
    spec: ModelSpec,
    config: TrainConfig,
    era: Era,
    assumed: dict[str, str],
    machine: Machine | None = None,
) -> Spread:
    """The mesh and the machines of a row on several GPUs; Unreadable where its degrees contradict
    each other."""
    gpus = row.whole("n_gpus")
    text = re.sub(_OFF, " ", row.words("sharding")).strip()
    naive = bool(re.search(r"naive|device_map|layer[ -]?split", text))
    tensor, context = _degree(text, "tp|mp"), _degree(text, "cp")
    expert = _expert_degree(row, text, spec)
    sequence = _degree(text, "sp|ulysses")
    context = max(context, sequence)
    pipeline = gpus if naive else _degree(text, "pp")
    inner = tensor * context * pipeline
    if gpus % inner:
        raise Unreadable(
            f"sharding {row['sharding']!r}: {inner} ranks of a replica do not divide {gpus} GPUs"
        )
    data = _degree(text, "dp") if re.search(r"\bdp\s*[=:_-]?\s*\d", text) else gpus // inner
    if data * inner != gpus:
        raise Unreadable(
            f"sharding {row['sharding']!r}: {data} x {inner} ranks are not {gpus} GPUs"
        )
    within = _expert_tensor_degree(text, tensor, data * context, expert)
    if expert > 1 and data * context * tensor % (expert * (within or tensor)):
        raise Unreadable(
            f"sharding {row['sharding']!r}: {expert} expert-parallel ranks do not divide"
            f" {data * context}"
        )
    engine = _engine(row, text, hardware, data * context, spec, config, assumed)
    if "engine" in assumed and era.distributed_optimizer and config.adapter is None:
        engine = DataParallel.ZERO1
        assumed["engine"] = "data-parallel ranks: the distributed optimizer, the tool's default"
    if engine is DataParallel.FSDP1 and (expert > 1 or (pipeline > 1 and not naive)):
        engine = DataParallel.FSDP2  # the one that experts and pipelines take
    apart = within not in (0, tensor)  # such ranks send their own tokens
    sequence_parallel = tensor > 1 and (apart or _has_sequence_parallel(row, hardware))
    overlaps = sequence_parallel and re.search(_TENSOR_OVERLAP, row.words("sharding", "notes"))
    parallel = ParallelConfig(
        data_parallel=engine
        if data * context > 1 or engine.is_fsdp or engine.is_zero
        else DataParallel.NONE,
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        context_parallel_size=context,
        expert_parallel_size=expert,
        expert_tensor_parallel_size=within,
        context_parallel=ContextParallel.ULYSSES if sequence > 1 else ContextParallel.RING,
        sequence_parallel=sequence_parallel,
        tensor_overlap=True if overlaps and config.compile else None,
        sharding=_first(_STRATEGIES, text, Sharding.FULL) if engine.is_fsdp else Sharding.FULL,
        **_pipeline(text, pipeline, spec.num_layers),
        **_types(row, engine),
    )
    return Spread(parallel, cluster_of(row, hardware, gpus, assumed, machine))


def in_fsdp_types(config: TrainConfig, era: Era) -> TrainConfig:
    """Types of what FSDP shards: packed words, and its own mixed precision where the tool does not
    autocast."""
    if not config.parallel.data_parallel.is_fsdp:
        return config
    config = _with_shared_words(_as_wrapped(config, era), era)
    if era.without_autocast and config.precision in (
        Precision.FP8,
        Precision.FP8_ROW,
        Precision.FP8_BLOCK,
    ):
        return config.replace(
            parallel=config.parallel.replace(sharded_dtype="fp32", reduce_dtype="fp32")
        )
    if not (era.without_autocast and config.precision is Precision.BF16_AMP):
        return config
    return config.replace(
        precision=Precision.BF16,
        parallel=config.parallel.replace(sharded_dtype="fp32", reduce_dtype="fp32"),
    )


def _as_wrapped(config: TrainConfig, era: Era) -> TrainConfig:
    """FSDP of the generation that the tool has, which units it makes, and when it reduces."""
    parallel = config.parallel.replace(sync_each_batch=era.syncs_each_batch)
    if era.fsdp2 and parallel.data_parallel is DataParallel.FSDP1:
        parallel = parallel.replace(data_parallel=DataParallel.FSDP2, wrap=era.units)
    return config.replace(parallel=parallel)


def under_engine(config: TrainConfig, row: Row) -> TrainConfig:
    """Megatron's layers under DeepSpeed where a stage of ZeRO is named; Megatron's own is called
    the distributed optimizer. Stage 3 with torch's own linears where the notes say so."""
    if re.search(r"mem\w*_efficient_linear\s*=\s*false", row.words("notes")):
        zero = config.parallel.zero.replace(memory_efficient_linear=False)
        config = config.replace(parallel=config.parallel.replace(zero=zero))
    own = re.search(_DISTRIBUTED, row.words("sharding", "optimizer", "notes"))
    if config.stack == "megatron" and config.parallel.data_parallel.is_zero and not own:
        return config.replace(stack="megatron-deepspeed")
    return config


def _with_shared_words(config: TrainConfig, era: Era) -> TrainConfig:
    """fms-acceleration shards GPTQ's words, which are buffers elsewhere, viewed as parameters of 16
    bits.

    Source: fms-acceleration plugins/accelerated-peft framework_plugin_autogptq.py,
    patch_forward_to_view_attributes_before_call.
    """
    quantization = config.quantization
    if quantization is None or not quantization.format.startswith("gptq") or "fms" not in era.name:
        return config
    return config.replace(quantization=quantization.replace(storage="fp16"))


def batch_of(
    row: Row, parallel: ParallelConfig, sequence: int, assumed: dict[str, str]
) -> tuple[int, int]:
    """(sequences of a micro-batch, micro-batches of a step) of one replica; what is missing follows
    from the global batch."""
    micro, steps = row.number("micro_batch"), row.number("grad_accum")
    if micro and parallel.pipeline_parallel_size > 1 and _splits_batches(row):
        # as many as stages (torchtitan pipelining_utils.py of 2024: pipeline_parallel_microbatches
        # is the degree by default; since 2025 pipeline_parallel_microbatch_size = 1)
        each = max(1, int(micro) // parallel.pipeline_parallel_size)
        return each, int(micro) // each * row.whole("grad_accum", 1)
    whole = _global_batch(row, sequence)
    if (micro and steps) or not whole:
        return row.whole("micro_batch", 1), row.whole("grad_accum", 1)
    each = max(1, round(whole / parallel.data_parallel_size))
    if not micro:
        micro = min(each, _USUAL_MICRO_BATCH if parallel.pipeline_parallel_size == 1 else 1)
        assumed["micro-batch"] = f"micro-batch {micro:g}: not stated"
    return int(micro), max(1, round(each / micro))


def _splits_batches(row: Row) -> bool:
    """Whether the batch of a row is split into micro-batches by a pipeline of torch's: a local
    batch, as torchtitan calls it."""
    return bool(re.search(r"torchtitan|local batch", row.words("source", "notes")))


def _global_batch(row: Row, sequence: int) -> float:
    """Sequences of a whole step; '1M tokens' is counted in sequences."""
    found = re.match(r"([\d.,]+)\s*([km]?)\s*(tokens)?", row.words("global_batch").strip())
    if not found:
        return 0.0
    number = float(found[1].replace(",", "") or 0) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2]]
    return number / sequence if found[3] else number


def offload_of(row: Row, offload: OffloadConfig, engine: DataParallel) -> OffloadConfig:
    """FSDP keeps parameters, gradients and the optimizer on the host together, whatever a table
    calls it.

    ZeRO 3 keeps parameters there alone where no optimizer is named; lower stages leave
    `offload_param` unread (DeepSpeed engine.py _configure_zero_optimizer)."""
    if engine is DataParallel.ZERO3 and offload.parameters:
        return offload.replace(optimizer=names_optimizer(row))
    if engine.is_fsdp and (offload.parameters or offload.optimizer):
        return offload.replace(parameters=True, optimizer=True)
    if engine in (DataParallel.ZERO1, DataParallel.ZERO2) and offload.parameters:
        return offload.replace(parameters=False)
    return offload


def cluster_of(
    row: Row, hardware: Hardware, gpus: int, assumed: dict[str, str], machine: Machine | None = None
) -> Cluster:
    """The machines: GPUs of a node and the network between nodes as the text says, or `machine` of
    the row's source; else eight and what such nodes usually have."""
    text = row.words("source", "gpu", "sharding", "notes")
    found = re.search(
        r"(\d+)\s*(?:x\s*)?(?:gpus?|cards|devices)\s*(?:per|/|a|each)\s*(?:node|machine|server|host)",
        text,
    )
    found = found or re.search(r"\d+\s*nodes?\s*x\s*(\d+)", text)
    found = found or re.search(
        r"\b(?:one|a single|single|1) (?:node|machine|server) (?:of|with) (\d+)", text
    )
    per_node = (
        int(found[1]) if found else min(gpus, (machine and machine.gpus_per_node) or ASSUMED_NODE)
    )
    if gpus % per_node:
        per_node = next(n for n in range(per_node, 0, -1) if gpus % n == 0)
    if (
        re.search(r"no nvlink|without nvlink|w/o nvlink|pcie? only", text)
        and hardware.gpu.gpu_link is not None
    ):
        hardware = hardware.replace(gpu=hardware.gpu.replace(gpu_link=None))
    slot = re.search(
        r"pcie?\s*(?:gen\s*)?([3-6])(?:\.0)?\s*x\s*(4|8|16)\b", row.words("gpu")
    ) or re.match(r"(\d)x(\d+)$", machine.pcie if machine else "")
    if slot and hardware.gpu.host_link.kind == "pcie":
        link = HostLink(kind="pcie", generation=int(slot[1]), lanes=int(slot[2]), own_lanes=True)
        hardware = hardware.replace(gpu=hardware.gpu.replace(host_link=link))
    nodes = gpus // per_node
    network = _network(text, per_node) if nodes > 1 else None
    if nodes > 1 and network is None and machine is not None and machine.network:
        network = network_named(machine.network, per_node)
    if nodes > 1 and network is None:
        assumed["network"] = "network between nodes: what nodes of this GPU usually have"
    return Cluster(hardware=hardware, gpus_per_node=per_node, num_nodes=nodes, network=network)


def _network(text: str, per_node: int) -> NetworkLink | None:
    """The rate of a node's adapters together, as '800 Gb/s inter-node' or '1600 Gbps interconnect
    (RoCE)'."""
    rate = r"([\d.,]+)\s*(g|t)(?:b|bit)(?:ps|/s|it/s)"
    words = (
        r"(?:inter-?\s?node|node[- ]to?-?node|node-node|interconnect|between"
        r" nodes|infiniband|roce|network|fabric)"
    )
    found = re.search(rf"{words}[^\d;,]{{0,20}}{rate}", text) or re.search(
        rf"{rate}\s*(?:\S+\s+){{0,3}}{words}", text
    )
    if not found:
        return None
    gbit = float(found[1].replace(",", "")) * (1000 if found[2] == "t" else 1)
    kind = (
        "roce"
        if "roce" in text
        else (
            "ethernet"
            if re.search(r"\btcp\b|sockets", text)
            else "efa"
            if re.search(r"\befa\b", text)
            else "infiniband"
        )
    )
    per_gpu = (
        gbit
        if re.search(r"per gpu|/gpu", text[found.end() : found.end() + 20])
        else gbit / per_node
    )
    return (
        NetworkLink(kind=find_network(kind).name, gbit_per_s_per_gpu=per_gpu)
        if per_gpu > 0
        else None
    )


def _degree(text: str, letters: str) -> int:
    """The number after one of these names: 'tp8', 'tp=8', 'tp 8', '8-way tp'; 1 where there is
    none."""
    found = re.search(rf"\b(?:{letters})\s*[=:_-]?\s*(\d+)\b", text) or re.search(
        rf"\b(\d+)[ -]?way (?:{letters})\b", text
    )
    value = int(found[1]) if found else 1
    if not 1 <= value <= 1 << 20:
        raise Unreadable(f"sharding {text!r}: {value} ranks are none")
    return value


def _expert_degree(row: Row, text: str, spec: ModelSpec) -> int:
    """Expert-parallel ranks; a row that says "fsdp, ep" may have the number in the name of its
    configuration alone ("moe-ep8"). Rows of unknown models are priced as models without experts."""
    if re.search(r"\bep\b", text) and dict(spec.symbols).get("e"):
        return _degree(row.words("notes"), "ep")
    return _degree(text, "ep")


def _expert_tensor_degree(text: str, tensor: int, data: int, expert: int) -> int:
    """Ranks that share one expert, 0 for the tensor-parallel ones: as named, else the ones that
    leave ranks enough for the experts (most recipes of Megatron-Core set 1)."""
    if re.search(r"\betp\b|\betp\d", text):
        return _degree(text, "etp")
    return 1 if tensor > 1 and data % expert and data * tensor % expert == 0 else 0


def _engine(
    row: Row,
    text: str,
    hardware: Hardware,
    ranks: int,
    spec: ModelSpec,
    config: TrainConfig,
    assumed: dict[str, str],
) -> DataParallel:
    named = _first(_ENGINES, text, None) or _first(_ENGINES, row.words("optimizer"), None)
    if named is None and re.search(_DISTRIBUTED, row.words("notes")):
        named = DataParallel.ZERO1
    if named is not None and not ("?" in text and named is DataParallel.ZERO1):
        return named
    if "deepspeed" in row.words("sharding", "notes", "source") and "megatron" not in row.words(
        "notes", "source"
    ):
        stage = _lowest_stage(
            hardware,
            ranks,
            config,
            estimate(spec, micro_batch_size=1, sequence_length=128).num_parameters,
        )
        assumed["stage"] = f"ZeRO stage {stage.value[-1]}: the lowest whose states fit"
        return stage
    if ranks > 1:
        assumed["engine"] = "data-parallel ranks: DistributedDataParallel, no other engine is named"
    return DataParallel.DDP


def _lowest_stage(
    hardware: Hardware, ranks: int, config: TrainConfig, parameters: int
) -> DataParallel:
    if config.adapter is not None:
        return (
            DataParallel.ZERO2
            if 2 * parameters < 0.8 * hardware.memory_bytes
            else DataParallel.ZERO3
        )
    states = parameters * (2 + _BYTES_BESIDE_WEIGHTS / ranks)
    return DataParallel.ZERO2 if states < 0.8 * hardware.memory_bytes else DataParallel.ZERO3


def _has_sequence_parallel(row: Row, hardware: Hardware) -> bool:
    """Norms on parts of the sequence: where the text says so, and in the frameworks of Hopper's
    time, which default to it."""
    return (
        bool(re.search(r"sequence[ -]parallel|\bsp\b(?!\s*\d)", row.words("sharding", "notes")))
        or hardware.gpu.is_hopper_or_later
    )


def _pipeline(text: str, stages: int, layers: int) -> dict[str, Any]:
    """The schedule, with as many chunks of a stage as the layers leave: Megatron-LM can count
    embedding and head as layers (account_for_embedding_in_pipeline_split)."""
    if stages == 1:
        return {}
    found = re.search(r"\b(?:vpp?|virtual|chunks|interleaved?)\s*[=:]?\s*(\d+)(?!\w)", text)
    schedule = _first(_SCHEDULES, text, PipelineSchedule.ONE_F_ONE_B)
    interleaved = schedule is PipelineSchedule.INTERLEAVED
    chunks = int(found[1]) if found else 2 if interleaved else 1
    chunks = max(1, min(chunks, layers // stages))
    if interleaved and chunks == 1:
        schedule = PipelineSchedule.ONE_F_ONE_B
    return {
        "pipeline_schedule": PipelineSchedule.INTERLEAVED if chunks > 1 else schedule,
        "virtual_pipeline_size": chunks,
    }


def _types(row: Row, engine: DataParallel) -> dict[str, Any]:
    """The type in which gradients add up, where the precision column says so, and FSDP's mixed
    precision: composer's PURE reduces in 16 bits, its DEFAULT in fp32."""
    text = row.words("precision")
    summed = re.search(_SUMMED_IN, text)
    if summed and not engine.is_fsdp:
        return {"reduce_dtype": "bf16" if "16" in summed[0] else "fp32"}
    if not engine.is_fsdp or "mixed_precision" not in text:
        return {}
    return {"sharded_dtype": "fp32", "reduce_dtype": "bf16" if "pure" in text else "fp32"}


def _first(table: tuple[tuple[str, Any], ...], text: str, default: Any) -> Any:
    return next((value for pattern, value in table if re.search(pattern, text)), default)


__all__ = [
    "Spread",
    "batch_of",
    "cluster_of",
    "in_fsdp_types",
    "offload_of",
    "spread_of",
    "under_engine",
]
