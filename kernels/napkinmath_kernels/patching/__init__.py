"""Putting the kernels into a Hugging Face model and taking them out again."""

from .patch import PatchReport, patch, unpatch

__all__ = ["PatchReport", "patch", "unpatch"]
