"""Two real steps of a tiny Llama split over tensor-parallel processes by its own plan; rank 0
prints what was tracked, as JSON.

torchrun --nproc-per-node 2 tests/parallel/tensor_step_on_gloo.py
"""

from __future__ import annotations

import json
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.distributed as dist
from napkinmath_profiler.trace import TraceOptions, TrainingLoop, build, observe, optimizer_of
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.parallel.tensor_parallel import split_by_plan
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from torch.distributed.device_mesh import init_device_mesh

BATCH, LENGTH = 2, 128
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
COLLECTIVES = {"all_reduce": "all-reduce", "all_gather_into_tensor": "all-gather"}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    config = config_from(dict(CONFIG))
    options = TraceOptions(
        micro_batch_size=BATCH,
        sequence_length=LENGTH,
        optimizer="adamw",
        dtype="fp32",
        attention="eager",
    )
    torch.manual_seed(0)
    model = build(config, options, device="cpu")
    split_by_plan(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    ids = torch.randint(0, CONFIG["vocab_size"], (BATCH, LENGTH))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    loop = TrainingLoop(model.train(), optimizer_of(model, options), inputs, options.loop)
    result = observe(model, loop.run, inputs=inputs, settings=None, device_type="cpu")
    counts: dict[str, int] = {}
    for record in result.records:
        name = record.op.removeprefix("_c10d_functional.").removesuffix(".default")
        if record.step == 0 and name in COLLECTIVES:
            key = f"{COLLECTIVES[name]} {record.requested_bytes}"
            counts[key] = counts.get(key, 0) + 1
    if dist.get_rank() == 0:
        print(json.dumps({"peak": timeline_of(result).peak().nbytes, "collectives": counts}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
