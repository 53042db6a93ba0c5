"""What the Tinker API computes: losses and gradients are the learner's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tinker_service as service
import tiny

from agent_r1_jax import types
from agent_r1_jax.contrib.tinker import data as data_lib
from agent_r1_jax.contrib.tinker import losses as losses_lib
from agent_r1_jax.contrib.tinker import messages, wire
from agent_r1_jax.models import lora
from agent_r1_jax.rl import learner, losses, packing, table
from agent_r1_jax.web import http


def test_a_record_has_data_of_one_shape():
  data = [np.arange(n, dtype=np.float32) for n in (3, 2)]
  data += [np.ones((2, 3), np.float32), np.arange(4, dtype=np.float32)]
  read = messages.make('ForwardBackwardOutput')
  read.ParseFromString(messages.write_forward_backward({'logprobs': data}, {}))
  found = []
  for record in read.loss_fn_outputs:
    (field,) = record.fields
    assert len(np.frombuffer(field.value.offsets, '<i8')) == record.num_datums + 1
    shape = [-1, *field.value.trailing_shape]
    numbers = np.frombuffer(field.value.data, '<f4').reshape(shape)
    found.append((record.num_datums, numbers.shape))
  assert found == [(2, (5,)), (1, (2, 3)), (1, (4,))]


def test_the_longest_datum_fills_a_row_with_its_target():
  make = lambda n: data_lib.make_datum(
    *(np.zeros(n, np.int32), {'target_tokens': np.ma.zeros(n, np.int32)})
  )
  data_lib.check([make(service.ROW - 1)], service.TINY.vocab_size, service.ROW)
  with pytest.raises(
    ValueError, match=f'{service.ROW} tokens, and there is room for {service.ROW - 1}'
  ):
    data_lib.check([make(service.ROW)], service.TINY.vocab_size, service.ROW)


def test_gspo_counts_a_token_that_was_certain():
  """Its log-prob is 0, as that of a prompt's token, which has no advantage."""
  old = np.array([[0.0, 0.0, -1.0]])
  lp, a = np.array([[-3.0, -0.4, -0.8]]), np.array([[0.0, 1.0, 1.0]])
  batch = dict.fromkeys(types.Batch._fields) | {'old_logprobs': old, 'advantages': a}
  batch |= {'weights': np.ones((1, 3)), 'segment_ids': np.ones((1, 3), int)}
  stats = jax.tree.map(jnp.asarray, (losses.TokenStats(lp, lp), types.Batch(**batch)))
  wide = {'clip_low_threshold': 0.1, 'clip_high_threshold': 9.0}
  found, _ = losses_lib.Losses().find('gspo', wide).surrogate(*stats)
  np.testing.assert_allclose(found[0, 1:], -np.exp((-0.4 + 0.2) / 2), rtol=1e-5)


def test_targets_that_are_not_the_next_token(refused):
  rng = np.random.default_rng(0)
  y = np.ma.masked_array(rng.integers(0, tiny.VOCAB, (len(service.TEXT), 3)), mask=False)
  y[:-1, 1] = service.TEXT[1:]
  y[2, 2], y[3, 0] = y[2, 1], np.ma.masked
  data = [
    data_lib.Datum(service.TEXT, y, {}),
    data_lib.make_datum(service.TEXT, {'target_tokens': y[:, 1]}),
  ]
  data_lib.check(data, tiny.VOCAB, service.ROW)
  loss = losses_lib.Losses().find('cross_entropy', {})
  found, plain = service.finish(
    service.learn().score(service.learn().no_adapter, data, loss)
  ).logprobs
  np.testing.assert_array_equal(plain, found[:, 1])
  for i, k in [(0, 0), (2, 2), (2, 1), (5, 2), (7, 0), (7, 2)]:
    text = np.append(service.TEXT[: i + 1], y[i, k]).astype(np.int32)
    segment = types.Segment(text, text >= 0, np.zeros(len(text)))
    want = tiny.learned(service.params(), [segment], shape=service.TINY)[0][-1]
    np.testing.assert_allclose(found[i, k], want, atol=2e-5)
  assert found[3, 0] == 0
  csr = lambda *indices: data_lib.make_column(
    np.array([5, 6]), (3, 2), 'x', [*map(np.array, indices)]
  )
  sparse = csr([0, 1, 1, 2], [1, 0])
  assert sparse.tolist() == [[None, 5], [None, None], [6, None]]
  for rows, columns in ([0, 1], [1, 0]), ([0, 2, 1, 2], [1, 0]), ([0, 1, 1, 2], [1, 2]):
    with refused('no sparse matrix'):
      csr(rows, columns)


