"""Faults of the user's code, which mask an episode instead of scoring it."""

from collections.abc import Iterator
import contextlib
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import records, workers


class EnvironmentFaultError(Exception):
  """An environment, a reward or a program raised, was late, or gave a wrong answer."""

  @property
  def name(self) -> str:
    """The name of the raised type; 'InvalidAnswer' if nothing was raised."""
    cause = self.__cause__
    if isinstance(cause, workers.BaseExceptionError):
      cause = cause.__cause__ or cause
    return type(cause).__name__ if cause else 'InvalidAnswer'


@contextlib.contextmanager
def of_environment() -> Iterator[None]:
  """Re-raises an exception inside as a fault that says where it was raised."""
  try:
    yield
  except (EnvironmentFaultError, workers.LostCallError):
    raise
  except Exception as error:
    raise EnvironmentFaultError(
      workers.describe_error(error) + workers.locate_error(error)
    ) from error


def copy_messages(messages: Any) -> list[types.Message]:
  """Copies an environment's messages, which the environment may still change.

  A message that cannot be serialized raises here, where it costs one episode. Later, when
  the messages are sent to other processes, it would end the run.

  Raises:
    EnvironmentFaultError: The messages are not a list, or an item is not a message.
  """
  if not isinstance(messages, list | tuple):
    raise EnvironmentFaultError(
      f'messages are of type {type(messages).__name__}, not a list.'
    )
  for message in messages:
    if not (isinstance(message, dict) and isinstance(message.get('role'), str)):
      raise EnvironmentFaultError(f'{str(message)[:200]} is no message: it has no role.')
    for key, value in message.items():
      try:
        records.pack([key, value])
      except ValueError as error:
        raise EnvironmentFaultError(f'{key!r} of a message {error}') from None
  return env_lib.copy_containers(list(messages))
