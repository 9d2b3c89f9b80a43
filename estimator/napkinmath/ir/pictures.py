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


class Crops(Pictures):
    """The grid of square tiles nearest in shape, and the whole once more: GotOcr2ImageProcessor
    (InternVL)."""

    per_tile: int
    most: int = 12
    """Tiles of an image beside the whole."""
    marks_tiles: bool = False
    """Each tile has a mark of its own in the text (Aya Vision, Command A Vision)."""

    def picture(self, height: int, width: int) -> ImagePatches:
        grid = self._grid(height, width)
        tiles = grid[0] * grid[1]
        tiles += tiles > 1
        count = self.side // self.patch
        return ImagePatches(
            tiles=tiles,
            rows=count,
            columns=count,
            tokens=tiles * self.per_tile,
            marks=2 + tiles * self.marks_tiles,
        )

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """(columns, rows) of tiles."""
        every = range(1, self.most + 1)
        grids = sorted(
            ((w, h) for w in every for h in every if w * h <= self.most),
            key=lambda grid: grid[0] * grid[1],
        )
        best, least = (1, 1), math.inf
        for w, h in grids:
            off = abs(width / height - w / h)
            roomy = width * height > 0.5 * self.side**2 * w * h
            if off < least or (off == least and roomy):
                best, least = (w, h), off
        return best


class LeastScaledCrops(Crops):
    """The grid that scales an image up least, or down least where none is larger:
    Cohere2VisionImageProcessor."""

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        every = range(1, self.most + 1)
        grids = sorted(
            ((w, h) for w in every for h in every if w * h <= self.most),
            key=lambda grid: grid[0] * grid[1],
        )

        def scale(grid: tuple[int, int]) -> float:
            return min(grid[0] * self.side / width, grid[1] * self.side / height)

        up = [grid for grid in grids if scale(grid) >= 1]
        return min(up, key=scale) if up else max(grids, key=scale)


class SplitTiles(Pictures):
    """The longest side scaled to a multiple of the tile, whatever it was, cut into tiles, and the
    whole once more: Idefics3ImageProcessor, SmolVLMImageProcessor."""

    longest: int
    per_tile: int

    def picture(self, height: int, width: int) -> ImagePatches:
        """The tiles of the scaled image and the whole, with the marks around them."""
        rows, columns = (math.ceil(x / self.side) for x in self._scaled(height, width))
        tiles = rows * columns + 1 if rows * columns > 1 else 1
        count = self.side // self.patch
        # <fake_token_around_image> and a place mark before each tile, a line break after each row;
        # the whole between two marks of its own
        marks = 3 + (rows * (2 * columns + 1) if tiles > 1 else 0)
        return ImagePatches(
            tiles=tiles, rows=count, columns=count, tokens=tiles * self.per_tile, marks=marks
        )

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) with the longest side at `longest`, then each a multiple of the tile."""
        ratio, side = width / height, self.side
        if width >= height:
            whole = -(-self.longest // side) * side
            other = int(self.longest / ratio)
            other += other % 2
            ratio = self.longest / other
            return -(-int(whole / ratio) // side) * side, whole
        whole = -(-self.longest // side) * side
        other = int(self.longest * ratio)
        other += other % 2
        ratio = other / self.longest
        return whole, -(-int(whole * ratio) // side) * side


class BestFit(Pictures):
    """The canvas of tiles that scales an image least, and the whole once more:
    Llama4ImageProcessor."""

    per_tile: int
    most: int = 16

    def picture(self, height: int, width: int) -> ImagePatches:
        rows, columns = self._canvas(height, width)
        tiles, count = rows * columns, self.side // self.patch
        marks = 3  # <|image_start|>, <|image|>, <|image_end|>
        if tiles > 1:
            marks += tiles  # separators between tiles of a row and after each row
            tiles += 1
        return ImagePatches(
            tiles=tiles, rows=count, columns=count, tokens=tiles * self.per_tile, marks=marks
        )

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tiles: get_best_fit without resize_to_max_canvas."""
        every = range(1, self.most + 1)
        canvases = [(h, w) for h in every for w in every if h * w <= self.most]

        def scale(canvas: tuple[int, int]) -> float:
            return min(canvas[0] * self.side / height, canvas[1] * self.side / width)

        up = [scale(canvas) for canvas in canvases if scale(canvas) >= 1]
        chosen = min(up) if up else max(scale(canvas) for canvas in canvases)
        return min(
            (canvas for canvas in canvases if scale(canvas) == chosen), key=lambda c: c[0] * c[1]
        )


class Pinpoints(Pictures):
    """The canvas that keeps most of an image, its padding cut away again, a token after each row,
    and the whole once more: LlavaNextImageProcessor."""

    canvases: tuple[tuple[int, int], ...]
    """(height, width) in pixels."""

    def picture(self, height: int, width: int) -> ImagePatches:
        canvas = self._canvas(height, width)
        count = self.side // self.patch
        tiles = (canvas[0] // self.side) * (canvas[1] // self.side)
        rows, columns = self._unpadded(height, width, canvas)
        return ImagePatches(
            tiles=tiles + 1,
            rows=count,
            columns=count,
            tokens=count * count + rows * (columns + 1),
            breaks=rows,
        )

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """The canvas that shows most pixels of the image, then the one that wastes least."""
        best, most, least = (0, 0), 0, math.inf
        for tall, wide in self.canvases:
            by = min(wide / width, tall / height)
            shown = min(int(width * by) * int(height * by), width * height)
            waste = wide * tall - shown
            if shown > most or (shown == most and waste < least):
                best, most, least = (tall, wide), shown, waste
        return best

    def _unpadded(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of features of the canvas that the image covers."""
        rows, columns = canvas[0] // self.patch, canvas[1] // self.patch
        if width / height > columns / rows:
            tall = int(round(height * (columns / width), 7))
            return rows - (rows - tall) // 2 * 2, columns
        wide = int(round(width * (rows / height), 7))
        return rows, columns - (columns - wide) // 2 * 2


class Padded(Pictures):
    """As many tiles as the model takes, whatever the image, read by layers of their own:
    MllamaImageProcessor."""

    most: int = 4

    def picture(self, height: int, width: int) -> ImagePatches:
        count = self.side // self.patch
        return ImagePatches(tiles=self.most, rows=count, columns=count, tokens=0, marks=1)