def test_targets_that_would_hold_the_device_for_minutes_are_refused(refused):
  y = np.ma.masked_array(np.zeros((7, 100_000), np.int64), mask=False)
  datum = data_lib.Datum(service.TEXT[:7], y, {})
  with refused('16,384 are allowed at'):
    data_lib.check([datum], tiny.VOCAB, service.ROW)
  data_lib.check([datum._replace(targets=y[:, :2340])], tiny.VOCAB, service.ROW)


def test_sparse_data_that_would_fill_the_memory_are_refused(refused):
  request = messages.make('ForwardBackwardRequest')
  for _ in range(5):
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.zeros(1, '<i4').tobytes()
    sparse = datum.loss_fn_inputs.add(key='target_tokens').value
    sparse.dtype = 2
    sparse.shape.extend([1, 1 << 20])
    sparse.sparse_csr.values = sparse.sparse_csr.col_indices = np.zeros(
      1, '<i8'
    ).tobytes()
    sparse.sparse_csr.crow_indices = np.arange(2).astype('<i8').tobytes()
  with refused('4,194,304 targets', http.RefusedError):
    messages.read_forward_backward(messages.parse(request.SerializeToString()))
  sparse.shape[1] += 1
  with refused('no sparse matrix', http.RefusedError):
    messages.read_forward_backward(messages.parse(request.SerializeToString()))


def test_a_gradient_is_the_learners():
  """Of rows without trees, in a table made by hand, and of an adapter of lower rank."""
  run, weights = service.learn().start(service.SHAPE), np.array([0, 0, 1, 2, 1, 1, 0.5])
  longer = np.append(service.TEXT, [4, 5]).astype(np.int32)
  data = [
    data_lib.make_datum(text[:-1], {'target_tokens': np.ma.array(text[1:]), 'weights': w})
    for text, w in (
      (service.TEXT, np.ma.array(weights)),
      (longer, np.ma.ones(len(longer) - 1)),
    )
  ]
  run.state = run.state._replace(params=_disturb(run.state.params))
  loss = losses_lib.Losses().find('cross_entropy', {})
  service.finish(service.learn().differentiate(run, data, loss))
  segments = [types.Segment(t, t >= 0, np.zeros(len(t))) for t in (service.TEXT, longer)]
  tokens = table.from_segments(segments)
  advantages = np.concatenate([[0], weights, [0], np.ones(len(longer) - 1)])
  tokens = dataclasses.replace(
    tokens, advantages=advantages, weights=(advantages > 0).astype(float)
  )
  rows = packing.MicrobatchShape(2, service.ROW, trees=False)
  batches, _ = packing.pack_microbatches(tokens, rows)

  def plain(stats, batch):
    return losses.weighted(-batch.advantages * stats.logprobs, batch.weights), {}

  want = learner.forward_backward(
    run.state.params, batches, config=service.TINY, loss=plain
  )
  assert run.gradients is not None
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max() + 1e-7),
    run.gradients.learned,
    want.learned,
  )
  sums = run.gradients.sums['loss'], want.sums['loss']
  np.testing.assert_allclose(*sums, rtol=1e-5)
  # What the adapter has not stays zero.
  for leaf in run.gradients.learned['layers']['mlp']['up'].values():
    assert not np.asarray(leaf).any()
  once = np.array(run.gradients.learned['layers']['attn']['q']['lora_b'])
  assert not once[:, 2:].any() and once.any()
  # Two passes add up, and a step uses them up.
  service.finish(service.learn().differentiate(run, data, loss))
  again = run.gradients.learned['layers']['attn']['q']['lora_b']
  np.testing.assert_allclose(again, 2 * once, rtol=1e-5)
  service.learn().optim_step(run, wire.AdamParams().model_dump(exclude={'type'}))
  assert run.gradients is None


