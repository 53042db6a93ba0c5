"""Practice for questions that people wrote about two linked passages, as HotpotQA's are.

Such a question names a passage, and the passage names another one, whose title or a fact
of which is the answer: "What nationality is the band that recorded {}?". A training row
says which of its passages is which, and its answer says which fact is asked for. Its
question is then asked about other passages of the same kinds, film and actor, say, that
are linked alike. Comparisons are of what passages say that their subjects are.
"""

import collections
from collections.abc import Iterator, Sequence
import random
import re
from typing import NamedTuple

from agent_r1_jax import types
from agent_r1_jax.retrieval.documents import Document
from experiments.wikipedia import facts, reading, templates
from experiments.wikipedia.templates import Hop, Problem

# Shares of the kinds of questions; 'compare' is that of practice.py. 'row': a training
# row itself.
KINDS = {
  'row': 0.2,
  'link': 0.16,
  'link chain': 0.24,
  'compare': 0.12,
  'both': 0.1,
  'common': 0.06,
  'which': 0.12,
}
# A question about what two subjects both are, without their names.
_BOTH = re.compile(r'(Are|Were) (both )?\{\},? and \{\},? (both )?.*\?')
_COMMON = re.compile(
  r'(?!.*(?:country|city|state|location|sport|family|company|language|continent|class))'
  r'.*(?:in common|share|mutual|what type|what kind|both what|which type)'
)
# Where a part of a sentence may begin that tells one from the other.
_BEGINS = 'a from in by of based located published developed known born founded formed'
_PLURAL = re.compile(r'(?:[^aeiou]y|s|x|ch|sh)$')


class Link(NamedTuple):
  """A row's question without the name of its first passage.

  Attributes:
    text: The question; '{}' stands for the name.
    subject: The kind of thing that the first passage is about: 'album'.
    target: The kind of thing that the second one is about: 'band'.
    relation: What of the second one is asked for; empty is its name.
    person: Whether the first passage is about a person.
  """

  text: str
  subject: str
  target: str
  relation: str
  person: bool


