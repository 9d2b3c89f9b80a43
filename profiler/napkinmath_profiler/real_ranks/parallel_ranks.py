"""A training step run by real ranks: DDP or FSDP2 over gloo on CPUs (every storage tracked) or NCCL
on GPUs (the allocator's peak).

    torchrun --nproc-per-node 2 -m napkinmath_profiler.real_ranks.parallel_ranks CONFIG [--strategy fsdp2] [--bs 2] [--ctx 128]

CONFIG is a config.json, its folder, or JSON text. Rank 0 prints one JSON object a run. It has the peak bytes
of a rank (the most over all), by phase where storages are tracked, and the collectives of the
steady step by kind, each with calls and bytes of the whole message.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from napkinmath.base.json_input import loads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from napkinmath_profiler.real_ranks.around_units import checkpoint_around_units
from napkinmath_profiler.real_ranks.references import prepared_reference, refer
from napkinmath_profiler.trace import build, optimizer_of, prepared
from napkinmath_profiler.tracing.meta_model import AdapterOptions, TrainMethod, config_from
from napkinmath_profiler.tracing.observation import observe
from napkinmath_profiler.tracing.parallel.fully_sharded import (
    SyncingLoop,
    planning_unseen,
    resizes_seen,
)
from napkinmath_profiler.tracing.storage_events import rounded_bytes
from napkinmath_profiler.tracing.trace_options import TraceOptions
from napkinmath_profiler.tracing.training_step import LoopOptions, TrainingLoop

# c10d's operation -> (name, which argument holds the whole message)
COLLECTIVES = {
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "all_gather_single": ("all-gather", 0),
    "reduce_scatter_single": ("reduce-scatter", 1),
}


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives and the bytes of their whole messages by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation, counted if it is a collective."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        found = (
            COLLECTIVES.get(func._schema.name.removeprefix("c10d::"))
            if func.namespace == "c10d"
            else None
        )
        if found is not None:
            name, position = found
            message = args[position]
            self.num_calls[name] += 1
            self.num_bytes[name] += _bytes_of(message)
        return func(*args, **(kwargs or {}))


def _bytes_of(message: Any) -> int:
    """Bytes of a tensor, or of all in nested lists."""
    if isinstance(message, torch.Tensor):
        return message.numel() * message.element_size()
    return sum(_bytes_of(part) for part in message)


def main() -> None:
    """Joins the ranks, runs the steps, prints what they took."""
    runs = _arguments()
    cuda = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        for arguments in runs:
            result = run_steps(arguments, device)
            peaks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(peaks, result["peak_bytes"])
            if dist.get_rank() == 0:
                print(
                    json.dumps(
                        {
                            **result,
                            "world_size": dist.get_world_size(),
                            "peak_bytes": max(peaks),
                            "device": device,
                        }
                    )
                )
            dist.barrier()  # no rank leaves while another still talks to it
            gc.collect()
    finally:
        # what the engines' cycles hold of the group, whose threads must end before it is destroyed
        gc.collect()
        dist.destroy_process_group()


def _arguments() -> list[argparse.Namespace]:
    """What to run, one after another."""
    parser = _parser()
    first = parser.parse_args()
    return [
        first,
        *(parser.parse_args([first.config, *shlex.split(words)]) for words in first.then),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config.json, its folder, or JSON text")
    parser.add_argument(
        "--then",
        action="append",
        default=[],
        metavar="FLAGS",
        help="another run by the same ranks, with these flags",
    )
    parser.add_argument(
        "--strategy", default="fsdp2", choices=("ddp", "ddp-view", "fsdp1", "fsdp2")
    )
    parser.add_argument("--bs", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=128)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument(
        "--mixed",
        action="store_true",
        help=(
            "FSDP1: fp32 parts, gathered and reduced in bf16 under bf16 autocast, as accelerate"
            " has it"
        ),
    )
    parser.add_argument(
        "--flat-adapters",
        action="store_true",
        help="FSDP1: adapters share their layer's flat parameter",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=0, help="another vocabulary than the config's"
    )
    parser.add_argument(
        "--tied", action="store_true", help="embeddings and head share their weight"
    )
    parser.add_argument("--attention", default="eager")
    parser.add_argument("--optimizer", default="adamw-fused")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--reentrant", action="store_true", help="the older form of checkpointing")
    parser.add_argument(
        "--around",
        action="store_true",
        help="reentrant checkpoints around FSDP's units, as transformers made them before 4.53",
    )
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="LoRA on all linears; 0 trains everything",
    )
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument(
        "--reference", action="store_true", help="a copy's forward before each backward, as in DPO"
    )
    return parser


def run_steps(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Two steps of this rank: the first makes buckets and states, the second finds them."""
    given = arguments.config
    config = config_from(loads(given) if given.lstrip().startswith("{") else given)
    config.vocab_size = arguments.vocab_size or config.vocab_size
    config.tie_word_embeddings = arguments.tied or config.tie_word_embeddings
    options = TraceOptions(
        micro_batch_size=arguments.bs,
        sequence_length=arguments.ctx,
        dtype=arguments.dtype,
        attention=arguments.attention,
        optimizer=arguments.optimizer,
        checkpointing=arguments.checkpointing,
        use_reentrant=arguments.reentrant,
        method=TrainMethod.LORA if arguments.lora else TrainMethod.FULL,
        adapters=AdapterOptions(rank=arguments.lora or 8, dropout=0.0),
        loop=LoopOptions(
            gradient_accumulation_steps=arguments.grad_accum,
            device_type=device.partition(":")[0],
            autocast_dtype=torch.bfloat16 if arguments.mixed else None,
        ),
    )
    torch.manual_seed(0)
    model: Any = prepared(build(config, options, device=device), options, device=device)
    shape = (arguments.bs, arguments.ctx)
    ids = torch.randint(0, config.vocab_size, shape, device=device)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if arguments.around:
        model.enable_input_require_grads()
    model, loop_of = spread(
        model,
        arguments.strategy,
        device,
        flat_adapters=arguments.flat_adapters,
        mixed=arguments.mixed,
    )
    if arguments.around:
        checkpoint_around_units(model)
    loop = loop_of(model, optimizer_of(model, options), inputs, options.loop)
    if arguments.reference:
        add_reference(loop, config, options, arguments, device, inputs)
    if device != "cpu":
        return _measured(loop)
    counter = CollectiveCounter()
    marks: list[tuple[Counter[str], Counter[str]]] = []
    with (
        counter,
        planning_unseen(),
        resizes_seen() if arguments.strategy.startswith("fsdp") else nullcontext(),
        one_step_marked(loop, counter, marks),
    ):
        trace = observe(model, loop.run, inputs=inputs, settings=None, device_type="cpu")
    before = marks[0] if marks else (Counter(), Counter())
    live = peak = 0
    for event in trace.events:
        size = rounded_bytes(trace.records[event.storage_id].requested_bytes)
        live += size if event.is_allocation else -size
        peak = max(peak, live)
    phases = {
        phase.value: moment.requested_bytes for phase, moment in trace.peak_by_phase(1).items()
    }
    return {"peak_bytes": peak, "phases": phases, "collectives": _difference(counter, before)}


