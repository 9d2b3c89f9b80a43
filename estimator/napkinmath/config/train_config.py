"""TrainConfig: everything about a training step that is not the model or the hardware."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.config.data_loader import DataLoaderConfig
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, check_micro_steps
from napkinmath.config.run_length import RunLength
from napkinmath.config.workload_config import Workload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size

MAX_SIZE = 1 << 40
TRAINER_MAX_GRAD_NORM = 1.0  # transformers TrainingArguments.max_grad_norm
BITSANDBYTES_4BIT = ("nf4", "fp4")  # what Params4bit stores; their scales can be quantized too
# bitsandbytes 0.50 _ops.py quantize_4bit
BITSANDBYTES_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class Precision(str, Enum):
    """Types of parameters and of computation; each member's meaning is in lowering/precision.py."""

    BF16 = "bf16"
    BF16_AMP = "bf16-amp"
    BF16_AUTOCAST = "bf16-autocast"
    BF16_FP8_BASE = "bf16-fp8-base"
    FP16 = "fp16"
    FP16_AMP = "fp16-amp"
    FP16_AUTOCAST = "fp16-autocast"
    FP16_FP8_BASE = "fp16-fp8-base"
    FP32 = "fp32"
    TF32 = "tf32"
    FP8 = "fp8"
    FP8_ROW = "fp8-row"
    FP8_BLOCK = "fp8-block"


class AdapterKind(str, Enum):
    """What parameter-efficient method adds to the model."""

    LORA = "lora"
    DORA = "dora"
    QALORA = "qalora"
    IA3 = "ia3"
    PROMPT = "prompt"
    PREFIX = "prefix"


class RecomputeKind(str, Enum):
    """Which activations are dropped in the forward and recomputed in the backward."""

    NONE = "none"
    FULL = "full"
    EVERY = "every"
    SQRT = "sqrt"
    INTERLEAVED = "interleaved"
    SELECTIVE = "selective"


class Attention(str, Enum):
    """Which attention implementation runs; AUTO is what the library picks."""

    AUTO = "auto"
    EAGER = "eager"
    SDPA = "sdpa"
    MATH = "math"
    EFFICIENT = "efficient"
    FLASH = "flash"
    FLASH1 = "flash1"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    FLEX = "flex"
    CUDNN = "cudnn"

    @property
    def needs_no_mask(self) -> bool:
        """Whether windows and the ends of packed sequences are arguments of the kernel: those of
        the flash-attn packages, and masks that torch's flex_attention takes as functions."""
        return self in (Attention.FLASH2, Attention.FLASH3, Attention.FLEX)


class Loss(str, Enum):
    """How logits and loss are computed."""

    HF = "hf"
    CHUNKED = "chunked"
    FUSED = "fused"


class Kernels(str, Enum):
    """Whose patched kernels replace the library's layers."""

    HF = "hf"
    LIGER = "liger"
    UNSLOTH = "unsloth"
    AXOLOTL = "axolotl"
    NAPKINMATH = "napkinmath"


def _check_types(record: Record, *, optional: bool = False, **kinds: type[object]) -> None:
    """Raises where a field is not of its kind: "eager" is not Attention.EAGER, and would be
    compared with it in vain."""
    for name, kind in kinds.items():
        value = getattr(record, name)
        if not isinstance(value, kind) and not (optional and value is None):
            members = (
                ", ".join(f"{kind.__name__}.{m.name}" for m in kind)
                if issubclass(kind, Enum)
                else f"{kind.__name__}(...)"
            )
            raise InputError(f"{name}={shown(value)} is not of type {kind.__name__}; use {members}")


def _check_size(name: str, value: object) -> None:
    """Refuses numbers that are no size and text; a symbol of a sweep passes."""
    whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE
    if isinstance(value, (int, float, str)) and not whole:
        raise InputError(f"{name} {shown(value)} is not a positive whole number; use 1 or more")


