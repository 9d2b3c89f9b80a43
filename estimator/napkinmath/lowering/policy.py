"""Policy: what a training configuration decides for every weight and linear, in one place."""

from __future__ import annotations

from napkinmath.base.cuda import DEFAULT_PROCESSORS
from napkinmath.base.dtypes import BF16, FP8_E4M3, FP32, DType, find_dtype
from napkinmath.base.expr import Bindings, Size
from napkinmath.catalog.quantization import weight_format
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import (
    AdapterConfig,
    AdapterKind,
    Attention,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.ledger import Role, Tensor, Value, Weight
from napkinmath.lowering.adapters import adapted_embedding
from napkinmath.lowering.attention_kernel import MAX_CUDNN_HEAD, casts_back, sdpa_kernel
from napkinmath.lowering.linears import (
    QUANTIZED_KINDS,
    is_target,
    is_trained_head,
    packing,
    parameter_ranks,
    whole_linear,
)
from napkinmath.lowering.precision import PRECISIONS, computed_rule, gathered_dtype

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.catalog.kernels import KernelSet
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.stack import Stack
    from napkinmath.ir.tape import Tape
    from napkinmath.lowering.forwards import Beside
    from napkinmath.lowering.parallel.context import ContextSplit
    from napkinmath.lowering.parallel.expert import ExpertSplit
    from napkinmath.lowering.parallel.tensor import TensorSplit


# Megatron-LM's parallel linears and Transformer Engine's, grouped ones of experts among them.
SUMMED_KINDS = ("linear", "linear without adapter", "head", "experts")


class Policy:
    """Precision, training mode, what is trained, and how linears are lowered; made once per
    estimate from a TrainConfig, and never changed."""

    trains_adapters = True  # not in a forward of its own

    def __init__(
        self,
        config: TrainConfig,
        stack: Stack,
        *,
        sdpa_choice: Attention = Attention.FLASH,
        cudnn_heads: int = MAX_CUDNN_HEAD,
        product_workspace_bytes: int = 0,
        patch: KernelSet | None = None,
        processors: int = DEFAULT_PROCESSORS,
        teacher: ModelSpec | None = None,
        beside: Beside | None = None,
        rollout: object = None,  # an EnginePlan
    ) -> None:
        self.config, self.stack, self.patch, self.teacher = config, stack, patch, teacher
        self.beside, self.rollout = beside, rollout  # forwards in a micro-step; engine before
        self.sdpa_choice, self.cudnn_heads = sdpa_choice, cudnn_heads
        self.product_workspace_bytes, self.processors = product_workspace_bytes, processors
        # types as loaded; a sharded engine may compute in another
        self.loaded_rule = PRECISIONS[config.precision]
        masters = stack.optimizer.master_weights
        self.rule = computed_rule(self.loaded_rule, config.parallel, master_weights=masters)
        self.autocast: DType | None = self.rule.autocast
        self.training = config.training_mode
        self.adapter: AdapterConfig | None = config.adapter
        self.format = weight_format(config.quantization)
        self.experts: ExpertSplit | None = None
        if config.parallel.spreads_experts:
            from napkinmath.lowering.parallel.expert import ExpertSplit

            self.experts = ExpertSplit(config.parallel, stack)
        self.context: ContextSplit | None = None
        if config.parallel.context_parallel_size > 1:
            from napkinmath.lowering.parallel.context import context_split

            self.context = context_split(config, stack)
        self.tensor: TensorSplit | None = None
        if config.parallel.tensor_parallel_size > 1:
            from napkinmath.lowering.parallel.tensor import tensor_split

            self.tensor = tensor_split(config, stack)
        self._settled = True

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_settled", False):
            raise AttributeError(f"a Policy is never changed; make another for {name}")
        object.__setattr__(self, name, value)

    def under(self, config: TrainConfig, *, beside: Beside | None = None) -> Policy:
        """The same decisions for another configuration, and what runs beside its micro-steps."""
        return Policy(
            config,
            self.stack,
            sdpa_choice=self.sdpa_choice,
            cudnn_heads=self.cudnn_heads,
            product_workspace_bytes=self.product_workspace_bytes,
            patch=self.patch,
            processors=self.processors,
            teacher=self.teacher,
            beside=beside,
        )

    def patches(self, part: str) -> bool:
        """Whether the patch replaces that operation (catalog/kernels.py KernelSet.parts)."""
        return self.patch is not None and part in self.patch.parts

    @property
    def recomputes(self) -> bool:
        """Whether checkpointing is active: asked for, and the model is in training mode."""
        return self.config.recompute.kind is not RecomputeKind.NONE and self.training

    @property
    def reentrant(self) -> bool:
        """Whether the reentrant form of checkpointing runs."""
        return self.config.recompute.reentrant or self.stack.loop.reentrant_checkpointing

    @property
    def shards(self) -> bool:
        """Whether an engine stores parts of the parameters and gathers them (FSDP, ZeRO)."""
        kind = self.config.parallel.data_parallel
        return kind.is_fsdp or kind.is_zero

    @property
    def keeps_main_gradients(self) -> bool:
        """Whether gradients end in the stack's own buffers, under its own engines."""
        return self.stack.optimizer.main_gradients and self.has_whole_weights

    @property
    def main_gradient_dtype(self) -> DType:
        """Type of those buffers: as `reduce_dtype` says, or the stack's."""
        wanted = self.config.parallel.reduce_dtype
        return find_dtype(self.stack.optimizer.main_gradient_dtype if wanted == "auto" else wanted)

    def sums_in_product(self, weight: Weight) -> bool:
        """Whether the product of a weight's gradient adds it to the buffer itself: of linears
        and experts of 16 bits, but of no router."""
        return (
            weight.trainable
            and weight.kind in SUMMED_KINDS
            and weight.tensor.dtype is not FP32
            and self.stack.optimizer.fused_accumulation
            and self.keeps_main_gradients
        )

    def keeps_fp8(self, kind: str) -> bool:
        """Whether a linear keeps its input in FP8, as Transformer Engine's do: under a stack that
        calls them."""
        cached = self.stack.model.cached_fp8 and kind in QUANTIZED_KINDS
        return cached and self.rule.fp8_block is not None and self.format is None

    @property
    def has_whole_weights(self) -> bool:
        """Whether a rank has its parameters whole all the time, and so may keep a copy of them."""
        return not self.shards or self.config.parallel.data_parallel is DataParallel.ZERO1

    @property
    def quant_storage(self) -> str:
        """Type that holds packed 4-bit weights, one that can be sharded (bnb_4bit_quant_storage).

        GPTQ's and AWQ's int32 words are buffers, which every rank has whole (gptqmodel
        nn_modules/qlinear register_buffer).
        """
        quantization = self.config.quantization
        if quantization is not None and quantization.storage != "auto":
            return quantization.storage
        in_words = self.format is not None and self.format.words
        return "bf16" if self.shards and not in_words else "uint8"

    def virtual_tokens(self, kind: AdapterKind) -> int:
        """How many virtual tokens a method of that kind trains, 0 under another."""
        adapter = self.adapter
        return adapter.num_virtual_tokens if adapter is not None and adapter.kind is kind else 0

    @property
    def inputs_require_grad(self) -> bool:
        """`enable_input_require_grads()`: PeftModel calls it on a base whose checkpointing is on
        (peft 0.21 peft_model.py), and so does switching that on where a model reads tokens
        (transformers 5.23 modeling_utils.py _activation_checkpointing_enable).
        """
        return self.adapter is not None and self.recomputes

    @property
    def pixels_require_grad(self) -> bool:
        """The same where a model reads pixels: PeftModel leaves a quantized base to k-bit
        preparation, which asks for the reentrant form alone (peft 0.21 peft_model.py
        _prepare_model_for_gradient_checkpointing, utils/other.py prepare_model_for_kbit_training).
        """
        return self.inputs_require_grad and (self.config.quantization is None or self.reentrant)

    # ------------------------------------------------------------ weights

    def make_weight(
        self,
        path: str,
        axes: tuple[Size, ...],
        *,
        kind: str,
        dtype: DType | None,
        buffer: bool,
        tied_to: str,
        whole: bool = False,
    ) -> Weight:
        """Storage of a named parameter: its type after loading and k-bit preparation, packed if
        quantized (and not left `whole`), trained or frozen."""
        name = path.rpartition(".")[2]
        trainable = not buffer and kind != "statistics" and self.is_trained(path, kind)
        role = Role.ADAPTERS if self.adapter is not None and trainable else Role.WEIGHTS
        if self.adapter is not None and trainable:
            # ModulesToSaveWrapper trains a copy of the module, which is tied to nothing
            tied_to = ""
        constants: tuple[Tensor, ...] = ()
        packed = None if trainable or whole else packing(path, kind, self)
        if packed is not None:
            tensor, constants = packed.pack(name, axes, path)
        else:
            dtype = dtype or (self.loaded_dtype if buffer else self.parameter_dtype(kind))
            tensor = Tensor(name, axes, dtype, role, path)
        return Weight(
            path,
            axes,
            tensor,
            trainable=trainable,
            kind=kind,
            constants=constants,
            buffer=buffer,
            tied_to=tied_to,
        )

    def parameter_dtype(self, kind: str) -> DType:
        """Type of an unquantized parameter: k-bit preparation makes what is left unquantized
        fp32."""
        quantization = self.config.quantization
        if quantization is not None:
            cast_back = self.stack.quantizer.half_embeddings and kind in ("embedding", "head")
            widened = (
                quantization.kbit_preparation
                and not self.shards
                and (self.format is None or self.format.widened_rest)
            )
            return FP32 if widened and not cast_back else self.compute_dtype
        return self.rule.parameters

    @property
    def loaded_dtype(self) -> DType:
        """Type in which the model is loaded, which floating buffers keep whatever is done to the
        parameters."""
        return self.rule.parameters if self.config.quantization is None else self.compute_dtype

    @property
    def compute_dtype(self) -> DType:
        """Type in which quantized weights are multiplied and unprepared parameters of a quantized
        model are kept."""
        return self.autocast or (self.rule.parameters if self.rule.parameters is not FP32 else BF16)

    def keeps_original(self, weight: Weight) -> bool:
        """Whether PEFT holds the untrained original beside a module that is trained whole
        (modules_to_save)."""
        own = not weight.tied_to and not weight.buffer
        return self.adapter is not None and weight.trainable and own

    @property
    def product_dtype(self) -> DType:
        """Type in which quantized weights are multiplied (bnb_4bit_compute_dtype)."""
        quantization = self.config.quantization
        return (
            self.compute_dtype
            if quantization is None or quantization.compute_dtype == "auto"
            else find_dtype(quantization.compute_dtype)
        )

    def is_trained(self, path: str, kind: str) -> bool:
        """Whether a base parameter gets a gradient."""
        parts = path.split(".")
        if self.adapter is not None:
            named = any(name in parts for name in self.adapter.trained_modules)
            return named or is_trained_head(self.adapter, kind)
        return not any(module in parts for module in self.config.frozen)

    @property
    def holds_logits(self) -> bool:
        """Whether logits live until the micro-batch's backward is over: the caller keeps them, or
        torch's last pipeline stage does."""
        return self.stack.loss.holds_logits or self.keeps_stage_buffers

    @property
    def keeps_stage_buffers(self) -> bool:
        """Whether stages are torch's, which hold their outputs and a receive buffer for each
        micro-batch (distributed/pipelining/stage.py)."""
        parallel = self.config.parallel
        pipelined = (
            parallel.pipeline_schedule.record.is_pipelined and not self.stack.engine.own_stages
        )
        return pipelined and parallel.pipeline_parallel_size > 1

    # ------------------------------------------------------------ embeddings and linears

    def embedding(self, t: Tape, ids: Value, found: Value, rows: Size) -> Value:
        """What an embedding returns of the rows it found: with its adapter, summed over ranks that
        share the table."""
        if self.targets(t.module, "embedding"):
            return adapted_embedding(t, ids, found, rows)
        split = self.tensor
        return split.embedded(t, found) if split is not None and split.splits(rows) else found

    def linear(
        self,
        t: Tape,
        x: Value,
        outputs: Size,
        *,
        bias: bool,
        kind: str,
        role: Role,
        weight: Weight | None,
    ) -> Value:
        """Lowers one linear of the model, split over ranks where tensor parallelism does so."""

        def whole(source: Value) -> Value:
            return whole_linear(t, source, outputs, bias=bias, kind=kind, role=role, weight=weight)

        split = self.tensor
        return whole(x) if split is None else split.linear(t, x, outputs, kind, whole)

    def targets(self, path: str, kind: str) -> bool:
        """Whether an adapter sits on the linear of that path."""
        return self.adapter is not None and is_target(self.adapter, path, kind)

    def adapts_parameter(self, names: tuple[str, ...], path: str) -> int:
        """How many times its rank LoRA has on the parameter at `path`, which replaced modules of
        these names; 0 without."""
        return parameter_ranks(self.adapter, names, path)

    @property
    def adapter_dtype(self) -> DType:
        """Type of adapter weights: PEFT's are fp32 over 16-bit and quantized bases where none is named."""
        assert self.adapter is not None
        if gathered := gathered_dtype(self.loaded_rule, self.rule, self.config.parallel):
            return gathered
        if self.adapter.dtype not in ("auto", "base"):
            return find_dtype(self.adapter.dtype)
        base = self.adapter.dtype == "base" and self.format is None
        narrow = base or self.stack.model.narrow_adapters
        return self.rule.parameters if narrow and self.rule.parameters is not FP8_E4M3 else FP32

    @property
    def sequence_length(self) -> Size:
        """Positions of a sequence that one rank holds."""
        return self.config.sequence_length // self.config.parallel.context_parallel_size

    def reaches(self, symbol: str, value: int) -> bool:
        """Whether b or s is at least a value; a symbolic size is taken to be."""
        size = self.config.micro_batch_size if symbol == "b" else self.sequence_length
        return not isinstance(size, int) or size >= value

    def bound_length(self, length: Size, sizes: Mapping[str, int]) -> int | None:
        """The value of a size in b, s, st and a model's symbols; None where one is open."""
        s, target = self.sequence_length, self.config.batch.target_length
        own = {"b": self.config.micro_batch_size, "s": s, "st": target or s}
        return found if isinstance(found := Bindings({**sizes, **own})(length), int) else None

    # ------------------------------------------------------------ attention

    @property
    def masks_packed(self) -> bool:
        """Whether packed sequences are kept apart by a mask: by every kernel but flash-attn's,
        which take their ends."""
        return self.config.batch.packing and not self.config.attention.needs_no_mask

    @property
    def packed_length(self) -> int:
        """Length of the sequence that a packed token is in, on average: the sum of squares over the
        sum; 0 where they are not known."""
        batch = self.config.batch
        if not batch.packing or self.masks_packed or not batch.lengths:
            return 0
        return max(1, round(sum(length * length for length in batch.lengths) / sum(batch.lengths)))

    def attended_dtype(self, dtype: DType) -> DType:
        """Type in which q, k, v of a type reach a fused kernel."""
        if self.autocast is not None:
            return self.autocast
        quantized = self.config.quantization is not None
        return self.loaded_dtype if casts_back(self.sdpa_choice, dtype, quantized) else dtype

    def sdpa_kernel(self, dtype: DType, *, head_size: int, masked: bool, grouped: bool) -> str:
        """The kernel SDPA would pick on CUDA for these inputs."""
        return sdpa_kernel(self.sdpa_choice, dtype, head_size, masked, grouped, self.cudnn_heads)
