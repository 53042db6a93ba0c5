"""What the questions of training rows ask for: their words without the names.

A question's words name a relation (`date of birth`), or two in a row: the first leads to
the passage that has the second.
"""

from collections.abc import Sequence
import re
from typing import NamedTuple

from agent_r1_jax import types
from agent_r1_jax.retrieval.documents import Document
from experiments.wikipedia import facts, reading

# Relation -> words of a question that ask for it.
ASKED: dict[str, str] = facts.PATTERNS['asked']
_BETWEEN: dict[str, str] = facts.PATTERNS['between']


class Template(NamedTuple):
  """A question without its names.

  Attributes:
    text: The question; '{}' stands for a name.
    relations: What is read on the way, for each name the same.
    less: For comparisons: whether the lesser year wins; None if equality is asked, or if
      nothing is compared.
  """

  text: str
  relations: tuple[str, ...]
  less: bool | None = None


class Hop(NamedTuple):
  """A search, and what the passage that it finds says."""

  query: str
  document: Document
  relation: str
  value: str


class Problem(NamedTuple):
  """A question, how it is solved, what is said of a comparison, and the answer."""

  question: str
  hops: Sequence[Hop]
  compared: str
  answer: str


def remove_names(task: types.Task) -> tuple[str, list[str]]:
  """Puts '{}' for the supporting titles in a question, and returns these names."""
  text, names = task.info['question'], []
  titles = task.info.get('supporting_titles', ())
  for title in sorted(titles, key=len, reverse=True):
    for name in (title, reading.name(title)):
      pattern = rf'(?<!\w){re.escape(name)}(?: \([^()]*\))?(?!\w)'
      if match := re.search(pattern, text, re.IGNORECASE):
        text = text[: match.start()] + '{}' + text[match.end() :]
        names.append((match.start(), match.group()))
        break
  return text, [name for _, name in sorted(names)]


def find_template(task: types.Task) -> tuple[Template, list[str]] | None:
  """Takes the names out of a training row's question, and finds what it asks for."""
  text, names = remove_names(task)
  if text.count('{}') != len(names) or not names:
    return None
  relations = _find_relations(text, len(names))
  return (relations, names) if relations else None


def _find_relations(text, names) -> Template | None:
  between = [r for r, words in _BETWEEN.items() if re.search(words, text)][:1]
  if names == 2:
    for compared in facts.PATTERNS['compared']:
      if re.search(compared['words'], text):
        return Template(text, (*between, compared['relation']), compared.get('less'))
    return None
  for words, relations in facts.PATTERNS['kin'].items():
    if words in text:
      return Template(text, tuple(relations))
  rest = re.sub('|'.join(_BETWEEN.values()), ' ', text)
  for relation, words in ASKED.items():
    if re.search(words, rest):
      return Template(text, (*between, relation))
  return Template(text, tuple(between)) if between else None


def ask_plainly(template) -> Template | None:
  """Asks for the last relation of a chain alone: 'When was {} born?'."""
  between = (
    r"(?:the )?(?:director|composer|performer|founder) of (?:film |song )?\{\}|\{\}'s "
    r'(?:father|mother|husband|wife)\b|the (?:father|mother|husband|wife) of \{\}'
  )
  text, count = re.subn(between, '{}', template.text)
  return Template(text, template.relations[1:]) if count == 1 else None
