"""The ops: for each its reference path, its registration with torch.library, its function and its
module. Kernels: triton_kernels."""
