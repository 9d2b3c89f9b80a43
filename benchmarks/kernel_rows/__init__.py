"""The rows of `python benchmarks/kernels.py`: a module for each op, and how they are timed."""
