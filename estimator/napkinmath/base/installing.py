"""What to install, by the names of packages: a checkout has no `napkinmath` that pip could find."""

from __future__ import annotations

# The optional dependencies of pyproject.toml.
EXTRAS = {
    "profiler": "torch transformers peft accelerate bitsandbytes numpy rich",
    "kernels": "torch triton",
    "plots": "matplotlib numpy pandas",
}


def pip_install(extra: str) -> str:
    """The command that installs what an extra needs, in a checkout too."""
    return f"pip install {EXTRAS[extra]}"
