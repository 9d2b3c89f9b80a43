"""ViT: an image classifier."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.bert import encoder_symbols, head_class
from napkinmath.models.families.config import Config
from napkinmath.models.layers.encoder import BidirectionalAttention
from napkinmath.models.layers.task_heads import ClassificationHead, MeanOutput
from napkinmath.models.layers.vision import PatchEmbedding, VisionLayer


def pair(c: Config, field: str, default: int) -> tuple[int, int]:
    """A size given as one number or as height and width."""
    value = c.values.get(field)
    if isinstance(value, (list, tuple)):
        sizes = c.sizes(field)
        if len(sizes) != 2:
            given = ", ".join(map(str, sizes))
            raise InputError(
                f"{field} [{given}] has {len(sizes)} sizes; give a number, or height and width"
            )
        return (sizes[0], sizes[1])
    side = c.size(field, default)
    return side, side


def vit(c: Config) -> ModelSpec:
    """ViTForImageClassification and ViTModel (transformers models/vit)."""
    symbols = encoder_symbols(c)
    image, patch = pair(c, "image_size", 224), pair(c, "patch_size", 16)
    probability, bias = c.number("hidden_dropout_prob", 0.0), c.flag("qkv_bias", True)
    embedding = PatchEmbedding(
        image=image,
        patch=patch,
        channels=c.size("num_channels", 3),
        width=symbols["h"],
        dropout=probability,
    )
    layer = VisionLayer(
        attention=BidirectionalAttention(
            names=("q_proj", "k_proj", "v_proj"),
            bias=(bias, bias, bias),
            dropout=c.number("attention_probs_dropout_prob", 0.0),
            fp32_softmax=True,
        ),
        width=symbols["h"],
        inner=symbols["f"],
        activation=c.activation("hidden_act", "gelu"),
        dropout=probability,
    )
    classified = head_class(c, "ViTForImageClassification") != "Model"
    name = "vit." if classified else ""
    head: Part = MeanOutput(norm="layernorm", pooler="pooler.dense")
    if classified:
        head = ClassificationHead(
            labels=c.num_labels(), norm="vit.layernorm", dropout=0.0, images=True
        )
    stages = (
        Stage(part=embedding, path=f"{name}embeddings"),
        Stage(part=layer, count=symbols["L"], path=f"{name}layers", checkpointed=True),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="vit")
