"""A corpus's vectors in files, so that encoding can be killed, resumed and shared."""

from collections.abc import Callable, Sequence
import fcntl
import hashlib
import json
import os
import pathlib
import time
from typing import IO

import numpy as np

from agent_r1_jax.retrieval import dense
from agent_r1_jax.retrieval.documents import Document


def encode_corpus(
  passages: Sequence[Document],
  encode: dense.Encode,
  folder: str | os.PathLike,
  *,
  size: int = 10_000,
  patience: float = 3600.0,
  on_progress: Callable[[int], None] = lambda passages: None,
) -> list[np.ndarray]:
  """Encodes a corpus shard by shard; shards that are in the folder already are kept.

  Several processes may do this at the same time: each shard is encoded by one of them,
  and all of them return all shards. Whoever is killed loses the shard that it was at,
  which another process, or the next start, encodes again.

  Args:
    passages: The corpus.
    encode: Encodes passages.
    folder: Where the shards are written; made if there is none.
    size: Passages in a shard.
    patience: Seconds that this process, with nothing left to do, waits for a shard of the
      others.
    on_progress: Called with the number of passages that are encoded.

  Returns:
    The shards, mapped into memory.

  Raises:
    ValueError: The folder holds shards of another corpus, encoder or size.
    TimeoutError: Another process holds a shard and does not finish it.
  """
  if size < 1:
    raise ValueError(f'size is {size}; a shard has at least one passage')
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  _check_folder(passages, encode, folder, size)
  starts = range(0, len(passages), size)
  paths = [folder / f'{start // size:06}.npy' for start in starts]
  work = dict(zip(paths, starts, strict=True))
  deadline, waited_for = 0.0, 0  # The shards that were missing when waiting began.
  while work := {path: start for path, start in work.items() if not path.exists()}:
    missing = sum(min(size, len(passages) - start) for start in work.values())
    on_progress(len(passages) - missing)
    chosen = next(filter(None, map(_lock, work)), None)
    if chosen is None:  # Others encode what is left, and may be killed.
      if len(work) != waited_for:
        deadline, waited_for = time.monotonic() + patience, len(work)
      if time.monotonic() >= deadline:
        raise TimeoutError(
          f'{folder}: another process has held {next(iter(work)).name} for {patience:g} '
          'seconds; end it, and give the same command again'
        )
      time.sleep(0.2)
      continue
    path, lock = chosen
    with lock:
      if not path.exists():  # It may be done since it was looked for.
        start = work[path]
        _write(path, _encode(passages[start : start + size], encode))
  on_progress(len(passages))
  return [np.load(path, mmap_mode='r') for path in paths]


def _lock(path: pathlib.Path) -> tuple[pathlib.Path, IO] | None:
  """Takes a shard; None if another process has it. Its end gives it back."""
  lock = path.with_suffix('.lock').open('w')
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    lock.close()
    return None
  return path, lock


def _encode(passages: Sequence[Document], encode: dense.Encode) -> np.ndarray:
  texts = [passage.contents for passage in passages]
  return np.concatenate(list(dense.encode_batches(encode, texts)))


def _write(path: pathlib.Path, vectors: np.ndarray) -> None:
  """Writes a file that is there as a whole or not at all."""
  partial = path.with_suffix(f'.{os.getpid()}.partial')
  with partial.open('wb') as file:
    np.save(file, vectors)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)


def _check_folder(passages, encode, folder, size) -> None:
  """Notes what the shards are made of, or compares it with what was noted before."""
  digest = hashlib.blake2b(digest_size=16)
  for passage in passages:
    digest.update(json.dumps([passage.id, passage.contents]).encode())
  digest = np.frombuffer(digest.digest(), np.uint8)
  facts = {
    'corpus': digest,
    'size': np.array(size),
    'encoder': _encode(passages[:1], encode),
  }
  for name, value in facts.items():
    path = folder / f'{name}.npy'
    if not path.exists():
      _write(path, value)
    noted = np.load(path)
    same = dense.is_same_encoder if name == 'encoder' else np.array_equal
    if not same(value, noted):
      raise ValueError(
        f'{folder}: holds shards of another {name}; give another folder, or remove it'
      )
