"""Supervised text for a small policy on real questions: demonstrations and practice.

An `Item` is a question, the passages that answer it in the order in which a reader can
find them, and the answer. Items come from the rows of a data set, whose gold titles say
what to search for, and from the corpus itself: questions about what follows some words
of a passage, over one passage or over two that a name links. An item becomes a
conversation with the search tool, right or wrong, or a prompt with passages to read.

Everything is copied: queries from what was read before, answers from what was found. What
a passage gives is first quoted with the words before it (`published by Judges Guild.`):
common words, which the question suggests, lead to the rare ones. A name has a space
before it wherever it stands, so that its tokens are always the same.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import random
import re
from typing import NamedTuple

from agent_r1_jax import types
from agent_r1_jax.agent import calls
from agent_r1_jax.retrieval import documents
from agent_r1_jax.retrieval.documents import Document, Hit, Retriever

# A passage as a small policy reads it: its first characters.
PASSAGE = '(Title: {title}) {text:.240}'
QUESTION = 'Question: {question}'
READING = '{passages}\nQuestion: {question}'

# What becomes of a demonstration. 'stop': answers after too few searches; 'query':
# searches for other words of the question first; 'another': takes another name or number
# of what it read; 'guess': answers without a search.
MIXTURE = {'right': 0.5, 'stop': 0.15, 'query': 0.1, 'another': 0.2, 'guess': 0.05}
# Shares of all examples. 'demonstration': of a row; 'reading': a row's passages in the
# prompt; 'direct': a row's question alone. The others are made from the corpus, half of
# them with the search tool, half with the passages in the prompt.
KINDS = {
  'demonstration': 0.4,
  'reading': 0.1,
  'direct': 0.03,
  'cloze': 0.17,
  'chain': 0.17,
  'described': 0.08,
  'both': 0.05,
}

# Draws after which a kind is given up.
_TRIES = 10_000
# Words that begin sentences and questions, and no name.
_START = (
  'A After Also An And Are As At Before Both But By Did Do Does During For From Had Has '
  'He Her His How If In Is It Its On One She Since The Their They This To Was Were What '
  'When Where Which While Who Whose With'
).replace(' ', '|')
_WORD = r"(?:[A-Z][\w'’&./-]*\w|[A-Z])"
_LINK = r'(?: (?:of|the|and|de|du|la|von|van|in|for))'
_NAME = re.compile(
  rf'\b(?!(?:{_START})\b(?! {_WORD}))(?:The )?(?!(?:{_START})\b){_WORD}'
  rf'(?:,?{_LINK}{{0,2}} {_WORD}|,? \d+\b)*'
)
_NUMBER = re.compile(r'\b(?:\d{1,2} [A-Z][a-z]+ \d{4}|\d[\d,.]*\d|\d)\b')
# 'X is a KIND that ...': what a passage says its subject is.
_KIND = re.compile(
  r'\b(?:is|was|are|were) (?:an?|the) ((?:[A-Za-z][\w-]* ?){1,5}?)(?=[.,;(]| (?:that|of|'
  r'which|who|in|from|by|for|at|on|and|based|known|located|released|directed|written|with|'
  r'whose|to|between|held|made|recorded|published|produced)\b)'
)


class Item(NamedTuple):
  """A question, the passages that answer it in the order of reading, the answer."""

  question: str
  documents: tuple[Document, ...]
  answer: str


@dataclasses.dataclass(frozen=True)
class Example:
  """A whole conversation, and whether its prompt offers the search tool.

  Attributes:
    messages: Ends with the assistant's last reply.
    tools: Whether the search tool is in the prompt.
    kind: A key of KINDS, and for a demonstration '/' and a key of MIXTURE.
    item: What was asked.
  """

  messages: list[types.Message]
  tools: bool
  kind: str
  item: Item


def shuffle(tasks: Sequence[types.Task], seed: int = 0) -> list[types.Task]:
  """Orders tasks by their ids and the seed alone."""
  key = lambda task: hashlib.sha256(f'{seed}/{task.id}'.encode()).digest()
  return sorted(tasks, key=key)


def split(
  tasks: Sequence[types.Task], *sizes: int, seed: int = 0
) -> list[list[types.Task]]:
  """Parts of the given sizes, then the rest; a task's part hangs on its id and the seed.

  Raises:
    ValueError: The sizes leave nothing.
  """
  if sum(sizes) >= len(tasks):
    raise ValueError(f'sizes {sizes} leave nothing of {len(tasks)} tasks; make them less')
  rest, parts = shuffle(tasks, seed), []
  for size in sizes:
    parts.append(rest[:size])
    rest = rest[size:]
  return [*parts, rest]


def agent_task(task: types.Task) -> types.Task:
  """The question, shortly put; with the search tool or without."""
  content = QUESTION.format(question=task.info['question'])
  return dataclasses.replace(task, messages=[_user(content)])


def rag_task(task: types.Task, hits: Sequence[Hit]) -> types.Task:
  """The question after passages found for it."""
  passages = documents.render(hits, PASSAGE)
  content = READING.format(passages=passages, question=task.info['question'])
  return dataclasses.replace(task, messages=[_user(content)])


def name(title: str) -> str:
  """A title without what tells it from its namesakes: 'Rush (band)' is called Rush."""
  return re.sub(r' \([^()]*\)$', '', title)


def read(document: Document) -> str:
  """What a small policy sees of a passage's text: whole words."""
  text = documents.render([Hit(document, 0.0)], '{text:.240}')
  return text if len(text) == len(document.text) else text.rpartition(' ')[0]


