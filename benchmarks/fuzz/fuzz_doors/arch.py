"""Architecture strings: `--arch "L2 h64 a4 ..."`."""

from __future__ import annotations

from random import Random

from fuzz_doors.door import Case, Door
from fuzz_doors.draw import changed_text, often
from fuzz_doors.flags import form

_NUMBERED = {
    "kv": ("1", "2", "4", "8"),
    "f": ("128", "1k", "100", "14336"),
    "v": ("256", "32k", "50257", "1"),
    "dh": ("16", "64", "128", "1"),
    "moe": ("4x2", "8x1", "8x8", "64x6"),
}
_PLAIN = ("tied", "untied", "gelu", "gated", "mqa", "encoder", "decoder", "learned-pos", "alibi")
_NAMES = ("llama", "gpt2", "MPT", "mistral", "falcon", "qwen", "t5", "bert")


def make(rng: Random) -> Case:
    """Layers, width and heads, and up to five words more."""
    heads = rng.choice((1, 2, 4, 8, 12))
    width = heads * rng.choice((8, 16, 64, 128))
    words = [f"L{rng.choice((1, 2, 3, 12, 96))}", f"h{width}", f"a{heads}"]
    for _ in range(rng.randrange(6)):
        if rng.random() < 0.6:
            name, sizes = rng.choice(list(_NUMBERED.items()))
            words.append(name + rng.choice(sizes))
        else:
            words.append(rng.choice(_PLAIN))
    words += often(rng, 0.1, rng.choice(_NAMES))
    if rng.random() < 0.15:
        words.pop(rng.randrange(len(words)))
    rng.shuffle(words)
    text = " ".join(words)
    if rng.random() < 0.25:
        text = changed_text(rng, text).replace("\x00", "")
    ctx = rng.choice(("1", "64", "2k"))
    return Case(("--arch", text, "--ctx", ctx, *often(rng, 0.3, "--lora"), *form(rng)))


DOOR = Door("arch", make)