def _disturb(tree):
  """Makes B of the first two ranks of the attention unequal 0."""
  adapter = lora.take(tree)
  for leaves in adapter['layers']['attn'].values():
    leaves['lora_b'] = leaves['lora_b'].at[:, :2].set(0.1)
  return lora.join(adapter, service.params())


def _p(logprobs, old):
  return np.exp(logprobs) - np.exp(old)


@pytest.mark.parametrize(
  ('name', 'options', 'want'),
  [
    ('cross_entropy', {}, lambda r, a, lp, old: -a * lp),
    ('importance_sampling', {}, lambda r, a, lp, old: -r * a),
    (
      'ppo',
      {'clip_low_threshold': 0.9},
      lambda r, a, lp, old: -np.minimum(r * a, np.clip(r, 0.9, 1.2) * a),
    ),
    (
      'cispo',
      {'clip_high_threshold': 1.1},
      lambda r, a, lp, old: -np.clip(r, 0.0, 1.1) * a * lp,
    ),
    ('cispo', {}, lambda r, a, lp, old: -np.clip(r, 0.0, 4.0) * a * lp),
    ('dro', {'beta': 0.5}, lambda r, a, lp, old: -(a * lp - 0.25 * (lp - old) ** 2)),
    (
      'dppo',
      {'delta_low': 0.01},
      lambda r, a, lp, old: (
        -r * a * lp * np.where(a > 0, _p(lp, old) <= 0.2, _p(lp, old) >= -0.01)
      ),
    ),
    ('gspo', {'clip_low_threshold': 0.5, 'clip_high_threshold': 2.0}, None),
  ],
)
def test_each_loss_is_its_formula(name, options, want):
  rng = np.random.default_rng(1)
  lp, old, a = (
    -rng.random((1, 6)) - 0.1,
    -rng.random((1, 6)) - 0.1,
    rng.normal(size=(1, 6)),
  )
  a[0, 0] = old[0, 0] = 0  # A token that was not sampled.
  batch = dict.fromkeys(types.Batch._fields) | {'old_logprobs': old, 'advantages': a}
  batch |= {'weights': np.ones((1, 6)), 'segment_ids': np.ones((1, 6), int)}
  loss = losses_lib.Losses().find(name, options)
  stats = jax.tree.map(jnp.asarray, (losses.TokenStats(lp, lp), types.Batch(**batch)))
  found, _ = loss.surrogate(*stats)
  if want is None:
    ratio = np.exp((lp - old)[:, 1:].mean())
    expected = -np.minimum(ratio * a, np.clip(ratio, 0.5, 2) * a)
  else:
    expected = want(np.exp(lp - old), a, lp, old)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gspo_takes_the_ratio_over_the_masks_tokens():
  """As the cookbook's recipe sends it; a token of log-prob 0 may be one of them."""
  old = np.array([0, 0, 0, -1, 0, -1, -1], np.float32)
  mask = (np.arange(7) >= 3).astype(np.float32)
  columns = {'target_tokens': service.TEXT[1:], 'logprobs': old, 'advantages': 0.5 * mask}
  columns['advantages'][4] = 0  # Nothing but the mask tells that it was sampled.
  loss = losses_lib.Losses().find('gspo', {'clip_high_threshold': 9.0})

  def compute(**more):
    arrays = {k: np.ma.array(v) for k, v in (columns | more).items()}
    datum = data_lib.make_datum(service.TEXT[:7], arrays)
    return service.finish(
      service.learn().score(service.learn().no_adapter, [datum], loss)
    )

  found = compute(sequence_ratio_mask=mask)
  ratio = np.exp((found.logprobs[0] - old)[3:].mean())
  clipped = np.maximum(ratio, 1 - 3e-4)
  want = -np.minimum(ratio, clipped) * columns['advantages']
  np.testing.assert_allclose(found.losses[0], want, rtol=1e-4)
  assert abs(compute().loss - found.loss) > 0.001


def test_who_tries_many_options_takes_none_from_others(refused):
  found = losses_lib.Losses()
  with refused('sets of loss options', http.RefusedError):
    for n in range(40):
      found.find('dro', {'beta': n / 100})
  assert found.find('cross_entropy', {}) and found.find('ppo', {})
