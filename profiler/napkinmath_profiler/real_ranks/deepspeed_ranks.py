"""A step of real DeepSpeed ranks with every storage tracked: ZeRO 1 to 3 over gloo on CPUs.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 -m napkinmath_profiler.real_ranks.deepspeed_ranks CONFIG [--stage 2] [--bucket 500000]

CONFIG is a config.json, its folder, or JSON text. Needs `pip install deepspeed`. Rank 0 prints one
JSON object with the peak bytes of the second step, the first being the one in which stage 3 learns
the order of its modules.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch
import torch.distributed as dist
from napkinmath.base.json_input import loads

from napkinmath_profiler.trace import build, prepared
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.module_paths import ModulePaths
from napkinmath_profiler.tracing.storage_events import StorageRole, rounded_bytes
from napkinmath_profiler.tracing.storage_tracker import StorageTracker
from napkinmath_profiler.tracing.trace_options import TraceOptions


def main() -> None:
    """Joins the ranks, runs two steps, prints what they took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config.json, its folder, or JSON text")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument(
        "--bucket",
        type=int,
        default=500_000,
        help="elements of reduce, gather and prefetch buckets",
    )
    parser.add_argument("--persistence", type=int, default=1000)
    parser.add_argument("--bs", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=128)
    parser.add_argument("--checkpointing", action="store_true")
    arguments = parser.parse_args()
    import deepspeed  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    peak = peak_of_second_step(deepspeed, arguments)
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "stage": arguments.stage,
                    "world_size": dist.get_world_size(),
                    "peak_bytes": peak,
                    "deepspeed": deepspeed.__version__,
                }
            )
        )
    dist.destroy_process_group()


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's config."""
    zero: dict[str, Any] = {
        "stage": arguments.stage,
        "reduce_bucket_size": arguments.bucket,
        "allgather_bucket_size": arguments.bucket,
    }
    if arguments.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": arguments.bucket,
            "stage3_param_persistence_threshold": arguments.persistence,
        }
    return {
        "train_micro_batch_size_per_gpu": arguments.bs,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }


def peak_of_second_step(deepspeed: Any, arguments: argparse.Namespace) -> int:
    """Rounded bytes of every storage at the moment of most."""
    given = arguments.config
    config = config_from(loads(given) if given.lstrip().startswith("{") else given)
    options = TraceOptions(
        micro_batch_size=arguments.bs,
        sequence_length=arguments.ctx,
        dtype="bf16",
        attention="eager",
        checkpointing=arguments.checkpointing,
        optimizer="adamw-fused",
    )
    torch.manual_seed(0)
    model: Any = prepared(build(config, options, device="cpu"), options, device="cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings_of(arguments))[
        0
    ]
    tracker = StorageTracker("cpu", ModulePaths())
    gc.collect()
    for found in gc.get_objects():
        if (
            isinstance(found, torch.Tensor)
            and type(found).__name__ in ("Tensor", "Parameter")
            and found.device.type == "cpu"
            and found.untyped_storage().nbytes()
        ):
            tracker.mark(found, StorageRole.UNATTRIBUTED)
    ids = torch.randint(0, config.vocab_size, (arguments.bs, arguments.ctx))
    starts: list[int] = []
    with tracker:
        for _ in range(2):
            starts.append(len(tracker.events))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            del loss
            engine.step()
    live = peak = 0
    for index, event in enumerate(tracker.events):
        size = rounded_bytes(tracker.records[event.storage_id].requested_bytes)
        live += size if event.is_allocation else -size
        peak = max(peak, live) if index >= starts[1] else live
    return peak


if __name__ == "__main__":
    main()
