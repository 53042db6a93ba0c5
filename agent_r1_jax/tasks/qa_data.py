"""Question files: JSON lines of our own, and files as the data sets' authors ship them.

For training and testing: HotpotQA, 2WikiMultihopQA, MuSiQue. For evaluation also:
Bamboogle, Natural Questions (the open version), TriviaQA, PopQA.

Every task has the bare question as its messages (`qa.agent_task` and the like add the
prompt), the golden answers as its answer, and in info the question, the supporting
titles and all other fields of the row.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any

from agent_r1_jax.retrieval import documents
from agent_r1_jax.types import Task

# The value of `--data=`: a folder of passages and questions. If it also has a TFDS data
# set (`qa_tfds.write`), questions are read from that.
CORPUS, QUESTIONS = 'corpus.jsonl.gz', 'train.jsonl.gz'
# Where `agent-r1-jax fetch` makes such a folder, relative to where it is run.
FETCHED = 'third_party/downloads/{}'

# Makes a row's task; the first argument says where the row is, for errors.
Layout = Callable[[str, dict[str, Any]], Task]


def find(directory: str | os.PathLike) -> tuple[pathlib.Path, pathlib.Path]:
  """Finds the files of passages and questions in a folder that `--data=` names.

  Raises:
    FileNotFoundError: A file is missing; the message says what the folder must hold, and
      how to get it.
  """
  folder = pathlib.Path(directory)
  files = folder / CORPUS, folder / QUESTIONS
  if missing := [path.name for path in files if not path.is_file()]:
    lacks = f'has no {" and no ".join(missing)}'
    there = lacks if folder.is_dir() else 'is no directory'
    raise FileNotFoundError(
      f'--data={directory} {there}. --data= takes a folder of {CORPUS} (rows of id, '
      f'title, text) and {QUESTIONS} (rows of id, question, golden_answers). '
      '`agent-r1-jax fetch hotpotqa` (or 2wikimultihopqa, or musique) downloads the '
      f'official files and makes such a folder, {FETCHED.format("hotpotqa")}.'
    )
  return files


def read_questions(directory: str | os.PathLike, split: str = 'train') -> Sequence[Task]:
  """Reads the questions of a folder that `find` accepts.

  Returns:
    The tasks of its TFDS data set, if it has one, each read on access; else a list of
    the tasks in SPLIT.jsonl.gz, in any layout.
  """
  from agent_r1_jax.tasks import qa_tfds  # Slow to import.

  if built := qa_tfds.find(directory):
    return qa_tfds.read(built, split)
  return load(pathlib.Path(directory) / f'{split}.jsonl.gz')


def load(path: str | os.PathLike, layout: Layout | None = None) -> list[Task]:
  """Reads tasks from JSON lines, one JSON array, CSV or TSV, gzipped or plain.

  Args:
    path: The file.
    layout: `jsonl_row`, `hotpotqa_row`, another function named so, or your own; None
      chooses by the fields of the first row.

  Raises:
    ValueError: A row is broken or repeats an id, the layout is unknown, the file is
      damaged or empty; names the file, the row and the field.
  """
  tasks = {}
  for where, row in documents.read_rows(path):
    layout = layout or recognise(where, row)
    task = layout(where, row)
    if task.id in tasks:
      raise ValueError(f'{where}: id {task.id!r} was taken before; make ids unique')
    tasks[task.id] = task
  return list(tasks.values())


def jsonl_row(where: str, row: dict[str, Any]) -> Task:
  """{id, question, golden_answers, ...}; all other fields go to info."""
  rest = {k: v for k, v in row.items() if k not in ('id', 'golden_answers')}
  return _make_task(where, row, 'id', _read_texts(where, row, 'golden_answers'), rest)


def hotpotqa_row(where: str, row: dict[str, Any]) -> Task:
  """{_id, question, answer, supporting_facts [[title, sentence]], context, ...}."""
  facts = _read_pairs(where, row, 'supporting_facts')
  info = {name: row[name] for name in ('type', 'level', 'answer_id') if name in row}
  info['supporting_titles'] = list(dict.fromkeys(title for title, _ in facts))
  return _make_task(where, row, '_id', _read_texts(where, row, 'answer'), info)


def two_wiki_row(where: str, row: dict[str, Any]) -> Task:
  """Like `hotpotqa_row`, with evidences: [subject, relation, object] for each hop."""
  task = hotpotqa_row(where, row)
  task.info['evidences'] = _read_list(where, row, 'evidences')
  return task


def musique_row(where: str, row: dict[str, Any]) -> Task:
  """{id, question, answer, answer_aliases, paragraphs, question_decomposition, ...}.

  Raises ValueError for unanswerable questions, which MuSiQue-Full adds.
  """
  if not row.get('answerable', True):
    raise ValueError(f'{where}: is unanswerable; take the musique_ans files')
  aliases = _read_texts(where, row, 'answer_aliases') if row.get('answer_aliases') else []
  gold = [p for p in _read_paragraphs(where, row) if p.get('is_supporting')]
  info = {
    'decomposition': _read_list(where, row, 'question_decomposition'),
    'supporting_titles': [documents.read_text(where, p, 'title') for p in gold],
  }
  return _make_task(where, row, 'id', _read_texts(where, row, 'answer') + aliases, info)


def natural_questions_row(where: str, row: dict[str, Any]) -> Task:
  """{question, answer [...]} of NQ-open; the row's number is the id."""
  row = row | {'id': _read_row_number(where)}
  return _make_task(where, row, 'id', _read_texts(where, row, 'answer'), {})


