"""Supervised text for a base policy: imperfect demonstrations, and practice items.

Demonstrations use the real retriever, so a bad query gets what the index returns. Every
reply to a passage first says what it found (`The founder is Olgan Tirel.`), except in
careless demonstrations; practice items use the same sentences.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import random
import re

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.retrieval import documents
from experiments.miniwiki import questions as questions_lib
from experiments.miniwiki import world as world_lib

# The fates of demonstrations. 'stop': answers after the first hop; 'relation': asks for
# the wrong relation; 'partial': searches with one word of a name; 'repeat': repeats the
# search, then answers; 'another': takes another value of the passage; 'guess': answers
# without a search. Most stop too early, so that a greedy policy does too, while a quarter
# of the samples are right: RL has to find these.
MIXTURE = {
  'right': 0.25,
  'stop': 0.59,
  'relation': 0.05,
  'partial': 0.03,
  'repeat': 0.03,
  'another': 0.03,
  'guess': 0.02,
}
# The kinds of practice items.
PRACTICE = {
  'lookup': 0.30,
  'chain': 0.20,
  'compare': 0.12,
  'single': 0.10,
  'names': 0.12,
  'years': 0.10,
  'direct': 0.06,
}


@dataclasses.dataclass(frozen=True)
class Example:
  """A complete conversation, and whether its prompt offers the search tool.

  Attributes:
    messages: End with the assistant's last reply.
    tools: Whether the search tool is in the prompt.
    kind: A key of the mixture or of the practice.
    task: The task, for a demonstration.
  """

  messages: list[types.Message]
  tools: bool
  kind: str
  task: types.Task | None = None


def examples(
  seed: int,
  n: int,
  make_search: Callable[[tuple], Callable[[str], str]],
  *,
  split: str = 'base',
  mixture: Mapping[str, float] = MIXTURE,
  practice_share: float = 0.5,
  practice_mix: Mapping[str, float] = PRACTICE,
  world_size: int = 600,
  examples_per_world: int = 2000,
) -> Iterator[Example]:
  """Yields `n` examples over as many worlds as needed, so that no name is seen often.

  Args:
    seed: The seed of all randomness.
    n: The number of examples.
    make_search: Makes the search (query -> the tool's text) of a world's documents.
    split: The split whose words make the names.
    mixture: Shares of the demonstrations' fates; keys of MIXTURE.
    practice_share: The share of practice items.
    practice_mix: Shares of the kinds of practice; keys of PRACTICE.
    world_size: Passages per world.
    examples_per_world: Examples per world.
  """
  rng = random.Random(f'miniwiki examples {seed} {split}')
  for start in range(0, n, examples_per_world):
    world = world_lib.world(rng.getrandbits(32), split, world_size)
    search = make_search(world.documents)
    count = min(examples_per_world, n - start)
    half = (count + 1) // 2
    tasks = [
      task
      for style in ('hotpot', '2wiki')
      for task in questions_lib.questions(world, half, style, rng.getrandbits(32))
    ]
    rng.shuffle(tasks)
    for task in tasks[:count]:
      if rng.random() < practice_share:
        yield practice(world, rng, search, practice_mix)
      else:
        yield demonstration(task, world, rng, search, mixture)


def tokenizer_texts(items: Iterable[Example]) -> Iterator[str]:
  """Yields the texts to train a tokenizer on: contents and role names.

  A year is split before its last digit, so that every year becomes two tokens: the
  decade, by which years are compared, and a digit.
  """
  yield 'system\nTools: search'
  for item in items:
    for message in item.messages:
      role = 'user' if message['role'] == 'tool' else message['role']
      yield f'{role}\n' + re.sub(r'( \d{3})(\d)', r'\1 \2', message['content'])


def demonstration(
  task: types.Task,
  world: world_lib.World,
  rng: random.Random,
  search: Callable[[str], str],
  mixture: Mapping[str, float] = MIXTURE,
) -> Example:
  """Makes one episode, right or wrong as `mixture` says."""
  if unknown := set(mixture) - set(MIXTURE):
    raise ValueError(f'mixture: unknown {sorted(unknown)}; use {", ".join(MIXTURE)}')
  fate = rng.choices(list(mixture), list(mixture.values()))[0]
  act = _compare if task.info['kind'] == 'comparison' else _follow
  episode = _Episode(task, world, search)
  act(episode, rng, fate)
  return Example(episode.messages, True, fate, task)


class _Episode:
  """Records a conversation; `said` waits for the next reply."""

  def __init__(self, task, world, search):
    self.task, self.world, self._search = task, world, search
    self.messages = list(task.messages)
    self.said = ''

  def search(self, name, relation) -> str:
    """Searches, and returns the title of the passage that a reader would choose."""
    query = f' {name} {relation}' if name else f' {relation}'
    call = call_formats.HERMES.render(calls.ToolCall('search', {'query': query}))
    said = self.said + '\n' if self.said else ''
    self._reply(f'{said}{call}')
    text = self._search(query)
    self.messages.append({'role': 'tool', 'name': 'search', 'content': text})
    titles = re.findall(r'Doc \d+ \(Title: (.*?)\)', text)
    titles = [title for title in titles if title in self.world.facts]
    if not titles:
      raise ValueError(f'search: {query!r} returned no passage of the world')
    return name if name in titles else titles[0]

  def say(self, sentence):
    self.said = f'{self.said} {sentence}' if self.said else sentence

  def answer(self, name):
    self._reply(f'{self.said} {answer(name)}'.strip())

  def _reply(self, content):
    self.messages.append({'role': 'assistant', 'content': content})
    self.said = ''


def answer(name: str) -> str:
  """Writes an answer; the space before a name keeps its tokens the same everywhere."""
  return f'<answer> {name}</answer>'


def found(relation: str, value: str) -> str:
  """Writes the sentence that states what a passage gave."""
  return f'The {relation} is {value}.'


def dated(year: str, name: str) -> str:
  """Writes the sentence with an entity's year, which comes first to lead to the name."""
  return f'The year is {year} for {name}.'


def compared(sign: str, read: list[tuple[str, str]]) -> tuple[str, str]:
  """Writes which of two (year, name) won; returns that sentence and the name."""
  year, name = (min if sign == 'earlier' else max)(read)
  return f'The {sign} is {year} for {name}.', name


def _follow(episode, rng, fate):
  """Plays a bridge question."""
  task, world = episode.task, episode.world
  relations, name = task.info['relations'], task.info['chain'][0]
  if fate == 'guess':
    return episode.answer(name)
  where = 0 if fate == 'stop' else rng.randrange(len(relations) - (fate == 'repeat'))
  for hop, relation in enumerate(relations):
    slip = fate if hop == where else None
    if slip == 'relation':
      relation = _other(rng, world.facts[name], relation)
    query = _partial(rng, world, name) if slip == 'partial' else name
    for _ in range(rng.choice((2, 3)) if slip == 'repeat' else 1):
      title = episode.search(query, relation)
    facts = world.facts[title]
    if relation not in facts or slip == 'another':
      relation = _other(rng, facts, relation)
    name = facts[relation]
    if slip != 'another':
      episode.say(found(relation, name))
    if slip in ('stop', 'repeat'):
      break
  episode.answer(name)


def _compare(episode, rng, fate):
  """Plays a comparison; answers by chance unless both years were read."""
  info, facts = episode.task.info, episode.world.facts
  where, read = rng.randrange(2), []
  for i, name in enumerate(info['chain'] if fate != 'guess' else ()):
    slip = fate if i == where or fate == 'stop' else None
    relation = _other(rng, facts[name], 'year') if slip == 'relation' else 'year'
    query = _partial(rng, episode.world, name) if slip == 'partial' else name
    for _ in range(2 if slip == 'repeat' else 1):
      title = episode.search(query, relation)
    if slip in ('stop', 'repeat'):
      break
    if relation == 'year' and 'year' in facts[title] and slip != 'another':
      read.append((facts[title]['year'], title))
      episode.say(dated(*read[-1]))
  winner = rng.choice(info['chain'])
  if len(read) == 2:
    sentence, winner = compared(info['sign'], read)
    episode.say(sentence)
  episode.answer(winner)


def _other(rng, facts, relation) -> str:
  """Returns another relation of an entity, never its year."""
  return rng.choice([r for r in facts if r not in (relation, 'year')])


def _partial(rng, world, name) -> str:
  """Returns a word of a name that others share, or ''."""
  shared = [w for w in name.split() if len(world.by_word.get(w, ())) > 1]
  return rng.choice(shared or [''])


def practice(
  world: world_lib.World,
  rng: random.Random,
  search: Callable[[str], str],
  mix: Mapping[str, float] = PRACTICE,
) -> Example:
  """Makes one practice item, sampled by `mix`; always right, except 'direct'."""
  kind = rng.choices(list(mix), list(mix.values()))[0]
  make = {
    'lookup': _lookup,
    'chain': _chain,
    'compare': _compare_passages,
    'names': _names,
    'years': _years,
    'direct': _direct,
  }
  if kind == 'single':
    return _single(world, rng, search)
  prompt, reply = make[kind](world, rng)
  messages = [
    {'role': 'user', 'content': prompt},
    {'role': 'assistant', 'content': reply},
  ]
  return Example(messages, False, kind)


def with_passages(passages: str, question: str) -> str:
  """Makes the prompt with retrieved passages, as the tool renders them."""
  return f'{passages}\n{question}'


def _passages(world, rng, titles, n) -> str:
  """Renders `titles` and others, up to `n` passages in total, shuffled, as the tool does.

  Half of the others share a word with one of the titles.
  """
  titles = list(titles)
  while len(titles) < n:
    word = rng.choice(titles[0].split())
    near = world.by_word[word] if rng.random() < 0.5 else list(world.kinds)
    other = rng.choice([t for t in near if t not in titles] or list(world.kinds))
    if other not in titles:
      titles.append(other)
  rng.shuffle(titles)
  found = [documents.Document(t, t, world.passages[t]) for t in titles]
  return documents.render([documents.Hit(d, 0.0) for d in found])


def _bridge(world, rng, hops):
  wording = rng.choice(('natural', 'nested'))
  return questions_lib.bridge(world, rng, hops, wording, False)


def _lookup(world, rng):
  """Makes one to three passages and a one-hop question."""
  question, value, info = _bridge(world, rng, 1)
  passages = _passages(world, rng, info['chain'], rng.choice((1, 1, 2, 3)))
  reply = f'{found(info["relations"][0], value)} {answer(value)}'
  return with_passages(passages, question), reply


def _chain(world, rng):
  """Makes all the passages of a two- or three-hop question, and sometimes one more."""
  hops = rng.choice((2, 2, 2, 3))
  question, value, info = _bridge(world, rng, hops)
  passages = _passages(world, rng, info['chain'], rng.randint(hops, 3))
  values = [*info['chain'][1:], value]
  steps = [found(r, v) for r, v in zip(info['relations'], values, strict=True)]
  return with_passages(passages, question), f'{" ".join(steps)} {answer(value)}'


def _compare_passages(world, rng):
  """Makes a comparison's passages; the years are recalled in the passages' order."""
  wording = rng.choice(('natural', 'nested'))
  question, value, info = questions_lib.comparison(world, rng, wording, rng.randrange(4))
  passages = _passages(world, rng, info['chain'], rng.randint(2, 3))
  names = sorted(info['chain'], key=lambda t: passages.index(f'(Title: {t})'))
  read = [(world.facts[name]['year'], name) for name in names]
  steps = [*(dated(*r) for r in read), compared(info['sign'], read)[0]]
  return with_passages(passages, question), f'{" ".join(steps)} {answer(value)}'


def _single(world, rng, search):
  """Makes a one-hop question with the search tool."""
  question, value, info = _bridge(world, rng, 1)
  task = questions_lib.task('single', question, value, info)
  episode = _Episode(task, world, search)
  _follow(episode, rng, 'right')
  return Example(episode.messages, True, 'single', task)


def _names(world, rng):
  """Makes lists of names to repeat, or to continue; names of the entire split."""
  words = world_lib.words(world.split)
  names = [
    ' '.join(rng.sample(words, rng.randint(1, 2))) for _ in range(rng.randint(3, 7))
  ]
  listed = f'Names: {", ".join(names)}.'
  if rng.random() < 0.5:
    return f'{listed} Repeat.', listed
  i = rng.randrange(len(names) - 1)
  return f'{listed} Who follows {names[i]}?', answer(names[i + 1])


def _years(world, rng):
  """Makes two years, with or without names, and which is earlier or later."""
  sign = rng.choice(('earlier', 'later'))
  while True:
    years = [str(rng.choice(world_lib.YEARS)) for _ in range(2)]
    if abs(int(years[0]) - int(years[1])) >= questions_lib.APART:
      break
  if rng.random() < 0.5:
    year = (min if sign == 'earlier' else max)(years)
    question = f'Which is {sign}, {years[0]} or {years[1]}?'
    return question, f'The {sign} is {year}. {answer(year)}'
  read = list(zip(years, rng.sample(list(world.kinds), 2), strict=True))
  sentence, name = compared(sign, read)
  steps = ' '.join(dated(*r) for r in read)
  return f'{steps} Which is {sign}?', f'{sentence} {answer(name)}'


def _direct(world, rng):
  """Makes a bare question; the answer is a random name of the right kind."""
  wording = rng.choice(('natural', 'nested'))
  if rng.random() < 0.25:
    question, _, info = questions_lib.comparison(world, rng, wording, rng.randrange(4))
    return question, answer(rng.choice(info['chain']))
  question, _, info = _bridge(world, rng, rng.choice((2, 2, 3)))
  last = info['relations'][-1]
  values = [facts[last] for facts in world.facts.values() if last in facts]
  return question, answer(rng.choice(values))
