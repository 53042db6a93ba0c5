"""Agent-R1 in JAX: end-to-end reinforcement learning of language-model agents."""
