"""Encoding in shards: killed, resumed, shared, and mixed up."""

import pathlib
import subprocess
import sys

import faiss
import numpy as np
import pytest

from agent_r1_jax.retrieval import dense, shards
from agent_r1_jax.retrieval.documents import Document

# Other tests use the cores too, and FAISS's threads spin while they wait for them.
faiss.omp_set_num_threads(1)
ROOT = pathlib.Path(__file__).parents[1]
PASSAGES = [Document(str(i), f'Title {i}', f'text {i}') for i in range(23)]


def _encode(texts):
  seeds = [int(text.split()[-1]) for text in texts]
  return np.stack([np.random.default_rng(seed).normal(size=8) for seed in seeds])


_SCRIPT = """
import time
import test_shards as test

def encode(texts):
  found = list(test.pathlib.Path({folder!r}).glob('00*.npy'))
  if len(texts) > 1 and len(found) == {count}:
    print('waits', flush=True)
    time.sleep(600)
  return test._encode(texts)

test.shards.encode_corpus(test.PASSAGES, encode, {folder!r}, size=5)
"""


def _kill_at(folder, count):
  """Encodes the corpus in a process, and kills it when it is at a further shard."""
  command = [sys.executable, '-c', _SCRIPT.format(folder=str(folder), count=count)]
  environ = {'PYTHONPATH': f'{ROOT / "tests"}:{ROOT}', 'PYTHONSAFEPATH': '1'}
  with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as process:
    assert process.stdout.readline() == b'waits\n'
    process.kill()


def test_killed_twice_and_resumed_equals_uninterrupted(tmp_path):
  folder, whole = tmp_path / 'killed', tmp_path / 'whole'
  _kill_at(folder, 2)
  first = {path: path.stat().st_mtime_ns for path in folder.glob('00*.npy')}
  _kill_at(folder, 4)
  (folder / '000004.99.partial').write_bytes(b'half')  # What a kill may leave.
  seen = []
  found = shards.encode_corpus(PASSAGES, _encode, folder, size=5, on_progress=seen.append)
  assert seen in ([18, 23], [20, 23])
  assert len(first) == 2
  assert all(path.stat().st_mtime_ns == time for path, time in first.items())
  expected = shards.encode_corpus(PASSAGES, _encode, whole, size=5)
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  for name, vectors in (('a', found), ('b', expected)):
    index = dense.Dense(PASSAGES, _encode, vectors=vectors, factory='IVF2,Flat')
    index.save(tmp_path / name)
  a, b = ((tmp_path / name / 'index.faiss').read_bytes() for name in 'ab')
  assert a == b


def test_what_another_process_encodes_meanwhile_is_not_encoded_again(tmp_path):
  counts = []

  def encode(texts):
    counts.append(len(texts))
    if len(counts) == 2:  # The first call identifies the encoder, the second is a shard.
      shards.encode_corpus(PASSAGES, _encode, tmp_path, size=5)
    return _encode(texts)

  found = shards.encode_corpus(PASSAGES, encode, tmp_path, size=5)
  assert len(counts) == 2
  np.testing.assert_allclose(
    np.concatenate(found), _encode([p.contents for p in PASSAGES]), rtol=1e-6
  )


def test_shards_of_something_else_are_refused(tmp_path):
  shards.encode_corpus(PASSAGES, _encode, tmp_path, size=5)
  other = [*PASSAGES[:-1], Document('22', 'Title', 'text 22')]
  for passages, encode, size, message in (
    (other, _encode, 5, 'of another corpus'),
    (PASSAGES, _encode, 6, 'of another size'),
    (PASSAGES, lambda texts: -_encode(texts), 5, 'of another encoder'),
    (PASSAGES, lambda texts: _encode(texts)[:, :4], 5, 'of another encoder'),
    (PASSAGES, _encode, 0, 'size is 0'),
  ):
    with pytest.raises(ValueError, match=message):
      shards.encode_corpus(passages, encode, tmp_path, size=size)