class AdapterConfig(Record):
    """A parameter-efficient method: LoRA and its relatives, IA3, prompt and prefix tuning."""

    kind: AdapterKind = AdapterKind.LORA
    rank: Size = 16
    alpha: int = 0
    """Scaling numerator; 0 means the rank, which changes no size."""
    targets: tuple[str, ...] = ("all-linear",)
    """Module names, 'all-linear' (each linear but the head), 'peft-default' (by the model's type)."""
    dropout: float = 0.0
    dtype: str = "auto"
    """'auto' is what the stack does, PEFT fp32 where the base is fp16, bf16 or quantized; 'base' is
    autocast_adapter_dtype=False: the type of a dense base."""
    rank_stabilized: bool = False
    trained_modules: tuple[str, ...] = ()
    """Full modules trained and saved beside the adapters (PEFT's modules_to_save), e.g.
    ('embed_tokens', 'lm_head')."""
    num_adapters: int = 1
    """Adapters resident at once; one is trained, the others take weight memory only."""
    num_virtual_tokens: int = 20
    """Prompt and prefix tuning: trained tokens."""
    merge: bool = False
    """Merged into the weights after training (PEFT's merge_and_unload)."""

    def validate(self) -> None:
        """Raises InputError for a rank, dropout or choice that the adapter does not take."""
        _check_types(self, kind=AdapterKind)
        if isinstance(self.rank, int) and not 1 <= self.rank <= 1 << 16:
            raise InputError(
                f"rank {shown(self.rank)} is out of range; use 1 to 65536, usually 8 to 256"
            )
        if not 0 <= self.dropout < 1:
            raise InputError(
                f"adapter dropout {shown(self.dropout)} is not a probability; use 0 <= p < 1"
            )
        if self.dtype not in ("auto", "base", "fp32", "bf16", "fp16"):
            raise InputError(
                f"adapter dtype {shown(self.dtype)} is unknown; use auto, base, fp32, bf16 or fp16"
            )
        if not self.targets and self.kind in (
            AdapterKind.LORA,
            AdapterKind.DORA,
            AdapterKind.QALORA,
            AdapterKind.IA3,
        ):
            raise InputError(
                "adapter targets are empty; name modules such as q_proj,v_proj or use all-linear"
            )
        if self.num_adapters < 1 or self.num_virtual_tokens < 1:
            raise InputError("num_adapters and num_virtual_tokens must be at least 1")


class QuantizationConfig(Record):
    """How frozen base weights are stored; formats are rows of catalog/quantization.py."""

    format: str = "nf4"
    double_quant: bool = True
    group_size: int = 0
    """Elements that share one scale; 0 is the format's own default."""
    experts: bool = False
    """Experts held as 3-D parameters are packed too (axolotl's quantize_moe_experts)."""
    kbit_preparation: bool = True
    """peft.prepare_model_for_kbit_training: fp32 embeddings, norms, head; checkpointing is on."""
    compute_dtype: str = "auto"
    """Type of the products: 'auto' is the precision's own; fp32 is what bitsandbytes does where
    nothing is said (bnb_4bit_compute_dtype)."""
    keep: tuple[str, ...] = ("lm_head",)
    """Modules left unquantized."""
    storage: str = "auto"
    """Type of packed 4-bit weights (bnb_4bit_quant_storage); 'auto': bf16 if sharded or uint8."""
    embeddings: str = "auto"
    """'int8': the frozen input embedding with a scale a row (napkinmath's patch); 'auto': whole."""

    def validate(self) -> None:
        """Raises InputError for unknown types and for a group size the format does not have."""
        for name, given, known in (
            ("compute_dtype", self.compute_dtype, ("auto", "fp32", "bf16", "fp16")),
            ("storage", self.storage, ("auto", "uint8", "bf16", "fp16", "fp32")),
            ("embeddings", self.embeddings, ("auto", "int8")),
        ):
            if given not in known:
                listed = f"{', '.join(known[:-1])} or {known[-1]}"
                raise InputError(f"{name} {shown(given)} is unknown; use {listed}")
        if self.group_size < 0:
            raise InputError(
                f"group_size={self.group_size} is negative; use 0 (the format's own), 16 to 1024"
            )
        if self.format in BITSANDBYTES_4BIT and self.group_size not in (0, *BITSANDBYTES_BLOCKS):
            raise InputError(
                f"group_size={self.group_size} is no block of {self.format}; use"
                f" {', '.join(map(str, BITSANDBYTES_BLOCKS))}"
            )