class Maker:
  """Makes items of rows and of passages, and conversations of items."""

  def __init__(self, passages: Sequence[Document], retriever: Retriever):
    """Looks up the names.

    Args:
      passages: The corpus.
      retriever: Over it; demonstrations meet what it finds.
    """
    self._passages = passages
    self._by_title = {d.title: d for d in passages}
    self._by_name = {name(d.title): d for d in passages}
    self._top = functools.lru_cache(None)(lambda query: retriever.search([query], 1)[0])
    self._by_noun = collections.defaultdict(list)
    for document in passages:
      if (kind := _kind(document)) and (noun := kind.split()[-1]).islower():
        self._by_noun[noun].append(document)
    self._nouns = [noun for noun, found in self._by_noun.items() if len(found) > 4]

  def find(self, query: str) -> Document | None:
    """What the search tool answers a query with."""
    hits = self._top(query)
    return hits[0].document if hits else None

  def query(self, text: str, document: Document) -> str | None:
    """The words of a text that find a passage: its name, or another name in the text."""
    candidates = [match.group() for match in _NAME.finditer(text)]
    if named := _mention(text, name(document.title)):
      candidates.insert(0, named)
    return next((c for c in candidates if _usable(c) and self.find(c) == document), None)

  def row(self, task: types.Task) -> Item | None:
    """A row's question, if names in it and in its passages lead to the answer."""
    question, answer = task.info['question'], task.answer[0]
    titles = task.info.get('supporting_titles')
    if not titles or not self._by_title.keys() >= set(titles):
      return None
    gold = [self._by_title[title] for title in titles]
    for way in self._ways(question, gold):
      if answer in ('yes', 'no'):
        return Item(question, way, answer)
      compares = task.info.get('type') == 'comparison'
      text = _text(way if compares else way[-1:])
      if written := _mention(f'{question} {text}' if compares else text, answer):
        return Item(question, way, written)
    return None

  def _ways(self, question, gold) -> Iterator[tuple[Document, ...]]:
    """Orders in which a reader of the question can find gold passages."""
    asked = {d: q for d in gold if (q := self.query(question, d))}
    firsts = sorted(asked, key=lambda d: question.find(asked[d]))
    for first in firsts:
      rest = [d for d in gold if d != first]
      if all(self.query(f'{question} {read(first)}', d) for d in rest):
        yield (first, *rest)
    yield from ((first,) for first in firsts)

  def cloze(self, rng: random.Random) -> Item | None:
    """What follows some words of a passage."""
    document = rng.choice(self._passages)
    blanks = _blanks(document)
    if not blanks:
      return None
    words, answer = rng.choice(blanks)
    question = f'{name(document.title)} {words} {_asked(answer, words)}?'
    return Item(question, (document,), answer)

  def chain(self, rng: random.Random) -> Item | None:
    """What follows some words of the passage that another passage names."""
    first = rng.choice(self._passages)
    links = [(w, n) for w, n in _blanks(first) if ' ' in n and n in self._by_name]
    if not links:
      return None
    words, link = rng.choice(links)
    second = self._by_name[link]
    blanks = [(w, a) for w, a in _blanks(second) if a not in read(first)]
    if second == first or not blanks:
      return None
    more, answer = rng.choice(blanks)
    kind = f'the {_kind(second) or "one"} that'
    question = f'{name(first.title)} {words} {kind} {more} {_asked(answer, more)}?'
    return Item(question, (first, second), answer)

  def described(self, rng: random.Random) -> Item | None:
    """What a description of a passage's subject means: the name."""
    document = rng.choice(self._passages)
    text, subject = read(document), name(document.title)
    match = _KIND.search(text)
    if not match or subject in text[match.start() :]:
      return None
    sentence = re.split(r'(?<=[a-z)])\. ', text[match.start(1) :])[0]
    description = ' '.join(sentence.split()[: rng.randint(6, 14)]).rstrip('.,;')
    return Item(f'Which {description}?', (document,), subject)

  def both(self, rng: random.Random) -> Item | None:
    """Whether two are of a kind, or which of two is."""
    if len(self._nouns) < 2:
      return None
    noun, other = rng.sample(self._nouns, 2)
    pair = (rng.choice(self._by_noun[noun]), rng.choice(self._by_noun[other]))
    if rng.random() < 0.5:
      question, answer = 'Which is a {2}, {0} or {1}?', name(pair[0].title)
    else:
      question, answer = 'Are {0} and {1} both {2}s?', 'no'
      if rng.random() < 0.5:
        pair, answer = tuple(rng.sample(self._by_noun[noun], 2)), 'yes'
    pair = rng.sample(pair, 2)
    names = [name(document.title) for document in pair]
    return Item(question.format(*names, noun), tuple(pair), answer)

  def with_search(self, item: Item, rng: random.Random, fate: str) -> list | None:
    """The conversation with the tool; None if the item's passages are not found."""
    question, found = item.question, []
    messages = [_user(QUESTION.format(question=question))]
    if fate == 'query' and (words := _other_words(rng, question)):
      messages += self._search(words, '')
    plan = item.documents[: len(item.documents) - (fate == 'stop')]
    for document in plan if fate != 'guess' else ():
      query = self.query(f'{question} {_text(found)}', document)
      if query is None:
        return None
      messages += self._search(query, _quoted(query, question, found))
      found.append(document)
    answer = item.answer
    if fate in ('stop', 'another', 'guess'):
      answer = _wrong(rng, item, f'{question} {_text(found)}')
    return [*messages, _reply(answer, _quoted(answer, question, found))]

  def _search(self, query: str, said: str) -> list[types.Message]:
    call = calls.HERMES.render(calls.ToolCall('search', {'query': f' {query}'}))
    found = documents.render(self._top(query), PASSAGE)
    return [
      {'role': 'assistant', 'content': f'{said}\n{call}' if said else call},
      {'role': 'tool', 'name': 'search', 'content': found},
    ]

  def with_passages(self, item: Item, rng: random.Random) -> list:
    """The prompt with the item's passages among up to three, and the answer."""
    shown = [*item.documents, *rng.sample(self._passages, 3)]
    shown = shown[: rng.randint(len(item.documents), 3)]
    rng.shuffle(shown)
    passages = documents.render([Hit(document, 0.0) for document in shown], PASSAGE)
    content = READING.format(passages=passages, question=item.question)
    quoted = _quoted(item.answer, item.question, item.documents)
    return [_user(content), _reply(item.answer, quoted)]


