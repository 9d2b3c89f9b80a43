"""What the files of trainers say of images: a limit that the trainer scales them down to, limits of
the processor, a size that every image gets.

How many images a sample has, and of which size, are facts of the data: where nobody says them, what
a file says of their size is named and not priced.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.catalog.models import find_row
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.option_table import BY_KEY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_OF_INPUTS = ("vis", "image", "img", "audio")
"""In the names of keys of a config.json of a model that reads more than text."""


def read_image_limit(job: ForeignJob, key: str, *, least: str = "", default: int = 0) -> None:
    """An area above which the trainer scales images down, and one below which it scales them up
    (`least`), before the processor rounds them."""
    limit, low = job.take(key), job.take(least) if least else None
    sizes = _sizes(job)
    if not sizes:
        _leave_open(job, key, "larger images are scaled down")
    if not is_off(low) and not all(w * h >= values.count(low, least) for w, h in sizes or [(0, 0)]):
        _leave_open(job, least, "smaller images are scaled up")
    most = default if is_off(limit) else values.count(limit, key)
    job.give("image_limit", most if most and _has_images(job) else None)


def read_processor_limits(job: ForeignJob, least: str, most: str) -> None:
    """Areas between which the processor scales images."""
    for option, key in (("min_pixels", least), ("max_pixels", most)):
        value = job.take(key)
        if not _sizes(job):
            _leave_open(job, key, "the processor scales images")
        job.give(option, value if not is_off(value) and _has_images(job) else None)


def read_image_size(job: ForeignJob, key: str) -> None:
    """A side of squares, or (width, height), that every image is scaled to."""
    size = job.take(key)
    if not _has_images(job):
        _leave_open(job, key, "every image is scaled to this size", "number with --images")
    elif not is_off(size):
        job.give("image", "x".join(str(side) for side in values.listed(size)))


def name_images(job: ForeignJob, key: str) -> None:
    """A script that puts images into its batch, of which it does not say how many and how large."""
    if job.take(key) is not None and not _has_images(job):
        _leave_open(job, key, "the script puts images into its batch", "size with --image")


def dismiss_images(job: ForeignJob, *sections: str) -> bool:
    """Whether the model is known to read text alone: what the file says of images, and of the
    other inputs of these `sections`, has no effect then."""
    name = job.given.get("model", job.options.get("model"))
    row = find_row(str(name)) if name is not None else None
    if row is None or any(word in key for key in row["config"] for word in _OF_INPUTS):
        return False
    for section in sections:
        job.dismiss(section, f"{row['name']} reads text alone")
    return True


def _has_images(job: ForeignJob) -> bool:
    """Whether the samples are known to have images; a size alone means one."""
    number = job.given.get("images", job.options.get("images"))
    return bool(_sizes(job)) if number is None else not _is_none(number)


def _sizes(job: ForeignJob) -> list[tuple[int, int]]:
    """(width, height) of the images that are said."""
    said = job.given.get("image", job.options.get("image"))
    found = [BY_KEY["image"].read(each) for each in values.listed(said)] if said else []
    return [(each[0], each[1]) for each in found if isinstance(each, tuple)]


def _leave_open(job: ForeignJob, key: str, why: str, way: str = "size with --image") -> None:
    """Names a key of images that is not priced, unless the batch has none, or the model reads
    none."""
    if dismiss_images(job, key):
        return
    if _is_none(job.given.get("images")) or is_off(job.content.get(key)):
        return
    is_open, either = not _sizes(job), Difference.EITHER
    why = f"{why}; give their {way}" if is_open else why
    job.leave_out(key, why, memory=either, time=either, option="image" if is_open else "")


def _is_none(number: object) -> bool:
    return str(number).strip() == "0"
