"""Trainers that generate rollouts with an inference engine, one row each: where they place the
engine, and how the policy's weights come to it."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.record import Record
from napkinmath.base.units import GIB
from napkinmath.config.workload_config import (
    Placement,
    RolloutOffload,
    RolloutSync,
    WorkloadKind,
)


class RolloutTrainer(Record):
    """What a trainer does where its user says nothing."""

    name: str
    meaning: str
    source: str
    memory_share: float
    """Of each GPU, on the policy's."""
    own_share: float
    """Of GPUs of the engines' own."""
    apart: bool = False
    """Its engines have GPUs of their own."""
    tp: int = 1
    sleep: int = 0
    sequences: int = 0
    """At once at most on the policy's GPUs; 0 is the engine's own limit."""
    prefill_tokens: int = 0
    """Of one forward on the policy's GPUs; 0 is the engine's own."""
    sync: RolloutSync = RolloutSync.PARAMETER
    flat_sync: RolloutSync = RolloutSync.PARAMETER
    """Under FSDP 1."""
    adapter_sync: RolloutSync = RolloutSync.PARAMETER
    """Of a policy with adapters under ZeRO stage 3."""
    flat_adapter_sync: RolloutSync | None = None
    """Of a policy with adapters under FSDP 1; None is as without."""
    zero_sync: RolloutSync = RolloutSync.PARAMETER
    """Under ZeRO stage 3."""
    bucket_bytes: int = 0
    copies: int = 0
    """More copies of each whole parameter on the policy's GPUs."""
    copies_shards: bool = False
    """Under FSDP 1 weights that go by its `flat_sync` come from a state dict, which holds a second copy
    of the rank's part."""
    wakes_whole: bool = False
    """An engine that slept takes its weights and its cache at once, before the weights come."""
    offload: RolloutOffload = RolloutOffload.NONE
    old_logprobs: bool = True
    """The policy computes the log-probabilities of what its engine generated anew, before it is
    updated."""
    refers: tuple[WorkloadKind, ...] = ()
    """Methods whose divergence from a reference it prices where nothing is said."""
    reference_at: Placement = Placement.AUTO
    """Where it has the reference's weights."""
    shards_models: bool = False
    """Under FSDP it shards reference and reward model of every method, as it does the policy."""
    asks_bf16: bool = False
    """It asks its engine for bf16, which engines refuse on a GPU without; else the engine decides."""
    reads_once: bool = False
    """One process reads a model whose embeddings are not tied, the others hold meta tensors; one model
    after another."""
    engines_first: bool = False
    """Its engines sleep before the models are read."""
    own_processes: bool = False
    """Each model of a rank has a process of its own, and the engine too."""
    host_share: float = 1.0
    """Of a machine's memory, beyond which its tasks are killed (Ray's
    src/ray/common/ray_config_def.h memory_usage_threshold)."""
    host_s: tuple[float, float] = (0.0, 0.0)
    """Beside a server's: of each forward of an engine on the policy's GPUs, and of each sequence in
    it."""
    staleness: int = 0
    """Steps that its rollouts may be behind the policy."""
    flows_from: int | None = 1
    """Steps behind from which prompts of the next step take the places of completions that ended. Before,
    the prompts of a step start together and its engines wait for the longest; None: always."""
    packed: bool = False
    """Its engine on the policy's GPUs holds a base that bitsandbytes packs in 4 bits as it is; else
    in 16 bits."""
    completion_logits: bool = False
    """It asks the model for the logits of the completion alone (`logits_to_keep`)."""
    label_kernel: str = ""
    """Log-probabilities come from one kernel over all logits, the policy's and the reference's
    (flash_attn ops/triton/cross_entropy.py CrossEntropyLoss, which keeps the logits and a number a
    row). 'in place' reads them as the model returns them, divided by the temperature. Their
    gradient is written over them. 'fp32' reads an fp32 copy that stays for the backward.
    'log_softmax' is torch's, of all logits in the type that the model returns."""
    scores_in_chunks: bool = False
    """Its policy takes log-probabilities tile by tile, and never holds all logits (trl 1.16
    trainer/utils.py add_fused_lm_head)."""

    def flows(self, staleness: int) -> bool:
        """Whether completions of other steps take free places, so many steps behind."""
        return bool(staleness) and self.flows_from is not None and staleness >= self.flows_from

    def sync_of(self, kind: str, *, adapter: bool) -> RolloutSync:
        """How weights come to the engine from `kind` of data parallelism."""
        if kind == "zero3":
            return self.adapter_sync if adapter else self.zero_sync
        if kind == "fsdp1":
            return (self.flat_adapter_sync if adapter else None) or self.flat_sync
        return self.sync


