"""Arrays on a mesh, or on one device where the mesh is None."""

from typing import Any

import jax
import numpy as np

from agent_r1_jax.models import sharding


def draw(seed: Any, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def draw_like(seed: int, tree: Any) -> Any:
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), tree)


def place(tree: Any, mesh: Any) -> Any:
  """Puts a copy where the mesh says, or on the one device."""
  where = sharding.make_shardings(tree, mesh) if mesh else None
  return jax.device_put(jax.tree.map(np.array, tree), where)


def place_rows(batch: Any, mesh: Any) -> Any:
  return jax.device_put(batch, sharding.batch_sharding(mesh)) if mesh else batch


def assert_lies(tree: Any, like: Any, mesh: Any):
  """Asserts that each leaf is split as its parameter's rule says."""
  if mesh is None:
    return
  where = jax.tree.leaves(sharding.make_shardings(like, mesh))
  named = jax.tree_util.tree_leaves_with_path(tree)
  for (path, leaf), at in zip(named, where, strict=True):
    shape = leaf.addressable_shards[0].data.shape
    assert shape == at.shard_shape(leaf.shape), (path, shape, at)


def split(leaf: Any, *names: str) -> list[tuple[int, ...]]:
  """The shapes of what the first device holds of some arrays."""
  return [leaf[name].addressable_shards[0].data.shape for name in names]
