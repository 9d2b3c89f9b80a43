"""Steps of TRL's trainers in the order of their forwards, on pretended ranks under FSDP2.

Re-created from trl 1.16: trainer/dpo_trainer.py and kto_trainer.py _compute_loss,
trainer/grpo_trainer.py _generate_and_score_completions, experimental/gkd/gkd_trainer.py
compute_loss, experimental/orpo and experimental/cpo concatenated_forward, models/utils.py
prepare_fsdp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from napkinmath.config.train_config import Kernels
from napkinmath_profiler.trace import build, optimizer_of, prepared
from napkinmath_profiler.tracing.kernel_patches import patch_adapted
from napkinmath_profiler.tracing.meta_model import (
    AdapterOptions,
    TrainMethod,
    config_from,
    example_inputs,
)
from napkinmath_profiler.tracing.observation import mark_persistent, observe
from napkinmath_profiler.tracing.parallel.fully_sharded import (
    ShardingOptions,
    SyncingLoop,
    Traffic,
    counted,
    meta_streams,
    planning_unseen,
    resizes_seen,
    shard,
)
from napkinmath_profiler.tracing.parallel.pretended_ranks import (
    meta_mesh,
    meta_positions,
    pretended_ranks,
)
from napkinmath_profiler.tracing.storage_tracker import StorageTracker
from napkinmath_profiler.tracing.trace_options import TraceOptions
from napkinmath_profiler.tracing.training_step import LoopOptions
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import LlamaForSequenceClassification, LlamaForTokenClassification

Call = Callable[..., Any]
# Head of the model that the trainer trains, and what its config says of it.
HEADS: dict[str, tuple[type, dict[str, object]]] = {
    "reward": (LlamaForSequenceClassification, {"num_labels": 1, "pad_token_id": 0}),
    "prm": (LlamaForTokenClassification, {"num_labels": 2, "classifier_dropout": 0.0}),
}


# Rollouts as trl 0.16 to 0.18 scores them, which copies the logits and reads no entropy, as trl 1.0
# to 1.9 does, and as trl 0.15 over transformers 4.48, which make all logits and divide none.
COMPLETIONS = ("grpo", "rloo", "grpo in place", "grpo of all")
# Rollouts as verl b178a3cd (workers/actor/dp_actor.py _forward_micro_batch) and OpenRLHF 3c3be623
# (models/actor.py forward) score them, without and with the entropy in the loss.
BY_KERNEL = ("verl", "verl entropy", "openrlhf", "openrlhf entropy")


#: Trainer that asks for logits in a patched model's sight.
LOADED = {"distill": "gkd.gkd"}


class KeptLogits(torch.autograd.Function):
    """The storages of trl kernels/logprob_entropy.py _LogProbEntropyFunction, no kernel launched."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        made = [torch.empty(logits.shape[:-1], device=logits.device) for _ in range(4)]
        ctx.save_for_backward(logits, index, *made[2:])
        return made[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None]:
        logits = ctx.saved_tensors[0]
        return torch.empty_like(logits, memory_format=torch.contiguous_format), None


class Gathered(torch.autograd.Function):
    """torch.gather as it runs without a tracker: its backward adds into the zeros that it made."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.shape = logits.shape
        ctx.save_for_backward(index)
        return logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        zeros = gradients[0].new_zeros(ctx.shape)
        return zeros.scatter_add_(-1, index.unsqueeze(-1), gradients[0].unsqueeze(-1)), None


def one_by_one(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of labels as trl 0.15 to 1.9 takes them, a sequence at a time."""
    if logits.dtype is torch.float32:
        sums = [torch.logsumexp(one, dim=-1) for one in logits]
        return Gathered.apply(logits, labels) - torch.stack(sums)
    softmax = nn.functional.log_softmax
    pairs = zip(logits, labels, strict=True)
    return torch.stack([Gathered.apply(softmax(one, -1), index) for one, index in pairs])


class FlashCrossEntropy(torch.autograd.Function):
    """The tensors of flash_attn 2.8 ops/triton/cross_entropy.py CrossEntropyLoss."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, in_place: bool) -> torch.Tensor:
        out = logits.new_empty(len(logits), dtype=torch.float32)
        ctx.save_for_backward(logits, torch.empty_like(out))
        ctx.in_place = in_place
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        logits, _ = ctx.saved_tensors
        return logits if ctx.in_place else torch.empty_like(logits), None


class CompiledEntropy(torch.autograd.Function):
    """The tensors of a compiled entropy: its input and numbers of rows, one gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        out = logits.new_empty(len(logits), dtype=torch.float32)
        ctx.save_for_backward(logits, *(torch.empty_like(out) for _ in range(3)))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def by_kernel(call: Call, inputs: dict[str, Any], kind: str) -> torch.Tensor:
    """The loss over all labels' log-probabilities, and where trained over their entropy."""
    given = {key: value for key, value in inputs.items() if key != "labels"}
    output = call(**given)
    if kind.startswith("verl"):
        logits = output.logits
        del output  # a local of the function that returns the log-probabilities
        logits = logits.flatten(0, 1).div_(0.7)
    else:
        output["logits"] = output["logits"].to(torch.float32)
        logits = output["logits"].flatten(0, 1)
    entropy = kind.endswith("entropy") and logits.requires_grad
    found = CompiledEntropy.apply(logits).mean() if entropy else 0.0
    return FlashCrossEntropy.apply(logits, kind == "verl").mean() + found


