"""The learner and its experience: layouts do not matter, only action tokens do."""

import functools

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import advantages, algorithms, experience, learner, losses, packing

_CONFIG = decoder.DecoderConfig(
  family='qwen3',
  vocab_size=64,
  embed_dim=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=24,
  qk_norm=True,
)
_TEMPERATURE = 0.7
_PPO = algorithms.ppo(
  gamma=0.9,
  lam=0.8,
  value_coef=0.5,
  kl_coef=0.01,
  entropy_coef=0.01,
  aggregate=algorithms.seq_mean_token_mean,
)
_GRPO = algorithms.grpo(kl_coef=0.0, dual_clip=None)


@pytest.fixture(scope='module', autouse=True)
def quick_compiler():
  """Most of the time goes into compiling what runs a few times only."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


def _loss(stats, batch):
  """PPO's loss with GRPO's KL: everything that a loss can read. Metrics of both."""
  total, metrics = _PPO.loss(stats, batch)
  kl = losses.weighted(losses.k3(stats.logprobs, batch.ref_logprobs), batch.weights)
  unweighted = [jnp.sum(jnp.abs(x) * (batch.weights == 0)) for x in stats]
  return total + 0.1 * kl, metrics | {'kl': kl, 'unweighted': sum(unweighted)}


def _tree(seed, value_head=False):
  """Random parameters; no norm is 1 and no value head 0."""
  rng, key = np.random.default_rng(seed), jax.random.key(0)
  shapes = jax.eval_shape(lambda: decoder.init(_CONFIG, key, value_head=value_head))

  def draw(path, x):
    scale = rng.normal(scale=0.3, size=x.shape).astype(np.float32)
    return 1 + scale if 'norm' in jax.tree_util.keystr(path) else scale

  return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def _params(kind='shared'):
  """Policy alone; with a value head ('shared'); with a critic of its own ('critic')."""
  params = {'policy': _tree(0, kind == 'shared')}
  if kind == 'critic':
    params['critic'] = _tree(2, True)
  return params


@functools.cache
def _reference():
  return _tree(1)


@functools.cache
def _trajectories():
  """Of several turns, with environment tokens inside, over one or two segments."""
  return episodes.varied(14)


def _scored(trajectories, algorithm=_PPO, kind='shared', *, row_tokens=32, rows=2):
  return experience.credit(
    trajectories,
    algorithm,
    params=_params(kind),
    ref_params=_reference(),
    config=_CONFIG,
    temperature=_TEMPERATURE,
    row_tokens=row_tokens,
    rows=rows,
  )


@functools.cache
def _experience():
  return _scored(_trajectories())


def _batches(members=range(14), *, row_tokens=32, rows=2):
  return experience.minibatch(
    _experience(), list(members), _PPO, row_tokens=row_tokens, rows=rows
  )


def _gradient(batches, kind='shared', loss=_loss):
  """The gradient and the metrics of all micro-batches together."""
  parts = [
    learner._gradient(
      _params(kind), batch, config=_CONFIG, loss=loss, temperature=_TEMPERATURE
    )
    for batch in batches
  ]
  return jax.tree.map(lambda *xs: np.sum(xs, axis=0), *parts)


@functools.cache
def _expected():
  return _gradient(_batches())


def _assert_close(actual, expected, tolerance=2e-5):
  """Relative to the largest number of a leaf."""

  def check(path, a, b):
    scale = np.abs(b).max()
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=name)

  jax.tree_util.tree_map_with_path(check, actual, expected)


def _padded(trajectories):
  """Each segment in a row of its own."""
  segments = [s for t in trajectories for s in t.segments]
  where = packing.Layout(
    tuple(len(s.tokens) for s in segments),
    tuple((i, 0) for i in range(len(segments))),
    len(segments),
    32,
  )
  return segments, where, packing.pack(segments, where)


def _direct(tree, tokens):
  """log π and entropy of each next token, and the value before it, written plainly."""
  ones = jnp.ones_like(tokens)
  positions = jnp.cumsum(ones, axis=1) - 1
  x = decoder.hidden(tree, _CONFIG, tokens, positions, ones)[:, :-1]
  log_p = jax.nn.log_softmax(x @ tree['lm_head']['kernel'] / _TEMPERATURE)
  chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
  entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
  head = tree.get('value_head', {'kernel': jnp.zeros((16, 1)), 'bias': jnp.zeros(1)})
  values = x @ head['kernel'][:, 0] + head['bias'][0]
  return tuple(jnp.pad(y, ((0, 0), (1, 0))) for y in (chosen, entropy, values))


@functools.cache
def _direct_stats(which):
  """Of each segment of _trajectories(): log-probs, entropies, values."""
  tree = {
    'policy': _params()['policy'],
    'critic': _params('critic')['critic'],
    'reference': _reference(),
  }[which]
  _, where, batch = _padded(_trajectories())
  return [where.extract(np.asarray(x)) for x in jax.jit(_direct)(tree, batch.tokens)]


# Forward.


def _packed():
  segments = [s for t in _trajectories() for s in t.segments]
  where = packing.layout([len(s.tokens) for s in segments], row_tokens=32, row_multiple=2)
  return where, packing.pack(segments, where)


def _score(params, batch):
  return learner.score(params, batch, config=_CONFIG, temperature=_TEMPERATURE)


@pytest.mark.parametrize('kind', ['shared', 'critic', 'policy'])
def test_token_stats_are_what_the_model_says_of_each_token(kind):
  where, batch = _packed()
  assert batch.segment_ids.max() > 1, 'segments share a row'
  stats = _score(_params(kind), batch)
  logprobs, entropy, values = _direct_stats('policy')
  if kind == 'critic':
    values = _direct_stats('critic')[2]
  for actual, expected in zip(stats, (logprobs, entropy, values)):
    if actual is None:
      assert kind == 'policy' and actual is stats.values
      continue
    actual = np.asarray(actual)
    for a, e in zip(where.extract(actual), expected, strict=True):
      np.testing.assert_allclose(a, e, rtol=0, atol=2e-5)
      assert a[0] == 0 and (a[1:] != 0).all()
    assert (actual[batch.segment_ids == 0] == 0).all()


def test_logits_in_blocks_change_nothing(monkeypatch):
  expected = _expected()  # Traced before the blocks are small.
  sizes, head = set(), learner._head

  def spy(params, config, temperature, x_MD, tokens_M):
    sizes.add(len(x_MD))
    return head(params, config, temperature, x_MD, tokens_M)

  monkeypatch.setattr(learner, '_head', spy)
  # A row's 64 tokens in blocks of 7: the last one is filled up.
  monkeypatch.setattr(learner, '_LOGIT_BLOCK', 7 * 64 + 5)
  # A new loss, so that all is traced again.
  blocks = _gradient(_batches(), loss=lambda *xs: _loss(*xs))
  assert sizes == {7}
  _assert_close(blocks, expected)


# Gradient.


def test_the_gradient_is_that_of_the_plain_formula():
  """Σ w max(-A ρ, -A clip(ρ)) over unpacked rows: every number meets its token."""
  segments, where, padded = _padded(_trajectories())
  rng = np.random.default_rng(0)
  adv = [rng.normal(size=len(s.tokens)) * s.action_mask for s in segments]
  # Near the policy: some tokens are clipped, others not.
  old = [x + 0.3 * rng.normal(size=len(x)) for x in _direct_stats('policy')[0]]
  old = [x * s.action_mask for x, s in zip(old, segments)]

  tokens = jnp.asarray(padded.tokens)

  def plain(params):
    ratio = jnp.exp(_direct(params['policy'], tokens)[0] - where.place(old, np.float32))
    a = where.place(adv, np.float32)
    loss = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.8, 1.2))
    return 0.01 * jnp.sum(loss * padded.action_mask)

  expected_loss, expected = jax.jit(jax.value_and_grad(plain))(_params('policy'))
  packed, batch = _packed()
  batch = batch._replace(
    logprobs=packed.place(old, np.float32),
    advantages=packed.place(adv, np.float32),
    weights=batch.action_mask * np.float32(0.01),
  )
  batches = list(packing.microbatches(batch, 2))
  grads, metrics = _gradient(batches, 'policy', _GRPO.loss)
  assert 0.1 < metrics['clip_fraction'] < 0.9
  np.testing.assert_allclose(metrics['policy_loss'], expected_loss, rtol=1e-4)
  _assert_close(grads, expected)


@pytest.mark.parametrize(('row_tokens', 'rows'), [(32, 4), (50, 1)])
def test_layout_does_not_matter(row_tokens, rows):
  batches = _batches(row_tokens=row_tokens, rows=rows)
  assert len(batches) != len(_batches()) and len(batches) > 1
  _assert_close(_gradient(batches), _expected())


def test_order_does_not_matter():
  # Rows, their order and what shares them.
  _assert_close(_gradient(_batches(range(13, -1, -1))), _expected())
  _assert_close(_gradient(_batches()[::-1]), _expected())
  flipped = [jax.tree.map(lambda x: x[::-1], batch) for batch in _batches()]
  _assert_close(_gradient(flipped), _expected())
  # Rows of nothing but padding.
  nothing = jax.tree.map(np.zeros_like, _batches()[0])
  grads, metrics = _gradient([nothing])
  assert not any(map(np.any, jax.tree.leaves((grads, metrics))))


def test_nothing_off_the_mask_is_read():
  """Nor does a NaN there come through the gradient."""
  names = ('logprobs', 'advantages', 'ref_logprobs', 'values', 'returns')

  def broken(batch):
    fields = {n: np.where(batch.action_mask, getattr(batch, n), np.nan) for n in names}
    return batch._replace(**fields)

  actual = _gradient(map(broken, _batches()))
  jax.tree.map(np.testing.assert_array_equal, actual, _expected())
  # What any loss is given: nothing where nothing weighs.
  assert actual[1]['unweighted'] == 0


def test_no_gradient_comes_from_padding_and_from_what_no_action_follows():
  batches, changed, late = _batches(), [], 0
  for batch in batches:
    # Backwards in each row: is there an action of the same segment later on?
    follows = np.zeros(batch.tokens.shape, bool)
    for t in reversed(range(31)):
      same = batch.segment_ids[:, t] == batch.segment_ids[:, t + 1]
      later = batch.action_mask[:, t + 1] | follows[:, t + 1]
      follows[:, t] = same & later & (batch.segment_ids[:, t] > 0)
    free = ~follows & ~batch.action_mask
    late += (free & (batch.segment_ids > 0)).sum()
    changed.append(batch._replace(tokens=np.where(free, 63 - batch.tokens, batch.tokens)))
  assert late > 3
  jax.tree.map(np.testing.assert_array_equal, _gradient(changed), _expected())


def test_a_critic_of_its_own_learns_from_its_loss_alone():
  batches = _batches()
  grads, _ = _gradient(batches, 'critic')
  for field, changes, stays in (
    ('advantages', 'policy', 'critic'),
    ('returns', 'critic', 'policy'),
  ):
    other = [b._replace(**{field: getattr(b, field) + 0.5}) for b in batches]
    others, _ = _gradient(other, 'critic')
    jax.tree.map(np.testing.assert_array_equal, others[stays], grads[stays])
    for path, leaf in jax.tree_util.tree_leaves_with_path(others[changes]):
      # A critic has no use for the output layer.
      idle = changes == 'critic' and 'lm_head' in jax.tree_util.keystr(path)
      before = functools.reduce(lambda tree, key: tree[key.key], path, grads[changes])
      assert idle == np.array_equal(leaf, before), path


# Update.


def _state(optimizer, kind='shared'):
  return learner.init(jax.tree.map(jnp.copy, _params(kind)), optimizer)


def _update(state, batches, optimizer, loss=_loss):
  return learner.update(
    state,
    batches,
    config=_CONFIG,
    loss=loss,
    optimizer=optimizer,
    temperature=_TEMPERATURE,
  )


_SGD = optax.sgd(0.1)


def test_update_is_one_step_on_the_summed_gradient():
  grads, metrics = _expected()
  state, numbers = _update(_state(_SGD), _batches(), _SGD)
  assert int(state.step) == 1
  expected = jax.tree.map(lambda p, g: p - 0.1 * g, _params(), grads)
  _assert_close(state.params, expected, 1e-6)
  norm = numbers.pop('grad_norm')
  np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=1e-5)
  assert numbers.keys() == metrics.keys()
  for name, value in numbers.items():
    assert isinstance(value, float)
    np.testing.assert_allclose(value, metrics[name], rtol=1e-4, atol=1e-7)


def test_update_takes_any_iterable_but_not_an_empty_one():
  state = _state(_SGD)
  with pytest.raises(ValueError, match='no micro-batch'):
    _update(state, iter([]), _SGD)
  state, _ = _update(state, iter(_batches()), _SGD)
  assert int(state.step) == 1


def test_a_gradient_that_is_not_finite_names_its_leaf_and_leaves_the_state():
  state = _state(_SGD, 'critic')
  good = _batches()
  returns = good[1].returns.copy()
  returns[np.argmax(good[1].action_mask.any(axis=1))] = np.inf
  bad = [good[0], good[1]._replace(returns=returns), *good[2:]]
  name = r"\['critic'\]\['embed'\]\['embedding'\] is not finite at step 0"
  with pytest.raises(FloatingPointError, match=name):
    _update(state, bad, _SGD)
  assert int(state.step) == 0
  jax.tree.map(np.testing.assert_array_equal, state.params, _params('critic'))
  state, numbers = _update(state, good, _SGD)
  assert int(state.step) == 1 and np.isfinite(numbers['grad_norm'])


def test_updates_make_good_actions_likelier():
  """GRPO on a group of two: the rewarded reply gains, the other one loses."""
  rewards = enumerate((1.0, 0.0))
  group = [episodes.trajectory('...0000', rewards=[r], seed=i) for i, r in rewards]
  segments, where, padded = _padded(group)

  def replies(state):
    logprobs = _score(state.params, padded).logprobs
    return packing.gather(group, where.extract(np.asarray(logprobs)))

  adam = optax.adam(3e-3)
  state = _state(adam, 'policy')
  before = replies(state)
  # On-policy: what was sampled is what the learner says of it.
  for s, x in zip(segments, packing.scatter(group, before)):
    s.logprobs = x.astype(np.float32)
  scored = _scored(group, _GRPO, 'policy')
  assert scored.ref_logprobs is scored.values is None
  batches = experience.minibatch(scored, [0, 1], _GRPO, row_tokens=32, rows=2)
  assert all(b.ref_logprobs is b.values is b.returns is None for b in batches)
  history = []
  for _ in range(4):
    state, numbers = _update(state, batches, adam, _GRPO.loss)
    history.append(numbers)
  assert history[0]['clip_fraction'] == 0 and abs(history[0]['behaviour_kl']) < 1e-6
  # On-policy the loss is -Σ w A, which is 0 in a group of equal lengths.
  assert abs(history[0]['policy_loss']) < 1e-6
  assert history[-1]['policy_loss'] < -0.01
  after = replies(state)
  assert after[0].sum() > before[0].sum() and after[1].sum() < before[1].sum()


# Experience.


def test_credit_reads_reference_and_critic_at_the_action_tokens():
  scored = _experience()
  logprobs, values = _direct_stats('reference')[0], _direct_stats('policy')[2]
  trajectories = _trajectories()
  episodes_ = [advantages.actions(t) for t in trajectories]
  for e, ref, v in zip(
    episodes_,
    packing.gather(trajectories, logprobs),
    packing.gather(trajectories, values),
  ):
    e.ref_logprobs, e.values = ref.astype(np.float64), v.astype(np.float64)
  for actual, episode in zip(scored.ref_logprobs, episodes_, strict=True):
    np.testing.assert_allclose(actual, episode.ref_logprobs, rtol=0, atol=2e-5)
  for actual, episode in zip(scored.values, episodes_, strict=True):
    np.testing.assert_allclose(actual, episode.values, rtol=0, atol=2e-5)
  expected = _PPO.advantages(episodes_)
  for actual, credit in zip(scored.credits, expected, strict=True):
    np.testing.assert_allclose(actual.advantages, credit.advantages, atol=1e-4)
    np.testing.assert_allclose(actual.returns, credit.returns, atol=1e-4)


def test_a_separate_critic_is_read():
  scored = _scored(_trajectories(), kind='critic')
  values = packing.gather(_trajectories(), _direct_stats('critic')[2])
  for actual, expected in zip(scored.values, values, strict=True):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def _made_up(trajectories):
  """Experience with a different number for every action token."""
  counter = iter(range(1, 10_000))
  sizes = [sum(s.action_mask.sum() for s in t.segments) for t in trajectories]

  def numbers():
    return [np.array([next(counter) for _ in range(n)], float) for n in sizes]

  credits = [algorithms.Credit(*pair) for pair in zip(numbers(), numbers())]
  return experience.Experience(trajectories, numbers(), numbers(), credits)


@pytest.mark.parametrize('members', [range(14), [5, 0, 2], [1]])
@pytest.mark.parametrize('aggregate', ['token_mean', 'seq_mean_token_mean'])
def test_minibatch_puts_every_number_at_its_token(members, aggregate):
  made_up = _made_up(_trajectories())
  aggregate = getattr(algorithms, aggregate)
  algorithm = _PPO._replace(aggregate=aggregate)
  batches = experience.minibatch(made_up, members, algorithm, row_tokens=40, rows=3)
  assert {b.tokens.shape for b in batches} == {(3, 40)}
  whole = types.Batch(*(np.concatenate(parts) for parts in zip(*batches)))
  chosen = [made_up.trajectories[i] for i in members]
  segments = [s for t in chosen for s in t.segments]
  where = packing.layout([len(s.tokens) for s in segments], row_tokens=40, row_multiple=3)

  def at_actions(field):
    return packing.gather(chosen, where.extract(getattr(whole, field)))

  counts = [len(made_up.values[i]) for i in members]
  for i, weight, *of_field in zip(
    members,
    aggregate(np.array(counts)),
    *map(at_actions, ('advantages', 'returns', 'ref_logprobs', 'values', 'weights')),
    strict=True,
  ):
    credit, n = made_up.credits[i], len(made_up.values[i])
    expected = (
      credit.advantages,
      credit.returns,
      made_up.ref_logprobs[i],
      made_up.values[i],
      np.full(n, weight),
    )
    for a, b in zip(of_field, expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6)
  # The denominators are those of these members, and nothing stands off the mask.
  np.testing.assert_allclose(whole.weights.sum(), 1, rtol=1e-6)
  for x in (whole.advantages, whole.returns, whole.ref_logprobs, whole.values):
    assert ((x != 0) == whole.action_mask).all()
  assert ((whole.weights != 0) == whole.action_mask).all()


def test_token_mean_weighs_tokens_and_seq_mean_trajectories():
  short, long = episodes.trajectory('..0'), episodes.trajectory('..000', '.11')
  made_up = _made_up([short, long])

  def weights(aggregate):
    algorithm = _PPO._replace(aggregate=aggregate)
    (batch,) = experience.minibatch(made_up, [0, 1], algorithm, row_tokens=16, rows=1)
    return sorted(batch.weights[batch.weights > 0])

  np.testing.assert_allclose(weights(algorithms.token_mean), [1 / 6] * 6, rtol=1e-6)
  np.testing.assert_allclose(
    weights(algorithms.seq_mean_token_mean), [0.1] * 5 + [0.5], rtol=1e-6
  )


def test_summary():
  rewards = [(0, [1.0]), (0, [1.0]), (1, [0.0]), (1, [1.0]), (2, [0.3]), (2, [0.3])]
  trajectories = [
    episodes.trajectory('.0', rewards=r, group=group) for group, r in rewards
  ]
  trajectories += [
    episodes.trajectory('.0.1', rewards=[0.1, 0.2], group=2),
    episodes.trajectory('.0', rewards=[5.0], group=3),
  ]
  made_up = _made_up(trajectories)
  numbers = experience.summary(made_up)
  flat = np.concatenate([c.advantages for c in made_up.credits])
  # 0.1 + 0.2 is not 0.3 to a computer; one alone has nothing to compare.
  assert numbers == {'dead_groups': 0.75, 'advantage_std': float(flat.std())}


def test_a_segment_that_fits_no_row_is_refused():
  with pytest.raises(ValueError, match='does not fit a row of 16'):
    _scored(_trajectories(), row_tokens=16)
