"""What a miniwiki world can say: kinds of entities, relations, and their wordings."""

import dataclasses

# The kinds of entities that have passages, and their shares of a world.
KINDS = {
  'person': 0.40,
  'city': 0.12,
  'company': 0.14,
  'film': 0.10,
  'book': 0.07,
  'band': 0.07,
  'university': 0.07,
  'country': 0.03,
}


@dataclasses.dataclass(frozen=True)
class Relation:
  """A functional relation: every entity of kind `source` has exactly one value.

  Attributes:
    name: The word agents search with, and the noun of nested questions.
    source: Kind of the subject.
    target: Kind of the value; 'river', 'language' and 'year' have no passages.
    texts: Sentences for passages; {s} subject, {p} its possessive, {v} value. The first
      has {s}, so that it can open a passage.
    asks: Natural questions about {x}; empty for years, which comparisons ask for.
    phrases: Natural noun phrases for the value, where it can be a subject again.
  """

  name: str
  source: str
  target: str
  texts: tuple[str, ...]
  asks: tuple[str, ...] = ()
  phrases: tuple[str, ...] = ()


# Relations between entities: what bridges are built of.
EDGES = (
  Relation(
    'birthplace',
    'person',
    'city',
    ('{s} was born in {v}.', '{s} comes from {v}.'),
    ('Where was {x} born?', 'Which city does {x} come from?'),
    ('the city where {x} was born', 'the home town of {x}'),
  ),
  Relation(
    'spouse',
    'person',
    'person',
    ('{s} is married to {v}.', '{p} spouse is {v}.'),
    ('Who is {x} married to?', 'Who married {x}?'),
    ('the spouse of {x}', 'the person who married {x}'),
  ),
  Relation(
    'employer',
    'person',
    'company',
    ('{s} works for {v}.', '{p} employer is {v}.'),
    ('Which company does {x} work for?', 'Who employs {x}?'),
    ('the company that employs {x}', 'the employer of {x}'),
  ),
  Relation(
    'university',
    'person',
    'university',
    ('{s} studied at {v}.', '{s} is a graduate of {v}.'),
    ('Where did {x} study?', 'Which university did {x} attend?'),
    ('the university where {x} studied', 'the university that {x} attended'),
  ),
  Relation(
    'country',
    'city',
    'country',
    ('{s} is a city in {v}.', '{s} lies in the country {v}.'),
    ('Which country is {x} in?', 'In which country does {x} lie?'),
    ('the country where {x} lies', 'the country of {x}'),
  ),
  Relation(
    'mayor',
    'city',
    'person',
    ('{s} is governed by the mayor {v}.', '{p} mayor is {v}.'),
    ('Who is the mayor of {x}?', 'Who governs {x}?'),
    ('the mayor of {x}', 'the person who governs {x}'),
  ),
  Relation(
    'river',
    'city',
    'river',
    ('{s} stands on the river {v}.', '{s} was built along the {v}.'),
    ('Which river flows through {x}?', 'On which river does {x} stand?'),
  ),
  Relation(
    'founder',
    'company',
    'person',
    ('{s} was founded by {v}.', '{p} founder is {v}.'),
    ('Who founded {x}?', 'Who set up {x}?'),
    ('the person who founded {x}', 'the founder of {x}'),
  ),
  Relation(
    'headquarters',
    'company',
    'city',
    ('{s} has its headquarters in {v}.', '{s} is based in {v}.'),
    ('Where is {x} based?', 'Which city is {x} based in?'),
    ('the city where {x} is based', 'the city with the head office of {x}'),
  ),
  Relation(
    'director',
    'film',
    'person',
    ('{s} is a film directed by {v}.', '{p} director is {v}.'),
    ('Who directed {x}?', 'Who is the director of {x}?'),
    ('the person who directed {x}', 'the director of {x}'),
  ),
  Relation(
    'composer',
    'film',
    'person',
    ('{s} has music composed by {v}.', '{p} composer is {v}.'),
    ('Who composed the music of {x}?', 'Who wrote the music of {x}?'),
    ('the person who composed the music of {x}', 'the composer of {x}'),
  ),
  Relation(
    'actor',
    'film',
    'person',
    ('{s} stars the actor {v}.', '{p} lead actor is {v}.'),
    ('Who stars in {x}?', 'Which actor leads the cast of {x}?'),
    ('the person who stars in {x}', 'the lead actor of {x}'),
  ),
  Relation(
    'author',
    'book',
    'person',
    ('{s} is a book written by {v}.', '{p} author is {v}.'),
    ('Who wrote {x}?', 'Who is the author of {x}?'),
    ('the person who wrote {x}', 'the author of {x}'),
  ),
  Relation(
    'publisher',
    'book',
    'company',
    ('{s} was published by {v}.', '{p} publisher is {v}.'),
    ('Which company published {x}?', 'Who published {x}?'),
    ('the company that published {x}', 'the publisher of {x}'),
  ),
  Relation(
    'singer',
    'band',
    'person',
    ('{s} is a band with the singer {v}.', '{p} singer is {v}.'),
    ('Who sings in {x}?', 'Who is the singer of {x}?'),
    ('the person who sings in {x}', 'the singer of {x}'),
  ),
  Relation(
    'label',
    'band',
    'company',
    ('{s} records for the label {v}.', '{p} label is {v}.'),
    ('Which company does {x} record for?', 'Which label does {x} record for?'),
    ('the company that {x} records for', 'the label of {x}'),
  ),
  Relation(
    'location',
    'university',
    'city',
    ('{s} is located in {v}.', '{p} location is {v}.'),
    ('Where is {x} located?', 'Which city is {x} located in?'),
    ('the city where {x} is located', 'the location of {x}'),
  ),
  Relation(
    'rector',
    'university',
    'person',
    ('{s} is led by the rector {v}.', '{p} rector is {v}.'),
    ('Who leads {x}?', 'Who is the rector of {x}?'),
    ('the person who leads {x}', 'the rector of {x}'),
  ),
  Relation(
    'capital',
    'country',
    'city',
    ('{s} is a country with the capital {v}.', '{p} capital is {v}.'),
    ('What is the capital of {x}?', 'Which city is the capital of {x}?'),
    ('the capital of {x}', 'the city that is the capital of {x}'),
  ),
  Relation(
    'president',
    'country',
    'person',
    ('{s} is ruled by the president {v}.', '{p} president is {v}.'),
    ('Who is the president of {x}?', 'Who rules {x}?'),
    ('the president of {x}', 'the person who rules {x}'),
  ),
  Relation(
    'language',
    'country',
    'language',
    ('{s} has the official language {v}.', '{p} people speak {v}.'),
    ('Which language is spoken in {x}?', 'What do people speak in {x}?'),
  ),
)
# Kind to (what happened, noun of the year): what comparisons ask for.
DATED = {
  'person': ('was born', 'birth year'),
  'film': ('was released', 'release year'),
  'book': ('was released', 'release year'),
  'company': ('was founded', 'founding year'),
  'band': ('was founded', 'founding year'),
  'university': ('was founded', 'founding year'),
}
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
