"""Who plays an episode by itself, in place of an environment."""

import abc
from typing import Any

from agent_r1_jax import types


class Player(abc.ABC):
  """Plays episodes in its own way; make_env may make one (serve/program.py)."""

  @abc.abstractmethod
  async def play(self, episode: Any, task: types.Task) -> str:
    """Plays an episode to its end, and returns its status, one of types.STATUSES.

    What is sampled goes into `episode.transcript`, messages into `episode.trajectory`,
    and rewards through `episode.add_reward`.

    The player may change `task`, which is a copy.

    Raises:
      faults.EnvironmentFaultError: The user's code raised or was late.
    """
