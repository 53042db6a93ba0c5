"""Sampling on somebody else's server: vLLM, SGLang, tpu-inference."""
