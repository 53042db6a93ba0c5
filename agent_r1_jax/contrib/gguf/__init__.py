"""Models in GGUF files, the format of llama.cpp."""

from agent_r1_jax.contrib.gguf import files

FORMAT = files.FORMAT