class RecomputeConfig(Record):
    """Gradient (activation) checkpointing."""

    kind: RecomputeKind = RecomputeKind.NONE
    every: int = 1
    """With EVERY: a checkpoint at every k-th layer, k layers recomputed together. With INTERLEAVED:
    only every k-th layer is checkpointed."""
    reentrant: bool = False
    keep: tuple[str, ...] = ("sdpa",)
    """With SELECTIVE: operations whose outputs are kept (names as in the record: sdpa, linear, ...;
    or modules: o_proj, ...); inputs: what a layer's modules read, each a checkpoint of its own."""

    def validate(self) -> None:
        """Raises InputError for a kind that is impossible or excludes another field."""
        _check_types(self, kind=RecomputeKind)
        if self.every < 1:
            raise InputError(
                f"checkpointing every:{self.every} is not possible; use every:1 or more"
            )
        if self.kind is RecomputeKind.SELECTIVE and self.reentrant:
            raise InputError(
                "selective checkpointing needs use_reentrant=False; drop reentrant, or use full"
                " checkpointing"
            )


class OffloadConfig(Record):
    """What lives in host memory and crosses the host link during the step."""

    optimizer: bool = False
    """Optimizer states, master weights and the update itself on the host; gradients leave the
    device as they are made."""
    parameters: bool = False
    """Weights of the layers on the host, brought to the device for their forward and their
    backward."""
    activations: bool = False
    """Tensors saved for the backward (of checkpointed layers: their inputs)."""
    checkpoints: bool = False
    """Inputs of checkpointed layers (transformers' offload=True, unsloth's checkpointing)."""
    pinned: bool = True
    style: str = "trl"
    """Whose activation offloading: a row of lowering/saved_offload.py."""
    prefetch: int = 1
    """Layers whose weights are on their way while another one runs."""
    embeddings: bool = False
    """The frozen input embedding, whose rows are gathered on the host."""
    blocks: int = 0  # blocks of a denoiser that wait on the host (blocks_to_swap)

    def validate(self) -> None:
        """Raises InputError for a negative prefetch."""
        if self.prefetch < 0:
            given = f"prefetch={self.prefetch} is negative"
            raise InputError(f"{given}; use 0 (no layer ahead) or more")


class Batch(Record):
    """How sequences fill the batch when they are not all of one length."""

    packing: bool = False
    lengths: tuple[int, ...] = ()
    """A sample of sequence lengths; empty means every sequence has sequence_length tokens."""
    target_length: Size = 0
    """Decoder length of an encoder-decoder model; 0 means the sequence length."""
    images: int = 0
    """Images in each sequence of a vision-language model; 0 leaves its vision tower idle."""
    image_size: tuple[int, ...] = ()
    """(width, height) of an image in pixels before the processor; () is the model's own."""
    frames: int = 0  # of a video that a denoiser is trained on; 0 is the model's own
    min_pixels: int = 0
    """The least and most area that the processor is given; 0 is its own limit."""
    max_pixels: int = 0
    image_limit: int = 0
    """The area above which the trainer scales an image down before the processor; 0 is none."""


AUTO_TILES = -1  # as many as make tiles of about hidden-size tokens (ALST)


