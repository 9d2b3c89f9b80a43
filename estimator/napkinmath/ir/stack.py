"""Stack: whose training code runs, and when. Each quirk of a library or era that moves memory or
time is one field, in the record of the part of the code that has it.

Whoever asks for a behaviour asks for its field; nothing asks for a stack by its name.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.costs import LAYER_DISPATCHES


class ModelCode(Record):
    """The model's classes and the kernels that they call."""

    transformers: tuple[int, int] = (5, 23)
    """Version of transformers whose modelling code runs; (0, 0) where another library's does."""
    library: str = ""
    """Library with model classes of its own (a row of MODELLING in models/families); '' is
    transformers."""
    scan_kernels: bool = False
    """The optional kernels of state-space layers (mamba_ssm, causal_conv1d, fla) are installed."""
    scan_projects: bool = True
    """Mamba 2's kernel has the norm and the output projection in it (transformers), or a linear
    follows it (Megatron-LM)."""
    rms_norm: str = "eager"
    """'eager' is the chain of small ops, 'fused' is F.rms_norm, 'in place' unsloth's kernel: its
    gradient overwrites the incoming one and the weight gets none."""
    cached_fp8: bool = False
    """FP8 products are Transformer Engine's: weights are cast once a step and kept, inputs are kept
    in FP8; without it torchao's."""
    fp8_weights_alone: bool = False
    """Such weights have no 16-bit copy: FP8 is what is stored and gathered (Megatron-LM
    --fp8-param-gather)."""
    fused_gate: bool = False
    """act(gate) * up runs as one operation that keeps its two inputs (Megatron-LM
    core/fusions/fused_bias_swiglu.py)."""
    fused_gelu: bool = False
    """The tanh form of GELU is one kernel (nn.GELU), not transformers' chain of operations."""
    joined_projections: bool = False
    """Queries, keys and values, and gate and up, are one linear each, whose input gets one gradient
    and whose adapter has one first factor (Megatron-LM core/transformer/attention.py linear_qkv,
    core/transformer/mlp.py linear_fc1)."""
    halves_gate: bool = False
    """Gate and up are halves of one result, which is kept beside the activation; their gradients are
    concatenated (nanotron models/llama.py MLP, GLUActivation)."""
    narrow_adapters: bool = False
    """Adapters have the type of the parameters, and read a linear's input as it is; without it PEFT
    makes them fp32 (Megatron-Bridge peft/utils.py ParallelLinearAdapter, torchtune
    modules/peft/lora.py, litgpt lora.py, NeMo AutoModel components/_peft/lora.py)."""
    bare_adapters: bool = False
    """Under autocast an adapter of fp32 reads a linear's input as it is; PEFT casts it to fp32 first
    (kohya-ss/sd-scripts networks/lora.py LoRAModule.forward)."""
    fused_experts: bool = False
    """Rows reach their expert by one kernel and are summed by one, and the gate multiplies by the
    routing weight (Megatron-LM core/transformer/moe/experts.py TEGroupedMLP.forward,
    moe_utils.py permute and unpermute, core/fusions/fused_bias_swiglu.py weighted_bias_swiglu_impl)."""
    experts_apart: bool = False
    """Each expert's matrices are parameters of their own and have a product of their own, out of a
    loop on the host (Transformer Engine pytorch/module/grouped_linear.py, general_grouped_gemm), and
    routers and dispatchers are Megatron-Core's small operations (lowering/parallel/expert_host.py)."""
    streams: bool = False
    """Norms, casts, gates and additions are kernels written to stream (Transformer Engine
    common/util/vectorized_pointwise.h; Megatron-LM core/jit.py jit_fuser), not torch's general ones."""

    @property
    def runs_transformers(self) -> bool:
        """Whether the modelling code is transformers'."""
        return self.transformers > (0, 0) and not self.library

    def is_transformers_before(self, version: tuple[int, int]) -> bool:
        """Whether transformers runs, in a version before the given one."""
        return (0, 0) < self.transformers < version


