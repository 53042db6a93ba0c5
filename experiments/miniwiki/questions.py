"""Questions over a miniwiki world: bridges of 1 to 4 hops and comparisons."""

import dataclasses
import functools
import random

from agent_r1_jax import types
from experiments.miniwiki import relations as relations_lib
from experiments.miniwiki import world as world_lib
from experiments.miniwiki.relations import Relation


@dataclasses.dataclass(frozen=True)
class Style:
  """A data set's style of questions.

  Attributes:
    mix: Shares of the kinds: a number is a bridge with that many hops, or 'comparison'.
    wordings: 'natural' or 'nested', sampled uniformly.
    held_out: If True, every chain has a pair of relations that no training question has;
      if False, none does.
  """

  mix: dict[int | str, float]
  wordings: tuple[str, ...]
  held_out: bool = False


STYLES = {
  'hotpot': Style({2: 0.56, 3: 0.20, 'comparison': 0.24}, ('natural',)),
  '2wiki': Style({2: 0.38, 3: 0.40, 'comparison': 0.22}, ('nested',)),
  'musique': Style({2: 0.60, 3: 0.40}, ('natural', 'nested'), held_out=True),
  'musique-4hop': Style({4: 1.0}, ('natural', 'nested'), held_out=True),
}


def _pairs() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
  """Returns compositions of two relations, and the quarter of them that is held out.

  A kind with only one incoming relation keeps all its pairs, so that every relation is
  trained in some second position.
  """
  every, held_out = set(), set()
  for kind in relations_lib.KINDS:
    firsts = [r.name for r in relations_lib.EDGES if r.target == kind]
    seconds = [r.name for r in relations_lib.EDGES if r.source == kind]
    for i, first in enumerate(firsts):
      for j, second in enumerate(seconds):
        if (first, second) != ('spouse', 'spouse'):
          every.add((first, second))
          if len(firsts) > 1 and i % 4 == j:
            held_out.add((first, second))
  return every, held_out


PAIRS, HELD_OUT = map(frozenset, _pairs())


@functools.cache
def paths(hops: int, held_out: bool) -> tuple[tuple[Relation, ...], ...]:
  """Returns all chains of relations of a length, with or without held-out pairs."""
  chains = [(r,) for r in relations_lib.EDGES]
  for _ in range(hops - 1):
    chains = [
      c + (r,)
      for c in chains
      for r in relations_lib.EDGES
      if (c[-1].name, r.name) in PAIRS
    ]
  return tuple(c for c in chains if holds_out(r.name for r in c) == held_out)


def holds_out(relations) -> bool:
  """Whether a chain of relation names has a held-out pair."""
  names = tuple(relations)
  return any(pair in HELD_OUT for pair in zip(names, names[1:], strict=False))


def questions(
  world: world_lib.World, n: int, style: str, seed: int, prefix: str = ''
) -> list[types.Task]:
  """Samples `n` different questions; the kinds have exactly the style's shares.

  Args:
    world: The world.
    n: The number of questions.
    style: One of STYLES.
    seed: The seed of the sampling.
    prefix: The prefix of the tasks' ids.

  Returns:
    Tasks whose only message is the question. `answer` is a list of accepted names; `info`
    has question, kind, hops, relations, chain (titles to look up, in order) and wording,
    for comparisons also years and sign ('earlier' or 'later').

  Raises:
    ValueError: The world has too few different questions.
  """
  if style not in STYLES:
    raise ValueError(f'style: {style!r} is none of {", ".join(STYLES)}')
  rng = random.Random(f'miniwiki questions {style} {seed}')
  kinds = _quota(STYLES[style].mix, n)
  rng.shuffle(kinds)
  tasks, seen, compared, misses = [], set(), 0, 0
  while len(tasks) < n:
    kind = kinds[len(tasks)]
    wording = rng.choice(STYLES[style].wordings)
    if isinstance(kind, str):
      question, answer, info = comparison(world, rng, wording, compared)
    else:
      question, answer, info = bridge(world, rng, kind, wording, STYLES[style].held_out)
    if (key := (*info['chain'], *info['relations'])) in seen:
      misses += 1
      if misses == 1000:
        raise ValueError(f'n: the world has less than {n} questions; make it larger')
      continue
    misses = 0
    seen.add(key)
    compared += isinstance(kind, str)
    tasks.append(task(f'{prefix}{style}-{seed}-{len(tasks)}', question, answer, info))
  return tasks