class TrainConfig(Record):
    """One training step, on one GPU unless `parallel` says otherwise. Every default is printed as
    assumed."""

    micro_batch_size: Size = 1
    sequence_length: Size = 2048
    gradient_accumulation_steps: int = 1
    precision: Precision = Precision.BF16_AUTOCAST
    adapter: AdapterConfig | None = None
    quantization: QuantizationConfig | None = None
    recompute: RecomputeConfig = RecomputeConfig()
    offload: OffloadConfig = OffloadConfig()
    batch: Batch = Batch()
    optimizer: str = "auto"
    """A row of catalog/optimizers.py; 'auto' is the stack's default."""
    optimizer_in_backward: bool = False
    clip_gradients: bool = True
    attention: Attention = Attention.AUTO
    loss: Loss = Loss.HF
    kernels: Kernels = Kernels.HF
    kernel_parts: tuple[str, ...] = ()
    """The operations of `kernels` that run (catalog/kernels.py); () is those that its users get."""
    mlp_tiles: int = 0
    """Tiles of the tokens that each MLP runs over, made again in the backward (ALST); 0 is none."""
    stack: str = "hf"
    """The library and era whose behaviour is priced: a row of catalog/stacks.py."""
    training_mode: bool = True
    """False prices forward and backward of a model left in eval mode: dropout off and checkpointing
    inactive."""
    compile: bool = False
    frozen: tuple[str, ...] = ()
    """Modules that full fine-tuning leaves untrained."""
    parallel: ParallelConfig = ParallelConfig()
    """How the step is spread over many GPUs; batch and lengths above are those of one data-parallel
    rank."""
    workload: Workload = Workload()
    """Preferences, distillation, rollouts; evaluation and generation in the middle. Its batch
    counts sequences: a pair is two."""
    run: RunLength = RunLength()
    """How long the training is: nothing of a step depends on it."""
    loader: DataLoaderConfig = DataLoaderConfig()
    """How fast samples are prepared: a finding says what of a step waits for them."""

    def validate(self) -> None:
        """Raises InputError for fields of a wrong type and for choices that exclude each other."""
        _check_types(
            self,
            precision=Precision,
            attention=Attention,
            loss=Loss,
            kernels=Kernels,
            recompute=RecomputeConfig,
            offload=OffloadConfig,
            batch=Batch,
            parallel=ParallelConfig,
            workload=Workload,
        )
        _check_types(self, optional=True, adapter=AdapterConfig, quantization=QuantizationConfig)
        for name in ("micro_batch_size", "sequence_length", "gradient_accumulation_steps"):
            _check_size(name, getattr(self, name))
        check_micro_steps("gradient_accumulation_steps", self.gradient_accumulation_steps)
        if self.kernel_parts and self.kernels is Kernels.HF:
            raise InputError("--kernel-parts chooses operations of --kernels; name whose")
        if self.mlp_tiles < AUTO_TILES:
            raise InputError(f"mlp_tiles={self.mlp_tiles} is negative; use 0 for none")
        if self.mlp_tiles and (self.compile or self.parallel.tensor_parallel_size > 1):
            raise InputError("--mlp-tiles with --compile or --tp: no trainer has both; drop one")
        self._validate_base_and_offload()
        self._validate_update_in_backward()

    @property
    def step_loss(self) -> Loss:
        """The loss as the step records it: our kernels give a trainer of preferences or rollouts
        its labels' log-probabilities, of the policy and of its reference."""
        ours = self.kernels is Kernels.NAPKINMATH
        return Loss.CHUNKED if ours and self.workload.rule.scores_labels else self.loss

    def _validate_base_and_offload(self) -> None:
        if self.quantization is not None and self.adapter is None:
            raise InputError(
                "a quantized base cannot be trained itself; add an adapter (--qlora, or"
                " adapter=AdapterConfig())"
            )
        alone = self.offload.parameters and not self.offload.optimizer
        kind = self.parallel.data_parallel
        if alone and not (self.adapter or kind is DataParallel.ZERO3):
            way = "" if kind.is_zero else "--offload optimizer,parameters or "
            raise InputError(f"trained parameters in host memory need {way}--zero 3")
        if self.offload.checkpoints and self.recompute.kind is RecomputeKind.NONE:
            raise InputError(
                "there are no checkpoints to offload without checkpointing: --checkpointing"
                " offload, or --offload activations"
            )

    def _validate_update_in_backward(self) -> None:
        if self.optimizer_in_backward and self.offload.optimizer:
            raise InputError(
                "optimizer_in_backward updates on the device and offload.optimizer on the host;"
                " choose one"
            )
        if self.optimizer_in_backward and self.gradient_accumulation_steps > 1:
            text = "frees gradients at once; use gradient_accumulation_steps=1"
            raise InputError(f"optimizer_in_backward {text}")
