"""Prefix trees: each distinct token once, and nothing computed from another text."""

import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
import numpy as np
import plain
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.models import attention, sharding
from agent_r1_jax.rl import algorithms, learner, losses, minibatch, packing, prefix_trees
from agent_r1_jax.rl import table as table_lib

TREES, ROWS = packing.MicrobatchShape(2, 32), packing.MicrobatchShape(2, 32, trees=False)


def _texts(count: int, seed: int = 0, lengths=(1, 12), vocab: int = 2):
  """Texts of few different tokens, so that most share a beginning; some are equal."""
  rng = np.random.default_rng(seed)
  sizes = rng.integers(*lengths, count)
  return [rng.integers(0, vocab, n).astype(np.int32) for n in sizes]


def _table(texts, weights=None) -> table_lib.TokenTable:
  segments = [types.Segment(t, t >= 0, np.zeros(len(t))) for t in texts]
  return dataclasses.replace(table_lib.from_segments(segments), weights=weights)


def _prefixes(texts) -> set[tuple[int, ...]]:
  return {tuple(t[: i + 1].tolist()) for t in texts for i in range(len(t))}


def _read(tree, row: int, column: int) -> list[int]:
  """The tokens from the root to a column."""
  out = [column]
  while tree.parents[row, out[0]] != out[0]:
    out.insert(0, int(tree.parents[row, out[0]]))
  return out


_CASES = [
  ([], 16, 1),
  ([np.zeros(16, np.int32)] * 9, 16, 2),
  ([np.arange(16, dtype=np.int32)[:n] for n in (16, 3, 3, 1, 9)], 16, 1),
  (_texts(40), 64, 1),
  (_texts(40, 1), 16, 4),
  (_texts(60, 2, (8, 17), 3), 16, 3),
  (_texts(30, 3, (1, 20), 50), 24, 1),
]


@pytest.mark.parametrize(('texts', 'row_tokens', 'multiple'), _CASES)
def test_the_path_to_a_token_is_its_text_and_the_tokens_it_sees(
  texts, row_tokens, multiple
):
  table = _table(texts)
  layout = prefix_trees.plan(table, row_tokens=row_tokens, row_multiple=multiple)
  rows, _ = layout.pack_rows(table.tokens)
  tree = rows.sees
  assert len(rows.tokens) % multiple == 0 and len(rows.tokens) >= 1
  columns = np.arange(row_tokens)
  sees = (columns[None] <= columns[:, None])[None] & (
    columns[None, :, None] < tree.ends[:, None]
  )
  n = 0
  for text in texts:
    for i in range(len(text)):
      row, column = divmod(int(layout.index[n]), row_tokens)
      path = _read(tree, row, column)
      assert rows.tokens[row, path].tolist() == text[: i + 1].tolist()
      assert rows.positions[row, column] == i == len(path) - 1
      assert np.flatnonzero(sees[row, column]).tolist() == path
      n += 1
  used = np.zeros(rows.tokens.size, bool)
  used[layout.index] = True
  padding = ~used.reshape(rows.tokens.shape)
  itself = np.broadcast_to(columns[:, None] == columns, sees.shape)
  assert (sees[padding] == itself[padding]).all()
  np.testing.assert_array_equal(layout.extract(np.arange(rows.tokens.size)), layout.index)


@pytest.mark.parametrize('seed', range(5))
def test_each_distinct_token_is_computed_once_where_a_row_has_room(seed):
  texts = _texts(40, seed)
  table, distinct = _table(texts), len(_prefixes(texts))
  assert prefix_trees.count_distinct(table) == distinct < 0.6 * len(table)
  layout = prefix_trees.plan(table, row_tokens=distinct)
  assert layout.computed == distinct and layout.ends.shape == (1, distinct)


def test_a_tree_is_cut_where_fewest_rows_repeat_least():
  # Three texts share 6 tokens, three others 1; a row has room for three of them.
  few, many = np.full(1, 9), np.full(6, 1)
  texts = [np.append(x, np.full(5, 10 + i)) for i, x in enumerate([few, many] * 3)]
  texts = [np.append(5, text).astype(np.int32) for text in texts]
  layout = prefix_trees.plan(_table(texts), row_tokens=22)
  row = layout.index[np.append(0, np.cumsum([len(t) for t in texts[:-1]]))] // 22
  assert row[0] == row[2] == row[4] != row[1] == row[3] == row[5]
  # Both rows have the first token.
  assert layout.computed == len(_prefixes(texts)) + 1


def test_texts_that_share_nothing_are_packed_as_densely_as_whole_rows():
  rng = np.random.default_rng(0)
  texts = [np.append(i, rng.integers(0, 9, rng.integers(2, 30))) for i in range(99, 159)]
  texts = [text.astype(np.int32) for text in texts]
  rows = packing.plan_layout([len(t) for t in texts], row_tokens=32).rows
  assert len(prefix_trees.plan(_table(texts), row_tokens=32).ends) == rows


