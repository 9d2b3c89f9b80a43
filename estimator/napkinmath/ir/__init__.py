"""The intermediate form of a training step: tensors, operations, blocks, segments and the timeline;
plain data and the tape that records it."""
