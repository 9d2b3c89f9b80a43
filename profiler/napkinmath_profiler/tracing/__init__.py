"""The traced step: real library code on storage-less tensors, every allocation followed from birth
to death."""
