"""Primitive operations as PyTorch runs them on CUDA: what each allocates, keeps for its backward,
and costs.

One file a kind; every function takes the tape first and returns the new value. Rules follow torch's
tools/autograd/derivatives.yaml and the CUDA implementations in aten/src/ATen/native.
"""