_GROUPS = (WorkloadKind.GRPO, WorkloadKind.GSPO, WorkloadKind.RLOO)
_ALL = (*_GROUPS, WorkloadKind.PPO)

_VERL = RolloutTrainer(
    name="verl",
    meaning="hybrid engine: engines of 2 GPUs, which drop all while the policy trains",
    source=(
        "verl b178a3cd trainer/config/rollout/rollout.yaml gpu_memory_utilization,"
        " tensor_model_parallel_size, max_num_seqs, update_weights_bucket_megabytes;"
        " workers/fsdp_workers.py rollout_mode; third_party/vllm VLLM_SLEEP_LEVEL;"
        " trainer/ppo/ray_trainer.py _compute_old_log_prob; workers/actor/dp_actor.py"
        " _forward_micro_batch, utils/torch_functional.py logprobs_from_logits;"
        " utils/fsdp_utils.py collect_lora_params (summon_full_params);"
        " trainer/config/_generated_ppo_trainer.yaml use_kl_loss, use_kl_in_reward, rollout.dtype;"
        " experimental/one_step_off_policy/ray_trainer.py _async_gen_next_batch;"
        " utils/fsdp_utils.py get_init_weight_context_manager"
    ),
    reads_once=True,
    host_share=0.95,
    flows_from=2,
    asks_bf16=True,
    shards_models=True,
    memory_share=0.5,
    own_share=0.5,
    tp=2,
    sleep=2,
    sequences=256,
    prefill_tokens=8192,
    sync=RolloutSync.BUCKET,
    flat_sync=RolloutSync.BUCKET,
    adapter_sync=RolloutSync.BUCKET,
    flat_adapter_sync=RolloutSync.WHOLE,
    zero_sync=RolloutSync.BUCKET,
    bucket_bytes=2 * GIB,
    copies_shards=True,
    label_kernel="in place",
)
_VERL_0_3 = _VERL.replace(
    name="verl-0.3",
    meaning="verl 0.3: weights and cache of an engine wake together, and each weight goes alone",
    source=(
        "verl v0.3.0.rc0 workers/sharding_manager/fsdp_vllm.py __enter__ (wake_up without tags,"
        " full_tensor one by one), __exit__ (sleep level 1); trainer/config/ppo_trainer.yaml;"
        " trainer/main_ppo.py (always with a reference)"
    ),
    refers=_ALL,
    sleep=1,
    sequences=1024,
    sync=RolloutSync.PARAMETER,
    flat_sync=RolloutSync.PARAMETER,
    wakes_whole=True,
)

_OPENRLHF = RolloutTrainer(
    name="openrlhf",
    meaning="engines on GPUs of their own, unless its train.colocate_all is set",
    source=(
        "OpenRLHF 3c3be623 cli/train_ppo_ray.py vllm.gpu_memory_utilization,"
        " train.colocate_all; trainer/ray/ppo_actor.py _handle_cuda_ipc (clone);"
        " trainer/ppo_utils/experience_maker.py action_log_probs; models/actor.py forward,"
        " models/utils.py log_probs_from_logits; cli/train_ppo_ray.py algo.kl.init_coef;"
        " trainer/ray/vllm_engine.py dtype; trainer/ppo_trainer_async.py fit (generate_samples"
        " ends before the next batch starts); trainer/ray/vllm_engine.py create_vllm_engines (sleep)"
    ),
    engines_first=True,
    own_processes=True,
    host_share=0.95,
    refers=_ALL,
    flows_from=None,
    asks_bf16=True,
    memory_share=0.95,
    own_share=0.95,
    apart=True,
    copies=1,
    label_kernel="fp32",
)
_OPENRLHF_0_5 = _OPENRLHF.replace(
    name="openrlhf-0.5",
    meaning="openrlhf until January 2025: log_softmax of all logits",
    source=(
        "OpenRLHF v0.5.0 models/utils.py log_probs_from_logits (flash_attn's kernel is of"
        " e8757b48, March 2025), models/actor.py forward; else as openrlhf"
    ),
    label_kernel="log_softmax",
)

