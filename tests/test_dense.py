"""Dense retrieval: exact against NumPy, approximate, kept on disk, and misused."""

import faiss
import numpy as np
import pytest

from agent_r1_jax.retrieval import dense
from agent_r1_jax.retrieval.documents import Document

# Other tests use the cores too, and FAISS's threads spin while they wait for them.
faiss.omp_set_num_threads(1)
PASSAGES = [Document(str(i), f'Title {i}', f'text {i}') for i in range(600)]


def _encode(texts):
  """A vector of the number at the end of the text."""
  seeds = [int(text.split()[-1]) for text in texts]
  vectors = [np.random.default_rng(seed).normal(size=16) for seed in seeds]
  return np.stack(vectors).astype(np.float32)


def _ids(found):
  return [[hit.document.id for hit in hits] for hits in found]


def test_flat_is_exact():
  index = dense.Dense(PASSAGES, _encode)
  queries = ['query 7', 'query 1000', 'query 599']
  found = index.search(queries, 4)
  scores = _encode(queries) @ _encode([p.contents for p in PASSAGES]).T
  best = np.argsort(-scores, axis=1)[:, :4]
  assert _ids(found) == best.astype(str).tolist()
  np.testing.assert_allclose(
    [[hit.score for hit in hits] for hits in found],
    np.take_along_axis(scores, best, axis=1),
    rtol=1e-5,
  )


@pytest.mark.parametrize('factory', ['IVF8,SQ8', 'HNSW16', 'IVF4,PQ16x4'])
def test_approximate_indexes_are_trained_and_find_themselves(factory):
  index = dense.Dense(PASSAGES, _encode, factory=factory, train_size=500)
  found = index.search([p.contents for p in PASSAGES[::20]], 1)
  assert np.mean([ids == [p.id] for ids, p in zip(_ids(found), PASSAGES[::20])]) > 0.8


def test_an_approximate_index_finds_fewer_rather_than_others():
  """FAISS fills up with passage -1 where the list that it looks at has too few."""
  index = dense.Dense(PASSAGES, _encode, factory='IVF8,Flat', parameters='nprobe=1')
  queries = ['query 7', 'query 1000']
  for query, hits in zip(_encode(queries), index.search(queries, 600), strict=True):
    found = [int(hit.document.id) for hit in hits]
    assert 10 < len(found) == len({*found}) < 300
    vectors = _encode([PASSAGES[i].contents for i in found])
    np.testing.assert_allclose([h.score for h in hits], vectors @ query, rtol=1e-5)


def test_search_parameters_are_set_and_kept(tmp_path):
  queries = [f'query {i}' for i in range(1000, 1050)]
  exact = dense.Dense(PASSAGES, _encode).search(queries, 5)
  fast = dense.Dense(PASSAGES, _encode, factory='IVF8,Flat')
  thorough = dense.Dense(PASSAGES, _encode, factory='IVF8,Flat', parameters='nprobe=8')
  thorough.save(tmp_path)
  assert _ids(fast.search(queries, 5)) != _ids(exact)
  for index in (thorough, dense.Dense.load(tmp_path, _encode)):
    assert _ids(index.search(queries, 5)) == _ids(exact)


def test_queries_have_their_own_encoder():
  seen = []

  def encode_query(texts):
    seen.extend(texts)
    return -_encode(texts)

  index = dense.Dense(PASSAGES[:1], _encode, encode_query=encode_query)
  assert index.search(['query 0'], 1)[0][0].score < 0
  assert seen == ['query 0']


def test_save_and_load(tmp_path):
  index = dense.Dense(PASSAGES, _encode)
  index.save(tmp_path / 'index')
  again = dense.Dense.load(tmp_path / 'index', _encode)
  queries = ['query 3', 'query 5']
  assert again.search(queries, 5) == index.search(queries, 5)