def task(name: str, question: str, answer: str, info: dict) -> types.Task:
  """Makes a task whose only message is the question."""
  message = {'role': 'user', 'content': question}
  return types.Task(name, [message], [answer], {**info, 'question': question})


def _quota(mix, n) -> list[int | str]:
  """Returns `n` kinds in the mix's shares; the first kind absorbs rounding."""
  counts = {kind: round(n * portion) for kind, portion in mix.items()}
  first = next(iter(counts))
  counts[first] += n - sum(counts.values())
  return [kind for kind, count in counts.items() for _ in range(count)]


def bridge(
  world: world_lib.World, rng: random.Random, hops: int, wording: str, held_out: bool
) -> tuple[str, str, dict]:
  """Makes a question in which every hop's value is the next hop's subject.

  The chain never visits a title twice, and only the last passage names the answer.

  Returns:
    Question, answer, info.
  """
  while True:
    path = rng.choice(paths(hops, held_out))
    chain = [rng.choice(world.by_kind[path[0].source])]
    for relation in path:
      if relation.name in world.facts[chain[-1]]:
        chain.append(world.facts[chain[-1]][relation.name])
    if len(set(chain)) <= hops:
      continue
    *chain, answer = chain
    if not any(answer in world.passages[title] for title in chain[:-1]):
      break
  info = {
    'kind': 'bridge',
    'hops': hops,
    'relations': [r.name for r in path],
    'chain': chain,
    'wording': wording,
  }
  return _ask(rng, path, chain[0], wording), answer, info


def _ask(rng, path, entity, wording) -> str:
  if wording == 'nested':
    nouns = ' of the '.join(r.name for r in reversed(path))
    who = 'Who' if path[-1].target == 'person' else 'What'
    start = rng.choice((f'{who} is', 'Name'))
    return f'{start} the {nouns} of {entity}' + ('.' if start == 'Name' else '?')
  for relation in path[:-1]:
    entity = rng.choice(relation.phrases).replace('{x}', entity)
  return rng.choice(path[-1].asks).replace('{x}', entity)


# The minimum difference between compared years.
APART = 10


def comparison(
  world: world_lib.World, rng: random.Random, wording: str, number: int
) -> tuple[str, str, dict]:
  """Asks which of two entities of a kind is earlier, or later.

  The years are ten or more apart. Over four consecutive numbers, earlier and later, first
  and second named are balanced.

  Returns:
    Question, answer, info.
  """
  kind = rng.choice(list(relations_lib.DATED))
  while True:
    a, b = rng.sample(world.by_kind[kind], 2)
    x, y = world.facts[a]['year'], world.facts[b]['year']
    if abs(int(x) - int(y)) >= APART:
      break
  sign = ('earlier', 'later')[number % 2]
  first_wins = number // 2 % 2 == 0
  if ((x < y) == (sign == 'earlier')) != first_wins:
    a, b, x, y = b, a, y, x
  happened, noun = relations_lib.DATED[kind]
  if wording == 'nested':
    forms = (
      f'Which has the {sign} {noun}, {a} or {b}?',
      f'Which {kind} has the {sign} {noun}, {a} or {b}?',
    )
  else:
    forms = (
      f'Which {kind} {happened} {sign}, {a} or {b}?',
      f'Of {a} and {b}, which {happened} {sign}?',
    )
  info = {
    'kind': 'comparison',
    'hops': 2,
    'relations': ['year', 'year'],
    'chain': [a, b],
    'years': [x, y],
    'sign': sign,
    'wording': wording,
  }
  return rng.choice(forms), a if first_wins else b, info
