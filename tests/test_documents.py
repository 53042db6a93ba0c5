"""Corpora as people have them, broken ones included."""

import codecs
import gzip
import json

import pytest

from agent_r1_jax.retrieval import documents
from agent_r1_jax.retrieval.documents import Document, Hit

ROW = {'id': 'a', 'title': 'Ann', 'text': 'Ann was born in Oslo.'}
LINE = json.dumps(ROW).encode()


def _file(tmp_path, content, name='corpus.jsonl'):
  path = tmp_path / name
  path.write_bytes(content)
  return path


@pytest.mark.parametrize(
  'content',
  [
    LINE + b'\n\n',
    gzip.compress(LINE, mtime=0),
    json.dumps([ROW], indent=1).encode(),
    codecs.BOM_UTF8 + json.dumps([ROW]).encode(),
    b'{"id": "a", "contents": "\\"Ann\\"\\nAnn was born in Oslo."}',
  ],
  ids=['lines', 'gzip', 'array', 'mark', 'search-r1'],
)
def test_the_forms_of_a_corpus(tmp_path, content):
  passages = documents.read_corpus(_file(tmp_path, content))
  assert passages == [Document('a', 'Ann', 'Ann was born in Oslo.')]
  assert passages[0].contents == 'Ann\nAnn was born in Oslo.'


def test_the_mark_of_a_spreadsheet_is_no_name(tmp_path):
  content = codecs.BOM_UTF8 + b'id,title,text\na,Ann,Ann was born in Oslo.\n'
  (passage,) = documents.read_corpus(_file(tmp_path, content, 'corpus.csv'))
  assert passage == Document('a', 'Ann', 'Ann was born in Oslo.')


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'', 'holds no rows'),
    (b' \n \n', 'holds no rows'),
    (b'[]', 'holds no rows'),
    (LINE + b'\n{"id": "b"', r'row 2: cannot be read'),
    (LINE + b'\n"text"\n', r'row 2: expected a JSON object'),
    (LINE + b'\n' + LINE.replace(b'Oslo', b'\xff'), r'row 2: cannot be read'),
    (LINE + b'\n\n{"id": "b", "title": "B"}', r"row 3: 'text' is missing among \['id'"),
    (b'{"id": "b", "title": 3, "text": "t"}', r"row 1: 'title' is 3; give a text"),
    (b'{"id": "b", "title": "B", "text": " "}', r"row 1: 'text' is ' '"),
    (LINE + b'\n\n' + LINE, r"row 3: id 'a' is that of an earlier row; give each"),
    (gzip.compress(LINE * 100, mtime=0)[:-20], r'damaged at row 1.*get it again'),
    (
      gzip.compress(LINE, mtime=0)[:10] + b'\xff' * 20,
      'damaged at row 1: .*invalid block',
    ),
    (gzip.compress(LINE, mtime=0)[:-8] + bytes(8), 'damaged at row 1: CRC'),
  ],
)
def test_a_broken_row_is_named(refused, tmp_path, content, message):
  with refused('corpus.jsonl') as error:
    documents.read_corpus(_file(tmp_path, content))
  error.match(message)


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.csv', b'id,title\n1,"A\nB"\n2,B\n3,\xff\n', 'row 3: cannot be read'),
    ('a.tsv', b'id\n1\n' + b'x' * (1 << 18), 'row 2: cannot be read'),
    ('a.json', b'[{"id": 1},\n{"id": 2},\n{3}]', 'the array: cannot be'),
    ('a.json', b'{\n"Data": 3}', 'Data'),
  ],
)
def test_where_a_file_is_broken(refused, tmp_path, name, content, message):
  with refused(message):
    list(documents.read_rows(_file(tmp_path, content, name)))


def test_words_fold_case_and_accents():
  assert documents.words("Fannā Khusraw's 2nd-Été") == 'fanna khusraw s 2nd ete'.split()


def test_render():
  hits = [Hit(Document('a', 'Ann', 'Born {here}.'), 2.5), Hit(Document('b', 'B', 't'), 1)]
  shown = documents.render(hits)
  assert shown == 'Doc 1 (Title: Ann) Born {here}.\nDoc 2 (Title: B) t'
  assert documents.render(hits, '{id}={score}') == 'a=2.5\nb=1'
  assert documents.render([]) == 'No passage found.'


def test_a_row_that_is_too_deep_is_named(refused, tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"id": "1"}\n' + '[' * 100_000 + ']' * 100_000 + '\n')
  with refused('rows.jsonl'):
    list(documents.read_rows(path))
