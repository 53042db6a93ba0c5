"""How a small policy is asked, what it reads of a passage, and how it finds one."""

import collections
from collections.abc import Sequence
import dataclasses
import json
import re

from agent_r1_jax import types
from agent_r1_jax.retrieval import documents
from agent_r1_jax.retrieval.documents import Document, Hit, Retriever
from experiments.wikipedia import facts

PASSAGE = f'(Title: {{title}}) {{text:.{facts.READ}}}'
QUESTION = 'Question: {question}'
WITH_PASSAGES = '{passages}\nQuestion: {question}'


def agent_task(task: types.Task) -> types.Task:
  """The question, shortly put; with the search tool or without."""
  return task.ask(QUESTION.format(question=task.info['question']))


def rag_task(task: types.Task, hits: Sequence[Hit]) -> types.Task:
  """The question after passages found for it."""
  shown = documents.render(hits, PASSAGE)
  content = WITH_PASSAGES.format(passages=shown, question=task.info['question'])
  return task.ask(content)


def name(title: str) -> str:
  """A title without what tells it from its namesakes: 'Rush (band)' is called Rush."""
  return re.sub(r' \([^()]*\)$', '', title)


def tidy(passages: Sequence[Document]) -> list[Document]:
  """Returns passages with tidy texts (`facts.tidy`)."""
  return [dataclasses.replace(d, text=facts.tidy(d.text)) for d in passages]


def mention(text: str, words: str) -> str | None:
  """Words as a text writes them, whatever the case; None if they are not in it."""
  match = re.search(rf'(?<!\w){re.escape(words)}(?!\w)', text, re.IGNORECASE)
  return match.group() if match else None


class TitleFirst:
  """A retriever that puts the passages whose title is the query before all others.

  As an encyclopedia's search box does. Titles are compared without their case, and at
  second rank without what stands in brackets: 'Rush' finds 'Rush (band)'.
  """

  def __init__(self, passages: Sequence[Document], retriever: Retriever):
    self._titles, self._names = {}, collections.defaultdict(list)
    for document in passages:
      self._titles[document.title.lower()] = document
      self._names[name(document.title).lower()].append(document)
    self._retriever = retriever

  def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
    """Returns the k best passages of each query, best first."""
    found = self._retriever.search(queries, max(k, 10))
    return [self._order(q, hits)[:k] for q, hits in zip(queries, found, strict=True)]

  def _order(self, query, hits):
    query = query.strip().lower()
    titled = [self._titles[query]] if query in self._titles else []
    named = self._names.get(name(query), [])
    rank = {hit.document.id: -place for place, hit in enumerate(hits)}
    named = sorted(named, key=lambda d: -rank.get(d.id, -len(hits)))
    first = list(dict.fromkeys([*titled, *named]))
    best = hits[0].score if hits else 0.0
    top = [Hit(document, best + 1.0) for document in first]
    return top + [hit for hit in hits if hit.document not in first]


class Corpus:
  """The facts of passages, and what finds them.

  Attributes:
    passages: As `tidy` gives them.
    retriever: What the search tool asks.
    texts: What a policy sees of each passage's text, by its id.
    nations: Words such as American.
  """

  def __init__(self, passages: Sequence[Document], retriever: Retriever):
    self.passages, self.retriever = passages, retriever
    self.texts = {d.id: d.text[: facts.READ] for d in passages}
    self.nations = tuple(facts.find_nationalities(self.texts.values()))
    self._top = {}

  def value(self, document: Document, relation: str) -> str | None:
    """What a passage says of a relation; None if it says nothing."""
    return facts.find(relation, self.texts[document.id], self.nations)

  def find(self, query: str) -> Document | None:
    """What the search tool finds; None for words that JSON would write otherwise."""
    if json.dumps(query, ensure_ascii=False) != f'"{query}"' or len(query) >= 80:
      return None
    if query not in self._top:
      hits = self.retriever.search([query], 1)[0]
      self._top[query] = hits[0].document if hits else None
    return self._top[query]
