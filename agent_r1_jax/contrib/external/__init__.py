"""Sampling on external servers: vLLM, SGLang, tpu-inference."""
