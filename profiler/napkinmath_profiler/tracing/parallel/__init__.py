"""Training steps of many ranks, traced on one: PyTorch's own sharding over a process group that
only pretends."""