ROLLOUT_TRAINERS: dict[str, RolloutTrainer] = {
    row.name: row
    for row in (
        RolloutTrainer(
            name="trl",
            meaning="one engine in each rank's process, awake while it trains",
            source=(
                "trl 1.16 grpo_config.py vllm_gpu_memory_utilization; generation/vllm_generation.py"
                " max_num_batched_tokens, _iter_named_params: FSDP 1 unit by unit, with adapters"
                " under ZeRO stage 3 the whole model; grpo_config.py"
                " vllm_importance_sampling_correction; grpo_trainer.py logits_to_keep;"
                " rloo_config.py beta, experimental/ppo/ppo_config.py kl_coef (GRPO's beta is a"
                " release's: catalog/trainer_stacks.py)"
            ),
            refers=(WorkloadKind.RLOO, WorkloadKind.PPO),
            memory_share=0.3,
            own_share=0.9,
            sequences=256,
            prefill_tokens=4096,
            flat_sync=RolloutSync.LAYER,
            adapter_sync=RolloutSync.WHOLE,
            packed=True,
            completion_logits=True,
            scores_in_chunks=True,
        ),
        _VERL,
        _VERL_0_3,
        _OPENRLHF,
        _OPENRLHF_0_5,
        RolloutTrainer(
            name="ms-swift",
            meaning="one engine in each rank's process, awake while it trains",
            source=(
                "ms-swift 3602360a rlhf_trainers/args_mixin.py vllm_gpu_memory_utilization,"
                " sleep_level, move_model_batches; rollout_mixin.py split_batches,"
                " _collect_state_dict_for_vllm: without batches all parameters are whole at once;"
                " grpo_trainer.py old_per_token_logps, _get_logps_via_local_forward;"
                " swift/arguments/rlhf_args.py beta, kl_coef; rollout_mixin.py _prefetch"
                " (async_generate: one batch ahead)"
            ),
            refers=_ALL,
            flows_from=2,
            memory_share=0.9,
            own_share=0.9,
            completion_logits=True,
            sync=RolloutSync.WHOLE,
            flat_sync=RolloutSync.WHOLE,
            adapter_sync=RolloutSync.WHOLE,
            zero_sync=RolloutSync.WHOLE,
        ),
        RolloutTrainer(
            name="nemo-rl",
            meaning="engines on the policy's GPUs, from which policy and states go meanwhile",
            source=(
                "NeMo-RL 7ea279ab examples/configs/grpo_math_1B.yaml vllm_cfg, colocated;"
                " algorithms/grpo.py refit_policy_generation (its buffers take 0.3 of what is free,"
                " so that they decide no fit), get_logprobs. vllm_worker.py sleep,"
                " VLLM_ENABLE_V1_MULTIPROCESSING=0: its engine schedules, draws and makes text in one"
                " thread. The time of that is from the generation of NeMo-RL 0.3's four models"
                " (nvidia-nemo.github.io/blog/2025/07/21/nemo-rl-v0.3), shown on other releases by"
                " benchmarks/accuracy/rl_steps.py. examples/configs/ppo_math_1B.yaml has no"
                " reference_policy_kl_penalty. v0.6.0 models/policy/workers/megatron_policy_worker.py"
                " use_reference_model; algorithms/async_utils.py AsyncTrajectoryCollector: as many"
                " prompts are under way as max_trajectory_age_steps steps have, and a step's start once"
                " the weights before it are there"
            ),
            refers=_GROUPS,
            host_share=0.95,
            reference_at=Placement.SWAP,
            flows_from=2,
            asks_bf16=True,
            memory_share=0.6,
            own_share=0.6,
            host_s=(4e-3, 40e-6),
            sleep=1,
            offload=RolloutOffload.POLICY,
        ),
        RolloutTrainer(
            name="prime-rl",
            meaning="engines on GPUs of their own, which generate while the policy trains",
            source=(
                "prime-rl 559b4477 configs/inference.py gpu_memory_utilization,"
                " tensor_parallel_size; configs/orchestrator.py max_off_policy_steps;"
                " transports/weights/nccl.py broadcast_state_dict (a layer, concatenated);"
                " trainer/rl/loss.py inference_logprobs"
            ),
            memory_share=0.9,
            own_share=0.9,
            apart=True,
            copies=1,
            old_logprobs=False,
            staleness=8,
            sync=RolloutSync.LAYER,
            flat_sync=RolloutSync.LAYER,
            adapter_sync=RolloutSync.LAYER,
            zero_sync=RolloutSync.LAYER,
        ),
    )
}


def find_rollout_trainer(name: str) -> RolloutTrainer:
    """The row of a trainer; raises InputError for one that is not there."""
    row = ROLLOUT_TRAINERS.get(name.lower())
    if row is None:
        raise InputError(
            f"--rollout-trainer {shown(name)} is unknown{suggest(name, list(ROLLOUT_TRAINERS))}; use"
            f" one of {', '.join(ROLLOUT_TRAINERS)}"
        )
    return row
