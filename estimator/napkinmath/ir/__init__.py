"""The intermediate form of a training step, and the tape that records it.

Tensors, operations, blocks, segments and the timeline are plain data.
"""