def of_pairs(call: Call, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, fp32 logits) as LLaMA-Factory ff6d4d12 has them (train/dpo/trainer.py
    concatenated_forward, trainer_utils.py get_batch_logps)."""
    given = {key: value for key, value in inputs.items() if key != "labels"}
    logits = call(**given, use_cache=False).logits.to(torch.float32)
    labels = inputs["input_ids"][:, 1:].clone()
    return Gathered.apply(logits[:, :-1, :].log_softmax(-1), labels), logits


def of_completions(call: Call, inputs: dict[str, Any], kind: str = "grpo") -> torch.Tensor:
    """Log-probabilities of the second half of each sequence (trl grpo_trainer.py)."""
    from trl.trainer.utils import entropy_from_logits

    ids = inputs["input_ids"]
    tokens = ids.shape[1] // 2
    given = {key: value for key, value in inputs.items() if key != "labels"}
    in_place, of_all = kind == "grpo in place", kind == "grpo of all"
    whole = call(**given, **({} if of_all else {"logits_to_keep": tokens + 1})).logits
    logits = whole[:, :-1, :][:, -tokens:, :]
    if in_place:
        logits.div_(0.7)
    elif not of_all:
        del whole
        logits = logits / 0.7
    found = one_by_one(logits, ids[:, -tokens:])
    if in_place and found.requires_grad:
        with torch.no_grad():
            entropy_from_logits(logits)
    return found


def label_log_probabilities(logits: Any, ids: torch.Tensor) -> torch.Tensor:
    if not isinstance(logits, torch.Tensor):  # of a patched model, where they are not made
        return logits[:, :-1].log_probabilities(ids[:, 1:].clone(), 1.0).mean()
    return KeptLogits.apply(logits[:, :-1], ids[:, 1:].clone()).mean()


def chosen_loss(logits: Any, ids: torch.Tensor) -> torch.Tensor:
    half = len(ids) // 2
    flat = logits[:half][..., :-1, :].contiguous().view(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, ids[:half, 1:].reshape(-1))


class Step:
    """The forwards and the loss of one micro-step; `others` are models without gradients."""

    def __init__(self, kind: str, policy: Any, call: Call, others: list[Call]) -> None:
        self.kind, self.policy, self.call, self.others = kind, policy, call, others

    def off(self) -> Any:
        return self.policy.disable_adapter() if not self.others else nullcontext()

    def refer(self, inputs: dict[str, Any], times: int = 1) -> None:
        with torch.no_grad(), self.off():
            for _ in range(times):
                (self.others[0] if self.others else self.call)(**inputs)

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self.kind in COMPLETIONS:
            return self.of_rollouts(inputs)
        if self.kind == "dpo kept":
            found, logits = of_pairs(self.call, inputs)
            with torch.no_grad():
                of_pairs(self.others[0], inputs)
            del logits
            return found.mean()
        if self.kind in BY_KERNEL:
            with torch.no_grad(), self.off():
                by_kernel(self.others[0] if self.others else self.call, inputs, self.kind)
            return by_kernel(self.call, inputs, self.kind)
        if self.kind == "kto":
            with torch.no_grad():
                self.call(**inputs)
        if self.kind in ("orpo", "simpo", "distill", "reward"):
            return self.of_logits(inputs)
        loss = self.call(**inputs)["loss"]
        if self.kind in ("dpo", "kto"):
            self.refer(inputs, 2 if self.kind == "kto" else 1)
        return loss

    def of_rollouts(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self.kind == "rloo":
            with torch.no_grad():
                of_completions(self.call, inputs, self.kind)
        with torch.no_grad(), self.off():
            call = self.others[0] if self.others else self.call
            of_completions(call, inputs, self.kind)
        return of_completions(self.call, inputs, self.kind).mean()

    def of_logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        given = {key: value for key, value in inputs.items() if key != "labels"}
        if self.kind in ("orpo", "simpo"):
            given["use_cache"] = False
        made, ids = self.call(**given), inputs["input_ids"]
        if self.kind == "reward":
            chosen, rejected = torch.chunk(made.logits.squeeze(-1), chunks=2)
            return -nn.functional.logsigmoid(chosen - rejected).mean()
        if self.kind == "distill":
            from trl.experimental.gkd.gkd_trainer import GKDTrainer

            with torch.no_grad():
                taught = self.others[0](**given)
            pair = made.logits[:, :-1], taught.logits[:, :-1]
            return GKDTrainer.generalized_jsd_loss(*pair, labels=ids[:, 1:], beta=1.0)
        nll = chosen_loss(made.logits, ids) if self.kind == "orpo" else 0.0
        return nll + label_log_probabilities(made.logits, ids)


class WorkloadLoop(SyncingLoop):
    """A training loop whose micro-step is a trainer's."""

    def of(self, kind: str, others: list[Call], models: list[nn.Module]) -> WorkloadLoop:
        self.kind, self.others, self.models = kind, others, models
        return self

    def run(self) -> None:
        """All the steps, the other models' weights there before."""
        for model in self.models:
            mark_persistent(model, {}, StorageTracker.active)
        # before adapters are switched off for the first time, as a rollout would
        if isinstance(self._model, FSDPModule):
            self._model._get_fsdp_state()._lazy_init()
        super().run()

    def _micro_step(self, forward: Call) -> None:
        loss = Step(self.kind, self._model, forward, self.others).loss(dict(self._inputs))
        steps = self._options.gradient_accumulation_steps
        (loss / steps if steps > 1 else loss).backward()


