"""A generated encyclopedia: invented names, typed relations, short passages.

Every world depends only on (seed, split, size, part): the same bytes in every process. A
word of a name is a start and an end syllable, and belongs to exactly one split (and, in
'dev' and 'test', to one of three parts), so no word of a test entity was ever trained on,
while all its syllables were. Only words such as 'University' are everywhere.
"""

import dataclasses
import functools
import random
import zlib

from agent_r1_jax.retrieval.documents import Document
from experiments.miniwiki import relations as relations_lib

# In twentieths of the words. 'base': supervised base policy; 'train': RL; 'dev': choosing
# settings; 'test': reported numbers.
SPLITS = {
  'base': range(0, 8),
  'train': range(8, 12),
  'dev': range(12, 16),
  'test': range(16, 20),
}
PARTS = 3
YEARS = range(1900, 2000)

_ONSETS = 'B Br C D Dr F Fl G Gr H J K Kr L M N P Pr R S Sk St T Tr V W Z'.split()
_CODAS = ('', 'l', 'n', 'r', 's', 'm')
_END_ONSETS = 'b d f g k l m n p r s t v z'.split()
_END_CODAS = ('', 'n', 'r', 's', 'l', 'm')
_COMPANY_TYPES = {
  'employer': ('Group', 'Works'),
  'publisher': ('Press', 'Books'),
  'label': ('Records', 'Music'),
}
_TYPE_WORDS = {
  'company': sum(_COMPANY_TYPES.values(), ()),
  'band': ('Trio', 'Band'),
  'university': ('University', 'College'),
}


@functools.cache
def syllables() -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the 180 start and 150 end syllables; a word has only one decomposition."""
  rng = random.Random('miniwiki syllables')
  starts = [o + v + c for o in _ONSETS for v in 'aeiou' for c in _CODAS]
  rude = ('Bum', 'Cum', 'Cun', 'Kun', 'Ni')
  starts = [start for start in starts if start not in rude]
  ends = [o + v + c for o in _END_ONSETS for v in 'aeiou' for c in _END_CODAS]
  return tuple(sorted(rng.sample(starts, 180))), tuple(sorted(rng.sample(ends, 150)))


def share(word: str) -> tuple[str, int]:
  """Returns the split and the part that a name's word belongs to."""
  number = zlib.crc32(word.encode())
  split = next(name for name, shares in SPLITS.items() if number % 20 in shares)
  return split, number // 20 % PARTS


@functools.cache
def _shares() -> dict[str, tuple[str, int]]:
  starts, ends = syllables()
  return {word: share(word) for word in (start + end for start in starts for end in ends)}


@functools.cache
def words(split: str, part: int | None = None) -> tuple[str, ...]:
  """Returns all words of a split (about 5,400 for a fifth), or of one part of it."""
  return tuple(w for w, (s, p) in _shares().items() if s == split and part in (None, p))


@dataclasses.dataclass(frozen=True)
class World:
  """Entities, their facts and their passages.

  Attributes:
    split: The split whose words make the names.
    documents: One passage per entity, with unique titles.
    kinds: From title to kind.
    facts: From title to {relation: value}; years are strings.
  """

  split: str
  documents: tuple[Document, ...]
  kinds: dict[str, str]
  facts: dict[str, dict[str, str]]

  @functools.cached_property
  def passages(self) -> dict[str, str]:
    """From title to text."""
    return {d.title: d.text for d in self.documents}

  @functools.cached_property
  def by_kind(self) -> dict[str, list[str]]:
    """From kind to titles, in order."""
    titles = {kind: [] for kind in relations_lib.KINDS}
    for title, kind in self.kinds.items():
      titles[kind].append(title)
    return titles

  @functools.cached_property
  def by_word(self) -> dict[str, list[str]]:
    """From a name's word to the titles that contain it."""
    titles = {}
    for title in self.kinds:
      for word in title.split():
        titles.setdefault(word, []).append(title)
    return titles


