"""--json: everything the table has, as one JSON object of a versioned schema
(report/schema/estimate-2.json, docs/json_schema.md).

Bytes are ints, seconds floats, shares between 0 and 1; keys keep their order; what is not known is
null.
"""

from __future__ import annotations

from enum import Enum

from napkinmath.answers.ranges import headroom, returnable_bytes
from napkinmath.base.json_text import dumps
from napkinmath.base.record import Record
from napkinmath.config.job_keys import KeyUse
from napkinmath.memory.allocator_settings import UNLIMITED
from napkinmath.report import curve
from napkinmath.report.components import components_of
from napkinmath.report.moments import operation
from napkinmath.report.words import without_bf16

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.answers.figures import Range
    from napkinmath.config.hardware import Hardware
    from napkinmath.config.job_keys import JobKeys
    from napkinmath.ir.timeline import Point

SCHEMA_VERSION = 2
CURVE_COLUMNS = 64
BOUNDS = ("compute", "bandwidth", "launch", "host link", "host memory", "NVMe", "communication")


def to_json(estimate: Estimate) -> str:
    """The estimate as a JSON document in ASCII, a top-level key a line."""
    return (
        "{\n"
        + ",\n".join(f'  "{key}": {dumps(value)}' for key, value in as_mapping(estimate).items())
        + "\n}\n"
    )


def as_mapping(e: Estimate) -> dict[str, Any]:
    """The document before it becomes text."""
    return figures(e) | advice(e)


def figures(e: Estimate) -> dict[str, Any]:
    """What the step costs: everything but the comparisons with other configurations and other GPUs,
    which take longer."""
    return {
        "schema": SCHEMA_VERSION,
        "model": _model(e),
        "config": plain(e.config),
        "resolved": _resolved(e),
        "hardware": _hardware(e.hardware) if e.hardware is not None else None,
        "verdict": e.verdict.value,
        "exit_code": e.verdict.exit_code,
        "headroom": _range(spare) if (spare := headroom(e)) is not None else None,
        "returnable_bytes": returnable_bytes(e),
        "memory": _memory(e),
        "peak": {**_point(e, e.peak), "operation": operation(e.timeline, e.peak) or None},
        "phase_peaks": [_point(e, point) for point in e.phase_peaks.values()],
        "components": [_component(row) for row in components_of(e)],
        "spread": _spread(e),
        "allocator": _allocator(e),
        "step_curve": _curve(e),
        "time": _time(e),
    }


def advice(e: Estimate) -> dict[str, Any]:
    """Which GPUs it fits, what to change, what is off, what was assumed."""
    lacking = without_bf16(e)
    return {
        "fits_on": [
            {
                "gpu": f.gpu,
                "capacity_bytes": f.capacity_bytes,
                "headroom_bytes": f.headroom_bytes,
                "verdict": f.verdict.value,
                "no_bf16": f.gpu in lacking,
            }
            for f in e.fits_on
        ],
        "largest": _largest(e),
        "remedy": plain(e.remedy),
        "changes": [
            {
                "flag": c.flag,
                "meaning": c.meaning,
                "saved_bytes": c.saved_bytes,
                "speed_ratio": c.speed_ratio,
            }
            for c in e.changes
        ],
        "findings": [{"text": f.text, "nbytes": f.nbytes} for f in e.findings],
        "assumptions": list(e.assumptions),
        "inputs": _inputs(e.job_keys),
    }


def _inputs(keys: JobKeys | None) -> dict[str, Any] | None:
    """The job file that was read, and what became of its keys."""
    if keys is None:
        return None

    def said(use: KeyUse) -> list[dict[str, str]]:
        return [
            {"name": k.name, "why": k.why, "memory": k.memory.value, "time": k.time.value}
            for k in keys.of(use)
        ]

    return {
        "tool": keys.tool,
        "path": keys.path,
        "keys": {
            "priced": [key.name for key in keys.of(KeyUse.PRICED)],
            "no_effect": said(KeyUse.NO_EFFECT),
            "not_priced": said(KeyUse.NOT_PRICED),
            "unknown": [key.name for key in keys.of(KeyUse.UNKNOWN)],
        },
    }