class AttentionCode(Record):
    """Rotary embedding, scores and softmax."""

    rotary: str = "eager"
    """'eager' is the chain of small ops, 'fused' one kernel that writes the turned heads, 'in place'
    unsloth's kernel, which turns queries and keys where they lie."""
    repeats_keys: bool = False
    """Keys and values are repeated for each query head before the kernel, and before they are sent
    to other ranks (torchtitan models/llama3/model/model.py repeat_kv)."""
    lays_heads: bool = False
    """Queries, keys and values are one result, copied so that heads lie in rows of a sequence; keys
    and values are copied beside each other once more, and the output goes back to positions before
    sequences (nanotron models/llama.py CausalSelfAttention.forward)."""
    prefers_cudnn: bool = False
    """Where no kernel is named, cuDNN's runs from Hopper on (Transformer Engine
    attention/dot_product_attention/utils.py get_attention_backend)."""
    narrow_cudnn: bool = False
    """cuDNN is older than 9.5 of October 2024, whose backward ends at heads of 128."""
    sdpa_cudnn_from: int = 0
    """The compute capability from which SDPA tries cuDNN's kernel first; 0 is never (torchtitan
    models/attention.py ScaledDotProductAttentionWrapper)."""
    reads_positions: bool = False
    """Before a kernel of flash-attn the host reads position ids, to see whether sequences are packed
    (transformers since 4.44 modeling_flash_attention_utils.py _flash_attention_forward)."""
    fused_softmax: bool = False
    """Scale, mask and softmax of scores are one kernel that keeps its result; its backward is in
    place (Megatron-LM core/fusions/fused_softmax.py)."""
    own: bool = False
    """The library's own modules attend, so no class of transformers refuses a kernel."""
    softmax_keeps_input: bool = False
    """softmax saves its input beside its output, whose type alone its backward asks for (torch
    before 1.11, derivatives.yaml _softmax)."""


class LossCode(Record):
    """From the head's logits to the loss, and what becomes of the logits."""

    cross_entropy: str = "chain"
    """'chain' is log_softmax and nll_loss; 'in place' one kernel each way that writes the gradient
    over the logits (unsloth's); 'vocabulary' Megatron-LM's own loss, which writes over fp32 logits on
    one rank too (core/tensor_parallel/cross_entropy.py). 'log-probabilities' is NeMo-RL's, and
    'log-probabilities by one-hot labels' that of its releases before 0.4; 'probabilities' is
    slime's, and 'copies with the entropy' that before July 2026."""
    across_ranks: str = ""
    """The loss where ranks share the vocabulary; '' is as on one (NeMo-RL nemo_rl/distributed
    model_utils.py get_next_token_logprobs_from_logits)."""
    copies_logits: bool = False
    """Megatron-LM's own loss subtracts the maximum into a copy of the fp32 logits (before core 0.8,
    core/tensor_parallel/cross_entropy.py 9634c0e4 of June 2024)."""
    narrow: bool = False
    """The loss reads 16-bit logits as they are, and widens them in its kernel (Transformer Engine
    common/triton/cross_entropy.py)."""
    shift_copy: bool = False
    """`logits[..., :-1, :].contiguous()` before the loss (transformers before 4.50)."""
    slices_whole: bool = False
    """`:` inside `x[..., :-1, :]` runs as a slice of its own, whose backward writes zeros and a
    copy (torch before ATen/TensorIndexing.h applySlice compared by `<=`; pytorch issue 63921)."""
    chunks: int = 0
    """A chunked loss gets the logits as a list of so many chunks (torchtune); 0: head and loss run
    chunk by chunk in one operation."""
    outputs_to_fp32: bool = False
    """Under autocast the returned 16-bit logits are copied to fp32 after the forward (accelerate,
    and so the Trainer)."""
    returns_fp32: bool = False
    """The forward hands 16-bit logits on as fp32 ones, autocast or not (prime-rl trainer/model.py
    cast_float_and_contiguous; Megatron-LM core/transformer/module.py Float16Module)."""
    scores_in_chunks: bool = False
    """Trainers of preferences and rollouts take head and log-probabilities tile by tile (trl 1.16
    trainer/utils.py add_fused_lm_head)."""
    temperature: str = "copy"
    """How a rollout's logits are divided by it: into a 'copy' (trl 0.16 to 0.29), 'in place' (trl 1.0
    to 1.9 trainer/grpo_trainer.py _get_per_token_logps_and_entropies), or not at all (trl to 0.15)."""
    all_rollout_logits: bool = False
    """Rollouts are scored from logits of their prompts too, as the model does not know the word by
    which their trainer leaves these out."""
    reads_entropy: bool = False
    """Their entropy is computed beside the loss, 128 rows at a time (trl 0.20 to 1.9
    trainer/utils.py entropy_from_logits)."""
    shifts_rollouts: bool = False
    """Rollouts are scored from a copy of all fp32 logits, shifted by a token, and their entropy is
    computed of all at once (prime-rl 6e054f2f trainer/rl/train.py, trainer/rl/loss.py)."""
    eager_tiles: bool = False
    """Tiles of logits become log-probabilities, and gradients, by torch's operations one by one, not
    by a kernel (prime-rl trainer/models/layers/lm_head.py FusedOutputLinear)."""
    outside_compiler: bool = False
    """`compile` reaches the layers alone: the loss runs as its eager operations."""
    pairs_keep_logits: bool = False
    """A trainer of pairs has the policy's logits in fp32, and keeps them until the reference has run
    (LLaMA-Factory train/dpo/trainer.py get_batch_loss_metrics)."""
    scores_beside_logits: bool = False
    """A reward model keeps its language-model head, whose logits are made, and copied to fp32, for
    no loss (trl 0.24 models/modeling_value_head.py AutoModelForCausalLMWithValueHead.forward)."""
    holds_logits: bool = False
    """The caller keeps the returned logits through the backward."""


