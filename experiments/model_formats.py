"""The model formats that scripts read, besides Hugging Face directories."""

from collections.abc import Sequence
import contextlib
import copy
from typing import Any

from agent_r1_jax import config as config_lib


def find() -> Sequence[Any]:
  """Returns the contributed formats; none if their folder was deleted."""
  with contextlib.suppress(ModuleNotFoundError):
    from agent_r1_jax.contrib import gguf

    return [gguf.FORMAT]
  return []


def add(config: config_lib.Config) -> config_lib.Config:
  """Returns a copy of a configuration whose models may have any of the formats."""
  config = copy.deepcopy(config)
  config.model.formats = find()
  return config