def test_entries_are_the_weighted_tokens_and_at_most_two_for_each_column():
  texts = [np.arange(10, dtype=np.int32)] * 7
  weights = np.tile(np.arange(10) >= 4, 7) * 0.5
  table = dataclasses.replace(_table(texts, weights), advantages=np.arange(70.0))
  layout = prefix_trees.plan(table, row_tokens=10)
  batch = packing.pack(table, layout)
  assert isinstance(batch.rows.sees, types.Tree)
  # 42 entries, of which a row has room for 20: three segments each.
  assert batch.weights.shape == (3, 20) and batch.rows.tokens.shape == (3, 10)
  entered = batch.weights != 0
  np.testing.assert_array_equal(
    np.sort(batch.advantages[entered]), table.advantages[weights > 0]
  )
  # In this table a token is its position, and advantages count its tokens.
  for name in ('tokens', 'positions'):
    own = np.take_along_axis(getattr(batch.rows, name), batch.columns, axis=1)
    np.testing.assert_array_equal(own[entered], batch.advantages[entered] % 10)
  for ids, advantages in zip(batch.segment_ids, batch.advantages, strict=True):
    segment = advantages[ids > 0] // 10
    np.testing.assert_array_equal(ids[ids > 0], 1 + segment - segment[0])


# The learner.


def _grown(forks: int = 6) -> list[types.Trajectory]:
  """Varied episodes, and others that repeat a part of one and then go on in their way."""
  out = []
  for i, t in enumerate(plain.trajectories()):
    rng = np.random.default_rng(i)
    for fork in range(forks if i % 3 == 0 else 1):
      segments = [dataclasses.replace(s, tokens=s.tokens.copy()) for s in t.segments]
      for s in segments if fork else ():
        begin = int(rng.integers(0, len(s.tokens) + 1))
        new = rng.integers(0, 64, len(s.tokens) - begin)
        s.tokens[begin:] = new
        changed = rng.uniform(-3, 0, len(s.tokens)).astype(np.float32)
        s.behaviour_logprobs = np.where(s.action_mask, changed, 0).astype(np.float32)
      turns = [dataclasses.replace(x, reward=float(rng.normal())) for x in t.turns]
      metrics = {'reward/format': float(rng.normal())}
      made = dataclasses.replace(
        t, segments=segments, turns=turns, sample=fork, metrics=metrics
      )
      out.append(made)
  return out


_UNMASKED = {'loss_mask': False, 'advantage_mask': False}
_MORE = {'entropy_coef': 0.1, 'correction': losses.token_truncated()}
# Losses of single tokens with all that an algorithm may have besides, and of whole
# sequences, of all and of accepted trajectories; then those with a critic.
_CASES_OF_LEARNING = {
  'kl, entropy and correction': (algorithms.grpo()._replace(**_MORE), ''),
  'of sequences': (algorithms.gspo(), ''),
  'rejection': (algorithms.rejection(threshold=-2.0), ''),
  'distillation': (algorithms.distillation(), ''),
  'own critic': (algorithms.ppo(), 'own'),
  'shared critic, no masks': (algorithms.ppo()._replace(**_UNMASKED), 'shared'),
}


@pytest.mark.parametrize('case', _CASES_OF_LEARNING)
def test_scores_loss_and_gradients_equal_those_of_whole_rows(case):
  algorithm, critic = _CASES_OF_LEARNING[case]
  ts = _grown()
  which = plain.models(own_critic=critic == 'own')
  # A critic of its own is told more: of the same task the same, so that it is shared too.
  prefixes = [np.arange(t.group % 3, dtype=np.int32) for t in ts]
  options = {'prefixes': prefixes if critic == 'own' else None, 'kl_coef': 0.1}
  options['baselines'] = np.linspace(-1, 1, len(ts)).tolist()
  tables = {
    shape: plain.credit(ts, algorithm, which, shape=shape, **options).table
    for shape in (TREES, ROWS)
  }
  for name in ('old_logprobs', 'ref_logprobs', 'values', 'final_values'):
    ours, theirs = (getattr(tables[shape], name) for shape in (TREES, ROWS))
    if theirs is not None:
      np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=name)
  # One table for both, so that no ratio is on two sides of a clip. As after some updates.
  table, rng = tables[ROWS], np.random.default_rng(0)
  noise = np.where(table.action_mask, 0.2 * rng.normal(size=len(table)), 0)
  table = dataclasses.replace(table, old_logprobs=table.old_logprobs + noise)
  shared = critic == 'shared'
  found = []
  for shape in (TREES, ROWS):
    members, given = range(len(ts)), {'algorithm': algorithm, 'shape': shape}
    batches, metrics = minibatch.make_policy(
      table, members, **given, kl_coef=0.1, shared_critic=shared
    )
    loss = plain.objective(algorithm, shared_critic=shared)
    policy = which.policy
    learned = [plain.chained_gradient(policy, batches, loss)]
    if critic == 'own':
      batches, _ = minibatch.make_critic(table, members, prefixes=prefixes, **given)
      loss = plain.critic_objective(algorithm)
      learned.append(plain.chained_gradient(which.critic, batches, loss))
    found.append((learned, metrics['trained/distinct'], len(batches)))
  (ours, repeated, few), (theirs, whole, many) = found
  assert 1 <= repeated < whole and whole > 1.15 and few < many
  plain.close([x for x, _ in ours], [x for x, _ in theirs], 5e-5)
  for (_, a), (_, b) in zip(ours, theirs, strict=True):
    for name in b:
      np.testing.assert_allclose(a[name], b[name], rtol=2e-4, atol=2e-6, err_msg=name)


