"""BM25 against its formula, at its edges and on real questions."""

import collections
import itertools
import logging
import math
import os

import numpy as np
import pytest

from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.retrieval.documents import Document
from agent_r1_jax.tasks import qa_data

PASSAGES = [
  Document('0', 'Ann Berg', 'Ann Berg was born in Oslo. Oslo is cold.'),
  Document('1', 'Oslo', 'Oslo is the capital of Norway.'),
  Document('2', 'Bergen', 'Bergen lies in the west of Norway, where it rains.'),
]


def _scores(query, title_weight, k1=1.5, b=0.75):
  """Lucene's BM25, written out."""
  bags = [
    collections.Counter(documents.words(p.title) * title_weight + documents.words(p.text))
    for p in PASSAGES
  ]
  mean = np.mean([bag.total() for bag in bags])
  scores = np.zeros(len(bags))
  for word in documents.words(query):
    df = sum(word in bag for bag in bags)
    idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
    for i, bag in enumerate(bags):
      tf = bag[word]
      scores[i] += idf * tf / (tf + k1 * (1 - b + b * bag.total() / mean))
  return scores


@pytest.mark.parametrize('title_weight', [1, 2])
def test_scores_equal_the_formula(title_weight):
  index = bm25.BM25(PASSAGES, title_weight=title_weight)
  for query in ('capital of Norway', 'Oslo', 'Ann Berg born'):
    (hits,) = index.search([query], 3)
    expected = _scores(query, title_weight)
    found = {hit.document.id: hit.score for hit in hits}
    assert found == pytest.approx({str(i): s for i, s in enumerate(expected) if s > 0})
    assert [hit.score for hit in hits] == sorted(found.values(), reverse=True)


def test_save_and_load(refused, tmp_path):
  index = bm25.BM25(PASSAGES)
  index.save(tmp_path)
  queries = ['capital of Norway', 'zebra']
  assert bm25.BM25.load(tmp_path).search(queries, 3) == index.search(queries, 3)
  documents.write_corpus(tmp_path / 'documents.jsonl.gz', PASSAGES[:2])
  with refused('an index of 3 passages'):
    bm25.BM25.load(tmp_path)
  index.save(tmp_path)
  (tmp_path / 'params.index.json').write_text('{')
  with refused('no BM25 index; save it'):
    bm25.BM25.load(tmp_path)


@pytest.mark.parametrize(
  ('passage', 'message'),
  [(Document('9', 'A', ' '), 'passages[3]'), (Document('0', 'A', 'b'), 'passages[3]')],
)
def test_what_could_not_be_loaded_is_not_saved(refused, tmp_path, passage, message):
  with refused(message):
    bm25.BM25([*PASSAGES, passage]).save(tmp_path / 'index')
  assert not [*tmp_path.glob('index/*.gz')] and not [*tmp_path.glob('index/*.json')]


def test_an_index_that_is_loaded_stays_where_another_is_saved(tmp_path):
  first = bm25.BM25(PASSAGES)
  first.save(tmp_path)
  loaded = bm25.BM25.load(tmp_path)
  before = loaded.search(['capital of Norway'], 3)
  loaded.save(tmp_path)  # Its own files are mapped into memory.
  bm25.BM25(PASSAGES[::-1][:2]).save(tmp_path)
  assert loaded.search(['capital of Norway'], 3) == before
  assert len(bm25.BM25.load(tmp_path).documents) == 2
  assert not [*tmp_path.glob('.new-*')]


@pytest.mark.parametrize('killed_after', [1, 2, 4])
def test_a_save_that_was_cut_off_is_refused(refused, tmp_path, monkeypatch, killed_after):
  bm25.BM25(PASSAGES).save(tmp_path)
  replaced, replace = (
    itertools.count(),
    os.replace,
  )  # The corpus itself takes the first one.

  def until(*paths):
    if next(replaced) == killed_after:
      raise KeyboardInterrupt
    replace(*paths)

  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', until)
    with pytest.raises(KeyboardInterrupt):
      bm25.BM25(PASSAGES[::-1]).save(tmp_path)
  with refused('was cut off; save it'):
    bm25.BM25.load(tmp_path)
  bm25.BM25(PASSAGES[::-1]).save(tmp_path)
  assert bm25.BM25.load(tmp_path).documents == PASSAGES[::-1]


def test_numba_gives_the_same():
  pytest.importorskip('numba')
  queries = ['capital of Norway', 'Oslo', 'zebra', 'Ann Berg born']
  plain, compiled = (
    [
      [(hit.document.id, pytest.approx(hit.score)) for hit in hits]
      for hits in bm25.BM25(PASSAGES, backend=backend).search(queries, 2)
    ]
    for backend in ('numpy', 'numba')
  )
  assert plain == compiled


def test_the_library_narrates_nothing(caplog):
  with caplog.at_level(logging.DEBUG):
    bm25.BM25(PASSAGES).search(['Oslo'], 1)
  assert not [r for r in caplog.records if r.name.startswith('bm25s')]


def test_edges(refused):
  index = bm25.BM25(PASSAGES)
  assert index.search([], 2) == []
  assert index.search(['', '?!', 'zebra'], 2) == [[], [], []]
  empty, found = index.search(['', 'oslo'], 10)
  assert empty == []
  assert [hit.document.id for hit in found] == ['1', '0']
  assert len(bm25.BM25([Document('0', '?', '!'), *PASSAGES]).search(['Oslo'], 1)[0]) == 1
  with refused('passages is empty'):
    bm25.BM25([])


def test_recall_on_two_wiki(data_dir):
  """All 1,255 questions give recall@5 of .67 on the 9,615 passages."""
  folder = data_dir / '2wikimultihopqa'
  index = bm25.BM25(documents.read_corpus(folder / 'corpus.jsonl.gz'))
  tasks = qa_data.load(folder / 'train.jsonl.gz')[:300]
  found = index.search([task.info['question'] for task in tasks], 5)
  recalls = [
    np.mean([gold in {hit.document.id for hit in hits} for gold in golds])
    for hits, golds in zip(found, (t.info['supporting_ids'] for t in tasks), strict=True)
  ]
  assert np.mean(recalls) > 0.65


UNSPACED = {
  'Chinese': ('北京', '北京是中华人民共和国的首都。', '中国的首都是哪里？'),
  'Japanese': ('東京', '東京は日本の首都です。', '日本の首都'),
  'Korean': ('서울', '서울은 대한민국의 수도이다.', '대한민국 수도'),
  'Thai': ('กรุงเทพ', 'กรุงเทพเป็นเมืองหลวงของประเทศไทย', 'เมืองหลวง'),
  'one letter': ('猫', '黒猫が庭で寝ている。', '猫'),
  'mixed': ('GPU', 'H100是一种GPU。', 'H100'),
}


@pytest.mark.parametrize('name', UNSPACED)
def test_scripts_without_spaces_are_searched(name):
  passages = [Document(n, title, text) for n, (title, text, _) in UNSPACED.items()]
  (hits,) = bm25.BM25([*passages, *PASSAGES]).search([UNSPACED[name][2]], 3)
  assert hits[0].document.id == name


def test_misuse(refused):
  for passages in ([], [Document('1', '', '')], [Document('1', '-', '...')]):
    with refused('passages'):
      bm25.BM25(passages)
  (hits,) = bm25.BM25([Document('9', '', ''), *PASSAGES]).search(['Norway'], 9)
  assert {hit.document.id for hit in hits} == {'1', '2'}
  for k in (0, -1):
    with pytest.raises(ValueError, match=f'k is {k}; it must be at least 1'):
      bm25.BM25(PASSAGES).search(['Oslo'], k)
