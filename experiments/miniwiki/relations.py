"""The vocabulary of miniwiki worlds: kinds of entities, relations, and their wordings."""

import dataclasses
import pathlib
import tomllib


@dataclasses.dataclass(frozen=True)
class Relation:
  """A functional relation: every entity of kind `source` has exactly one value.

  Attributes:
    name: The word agents search with, and the noun of nested questions.
    source: Kind of the subject.
    target: Kind of the value; 'river', 'language' and 'year' have no passages.
    texts: Sentences for passages; {s} subject, {p} its possessive, {v} value. The first
      has {s}, so that it can open a passage.
    asks: Natural questions about {x}; empty for years, which only comparisons use.
    phrases: Natural noun phrases for the value, if it can be a subject in turn.
  """

  name: str
  source: str
  target: str
  texts: tuple[str, ...]
  asks: tuple[str, ...] = ()
  phrases: tuple[str, ...] = ()


_FILE = pathlib.Path(__file__).with_suffix('.toml')
_READ = tomllib.loads(_FILE.read_text(encoding='utf-8'))
# The kinds of entities that have passages, and their shares of a world.
KINDS: dict[str, float] = _READ['kinds']
# From a kind to (event, noun of the year), for comparisons.
DATED: dict[str, tuple[str, str]] = {k: tuple(v) for k, v in _READ['dated'].items()}
# Relations between entities, from which bridges are built.
EDGES = tuple(
  Relation(
    of['name'],
    of['source'],
    of['target'],
    *(tuple(of.get(wordings, ())) for wordings in ('texts', 'asks', 'phrases')),
  )
  for of in _READ['relations']
)
_YEARS_OF = tuple(
  Relation(
    'year',
    kind,
    'year',
    (f'{{s}} {happened} in the year {{v}}.', f'{{p}} {noun} is {{v}}.'),
  )
  for kind, (happened, noun) in DATED.items()
)
OF_KIND = {k: tuple(r for r in EDGES + _YEARS_OF if r.source == k) for k in KINDS}
