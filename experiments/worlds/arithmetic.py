"""Arithmetic in words: stories in GSM8K's form, a calculator, math-verify as the judge.

The tool is agent_r1_jax.tools.calculator and the judge agent_r1_jax.tasks.mathematics, as
for a large model; the stories replace the data. A space before the calculator's number
makes it the same token as elsewhere. The prompt is only the question: the instructions of
mathematics.agent_task are longer than the stories.

Held out are templates (sentences) that are never practised nor trained, larger numbers,
and more steps; see arithmetic_stories.py and arithmetic_lessons.py.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import random

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import env, tool
from agent_r1_jax.tasks import mathematics
from agent_r1_jax.tools import calculator
from experiments import comparison
from experiments.worlds import arithmetic_lessons as lessons
from experiments.worlds import arithmetic_stories as stories
from experiments.worlds import world as world_lib

# From a held-out set to the size of its stories and the part of their templates.
SETS = {
  'new_stories': (lessons.PRACTISED, 'train'),
  'new_templates': (lessons.PRACTISED, 'held_out'),
  'larger_numbers': (stories.Size((2, 3, 4), (61, 200), (31, 99)), 'train'),
  'more_steps': (stories.Size((5, 6), (5, 60), (2, 30)), 'train'),
}


def calculator_tool() -> tool.Tool:
  """Makes the calculator; its results begin with a space."""
  made = calculator.calculator_tool()

  def compute(expression: str) -> str:
    return f' {calculator.calculator(expression)}'

  return dataclasses.replace(made, fn=compute)


def make_tasks(
  seed: int, n: int, split: str, size: stories.Size, part: str
) -> list[types.Task]:
  """Makes tasks of stories; equal arguments make equal tasks."""
  rng = random.Random(f'arithmetic {seed} {split} {size} {part}')
  return [
    make_task(f'arithmetic-{split}-{seed}-{i}', stories.make_story(rng, size, part))
    for i in range(n)
  ]


def make_task(name: str, story: stories.Story) -> types.Task:
  """Makes the task of a story, in the layout of mathematics.load."""
  info = {
    'question': story.text,
    'steps': len(story.steps),
    'templates': list(story.templates),
  }
  messages = [{'role': 'user', 'content': story.text}]
  return types.Task(name, messages, str(story.answer), info)


def held_out(seed: int, n: int, split: str) -> dict[str, list[types.Task]]:
  """Makes the held-out sets, by name."""
  return {
    name: make_tasks(seed, n, split, size, part) for name, (size, part) in SETS.items()
  }


@functools.cache
def grader() -> mathematics.Grader:
  return mathematics.Grader()


def make_env(tools: Sequence[tool.Tool]) -> env.ToolEnv:
  """Makes an environment with the given tools; the reward is 1 for a right answer."""
  judge = grader()
  return env.CloneableToolEnv(tools, judge.reward, metrics=judge.metrics)


def methods(sets: comparison.Sets) -> dict[str, comparison.Method]:
  """Returns the methods: with the calculator, or without."""
  return {
    'direct': (sets, lambda: make_env([])),
    'tools': (sets, lambda: make_env([calculator_tool()])),
  }


def text_of(example: world_lib.Example) -> Iterator[str]:
  """Yields an example's texts, and sometimes all numbers, so that each is a token."""
  yield from world_lib.texts_of(example)
  if example.kind == 'copy':
    yield 'system\nTools: calculator'
    yield ''.join(f' {n}' for n in range(stories.LARGEST + 1))


WORLD = world_lib.World(
  examples=lessons.examples,
  text=lambda example: [*text_of(example)],
  schemas=lambda: [calculator_tool().schema],
  tasks=functools.partial(
    make_tasks, split='train', size=lessons.PRACTISED, part='train'
  ),
  held_out=held_out,
  methods=methods,
  labels={'direct': 'Without the tool', 'tools': 'Base policy'},
  score='accuracy',
  kinds={
    f'{n} steps': lambda task, n=n: task.info['steps'] == n for n in (2, 3, 4, 5, 6)
  },
  config=config_lib.Config(
    schedule=config_lib.Schedule(steps=40, tasks=16, samples=8, eval_every=10),
    limits=config_lib.Limits(max_turns=8, max_turn_tokens=150),
    optimizer=config_lib.Optimizer(learning_rate=2e-4),
    engine=config_lib.Engine(slots=640, decode_steps=16, replicas=2),
  ),
  base=sft.Config(steps=1300, rows=4, row_tokens=384, learning_rate=2.5e-3),
  vocab=1400,
  also=('direct',),
)
