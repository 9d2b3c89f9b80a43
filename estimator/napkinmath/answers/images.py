"""The images of a batch: how many tokens they take, and what their tower holds."""

from __future__ import annotations

from napkinmath.base.expr import Bindings
from napkinmath.base.record import Record
from napkinmath.base.units import format_bytes
from napkinmath.ir.ledger import Role
from napkinmath.models.tasks import IMAGES, PICTURED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.canvas import DrawnPictures
    from napkinmath.ir.pictures import ImagePatches

_HELD = (Role.ACTIVATIONS, Role.ACTIVATION_GRADIENTS)


class Images(Record):
    """The images of each sequence."""

    count: int
    size: tuple[int, int]
    """(width, height) in pixels."""
    scaled: tuple[int, int]
    """The same as the trainer scales it down."""
    given: bool
    """Whether the configuration says the size."""
    picture: ImagePatches
    length: int
    """Tokens of a sequence."""

    @property
    def places(self) -> int:
        """Tokens of a sequence that its images take."""
        return self.count * self.picture.places

    @property
    def verb(self) -> str:
        """The ending of a verb after `described`."""
        return "s" if self.count == 1 else ""

    @property
    def described(self) -> str:
        """'2 images of 1024x768'."""
        width, height = self.size
        less = "" if self.scaled == self.size else " scaled to {}x{}".format(*self.scaled)
        return f"{self.count} image{'s' * (self.count > 1)} of {width}x{height}{less}"


def images_of(e: Estimate) -> Images | None:
    """The images of each sequence; None for a batch of text."""
    batch, pictures = e.config.batch, e.spec.pictures
    if not batch.images or pictures is None:
        return None
    height, width = pictures.size(batch)
    return Images(
        count=batch.images,
        size=(batch.image_size[0], batch.image_size[1])
        if batch.image_size
        else (pictures.side, pictures.side),
        scaled=(width, height),
        given=bool(batch.image_size),
        picture=pictures.of(batch),
        length=Bindings(e.step.symbols)(e.config.sequence_length),
    )


def drawn(e: Estimate) -> str:
    """What one of a batch is where it is no text."""
    canvas = e.spec.canvas
    if canvas is None:
        return PICTURED.get(e.spec.task, PICTURED[IMAGES]).removesuffix("s")
    return "video" if canvas.frames else "image"


def image_assumptions(e: Estimate) -> list[str]:
    """How images and sounds are counted in, or that there are none in a model that reads them."""
    brought = [said for stage in e.spec.stages if (said := stage.part.brings)]
    if brought:
        return brought
    if e.spec.canvas is not None:
        return [_of_canvas(e, e.spec.canvas)]
    if e.spec.task in PICTURED:
        return _of_sorted_images(e) if e.spec.task == IMAGES else _of_other_examples(e)
    if e.spec.has_idle_tower:
        return [
            "text only: the weights of the towers are counted in; there are no rules for a batch"
            " with images or sounds, and the ranges do not allow for any"
        ]
    if e.spec.pictures is None:
        return []
    return [_of_images(e), *_of_sounds(e)]


def _of_canvas(e: Estimate, canvas: DrawnPictures) -> str:
    """What a denoiser is trained on, and what is not beside it."""
    width, height = canvas.size(e.config.batch)
    batch = e.config.batch
    named = batch.image_size and (batch.frames or not canvas.frames)
    said = "" if named else ", what the model was made for"
    held = [stage.path for stage in e.spec.stages if stage.modality == "idle"]
    beside = (
        f"{', '.join(held)} stay on the GPU, and what they compute there is not counted"
        if held
        else "an autoencoder, text encoders and EMA weights on the GPU are not counted: --resident"
        " adds them"
    )
    what = (
        f"videos of {canvas.num_frames(e.config.batch)} frames of {width}x{height}"
        if canvas.frames
        else f"pictures of {width}x{height}"
    )
    deep = f"{canvas.latent_frames(e.config.batch)}x" if canvas.frames else ""
    return (
        f"{what}{said}: latents of {deep}{width // canvas.factor}x{height // canvas.factor} and"
        f" {canvas.text} tokens of text; {beside}; nor are {canvas.noun}s made for validation and"
        " cuDNN's workspaces of convolutions"
    )


def _of_sorted_images(e: Estimate) -> list[str]:
    """How large the images of a classifier are, and how many tokens they become."""
    from napkinmath.models.image_models import side_of, tokens_of

    height, width = side_of(e.spec)
    if not height:
        return []
    tokens = tokens_of(e.spec)
    said = f", {tokens:,} tokens each" if tokens else ""
    beside = "" if tokens else "; cuDNN's workspaces of convolutions are not counted"
    return [f"images of {width}x{height}{said}: --image gives another size{beside}"]


def _of_other_examples(e: Estimate) -> list[str]:
    """How large the videos or spectrograms of a classifier are."""
    from napkinmath.models.layers.learned_parts import LearnedEntrance

    first = e.spec.stages[0].part
    if not isinstance(first, LearnedEntrance):
        return []
    size = " x ".join(map(str, first.example(dict(e.spec.symbols))))
    return [f"{PICTURED[e.spec.task]} of {size}, which the model's config names"]


def _of_sounds(e: Estimate) -> list[str]:
    """That a further tower has no rules, beside one of images that has."""
    idle = {s.path for s in e.spec.stages if s.part.is_unread and s.modality == "idle"}
    if not idle:
        return []
    names = ", ".join(sorted({path.removeprefix("model.").partition(".")[0] for path in idle}))
    return [
        f"no sounds: the weights of {names} are counted in; there are no rules for a batch with"
        " sounds, and the ranges do not allow for any"
    ]


def _of_images(e: Estimate) -> str:
    images = images_of(e)
    if images is None:
        return (
            "text only: the batch has no images, and the ranges do not allow for any; --image"
            " 1024x1024 adds one"
        )
    picture = images.picture
    if not picture.tokens:
        taken = "read by layers of their own"
    else:
        taken = f"{images.places:,} of {images.length:,} tokens"
    size = "" if images.given else ", a size that the model's config names"
    tiles = f"{picture.tiles} tiles of " if picture.tiles > 1 else ""
    return (
        f"{images.described} a sequence{size}: {taken}, each {tiles}{picture.patches:,} patches of"
        f" the tower, which holds {format_bytes(tower_bytes(e))} of activations at the peak"
    )


def tower_bytes(e: Estimate) -> int:
    """Requested bytes of activations and their gradients that the tower's modules hold at the
    peak."""
    stages = e.spec.stages
    # up to the features: behind them a stage of images works on the text's own states
    last = next((i for i, s in enumerate(stages) if s.publishes and s.modality), len(stages))
    towers = (s for s in stages[: last + 1] if s.modality in ("image", "idle"))
    paths = tuple(stage.path for stage in towers if stage.path)
    counts = e.timeline.live_counts(e.peak)
    return sum(
        count * tensor.requested
        for tensor, count in zip(e.timeline.tensors, counts, strict=True)
        if count and tensor.role in _HELD and tensor.module.startswith(paths)
    )
