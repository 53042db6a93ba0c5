"""The hashing encoder: its geometry, its determinism, and names it must find."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from agent_r1_jax.retrieval import dense
from agent_r1_jax.retrieval.documents import Document
from experiments.miniwiki import hashing

RELATIONS = ('director', 'spouse', 'birthplace', 'employer', 'founder', 'capital')


SYLLABLES = ('bra', 'lo', 'ven', 'ti', 'kor', 'mas', 'ul', 'dre', 'shi', 'pon', 'ga')


def _world(rng, size=3000):
  """Passages titled 'First Last' that mention others, in few first and last names."""
  words = [
    ''.join(parts).capitalize() for parts in itertools.product(SYLLABLES, repeat=3)
  ]
  words = [words[i] for i in rng.permutation(len(words))]
  pairs = rng.permutation(200 * 200)[:size]
  names = [f'{words[i // 200]} {words[200 + i % 200]}' for i in pairs]
  passages = []
  for i, name in enumerate(names):
    facts = [
      f'The {relation} of {name} is {names[rng.integers(size)]}.'
      for relation in rng.permutation(RELATIONS)[:3]
    ]
    passages.append(Document(str(i), name, f'{name} is well known. {" ".join(facts)}'))
  return passages


def test_a_name_and_a_relation_find_the_passage_so_titled():
  rng = np.random.default_rng(0)
  passages = _world(rng)
  encoder = hashing.HashingEncoder().fit(p.contents for p in passages)
  index = dense.Dense(passages, encoder.encode)
  queries = [f'{p.title} {rng.choice(RELATIONS)}' for p in passages]
  found = index.search(queries, 1)
  right = [hits[0].document is p for hits, p in zip(found, passages, strict=True)]
  assert len(passages) == 3000
  assert np.mean(right) >= 0.998


def test_vectors_are_the_same_in_every_process():
  texts = ['Ann Berg\nborn in Oslo, Norway', 'été', 'Oslo Oslo Oslo capital']
  here = hashing.HashingEncoder(seed=3).fit(texts).encode(texts)
  code = (
    'import sys; from experiments.miniwiki import hashing\n'
    f'texts = {texts!r}\n'
    'vectors = hashing.HashingEncoder(seed=3).fit(texts).encode(texts)\n'
    'sys.stdout.buffer.write(vectors.tobytes())'
  )
  environment = os.environ | {
    'PYTHONHASHSEED': '77',
    'PYTHONPATH': os.pathsep.join(sys.path),
  }
  run = subprocess.run(
    [sys.executable, '-c', code], env=environment, capture_output=True, check=True
  )
  np.testing.assert_array_equal(np.frombuffer(run.stdout, np.float32), here.ravel())


def test_inner_products_are_cosines_of_tf_idf():
  texts = ['red green blue', 'red red white', 'black']
  encoder = hashing.HashingEncoder(dim=1 << 16).fit(texts)
  vectors = encoder.encode([*texts, 'never seen'])
  log2, log83, log3 = np.log([1 + 1.5 / 2.5, 1 + 2.5 / 1.5, 1 + 3.5 / 0.5])
  first = np.array([log2, log83, log83])
  second = np.array([(1 + np.log(2)) * log2, log83])
  cosine = first[0] * second[0] / np.linalg.norm(first) / np.linalg.norm(second)
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
  assert vectors[0] @ vectors[1] == pytest.approx(cosine, abs=0.01)
  assert vectors[0] @ vectors[2] == pytest.approx(0, abs=0.01)
  seen_and_not = encoder.encode(['black never'])[0]
  assert seen_and_not @ vectors[2] == pytest.approx(
    log83 / np.hypot(log83, log3), abs=0.01
  )
