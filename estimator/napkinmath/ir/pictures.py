"""How an image becomes patches of a tower and tokens of the text: the arithmetic of the libraries'
image processors.

Sizes of a picture are (height, width) in pixels. Source of each record: the image processor of
transformers 5.23 that it names; tests/models/test_pictures.py compares them with those classes.
"""

from __future__ import annotations

import math

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import Batch

MOST_SKEWED = 200
"""Of two sides of an image: smart_resize refuses more."""


class ImagePatches(Record):
    """One image as the tower and the text get it."""

    tiles: int = 1
    """Pictures of one size that the tower gets for it."""
    rows: int
    """Patches of a tile from top to bottom."""
    columns: int
    tokens: int
    """Rows of features that take places in the text."""
    marks: int = 0
    """Further tokens of the text: where the image begins and ends, separators of rows and tiles."""
    breaks: int = 0
    """Of the tokens: learned ones, each after a row of the canvas."""
    shrunk: int = 0
    """Features of the canvas before they are scaled down to those that count; 0 where none are."""
    padded: int = 0
    """Patches that each tile is padded to; 0 is none but its own."""

    @property
    def patches(self) -> int:
        """Patches of a tile as the tower gets them, padding included."""
        return self.padded or self.rows * self.columns

    @property
    def places(self) -> int:
        """Tokens of the text that the image takes."""
        return self.tokens + self.marks


class Pictures(Record):
    """What a processor makes of images; `side` in pixels is the size assumed where none is
    given."""

    side: int
    patch: int

    def validate(self) -> None:
        """Raises InputError for patches that are larger than the picture."""
        if self.patch > self.side:
            raise InputError(
                f"patches of {self.patch} pixels are larger than an image of {self.side}; give a"
                " smaller patch_size or a larger image_size"
            )

    def size(self, batch: Batch) -> tuple[int, int]:
        """(height, width) of an image of the batch before the processor sees it: scaled down to
        what a trainer allows, and to `max_pixels`, of which such a processor knows nothing."""
        return self._within(
            batch, min(filter(None, (batch.image_limit, batch.max_pixels)), default=0)
        )

    def _within(self, batch: Batch, most: int) -> tuple[int, int]:
        """(height, width) of an image, scaled down to `most` pixels where that is not 0."""
        width, height = batch.image_size or (self.side, self.side)
        if most and width * height > most:
            factor = math.sqrt(most / (width * height))
            width, height = max(int(width * factor), 1), max(int(height * factor), 1)
        return height, width

    def of(self, batch: Batch) -> ImagePatches:
        """What becomes of one image of the batch."""
        return self.picture(*self.size(batch))

    def picture(self, height: int, width: int) -> ImagePatches:
        """What becomes of an image of this size."""
        raise NotImplementedError


class Square(Pictures):
    """Every image scaled (and cut) to one square: CLIPImageProcessor, SiglipImageProcessor."""

    tokens: int = 0
    """Features of an image; 0 is one a patch."""
    marks: int = 0

    def picture(self, height: int, width: int) -> ImagePatches:
        count = self.side // self.patch
        tokens = self.tokens or count * count
        return ImagePatches(rows=count, columns=count, tokens=tokens, marks=self.marks)


class AnySize(Pictures):
    """Sides rounded to multiples of a merged patch, the area within limits: smart_resize of
    Qwen2VLImageProcessor."""

    merge: int = 2
    low: float
    """Pixels; of the published models' preprocessor_config.json."""
    high: float

    def size(self, batch: Batch) -> tuple[int, int]:
        return self._within(batch, batch.image_limit)

    def of(self, batch: Batch) -> ImagePatches:
        own = self.replace(
            low=min(batch.min_pixels or self.low, batch.max_pixels or self.high),
            high=batch.max_pixels or self.high,
        )
        return own.picture(*self.size(batch))

    def picture(self, height: int, width: int) -> ImagePatches:
        if max(height, width) > MOST_SKEWED * min(height, width):
            raise InputError(
                f"--image {width}x{height}: the processor refuses sides of more than"
                f" {MOST_SKEWED} to 1"
            )
        factor = self.patch * self.merge
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.high:
            by = math.sqrt(height * width / self.high) * factor
            rows, columns = max(1, math.floor(height / by)), max(1, math.floor(width / by))
        elif rows * columns * factor**2 < self.low:
            by = math.sqrt(self.low / (height * width)) / factor
            rows, columns = math.ceil(height * by), math.ceil(width * by)
        return ImagePatches(
            rows=rows * self.merge, columns=columns * self.merge, tokens=rows * columns, marks=2
        )