def _largest(e: Estimate) -> dict[str, Any] | None:
    """The largest sizes that surely fit; null where the question has no one answer."""
    if e.hardware is None:
        return None
    from napkinmath.planning.search import reaches

    found = {reach.what: reach for reach in reaches(e)}
    if not found:
        return None
    known = {
        name: reach.size for name, reach in found.items() if reach.size or not reach.ended_early
    }
    return {
        **{name: known.get(name) for name in ("batch", "context")},
        "uneven": [name for name, reach in found.items() if reach.uneven],
        "ended_early": [name for name, reach in found.items() if reach.ended_early],
    }


def plain(value: Any) -> Any:
    """Records as objects, enums by value, tuples as lists."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Record):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _model(e: Estimate) -> dict[str, Any]:
    spec = e.spec
    return {
        "name": spec.name,
        "family": spec.family,
        "source": spec.source,
        "num_parameters": e.num_parameters,
        "num_trained": e.num_trained,
        "num_layers": spec.num_layers,
        "symbols": {name: value for name, value in e.step.symbols.items()},
    }


def _resolved(e: Estimate) -> dict[str, Any]:
    """What 'auto' came to."""
    policy = e.step.policy
    return {
        "optimizer": e.step.update.optimizer.name,
        "stack": policy.stack.name,
        "sdpa_kernel": policy.sdpa_choice.value,
        "recomputes": policy.recomputes,
    }


def _hardware(hardware: Hardware) -> dict[str, Any]:
    gpu = hardware.gpu
    return {
        "gpu": gpu.name,
        "memory_bytes": hardware.memory_bytes,
        "others_bytes": hardware.others_bytes[0],
        "context_bytes": hardware.context_bytes,
        "usable_bytes": hardware.usable_bytes,
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        "dense_flops_per_s": {name: rate for name, rate in gpu.dense_flops},
    }


def _memory(e: Estimate) -> dict[str, Any]:
    memory = e.memory
    return {
        "requested": memory.requested,
        "allocated": _range(memory.allocated),
        "reserved": _range(memory.reserved),
        "device": _range(memory.device),
        "host": e.host_bytes,
        "managed": e.managed_bytes,
    }


def _spread(e: Estimate) -> dict[str, Any] | None:
    """How the step is spread over many GPUs, and what one machine's memory takes; None on one
    GPU."""
    parallel, cluster = e.config.parallel, e.cluster
    if parallel.world_size == 1:
        return None
    host = e.host_memory
    return {
        "world_size": parallel.world_size,
        "nodes": cluster.num_nodes if cluster is not None else None,
        "shard_degree": parallel.shard_degree,
        "replica_degree": parallel.replica_degree,
        "host_loading_bytes": host.loading + host.asleep,
        "host_training_bytes": host.training,
        "host_saving_bytes": host.saving,
        "host_capacity_bytes": host.capacity,
        "nvme_bytes": host.nvme,
    }


def _range(value: Range) -> dict[str, int]:
    return {"low": int(value.low), "value": int(value.value), "high": int(value.high)}


def _allocator(e: Estimate) -> dict[str, Any]:
    replay = e.replay
    return {
        "settings": {
            name: None if value == UNLIMITED else value for name, value in e.settings.items()
        },
        "peak_allocated": replay.peak_allocated,
        "peak_reserved": replay.peak_reserved,
        "end_allocated": replay.end_allocated,
        "end_reserved": replay.end_reserved,
        "inactive_split_bytes": replay.inactive_split_bytes,
        "num_segments": replay.num_segments,
        "num_retries": replay.num_retries,
        "out_of_memory": replay.out_of_memory or None,
    }


def _point(e: Estimate, point: Point) -> dict[str, Any]:
    segment = e.timeline.segments[point.segment]
    return {
        "phase": segment.phase.value,
        "segment": segment.name,
        "repetition": point.repetition,
        "nbytes": point.nbytes,
    }


def _component(row: Any) -> dict[str, Any]:
    return {
        "key": row.key,
        "label": row.label,
        "role": row.role.value,
        "nbytes": row.nbytes,
        "num_tensors": row.num_tensors,
        "origin": row.origin,
    }


def _curve(e: Estimate) -> dict[str, Any]:
    drawn = curve.envelope(e.timeline, CURVE_COLUMNS)
    return {
        "axis": "seconds" if drawn.in_seconds else "events",
        "extent": drawn.extent,
        "nbytes": list(drawn.values),
        "phases": [
            {"phase": s.phase.value, "start": s.start, "end": s.end, "nbytes": s.nbytes}
            for s in drawn.spans
        ],
    }


def _calibration(e: Estimate) -> dict[str, Any] | None:
    """The file that the speeds are from, and whether this model's layers are in it."""
    if e.calibration is None:
        return None
    return {
        "path": e.calibration.path,
        "gpu": e.calibration.gpu,
        "stamp": dict(e.calibration.stamp),
        "measured_layers": e.measured_layers is not None,
    }


