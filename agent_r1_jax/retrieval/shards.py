"""A corpus's vectors in files, so that encoding can be resumed and shared."""

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
  """Encodes a corpus shard by shard; shards already in the folder are reused.

  Several processes may do this concurrently: each takes missing shards in random order,
  so two rarely encode the same shard. A killed process loses only its current shard.

  A shard has `size` passages. `on_progress` is called with the number of encoded
  passages.

  Returns:
    The shards, memory-mapped.

  Raises:
    ValueError: The folder has shards of another corpus, encoder or size.
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
  """Writes a file completely or not at all."""
  partial = path.with_suffix(f'.{os.getpid()}.partial')
  with partial.open('wb') as file:
    np.save(file, vectors)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)


def _check_folder(passages, encode, folder, size) -> None:
  """Records what the shards are made from, or compares it with the record."""
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