class Bridges:
  """Makes problems of linked passages; the kinds are those of KINDS."""

  def __init__(self, corpus: reading.Corpus, tasks: Sequence[types.Task]):
    """Finds the kinds and the links of all passages, and what training rows ask."""
    self._corpus, passages = corpus, corpus.passages
    self._by_title = {d.title: d for d in passages}
    words = collections.Counter(
      word for text in corpus.texts.values() for word in re.findall(r'\w+', text)
    )
    self._names = collections.defaultdict(list)
    for document in passages:
      name = reading.name(document.title)
      # A name that is a common word is seldom meant.
      if words[name] < 30:
        self._names[name.split()[0]].append((name, document))
    self._noun = {d.id: facts.find_noun(d.text) for d in passages}
    self._links = {d.id: list(self._linked(d)) for d in passages}
    self._linking = collections.defaultdict(list)
    for document in passages:
      nouns = [self._noun[other.id] for _, other in self._links[document.id]]
      for name, other in self._links[document.id]:
        # Of two that fit, nothing would say which is meant.
        if nouns.count(self._noun[other.id]) == 1:
          self._linking[self._noun[other.id]].append((document, name, other))
    self._of = collections.defaultdict(list)
    for document in passages:
      self._of[self._noun[document.id]].append(document)
    self._nouns = [n for n, of in self._of.items() if n and len(of) > 4]
    self._rows = [problem for task in tasks if (problem := self._row(task))]
    self._templates = [link for task in tasks if (link := self._template(task))]
    self._forms = [
      form for task in tasks if (form := templates.remove_names(task)[0]).count('{}') == 2
    ]

  def alike(self, pair: Sequence[Document], template: templates.Template) -> bool:
    """Whether two passages may be compared as a template does."""
    persons = [facts.is_person(document.text) for document in pair]
    dated = template.relations[-1].startswith('date of')
    nouns = {self._noun[document.id] for document in pair}
    return all(persons) if dated else not any(persons) or len(nouns) == 1

  def make(self, kind: str, rng: random.Random) -> Problem | None:
    """Makes a problem; None if the draw does not lead to one."""
    if kind == 'row':
      return rng.choice(self._rows)
    if kind in ('link', 'link chain'):
      return self._fill(kind, rng)
    return getattr(self, f'_{kind}')(rng)

  def _linked(self, document) -> Iterator[tuple[str, Document]]:
    """The names of other passages in a passage's text."""
    text, seen = self._corpus.texts[document.id], {document.id}
    for word in re.finditer(r"[A-Z\d][\w’'&./-]*", text):
      start = word.start()
      forms = (word.group(), word.group().rstrip(".,'’"), word.group()[:-2])
      for first in dict.fromkeys(forms):
        for name, other in self._names.get(first, ()):
          end = text[start + len(name) : start + len(name) + 1]
          if text.startswith(name, start) and not end.isalnum() and other.id not in seen:
            seen.add(other.id)
            yield name, other

  def _template(self, task) -> Link | None:
    """What a row asks for, if its passages are linked and the answer is found there."""
    question, answer = task.info['question'], task.answer[0]
    titles = task.info.get('supporting_titles', ())
    gold = [self._by_title[t] for t in titles if t in self._by_title]
    for first, second in (gold, gold[::-1]) if len(gold) == 2 else ():
      named = reading.mention(question, reading.name(first.title))
      subject, target = self._noun[first.id], self._noun[second.id]
      linked = second in [d for _, d in self._links[first.id]]
      if not named or not subject or not target or not linked:
        continue
      text = question.replace(named, '{}', 1)
      person, name = facts.is_person(first.text), reading.name(second.title)
      if answer.lower() == name.lower():
        return Link(text, subject, target, '', person)
      for relation in facts.RELATIONS:
        value = self._corpus.value(second, relation)
        if value and reading.mention(answer, value) and 2 * len(value) > len(answer):
          return Link(text, subject, target, relation, person)
    return None

  def _fill(self, kind, rng) -> Problem | None:
    """Asks a row's question about another passage with a link of that kind."""
    link = rng.choice(self._templates)
    if (kind == 'link') == bool(link.relation):
      return None
    first, name, second = rng.choice(self._linking[link.target])
    if self._noun[first.id] != link.subject and (
      rng.random() < 0.8 or facts.is_person(first.text) != link.person
    ):
      return None
    asked = reading.name(first.title)
    if self._corpus.find(asked) != first or '{' in asked:
      return None
    hops = [Hop(asked, first, link.target, name)]
    answer = name
    if link.relation:
      answer = self._corpus.value(second, link.relation)
      if answer is None or self._corpus.find(name) != second:
        return None
      hops.append(Hop(name, second, link.relation, answer))
    question = link.text.replace('{}', asked, 1)
    return Problem(question, tuple(hops), '', answer)

  def _row(self, task) -> Problem | None:
    """A row itself: its passages in the order in which names lead to them."""
    question, answer = task.info['question'], task.answer[0]
    titles = task.info.get('supporting_titles', ())
    rest = [self._by_title[t] for t in titles if t in self._by_title]
    seen, way = question, []
    while rest:
      found = [(q, d) for d in rest if (q := self._query(seen, d))]
      if not found:
        return None
      query, document = min(found, key=lambda pair: seen.find(pair[0]))
      way.append((query, document))
      seen += ' ' + self._corpus.texts[document.id]
      rest.remove(document)
    if answer in ('yes', 'no') or task.info.get('type') == 'comparison':
      if templates.find_template(task):
        return None
      hops = [Hop(q, d, 'kind', self._kind(d)) for q, d in way]
      written = answer if answer in ('yes', 'no') else reading.mention(seen, answer)
      return Problem(question, tuple(hops), '', written) if written else None
    values = [query for query, _ in way[1:]]
    if values and reading.name(way[-1][1].title).lower() == answer.lower():
      # Nothing is asked of the passage that the one before it names.
      way, written = way[:-1], values[-1]
    else:
      written = reading.mention(self._corpus.texts[way[-1][1].id], answer)
      values.append(written)
    if not written:
      return None
    hops = [
      Hop(q, d, self._words(d, value), value)
      for (q, d), value in zip(way, values, strict=True)
    ]
    return Problem(question, tuple(hops), '', written)

  def _query(self, text, document) -> str | None:
    """The words of a text that find a passage: its name, or another name there."""
    named = reading.mention(text, reading.name(document.title))
    for query in [named] if named else facts.find_names(text[:300]):
      if self._corpus.find(query) == document:
        return query
    return None

  def _words(self, document, value) -> str:
    """The words before a value in a passage, or what kind of thing the passage is of."""
    before, found, _ = self._corpus.texts[document.id].partition(value)
    words = re.search(r"(?:[\w'-]+ ){1,3}$", before) if found else None
    return words.group().strip() if words else self._noun[document.id] or 'kind'

  def _kind(self, document) -> str:
    return self._corpus.value(document, 'kind') or 'unknown'

  def _pair(self, rng, same) -> tuple[list[Document], str]:
    """Two passages of which one is of a kind, or both, and the kind."""
    noun = rng.choice(self._nouns)
    other = noun if same else rng.choice(self._nouns)
    pair = [rng.choice(self._of[noun]), rng.choice(self._of[other])]
    return pair, noun

  def _both(self, rng) -> Problem | None:
    """Whether both are of a kind."""
    pair, noun = self._pair(rng, rng.random() < 0.6)
    words = self._kind(pair[0]).split()[-rng.randint(1, 2) :]
    asked = ' '.join(words) if words[-1] == noun else noun
    # A 'film director' is no film: the last words say of what kind something is.
    n = len(asked.split())
    answer = all(self._kind(d).split()[-n:] == asked.split() for d in pair)
    plural = asked + ('es' if _PLURAL.search(asked) and asked[-1] != 'y' else 's')
    plural = plural if asked[-1] != 'y' else asked[:-1] + 'ies'
    form = _BOTH.fullmatch(rng.choice(self._forms))
    if not form:
      return None
    start = form.group(1) + (' both {} and {} ' if form.group(2) else ' {} and {} both ')
    return self._compare(rng, start + plural + '?', pair, 'yes' if answer else 'no')

  def _common(self, rng) -> Problem | None:
    """What both are."""
    form = rng.choice(self._forms)
    pair, noun = self._pair(rng, same=True)
    if not _COMMON.match(form) or facts.is_person(pair[0].text) != bool(
      re.search('profession|occupation|industry|career|role|job', form)
    ):
      return None
    return self._compare(rng, form, pair, noun)

  def _which(self, rng) -> Problem | None:
    """Which one is what the text of one says."""
    pair, noun = self._pair(rng, same=True)
    text = self._corpus.texts[pair[0].id]
    said = re.search(r'\b(?:is|was) (an? [^.]{15,160})[.]', text)
    if not said:
      return None
    words = said.group(1).split()
    starts = [i for i, word in enumerate(words[:-2]) if word in _BEGINS.split()]
    start = rng.choice(starts or [0])
    part = ' '.join(words[start : start + rng.randint(3, 7)]).rstrip(',;')
    if not re.match(r'[a-z]', part) or reading.name(pair[0].title) in part:
      return None
    form = rng.choice(
      [
        f'Which {noun} is {part}, {{}} or {{}}?',
        f'Which is {part}, {{}} or {{}}?',
        f'Which {noun}, {{}} or {{}}, is {part}?',
      ]
    )
    return self._compare(rng, form, pair, reading.name(pair[0].title))

  def _compare(self, rng, form, pair, answer) -> Problem | None:
    pair = rng.sample(pair, 2)
    names = [reading.name(document.title) for document in pair]
    if any(self._corpus.find(n) != d for n, d in zip(names, pair, strict=True)):
      return None
    if pair[0] == pair[1]:
      return None
    hops = [Hop(n, d, 'kind', self._kind(d)) for n, d in zip(names, pair, strict=True)]
    values = [hop.value for hop in hops]
    compared = f'{values[0]} {"=" if values[0] == values[1] else "≠"} {values[1]}.'
    return Problem(form.format(*names), tuple(hops), compared, answer)
