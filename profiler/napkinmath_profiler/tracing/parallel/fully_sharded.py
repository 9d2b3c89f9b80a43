"""A transformers model under FSDP2, wrapped by accelerate and run by torch's own fully_shard, on
ranks that only pretend."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, _flat_param, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from napkinmath_profiler.trace import build, optimizer_of, prepared
from napkinmath_profiler.tracing.meta_model import DTYPES, config_from, example_inputs
from napkinmath_profiler.tracing.observation import observe
from napkinmath_profiler.tracing.parallel.pretended_ranks import (
    meta_mesh,
    meta_positions,
    pretended_ranks,
)
from napkinmath_profiler.tracing.storage_tracker import StorageTracker
from napkinmath_profiler.tracing.trace_options import TraceOptions
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import TrainingLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """What is asked of FSDP2: ranks that share a copy, copies, and accelerate's settings."""

    shard_degree: int
    replica_degree: int = 1
    reshard_after_forward: bool = True
    mixed_dtype: str | None = "bf16"
    """Type of gathered parameters and of reduction; None is no mixed precision."""
    reduce_dtype: str | None = None
    carved: bool = True
    """Wrapped as accelerate does; else the layers and the root alone, as in torch's tutorials."""
    sync_each_batch: bool = False


@dataclass(slots=True)
class Traffic:
    """Bytes that collectives carried, by kind: of the whole message, as nccl-tests counts it."""

    num_bytes: dict[str, int] = field(default_factory=dict[str, int])
    num_calls: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, kind: str, tensor: torch.Tensor) -> None:
        """Counts one collective over the whole message `tensor`."""
        self.num_bytes[kind] = self.num_bytes.get(kind, 0) + tensor.numel() * tensor.element_size()
        self.num_calls[kind] = self.num_calls.get(kind, 0) + 1


def trace_fully_sharded(
    config: Any, sharding: ShardingOptions, options: TraceOptions
) -> tuple[TraceResult, Traffic]:
    """Two steps of rank 0 on meta tensors, and what its collectives carried."""
    traffic = Traffic()
    world_size = sharding.shard_degree * sharding.replica_degree
    with pretended_ranks(world_size), meta_streams(), counted(traffic):
        config = config_from(config)
        model = prepared(build(config, options), options)
        inputs = example_inputs(
            model,
            config,
            micro_batch_size=options.micro_batch_size,
            sequence_length=options.sequence_length,
        )
        inputs["position_ids"] = meta_positions(options.sequence_length)
        shard(model, sharding)
        optimizer, each = optimizer_of(model, options), sharding.sync_each_batch
        loop = SyncingLoop(model, optimizer, inputs, options.loop, each_batch=each)
        with resizes_seen(), planning_unseen():
            return observe(model, loop.run, inputs=inputs, settings=options.settings), traffic


class SyncingLoop(TrainingLoop):
    """A loop that reduces gradients in the last micro-step only, as accelerate's ``no_sync`` makes
    it, or in each."""

    def __init__(self, model: Any, *arguments: Any, each_batch: bool) -> None:
        super().__init__(model, *arguments)
        self._sharded, self._each_batch = model, each_batch

    def one_step(self, forward: Callable[..., Any]) -> None:
        """The micro-steps of one optimizer step, and that step."""
        steps = self._options.gradient_accumulation_steps
        for number in range(steps):
            self._sharded.set_requires_gradient_sync(self._each_batch or number == steps - 1)
            self._micro_step(forward)
        self._update()


def shard(model: nn.Module, sharding: ShardingOptions) -> None:
    """``fully_shard`` by accelerate's function, or by hand over the decoder layers and the
    model."""
    mesh = (
        meta_mesh((sharding.replica_degree, sharding.shard_degree), ("replicate", "shard"))
        if sharding.replica_degree > 1
        else meta_mesh((sharding.shard_degree,), ("shard",))
    )
    if sharding.carved:
        by_accelerate(model, mesh, _types(sharding), sharding)
    else:
        shard_by_layers(model, mesh, sharding)


