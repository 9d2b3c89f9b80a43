"""PyTorch's CUDA memory snapshots: read without running code from them, written from predicted
steps, replayed."""