def examples(
  tasks: Sequence[types.Task],
  maker: Maker,
  seed: int,
  *,
  kinds: Mapping[str, float] = KINDS,
  mixture: Mapping[str, float] = MIXTURE,
) -> Iterator[Example]:
  """Yields examples for ever.

  Args:
    tasks: Rows to demonstrate; of no other is the question or the answer used.
    maker: Makes items and conversations from the corpus.
    seed: The seed of everything random.
    kinds: Shares of the examples; keys of KINDS.
    mixture: Shares of the demonstrations' fates; keys of MIXTURE.

  Raises:
    ValueError: A kind cannot be made: no row leads to its answer, no passage fits.
  """
  rng = random.Random(f'qa examples {seed}')
  rows = [item for task in tasks if (item := maker.row(task))]
  while True:
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    fate = rng.choices(list(mixture), list(mixture.values()))[0]
    tries = (_example(kind, fate, tasks, rows, maker, rng) for _ in range(_TRIES))
    example = next(filter(None, tries), None)
    if example is None:
      raise ValueError(f'kinds: {kind!r} cannot be made of these rows and passages.')
    yield example


def _example(kind, fate, tasks, rows, maker, rng) -> Example | None:
  if kind == 'direct':
    task = rng.choice(tasks)
    item = Item(task.info['question'], (), task.answer[0])
    question = QUESTION.format(question=item.question)
    return Example([_user(question), _reply(item.answer)], False, kind, item)
  real = kind in ('demonstration', 'reading')
  item = rng.choice(rows or [None]) if real else getattr(maker, kind)(rng)
  if item is None:
    return None
  tools = kind == 'demonstration' or (not real and rng.random() < 0.5)
  if not tools:
    return Example(maker.with_passages(item, rng), False, kind, item)
  fate = fate if real else 'right'
  messages = maker.with_search(item, rng, fate)
  return Example(messages, True, f'{kind}/{fate}', item) if messages else None


