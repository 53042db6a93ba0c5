"""Encoding in shards: killed, resumed, shared, and mixed up."""

import fcntl
import pathlib
import subprocess
import sys
import time

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

count = 0

def encode(texts):
  global count
  count += len(texts)
  time.sleep(0.02)  # So that processes meet.
  return test._encode(texts)

print('ready', flush=True)
input()
test.shards.encode_corpus(test.PASSAGES, encode, {folder!r}, size=5)
print(count)
"""


def _start(folder, count=1):
  """Starts processes that encode the corpus, and lets them begin together."""
  command = [sys.executable, '-c', _SCRIPT.format(folder=str(folder))]
  pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
  environ = {'PYTHONPATH': f'{ROOT / "tests"}:{ROOT}', 'PYTHONSAFEPATH': '1'}
  processes = [subprocess.Popen(command, env=environ, **pipes) for _ in range(count)]
  assert [process.stdout.readline() for process in processes] == ['ready\n'] * count
  for process in processes:
    process.stdin.write('go\n')
    process.stdin.flush()
  return processes


def _wait_for(process, *paths):
  late = time.monotonic() + 60
  while not all(path.exists() for path in paths):
    assert process.poll() is None and time.monotonic() < late
    time.sleep(0.01)


def test_killed_twice_and_resumed_equals_uninterrupted(tmp_path):
  folder, whole = tmp_path / 'killed', tmp_path / 'whole'
  folder.mkdir()
  paths = [folder / f'{i:06}.npy' for i in range(5)]
  # Whoever holds a shard keeps the process at it until the process is killed.
  with (folder / '000004.lock').open('w') as last:
    fcntl.flock(last, fcntl.LOCK_EX)
    with (folder / '000002.lock').open('w') as middle:
      fcntl.flock(middle, fcntl.LOCK_EX)
      (first,) = _start(folder)
      _wait_for(first, paths[0], paths[1], paths[3])
      first.kill()
      first.communicate()
    assert not paths[2].exists()
    times = [paths[i].stat().st_mtime_ns for i in (0, 1, 3)]
    (second,) = _start(folder)
    _wait_for(second, paths[2])
    second.kill()
    second.communicate()
  (folder / '000004.99.partial').write_bytes(b'half')  # What a kill may leave.
  seen = []
  found = shards.encode_corpus(PASSAGES, _encode, folder, size=5, on_progress=seen.append)
  assert seen == [20, 23] and times == [paths[i].stat().st_mtime_ns for i in (0, 1, 3)]
  expected = shards.encode_corpus(PASSAGES, _encode, whole, size=5)
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  for name, vectors in (('a', found), ('b', expected)):
    index = dense.Dense.from_vectors(PASSAGES, vectors, _encode, factory='IVF2,Flat')
    index.save(tmp_path / name)
  a, b = ((tmp_path / name / 'index.faiss').read_bytes() for name in 'ab')
  assert a == b


def test_processes_share_the_shards(tmp_path):
  processes = _start(tmp_path, 2)
  printed = [process.communicate(timeout=60)[0] for process in processes]
  # Each passage once, and the first one by either process, to know the encoder.
  assert sum(map(int, printed)) == len(PASSAGES) + 2
  never = lambda texts: _encode(texts) if len(texts) == 1 else pytest.fail('again')
  found = shards.encode_corpus(PASSAGES, never, tmp_path, size=5)
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


def test_a_shard_that_another_process_never_finishes_is_named(tmp_path):
  with (tmp_path / '000004.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match='has held 000004.npy for 0 seconds; end it'):
      shards.encode_corpus(PASSAGES, _encode, tmp_path, size=5, patience=0.0)
  # What was done is kept, and the next start does the rest.
  assert len(shards.encode_corpus(PASSAGES, _encode, tmp_path, size=5)) == 5
