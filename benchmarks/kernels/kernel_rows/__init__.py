"""The rows of `python benchmarks/kernels/kernel_speed.py`: a module for each op, and how they are timed."""