def _user(content):
  return {'role': 'user', 'content': content}


def _reply(answer, said=''):
  return {
    'role': 'assistant',
    'content': f'{said} <answer> {answer}</answer>'.lstrip(),
  }


def _quoted(thing, question, found) -> str:
  """The words before a thing in the last passage that has it; nothing if it was asked."""
  if thing in ('yes', 'no') or _mention(question, thing):
    return ''
  for document in reversed(found):
    text = documents.render([Hit(document, 0.0)], PASSAGE)
    if match := re.search(rf'(?<!\w){re.escape(thing)}(?!\w)', text):
      words = re.search(r'(?:\S+\s+){0,3}\S*$', text[: match.start()])
      return f'{words.group() if words else ""}{thing}.'
  return ''


def _mention(text, words) -> str | None:
  """Words as a text writes them, whatever the case; None if they are not in it."""
  match = re.search(rf'(?<!\w){re.escape(words)}(?!\w)', text, re.IGNORECASE)
  return match.group() if match else None


def _usable(query) -> bool:
  """No character that JSON would write otherwise."""
  return json.dumps(query, ensure_ascii=False) == f'"{query}"' and len(query) < 80


def _text(found) -> str:
  return '. '.join(f'{document.title}. {read(document)}' for document in found)


def _kind(document) -> str | None:
  match = _KIND.search(read(document))
  return match.group(1) if match else None


def _things(text) -> list[re.Match]:
  """Names and numbers."""
  found = list(_NAME.finditer(text))
  ends = [match.span() for match in found]
  alone = lambda m: not any(a <= m.start() < b for a, b in ends)
  return found + [match for match in _NUMBER.finditer(text) if alone(match)]


def _blanks(document) -> list[tuple[str, str]]:
  """What to ask about a passage: some words of it, and the name or number after them."""
  text, blanks = read(document), []
  for match in _things(text):
    sentence = re.split(r'(?<=[a-z)])\. ', text[: match.start()])[-1]
    words = ' '.join(sentence.split()[-4:])
    plain = re.fullmatch(r"[\w' -]+", words) and sentence.endswith(' ')
    inside = match.end() < len(text) and match.group() not in document.title
    if plain and inside and len(words.split()) > 1:
      blanks.append((words.removeprefix(f'{name(document.title)} '), match.group()))
  return blanks


def _asked(answer, words) -> str:
  """How to ask for an answer that follows some words."""
  if re.fullmatch(r'\d{4}', answer):
    return 'what year'
  if re.search(r'\b\d{4}$', answer):
    return 'what date'
  if answer[0].isdigit():
    return 'what number'
  return 'whom' if words.split()[-1] in ('by', 'with') else 'what'


def _other_words(rng, question) -> str | None:
  """A name of the question, or some words in a row."""
  words = question.rstrip('?').split()
  start = rng.randrange(max(1, len(words) - 2))
  names = [match.group() for match in _NAME.finditer(question)]
  found = [w for w in (*names, ' '.join(words[start : start + 3])) if _usable(w)]
  return rng.choice(found) if found else None


def _wrong(rng, item, seen) -> str:
  """Another name or number of what was seen; yes or no by chance."""
  if item.answer in ('yes', 'no'):
    return rng.choice(('yes', 'no'))
  others = {match.group() for match in _things(seen)} - {item.answer}
  like = [o for o in others if o[0].isdigit() == item.answer[0].isdigit()]
  return rng.choice(sorted(like or others) or [item.answer])