class OptimizerCode(Record):
    """Gradients and the update: how many copies of a parameter there are, and in which type."""

    default: str = "adamw-fused"
    """What `--optimizer auto` means: a row of catalog/optimizers."""
    master_weights: bool = False
    """Half-precision parameters are updated through an fp32 copy that stays; states are fp32."""
    main_gradients: bool = False
    """Gradients are added as they are made to buffers that stay (Megatron's main_grad)."""
    main_gradient_dtype: str = "fp32"
    """Type of those buffers; of 16 bits, the update makes fp32 gradients of them first (Megatron-LM
    optimizer/distrib_optimizer.py _copy_model_grads_to_main_grads)."""
    fused_accumulation: bool = False
    """The products of weight gradients add to those buffers themselves; what autograd gets is an
    empty tensor of the weight's type (Megatron-LM core/tensor_parallel/layers.py
    LinearWithGradAccumulationAndAsyncCommunication.backward, on by default since 2022)."""
    widens_moments: bool = False
    """FusedAdam makes fp32 copies of bf16 moments, of all parameters at once, before its kernel
    (Transformer Engine 2.3 to 2.12 pytorch/optimizers/fused_adam.py get_unscaled_state; 2.13 of
    February 2026 reads them)."""
    chains_experts: bool = False
    """Spread experts are updated by an optimizer of their own, after the other parameters
    (Megatron-LM core/optimizer/__init__.py get_megatron_optimizer: ChainedOptimizer)."""
    keeps_gradients: bool = False
    """zero_grad fills gradients with zeros and keeps them (torch before 2.0)."""
    casts_gradients: bool = False
    """The update flattens all gradients and casts them to fp32 first (DeepSpeed stage_1_and_2.py
    step: flatten_dense_tensors_aligned of its single partition)."""


