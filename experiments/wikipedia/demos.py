"""Right demonstrations for a data set's rows: a search for each passage a row names."""

from collections.abc import Callable, Mapping, Sequence
import re

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.retrieval.documents import Document, Hit


def demonstrate(
  task: types.Task,
  by_title: Mapping[str, Document],
  search: Callable[[str], Sequence[Hit]],
  render: Callable[[Sequence[Hit]], str],
) -> list[types.Message] | None:
  """Searches for each supporting passage by its name, as earlier passages write it.

  Args:
    task: The row in the agent's form; `info` names the supporting titles.
    by_title: The passages.
    search: The search tool's results.
    render: The search tool's formatting.

  Returns:
    The conversation; None if names do not lead to all passages and to the answer.
  """
  titles, seen = task.info.get('supporting_titles', ()), task.info['question']
  rest = [by_title[title] for title in titles if title in by_title]
  messages = list(task.messages)
  while rest:
    named = [(d, n) for d in rest if (n := _mention(seen, _name(d.title)))]
    if not named:
      return None
    document, query = min(named, key=lambda pair: seen.find(pair[1]))
    hits = search(query)
    if document not in [hit.document for hit in hits]:
      return None
    call = call_formats.HERMES.render(calls.ToolCall('search', {'query': f' {query}'}))
    messages.append({'role': 'assistant', 'content': call})
    messages.append({'role': 'tool', 'name': 'search', 'content': render(hits)})
    seen += '\n' + render(hits)
    rest.remove(document)
  answer = task.answer[0]
  written = answer if answer in ('yes', 'no') else _mention(seen, answer)
  if written is None or len(messages) == len(task.messages):
    return None
  content = f'<answer> {written}</answer>'
  return [*messages, {'role': 'assistant', 'content': content}]


def _name(title: str) -> str:
  """Removes the disambiguation from a title: 'Rush (band)' becomes 'Rush'."""
  return re.sub(r' \([^()]*\)$', '', title)


def _mention(text: str, words: str) -> str | None:
  """Returns words as a text writes them, ignoring case; None if it does not."""
  match = re.search(rf'(?<!\w){re.escape(words)}(?!\w)', text, re.IGNORECASE)
  return match.group() if match else None