class AloneLoop(WorkloadLoop):
    """The same on one rank, which has nothing to reduce."""

    def one_step(self, forward: Call) -> None:
        """The micro-steps of one optimizer step, and that step."""
        for _ in range(self._options.gradient_accumulation_steps):
            self._micro_step(forward)
        self._update()


def prepare_fsdp(model: nn.Module, ranks: int, dtype: torch.dtype | None) -> nn.Module:
    """TRL's: the whole model is one unit, resharded after its forward."""
    types = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    fully_shard(
        model, mesh=meta_mesh((ranks,), ("shard",)), mp_policy=types, reshard_after_forward=True
    )
    return model.eval()


def traced_on_ranks(
    model: dict[str, object],
    kind: str,
    *,
    ranks: int,
    batch: int,
    length: int,
    method: str = "full",
    precision: str = "bf16-autocast",
    checkpointing: bool = False,
    accumulation: int = 1,
    second: str = "prepared",
    kernels: str = "hf",
    targets: str | tuple[str, ...] = "all-linear",
) -> tuple[int, Traffic]:
    """(peak bytes of rank 0, what its collectives carried) of two steps under FSDP2, or on one GPU.

    `second` is the other model: 'prepared' by TRL for FSDP, 'whole' on every rank, or '' for none.
    """
    mixed = torch.bfloat16 if precision == "bf16-autocast" else None
    options = TraceOptions(
        method=TrainMethod(method),
        micro_batch_size=batch,
        sequence_length=length,
        dtype="fp32" if precision == "fp32" else "bf16",
        checkpointing=checkpointing,
        attention="eager",
        loop=LoopOptions(
            autocast_dtype=mixed,
            gradient_accumulation_steps=accumulation,
            convert_outputs_to_fp32=kind in ("orpo", "simpo", "distill", *COMPLETIONS),
        ),
        optimizer="adamw-fused",
        adapters=AdapterOptions(rank=8, dropout=0.0, targets=targets),
    )
    traffic = Traffic()
    config = config_from({**model, **(HEADS[kind][1] if kind in HEADS else {})})
    with warnings.catch_warnings(), pretended_ranks(ranks), meta_streams(), counted(traffic):
        warnings.simplefilter("ignore")
        policy = prepared(
            scored(config, kind) if kind in HEADS else build(config, options), options
        )
        if kernels != "hf":  # a patched model looks which of TRL's trainers are loaded
            import_module(f"trl.experimental.{LOADED.get(kind, 'orpo.orpo')}_trainer")
        patch_adapted(policy, Kernels(kernels))
        inputs = example_inputs(policy, config, micro_batch_size=batch, sequence_length=length)
        inputs["position_ids"] = meta_positions(length)
        # a head of scores is none that accelerate carves out
        sharding = ShardingOptions(
            shard_degree=ranks, mixed_dtype="bf16" if mixed else None, carved=kind not in HEADS
        )
        if ranks > 1:
            shard(policy, sharding)
        others: list[Any] = []
        if second:
            other = build(config, options).requires_grad_(False).eval()
            patch_adapted(other, Kernels(kernels))
            others.append(prepare_fsdp(other, ranks, mixed) if second == "prepared" else other)
        kind_of_loop = WorkloadLoop if ranks > 1 else AloneLoop
        loop = kind_of_loop(
            policy, optimizer_of(policy, options), inputs, options.loop, each_batch=False
        ).of(kind, [as_called(o, options.loop, second) for o in others], others)
        with resizes_seen(), planning_unseen():
            result = observe(policy, loop.run, inputs=inputs, settings=options.settings)
    return result.peak_bytes, traffic


def scored(config: Any, kind: str) -> Any:
    """A model with the trainer's head for scores, in fp32."""
    with torch.device("meta"):
        made: Any = HEADS[kind][0]
        return made._from_config(config, attn_implementation="eager").train()


def as_called(model: nn.Module, options: LoopOptions, how: str) -> Call:
    """Accelerate's prepare_model gives a whole model its autocast; FSDP's types do it for another."""
    if how == "prepared" or options.autocast_dtype is None:
        return model
    called = torch.autocast("cuda", dtype=options.autocast_dtype)(model.__call__)
    if not options.convert_outputs_to_fp32:
        return called
    from accelerate.utils import convert_outputs_to_fp32

    return convert_outputs_to_fp32(called)