def _all_gpus(e: Estimate) -> dict[str, Any] | None:
    whole = e.throughput
    if whole is None:
        return None
    price = e.price_per_gpu_hour
    return {
        "gpus": whole.gpus,
        "tokens_per_s": whole.tokens_per_s,
        "tokens_per_s_per_gpu": whole.tokens_per_s_per_gpu,
        "communication_share": whole.communication_share,
        "bubble_share": whole.bubble_share,
        "gpu_hours_per_billion_tokens": whole.gpu_hours_per_billion,
        "kwh_per_billion_tokens": whole.kwh_per_billion,
        "price_per_billion_tokens": None if price is None else whole.price_per_billion(price),
    }


def _whole_run(e: Estimate) -> dict[str, Any] | None:
    run, price = e.whole_run, e.price_per_gpu_hour
    if run is None:
        return None
    return {
        "steps": run.steps,
        "tokens": run.tokens,
        "seconds": run.seconds,
        "seconds_range": {"low": run.fastest_s, "high": run.slowest_s},
        "gpu_hours": run.gpu_hours,
        "price": None if price is None else run.gpu_hours * price,
    }


def _rollouts(e: Estimate) -> dict[str, Any] | None:
    """What an inference engine's rollouts take; None where none generates."""
    if not e.config.workload.has_engine:
        return None
    from napkinmath.report.rollouts import rollout_json

    return rollout_json(e)


def _time(e: Estimate) -> dict[str, Any] | None:
    time = e.time
    if time is None:
        return None
    from napkinmath.answers.speed_range import speed_doubts, tokens_range

    span = tokens_range(e)
    return {
        "seconds": time.seconds,
        "tokens": time.tokens,
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_range": span and {"low": span.low, "high": span.high},
        "doubts": [
            {"name": d.name, "meaning": d.meaning, "below": d.below, "above": d.above}
            for d in speed_doubts(e)
        ],
        "mfu": time.mfu,
        "hfu": time.hfu,
        "model_flops": time.model_flops,
        "hardware_flops": time.hardware_flops,
        "peak_flops_per_s": time.peak_flops_per_s,
        "calibration": _calibration(e),
        "shares": {bound: time.share(bound) for bound in BOUNDS},
        "all_gpus": _all_gpus(e),
        "whole_run": _whole_run(e),
        "rollouts": _rollouts(e),
        "phases": [
            {
                "phase": p.phase.value,
                "seconds": p.seconds,
                "device_s": p.device_s,
                "host_s": p.host_s,
                "bound": p.bound,
            }
            for p in time.phases
        ],
    }
