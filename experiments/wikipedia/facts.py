"""Facts that the first sentences of an encyclopedia's passage state, by patterns.

A fact is a relation of the passage's subject and its value, as the passage spells it: the
director of a film, the place of birth of a person. The patterns are few and rough. They
find what to ask when practice is made from a corpus (practice.py); nothing of them is
there when a policy answers.
"""

import collections
from collections.abc import Iterable
import functools
import re

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
# The patterns of each relation, the first that fits counts; the group `v` is the value.
_PATTERNS = {
  'director': [
    r'[Dd]irect(?:ed|ion)(?:,? (?:and )?[\w-]+,?){0,5}? by <person>',
    r'<kind> by (?:[a-z]+ )*director <person>',
    r'(?P<v><name>) directed',
    r'<kind>[^.]{0,30} by <person>',
    r'\bdirector <person>',
  ],
  'composer': [
    r'(?:[Mm]usic|[Ss]core|soundtrack|songs?)[^.]{0,60}? by <person>',
    r'(?:composed|written|penned)(?: and \w+)? by <person>',
    r'(?:composer|songwriter)s? <person>',
  ],
  'performer': [r'<song>[^.]{0,50}? (?:by|from|of) <person>', r'\bby <person>'],
  'father': [
    r'<his> (?:parents|father),? (?:was |is |were )?<person>',
    r'(?:son|daughter|child|heir)(?: and [\w ]{3,20}?)? (?:of|to) <person>',
  ],
  'mother': [
    r'<his> mother,? (?:was |is )?<person>',
    r'(?:son|daughter|child|children) (?:of|to)[^.]{3,70}? and <person>',
    r'<his> parents were[^.]{3,60}? and <person>',
  ],
  'spouse': [
    r'(?:wife|husband|consort|widow|spouse|queen) (?:of|to) <person>',
    r'<his> (?:\w+ )?(?:wife|husband),? (?:was |is )?<person>',
    r'[Mm]arried(?: to)? <person>',
    r'marriage (?:to|with) <person>',
    r'\b(?:wife|husband),? <person>',
  ],
  'child': [
    r'(?:father|mother|parent) of <person>',
    r'<his> (?:\w+ )?(?:son|daughter),? (?:was |is )?<person>',
  ],
  'sibling': [
    r'(?:brother|sister|sibling) (?:of|to) <person>',
    r'(?:brother|sister),? <person>',
  ],
  'date of birth': [
    r'\( ?[^()]*?\b(?:[Bb]orn|b\.)[^()]*?(?P<v><date>)',
    r'\( ?(?:c\. ?)?(?P<v><date>)[^()]*?[–—-]',
    r'\( ?[^()\d]*(?P<v><date>)[^()]*?[–—-][^()]*?<date>',
    r'\b[Bb]orn[^.()]{0,40}?(?P<v><date>)',
  ],
  'date of death': [
    r'\([^()]*?<date>[^()]*?[–—-][^()]*?(?P<v><date>)',
    r'\( ?[^()]*?\b(?:died|d\.)[^()]*?(?P<v><date>)',
    r'\bdied[^.()]{0,60}?(?P<v><date>)',
  ],
  'place of birth': [
    r'\b[Bb]orn[^.;()]{0,50}? (?:in|at|near) <place>',
    r'\( ?(?:born )?<date>,? (?:in |at )?<place>',
    r'\bnative of <place>',
  ],
  'place of death': [
    r'\b(?:died|killed|drowned|death)[^.;()]{0,50}? (?:in|at|near) <place>',
    r'[–—-] ?<date>,? (?:in |at )?<place>',
  ],
  'cause of death': [
    r'(?:from|of) (?:an? )?(?P<v>(?:[a-z]+ )?(?:attack|cancer)|stroke|pneumonia'
    r'|tuberculosis|suicide|dysentery|leukemia|heart failure)',
    r'\b(?:died|death) (?:from|of|due to)(?: an?)? (?P<v>[a-z]+(?: [a-z]+)?)(?=[,.])',
  ],
  'nationality': [
    r'\b(?:is|was) (?:an?|the) (?:[\w-]+ ){0,4}?(?P<v><nation>)\b',
    r'\b(?P<v><nation>)\b',
  ],
  'education': [
    r'(?:studied|graduated?|educated|degree|alumnus|student)[^.;]{0,50}? '
    r'(?:at|from|of) <thing>',
    r'attended <thing>',
  ],
  'workplace': [
    r'(?:professor|taught|teaches|works?|worked|lecturer|faculty)[^.;]{0,50}? '
    r'(?:at|for|of) <thing>'
  ],
  'burial': [r'(?:buried|interred|entombed|tomb)[^.;]{0,30}? (?:in|at) <thing>'],
  'award': [r'(?:won|received|awarded|recipient of|winner of) <thing>'],
  'founder': [
    r'(?:founded|established|created|started)[^.;]{0,30}? by <person>',
    r'publish\w+ by <person>',
  ],
  'released': [
    r'\b(?:is|was) (?:an?|the) (?:[a-z]+ )?(?P<v>\d{4})\b',
    r'(?:released|premiered)[^.]{0,40}?(?P<v>\d{4})',
  ],
  'country': [
    r'(?<=, )(?P<v>[A-Z][a-z]+(?: [A-Z][a-z]+)?)(?=[.])',
    r'\bin (?:the )?(?P<v>[A-Z][a-z]+)\b(?=[.,;])',
  ],
  'formed': [
    r'(?:formed|founded|established|started|opened|built|created)[^.]{0,50}? in '
    r'(?:<month> )?(?P<v>\d{4})'
  ],
  'population': [r'population[^.]{0,40}? (?P<v>\d[\d,]*\d)'],
  'height': [r'(?P<v>\d[\d,.]*)[ -]?(?:m|metres|meters|ft|feet|foot)\b'],
  'species': [r'(?P<v>\d[\d,]*) (?:[a-z]+ )?species'],
}
# Words that a passage has whose subject may have the relation.
_SUBJECT = {
  'director': r'\b[Ff]ilm|[Cc]omedy|[Dd]ocumentary',
  'composer': r'\b[Ff]ilm|[Ss]ong|[Ss]ingle',
  'performer': r'\b[Ss]ong|[Ss]ingle|[Aa]lbum',
  'founder': r'[Mm]agazine|[Cc]ompany|[Oo]rganization|[Nn]ewspaper',
  'released': r'\b[Ff]ilm|[Ss]ong|[Aa]lbum|[Cc]omedy',
  'country': r'village|town|school|[Uu]niversity|river|lake|mountain|station|airport',
}


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

  return {relation: [fill(p) for p in of] for relation, of in _PATTERNS.items()}


def find(relation: str, text: str, nations: Iterable[str]) -> str | None:
  """Finds the value of a relation in a passage's text; None if no pattern fits.

  Raises:
    KeyError: No such relation.
  """
  if not re.search(_SUBJECT.get(relation, ''), text[:150]):
    return None
  for pattern in _compile(tuple(nations))[relation]:
    if match := pattern.search(text):
      return re.sub("['’]s?$", '', match['v'])
  return None