class QuantizerCode(Record):
    """What runs around quantized weights."""

    keeps_input: bool = False
    """A 4-bit product keeps its input as an attribute of its autograd node (bitsandbytes up to
    0.43.1): until the graph is dropped."""
    int8_by_columns: bool = False
    """LLM.int8() quantizes x by rows and by columns, which it keeps, and reorders both factors into
    tiles (bitsandbytes before 0.45)."""
    empties_cache: bool = False
    """k-bit preparation ends with an empty cache of the allocator (peft since 0.20, June 2026)."""
    searches: bool = False
    """Loading compares every element with all 16 codes at once (torchao's NF4 in early 2024)."""
    shards_constants: bool = False
    """Scales of 4-bit weights are sharded with them (torchao dtypes/nf4tensor.py, torch.chunk of a
    tensor's inner ones); bitsandbytes' stay whole on every rank."""
    unpacks_by_half: bool = False
    """Weights were quantized from fp16 and unpack to it, then to the compute type: two copies
    (lightning plugins/precision/bitsandbytes.py)."""
    half_embeddings: bool = False
    """After k-bit preparation the trainer casts embeddings and head back to the compute type; norms
    stay fp32 (TRL peft_module_casting_to_bf16)."""
    unpacks_words: bool = False
    """GPTQ's int32 words are unpacked by one kernel in training too (fms-acceleration's copy of
    gptqmodel's qlinear_tritonv2.py)."""
    fused_adapters: bool = False
    """Adapters over quantized weights run as one autograd node a projection that keeps x and its
    dropped copy (unsloth's)."""


class LoopCode(Record):
    """The training loop: checkpointing, and what its variables hold."""

    shares_cores: bool = False
    """torch's threads are the machine's cores over its ranks (torchtune training/_distributed.py
    set_torch_num_threads); without it a rank under torchrun has one."""
    reentrant_checkpointing: bool = False
    """Checkpointing defaults to the reentrant form."""
    fp32_parameters: bool = False
    """Parameters are fp32 unless something is said: FSDP gathers 16-bit copies and sums gradients in
    fp32, autocast computes in 16 bits where nothing is sharded."""
    keeps_stored_type: bool = False
    """Parameters have the type of the checkpoint unless something is said, and autocast computes in
    16 bits (from_pretrained of transformers 5)."""
    checkpoints_within: bool = False
    """Checkpointing is put around layers that are FSDP units already, and so runs within them
    (torch's apply_activation_checkpointing)."""
    holds_last_step: bool = False
    """The loop's variables keep loss and logits, and by them the graph, until the next step binds
    them anew."""
    issue: tuple[float, float] = (1.0, 1.0)
    """How long the host takes for a kernel, forward and backward, as a multiple of transformers'
    (timing/efficiency.py)."""
    layer_dispatches: tuple[int, int] = LAYER_DISPATCHES
    """Kernels that the host could issue in the time that a layer's modules take it besides its own,
    forward and backward (ir/costs.py)."""
    checkpoint_dispatches: tuple[int, int] | None = None
    """Kernels of the forward that the host could issue in the time that a checkpointed layer takes
    it besides, forward and backward; None: torch's own checkpoints (ir/costs.py)."""