def _types(sharding: ShardingOptions) -> Any:
    """torch's policy of the types that are gathered, reduced and returned."""
    dtype = DTYPES[sharding.mixed_dtype] if sharding.mixed_dtype else None
    reduce_dtype = DTYPES[sharding.reduce_dtype] if sharding.reduce_dtype else dtype
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, output_dtype=dtype)


def shard_by_layers(model: nn.Module, mesh: Any, sharding: ShardingOptions) -> None:
    """The decoder layers and the model, as in torch's tutorials; under mixed precision parts are
    fp32."""
    policy = _types(sharding)
    if sharding.mixed_dtype:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
    for module in list(model.modules()):
        if type(module).__name__ in (getattr(model, "_no_split_modules", None) or ()):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=sharding.reshard_after_forward,
            )
    fully_shard(model, mesh=mesh, mp_policy=policy)


def by_accelerate(model: nn.Module, mesh: Any, policy: Any, sharding: ShardingOptions) -> None:
    """accelerate's ``fsdp2_prepare_model`` with as much of an Accelerator as it reads."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=sharding.reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=policy,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={mesh.mesh_dim_names: mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        is_main_process=False,
        mixed_precision=sharding.mixed_dtype or "no",
        device=torch.device("meta"),
    )
    # the values of a quantization's state are asked for only to be saved
    state = "bitsandbytes.functional.QuantState.as_dict"
    with mock.patch(state, lambda self, packed=False: {}):
        fsdp2_prepare_model(accelerator, model)


# ---------------------------------------------------------------- a device called meta


@contextmanager
def meta_streams() -> Generator[None]:
    """Streams and events for the device called meta, as the CPU has them: nothing waits; and
    parameters may be on it."""
    device: Any = torch.meta  # type: ignore[attr-defined]
    for name in ("Stream", "current_stream", "stream"):
        setattr(device, name, getattr(torch.cpu, name))
    device.Event = _Event
    with ExitStack() as stack:
        module = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
        stack.enter_context(mock.patch(f"{module}._validate_no_meta_params", lambda self: None))
        stack.enter_context(
            mock.patch("torch.accelerator.current_stream", lambda *_: torch.cpu.current_stream())
        )
        stack.enter_context(
            mock.patch(
                "torch.cpu.Stream.record_event", lambda self, event=None: _Event(), create=True
            )
        )
        stack.enter_context(
            mock.patch("torch.cpu.Stream.wait_event", lambda self, event: None, create=True)
        )
        yield


class _Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def counted(traffic: Traffic) -> Generator[None]:
    """Collectives over tensors without data: nothing is exchanged, bytes are counted."""

    def gather(output: torch.Tensor, *_: Any, **__: Any) -> None:
        traffic.add("all-gather", output)

    def scatter(*_: Any, input: torch.Tensor, **__: Any) -> None:
        traffic.add("reduce-scatter", input)

    def reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        traffic.add("all-reduce", tensor)

    with (
        mock.patch.object(dist, "all_gather_single", gather),
        mock.patch.object(dist, "reduce_scatter_single", scatter),
        mock.patch.object(dist, "all_reduce", reduce),
    ):
        yield


@contextmanager
def resizes_seen() -> Generator[None]:
    """Gathered parameters keep their storage object and change its size: each time a death or a
    birth for the tracker."""
    with ExitStack() as stack:
        for module, names in (
            (_fsdp_param, ("alloc_storage", "free_storage")),
            (_flat_param, ("_alloc_storage", "_free_storage")),
        ):
            for name in names:
                seen = _seen(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, seen))
        yield


def _seen(resize: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the tracker informed of the tensor that it resized."""

    def resized(tensor: torch.Tensor, *arguments: Any) -> Any:
        before = tensor.untyped_storage().size()
        result = resize(tensor, *arguments)
        if StorageTracker.active is not None and before != tensor.untyped_storage().size():
            StorageTracker.active.note_resize(tensor)
        return result

    return resized


@contextmanager
def planning_unseen() -> Generator[None]:
    """DTensor tries an operation on whole fake tensors to learn the shape of its result: no memory
    of any device."""
    plan = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return plan(self, *args, **kwargs)

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
        yield
