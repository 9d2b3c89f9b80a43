"""DrawnPictures: the pictures that a denoiser is trained on, and its trainer's defaults."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import Batch


class DrawnPictures(Record):
    """Pictures as the autoencoder hands them on, and the text beside them."""

    side: int
    """Pixels of a side where nobody says a size: what the model was made for."""
    wide: int = 0
    """Pixels of the width where nobody says a size; 0 is a square."""
    frames: int = 0
    """Frames of a video where nobody says a number; 0 is a model of pictures."""
    stride: int = 4
    """Frames that are one frame of latents, after the first."""
    factor: int = 8
    """Pixels of a side that are one latent."""
    multiple: int = 8
    """Pixels that a side has to be a multiple of."""
    text: int
    """Tokens of the text, to which every prompt is padded."""
    targets: tuple[str, ...]
    """Modules that diffusers' script adapts."""
    autoencoder: int = 0
    """Parameters of the autoencoder beside it."""
    text_encoders: int = 0
    """Parameters of the text encoders beside it."""
    text_embeddings: int = 0
    """Those of its embeddings, which stay whole where the rest is stored in FP8."""
    lists: tuple[str, ...] = ()
    """Lists of blocks from which trainers swap some to the host; none where they swap none."""
    most: int = 0
    """Pixels of a side for which the model has positions; 0 is no limit."""

    @property
    def noun(self) -> str:
        """What one of the batch is called."""
        return "video" if self.frames else "picture"

    def size(self, batch: Batch) -> tuple[int, int]:
        """(width, height) of a picture in pixels; InputError where the model takes none such."""
        width, height = batch.image_size or (self.wide or self.side, self.side)
        for side in (width, height):
            if side % self.multiple:
                near = max(round(side / self.multiple), 1) * self.multiple
                raise InputError(
                    f"--image {width}x{height}: a side of {side} pixels is no multiple of"
                    f" {self.multiple}, as this model needs; use {near}"
                )
            if 0 < self.most < side:
                raise InputError(
                    f"--image {width}x{height}: the model has positions for {self.most} pixels of a"
                    f" side; use {self.most} or less"
                )
        return width, height

    def latents(self, batch: Batch) -> tuple[int, int]:
        """(rows, columns) of latents of a picture."""
        width, height = self.size(batch)
        return height // self.factor, width // self.factor

    def num_frames(self, batch: Batch) -> int:
        """Frames of a video; InputError where the autoencoder takes no such number."""
        if not self.frames:
            if batch.frames:
                raise InputError(
                    f"--frames {batch.frames}: this model makes pictures; leave it out"
                )
            return 1
        frames = batch.frames or self.frames
        if (frames - 1) % self.stride:
            near = (frames - 1) // self.stride * self.stride + 1
            raise InputError(
                f"--frames {frames} is no multiple of {self.stride} and one, as this model's"
                f" autoencoder needs; use {near}"
            )
        return frames

    def latent_frames(self, batch: Batch) -> int:
        """Frames of latents: the first frame is one, further ones are taken together."""
        return (self.num_frames(batch) - 1) // self.stride + 1
