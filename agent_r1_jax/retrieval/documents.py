"""Passages, search results, and the rows of the files they are read from.

A retriever is any object with `search(queries, k)`: BM25, Dense, or your own.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
import csv
import dataclasses
import gzip
import itertools
import json
import os
import pathlib
import re
from typing import NamedTuple, Protocol
import unicodedata
import zlib

# How Search-R1 shows passages to the policy, with a space before every name.
PASSAGE = 'Doc {rank} (Title: {title}) {text}'

# Letters, and combining vowels, of scripts without spaces between words.
_UNSPACED = (
  '\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30fa\u30fc-\u30ff'
  '\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\U00020000-\U0003ffff'
)
_WORDS = re.compile(rf'([^\W{_UNSPACED}]+)|([{_UNSPACED}]+)')
_DELIMITERS = {'.csv': ',', '.tsv': '\t'}


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
  """One passage."""

  id: str
  title: str
  text: str

  @property
  def contents(self) -> str:
    """The indexed text: the title on the first line, then the text."""
    return f'{self.title}\n{self.text}'


class Hit(NamedTuple):
  """A retrieved passage; a higher score is better, on the retriever's own scale."""

  document: Document
  score: float


class Retriever(Protocol):
  """Any object that finds passages."""

  def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
    """Finds at most k passages for each query, best first."""
    ...


def render(hits: Sequence[Hit], template: str = PASSAGE) -> str:
  """Formats passages as the policy reads them, one per line.

  Args:
    hits: The passages, best first.
    template: The format of a passage, with {rank} (from 1), {title}, {text}, {id},
      {score}.
  """
  lines = [
    template.format(rank=rank, score=score, **dataclasses.asdict(document))
    for rank, (document, score) in enumerate(hits, 1)
  ]
  return '\n'.join(lines) or 'No passage found.'


def words(text: str) -> list[str]:
  """Splits a text into lower-case words without accents, for lexical retrieval.

  Chinese, Japanese, Thai, Lao, Khmer and Burmese, which write no spaces between words,
  and Korean, which joins particles to words, become characters and pairs of neighbours.
  """
  if text.isascii():
    return re.findall(r'\w+', text.lower())
  letters = unicodedata.normalize('NFKD', text)
  text = ''.join(letter for letter in letters if not unicodedata.combining(letter))
  found = []
  for word, run in _WORDS.findall(unicodedata.normalize('NFKC', text).lower()):
    found += [word] if word else [*run, *map(''.join, itertools.pairwise(run))]
  return found


def check_k(k: int) -> None:
  """Raises ValueError unless `k` is a valid number of passages."""
  if k < 1:
    raise ValueError(f'k is {k}; it must be at least 1')


def read_corpus(path: str | os.PathLike) -> list[Document]:
  """Reads passages from a file of rows (`read_rows`).

  Rows are {id, title, text}, or {id, contents} with the title on the first line of
  the contents, as in Search-R1's Wikipedia.

  Raises:
    ValueError: A row is broken, or repeats an id; names the file, the row and the field.
  """
  return list(_make_documents(read_rows(path)))


def write_corpus(path: str | os.PathLike, passages: Sequence[Document]) -> None:
  """Writes passages as gzipped JSON lines, which `read_corpus` reads.

  Raises:
    ValueError: `read_corpus` would reject a passage; `path` is left unchanged.
  """
  rows = ((f'passages[{i}]', dataclasses.asdict(p)) for i, p in enumerate(passages))
  part = pathlib.Path(f'{path}.part')
  with gzip.open(part, 'wt', compresslevel=3) as file:
    for passage in _make_documents(rows):
      file.write(json.dumps(dataclasses.asdict(passage)) + '\n')
  part.replace(path)


def _make_documents(rows: Iterable[tuple[str, dict]]) -> Iterator[Document]:
  ids = set()
  for where, row in rows:
    passage = _make_document(where, row)
    if passage.id in ids:
      raise ValueError(
        f'{where}: id {passage.id!r} is that of an earlier row; give each passage its own'
      )
    ids.add(passage.id)
    yield passage


def _make_document(where: str, row: dict) -> Document:
  if 'contents' in row and 'text' not in row:
    title, _, text = read_text(where, row, 'contents').partition('\n')
    row = {'id': str(row.get('id', '')), 'title': title.strip('"'), 'text': text}
  return Document(*(read_text(where, row, name) for name in ('id', 'title', 'text')))


def read_text(where: str, row: dict, name: str) -> str:
  """Returns a field that must be a non-blank text; else raises ValueError."""
  value = row.get(name)
  if not isinstance(value, str) or not value.strip():
    raise field_error(where, row, name, 'a text that is not blank')
  return value


def field_error(where: str, row: dict, name: str, expected: str) -> ValueError:
  """Makes the error that names the row, the field, its value and the expected one."""
  actual = f'is {row[name]!r:.80}' if name in row else f'is missing among {sorted(row)}'
  return ValueError(f'{where}: {name!r} {actual}; give {expected}, or drop the row')


def read_rows(path: str | os.PathLike) -> Iterator[tuple[str, dict]]:
  """Yields ('<path>: row <n>', row) for JSON lines or one JSON array, gzipped or plain.

  A JSON object with a list `Data` (TriviaQA) is read as that list. Files named *.csv or
  *.tsv have a header with the fields. Rows count from 1; in JSON lines they are the lines
  of the file.

  Raises:
    ValueError: A row is not a JSON object, or the file is damaged or has no rows.
  """
  empty = True
  for number, row in _number_rows(path):
    empty = False
    where = f'{path}: row {number}'
    if not isinstance(row, dict):
      raise ValueError(f'{where}: expected a JSON object, found {row!r:.80}')
    yield where, row
  if empty:
    raise ValueError(f'{path}: the file holds no rows; is it the right one?')


def _number_rows(path):
  number, where = 1, None  # An array is read at once: json's error names the line.
  try:
    with _open(path) as file:
      suffix = pathlib.Path(str(path).removesuffix('.gz')).suffix
      if delimiter := _DELIMITERS.get(suffix):
        # Decode line by line, so that an error names its row.
        lines = (line.decode('utf-8-sig') for line in file)
        for row in csv.DictReader(lines, delimiter=delimiter):
          yield number, row
          number += 1
        return
      for number, line in enumerate(file, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if number == 1 and line.lstrip().startswith(b'['):
          where = 'the array'
          yield from enumerate(json.loads(line + file.read()), 1)
        elif number == 1 and line.strip() == b'{':
          where = 'the object'
          value = json.loads(line + file.read())
          if not isinstance(value.get('Data'), list):
            raise ValueError(f'one object of {sorted(value)}; a list "Data" was expected')
          yield from enumerate(value['Data'], 1)
        elif line.strip():
          yield number, json.loads(line)
  except FileNotFoundError:
    raise FileNotFoundError(
      f'{path}: there is no such file; give another path. `agent-r1-jax fetch` lists the '
      'data that it can fetch.'
    ) from None
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    where = where or f'row {number}'
    raise ValueError(f'{path}: damaged at {where}: {error}; get it again') from error
  # json's errors, for instance a row nested too deep, or bytes that are not UTF-8.
  except (ValueError, RecursionError, csv.Error) as error:
    where = where or f'row {number}'
    raise ValueError(
      f'{path}: {where}: cannot be read: {error}; fix or drop it'
    ) from error


def _open(path):
  with open(path, 'rb') as file:
    gzipped = file.read(2) == b'\x1f\x8b'
  return gzip.open(path) if gzipped else open(path, 'rb')
