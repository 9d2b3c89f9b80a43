"""What becomes of an image, against the image processors of the installed transformers."""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import Batch
from napkinmath.ir.pictures import (
    AnySize,
    AnySizeFromFactor,
    AnySizeOfFrames,
    AnySizeUnmarked,
    Budget,
    Fitted,
    FittedByPatch,
    MergedBudget,
    NeverEnlarged,
    Square,
)
from napkinmath.ir.tiled_pictures import (
    BestFit,
    Crops,
    LeastScaledCrops,
    NaflexTiles,
    Pinpoints,
    ScaledPinpoints,
    SplitTiles,
)
from napkinmath.models.families.ocr_vision import VIDEO_LLAMA_PIXELS

pytest.importorskip("PIL")
pytest.importorskip("transformers")
SIZES = [(1, 1), (27, 2000), (336, 336), (672, 337), (1024, 768), (2001, 2999)]
_RANDOM = random.Random(0)
SIZES += [(_RANDOM.randint(14, 3000), _RANDOM.randint(14, 3000)) for _ in range(40)]


@pytest.mark.parametrize("limits", [(3136, 12_845_056), (65_536, 200_000)])
def test_any_size_is_that_of_smart_resize(limits: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    pictures = AnySize(side=448, patch=14, merge=2, low=limits[0], high=limits[1])
    for size in SIZES:
        tall, wide = smart_resize(*size, 28, *limits)
        picture = pictures.picture(*size)
        assert (picture.rows * 14, picture.columns * 14) == (tall, wide)
        assert picture.tokens == tall * wide // 28**2


@pytest.mark.parametrize("limits", [(12_544, 11_760_000), (65_536, 400_000)])
def test_limits_of_glm_count_both_frames_of_a_patch(limits: tuple[int, int]) -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    pictures = AnySizeOfFrames(side=448, patch=14, merge=2, low=limits[0], high=limits[1])
    for height, width in SIZES[1:]:
        tall, wide = smart_resize(2, height, width, 2, 28, *limits)
        picture = pictures.picture(height, width)
        assert (picture.rows * 14, picture.columns * 14) == (tall, wide)


def test_what_is_never_enlarged_is_that_of_kimi() -> None:
    found = functions_of("kimi_k25.image_processing_kimi_k25", "navit_resize")
    for most, side in ((16_384, 512), (400, 30)):
        pictures = NeverEnlarged(side=448, patch=14, most=most, most_of_a_side=side)
        for size in SIZES:
            _, (tall, wide) = found["navit_resize"](*size, 14, 2, most, side)
            picture = pictures.picture(*size)
            assert (picture.rows * 14, picture.columns * 14) == (tall, wide)
            assert picture.tokens == tall * wide // 28**2


def test_limits_of_the_batch_take_the_place_of_the_processors() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    pictures = AnySize(side=448, patch=14, merge=2, low=3136, high=12_845_056)
    batch = Batch(images=1, image_size=(1920, 1080), max_pixels=262_144)
    tall, wide = smart_resize(1080, 1920, 28, 3136, 262_144)
    assert pictures.of(batch).tokens == tall * wide // 28**2 < 262_144 // 28**2


def test_a_budget_is_that_of_gemma_4() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    for size in SIZES[1:]:
        tall, wide = get_aspect_ratio_preserving_size(*size, 16, 2520, 3)
        picture = Budget(side=448, patch=16).picture(*size)
        assert (picture.rows * 16, picture.columns * 16) == (tall, wide)
        assert (picture.tokens, picture.patches) == (tall * wide // 48**2, 2520)
        merged = MergedBudget(side=448, patch=16).picture(*size)
        assert (merged.tokens, merged.patches) == (picture.tokens, 280)


def test_fitted_is_pixtrals() -> None:
    import numpy as np
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    for patch, merge, longest in ((16, 1, 1024), (14, 2, 1540)):
        for height, width in SIZES:
            image = np.broadcast_to(np.zeros((1, 1, 3), dtype=np.uint8), (height, width, 3))
            tall, wide = get_resize_output_image_size(image, longest, patch * merge)
            rows, columns = tall // (patch * merge), wide // (patch * merge)
            picture = Fitted(side=longest, patch=patch, merge=merge).picture(height, width)
            assert (picture.tokens, picture.places) == (rows * columns, rows * (columns + 1))


def test_patches_without_a_whole_square_are_dropped() -> None:
    """LightOnOCR's processor rounds to patches, its merger takes whole squares of them."""
    import numpy as np
    from transformers.models.lighton_ocr.processing_lighton_ocr import get_resize_output_image_size

    for height, width in SIZES[1:]:
        image = np.broadcast_to(np.zeros((1, 1, 3), dtype=np.uint8), (height, width, 3))
        tall, wide = get_resize_output_image_size(
            image, 1540, 14, input_data_format="channels_last"
        )
        pictures = FittedByPatch(side=1540, patch=14, merge=2)
        if min(tall, wide) < 28:
            with pytest.raises(InputError, match="makes nothing"):
                pictures.picture(height, width)
            continue
        picture = pictures.picture(height, width)
        assert (picture.rows, picture.columns) == (tall // 14, wide // 14)
        assert picture.places == picture.tokens == (tall // 28) * (wide // 28)


def test_crops_are_those_of_internvl() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    processor = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    pictures = Crops(side=448, patch=14, per_tile=256)
    for size in SIZES:
        picture = pictures.picture(*size)
        assert picture.tiles == processor.get_number_of_image_patches(*size)
        assert picture.tokens == 256 * picture.tiles


def functions_of(module: str, *wanted: str) -> dict[str, Any]:
    """Functions of a processor's file, whose module itself needs torchvision."""
    spec = importlib.util.find_spec(f"transformers.models.{module}")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in wanted]
    found: dict[str, Any] = {"np": numpy, "math": math, "lru_cache": functools.lru_cache}
    exec(compile(ast.Module(functions, []), spec.origin, "exec"), found)
    return found


def test_crops_are_those_of_cohere() -> None:
    found = functions_of(
        "cohere2_vision.image_processing_cohere2_vision",
        "get_all_supported_aspect_ratios",
        "get_optimal_tiled_canvas",
    )
    pictures = LeastScaledCrops(side=512, patch=16, per_tile=256, marks_tiles=True)
    for size in SIZES:
        columns, rows = found["get_optimal_tiled_canvas"](size, (512, 512), 1, 12)
        tiles = columns * rows + (columns * rows > 1)
        picture = pictures.picture(*size)
        # Cohere2VisionProcessor._get_num_multimodal_tokens
        assert (picture.tiles, picture.places) == (tiles, 2 + 257 * tiles)


def test_small_sides_of_paddle_are_scaled_up_first() -> None:
    found = functions_of("paddleocr_vl.image_processing_paddleocr_vl", "smart_resize")
    limits = (384 * 384, 1536 * 1536)
    pictures = AnySizeFromFactor(side=448, patch=14, merge=2, low=limits[0], high=limits[1])
    for size in [*SIZES, (10, 100), (100, 10)]:
        tall, wide = found["smart_resize"](*size, 28, *limits)
        picture = pictures.picture(*size)
        assert (picture.rows * 14, picture.columns * 14) == (tall, wide)


def test_patches_of_video_llama_3_are_tokens_each() -> None:
    found = functions_of("qwen2_vl.image_processing_qwen2_vl", "smart_resize")
    low, high = VIDEO_LLAMA_PIXELS
    pictures = AnySizeUnmarked(side=448, patch=14, merge=1, low=low, high=high)
    for size in SIZES:
        tall, wide = found["smart_resize"](*size, 14, low, high)
        picture = pictures.picture(*size)
        assert (picture.rows * 14, picture.columns * 14) == (tall, wide)
        assert picture.places == picture.patches == picture.rows * picture.columns


def test_tiles_are_those_of_lfm2_vl() -> None:
    names = ("smart_resize", "_is_image_too_large", "_target_ratios", "_get_grid_layout")
    module = "lfm2_vl.image_processing_lfm2_vl"
    found = functions_of(module, *names, "find_closest_aspect_ratio", "round_by_factor")
    processor = type("Processor", (), {name: found[name] for name in names})()
    pictures = NaflexTiles(side=512, patch=16, per_tile=256, most=10)
    for height, width in SIZES:
        wide, tall = processor.smart_resize(height, width, 2, 64, 256, 16)
        picture = pictures.picture(height, width)
        assert (picture.rows * 16, picture.columns * 16) == (tall, wide)
        tokens, tiles, marks = tall * wide // 32**2, 1, 2
        if processor._is_image_too_large(height, width, 256, 16, 2, 2.0):
            tiles = processor._get_grid_layout(height, width, 2, 10, 512)[-1]
            # Lfm2VlProcessor._build_image_tokens
            tokens, tiles, marks = tokens + 256 * tiles, tiles + 1, 3 + tiles
        assert (picture.tokens, picture.tiles, picture.marks) == (tokens, tiles, marks)


def test_splits_are_those_of_idefics_3() -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 1456}, max_image_size={"longest_edge": 364}
    )
    pictures = SplitTiles(side=364, patch=14, longest=1456, per_tile=169)
    for size in SIZES:
        tiles, rows, columns = processor.get_number_of_image_patches(*size)
        picture = pictures.picture(*size)
        assert picture.tiles == tiles
        assert picture.places == 169 + 3 + rows * (columns * (169 + 2) + 1)


def test_pinpoints_are_those_of_llava_next() -> None:
    from types import SimpleNamespace

    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    canvases = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
    processor = LlavaNextProcessor.__new__(LlavaNextProcessor)
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=canvases)
    processor.patch_size, processor.num_additional_image_tokens = 14, 1
    pictures = Pinpoints(side=336, patch=14, canvases=tuple(canvases))
    for size in SIZES[2:]:
        expected = processor._get_number_of_features(*size, 336, 336) - 1
        assert pictures.picture(*size).tokens == expected


