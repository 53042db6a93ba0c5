"""Stories of arithmetic in words: an opening, steps, distractors and a question.

A story proceeds by days or months: 'Mia has 14 apples. On Monday she buys 3 bags of 12
apples. The school has 30 windows. On Tuesday she loses 8 of the apples. How many apples
does she have now?' Each step changes a running total. The sentences are in
arithmetic_stories.toml.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import pathlib
import random
import tomllib
from typing import Any, NamedTuple

DAYS = ('Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday')
MONTHS = (
  *('January', 'February', 'March', 'April', 'May', 'June', 'July'),
  *('August', 'September', 'October', 'November', 'December'),
)
LARGEST = 499  # No number of a story is larger, including its totals.
# The effect of each kind of step on the running total.
OPERATIONS = {
  'add': '+ {n}',
  'take': '- {n}',
  'times': '* {n}',
  'share': '/ {n}',
  'add_groups': '+ {a} * {b}',
  'take_groups': '- {a} * {b}',
  'double': '* 2',
  'half': '/ 2',
}


class Size(NamedTuple):
  """The length of a story, and the range of its numbers.

  Attributes:
    steps: The numbers of steps to sample from, uniformly.
    first: The smallest and the largest number of the opening.
    change: The smallest and the largest number added or subtracted.
  """

  steps: tuple[int, ...]
  first: tuple[int, int]
  change: tuple[int, int]


class Step(NamedTuple):
  """A step.

  Attributes:
    when: Its day or month.
    word: The word of the sentence that names the change: 'loses'.
    sentence: The sentence.
    change: The change of the total: '- 8'.
    total: The total after it.
  """

  when: str
  word: str
  sentence: str
  change: str
  total: int


@dataclasses.dataclass(frozen=True)
class Story:
  """A story.

  Attributes:
    first: The number of the opening.
    steps: The steps, in order.
    text: All sentences with the question.
    templates: The templates of the sentences.
  """

  first: int
  steps: tuple[Step, ...]
  text: str
  templates: tuple[str, ...]

  @property
  def answer(self) -> int:
    """The last total."""
    return self.steps[-1].total


_FILE = pathlib.Path(__file__).with_suffix('.toml')
_DATA: Mapping[str, Any] = tomllib.loads(_FILE.read_text(encoding='utf-8'))
SUBJECTS = tuple(_DATA['subjects'])
_PRONOUNS = {'she': ('she', 'her'), 'he': ('he', 'him')}


def templates(part: str) -> Iterator[str]:
  """Yields the templates of a part, 'train' or 'held_out'."""
  for subject in _DATA['subjects'].values():
    for sentences in subject[part].values():
      yield from sentences
  yield from distractors(part)


def find_word(sentence: str, kind: str) -> str:
  """Returns the word of a step's sentence that names its kind."""
  words = _DATA['words'][kind.removesuffix('_groups')]
  return next(w for w in sentence.rstrip('.').split() if w in words)


def openings(subject: str, part: str) -> list[str]:
  """Returns the opening sentences of a part, for a subject."""
  return _DATA['subjects'][subject][part]['opening']


def distractors(part: str) -> list[str]:
  """Returns a part's sentences that change nothing."""
  return _DATA['distractors'][part]


def sentence_kinds(part: str) -> Iterator[tuple[str, str, str]]:
  """Yields (subject, kind of step, template) for each of a part's step sentences."""
  for name, subject in _DATA['subjects'].items():
    for kind in OPERATIONS:
      yield from ((name, kind, template) for template in subject[part][kind])


class Cast:
  """The people and things of a story; fills templates."""

  def __init__(self, rng: random.Random, subject: str):
    gender = rng.choice([*_PRONOUNS])
    self.question = _DATA['subjects'][subject]['question']
    she, her = _PRONOUNS[gender]
    self._words = {
      'name': rng.choice(_DATA['names'][gender]),
      'noun': rng.choice(_DATA['subjects'][subject]['nouns']),
      'she': she,
      'her': her,
    }

  def fill(self, template: str, **words: Any) -> str:
    """Returns the sentence; 'his friends', but 'costs him'."""
    if self._words['she'] == 'he':
      template = template.replace('{her} friends', 'his friends')
    return template.format(**self._words, **words)


def make_story(
  rng: random.Random,
  size: Size,
  part: str = 'train',
  *,
  subject: str | None = None,
  use: tuple[str, str] | None = None,
) -> Story:
  """Samples a story.

  Args:
    rng: Samples everything.
    size: Its length and its numbers.
    part: The part of the templates, 'train' or 'held_out'.
    subject: One of SUBJECTS; None samples it.
    use: The kind and the template of the first step; None samples them.
  """
  about = subject or rng.choice(SUBJECTS)
  sentences, cast = _DATA['subjects'][about][part], Cast(rng, about)
  total = first = rng.randint(*size.first)
  opening = rng.choice(openings(about, part))
  lines, used, steps = [cast.fill(opening, n=first)], [opening], []
  for when in draw_dates(rng, rng.choice(size.steps)):
    kind, template = use if use and not steps else (None, '')
    kind, numbers = _draw_change(rng, total, size.change, kind)
    template = template or rng.choice(sentences[kind])
    change = OPERATIONS[kind].format(**numbers)
    total = compute(total, change)
    sentence = cast.fill(template, when=preposition(when), **numbers)
    step = Step(when, find_word(template, kind), sentence, change, total)
    steps.append(step)
    lines.append(step.sentence)
    used.append(template)
  for template in rng.sample(distractors(part), rng.choice((0, 1, 1, 2))):
    sentence = cast.fill(template, n=rng.randint(*size.change))
    lines.insert(rng.randint(1, len(lines)), sentence)
    used.append(template)
  lines.append(cast.fill(cast.question))
  return Story(first, tuple(steps), ' '.join(lines), tuple(used))


def draw_dates(rng: random.Random, count: int) -> tuple[str, ...]:
  """Samples `count` consecutive days or months."""
  dates = rng.choice((DAYS, MONTHS))
  first = rng.randint(0, len(dates) - count)
  return dates[first : first + count]


def preposition(when: str) -> str:
  """Returns 'On Monday' or 'In May'."""
  return f'{"On" if when in DAYS else "In"} {when}'


def compute(total: int, change: str) -> int:
  """Returns the total after a change such as '- 3 * 4'; products come first."""
  sign, *rest = change.split()
  number = int(rest[0]) * (int(rest[2]) if len(rest) > 1 else 1)
  return {
    '+': total + number,
    '-': total - number,
    '*': total * number,
    '/': total // number,
  }[sign]


def _draw_change(rng, total, change, kind) -> tuple[str, dict[str, int]]:
  """Samples a kind of step (unless given) and its numbers, so that all are integers."""
  for _ in range(1000):
    chosen = kind or rng.choice([*OPERATIONS])
    numbers = {'n': rng.randint(*change)}
    if chosen in ('times', 'share'):
      fits = [n for n in range(3, 10) if chosen == 'times' or total % n == 0]
      numbers['n'] = rng.choice(fits or [3])
    if 'groups' in chosen:
      # A group has at most a third of the largest number, and there are few groups.
      numbers = {'a': rng.randint(3, 9), 'b': rng.randint(2, max(4, change[1] // 3))}
    text = OPERATIONS[chosen].format(**numbers)
    after = compute(total, text)
    whole = chosen not in ('share', 'half') or after * int(text.split()[1]) == total
    if whole and 1 < after <= LARGEST:
      return chosen, numbers
  raise ValueError(f'no step of kind {kind} fits the total {total}')
