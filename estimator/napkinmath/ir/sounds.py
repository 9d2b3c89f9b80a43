"""How long a sound is at each step of an encoder that reads its samples (wav2vec 2.0 and kin).

A convolution of kernel k and stride n without padding makes (length - k) // n + 1 steps of a
length. Of whole seconds the encoder's step is 320 samples, so `steps` of it stand for
320 · (steps + 1) samples: one second is 49 steps, ten are 499.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.base.expr import Size

RATE = 16_000
"""Samples a second that the models were trained on (preprocessor_config.json, sampling_rate)."""
USUAL = 20.0
"""Seconds of the longest sample of a CTC training: `max_duration_in_seconds` of transformers'
examples/pytorch/speech-recognition/run_speech_recognition_ctc.py."""
MOST = 64
"""Steps more than the encoder's that a sound may have; the receptive field is a few."""


class Sound(Record):
    """What a sample's sound is to a model: as long as the sequence, whose step is `hop` samples and
    which has `fewer` steps less than that makes, or always of so many `seconds`."""

    hop: int = 0
    fewer: int = 0
    seconds: int = 0

    def steps_of(self, seconds: float) -> int:
        """Steps of a sequence that is so long."""
        return int(seconds * RATE) // self.hop - self.fewer

    def seconds_of(self, steps: int) -> float:
        """How long a sequence of these steps is."""
        return (steps + self.fewer) * self.hop / RATE


def lengths_of(steps: Size, kernels: Sequence[int], strides: Sequence[int]) -> list[Size]:
    """The lengths from the samples to the `steps` of the encoder, each convolution's in turn."""
    for more in range(MOST):
        found = _lengths(more, kernels, strides)
        if found[-1] == 0:
            hops = [1]
            for stride in reversed(strides):
                hops.append(hops[-1] * stride)
            return [hop * steps + rest for hop, rest in zip(reversed(hops), found, strict=True)]
    raise InputError("config fields conv_kernel and conv_stride leave no steps of a sound")


def _lengths(more: int, kernels: Sequence[int], strides: Sequence[int]) -> list[int]:
    """What each length has beside its multiple of the steps, of a sound of `more` steps more."""
    hop = 1
    for stride in strides:
        hop *= stride
    found = [hop * more]
    for kernel, stride in zip(kernels, strides, strict=True):
        found.append((found[-1] - kernel) // stride + 1)
    return found


def samples_of(steps: int, kernels: Sequence[int], strides: Sequence[int]) -> int:
    """Samples of a sound that has these steps."""
    return int(lengths_of(steps, kernels, strides)[0])  # type: ignore[reportArgumentType]
