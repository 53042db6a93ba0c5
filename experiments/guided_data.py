"""What experiments/guided.py answers, and what its values are fitted to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.agent import env
from agent_r1_jax.rollout import rollout
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search as search_tool
from experiments import comparison, selection
from experiments.miniwiki import tasks as miniwiki
from experiments.wikipedia import rows as rows_lib
from experiments.wikipedia import settings
from experiments.worlds import all_worlds
from experiments.worlds import world as world_lib

SETS = ('miniwiki-hotpot', 'miniwiki-2wiki', 'miniwiki-musique')
WORLDS = 10  # Of miniwiki, for practice.
MINIWIKI = config_lib.Config(
  limits=config_lib.Limits(max_turn_tokens=80),
  schedule=config_lib.Schedule(steps=600, tasks=10000, samples=3),
  engine=config_lib.Engine(rows=144, slots=448, decode_steps=16, replicas=2),
)
WIKIPEDIA = fields.replace(
  settings.SMALL.config,
  {'schedule.steps': 40, 'schedule.tasks': 855, 'schedule.samples': 6},
)
# A world's own configuration, and how its practice and the fit differ from its training.
_WORLD = {
  'schedule.steps': 200,
  'schedule.tasks': 600,
  'schedule.samples': 4,
  'engine.rows': 128,
}
CONFIGS: Mapping[str, config_lib.Config] = {
  'miniwiki': MINIWIKI,
  'wikipedia': WIKIPEDIA,
  **{n: fields.replace(w.config, _WORLD) for n, w in all_worlds.WORLDS.items()},
}


class Data(NamedTuple):
  """The questions of a task.

  Attributes:
    sets: Questions to answer, by the name of their set.
    make_env: Their environment.
    practice: Yields about n questions to fit a value to, each part with its environment.
    kinds: Kinds of question, for tables.
    score: The metric that is 1 where the task is solved.
    answer: Finds what episodes of one task vote for.
  """

  sets: comparison.Sets
  make_env: rollout.MakeEnv
  practice: Callable[[int], Iterator[tuple[Sequence[types.Task], rollout.MakeEnv]]]
  kinds: Mapping[str, Callable[[types.Task], bool]]
  score: str = 'em'
  answer: Callable[[types.Trajectory], str | None] = selection.answer

  def is_solved(self, episode: types.Trajectory) -> float:
    """Returns the metric that counts."""
    return episode.metrics.get(self.score, 0.0)


def _read_miniwiki(seed: int, count: int, part: str) -> Data:
  """Makes the world of a seed; the practice is on other worlds."""

  def make_env(index):
    tool = search_tool.search_tool(index, k=1)
    return lambda: env.CloneableToolEnv([tool], qa.em_reward, metrics=qa.metrics)

  def practice(n):
    if n < WORLDS:
      raise ValueError(f'schedule.tasks is {n}, for {WORLDS} worlds; give each a task.')
    for world in range(100 * seed + 1, 100 * seed + 1 + WORLDS):
      index = miniwiki.make_index(miniwiki.corpus(world, 'train'))
      yield miniwiki.train_tasks(world, n // WORLDS), make_env(index)

  sets = {name: miniwiki.test_set(name, count, seed, part) for name in SETS}
  return Data(sets, make_env(miniwiki.index(seed)), practice, miniwiki.KINDS)


def _read_wikipedia(seed: int, count: int, part: str) -> Data:
  """Reads --data as wikipedia/search.py does; the practice is on training rows."""
  small = settings.SMALL
  _, retriever = settings.open_folder(small, rows_lib.DATA.value)
  tool = search_tool.search_tool(retriever, k=small.k, template=small.template)
  make_env = lambda: env.CloneableToolEnv([tool], small.reward, metrics=qa.metrics)
  held_out, watched, rows = rows_lib.read()
  asked = held_out if part == 'test' else watched
  asked = [small.agent_task(task) for task in asked[:count]]
  rows = [small.agent_task(task) for task in settings.shuffle(rows, seed)]
  kinds = sorted({task.info['type'] for task in asked})
  return Data(
    {'held-out rows': asked},
    make_env,
    lambda n: iter([(rows[:n], make_env)]),
    {kind: lambda task, kind=kind: task.info['type'] == kind for kind in kinds},
  )


def _read_world(world: world_lib.World, seed: int, count: int, part: str) -> Data:
  """Makes held-out tasks of a world; the practice is on tasks of another seed."""
  return Data(
    world.held_out(0, count, part),
    world.methods({})['tools'][1],
    lambda n: iter([world_lib.practise(world, seed, n)]),
    world.kinds,
    world.score,
    lambda t: t.messages[-1]['content'].strip() if t.turns else None,
  )


def read(task: str, seed: int, count: int, part: str) -> Data:
  """Makes the questions of a task, `count` of each set, of the part 'dev' or 'test'."""
  if task in all_worlds.WORLDS:
    return _read_world(all_worlds.WORLDS[task], seed, count, part)
  reader = _read_miniwiki if task == 'miniwiki' else _read_wikipedia
  return reader(seed, count, part)
