"""Options of the batch: its size, the lengths of its sequences, its images."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.option_table.option import COUNT, NAMES, NUMBER, SWITCH, TEXT, Option

MOST_MICRO_STEPS = 1 << 40  # they are a count: a large one costs no more than a small one
MOST_SECONDS = 1 << 20  # of a sample
MOST_PIXELS = 1 << 16  # of a side


def _lengths(value: object, what: str) -> tuple[int, ...]:
    items = values.names(value, what) if isinstance(value, str) else values.listed(value)
    return tuple(values.count(item, what) for item in items)


def _image(value: object, what: str) -> tuple[int, ...]:
    given = values.text(value, what).lower().replace("×", "x").replace("*", "x")
    sides = [side.strip() for side in given.split("x")]
    sides = sides * 2 if len(sides) == 1 else sides
    if len(sides) != 2:
        raise InputError(f"{what} {shown(value)} is no size of an image; use 1024x768 or 1024")
    return tuple(values.count(side, what, high=MOST_PIXELS) for side in sides)


def seconds_of(value: object, what: str) -> float:
    """A length of a sound: 30, 30s."""
    if isinstance(value, str):
        value = value.lower().strip().removesuffix("s").strip()
    return values.number(value, what, high=MOST_SECONDS)


BATCH = (
    Option(
        key="bs",
        help="micro-batch per GPU [1]",
        kind=COUNT,
        metavar="B",
        sets="micro_batch_size",
        aliases=("micro_batch_size", "batch_size"),
        short="-b",
    ),
    Option(
        key="ctx",
        help="sequence length; 1k = 1024 [2048]",
        kind=COUNT,
        metavar="S",
        sets="sequence_length",
        aliases=("sequence_length", "seq_len", "context"),
        short="-s",
    ),
    Option(
        key="grad_accum",
        help="micro-steps per optimizer step [1]",
        kind=COUNT,
        metavar="N",
        sets="gradient_accumulation_steps",
        aliases=("gradient_accumulation_steps",),
        page_high=MOST_MICRO_STEPS,
    ),
    Option(
        key="global_batch",
        help="samples per optimizer step over all GPUs, instead of --grad-accum",
        kind=COUNT,
        metavar="N",
        sets="gradient_accumulation_steps",
        aliases=("global_batch_size",),
        joint=True,
    ),
    Option(
        key="target_ctx",
        help="decoder length of an encoder-decoder model [the sequence length]",
        kind=COUNT,
        metavar="S",
        sets="batch.target_length",
    ),
    Option(
        key="packing",
        help="fill sequences with several samples",
        kind=SWITCH,
        sets="batch.packing",
    ),
    Option(
        key="lengths",
        help="a sample of sequence lengths, or a file of them",
        kind=NAMES,
        metavar="N,N,...|FILE",
        sets="batch.lengths",
        reader=_lengths,
    ),
    Option(
        key="audio",
        help="seconds of sound in each sample of a model that reads it [20, or the model's own]",
        kind=TEXT,
        metavar="SECONDS",
        sets="sequence_length",
        reader=seconds_of,
        joint=True,
    ),
    Option(
        key="image",
        help="size in pixels of the images that a model sees or makes [the model's own]",
        kind=TEXT,
        metavar="WIDTHxHEIGHT",
        sets="batch.image_size",
        reader=_image,
    ),
    Option(
        key="frames",
        help="frames of each video that a denoiser is trained on [the model's own]",
        kind=COUNT,
        metavar="N",
        sets="batch.frames",
        low=1,
        high=1 << 16,
    ),
    Option(
        key="images",
        help="images in each sequence [1 with --image, else 0: text only]",
        kind=COUNT,
        metavar="N",
        sets="batch.images",
        low=0,
        high=1 << 16,
    ),
    Option(
        key="min_pixels",
        help="least area of an image, which smaller ones are scaled up to [the processor's]",
        kind=COUNT,
        metavar="N",
        sets="batch.min_pixels",
    ),
    Option(
        key="max_pixels",
        help="most area of an image, which larger ones are scaled down to [the processor's]",
        kind=COUNT,
        metavar="N",
        sets="batch.max_pixels",
    ),
    Option(
        key="image_limit",
        help="area above which the trainer scales images down before the processor [none]",
        kind=COUNT,
        metavar="N",
        sets="batch.image_limit",
    ),
    Option(
        key="resident",
        help="what stays on the GPU beside a denoiser: vae, vae-fp32, text-encoders,"
        " text-encoders-fp8, ema [nothing]",
        kind=NAMES,
        metavar="NAMES",
        sets="estimate.model",
    ),
    Option(
        key="samples_per_s_per_worker",
        help="samples that one process of the data loader prepares in a second",
        kind=NUMBER,
        metavar="N",
        sets="loader.samples_per_s",
        low=1e-6,
    ),
    Option(
        key="dataloader_workers",
        help="processes of a GPU that prepare samples beside the step [0: between steps]",
        kind=COUNT,
        metavar="N",
        sets="loader.workers",
        aliases=("dataloader_num_workers",),
        low=0,
        high=1 << 16,
    ),
)
