"""The process, its machine and other processes: meshes, checkpoints, signals."""
