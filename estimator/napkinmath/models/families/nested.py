"""A text model inside a joint one, where a library goes by the joint model's type."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec, Part

TRANSLATED = ("glm4v_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker")
"""Joint models whose experts and routers PEFT adapts by their names of transformers 4. It asks the
type of the whole model, so that Qwen3-MoE inside InternVL gets no adapters there. Source: peft 0.21
utils/transformers_weight_conversion.py, transformers 5.23 conversion_mapping.py."""


def as_nested(spec: ModelSpec, outer: str) -> ModelSpec:
    """The text model inside one of type `outer`: without adapters on the experts and the router,
    and with those on dense projections, unless PEFT translates the names of that type."""
    if outer in TRANSLATED or "e" not in dict(spec.symbols):
        return spec
    stages = tuple(stage.replace(part=_untranslated(stage.part)) for stage in spec.stages)
    return spec.replace(stages=stages)


def _untranslated(part: Part) -> Part:
    from napkinmath.models.layers.decoder import DecoderLayer
    from napkinmath.models.layers.mlp import GatedMlp
    from napkinmath.models.layers.moe import MixtureOfExperts

    if not isinstance(part, DecoderLayer):
        return part
    mlp = part.mlp
    if isinstance(mlp, GatedMlp):
        return part.replace(mlp=mlp.replace(kind="linear"))
    if not isinstance(mlp, MixtureOfExperts):
        return part
    shared = mlp.shared
    if shared is not None and isinstance(shared.mlp, GatedMlp):
        shared = shared.replace(mlp=shared.mlp.replace(kind="linear"))
    router, experts = mlp.router.replace(adapted_as=()), mlp.experts.replace(adapted_as=((), ()))
    return part.replace(mlp=mlp.replace(router=router, experts=experts, shared=shared))