class EngineCode(Record):
    """What spreads a model over ranks."""

    tensor_style: str = ""
    """A row of lowering/parallel/tensor_style that is this library's own; '': transformers' plan,
    or torch's styles where the sequence is split too."""
    own_stages: bool = False
    """Pipeline stages are the library's: without torch's receive buffers for every micro-batch, and
    tensor-parallel ranks send a part each (Megatron-LM core/pipeline_parallel/schedules.py)."""
    weighs_stages: bool = False
    """Layers are spread over stages by the weights that a layer and the head multiply by, so that a
    stage ends with the layer that reaches its share (nanotron models/base.py build_model)."""
    narrow_ring: bool = False
    """A ring of context-parallel ranks merges outputs by one kernel a step and sums and sends
    gradients of keys and values, all in the type of the inputs; without it in fp32 (Transformer
    Engine attention/dot_product_attention/context_parallel.py AttnFuncWithCPAndKVP2P)."""
    hides_tensor_collectives: bool = False
    """Gathers and reductions along the sequence run in chunks beside the products of their linears
    (Transformer Engine's user buffers, Megatron-LM --tp-comm-overlap), where the sequence is split
    over tensor-parallel ranks."""
    shares_optimizer: bool = False
    """Full training shares the optimizer's states out over data-parallel ranks where nothing else is
    said (Megatron-LM --use-distributed-optimizer)."""
    sums_late: bool = False
    """Under ZeRO 1 buffers of gradients are all-reduced whole, once the last backward is done
    (nanotron trainer.py training_step, optim/gradient_accumulator.py sync_gradients_across_dp)."""
    gathers_in_forward: bool = False
    """The distributed optimizer's new parameters are gathered beside the next forward (Megatron-LM
    --overlap-param-gather)."""
    sends_tokens_once: bool = False
    """A token travels once to each rank, and once over the network to each node, that has some of
    its experts (DeepEP; Megatron-LM core/transformer/moe/token_dispatcher.py
    MoEFlexTokenDispatcher); without it once for every expert."""
    nccl: tuple[int, int] = (2, 27)
    """Release of NCCL that comes with its torch (timing/communicators.py): 2.10 with 1.11, 2.14 with
    2.0, 2.18 with 2.1, 2.20 with 2.3 and 2.4, 2.21 with 2.5 and 2.6, 2.26 with 2.7 (pytorch
    .github/scripts/generate_binary_build_matrix.py)."""
    deepspeed: tuple[int, int] = (0, 19)
    """Release of DeepSpeed (lowering/data_parallel/zero_copies.py)."""
    keeps_stage_outputs: bool = False
    """Micro-batches run in DeepSpeed's pipeline engine, on one stage too, whose last stage keeps what
    it returned until another micro-batch takes its place (lowering/held_outputs.py)."""
    averages_apart: bool = False
    """Losses are averaged over data-parallel ranks by a communicator that does not sum gradients
    (Megatron-LM core_v0.6.0 training/utils.py average_losses_across_data_parallel_group)."""
    bucket_bytes: int = 0
    """Buffers in which gradients are gathered before they are reduced, there on one GPU too."""
    parameter_hooks: bool = False
    """Parameters are fetched, released and reduced in hooks of their modules on one GPU too (ZeRO
    stage 3 without other ranks)."""
    flat_adapters: bool = False
    """Under FSDP1 adapters share their layer's flat parameter, whose gradient is then as large as
    the layer (use_orig_params, no policy for them)."""


class TrainerCode(Record):
    """What trainers of preferences and rollouts do by themselves, and where their files say
    nothing."""

    copies_reference: bool = False
    """Under ZeRO stage 3 a rollout's reference is a model of its own, adapters or not (trl 0.14 to 0.18
    trainer/grpo_trainer.py __init__)."""
    divergence: float = 0.0
    """GRPO's beta; without one there is no reference."""
    mixed: bool = True
    """bf16 is on."""
    checkpoints: bool = True
    """Gradient checkpointing is on."""
    packs_whole_rows: bool = False
    """Packed rows are cut from one text without end: nothing tells attention where a sequence ends
    (trl 0.18 trainer/sft_trainer.py, data_utils.py pack_examples)."""


class Releases(Record):
    """Of a library, from the first to the last."""

    library: str = ""
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)


class Stack(Record):
    """How a library of an era runs the same model, part by part; `tools` are trainers that run it
    by themselves, other names of the row."""

    name: str
    meaning: str
    source: str
    tools: tuple[str, ...] = ()
    releases: Releases = Releases()
    """Whose code it is, for those who name a release."""
    draws: bool = False
    """It trains denoisers."""
    model: ModelCode = ModelCode()
    attention: AttentionCode = AttentionCode()
    loss: LossCode = LossCode()
    optimizer: OptimizerCode = OptimizerCode()
    quantizer: QuantizerCode = QuantizerCode()
    loop: LoopCode = LoopCode()
    engine: EngineCode = EngineCode()
    trainer: TrainerCode = TrainerCode()

    @property
    def runs_own_modules(self) -> bool:
        """Whether layers are the library's own, which what patches transformers' does not reach."""
        return self.attention.own or not self.model.runs_transformers
