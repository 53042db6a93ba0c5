"""Reads logs of episodes (agent_r1_jax/report/episodes.py), and a run's configuration.

Needs only Python: a converter may run in an environment of its own.
"""

from collections.abc import Iterator
import json
import pathlib
from typing import Any

# The fields that converters read from every episode, and their types.
_FIELDS: dict[str, type | tuple[type, ...]] = {
  **dict.fromkeys(('id', 'status', 'question'), str),
  **dict.fromkeys(('group', 'sample', 'step', 'tokens', 'action_tokens'), int),
  **dict.fromkeys(('messages', 'turn_tokens', 'turn_rewards'), list),
  'metrics': dict,
  'reward': (int, float, str, type(None)),
  'error': (str, type(None)),
  **dict.fromkeys(('answer', 'info'), object),
}


def read_episodes(log: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the episodes of a log.

  Raises:
    ValueError: It cannot be read, or a line is not an episode.
  """
  try:
    with log.open('rb') as lines:
      for number, line in enumerate(lines, start=1):
        try:
          yield _parse(line)
        except (ValueError, RecursionError) as error:
          raise ValueError(f'{log}, line {number} is no episode: {error}') from None
  except OSError as error:
    raise ValueError(f'{log} cannot be read: {error.strerror}') from None


def _parse(line: bytes) -> dict[str, Any]:
  episode = json.loads(line.rstrip(b'\n'), parse_constant=_refuse_constant)
  if not isinstance(episode, dict):
    raise ValueError('it is no object')
  if missing := sorted(_FIELDS.keys() - episode.keys()):
    raise ValueError(f'it has no {", ".join(missing)}')
  for name, kind in _FIELDS.items():
    if not isinstance(episode[name], kind):
      raise ValueError(f'its {name} is a {type(episode[name]).__name__}')
  for message in episode['messages']:
    match message:
      case {'role': str(), 'content': str()}:
        continue
    raise ValueError(f'a message has no role or no text: {json.dumps(message):.80}')
  return episode


def _refuse_constant(name: str):
  raise ValueError(f'{name} is no number of JSON')


def read_config(log: pathlib.Path) -> dict[str, Any]:
  """Returns the configuration of the run that wrote a log, or {} if it is missing."""
  settings = log.parents[1] / 'config.json'
  return json.loads(settings.read_text()) if settings.exists() else {}
