"""OpenEnv: plays environments on servers that speak OpenEnv's protocol.

  train.run(..., make_env=lambda: openenv.ServedEnv('http://host:8000', field='message'))

Each episode has a WebSocket, and so a session of its own on the server, which must allow
as many sessions as there are rows (its max_concurrent_envs).
"""

from collections.abc import Callable
import json
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import calls, env
from agent_r1_jax.tasks import games


def show_observation(observation: dict[str, Any]) -> str:
  """Writes an observation: its only field if that is a text, or all fields as JSON."""
  fields = {k: v for k, v in observation.items() if k != 'metadata' and v is not None}
  values = [*fields.values()]
  if len(values) == 1 and isinstance(values[0], str):
    return values[0]
  return json.dumps(fields, ensure_ascii=False)


class ServedEnv:
  """One session of an OpenEnv server.

  The action is the content of the reply's last <action>...</action>: a JSON object with
  the fields of the server's Action, or the text of one field. An action that the server
  rejects is answered with its error, and counted as invalid_action. Rewards are the
  server's. A task's info['reset'] has the arguments of its reset.
  """

  def __init__(
    self,
    url: str,
    *,
    field: str | None = None,
    show: Callable[[dict[str, Any]], str] = show_observation,
    seconds: float = 60.0,
  ):
    """Connects to nothing yet.

    Args:
      url: The server, such as 'http://localhost:8000'.
      field: The Action's field for a text that is not a JSON object.
      show: Writes an observation as text.
      seconds: Time limit of one answer of the server.
    """
    self._url, self._field, self._show = url, field, show
    self._seconds = seconds
    self._client: Any = None

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Connects; the first observation follows the task's messages."""
    from openenv.core import generic_client  # pyright: ignore[reportMissingImports]

    self._client = generic_client.GenericEnvClient(
      self._url, connect_timeout_s=self._seconds, message_timeout_s=self._seconds
    )
    result = await self._client.reset(**task.info.get('reset', {}))
    first = {'role': 'user', 'content': self._show(result.observation)}
    return [*env.copy_containers(task.messages), first]

  async def step(self, reply: str) -> types.Step:
    """Sends the action of a reply to the server."""
    text = games.find_action(reply)
    action = None if text is None else self._read_action(text)
    if action is None:
      return _refuse(games.NO_ACTION)
    try:
      result = await self._client.step(action)
    except RuntimeError as error:
      if 'VALIDATION_ERROR' not in str(error):
        raise
      return _refuse(str(error))
    reward, metrics = float(result.reward or 0.0), {'invalid_action': 0.0}
    if result.done:
      return types.Step([], reward, done=True, metrics=metrics)
    message = {'role': 'user', 'content': self._show(result.observation)}
    return types.Step([message], reward, metrics=metrics)

  async def close(self):
    """Ends the session."""
    if self._client is not None:
      await self._client.close()

  def _read_action(self, text: str) -> dict[str, Any] | None:
    try:
      action = json.loads(text)
      calls.check_json(action)  # The client encodes it again.
    except (ValueError, RecursionError):
      action = None
    if isinstance(action, dict):
      return action
    return None if self._field is None else {self._field: text}


def _refuse(text: str) -> types.Step:
  message = {'role': 'user', 'content': text}
  return types.Step([message], metrics={'invalid_action': 1.0})
