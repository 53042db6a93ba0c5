"""miniwiki: a generated encyclopedia and multi-hop questions about it.

Nothing in it can be memorised: a word of a name belongs to exactly one split (see
world.py), and the out-of-domain set composes relations as no training question does (see
questions.py). Equal arguments give equal bytes in every process.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import random

from agent_r1_jax import types
from agent_r1_jax.retrieval import dense, documents
from experiments.miniwiki import demos, hashing
from experiments.miniwiki import questions as questions_lib
from experiments.miniwiki import world as world_lib

# From a data set to (style, part of the split's words): each set has its own world.
SETS = {
  'miniwiki-hotpot': ('hotpot', 0),
  'miniwiki-2wiki': ('2wiki', 1),
  'miniwiki-musique': ('musique', 2),
  'miniwiki-musique-4hop': ('musique-4hop', 2),
}
# Kinds of question, for tables.
KINDS = {
  '2 hops': lambda task: task.info['kind'] == 'bridge' and task.info['hops'] == 2,
  '3 hops': lambda task: task.info['kind'] == 'bridge' and task.info['hops'] == 3,
  '2 and 3 hops': lambda task: task.info['kind'] == 'bridge',
  'comparison': lambda task: task.info['kind'] == 'comparison',
}
PASSAGES = 900  # of each set's world
TRAIN_PASSAGES = 2400


@functools.lru_cache(8)
def _world(seed, split, part) -> world_lib.World:
  size = TRAIN_PASSAGES if part is None else PASSAGES
  return world_lib.world(seed, split, size, part)


def train_tasks(seed: int, n: int) -> list[types.Task]:
  """Makes questions for RL: half of them in each in-domain style, mixed.

  Args:
    seed: The seed of the world and of the questions.
    n: The number of questions.
  """
  world = _world(seed, 'train', None)
  make = functools.partial(questions_lib.questions, world, prefix='train-')
  tasks = make(n - n // 2, 'hotpot', seed) + make(n // 2, '2wiki', seed)
  random.Random(f'miniwiki train {seed}').shuffle(tasks)
  return tasks


def test_set(name: str, n: int, seed: int, split: str = 'test') -> list[types.Task]:
  """Makes a data set for evaluation.

  Args:
    name: One of SETS.
    n: The number of questions.
    seed: The seed of the world and of the questions.
    split: 'test' for reported numbers, 'dev' for choosing settings.
  """
  if name not in SETS:
    raise ValueError(f'name: {name!r} is none of {", ".join(SETS)}')
  if split not in ('dev', 'test'):
    raise ValueError(f"split: {split!r} is neither 'dev' nor 'test'")
  style, part = SETS[name]
  world = _world(seed, split, part)
  return questions_lib.questions(world, n, style, seed, prefix=f'{split}-')


def corpus(seed: int, split: str) -> list[documents.Document]:
  """Returns all passages of a split: of one world, or of the sets' three worlds."""
  parts = range(world_lib.PARTS) if split in ('dev', 'test') else [None]
  return [d for part in parts for d in _world(seed, split, part).documents]


def make_index(passages: Sequence[documents.Document]) -> dense.Dense:
  """Makes a FAISS index of passages."""
  encoder = hashing.HashingEncoder().fit([d.contents for d in passages])
  return dense.Dense(passages, encoder.encode)


def make_search(passages: Sequence[documents.Document]) -> Callable[[str], str]:
  """Makes the function from a query to the search tool's answer."""
  found = make_index(passages)
  return lambda query: documents.render(found.search([query], 1)[0])


def index(seed: int) -> dense.Dense:
  """Makes one FAISS index of all splits' passages: the world's encyclopedia."""
  return make_index([d for s in ('train', 'dev', 'test') for d in corpus(seed, s)])


def demonstrations(
  tasks: Sequence[types.Task],
  world: int,
  seed: int,
  find: Callable[[str], str],
) -> Iterator[list[types.Message]]:
  """Yields right conversations on questions of `train_tasks`, endlessly.

  Args:
    tasks: Tasks from train_tasks(world, ...).
    world: The seed of their world.
    seed: The seed of the order and of the choices.
    find: From a query to the search tool's answer.
  """
  rng, facts = random.Random(f'miniwiki right {seed}'), _world(world, 'train', None)
  while True:
    for task in rng.sample(tasks, len(tasks)):
      yield demos.demonstration(task, facts, rng, find, {'right': 1.0}).messages


def rag_task(task: types.Task, hits: Sequence[documents.Hit]) -> types.Task:
  """Puts passages before the question, in the form used in practice."""
  passages = documents.render(hits)
  content = demos.with_passages(passages, task.info['question'])
  return task.ask(content)
