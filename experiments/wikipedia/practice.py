"""Practice for a small policy: questions like the training rows', about a whole corpus.

A training row's question gives a template: its words without the names, and the
relations that it asks for. The corpus gives facts (facts.py). A template filled with the
names of other passages is a new question, whose answer follows from the facts. Its
conversation searches for each passage in turn and says what it read there before it goes
on:

  user       Question: When was the director of film Web Of Suspicion born?
  assistant  <tool_call>{"name": "search", "arguments": {"query": " Web Of Suspicion"}}...
  tool       (Title: Web of Suspicion) Web of Suspicion is a 1959 British crime film ...
  assistant  director: Max Varnel.<tool_call>{"name": "search", ...
  tool       (Title: Max Varnel) Max Varnel ( 21 March 1925 – 15 January 1996) was ...
  assistant  date of birth: 21 March 1925. <answer> 21 March 1925</answer>

The training rows' answers are not used, and nothing of the rows that are held out; the
passages of all rows are in the corpus.
"""

import collections
from collections.abc import Iterator, Sequence
import dataclasses
import random
import re

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.retrieval import documents
from agent_r1_jax.retrieval.documents import Document, Hit, Retriever
from experiments.wikipedia import facts, reading, templates

# What becomes of a conversation. 'right'; 'relation': it reads another relation in the
# last passage; 'stop': it answers with what the first one said; 'guess': no search.
FATES = {'right': 0.32, 'relation': 0.08, 'stop': 0.5, 'guess': 0.1}
# Shares of the kinds of questions.
KINDS = {'fact': 0.3, 'chain': 0.42, 'compare': 0.12, 'compare chain': 0.16}
# Of all examples, those without the tool: with passages in the prompt, as Naive RAG asks,
# and with the question alone.
READING, DIRECT = 0.12, 0.03
# Passages in such a prompt.
SHOWN = 4

_TRIES = 10_000
# Relations whose values have a year; of others the number is compared.
_DATED = ('date of birth', 'date of death', 'released', 'formed')


@dataclasses.dataclass(frozen=True)
class Example:
  """A whole conversation; see `small_policy.train`."""

  messages: list[types.Message]
  tools: bool
  kind: str