def add_reference(
    loop: TrainingLoop,
    config: Any,
    options: TraceOptions,
    arguments: argparse.Namespace,
    device: str,
    inputs: dict[str, Any],
) -> None:
    """A copy of the model that runs forward in every micro-step."""
    strategy, mixed = arguments.strategy, arguments.mixed
    copy = build(config, options, device=device)
    mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    spread_alike = partial(spread, strategy=strategy, device=device, mixed=mixed)
    reference = prepared_reference(copy, strategy, spread_alike, mesh)
    refer(loop, reference, inputs, arguments.grad_accum)


@contextmanager
def one_step_marked(
    loop: TrainingLoop, counter: CollectiveCounter, marks: list[tuple[Counter[str], Counter[str]]]
) -> Generator[None]:
    """Notes what has been counted as each step ends."""
    step: Callable[..., None] = loop.one_step

    def marked(forward: Callable[..., Any]) -> None:
        step(forward)
        marks.append((counter.num_calls.copy(), counter.num_bytes.copy()))

    loop.one_step = marked  # type: ignore[method-assign]
    yield


def _difference(
    counter: CollectiveCounter, before: tuple[Counter[str], Counter[str]]
) -> dict[str, dict[str, int]]:
    calls, moved = counter.num_calls - before[0], counter.num_bytes - before[1]
    return {kind: {"calls": calls[kind], "bytes": moved[kind]} for kind in sorted(calls)}


def _measured(loop: TrainingLoop) -> dict[str, Any]:
    """On a GPU the allocator says itself what the peak was."""
    torch.cuda.reset_peak_memory_stats()
    loop.run()
    torch.cuda.synchronize()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def spread(
    model: nn.Module,
    strategy: str,
    device: str,
    *,
    flat_adapters: bool = False,
    mixed: bool = False,
) -> tuple[Any, Callable[..., TrainingLoop]]:
    """The model under its engine, and the loop that goes with it."""
    if strategy.startswith("ddp"):
        ids = None if device == "cpu" else [torch.device(device)]
        return (
            DistributedDataParallel(
                model, device_ids=ids, gradient_as_bucket_view=strategy == "ddp-view"
            ),
            UnsyncedLoop,
        )

    if strategy == "fsdp1":
        names = getattr(model, "_no_split_modules", None) or ()
        policy: Any = ModuleWrapPolicy(
            {type(m) for m in model.modules() if type(m).__name__ in names}
        )
        if (
            hasattr(model, "peft_config") and not flat_adapters
        ):  # trained adapters get flat parameters of their own
            from peft.utils.other import fsdp_auto_wrap_policy

            os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(names)
            policy = fsdp_auto_wrap_policy(model)
        half = torch.bfloat16
        types = (
            MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
            if mixed
            else None
        )
        flat = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            use_orig_params=True,
            device_id=torch.device(device),
            mixed_precision=types,
        )
        return flat, UnsyncedLoop
    mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    for module in list(model.modules()):
        if type(module).__name__ in (getattr(model, "_no_split_modules", None) or ()):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, lambda *parts: SyncingLoop(*parts, each_batch=False)


class UnsyncedLoop(TrainingLoop):
    """A loop that reduces DDP's gradients in the last micro-step only."""

    def one_step(self, forward: Callable[..., Any]) -> None:
        """The micro-steps of one optimizer step, and that step."""
        steps = self._options.gradient_accumulation_steps
        model: Any = self._model
        for number in range(steps):
            with nullcontext() if number == steps - 1 else model.no_sync():
                self._micro_step(forward)
        self._update()


if __name__ == "__main__":
    main()
