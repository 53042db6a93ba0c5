"""Text games: environments with Gymnasium's API whose observations and actions are text.

An agent names its action in its reply, as <action>go north</action>; the last such mark
counts. It is answered with the game's text, until the game is over or the turns of
`config.Limits.max_turns` are used up. Games of TextWorld and ALFWorld, Gymnasium's own
environments and WebShop are played this way:

  tasks = games.make_textworld('games', seeds=range(100))
  train.run(..., tasks=tasks, make_env=games.textworld_env)
"""

from collections.abc import Callable, Iterable
import json
import os
import pathlib
import re
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import calls, env
from agent_r1_jax.tasks import game_process

PROMPT = (
  'You play a text game. Give one action in each reply, as <action>...</action>, and '
  'nothing after it.'
)
NO_ACTION = 'Your reply names no action. Give one as <action>...</action>.'

# The innermost pair: an action holds no other tag of its kind.
_ACTION = re.compile(r'<action>((?:(?!</?action>).)*)</action>', re.DOTALL)


def find_action(reply: str) -> str | None:
  """Returns what the last <action>...</action> holds, its spaces made one; or None.

  What stands in a closed thought does not count.
  """
  actions = _ACTION.findall(calls.remove_thoughts(reply))
  return ' '.join(actions[-1].split()) or None if actions else None


def _is_offered(action: str, commands: list[str]) -> bool:
  """Whether an action is one of the commands, of which `search[...]` is any search."""
  name, bracket, rest = action.partition('[')
  return action in commands or (
    f'{name}[...]' in commands and bool(bracket) and rest.endswith(']')
  )


class GameEnv:
  """Plays a game that has Gymnasium's API; the methods of games may block.

  A turn's reward is the game's. A reply without an action is not played. If the game's
  info has `admissible_commands`, they are shown; an action that is none of them is played
  all the same, and the game says what comes of it. Metrics of a step are no_action,
  inadmissible, and at the end won, if the info has it.
  """

  def __init__(self, make_game: Callable[[types.Task], Any], *, show: int = 30):
    """Makes nothing yet.

    Args:
      make_game: Makes the game of a task, an object with reset(seed=...) -> text, info
        and step(action) -> text, reward, terminated, truncated, info, and maybe close.
      show: The most admissible commands that are shown.
    """
    self._make_game, self._show = make_game, show
    self._game: Any = None
    self._seed: int | None = None
    self._admissible: list[str] = []

  def set_seed(self, number: int) -> None:
    """Takes the episode's randomness, for games of which the task fixes no seed."""
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
    # Only a metric says so: many games take more commands than they list.
    missed = float(bool(self._admissible) and not _is_offered(action, self._admissible))
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


def gymnasium_tasks(seeds: Iterable[int]) -> list[types.Task]:
  """Makes a task of every seed with which an environment is reset."""
  return [make_task(f'seed-{seed}', seed=seed) for seed in seeds]


def gymnasium_env(name: str, **kwargs: Any) -> GameEnv:
  """Makes the environment of Gymnasium's `name`, whose texts are Text spaces.

  Raises:
    ValueError: Its actions or observations are not text.
  """

  def make_game(task):
    import gymnasium
    from gymnasium import spaces

    game = gymnasium.make(name, **kwargs)
    for kind in ('action_space', 'observation_space'):
      if not isinstance(space := getattr(game, kind), spaces.Text):
        raise ValueError(
          f'{name}: {kind} is {space}; wrap it so that it is a Text space.'
        )
    return game

  return GameEnv(make_game)


def make_textworld(
  folder: str | os.PathLike,
  seeds: Iterable[int],
  *,
  rooms: int = 2,
  objects: int = 4,
  quest: int = 2,
) -> list[types.Task]:
  """Makes a TextWorld game of each seed in a folder, unless it is there; a few seconds.

  Args:
    folder: Where the games are written.
    seeds: One for each game.
    rooms: Rooms of a game.
    objects: Objects in them.
    quest: Commands of the shortest way to win.
  """
  os.makedirs(folder, exist_ok=True)
  paths = []
  for seed in seeds:
    name = f'textworld-{rooms}-{objects}-{quest}-{seed}.z8'
    path = pathlib.Path(folder) / name
    if not path.exists():
      _compile_textworld(path, seed, rooms, objects, quest)
    paths.append(path)
  return load(*paths)


