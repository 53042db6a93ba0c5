"""Anthropic's Messages and OpenAI's Responses, for servers and endpoints."""

from agent_r1_jax.contrib.dialects import messages, responses

ALL = (messages.MESSAGES, responses.RESPONSES)
