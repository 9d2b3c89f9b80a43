"""What a user decides, as plain data: the training, the mesh of GPUs, the workload, the machine."""
