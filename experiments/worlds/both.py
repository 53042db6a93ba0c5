"""Two worlds at once: arithmetic in words and programs, for one policy with both tools.

Every prompt offers the calculator and the Python tool. What is practised, the tasks and
the judges are those of the two worlds, which take turns; their tables are beside those of
policies that were trained in one world.
"""

from collections.abc import Iterator
import random

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import env
from experiments import comparison
from experiments.worlds import arithmetic, programs
from experiments.worlds import arithmetic_lessons as lessons
from experiments.worlds import world as world_lib

WORLDS = (arithmetic.WORLD, programs.WORLD)
_SETS = ('new_stories', 'new_templates', 'new_programs', 'new_pairs')


async def score(task: types.Task, messages) -> dict[str, float]:
  """Judges an episode as its own world does; the reward is 1 where the task is solved."""
  if 'check' in task.info:
    return {'solved': (await programs.score(task, messages))['passed']}
  return {'solved': (await arithmetic.grader().metrics(task, messages))['accuracy']}


def tasks(seed: int, n: int) -> list[types.Task]:
  """Makes n tasks to train on; the worlds take turns."""
  made = [world.tasks(seed, (n + 1) // 2) for world in WORLDS]
  return [task for pair in zip(*made, strict=True) for task in pair][:n]


def held_out(seed: int, n: int, split: str) -> dict[str, list[types.Task]]:
  """Makes the held-out sets of both worlds that one of them learns."""
  sets = {k: v for world in WORLDS for k, v in world.held_out(seed, n, split).items()}
  return {name: sets[name] for name in _SETS}


def examples(seed: int) -> Iterator[world_lib.Example]:
  """Yields what is practised in both worlds, and calculations whose result is answered.

  Without these the policy had learned all of arithmetic but to copy the last result, of
  which it had seen half as many as in a world of its own.
  """
  rng = random.Random(f'both examples {seed}')
  arithmetic_examples, program_examples = (world.examples(seed) for world in WORLDS)
  while True:
    kind = rng.choices(('arithmetic', 'programs', 'compute'), (5, 4, 1))[0]
    if kind == 'compute':
      yield world_lib.Example(lessons.compute(rng), kind=kind)
    else:
      yield next(arithmetic_examples if kind == 'arithmetic' else program_examples)


def make_env() -> env.ToolEnv:
  """Makes an environment with both tools."""
  return programs.TriedEnv(score, [arithmetic.calculator_tool()])


def methods(sets: comparison.Sets) -> dict[str, comparison.Method]:
  """How the tasks are asked: with both tools, or alone."""
  alone = lambda: env.ToolEnv([], score, reward_seconds=programs.JUDGE_SECONDS)
  return {'direct': (sets, alone), 'tools': (sets, make_env)}


WORLD = world_lib.World(
  examples=examples,
  text=arithmetic.WORLD.text,
  schemas=lambda: [schema for world in WORLDS for schema in world.schemas()],
  tasks=tasks,
  held_out=held_out,
  methods=methods,
  labels=arithmetic.WORLD.labels,
  score='reward/solved',
  kinds={},
  config=config_lib.Config(
    schedule=config_lib.Schedule(steps=40, tasks=16, samples=8, eval_every=10),
    limits=config_lib.Limits(max_turns=8, max_turn_tokens=150),
    optimizer=config_lib.Optimizer(learning_rate=1.5e-4),
    engine=config_lib.Engine(slots=768, decode_steps=16, replicas=2),
  ),
  base=sft.Config(steps=2000, rows=4, row_tokens=512, learning_rate=2.5e-3),
  vocab=2000,
  also=('direct',),
)
