"""Training kernels for QLoRA, attention, losses, norms and checkpointing: Triton on a GPU, torch on a CPU.

Importing this package loads torch, and Triton only on the first launch. Nothing is patched by importing it.
"""
