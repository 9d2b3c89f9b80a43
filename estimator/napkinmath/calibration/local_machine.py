"""What of this machine bears on a calibration, read without loading torch: the NVIDIA driver, its
GPUs, the installed torch."""

from __future__ import annotations

import os

DRIVER_FILE = "/proc/driver/nvidia/version"
GPU_FOLDER = "/proc/driver/nvidia/gpus"


def driver_version() -> str:
    """The NVIDIA kernel driver, such as '570.86.15'; empty where there is none, or where the system
    has no such file (Windows)."""
    for word in _read(DRIVER_FILE).split():
        if "." in word and all(part.isdecimal() for part in word.split(".")):
            return word
    return ""


def gpu_names() -> tuple[str, ...]:
    """The GPUs that the NVIDIA driver lists, by the names it gives them."""
    try:
        folders = sorted(os.listdir(GPU_FOLDER))
    except OSError:
        return ()
    names: list[str] = []
    for folder in folders:
        for line in _read(os.path.join(GPU_FOLDER, folder, "information")).splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model" and value.strip():
                names.append(value.strip())
    return tuple(names)


def torch_version() -> str:
    """The installed torch's version with its build, such as '2.13.0+cpu'; empty without torch."""
    from importlib.util import find_spec

    found = find_spec("torch")
    if found is None or not found.origin:
        return ""
    for line in _read(os.path.join(os.path.dirname(found.origin), "version.py")).splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip("'\"")
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
