"""Games of TextWorld and ALFWorld, environments of Gymnasium, and WebShop.

  tasks = text_games.make_textworld('games', seeds=range(100))
  train.run(..., tasks=tasks, make_env=text_games.textworld_env)

agent_r1_jax/tasks/games.py says how an agent acts in them, and what it sees.
"""

from collections.abc import Iterable
import json
import os
import pathlib
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.contrib.environments import game_process
from agent_r1_jax.tasks import games


def gymnasium_tasks(seeds: Iterable[int]) -> list[types.Task]:
  """Makes a task for each seed; the environment is reset with it."""
  return [games.make_task(f'seed-{seed}', seed=seed) for seed in seeds]


def gymnasium_env(name: str, **kwargs: Any) -> games.GameEnv:
  """Makes Gymnasium's environment `name`, whose spaces must be Text.

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

  return games.GameEnv(make_game)


def make_textworld(
  folder: str | os.PathLike,
  seeds: Iterable[int],
  *,
  rooms: int = 2,
  objects: int = 4,
  quest: int = 2,
) -> list[types.Task]:
  """Makes a TextWorld game per seed in a folder, unless it exists; takes a few seconds.

  Args:
    folder: Where the games are written.
    seeds: One per game.
    rooms: Rooms of a game.
    objects: Objects in them.
    quest: Commands in the shortest solution.
  """
  os.makedirs(folder, exist_ok=True)
  paths = []
  for seed in seeds:
    name = f'textworld-{rooms}-{objects}-{quest}-{seed}.z8'
    path = pathlib.Path(folder) / name
    if not path.exists():
      _compile_textworld(path, seed, rooms, objects, quest)
    paths.append(path)
  return load_games(*paths)


def _compile_textworld(path: pathlib.Path, seed, rooms, objects, quest):
  import textworld  # pyright: ignore[reportMissingImports]
  from textworld import generator  # pyright: ignore[reportMissingImports]

  options = textworld.GameOptions()
  options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest
  options.seeds, options.path, options.force_recompile = seed, str(path), True
  generator.compile_game(generator.make_game(options), options)


def load_games(*paths: str | os.PathLike) -> list[types.Task]:
  """Makes a task for each game of TextWorld (.z8) and ALFWorld (.tw-pddl).

  Args:
    *paths: Files, or folders to search for such files. A task's id is its file's name
      in the folder or, if two ids would be equal, its full path.

  Raises:
    ValueError: A file is not such a game, or a path has none; names it.
  """
  names: dict[pathlib.Path, str] = {}  # Of the tasks, by their games' files.
  for path in map(pathlib.Path, paths):
    files = [path]
    if path.is_dir():
      files = sorted(p for p in path.rglob('*') if p.suffix in ('.z8', '.tw-pddl'))
    if not files:
      raise ValueError(f'{path} has no game (.z8 or .tw-pddl).')
    for file in files:
      _check_game(file)
      names[file] = str(file.relative_to(path.parent))
  if len({*names.values()}) < len(names):
    names = {file: str(file) for file in names}  # Names must be unique.
  return [games.make_task(name, path=str(file)) for file, name in names.items()]


def _check_game(path: pathlib.Path):
  """Raises ValueError if a file cannot be a game; playing finds damaged ones."""
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


def textworld_env() -> games.GameEnv:
  """Makes the environment of loaded games, each in its own process."""
  return games.GameEnv(lambda task: game_process.GameProcess(task.info['path']))


class WebShop:
  """A game of WebShop's text environment: search[...], then click[...].

  Works with any object that has WebShop's reset(session), step(action) -> observation,
  reward, done, info, and get_available_actions() -> {'has_search_bar', 'clickables'}.
  """

  def __init__(self, shop: Any, session: int | str | None = None):
    """Wraps the shop's environment; `session` names the goal."""
    self._shop, self._session = shop, session
    self.close = getattr(shop, 'close', lambda: None)

  def reset(self, **_) -> tuple[str, dict[str, Any]]:
    """Begins the session."""
    answer = self._shop.reset(self._session)
    return answer[0] if isinstance(answer, tuple) else answer, self._find_actions()

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Searches or clicks; actions that the page does not offer get an error text."""
    offered = self._find_actions()['admissible_commands']
    if not games.is_offered(action, offered):
      info = {'admissible_commands': offered}
      return 'The page does not offer this action.', 0.0, False, False, info
    text, reward, done, _ = self._shop.step(action)
    info = {'won': reward == 1} if done else self._find_actions()
    return text, float(reward), bool(done), False, info

  def _find_actions(self) -> dict[str, list[str]]:
    page = self._shop.get_available_actions()
    commands = ['search[...]'] if page['has_search_bar'] else []
    return {'admissible_commands': commands + [f'click[{x}]' for x in page['clickables']]}
