"""The practice of the arithmetic world's base policy: demonstrations and their parts.

A reply names the next day or month, the word that says what its sentence does to the
total, and the change; then it calls the calculator: 'Tuesday loses: - 8.' and the
expression ' 50 - 8'. All numbers have a space before them, so that each is one token and
the same everywhere.
"""

from collections.abc import Iterator, Mapping
import random

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls
from experiments.worlds import arithmetic_stories as stories
from experiments.worlds import world as world_lib

PRACTISED = stories.Size((2, 3, 4), (5, 60), (2, 30))
# The fates of demonstrations. 'stop': answers after the first step; 'skip': leaves a step
# out; 'guess': answers without a call. Most stop too early, so that a greedy policy does
# too, while a third of the samples are right: RL has to find these. None has a wrong
# call, because a wrong call is learned as well as a right one.
MIXTURE = {'right': 0.33, 'stop': 0.6, 'skip': 0.04, 'guess': 0.03}
# Shares of the practice: demonstrations, and turns without a tool except 'compute'.
PRACTICE = {
  'demonstration': 0.27,
  'plan': 0.45,
  'alone': 0.03,
  'meaning': 0.18,
  'compute': 0.03,
  'copy': 0.04,
}


def say(when: str, word: str, change: str) -> str:
  """Writes what a reply says of a step before its call: 'Tuesday loses: - 8.'."""
  return f' {when} {word}: {change}.'


def start(total: int) -> str:
  """Writes what the first reply says of the opening."""
  return f' Start: {total}.'


def call(total: int, change: str) -> str:
  """Writes the call that changes a total."""
  arguments = {'expression': f' {total} {change}'}
  return call_formats.HERMES.render(calls.ToolCall('calculator', arguments))


def answer(total: int) -> str:
  """Writes the last reply."""
  return f'Done. \\boxed{{ {total}}}'


def examples(seed: int, mixture: Mapping[str, float] = MIXTURE) -> Iterator:
  """Yields practice examples, endlessly, without held-out templates."""
  rng = random.Random(f'arithmetic examples {seed}')
  make = {
    'alone': _alone,
    'plan': _plan,
    'meaning': _meaning,
    'copy': _copy,
  }
  while True:
    kind = rng.choices([*PRACTICE], [*PRACTICE.values()])[0]
    if kind == 'demonstration':
      fate = rng.choices([*mixture], [*mixture.values()])[0]
      story = stories.make_story(rng, PRACTISED)
      yield world_lib.Example(demonstrate(story, rng, fate), kind=fate)
    elif kind == 'compute':
      yield world_lib.Example(compute(rng), kind=kind)
    else:
      prompt, reply = make[kind](rng)
      yield world_lib.talk(prompt, reply, kind)


def demonstrate(
  story: stories.Story, rng: random.Random, fate: str = 'right'
) -> list[types.Message]:
  """Writes an episode with the calculator, right or as `fate` says."""
  messages, total, steps = [_user(story.text)], story.first, list(story.steps)
  if fate == 'skip':
    del steps[rng.randrange(len(steps))]
  said = start(total)
  for step in steps[: {'stop': 1, 'guess': 0}.get(fate)]:
    messages.append(
      world_lib.say(f'{said}{say(*step[:2], step.change)}\n{call(total, step.change)}')
    )
    said = ''
    total = stories.compute(total, step.change)
    messages.append({'role': 'tool', 'name': 'calculator', 'content': f' {total}'})
  return [*messages, world_lib.say(answer(total))]


def _user(content) -> types.Message:
  return {'role': 'user', 'content': content}


def _alone(rng):
  """Makes a story without the calculator: all steps in one reply, in the head."""
  story = stories.make_story(rng, PRACTISED)
  total, lines = story.first, [start(story.first)]
  for step in story.steps:
    lines.append(f'{say(*step[:2], step.change)} {total} {step.change} = {step.total}.')
    total = step.total
  return story.text, f'{"".join(lines)} {answer(total)}'


def _plan(rng):
  """Makes a story whose numbers and steps are to be listed."""
  story = stories.make_story(rng, PRACTISED)
  steps = ''.join(say(*step[:2], step.change) for step in story.steps)
  return f'{story.text}\nPlan?', f'{start(story.first)}{steps} Done.'


def _meaning(rng):
  """Asks what one sentence does or begins with, with numbers of any size."""
  number = lambda: rng.randint(2, stories.LARGEST)
  if rng.random() < 0.15:
    first, subject = number(), rng.choice(stories.SUBJECTS)
    opening = rng.choice(stories.openings(subject, 'train'))
    return stories.Cast(rng, subject).fill(opening, n=first), start(first)
  subject, kind, template = rng.choice([*stories.sentence_kinds('train')])
  numbers = {'n': number(), 'a': number(), 'b': number()}
  when = stories.draw_dates(rng, 1)[0]
  cast = stories.Cast(rng, subject)
  sentence = cast.fill(template, when=stories.preposition(when), **numbers)
  change = stories.OPERATIONS[kind].format(**numbers)
  return sentence, say(when, stories.find_word(template, kind), change)


def _copy(rng):
  """Makes numbers of any size to repeat."""
  numbers = [rng.randint(0, stories.LARGEST) for _ in range(rng.randint(4, 10))]
  text = ','.join(f' {n}' for n in numbers)
  return f'Repeat:{text}', text


def compute(rng):
  """Writes an episode of a calculation with the calculator."""
  total, number = (rng.randint(2, stories.LARGEST) for _ in range(2))
  change = f'{rng.choice("+-*")} {number}'
  value = stories.compute(total, change)
  return [
    _user(f'Compute: {total} {change}.'),
    world_lib.say(call(total, change)),
    {'role': 'tool', 'name': 'calculator', 'content': f' {value}'},
    world_lib.say(answer(value)),
  ]
