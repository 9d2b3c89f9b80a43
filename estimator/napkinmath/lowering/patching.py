"""Which set of patched operations runs, and what it asks of the model and of the rest of the
configuration."""

from __future__ import annotations

from napkinmath.base.dtypes import UINT8
from napkinmath.base.errors import InputError
from napkinmath.catalog.kernels import KERNEL_SETS
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import AdapterKind, TrainConfig
from napkinmath.ir.ledger import ALLOC, FREE, Role

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.catalog.kernels import KernelSet
    from napkinmath.ir.ledger import Steps
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.recording import RecordingPatch
    from napkinmath.ir.tape import Tape


def settle_patch(spec: ModelSpec, config: TrainConfig) -> tuple[KernelSet, TrainConfig]:
    """The set for the model's family, and the configuration as it leaves it; InputError where it
    knows no such model or training.

    unsloth prepares a quantized model itself and widens nothing (models/_utils.py
    prepare_model_for_training).
    """
    row = KERNEL_SETS[config.kernels.value]
    _check(row, spec, config)
    if config.kernel_parts:
        row = row.replace(parts=config.kernel_parts)
    if "loss" not in row.parts:
        row = row.replace(adapted_head="")
    if row.adapters_only and config.quantization is not None:
        config = config.replace(quantization=config.quantization.replace(kbit_preparation=False))
    if spec.family in row.fresh_norms:
        row = row.replace(norm_in_place=False)
    return row, config


def _check(row: KernelSet, spec: ModelSpec, config: TrainConfig) -> None:
    for part in config.kernel_parts:
        if part not in row.switches:
            known = ", ".join(row.switches) or "none, all of its operations run"
            raise InputError(
                f"--kernel-parts {part} is no operation that --kernels {row.name} has a switch for"
                f" (known: {known}); leave it out"
            )
    if spec.family not in row.families:
        raise InputError(
            f"--kernels {row.name} does not know {spec.family} models, only"
            f" {', '.join(row.families)}; use --kernels hf"
        )
    if find_stack(config.stack).runs_own_modules:
        raise InputError(
            f"--kernels {row.name} patches the classes of transformers, which stack {config.stack}"
            " does not run; use --kernels hf"
        )
    if config.compile:
        raise InputError(
            f"--kernels {row.name} with --compile: the compiler fuses these operations itself; drop"
            " one of the two"
        )
    for option in embedding_options(config):
        _check_embeddings(option, row, spec, config)
    is_lora = config.adapter is not None and config.adapter.kind is AdapterKind.LORA
    if row.adapters_only and not is_lora:
        raise InputError(
            f"--kernels {row.name} fuses LoRA adapters and nothing else here; add --lora or"
            " --qlora, or use --kernels hf"
        )


def embedding_options(config: TrainConfig) -> tuple[str, ...]:
    """Options that ask a patch to hold the input embedding in another way."""
    in_int8 = config.quantization is not None and config.quantization.embeddings == "int8"
    asked = (config.offload.embeddings, in_int8)
    names = ("--offload embeddings", "--quant-embeddings int8")
    return tuple(name for name, wanted in zip(names, asked, strict=True) if wanted)


def refuse_embeddings(option: str) -> InputError:
    """Where nothing patches the model so."""
    return InputError(f"{option} is an option of napkinmath's patch; add --kernels napkinmath")


def _check_embeddings(option: str, row: KernelSet, spec: ModelSpec, config: TrainConfig) -> None:
    """An input embedding in host memory or in 8 bits is frozen and a table of its own, on one GPU.
    DDP and FSDP ask for parameters on one kind of device (torch nn/parallel/distributed.py
    __init__). Nothing spreads the packed table over ranks."""
    if not row.hosts_embeddings:
        raise refuse_embeddings(option)
    if config.adapter is None:
        raise InputError(f"{option} needs a frozen embedding; add --lora or --qlora")
    if getattr(spec.stages[-1].part, "tied_to", ""):
        raise InputError(
            f"{option}: the head of {spec.name} shares its embedding, which the device needs; leave"
            " it out"
        )
    if config.parallel.world_size > 1:
        raise InputError(f"{option} is for one GPU; leave it out, or drop --gpus")
    if len(embedding_options(config)) > 1:
        raise InputError(
            f"{' and '.join(embedding_options(config))} both hold the embedding: drop one"
        )


def active(t: Tape) -> RecordingPatch:
    """The set that patches the model; only called where there is one."""
    assert t.policy.patch is not None
    return t.policy.patch


def scratch(t: Tape, name: str, nbytes: Size) -> tuple[Steps, Steps]:
    """The events that make and drop what an operation needs for a while; none for no bytes."""
    if nbytes == 0:
        return (), ()
    tensor = t.tensor(name, (nbytes,), UINT8, Role.WORKSPACE)
    return ((ALLOC, tensor),), ((FREE, tensor),)
