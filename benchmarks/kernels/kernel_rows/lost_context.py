"""A GPU's context that is lost to its process, after an illegal access or a failed assertion."""

from __future__ import annotations

import torch


class ContextLost(RuntimeError):
    """This process can do nothing more with the GPU; what was measured is on disk."""


def is_lost(device: torch.device) -> bool:
    """Whether the GPU answers this process no more; running out of memory is not that."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.empty(1, device=device).fill_(0)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False
