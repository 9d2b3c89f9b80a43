"""Bytes over time: the simulated step, the caching allocator's replay, and the ranks of a
pipeline."""
