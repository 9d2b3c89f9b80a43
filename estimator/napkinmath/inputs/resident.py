"""What stays on the GPU beside a denoiser, as stages of weights that never run: its autoencoder and
text encoders, EMA weights."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.dtypes import FP8_E4M3
from napkinmath.base.errors import InputError, shown
from napkinmath.config.train_config import Precision, TrainConfig
from napkinmath.ir.model_spec import Stage
from napkinmath.models.layers.idle import IdleModule, IdleWeight

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.ir.canvas import DrawnPictures
    from napkinmath.ir.model_spec import ModelSpec

NAMES = ("vae", "vae-fp32", "text-encoders", "text-encoders-fp8", "ema")
_HALF = {"bf16": "bf16", "fp16": "fp16"}


def with_resident(
    spec: ModelSpec, canvas: DrawnPictures, config: TrainConfig, options: Mapping[str, object]
) -> ModelSpec:
    """The model with what --resident names beside it. Frozen models are in the type of the
    autocast, as diffusers' examples cast them (weight_dtype)."""
    if "resident" not in options:
        return spec
    names = values.names(options["resident"], "--resident")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise InputError(f"--resident {shown(unknown[0])} is unknown; use {', '.join(NAMES)}")
    half = _dtype(config.precision)
    sizes = {
        "vae": ((canvas.autoencoder, half),),
        "vae-fp32": ((canvas.autoencoder, "fp32"),),
        "text-encoders": ((canvas.text_encoders, half),),
        "text-encoders-fp8": (
            (canvas.text_encoders - canvas.text_embeddings, FP8_E4M3.name),
            (canvas.text_embeddings, half),
        ),
        "ema": ((elements(spec, config) if "ema" in names else 0, "fp32"),),
    }
    stages: list[Stage] = []
    for name in dict.fromkeys(names):
        if not all(count for count, _ in sizes[name]):
            raise InputError(
                f"--resident {name}: it is not known which text encoders {spec.name} has; leave it"
                " out"
            )
        weights = tuple(
            IdleWeight(name=f"weights in {dtype}", axes=(count,), buffer=True, dtype=dtype)
            for count, dtype in sizes[name]
        )
        stages.append(Stage(part=IdleModule(weights=weights), path=name, modality="idle"))
    return spec.replace(stages=(*stages, *spec.stages))


def _dtype(precision: Precision) -> str:
    return _HALF.get(precision.value.partition("-")[0], "fp32")


def elements(spec: ModelSpec, config: TrainConfig) -> int:
    """Parameters that are trained: what EMA weights average."""
    from napkinmath.base.expr import Bindings
    from napkinmath.catalog.stacks import find_stack
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.rank_record import record_model

    runs = record_model(spec, Policy(config, find_stack(config.stack))).runs
    known = Bindings(dict(spec.symbols))
    return sum(
        known(w.elements) * run.count for run in runs for w in run.block.weights if w.trainable
    )
