"""How an image becomes tiles of one size: the arithmetic of the processors that cut it.

Sizes of a picture are (height, width) in pixels. Source of each record: the image processor of
transformers 5.23 that it names; tests/models/test_pictures.py compares them with those classes.
"""

from __future__ import annotations

import math

from napkinmath.ir.pictures import AnySize, ImagePatches, Pictures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import Batch

SHRINKS_ABOVE = 1.1
"""Ratio of sides above which features are scaled down (LlavaOnevisionModel.pack_image_features)."""


class Crops(Pictures):
    """The grid of square tiles nearest in shape, and the whole once more: GotOcr2ImageProcessor
    (InternVL)."""

    per_tile: int
    least: int = 1
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
        best, least = (1, 1), math.inf
        for w, h in self._grids():
            off = abs(width / height - w / h)
            roomy = width * height > 0.5 * self.side**2 * w * h
            if off < least or (off == least and roomy):
                best, least = (w, h), off
        return best

    def _grids(self) -> list[tuple[int, int]]:
        every = range(1, self.most + 1)
        allowed = ((w, h) for w in every for h in every if self.least <= w * h <= self.most)
        return sorted(allowed, key=lambda grid: grid[0] * grid[1])


class NaflexTiles(Crops):
    """One picture of its own shape where the image is small enough; else tiles, and the whole at the
    first picture's size. Each is padded to the patches of a tile: Lfm2VlImageProcessor."""

    merge: int = 2
    low: int = 64
    """Least tokens of one picture (`min_image_tokens`); a tile's are the most."""
    least: int = 2
    tolerance: float = 2.0
    """By how much an image may have more pixels than a tile (`max_pixels_tolerance`)."""

    def picture(self, height: int, width: int) -> ImagePatches:
        factor, padded = self.patch * self.merge, (self.side // self.patch) ** 2
        scale = AnySize(
            side=self.side,
            patch=self.patch,
            merge=self.merge,
            low=self.low * factor**2,
            high=self.per_tile * factor**2,
        )
        whole = scale.picture(max(height, factor // 2 + 1), max(width, factor // 2 + 1))
        large = self.tolerance * self.per_tile * factor**2
        sides = (max(self.patch, round(x / factor) * factor) for x in (height, width))
        if math.prod(sides) <= large:
            return whole.replace(padded=padded)
        grid = self._grid(height, width)
        tiles = grid[0] * grid[1]
        return whole.replace(
            tiles=tiles + 1,
            padded=padded,
            tokens=tiles * self.per_tile + whole.tokens,
            marks=3 + tiles,
        )


class LeastScaledCrops(Crops):
    """The grid that scales an image up least, or down least where none is larger:
    Cohere2VisionImageProcessor."""

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        grids = self._grids()

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
        count = self.side // self.patch
        rows, columns = (extent // self.side * count for extent in canvas)
        if width / height > columns / rows:
            tall = int(round(height * (columns / width), 7))
            return rows - (rows - tall) // 2 * 2, columns
        wide = int(round(width * (rows / height), 7))
        return rows, columns - (columns - wide) // 2 * 2


class ScaledPinpoints(Pinpoints):
    """The same, where the features of a large canvas are scaled down, and every image of several is
    one tile: LlavaOnevisionImageProcessor, LlavaOnevisionModel.pack_image_features."""

    most: int = 9
    """Tiles of features that the canvas is scaled to (anyres_max_9)."""

    def of(self, batch: Batch) -> ImagePatches:
        if batch.images < 2:
            return super().of(batch)
        count = self.side // self.patch
        return ImagePatches(rows=count, columns=count, tokens=count * count + 1, breaks=1)

    def picture(self, height: int, width: int) -> ImagePatches:
        whole = super().picture(height, width)
        count, rows = whole.rows, whole.breaks
        columns = (whole.tokens - count * count) // rows - 1
        ratio = math.sqrt(rows * columns / (self.most * count**2))
        if ratio <= SHRINKS_ABOVE:
            return whole
        kept, wide = int(rows // ratio), int(columns // ratio)
        return whole.replace(
            tokens=count * count + kept * (wide + 1), breaks=kept, shrunk=rows * columns
        )


class Padded(Pictures):
    """As many tiles as the model takes, whatever the image, read by layers of their own:
    MllamaImageProcessor."""

    most: int = 4

    def picture(self, height: int, width: int) -> ImagePatches:
        count = self.side // self.patch
        return ImagePatches(tiles=self.most, rows=count, columns=count, tokens=0, marks=1)
