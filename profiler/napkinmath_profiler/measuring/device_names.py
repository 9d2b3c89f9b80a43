"""The device of a name, or what to do where it is not there."""

from __future__ import annotations

import os
from typing import cast

import torch
from napkinmath.base.errors import InputError, shown


def device_named(name: str) -> torch.device:
    """The device of a name; raises InputError for one that is not there or not understood."""
    try:
        device = torch.device(name)
    except RuntimeError:
        known = "use cuda, cuda:N or cpu"
        raise InputError(f"device {shown(name)} is unknown to PyTorch; {known}") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise InputError(f"device {str(device)!r} cannot be measured; use cuda, cuda:N or cpu")
    if not torch.cuda.is_available():
        raise InputError(
            f"no CUDA device is visible to PyTorch here: {why_no_gpu()}; or use --device cpu to"
            " measure on the processor"
        )
    number = cast("int | None", device.index)  # torch's stub says int
    if number is not None and number >= torch.cuda.device_count():
        raise InputError(
            f"there is no {device}; PyTorch sees {torch.cuda.device_count()} CUDA device(s), cuda:0"
            " the first"
        )
    return device


def why_no_gpu() -> str:
    """Why PyTorch can use none, and what to do about it."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return (
            f"torch {torch.__version__} is built without CUDA; install a CUDA build"
            " (https://pytorch.org)"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={shown(hidden)} hides all of them; unset it"
    return "torch finds no driver or no GPU; see whether nvidia-smi lists one"
