"""What eight CPU devices compute, and one: a table of rows, which test_mesh.py compares.

Run as a script, this computes some rows on eight devices and writes their numbers, or
what went wrong. A row is a function of a mesh, or of None for one device. It returns
trees by name, and raises where arrays do not lie as the mesh says.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import pathlib
import pickle
import re
import sys
import time
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packed_model
import placed
import replicas
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.guided import implicit_value
from agent_r1_jax.models import (
  decoder,
  families,
  lora,
  sharding,
)
from agent_r1_jax.models.pictures import picture_tokens, vision
from agent_r1_jax.rl import algorithms, learner, optimizers, packing
from agent_r1_jax.rl import table as table_lib

B, T = 8, 32  # No dimension of a parameter is 32.
# Heads, feed-forward and vocabulary can be split in 8, the 2 key-value heads cannot.
CONFIG = dataclasses.replace(tiny.config('qwen2', layers=1), num_heads=8, vocab_size=304)
# A large eps: else Adam's first step is the gradient's sign, and noise where that is 0.
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-2))


@functools.cache
def packed() -> types.Batch:
  """Rows of which some have many wanted tokens, others hardly one."""
  action = np.random.default_rng(0).random((B, T)) < np.linspace(0.1, 0.9, B)[:, None]
  text = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (B, T))
  columns = np.arange(T, dtype=np.int32)
  # A segment is on several chips.
  positions, ids = (np.tile(x, (B, 1)) for x in (columns % 21, 1 + columns // 21))
  return types.Batch(
    rows=types.Rows(text.astype(np.int32), positions, types.Segments(ids)),
    segment_ids=ids,
    action_mask=action,
    old_logprobs=placed.draw(2, B, T) * action - 5,
    advantages=placed.draw(3, B, T) * action,
    weights=(action / action.sum()).astype(np.float32),
    values=placed.draw(4, B, T),
    returns=placed.draw(5, B, T),
  )


@functools.cache
def begins_alike(of_trees: bool) -> types.Batch:
  """Texts of few tokens, most of which begin as another, as segments or prefix trees."""
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, 3, n).astype(np.int32) for n in rng.integers(2, 24, 48)]
  tokens = table_lib.from_segments(
    [types.Segment(t, t > 0, np.zeros(len(t), np.float32)) for t in texts]
  )
  columns: dict[str, Any] = {
    name: placed.draw(seed, len(tokens)) * tokens.action_mask
    for seed, name in enumerate(('old_logprobs', 'advantages', 'values', 'returns'))
  }
  columns['weights'] = tokens.action_mask / len(tokens)
  shape = packing.MicrobatchShape(2 * B, T, of_trees)
  made, layout = packing.pack_microbatches(dataclasses.replace(tokens, **columns), shape)
  kind = types.Tree if of_trees else types.Segments
  assert isinstance(made[0].rows.sees, kind)
  assert (layout.computed < len(tokens)) == of_trees
  return made[0]


@functools.cache
def policy() -> decoder.Params:
  """A policy with a value head, on the host."""
  params = jax.device_get(tiny.params(CONFIG))
  head = {'kernel': placed.draw(6, CONFIG.embed_dim, 1), 'bias': placed.draw(7, 1)}
  return params | {'value_head': head}


@functools.cache
def adapted() -> decoder.Params:
  """The policy with adapters that change what it computes."""
  made = tiny.add_adapters(policy(), 2, tuple(families.TARGETS), 4.0, b=0.1)
  return jax.device_get(made)


@functools.cache
def objective(shared_critic: bool = False) -> learner.Loss:
  algorithm = algorithms.ppo() if shared_critic else algorithms.grpo()
  return learner.objective(algorithm, shared_critic=shared_critic)


def again(config: decoder.DecoderConfig, remat: str, mesh: Any) -> decoder.DecoderConfig:
  """On a mesh, activations are computed again as `remat` says."""
  return dataclasses.replace(config, remat=remat) if mesh else config


def gradient(
  params: Any, batch: types.Batch, mesh: Any, remat: str = 'none'
) -> dict[str, Any]:
  """Policy and critic; parameters are gathered, activations never."""
  config = again(CONFIG, remat, mesh)
  options = {'config': config, 'loss': objective(True), 'temperature': 0.7}
  with sharding.use_mesh(mesh):
    arguments = placed.place(params, mesh), placed.place_rows(batch, mesh)
    program = learner._gradient.lower(*arguments, **options).compile()
    gradients, sums = program(*arguments)
  placed.assert_lies(gradients, lora.split(params)[0], mesh)
  if mesh:
    data, fsdp, _, context = mesh.devices.shape
    found = re.findall(r'= (\w+\[\S*) all-gather', program.as_text())
    assert found or fsdp * context == 1
    rows = f'{B}|{B // data // fsdp}'
    whole = rf'\w+\[({B * T},|({rows}),{T},|{B},{2 * T}\b)'
    assert not [x for x in found if re.match(whole, x)], found
  return {'gradient': gradients, 'loss': sums['loss']}


def update(mesh: Any) -> dict[str, Any]:
  """Two micro-batches, then a step of Adam: parameters and moments."""
  config = again(CONFIG, 'dots', mesh)
  options = {'config': config, 'loss': objective(True), 'temperature': 0.7}
  with sharding.use_mesh(mesh):
    state, rows = (
      learner.init(placed.place(policy(), mesh), ADAM),
      placed.place_rows(packed(), mesh),
    )
    gradients = learner.forward_backward(state.params, [rows, rows], **options)
    state, numbers = learner.optim_step(state, gradients, optimizer=ADAM)
  placed.assert_lies(state, jax.eval_shape(lambda: learner.init(policy(), ADAM)), mesh)
  return {'state': state, 'numbers': numbers}


def layers(
  family: str, of_trees: bool, mesh: Any, count=2, remat='none', **changes: Any
) -> dict[str, Any]:
  """Layers of several kinds, and experts, of which some are given with the tokens."""
  config = dataclasses.replace(tiny.config(family, count), num_heads=8, **changes)
  config = again(config, remat, mesh)
  params, batch = jax.device_get(tiny.params(config)), begins_alike(of_trees)
  if config.num_experts:  # Replayed, where the first is known.
    shape = *batch.rows.tokens.shape, config.num_layers, 2
    routes = np.random.default_rng(0).integers(-1, config.num_experts, shape)
    routes = np.where(routes[..., :1] < 0, -1, routes).astype(np.int8)
    batch = batch._replace(rows=batch.rows._replace(routes=routes))
  options = {'config': config, 'loss': objective(), 'temperature': 0.7}
  with sharding.use_mesh(mesh):
    arguments = placed.place(params, mesh), placed.place_rows(batch, mesh)
    gradients, sums = learner._gradient(*arguments, **options)
  placed.assert_lies(gradients, params, mesh)
  return {'gradient': gradients, 'loss': sums['loss']}


def four_bits(mesh: Any) -> dict[str, Any]:
  """The gradient of adapters over experts of 4 bits."""
  shape, batch = packed_model.shape(2), begins_alike(False)
  params = tiny.add_adapters(packed_model.load(2), 2, ('q', 'o'), 4.0, b=0.1)
  options = {'config': shape, 'loss': objective(), 'temperature': 0.7}
  with sharding.use_mesh(mesh):
    held = placed.place(jax.device_get(params), mesh)
    gradients, sums = learner._gradient(held, placed.place_rows(batch, mesh), **options)
  if mesh:
    up = placed.split(held['layers']['moe']['up'], 'kernel', 'block_scale')
    assert up == [(2, 4, 4, 64), (2, 4, 1, 64)]
  return {'over 4 bits': gradients, 'loss': sums['loss']}


def fine_tune(mesh: Any) -> dict[str, Any]:
  """Supervised fine-tuning and a reward model, which are on the same learner."""
  texts = [
    types.Segment(tokens[:n], np.arange(n) > 2, np.zeros(n, np.float32))
    for tokens in packed().rows.tokens
    for n in (9, 14, 20)
  ]
  played = [
    types.Trajectory(
      types.Task('t', []),
      i,
      0,
      [text],
      [types.Turn(0, 3, len(text.tokens), i % 2)],
      [],
      types.Status.DONE,
    )
    for i, text in enumerate(texts)
  ]
  losses, scores = [], []
  config = sft.Config(steps=3, rows=B, row_tokens=T, learning_rate=1e-2, warmup=1)
  with sharding.use_mesh(mesh):
    on_step = lambda step, numbers, params: losses.append(numbers['loss'])
    sft.run(CONFIG, placed.place(adapted(), mesh), texts * 4, config, on_step=on_step)
    implicit_value.fit(
      placed.place(adapted(), mesh),
      played,
      config=CONFIG,
      optimizer=optax.sgd(1e-2),
      shape=packing.MicrobatchShape(B, T),
      steps=2,
      episodes=len(played),
      on_step=lambda step, numbers: scores.append(numbers['loss']),
    )
  assert len(losses) == 3 and len(scores) == 2 and scores[0] != scores[1]
  return {'losses': np.array(losses), 'scores': np.array(scores)}


def muon(mesh: Any) -> dict[str, Any]:
  """Two steps; its momentum lies where the kernel does."""
  optimizer = optimizers.make(config_lib.Optimizer(kind='muon'), 1e-2)
  params = jax.device_get(tiny.params(tiny.config('qwen2', 2)))
  with sharding.use_mesh(mesh):
    state = learner.init(placed.place(params, mesh), optimizer)
    for seed in range(2):
      sums = {'loss': np.float32(1), 'weight': np.float32(1)}
      gradients = learner.Gradients(
        placed.place(placed.draw_like(seed, params), mesh), sums
      )
      state, _ = learner.optim_step(state, gradients, optimizer=optimizer)
  momentum = state.opt_state[1][0].inner_states['muon'].inner_state.mu
  for part, name in (('attn', 'q'), ('attn', 'o'), ('mlp', 'down')):
    held = (tree['layers'][part][name]['kernel'] for tree in (momentum, state.params))
    held, kernel = (x.sharding.shard_shape(x.shape) for x in held)
    assert held == kernel, (name, held, kernel)
  return {'change': jax.tree.map(np.subtract, jax.device_get(state.params), params)}


def sees(family: str, mesh: Any) -> dict[str, Any]:
  """The gradient through the tower of pictures of several sizes: it reaches all of it.

  In Gemma 4, their tokens see later ones; test_pooled_tower.py has what is reached there.
  """
  config = tiny.config(family, layers=1)
  config = dataclasses.replace(
    config,
    vision=dataclasses.replace(config.vision, num_layers=2),
    sees_ahead=config.vision.pools,
  )
  if not config.vision.pools:
    config = again(config, 'full', mesh)
  params, rng = jax.device_get(tiny.params(config)), np.random.default_rng(0)
  pictures = [
    picture_tokens.Picture(rng.integers(0, 256, (4 * a * b, 48), np.uint8), (a, b))
    for a, b in ((3, 2), (2, 5), (4, 3), (1, 1))
  ]
  batch, starts = picture_tokens.pack(pictures, config.vision, rows=4, patches=64)
  tokens = rng.integers(0, 290, (4, T)).astype(np.int32)
  positions = jnp.tile(jnp.arange(T), (4, 1))
  index = np.full((4, T), -1, np.int32)
  for row, (picture, start) in enumerate(zip(pictures, starts)):
    index[row, 3 : 3 + picture.tokens] = np.arange(picture.tokens) + start
  places = jnp.stack([positions, positions // 2, positions % 7], axis=-1)

  @jax.jit
  def compute(params, batch, tokens, index):
    def loss(params):
      seen = types.Pictures(places, index, vision.features(params, config, batch))
      rows = types.Rows(tokens, positions, types.Segments(positions * 0 + 1), seen)
      return jnp.square(decoder.hidden(params, config, rows)[:, :, 0]).mean()

    return jax.value_and_grad(loss)(params)

  with sharding.use_mesh(mesh):
    shown = (placed.place_rows(x, mesh) for x in (batch, tokens, index))
    loss, gradients = compute(placed.place(params, mesh), *shown)
  if mesh:
    up = gradients['vision']['blocks']['up']
    assert placed.split(up.get('linear', up), 'kernel') == [(2, 4, 24)]
  if config.vision.pools:
    return {'loss': loss, 'through pooled pictures': gradients}
  for name, x in list_leaves(gradients):
    # A bias of keys adds the same to all scores of a query; that of M-RoPE's is turned.
    if 'qkv' not in name and 'lm_head' not in name:
      assert 1e-7 < np.abs(x).max() < np.inf, name
  return {'loss': loss, 'through pictures': gradients}


class Row(NamedTuple):
  """A row of the table: what is computed, and on which meshes."""

  compute: Callable[[Any], dict[str, Any]]
  meshes: tuple[dict[str, int], ...]


def _of(function: Callable[..., Any], *arguments: Any, **changes: Any):
  return lambda mesh: function(*arguments, mesh, **changes)


_LONG = {'fsdp': 4, 'context': 2}
_HALF = {'data': 2, 'fsdp': 2, 'tensor': 2}
_WIDE = {'vocab_size': 304}
_SLIDES = _WIDE | {'sliding': (True, False), 'window': 5}
_GEMMA = _SLIDES | {'attention_cap': 2.0, 'logit_cap': 3.0}
_OLMO = _SLIDES | {'local_rope_theta': 50.0, 'nope': (True, False)}
_PAIR = ({'tensor': 2},)

ROWS = {
  # Of other meshes: 'update', and adapters and trees as below.
  'gradient': Row(
    lambda mesh: gradient(policy(), packed(), mesh),
    ({'context': 8}, {'tensor': 4, 'context': 2}),
  ),
  'gradient of adapters': Row(
    lambda mesh: gradient(adapted(), packed(), mesh, remat='full'),
    ({'fsdp': 2, 'tensor': 2, 'context': 2},),
  ),
  'gradient of trees': Row(
    lambda mesh: gradient(policy(), begins_alike(True), mesh), (_HALF,)
  ),
  'update': Row(update, (_HALF,)),
  'muon': Row(muon, ({'data': 8}, {'fsdp': 2, 'tensor': 2, 'context': 2})),
  'fine-tuning': Row(fine_tune, ({'data': 2, 'fsdp': 2, 'context': 2},)),
  'experts': Row(_of(layers, 'qwen3_moe', False, count=1, **_WIDE), (_LONG,)),
  'experts, trees': Row(
    _of(layers, 'qwen2_moe', True, count=1, **_WIDE), ({'fsdp': 2, 'tensor': 4},)
  ),
  'capped, sliding': Row(_of(layers, 'gemma2', False, **_GEMMA), (_LONG,)),
  'sliding, trees': Row(_of(layers, 'olmo3', True, **_OLMO), (_HALF,)),
  'sinks': Row(_of(layers, 'gpt_oss', False, **_SLIDES), ({'tensor': 4, 'context': 2},)),
  'experts of 4 bits': Row(four_bits, ({'fsdp': 2, 'tensor': 2, 'context': 2},)),
  'states': Row(
    lambda mesh: {'states': layers('qwen3_5_text', False, mesh, remat='full')},
    ({'fsdp': 2, 'tensor': 2, 'context': 2},),
  ),
  'heads of two kinds': Row(
    _of(
      layers, 'gemma4_text', False, count=3, shared_layers=1, input_dim=8, num_experts=0
    ),
    ({'fsdp': 2, 'tensor': 2, 'context': 2},),
  ),
  'pictures': Row(_of(sees, 'qwen2_5_vl'), ({'fsdp': 4, 'tensor': 2},)),
  'pictures of several depths': Row(_of(sees, 'qwen3_vl'), ({'fsdp': 4, 'tensor': 2},)),
  'pooled pictures': Row(_of(sees, 'gemma4'), ({'fsdp': 4, 'tensor': 2},)),
  'replica of heads of two kinds, and experts': Row(
    _of(replicas.extends, 'gemma4_text', 'model', **_WIDE), _PAIR
  ),
  'replica of gated experts': Row(
    _of(replicas.extends, 'qwen2_moe', 'model', **_WIDE), _PAIR
  ),
  'replica with sinks': Row(_of(replicas.extends, 'gpt_oss', 'model', **_SLIDES), _PAIR),
  'replica with states': Row(_of(replicas.extends, 'qwen3_5_text', 'model'), _PAIR),
  'replica in 8 bits': Row(_of(replicas.extends, 'gemma2', 'int8', **_GEMMA), _PAIR),
  'replica that slides': Row(_of(replicas.extends, 'olmo3', 'model', **_OLMO), _PAIR),
  'quantized': Row(replicas.quantized, ({'fsdp': 2, 'tensor': 2},)),
  'adapters of requests': Row(replicas.mixed_adapters, _PAIR),
  'decodes on TPUs': Row(
    _of(replicas.over_slots, 1), ({'tensor': 4}, {'data': 2, 'tensor': 2})
  ),
  'prefills on TPUs': Row(_of(replicas.over_slots, 128), ({'tensor': 4},)),
}


def compute(row: Row, sizes: dict[str, int]) -> dict[str, Any] | str:
  """A row's numbers on a mesh, or the error."""
  devices = jax.devices()[: math.prod(sizes.values())]
  try:
    found = row.compute(sharding.make_mesh(**sizes, devices=devices))
    return {name: list_leaves(tree) for name, tree in found.items()}
  except Exception:
    return traceback.format_exc()


def list_leaves(tree: Any) -> list[tuple[str, np.ndarray]]:
  """The arrays of a tree with their names."""
  named = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
  return [(jax.tree_util.keystr(path), np.asarray(x)) for path, x in named]


def main(path: str, *names: str):
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  assert jax.device_count() == 8
  found = {}
  for name in names:
    row = ROWS[name]
    for number, sizes in enumerate(row.meshes):
      begun = time.process_time()
      found[name, number] = compute(row, sizes)
      print(f'{name} {sizes}: {time.process_time() - begun:.1f} s', flush=True)
  pathlib.Path(path).write_bytes(pickle.dumps(found))


if __name__ == '__main__':
  main(*sys.argv[1:])