@functools.cache
def _scored() -> table_lib.TokenTable:
  return plain.credit(_grown(), plain.GRPO, shape=ROWS).table


def _pack(shape: packing.MicrobatchShape) -> list[types.Batch]:
  table = _scored()
  return minibatch.make_policy(table, range(len(table.group)), plain.GRPO, shape=shape)[0]


def _learn(batches):
  return plain.chained_gradient(plain.policy(), batches, plain.GRPO_OBJECTIVE)


@functools.cache
def _expected():
  return _learn(_pack(ROWS))


def test_the_gradient_does_not_depend_on_rows_and_their_cuts():
  """Of several blocks of attention, here."""
  ours, sums = _learn(_pack(packing.MicrobatchShape(2, 200)))
  expected, whole = _expected()
  plain.close(ours, expected, 5e-5)
  np.testing.assert_allclose(sums['loss'], whole['loss'], rtol=1e-4, atol=1e-6)


def test_adapters_get_the_gradient_of_whole_rows():
  params = tiny.add_adapters(plain.policy(), 2, ('q', 'v', 'down'), 4.0, b=0.1)
  ours, theirs = (
    plain.gradient(params, _pack(shape), plain.GRPO_OBJECTIVE)[0]
    for shape in (TREES, ROWS)
  )
  assert any(np.any(x) for x in jax.tree.leaves(theirs))
  plain.close(ours, theirs, 5e-5)


def test_the_kernel_for_tpus_gives_the_gradient_of_whole_rows(monkeypatch):
  """Interpreted, and as it is used there: in shard_map, in a scan, rematerialised."""
  expected, whole = _expected()
  config = dataclasses.replace(plain.CONFIG, remat='full')
  monkeypatch.setattr(plain, 'CONFIG', config)
  monkeypatch.setattr(sharding, 'platform', lambda: 'tpu')
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  # The interpreter that acts as a TPU does, memory and all, cannot be rematerialised.
  interpreted = functools.partial(pl.pallas_call, interpret=True)
  monkeypatch.setattr(pl, 'pallas_call', interpreted)
  with jax.set_mesh(mesh):
    batches = _pack(packing.MicrobatchShape(1, 128))
    assert all(isinstance(batch.rows.sees, types.Tree) for batch in batches)
    ours, sums = plain.gradient(plain.policy(), batches, plain.GRPO_OBJECTIVE)
  plain.close(ours, expected, 5e-5)
  np.testing.assert_allclose(sums['loss'], whole['loss'], rtol=1e-4, atol=1e-6)


def test_what_a_sibling_says_changes_nothing():
  texts = _texts(24, 7, (4, 12))
  table = _table(texts)
  layout = prefix_trees.plan(table, row_tokens=80)
  batch = packing.pack(table, layout)
  stats = functools.partial(
    learner.token_stats, plain.shared(), config=plain.CONFIG, temperature=1.0
  )
  before = jax.jit(stats)(batch)
  for text in range(0, len(texts), 5):
    # Other tokens in all columns that do not belong to this text.
    own = np.zeros(batch.rows.tokens.size, bool)
    own[layout.index[table.segment == text]] = True
    own = own.reshape(batch.rows.tokens.shape)
    tokens = np.where(own, batch.rows.tokens, 63 - batch.rows.tokens)
    after = jax.jit(stats)(batch._replace(rows=batch.rows._replace(tokens=tokens)))
    for a, b in zip(after, before, strict=True):
      np.testing.assert_array_equal(np.asarray(a)[own], np.asarray(b)[own])


def test_without_a_kernel_for_trees_rows_are_whole_and_it_is_said_once(
  monkeypatch, caplog
):
  monkeypatch.setattr(attention, 'supports_trees', lambda: False)
  packing._warn_of_whole_rows.cache_clear()
  table = _table(_texts(9))
  for _ in range(3):
    batches, layout = packing.pack_microbatches(table, TREES)
  assert isinstance(layout, packing.Layout) and batches[0].columns is None
  assert len(caplog.records) == 1 and 'batch.trees' in caplog.text