class AnySizeFromFactor(AnySize):
    """The same where a side smaller than one merged patch is scaled up to it first: smart_resize of
    PaddleOCRVLImageProcessor."""

    def picture(self, height: int, width: int) -> ImagePatches:
        factor = self.patch * self.merge
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return super().picture(height, width)


class AnySizeUnmarked(AnySize):
    """The same where no tokens stand around an image: VideoLlama3Processor."""

    def picture(self, height: int, width: int) -> ImagePatches:
        return super().picture(height, width).replace(marks=0)


class AnySizeOfFrames(AnySize):
    """The same where limits count every frame of a patch, and a picture smaller than one merged patch
    is scaled up first: smart_resize of Glm4vImageProcessor."""

    frames: int = 2

    def picture(self, height: int, width: int) -> ImagePatches:
        factor = self.patch * self.merge
        if min(height, width) < factor:
            up = factor / min(height, width)
            height, width = int(height * up), int(width * up)
        low, high = self.low / self.frames, self.high / self.frames
        return AnySize(
            side=self.side, patch=self.patch, merge=self.merge, low=low, high=high
        ).picture(height, width)


class Budget(Pictures):
    """Scaled up or down to the largest size of whole pooled squares within a number of patches,
    then padded to that number: Gemma4ImageProcessor."""

    pooled: int = 3
    """Patches of a side of the square that becomes one token."""
    most: int = 280
    """Tokens of an image (`max_soft_tokens`)."""

    def picture(self, height: int, width: int) -> ImagePatches:
        cell, patches = self.pooled * self.patch, self.most * self.pooled**2
        factor = math.sqrt(patches * self.patch**2 / (height * width))
        rows = math.floor(factor * height / cell)
        columns = math.floor(factor * width / cell)
        if not rows and not columns:
            raise InputError(f"--image {width}x{height}: the processor makes nothing of that size")
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        return ImagePatches(
            rows=rows * self.pooled,
            columns=columns * self.pooled,
            tokens=rows * columns,
            marks=2,
            padded=patches,
        )


class MergedBudget(Budget):
    """The same where the processor makes one patch of each square: Gemma4UnifiedImageProcessor."""

    def picture(self, height: int, width: int) -> ImagePatches:
        whole, pooled = super().picture(height, width), self.pooled
        return whole.replace(
            rows=whole.rows // pooled, columns=whole.columns // pooled, padded=self.most
        )


class Fitted(Pictures):
    """The longest side at most `side`, then a break after each row: PixtralImageProcessor."""

    merge: int = 1

    def picture(self, height: int, width: int) -> ImagePatches:
        factor = self.patch * self.merge
        over = max(height / self.side, width / self.side)
        if over > 1:
            height, width = math.floor(height / over), math.floor(width / over)
        rows, columns = (height - 1) // factor + 1, (width - 1) // factor + 1
        return ImagePatches(
            rows=rows * self.merge,
            columns=columns * self.merge,
            tokens=rows * columns,
            marks=rows,
        )


class FittedByPatch(Fitted):
    """The same where sides are whole patches, those that no whole square has are dropped by the
    projector, and no rows are broken: LightOnOcrProcessor."""

    def picture(self, height: int, width: int) -> ImagePatches:
        whole = self.replace(merge=1)
        fitted = Fitted.picture(whole, height, width)
        tokens = (fitted.rows // self.merge) * (fitted.columns // self.merge)
        if not tokens:
            raise InputError(f"--image {width}x{height}: the projector makes nothing of that size")
        return fitted.replace(tokens=tokens, marks=0)


MARKS_OF_KIMI = 4
"""<|media_begin|>, "image", <|media_content|> and <|media_end|>: chat_template.jinja of
moonshotai/Kimi-K2.5."""


class NeverEnlarged(Pictures):
    """Scaled down where a side or the whole has too many patches, then padded to whole squares of
    them: navit_resize of Kimi_K25ImageProcessor."""

    merge: int = 2
    most: int = 16_384
    """Patches of an image (`max_patches`)."""
    most_of_a_side: int = 512

    def picture(self, height: int, width: int) -> ImagePatches:
        patch, longest = self.patch, self.most_of_a_side * self.patch
        count = max(1, height // patch) * max(1, width // patch)
        scale = min(1.0, math.sqrt(self.most / count), longest / height, longest / width)
        factor = self.merge * patch
        rows, columns = (
            -(-min(max(1, int(extent * scale)), longest) // factor) for extent in (height, width)
        )
        return ImagePatches(
            rows=rows * self.merge,
            columns=columns * self.merge,
            tokens=rows * columns,
            marks=MARKS_OF_KIMI,
        )