def world(seed: int, split: str, size: int = 900, part: int | None = None) -> World:
  """Makes a world.

  Args:
    seed: Worlds of different seeds are independent samples of the split's words.
    split: One of SPLITS.
    size: Number of passages; at least 100.
    part: Restricts the words to one of PARTS disjoint parts of the split's words.

  Returns:
    The world; the same for the same arguments, in every process.
  """
  if split not in SPLITS:
    raise ValueError(f'split: {split!r} is none of {", ".join(SPLITS)}')
  if size < 100:
    raise ValueError(f'size: {size} passages are too few; use at least 100')
  rng = random.Random(f'miniwiki {seed} {split} {size} {part}')
  pool = list(words(split, part))
  rng.shuffle(pool)
  shares = relations_lib.KINDS.items()
  counts = {kind: max(3, round(size * portion)) for kind, portion in shares}
  titles, others = _titles(rng, counts, pool)
  kinds = {title: kind for kind in relations_lib.KINDS for title in titles[kind]}
  facts = _facts(rng, titles | others)
  prefix = f'{split}-{seed}' if part is None else f'{split}{part}-{seed}'
  passages = tuple(
    Document(f'{prefix}-{i}', title, _passage(rng, kind, title, facts[title]))
    for i, (title, kind) in enumerate(kinds.items())
  )
  return World(split, passages, kinds, facts)


def _titles(rng, counts, pool) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
  """Samples titles by kind, and names without passages; uses up words of `pool`."""

  def take(n):
    taken, pool[:] = pool[:n], pool[n:]
    if len(taken) < n:
      raise ValueError('size: the split has too few words for so large a world')
    return taken

  def pairs(n, firsts, lasts):
    # Each word is in about four names, which are the distractors.
    every = [f'{a} {b}' for a in firsts for b in lasts]
    return rng.sample(every, n)

  people = counts['person'] // 4 + 2
  works = (counts['film'] + counts['book']) // 4 + 2
  names = pairs(counts['film'] + counts['book'], take(works), take(works))
  titles = {
    'person': pairs(counts['person'], take(people), take(people)),
    'city': take(counts['city']),
    'country': take(counts['country']),
    'film': names[: counts['film']],
    'book': names[counts['film'] :],
  }
  for kind, types in _TYPE_WORDS.items():
    names = take(counts[kind])
    titles[kind] = [f'{name} {types[i % len(types)]}' for i, name in enumerate(names)]
  others = {'river': take(counts['city'] // 2 + 1), 'language': take(counts['country'])}
  return titles, others


def _facts(rng, titles) -> dict[str, dict[str, str]]:
  """Samples every relation's value; spouses are mutual."""
  people = rng.sample(titles['person'], len(titles['person']) // 2 * 2)
  half = len(people) // 2
  spouses = dict(zip(people[:half], people[half:], strict=True))
  spouses |= {b: a for a, b in spouses.items()}
  facts = {}
  for kind in relations_lib.KINDS:
    for title in titles[kind]:
      facts[title] = {}
      for relation in relations_lib.OF_KIND[kind]:
        if relation.name == 'spouse':
          value = spouses.get(title)
        else:
          value = _value(rng, relation, titles)
        if value is not None:
          facts[title][relation.name] = value
  return facts


def _value(rng, relation, titles) -> str:
  if relation.target == 'year':
    return str(rng.choice(YEARS))
  values = titles[relation.target]
  if relation.target == 'company':
    types = _COMPANY_TYPES[relation.name]
    values = [v for v in values if v.endswith(types)]
  return rng.choice(values)


def _passage(rng, kind, title, facts) -> str:
  """Writes three to five sentences in random order; the first names the entity."""
  relations = [r for r in relations_lib.OF_KIND[kind] if r.name in facts]
  rng.shuffle(relations)
  if kind == 'person':
    subject, possessive = rng.choice((('She', 'Her'), ('He', 'His')))
  else:
    subject, possessive = 'It', 'Its'
  sentences = []
  for i, relation in enumerate(relations):
    text = rng.choice(relation.texts) if i else relation.texts[0]
    text = text.replace('{s}', subject if i else title).replace('{p}', possessive)
    sentences.append(text.replace('{v}', facts[relation.name]))
  return ' '.join(sentences)
