"""Classifiers of images by convolutions: ResNet, ConvNeXt and ConvNeXt V2."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.bert import head_class
from napkinmath.models.families.config import Config, runs
from napkinmath.models.families.vit import pair
from napkinmath.models.image_models import SIDE
from napkinmath.models.layers.convnets import (
    Bottleneck,
    ConvNextLayer,
    Halved,
    NormedPatches,
    PooledHead,
    Stem,
)

CLASSIFIER = "ForImageClassification"
REDUCTION = 4  # ResNetBottleNeckLayer: channels of a stage to those between its convolutions


def _stages(c: Config, family: str, **defaults: tuple[int, ...]) -> list[tuple[int, int]]:
    """(channels, layers) of each stage; raises InputError for another head than a classifier's."""
    found = head_class(c, CLASSIFIER)
    if found != CLASSIFIER:
        raise InputError(
            f"{family} is priced as a classifier, not as {shown(c.names('architectures')[0])}; give"
            " --task image-classification, or use `estimate trace`"
        )
    widths, depths = (
        c.sizes(name) if name in c else defaults[name] for name in ("hidden_sizes", "depths")
    )
    if len(widths) != len(depths):
        raise InputError(
            f"config fields hidden_sizes and depths name {len(widths)} and {len(depths)} stages;"
            " give a number of each for every stage"
        )
    return list(zip(widths, depths, strict=True))


def resnet(c: Config) -> ModelSpec:
    """ResNetForImageClassification (transformers models/resnet)."""
    stages = _stages(c, "resnet", hidden_sizes=(256, 512, 1024, 2048), depths=(3, 4, 6, 3))
    activation, kind = c.activation("hidden_act", "relu"), c.text("layer_type", "bottleneck")
    if kind not in ("basic", "bottleneck"):
        raise InputError(f"config field layer_type={shown(kind)} is not one of basic, bottleneck")
    width = c.size("embedding_size", 64)
    stem = Stem(
        image=pair(c, "image_size", SIDE),
        channels=c.size("num_channels", 3),
        width=width,
        activation=activation,
    )
    found = [Stage(part=stem, path="resnet.embedder")]
    for number, (channels, depth) in enumerate(stages):
        stride = 2 if number or c.flag("downsample_in_first_stage") else 1
        rest = Bottleneck(
            channels=channels,
            inner=channels // REDUCTION if kind == "bottleneck" else 0,
            activation=activation,
        )
        first = rest.replace(
            stride=stride,
            early=c.flag("downsample_in_bottleneck"),
            shortcut=width != channels or stride != 1,
        )
        path = f"resnet.encoder.stages.{number}.layers"
        layers = [Stage(part=first, path=path), *[Stage(part=rest, path=path)] * (depth - 1)]
        found += runs(layers)
        width = channels
    head = PooledHead(labels=c.num_labels(), name="classifier.1")
    return c.spec((*found, Stage(part=head)), {}, family="resnet")


def convnext(c: Config) -> ModelSpec:
    """ConvNextForImageClassification (transformers models/convnext)."""
    scaled = c.number("layer_scale_init_value", 1e-6) > 0
    return _convnext(c, "convnext", ConvNextLayer(channels=1, scaled=scaled))


def convnextv2(c: Config) -> ModelSpec:
    """ConvNextV2ForImageClassification (transformers models/convnextv2)."""
    return _convnext(c, "convnextv2", ConvNextLayer(channels=1, scaled=False, normed=True))


def _convnext(c: Config, family: str, layer: ConvNextLayer) -> ModelSpec:
    stages = _stages(c, family, hidden_sizes=(96, 192, 384, 768), depths=(3, 3, 9, 3))
    layer = layer.replace(activation=c.activation("hidden_act", "gelu"))
    patches = NormedPatches(
        image=pair(c, "image_size", SIDE),
        channels=c.size("num_channels", 3),
        width=stages[0][0],
        patch=pair(c, "patch_size", 4)[0],
    )
    found = [Stage(part=patches, path=f"{family}.embeddings")]
    drops, done = c.probability("drop_path_rate") > 0, 0  # a rate that grows from 0
    for number, (channels, depth) in enumerate(stages):
        path = f"{family}.encoder.stages.{number}"
        if number:
            found.append(Stage(part=Halved(channels=channels), path=f"{path}.downsampling_layer"))
        layers = [
            Stage(
                part=layer.replace(channels=channels, drops_samples=drops and index > 0),
                path=f"{path}.layers",
            )
            for index in range(done, done + depth)
        ]
        found += runs(layers)
        done += depth
    head = PooledHead(labels=c.num_labels(), norm=f"{family}.layernorm")
    return c.spec((*found, Stage(part=head)), {}, family=family)