def trivia_qa_row(where: str, row: dict[str, Any]) -> Task:
  """{Question, QuestionId, Answer {Value, Aliases}} of TriviaQA's files."""
  answer = row.get('Answer')
  if not isinstance(answer, dict):
    raise documents.field_error(where, row, 'Answer', 'an object; the test set has none')
  golden = _read_texts(where, answer, 'Value') + (answer.get('Aliases') or [])
  row = {'id': row.get('QuestionId'), 'question': row.get('Question')}
  return _make_task(where, row, 'id', list(dict.fromkeys(golden)), {})


def pop_qa_row(where: str, row: dict[str, Any]) -> Task:
  """{id, question, possible_answers (a JSON list), prop, s_pop, ...} of PopQA's TSV."""
  try:
    golden = json.loads(row['possible_answers'])
  except (TypeError, ValueError):
    golden = None
  golden = _read_texts(where, {'possible_answers': golden}, 'possible_answers')
  info = {'type': row['prop']} if 'prop' in row else {}
  return _make_task(where, row, 'id', golden, info)


def bamboogle_row(where: str, row: dict[str, Any]) -> Task:
  """{Question, Answer} of Bamboogle's CSV; the row's number is the id."""
  renamed = {'id': _read_row_number(where), 'question': row.get('Question')}
  return _make_task(where, renamed, 'id', _read_texts(where, row, 'Answer'), {})


def _read_row_number(where: str) -> str:
  """Returns the number in '<path>: row <number>'."""
  return where.rpartition(' ')[2]


def add_aliases(tasks: Sequence[Task], path: str | os.PathLike) -> list[Task]:
  """Adds the aliases of 2Wiki's answers to the golden answers.

  Args:
    tasks: Tasks of the release whose rows have an `answer_id`.
    path: The release's id_aliases.json, lines of {Q_id, aliases, demonyms}; both count,
      as in its evaluation script v1.1.
  """
  names: dict[str | None, list[str]] = {
    documents.read_text(where, row, 'Q_id'): _read_list(where, row, 'aliases')
    + _read_list(where, row, 'demonyms')
    for where, row in documents.read_rows(path)
  }
  return [
    dataclasses.replace(
      task, answer=task.answer + names.get(task.info.get('answer_id'), [])
    )
    for task in tasks
  ]


def contexts(where: str, row: dict[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields the non-blank paragraphs of an official file's row as (title, text)."""
  if 'paragraphs' in row:
    for paragraph in _read_paragraphs(where, row):
      title = documents.read_text(where, paragraph, 'title')
      yield title, documents.read_text(where, paragraph, 'paragraph_text')
  else:
    for title, sentences in _read_pairs(where, row, 'context'):
      text = ' '.join(sentence.strip() for sentence in sentences)
      if title.strip() and text.strip():
        yield title, text


def recognise(where: str, row: dict[str, Any]) -> Layout:
  """Finds the layout of a row by its fields.

  Raises:
    ValueError: The layout is unknown.
  """
  marks = {
    'golden_answers': jsonl_row,
    'paragraphs': musique_row,
    'evidences': two_wiki_row,
    'supporting_facts': hotpotqa_row,
    'possible_answers': pop_qa_row,
    'QuestionId': trivia_qa_row,
    'Question': bamboogle_row,
  }
  for field, layout in marks.items():
    if field in row:
      return layout
  if {*row} == {'question', 'answer'}:
    return natural_questions_row
  raise ValueError(
    f'{where}: unknown layout, the fields are {sorted(row)}; one of {list(marks)} was '
    'expected, or pass a layout'
  )


def _make_task(where, row, id_field, golden, info):
  question = documents.read_text(where, row, 'question')
  return Task(
    id=documents.read_text(where, row, id_field),
    messages=[{'role': 'user', 'content': question}],
    answer=golden,
    info=info | {'question': question},
  )


def _read_texts(where, row, name):
  value = row.get(name)
  texts = [value] if isinstance(value, str) else value
  if not isinstance(texts, list) or not texts:
    raise documents.field_error(where, row, name, 'a text or a list of texts')
  if not all(isinstance(text, str) and text.strip() for text in texts):
    raise documents.field_error(where, row, name, 'texts that are not blank')
  return texts


def _read_paragraphs(where, row):
  paragraphs = _read_list(where, row, 'paragraphs')
  if not all(isinstance(paragraph, dict) for paragraph in paragraphs):
    raise documents.field_error(where, row, 'paragraphs', 'a list of objects')
  return paragraphs


def _read_pairs(where, row, name):
  pairs = _read_list(where, row, name)
  if not all(isinstance(p, list) and len(p) == 2 for p in pairs):
    raise documents.field_error(where, row, name, 'a list of pairs [title, ...]')
  return pairs


def _read_list(where, row, name):
  if not isinstance(row.get(name), list):
    raise documents.field_error(where, row, name, 'a list')
  return row[name]
