"""Texts of out-of-memory messages, as files and on standard input."""

from __future__ import annotations

from random import Random

from fuzz_doors.door import STANDARD_INPUT, Case, Door
from fuzz_doors.draw import TINY_ARCH, changed_text, often

_SIZES = ("20.00 MiB", "1.50 GiB", "23.65 GiB", "512 bytes", "0 bytes", "1e9 GiB", "3 TiB")
_MESSAGES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {0}. GPU 0 has a total capacity"
    " of {1} of which {2} is free. Process 99 has {3} memory in use. Including non-PyTorch memory,"
    " this process has {4} memory in use. Of the allocated memory {5} is allocated by PyTorch, and"
    " {0} is reserved by PyTorch but unallocated.",
    "RuntimeError: CUDA out of memory. Tried to allocate {0} (GPU 0; {1} total capacity; {2}"
    " already allocated; {3} free; {4} reserved in total by PyTorch)",
    "HIP out of memory. Tried to allocate {0}. GPU 0 has a total capacity of {1}; {2} allowed",
    "CUDA error: out of memory",
)


def make(rng: Random) -> Case:
    """A message of some torch with random sizes, changed in half of the draws."""
    text = rng.choice(_MESSAGES).format(*(rng.choice(_SIZES) for _ in range(6)))
    while rng.random() < 0.5:
        text = changed_text(rng, text)
    content = text.encode("utf-8", "replace")
    more = (*often(rng, 0.03, *TINY_ARCH), *often(rng, 0.5, "--json"))
    if rng.random() < 0.3:
        return Case(("oom", *more), ((STANDARD_INPUT, content),))
    return Case(("oom", "@message.txt", *more), (("message.txt", content),))


DOOR = Door("out-of-memory texts", make)