def _compile_textworld(path: pathlib.Path, seed, rooms, objects, quest):
  import textworld  # pyright: ignore[reportMissingImports]
  from textworld import generator  # pyright: ignore[reportMissingImports]

  options = textworld.GameOptions()
  options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest
  options.seeds, options.path, options.force_recompile = seed, str(path), True
  generator.compile_game(generator.make_game(options), options)


def load(*paths: str | os.PathLike) -> list[types.Task]:
  """Makes a task of each game of TextWorld (.z8) and ALFWorld (.tw-pddl).

  Args:
    *paths: Files, or folders that are searched for such files. A task's id is the name
      of its file in the folder, or, where two would have the same id, its whole path.

  Raises:
    ValueError: A file is no such game or a path has none; names it.
  """
  games: dict[pathlib.Path, str] = {}  # From files to the names of their tasks.
  for path in map(pathlib.Path, paths):
    files = [path]
    if path.is_dir():
      files = sorted(p for p in path.rglob('*') if p.suffix in ('.z8', '.tw-pddl'))
    if not files:
      raise ValueError(f'{path} has no game (.z8 or .tw-pddl).')
    for file in files:
      _check_game(file)
      games[file] = str(file.relative_to(path.parent))
  if len({*games.values()}) < len(games):
    games = {file: str(file) for file in games}  # A name must tell one game.
  return [make_task(name, path=str(file)) for file, name in games.items()]


def _check_game(path: pathlib.Path):
  """Raises ValueError if a file cannot be a game; a damaged one is found in playing."""
  try:
    with path.open('rb') as file:
      if path.suffix == '.z8' and file.read(1) != b'\x08':
        raise ValueError(f'{path} is no game: the Z-machine of a .z8 file is version 8.')
      if path.suffix == '.tw-pddl':
        fields = json.load(file)
        missing = {'pddl_domain', 'grammar', 'pddl_problem'} - {*fields}
        if missing:
          raise ValueError(f'{path} is no game: it lacks {", ".join(sorted(missing))}.')
  except (OSError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f'{path} is no game: {error}') from error


def textworld_env() -> GameEnv:
  """Makes the environment of the tasks of `load`, played in a process of its own."""
  return GameEnv(lambda task: game_process.GameProcess(task.info['path']))


class WebShop:
  """A game of WebShop's text environment: search[...], then click[...].

  It takes any object with WebShop's reset(session), step(action) -> observation, reward,
  done, info, and get_available_actions() -> {'has_search_bar', 'clickables'}.
  """

  def __init__(self, shop: Any, session: int | str | None = None):
    """Takes the shop's environment, and the session that names the goal."""
    self._shop, self._session = shop, session
    self.close = getattr(shop, 'close', lambda: None)

  def reset(self, **_) -> tuple[str, dict[str, Any]]:
    """Begins the session."""
    answer = self._shop.reset(self._session)
    return answer[0] if isinstance(answer, tuple) else answer, self._find_actions()

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Searches or clicks; what the page does not offer is told and not done."""
    offered = self._find_actions()['admissible_commands']
    if not _is_offered(action, offered):
      info = {'admissible_commands': offered}
      return 'The page does not offer this action.', 0.0, False, False, info
    text, reward, done, _ = self._shop.step(action)
    info = {'won': reward == 1} if done else self._find_actions()
    return text, float(reward), bool(done), False, info

  def _find_actions(self) -> dict[str, list[str]]:
    page = self._shop.get_available_actions()
    commands = ['search[...]'] if page['has_search_bar'] else []
    return {'admissible_commands': commands + [f'click[{x}]' for x in page['clickables']]}