class Maker:
  """Makes problems of the corpus, and conversations of problems."""

  def __init__(
    self,
    passages: Sequence[Document],
    retriever: Retriever,
    tasks: Sequence[types.Task],
  ):
    """Finds the facts of all passages.

    Args:
      passages: The corpus, as `reading.tidy` gives it.
      retriever: What the search tool asks.
      tasks: Training rows, which give the templates.
    """
    self._corpus = corpus = reading.Corpus(passages, retriever)
    found = [(task, found) for task in tasks if (found := templates.find_template(task))]
    self.templates = collections.defaultdict(list)
    for _, (template, names) in found:
      kind = ('compare' if len(names) == 2 else '') + (
        ' chain' if len(template.relations) == 2 else ''
      )
      self.templates[kind.strip() or 'fact'].append(template)
      if kind == ' chain' and (plain := templates.ask_plainly(template)):
        self.templates['fact'].append(plain)
    # Few questions that people wrote compare what two linked passages say.
    self.kinds = {kind: share for kind, share in KINDS.items() if self.templates[kind]}
    relations = {t.relations[0] for of in self.templates.values() for t in of}
    # The passages to ask about by relation, and by whether a film is asked for.
    self._with = {
      (relation, film): [
        d
        for d in passages
        if corpus.value(d, relation) is not None
        and (facts.is_film(corpus.texts[d.id]) == film or relation == 'director')
      ]
      for relation in sorted(relations)
      for film in (False, True)
    }

  def _hops(self, name, relations) -> tuple[templates.Hop, ...] | None:
    """Reads one relation after the other; None if a passage or a value is not found."""
    hops, query = [], name
    for relation in relations:
      document = self._corpus.find(query)
      value = self._corpus.value(document, relation) if document else None
      if document is None or value is None or document in [hop.document for hop in hops]:
        return None
      hops.append(templates.Hop(query, document, relation, value))
      query = value
    # What a second passage is about must be what the first one named.
    for hop in hops[1:]:
      if reading.name(hop.document.title).lower() != hop.query.lower():
        return None
    return tuple(hops)

  def make(self, kind: str, rng: random.Random) -> templates.Problem | None:
    """Fills a template of a kind with passages of the corpus; None if that fails."""
    template = rng.choice(self.templates[kind])
    film = bool(re.search('film|movie', template.text))
    pool = self._with[template.relations[0], film]
    if len(pool) < 2:
      return None
    chosen = rng.sample(pool, template.text.count('{}'))
    names = [_capitalize(d.title, rng) for d in chosen]
    found = [self._hops(name, template.relations) for name in names]
    ways = [hops for hops in found if hops]
    if len(ways) < len(names):
      return None
    if len(names) == 2:
      return self._compare(template, names, ways)
    (hops,) = ways
    return templates.Problem(template.text.format(*names), hops, '', hops[-1].value)

  def _compare(self, template, names, ways) -> templates.Problem | None:
    question = template.text.format(*names)
    values = [way[-1].value for way in ways]
    hops = tuple(hop for way in ways for hop in way)
    if template.less is None and template.relations[-1] != 'released':
      sign = '=' if values[0] == values[1] else '≠'
      answer = 'yes' if values[0] == values[1] else 'no'
      return templates.Problem(question, hops, f'{values[0]} {sign} {values[1]}.', answer)
    number = r'\d{4}' if template.relations[-1] in _DATED else r'\d+'
    years = [
      int(y.group()) for v in values if (y := re.search(number, v.replace(',', '')))
    ]
    if len(years) < 2 or years[0] == years[1]:
      return None
    less = template.less
    if less is None:
      less = not re.search(r'later|recently|last', template.text)
    first = (years[0] < years[1]) == less
    sign = '<' if years[0] < years[1] else '>'
    compared = f'{years[0]} {sign} {years[1]}.'
    return templates.Problem(question, hops, compared, names[not first])

  def write(
    self, problem: templates.Problem, rng: random.Random, fate: str
  ) -> list[types.Message]:
    """Writes the conversation with the search tool, as a key of FATES has it."""
    messages = [_user(reading.QUESTION.format(question=problem.question))]
    hops, answer, compared = [*problem.hops], problem.answer, problem.compared
    if fate == 'guess':
      others = self._others(hops[-1]) if not compared else [h.query for h in hops]
      yes = answer in ('yes', 'no')
      guess = rng.choice(['yes', 'no'] if yes else others or [answer])
      return [*messages, _answer('', guess)]
    if fate == 'stop' and len(hops) > 1:
      hops, compared = hops[:1], ''
      answer = answer if problem.compared else hops[0].value
    if fate == 'relation' and not compared and (others := self._others(hops[-1])):
      answer = rng.choice(others)
      hops[-1] = hops[-1]._replace(value=answer)
    said = ''
    for hop in hops:
      messages += [_search(hop.query, said), _found(hop.document)]
      said = f'{hop.relation}: {hop.value}.'
    return [*messages, _answer(f'{said} {compared}'.strip(), answer)]

  def write_reading(
    self, problem: templates.Problem, rng: random.Random
  ) -> list[types.Message]:
    """Writes the answer to a prompt with the problem's passages among others."""
    shown = list({hop.document.id: hop.document for hop in problem.hops}.values())
    hits = self._corpus.retriever.search([problem.question], SHOWN)[0]
    others = [hit.document for hit in hits if hit.document not in shown]
    shown += others[: SHOWN - len(shown)]
    rng.shuffle(shown)
    passages = documents.render(
      [Hit(document, 0.0) for document in shown], reading.PASSAGE
    )
    prompt = reading.WITH_PASSAGES.format(passages=passages, question=problem.question)
    said = ' '.join(f'{hop.relation}: {hop.value}.' for hop in problem.hops)
    return [_user(prompt), _answer(f'{said} {problem.compared}'.strip(), problem.answer)]

  def _others(self, hop) -> list[str]:
    """Values of other relations of the same passage."""
    found = (self._corpus.value(hop.document, relation) for relation in templates.ASKED)
    return sorted({value for value in found if value and value != hop.value})


def examples(maker: Maker, seed: int) -> Iterator[Example]:
  """Yields examples for ever.

  Raises:
    ValueError: A kind cannot be made: no template, or no passage fits.
  """
  rng = random.Random(f'two_wiki examples {seed}')
  while True:
    kind = rng.choices(list(maker.kinds), list(maker.kinds.values()))[0]
    fate = rng.choices(list(FATES), list(FATES.values()))[0]
    made = (maker.make(kind, rng) for _ in range(_TRIES))
    problem = next(filter(None, made), None)
    if problem is None:
      raise ValueError(f'kinds: {kind!r} cannot be made of these rows and passages.')
    way = rng.random()
    if way < READING:
      yield Example(maker.write_reading(problem, rng), False, 'reading')
    elif way < READING + DIRECT:
      messages = [_user(reading.QUESTION.format(question=problem.question))]
      yield Example([*messages, _answer('', problem.answer)], False, 'direct')
    else:
      yield Example(maker.write(problem, rng, fate), True, f'{kind}/{fate}')


def _capitalize(title, rng) -> str:
  """A title as the questions write it: each word with a capital, then small letters."""
  name = title if rng.random() < 0.5 else reading.name(title)
  return re.sub(
    r"[^\W\d_](?:[^\W\d_]|['’](?=[a-z]))*",
    lambda match: match.group()[0].upper() + match.group()[1:].lower(),
    name,
  )


def _user(content) -> types.Message:
  return {'role': 'user', 'content': content}


def _search(query, said) -> types.Message:
  call = call_formats.HERMES.render(calls.ToolCall('search', {'query': f' {query}'}))
  return {'role': 'assistant', 'content': f'{said}\n{call}' if said else call}


def _found(document) -> types.Message:
  content = documents.render([Hit(document, 0.0)], reading.PASSAGE)
  return {'role': 'tool', 'name': 'search', 'content': content}


def _answer(said, answer) -> types.Message:
  content = f'{said} <answer> {answer}</answer>'.lstrip()
  return {'role': 'assistant', 'content': content}
