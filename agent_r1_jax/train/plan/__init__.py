"""Plans a run: its mesh, sizes and memory, its models, and its state before a step."""
