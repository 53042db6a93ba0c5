"""Facts that the first sentences of an encyclopedia's passage state, by patterns.

A fact is a relation of the passage's subject and its value, as the passage spells it: the
director of a film, the place of birth of a person. The patterns are few and rough. They
find what to ask when practice is made from a corpus (practice.py); nothing of them is
there when a policy answers.
"""

import collections
from collections.abc import Iterable
import functools
import pathlib
import re
import tomllib
from typing import Any

# What a policy sees of a passage's text, in characters.
READ = 480

_MONTH = (
  'January|February|March|April|May|June|July|August|September|October|November|December'
)
_DATE = (
  rf'(?:\d{{1,2}} (?:{_MONTH}),? \d{{3,4}}|(?:{_MONTH}) \d{{1,2}}, \d{{3,4}}'
  rf'|(?:{_MONTH}) \d{{3,4}}|\d{{3,4}})'
)
# A word of a name: initials, an abbreviation, or letters of which the first is a capital.
_WORD = (
  rf'(?!(?:{_MONTH})\b)'
  r"(?:(?:[A-Z]\.)+|(?:Jr|Sr|St|Mt)\.|[^\W\da-z_](?:[\w'’]|-(?=\w))*)"
)
_LINK = r'(?:of|the|de|du|da|di|del|della|la|le|von|van|der|den|zu|bin|ibn|al|dos|av|no)'
_RANK = (
  r'(?:\d+(?:st|nd|rd|th) )?(?:Grand )?(?:Duke|Count|Prince|Earl|King|Lord|Baron|Margrave'
  r'|Elector|Duchess|Countess|Princess|Landgrave|Marquess|Queen|Emperor|Lady|Viscount)'
)
_NAME = (
  rf'{_WORD}(?:(?: {_LINK}){{0,2}} {_WORD})*'
  rf'(?:, {_RANK}(?:(?: {_LINK}){{0,2}} {_WORD})*)?'
)
_TITLES = r'(?:(?:King|Queen|Emperor|Empress|Sultan|HM|Sir|Tsar|Dr\.|Rev\.) )*'


def tidy(text: str) -> str:
  """Puts a space before every name and number, so that it always has the same tokens."""
  text = re.sub(r'\s+', ' ', text)
  text = re.sub(r'(?<=\w)- (?=\w)', '-', text)
  text = re.sub(r'(?<=\w)\(', ' (', text)
  text = re.sub(r'([("“–—])(?=\w)', r'\1 ', text)
  text = re.sub(r'(?<=\w)([–—])', r' \1', text)
  return re.sub(r'(\d)- (?=\d|[A-Z])', r'\1 – ', text)


def is_film(text: str) -> bool:
  """Whether a passage says that its subject is a film, and not a film director."""
  kind = r'\b(?:film|movie|drama|comedy|documentary)\b'
  person = (
    r'(?! ?(?:director|act|maker|producer|editor|composer|critic|writer|score|and))'
  )
  return bool(re.search(rf'\bis (?:an?|the) [^.]{{0,90}}?{kind}{person}', text[:250]))


def find_nationalities(texts: Iterable[str]) -> list[str]:
  """Finds words such as American: those that stand where a passage says what one is."""
  counts = collections.Counter(
    match.group(1)
    for text in texts
    if (match := re.search(r'\b(?:is|was) an? (?:[a-z]+ )?([A-Z][a-z]{3,}) [a-z]', text))
  )
  ends = re.compile(r'(?:ish|an|ese|ch|i|ek|wiss|ic)$')
  no = {'Christian', 'Roman', 'Republican', 'Catholic', 'Grand', 'Olympic'}
  return [w for w, n in counts.items() if n > 2 and ends.search(w) and w not in no]


# What a word in angle brackets stands for in the patterns.
_PARTS = {
  # Words between 'by' and a name: 'the American film director', 'his second wife'.
  'person': rf'(?:the |an? |<nation>(?:-<nation>)? |[a-z][\w/-]*,? ){{0,7}}?{_TITLES}'
  rf'(?P<v>(?!<nation>\b){_NAME})',
  'place': rf'(?:the )?(?P<v>{_NAME})',
  'thing': rf'(?:the |an? )?(?P<v>{_NAME})',
  'kind': '(?:film|drama|comedy|documentary|movie|western|musical)',
  'song': '(?:song|single|album|track|ballad|recorded|performed|sung|hit|tune)',
  'his': '(?:[Hh]is|[Hh]er)',
  'name': _NAME,
  'month': f'(?:{_MONTH})',
  'date': _DATE,
}
# Tables of regular expressions; each says what it is for.
PATTERNS: dict[str, Any] = tomllib.loads(
  pathlib.Path(__file__).with_name('patterns.toml').read_text(encoding='utf-8')
)


@functools.lru_cache(4)
def _compile(nations: tuple[str, ...]) -> dict[str, list[re.Pattern]]:
  """Puts the parts and the nationalities of a corpus into the patterns."""
  # Nothing fits '(?!)': a corpus may name no nationality.
  nation = '|'.join(sorted(nations, key=len, reverse=True)) or '(?!)'
  parts = {**_PARTS, 'nation': f'(?:{nation})'}

  def fill(pattern):
    for name, part in parts.items():
      pattern = pattern.replace(f'<{name}>', part)
    return re.compile(pattern)

  return {relation: [fill(p) for p in of] for relation, of in PATTERNS['facts'].items()}


def find(relation: str, text: str, nations: Iterable[str]) -> str | None:
  """Finds the value of a relation in a passage's text; None if no pattern fits.

  Raises:
    KeyError: No such relation.
  """
  if not re.search(PATTERNS['subjects'].get(relation, ''), text[:150]):
    return None
  for pattern in _compile(tuple(nations))[relation]:
    if match := pattern.search(text):
      return re.sub("['’]s?$", '', match['v'])
  return None
