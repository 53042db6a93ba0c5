"""What a process needs of its machine and of others: meshes, checkpoints, signals."""
