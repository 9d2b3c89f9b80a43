"""The Triton kernels themselves. Imported on the first launch only, so that the package works where
Triton is missing."""