def test_a_damaged_index_is_refused(refused, tmp_path):
  with refused('index.faiss'):
    dense.Dense.load(tmp_path, _encode)
  dense.Dense(PASSAGES, _encode).save(tmp_path)
  (tmp_path / 'index.faiss').write_bytes((tmp_path / 'index.faiss').read_bytes()[:999])
  with refused('save it again'):
    dense.Dense.load(tmp_path, _encode)
  other = dense.Dense(PASSAGES[:5], _encode)
  other.save(tmp_path / 'other')
  dense.Dense(PASSAGES, _encode).save(tmp_path)
  (tmp_path / 'other' / 'index.faiss').replace(tmp_path / 'index.faiss')
  with refused('5 vectors for 600'):
    dense.Dense.load(tmp_path, _encode)


@pytest.mark.parametrize(
  ('factory', 'metric'),
  [
    *((factory, faiss.METRIC_L2) for factory in ('Flat', 'IVF2,Flat', 'PCA8,Flat')),
    ('Flat', faiss.METRIC_L1),
  ],
)
def test_an_index_of_distances_is_refused(refused, tmp_path, factory, metric):
  """The farthest passages would be the best."""
  dense.Dense(PASSAGES[:90], _encode).save(tmp_path)
  vectors = _encode([p.contents for p in PASSAGES[:90]])
  index = faiss.index_factory(16, factory, metric)
  index.train(vectors)
  index.add(vectors)
  faiss.write_index(index, str(tmp_path / 'index.faiss'))
  with refused('no inner product'):
    dense.Dense.load(tmp_path, _encode)


@pytest.mark.parametrize('factory', ['Flat', 'IVF8,Flat'])
def test_vectors_in_shards_make_the_same_index(refused, factory):
  vectors = _encode([p.contents for p in PASSAGES])
  shards = np.split(vectors, [1, 200, 200, 555])
  sharded = dense.Dense(
    PASSAGES, _encode, vectors=shards, factory=factory, train_size=450
  )
  direct = dense.Dense(PASSAGES, _encode, factory=factory, train_size=450)
  queries = [f'query {i}' for i in range(40)]
  assert sharded.search(queries, 5) == direct.search(queries, 5)
  with refused('vectors has 599 rows'):
    dense.Dense(PASSAGES, _encode, vectors=[vectors[1:]])


def test_another_encoder_is_refused(refused, tmp_path):
  dense.Dense(PASSAGES, _encode).save(tmp_path)
  noise = np.random.default_rng(0).normal(size=16) * 0.01
  dense.Dense.load(tmp_path, lambda texts: _encode(texts) + noise)  # As of bfloat16.
  other = lambda texts: _encode([f'{text} 1{text.split()[-1]}' for text in texts])
  with refused('made with another'):
    dense.Dense.load(tmp_path, other)
  with refused('gave 8 numbers a text'):
    dense.Dense.load(tmp_path, lambda texts: _encode(texts)[:, :8])


def test_misuse(refused):
  with refused('passages is empty'):
    dense.Dense([], _encode)
  for factory, parameters in (('Ivy', ''), ('Flat', 'nproble=3'), ('Flat', 'x')):
    with refused('FAISS knows no factory'):
      dense.Dense(PASSAGES, _encode, factory=factory, parameters=parameters)
  with refused('shape (16,) for 600'):
    dense.Dense(PASSAGES, lambda texts: _encode(texts)[0])
  with refused('not finite'):
    dense.Dense(PASSAGES, lambda texts: _encode(texts) * np.nan)
  with refused('IVF700,Flat'):
    dense.Dense(PASSAGES, _encode, factory='IVF700,Flat')
  index = dense.Dense(PASSAGES, _encode)
  for k in (0, -1):
    with pytest.raises(ValueError, match=f'k is {k}; it must be at least 1'):
      index.search(['query 9'], k)
  assert index.search([], 3) == []
  assert len(dense.Dense(PASSAGES[:2], _encode).search(['query 9'], 10)[0]) == 2
  index = dense.Dense(PASSAGES, _encode, encode_query=lambda texts: _encode(texts)[:, :8])
  with refused('gave 8 numbers a text'):
    index.search(['query 9'], 1)
