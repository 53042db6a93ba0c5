"""Converts the files of HotpotQA, 2Wiki and MuSiQue to a folder that `--data=` takes.

The folder gets `corpus.jsonl.gz` (the paragraphs of all rows, each once: id, title, text)
and a file of questions for each official file (`train.jsonl.gz`, `dev.jsonl.gz`: id,
question, golden_answers, type, level, supporting_titles, supporting_ids, origin, and what
else the official row says), and these files as a TFDS data set. From it
`qa_data.read_questions` reads the tasks that `qa_data.load` reads from the official file.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import gzip
import json
import os
import pathlib
import shutil
from typing import Any, NamedTuple

from agent_r1_jax.retrieval import documents
from agent_r1_jax.tasks import qa_data
from agent_r1_jax.types import Task

# A file with a larger share of broken rows is not the official one.
_MAX_BROKEN = 0.01


class Converted(NamedTuple):
  """Counts of what was converted.

  Attributes:
    questions: Split -> number of rows.
    passages: Number of passages.
    broken: A message for each row that was left out.
  """

  questions: dict[str, int]
  passages: int
  broken: list[str]


def convert(
  files: Mapping[str, str | os.PathLike],
  directory: str | os.PathLike,
  aliases: str | os.PathLike | None = None,
) -> Converted:
  """Writes the corpus and the questions of official files.

  Reading a file that is one JSON array takes five to six times its size in memory (3 GB
  for the 540 MB of HotpotQA's training file).

  Args:
    files: Split ('train', 'dev') -> official file. All give passages to the corpus.
    directory: The folder to write to. A file gets its name when it is complete.
    aliases: 2Wiki's id_aliases.json, whose names become golden answers too.

  Raises:
    ValueError: A file is damaged or empty, or more than 1 in 100 of its rows are broken.
  """
  from agent_r1_jax.tasks import qa_tfds  # Slow to import.

  directory = pathlib.Path(directory)
  corpus: dict[tuple[str, str], str] = {}
  counts, broken = {}, []
  for split, path in files.items():
    left_out: list[str] = []
    tasks = list(_read_tasks(split, path, corpus, left_out))
    if aliases is not None:
      tasks = qa_data.add_aliases(tasks, aliases)
      unique = lambda answers: list(dict.fromkeys(answers))
      tasks = [dataclasses.replace(t, answer=unique(t.answer)) for t in tasks]
    total = len(tasks) + len(left_out)
    if len(left_out) > _MAX_BROKEN * total:
      raise ValueError(
        f'{path}: {len(left_out)} of {total} rows are broken, such as {left_out[0]}. Is '
        'it the official file?'
      )
    counts[split] = _write(directory / f'{split}.jsonl.gz', map(_to_row, tasks))
    broken += left_out
  shutil.rmtree(directory / qa_tfds.Questions.name, ignore_errors=True)
  written = {split: qa_data.load(directory / f'{split}.jsonl.gz') for split in files}
  qa_tfds.write(written, directory, name='all')
  passages = (
    {'id': id, 'title': title, 'text': text} for (title, text), id in corpus.items()
  )
  return Converted(counts, _write(directory / qa_data.CORPUS, passages), broken)


def _read_tasks(split, path, corpus, broken) -> Iterator[Task]:
  """Yields the tasks of a file; adds passages to `corpus`, messages to `broken`."""
  layout, task_ids = None, set()
  for where, row in documents.read_rows(path):
    layout = layout or qa_data.recognise(where, row)
    try:
      task, contexts = layout(where, row), list(qa_data.contexts(where, row))
      if task.id in task_ids:
        raise ValueError(f'{where}: id {task.id!r} was taken before')
    except ValueError as error:
      broken.append(str(error))
      continue
    task_ids.add(task.id)
    if 'paragraphs' in row:  # MuSiQue says its type in the id: 2hop__1_2, 3hop1__1_2_3.
      task.info['type'] = task.id.partition('__')[0]
    # Titles repeat in the corpus, but not in a row: an id is looked up in its own row.
    ids = {}
    for passage in contexts:
      corpus.setdefault(passage, f'p{len(corpus)}')
      ids.setdefault(passage[0], corpus[passage])
    titles = task.info['supporting_titles']
    task.info['supporting_ids'] = [ids[title] for title in titles if title in ids]
    task.info['origin'] = split
    yield task


def _to_row(task: Task) -> dict[str, Any]:
  row = {'id': task.id, 'question': task.info['question']}
  return row | {'golden_answers': task.answer} | task.info


def _write(path: pathlib.Path, rows) -> int:
  """Writes gzipped JSON lines atomically; the same rows give the same bytes."""
  path.parent.mkdir(parents=True, exist_ok=True)
  part, count = path.with_name(path.name + '.part'), 0
  with part.open('wb') as raw, gzip.GzipFile('', 'wb', 6, raw, mtime=0) as file:
    for row in rows:
      file.write(json.dumps(row, ensure_ascii=False).encode() + b'\n')
      count += 1
  part.replace(path)
  return count
