"""The one place of each thing that has many rows: models, GPUs, optimizers, quantizations,
kernels."""
