"""Text games: environments with Gymnasium's API whose observations and actions are text.

An agent names its action in its reply, as <action>go north</action>; the last such tag
counts. The game's text answers it, until the game is over or the turns of
`config.Limits.max_turns` are used up:
  train.run(..., make_env=lambda: games.GameEnv(make_game))
"""

from collections.abc import Callable
import re
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import calls, env

PROMPT = (
  'You play a text game. Give one action in each reply, as <action>...</action>, and '
  'nothing after it.'
)
NO_ACTION = 'Your reply names no action. Give one as <action>...</action>.'

# Matches the innermost pair of nested tags.
_ACTION = re.compile(r'<action>((?:(?!</?action>).)*)</action>', re.DOTALL)


def find_action(reply: str) -> str | None:
  """Returns the content of the last <action>...</action>, or None.

  Runs of spaces become one space. Closed thoughts are ignored.
  """
  actions = _ACTION.findall(calls.remove_thoughts(reply))
  return ' '.join(actions[-1].split()) or None if actions else None


def is_offered(action: str, commands: list[str]) -> bool:
  """Whether an action is one of the commands; `search[...]` allows any search."""
  name, bracket, rest = action.partition('[')
  return action in commands or (
    f'{name}[...]' in commands and bool(bracket) and rest.endswith(']')
  )


class GameEnv:
  """Plays a game that has Gymnasium's API; the methods of games may block.

  A turn's reward is the game's. A reply without an action is not played. If the game's
  info has `admissible_commands`, they are shown; other actions are played all the same,
  and the game answers them. Metrics of a step are no_action, inadmissible, and at the end
  won, if the info has it.
  """

  def __init__(self, make_game: Callable[[types.Task], Any], *, show: int = 30):
    """Starts no game yet.

    Args:
      make_game: Makes the game of a task, an object with reset(seed=...) -> text, info
        and step(action) -> text, reward, terminated, truncated, info, and maybe close.
      show: The maximum number of admissible commands to show.
    """
    self._make_game, self._show = make_game, show
    self._game: Any = None
    self._seed: int | None = None
    self._admissible: list[str] = []

  def set_seed(self, number: int) -> None:
    """Sets the episode's randomness, for games whose task fixes no seed."""
    self._seed = number

  def reset(self, task: types.Task) -> list[types.Message]:
    """Begins the game; its first text follows the task's messages."""
    self._game = self._make_game(task)
    text, info = self._game.reset(seed=task.info.get('seed', self._seed))
    return [*env.copy_containers(task.messages), self._observe(text, info)]

  def step(self, reply: str) -> types.Step:
    """Plays the action of a reply."""
    action = find_action(reply)
    if action is None:
      message = {'role': 'user', 'content': NO_ACTION}
      return types.Step([message], metrics={'no_action': 1.0})
    # Only a metric: many games accept more commands than they list.
    missed = float(bool(self._admissible) and not is_offered(action, self._admissible))
    text, reward, terminated, truncated, info = self._game.step(action)
    metrics = {'no_action': 0.0, 'inadmissible': missed}
    if terminated or truncated:
      if 'won' in info:
        metrics['won'] = float(info['won'])
      return types.Step([], float(reward), done=True, metrics=metrics)
    return types.Step([self._observe(text, info)], float(reward), metrics=metrics)

  def close(self):
    """Closes the game."""
    if hasattr(self._game, 'close'):
      self._game.close()

  def _observe(self, text: Any, info: dict[str, Any]) -> types.Message:
    if not isinstance(text, str):
      raise ValueError(
        f'the observation is {text!r:.100}; wrap the environment so that it is a text.'
      )
    self._admissible = list(info.get('admissible_commands') or ())
    if commands := self._admissible[: self._show]:
      text += f'\n\nPossible actions: {", ".join(commands)}'
    return {'role': 'user', 'content': text}


def make_task(task_id: str, **info: Any) -> types.Task:
  """Makes a task with the prompt that says how to act; `info` is for make_game."""
  return types.Task(task_id, [{'role': 'system', 'content': PROMPT}], info=info)
