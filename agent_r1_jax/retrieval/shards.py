"""A corpus's vectors in files, so that encoding can be killed, resumed and shared."""

from collections.abc import Callable, Sequence
import hashlib
import json
import os
import pathlib
import random

import numpy as np

from agent_r1_jax.retrieval import dense
from agent_r1_jax.retrieval.documents import Document


def encode_corpus(
  passages: Sequence[Document],
  encode: dense.Encode,
  folder: str | os.PathLike,
  *,
  size: int = 10_000,
  on_progress: Callable[[int], None] = lambda passages: None,
) -> list[np.ndarray]:
  """Encodes a corpus shard by shard; shards that are in the folder already are kept.

  Several processes may do this at the same time: each takes one missing shard after the
  other, at random, so that seldom two of them encode the same one. Who is killed loses
  the shard that it was at.

  A shard has `size` passages. `on_progress` is called with the number of passages that
  are encoded.

  Returns:
    The shards, mapped into memory.

  Raises:
    ValueError: The folder holds shards of another corpus, encoder or size.
  """
  if size < 1:
    raise ValueError(f'size is {size}; a shard has at least one passage')
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  _check_folder(passages, encode, folder, size)
  starts = range(0, len(passages), size)
  paths = {folder / f'{start // size:06}.npy': start for start in starts}
  while work := [path for path in paths if not path.exists()]:
    on_progress(len(passages) - sum(min(size, len(passages) - paths[p]) for p in work))
    path = random.choice(work)
    _write(path, _encode(passages[paths[path] : paths[path] + size], encode))
  on_progress(len(passages))
  return [np.load(path, mmap_mode='r') for path in paths]


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
