"""Logs around an out-of-memory message: their prefixes and escapes taken off, and the messages of
other programs named."""

from __future__ import annotations

import re

ESCAPES = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)\[[\d;]*[A-Za-z]", re.IGNORECASE)
# What a logger, a launcher, a quote or a traceback's frame sets before a line; ranks are kept.
PREFIX = re.compile(
    r"^(?:\s|[>|│]|\[(?!rank)[^\]\n]*\]:?|\([^)\n]*\b(?:pid|rank)\b[^)\n]*\)"
    r"|\d{4}-\d\d-\d\d[ T][\d:.,]+Z?|(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\b:?)+",
    re.MULTILINE,
)
RANK_INSIDE = re.compile(r"\n\[rank\d+\]:[ \t]*(?![^\n]*out of memory)", re.IGNORECASE)
# Messages that are not of PyTorch's allocators, and what each is.
FOREIGN: tuple[tuple[str, str], ...] = (
    (
        r"NVML_SUCCESS == r INTERNAL ASSERT FAILED",
        "PyTorch's failure to tell of an out-of-memory: on a MIG slice, in some containers and on"
        " Jetson the driver does not say what processes hold (pytorch issue 112377). It names no"
        " figures; name the model, its flags and the slice (--gpu NAME --mig PROFILE) to see what"
        " the step needs",
    ),
    (
        r"OOM when allocating tensor|CUDA_ERROR_OUT_OF_MEMORY|HIP_ERROR_OutOfMemory",
        "TensorFlow's out-of-memory message, or the driver's; what is estimated here is PyTorch:"
        " name a model to see what its training needs",
    ),
    (
        r"RESOURCE_EXHAUSTED|Resource exhausted",
        "JAX's (XLA's) out-of-memory message; what is estimated here is PyTorch: name a model to"
        " see what its training needs",
    ),
    (
        r"No available memory for the cache blocks|KV cache is needed, which is larger than"
        r"|tokens that can be stored in KV cache",
        "vLLM's: its weights leave too little for the key/value cache; raise gpu_memory_utilization,"
        " or lower max_model_len",
    ),
    (
        r"Error out of memory at line \d+ in file",
        "bitsandbytes' message, which asks the driver past PyTorch's allocator and names no"
        " figures; name the model and its flags to see what the step needs",
    ),
    (
        r"Out of memory error on GPU \d+\. Cannot allocate",
        "PaddlePaddle's out-of-memory message; what is estimated here is PyTorch: name a model to"
        " see what its training needs",
    ),
    (
        r"DefaultCPUAllocator|can't allocate memory|Cannot allocate memory|(?<!Of)MemoryError"
        r"|node running low on memory|RayOutOfMemoryError|oom_kill|OOM ?Killed|Out of memory: Kill",
        "about the host's memory, not the GPU's; load fewer copies of the model, or take more of it",
    ),
    (
        r"CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|CUDA error: out of memory|hipErrorOutOfMemory"
        r"|cudaMalloc failed: out of memory|Cuda failure '?out of memory|UR_RESULT_ERROR_OUT_OF_",
        "the driver's or a library's message, which names no figures; name the model and its flags"
        " to see what the step needs",
    ),
)


def as_plain_text(text: str) -> str:
    """The text without colours, escapes of JSON and the prefixes of loggers."""
    text = ESCAPES.sub("", text)
    for escaped, plain in (
        (r"\r", "\n"),
        (r"\n", "\n"),
        (r"\t", " "),
        (r"\"", '"'),
        ("&nbsp;", " "),
    ):
        text = text.replace(escaped, plain)
    text = PREFIX.sub("", text.replace("\r", "\n"))
    return RANK_INSIDE.sub("\n", text)


def foreign_kind(text: str) -> str | None:
    """What a text is that is no message of PyTorch's allocators; None where it is not known."""
    flat = " ".join(text.split())
    return next((what for pattern, what in FOREIGN if re.search(pattern, flat)), None)