def test_scaled_pinpoints_are_those_of_llava_onevision() -> None:
    from types import SimpleNamespace

    from transformers.models.llava_onevision.processing_llava_onevision import (
        LlavaOnevisionProcessor,
    )

    canvases = [(384 * a, 384 * b) for a in range(1, 7) for b in range(1, 7)]
    processor = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=canvases)
    processor.num_image_tokens, processor.vision_aspect_ratio = 729, "anyres_max_9"
    pictures = ScaledPinpoints(side=384, patch=14, canvases=tuple(canvases))
    for size in SIZES[2:]:
        expected = processor._get_number_of_features(*size, 384, 384)
        assert pictures.picture(*size).tokens == expected
    assert pictures.of(Batch(images=2, image_size=(900, 900))).tokens == 730


def test_a_square_and_a_canvas_of_llama_4() -> None:
    assert Square(side=336, patch=14).picture(10, 2000).tokens == 576
    # the example of get_best_fit's docstring: five canvases, of which 1 x 2 is taken
    wide = BestFit(side=224, patch=14, per_tile=64, most=3).picture(200, 300)
    assert (wide.tiles, wide.tokens, wide.marks) == (3, 192, 5)
    assert BestFit(side=336, patch=14, per_tile=144).picture(336, 336).tiles == 1
