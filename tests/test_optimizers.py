"""Optimizers: the size of their states, their steps, and that they learn."""

import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import sharding
from agent_r1_jax.rl import optimizers

_SHAPE = (2, 256, 384)  # L D F


def _of_a_layer(kernel):
  return {'layers': {'mlp': {'up': {'kernel': kernel}}}}


def _bytes(kind):
  """Returns the bytes of the state of a parameter."""
  params = _of_a_layer(jax.ShapeDtypeStruct(_SHAPE, jnp.float32))
  state = jax.eval_shape(optimizers.KINDS[kind](1e-3, 0.0).init, params)
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  return size / np.prod(_SHAPE)


@pytest.mark.parametrize(
  ('kind', 'expected'),
  [
    ('adamw', 8.0),
    ('adamw8', 2 + 8 / 384),
    ('adafactor', 4 / 256 + 4 / 384),
    ('muon', 4.0),
  ],
)
def test_state_takes_the_expected_bytes_a_parameter(kind, expected):
  assert _bytes(kind) == pytest.approx(expected, rel=3e-3)


@pytest.mark.parametrize('kind', list(optimizers.KINDS))
def test_every_optimizer_learns_a_noisy_regression(kind):
  """A noisy regression whose inputs are of very different sizes."""
  rng = np.random.default_rng(0)
  sizes = 10.0 ** rng.uniform(-2, 0, 128).astype(np.float32)
  wanted = rng.normal(size=(128, 128)).astype(np.float32)
  optimizer = optimizers.make(
    config_lib.Optimizer(kind=kind, warmup=5, clip_norm=1e9), 1e-1
  )

  def loss(params, x):
    kernel = params['layers']['mlp']['up']['kernel'][0]
    return jnp.mean(jnp.square(x @ (kernel - wanted)))

  @jax.jit
  def step(params, state, key):
    x = jax.random.normal(key, (64, 128)) * sizes[None]
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  params = _of_a_layer(jnp.zeros((1, 128, 128)))
  state, history = optimizer.init(params), []
  for number in range(150):
    params, state, value = step(params, state, jax.random.key(number))
    history.append(float(value))
  assert np.mean(history[-10:]) < 0.1 * np.mean(history[:3])


_BETAS = pytest.mark.parametrize(
  'options',
  [{}, {'adam_b1': 0.8, 'adam_b2': 0.999, 'adam_eps': 0.1}],
  ids=['default', 'given'],
)


def _adam(gradients, *, rate, clip_norm, b1, b2, eps):
  """Computes Adam's steps by its paper, in float64."""
  m, v, steps = np.zeros_like(gradients[0]), np.zeros_like(gradients[0]), []
  for t, g in enumerate(gradients, start=1):
    g = g * min(1.0, clip_norm / np.linalg.norm(g))
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    steps.append(-rate * m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps))
  return steps


@pytest.mark.parametrize('kind', optimizers.KINDS)
def test_matrices_decay_and_by_an_option_all(kind):
  """Scales of norms and biases are stacked over layers, and have several dimensions."""
  config, rate = tiny.config('qwen2_5_vl', layers=1), 1e-2
  params = tiny.add_adapters(tiny.params(config), 2, ('q',), 2.0, b=0.1)
  ones = lambda *shape: np.ones(shape, np.float32)
  params['value_head'] = {'kernel': ones(16, 1), 'bias': ones(1)}
  kinds = {}  # Of leaves, by name and number of dimensions; one of each is enough.
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    kinds.setdefault((path[-1].key, leaf.ndim), (tuple(key.key for key in path), leaf))
  assert len(kinds) > 9
  params = jax.device_get(traverse_util.unflatten_dict(dict(kinds.values())))
  options = {'kind': kind, 'weight_decay': 0.1}
  made = [
    optimizers.make(config_lib.Optimizer(**options, decay_all=decay_all), rate)
    for decay_all in (False, True)
  ]

  @jax.jit
  def step(zeros, params):  # Both in one program, whose moments are computed once.
    return [x.update(zeros, x.init(params), params)[0] for x in made]

  moved = {'kernel', 'embedding', 'lora_a', 'lora_b'}
  found = step(jax.tree.map(np.zeros_like, params), params)
  for decay_all, updates in enumerate(found):
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
      decays = decay_all or path[-1].key in moved
      param = functools.reduce(lambda tree, key: tree[key.key], path, params)
      want = -rate * 0.1 * param if decays else np.zeros_like(param)
      np.testing.assert_allclose(update, want, rtol=1e-5, err_msg=str(path))


# Eight bits are rounded: to 1/16 of a moment, and thrice in three steps.
@pytest.mark.parametrize(('kind', 'tolerance'), [('adamw', 1e-5), ('adamw8', 0.15)])
@_BETAS
def test_adam_by_hand_of_clipped_gradients(kind, tolerance, options):
  """Gradients of very different norms: they are clipped, and not the steps.

  Without the clip, or with one after Adam, the second and third step would be of the
  first gradient's moments alone.
  """
  rng = np.random.default_rng(0)
  gradients = [
    norm * x / np.linalg.norm(x)
    for norm, x in zip((1e4, 2.0, 0.5), rng.uniform(0.5, 1.0, (3, 4, 8)), strict=True)
  ]
  named = {'b1': 0.9, 'b2': 0.95, 'eps': 1e-8}
  named |= {name.removeprefix('adam_'): value for name, value in options.items()}
  expected = _adam(gradients, rate=1e-2, clip_norm=1.0, **named)
  optimizer = optimizers.make(config_lib.Optimizer(kind=kind, **options), 1e-2)
  params = {'kernel': jnp.zeros((4, 8))}
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  for gradient, step in zip(gradients, expected, strict=True):
    grads = {'kernel': jnp.asarray(gradient, jnp.float32)}
    updates, state = update(grads, state, params)
    np.testing.assert_allclose(updates['kernel'], step, rtol=tolerance)


@pytest.mark.parametrize('name', ['adam_b1', 'adam_b2', 'adam_eps'])
def test_numbers_of_adam_are_refused_where_they_mean_nothing(name):
  for value in (-0.1, 0.0 if name == 'adam_eps' else 1.0, float('nan')):
    with pytest.raises(ValueError, match=f'{name} is {value}; it must be'):
      optimizers.make(config_lib.Optimizer(**{name: value}), 1e-3)
  with pytest.raises(ValueError, match=f"{name}.*'adafactor' reads none.*'adamw'"):
    optimizers.make(config_lib.Optimizer(kind='adafactor', **{name: 0.5}), 1e-3)


def test_eight_bits_follow_adam():
  """With zero gradients in between: a moment that only falls must fall."""
  params = {'kernel': jnp.zeros((16, 256))}
  exact, rounded = optax.scale_by_adam(b2=0.95), optimizers.scale_by_adam8()
  states = [exact.init(params), rounded.init(params)]
  steps = [jax.jit(x.update) for x in (exact, rounded)]
  rng = np.random.default_rng(0)
  drawn = rng.normal(size=(30, 16, 256)).astype(np.float32)
  for number, gradient in enumerate(drawn):
    grads = {'kernel': jnp.asarray(gradient * (number < 20))}
    for i, step in enumerate(steps):
      updates, states[i] = step(grads, states[i])
  nu, held = states[0].nu['kernel'], states[1].root_nu
  found = jnp.square(held.codes['kernel'].astype(jnp.float32) * held.scales['kernel'])
  ratio = np.asarray(found / nu)
  assert abs(np.median(ratio) - 1) < 0.1 and ratio.min() > 0.4 and ratio.max() < 2.5


def test_the_rate_is_reached_after_the_warmup():
  """Adam's steps of an equal gradient are the rate."""
  optimizer = optimizers.make(config_lib.Optimizer(warmup=3), 1e-2)
  params, found = {'kernel': jnp.zeros((2, 4))}, []
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  for _ in range(6):
    steps, state = update({'kernel': jnp.full((2, 4), 0.1)}, state, params)
    found.append(-float(steps['kernel'][0, 0]))
  expected = [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]
  np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_eight_bits_round_no_second_moment_to_0():
  """A parameter whose gradient is small beside its row's would step without a bound."""
  gradient = np.concatenate([[1.0], np.logspace(-12, -1, 255)]).astype(np.float32)
  optimizer = optimizers.scale_by_adam8()
  state = optimizer.init({'kernel': jnp.zeros((2, 256))})
  grads = {'kernel': jnp.stack([jnp.asarray(gradient), jnp.zeros(256)])}
  steps, state = jax.jit(optimizer.update)(grads, state)
  codes = np.asarray(state.root_nu.codes['kernel'], np.float32)
  assert (codes[0] >= 2.0**-9).all() and not codes[1].any()
  # Adam's second step of an equal gradient is 1, less where the moment was raised.
  steps, _ = jax.jit(optimizer.update)(grads, state)
  assert np.abs(steps['kernel']).max() < 1.3


def _newton_schulz(g):
  """Muon's direction of a matrix, by its authors' listing in float64."""
  x = g / np.linalg.norm(g)
  for _ in range(5):
    y = x @ x.T
    x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
  return x


def _muon(gradients, *, rate, decay, kernel, inputs):
  """Computes Muon's steps of the kernel of one layer, as matrix of `inputs` rows."""
  m, steps = np.zeros((inputs, kernel.size // inputs)), []
  for t, g in enumerate(gradients, start=1):
    g = g.reshape(m.shape)
    m = 0.95 * m + 0.05 * g
    # Nesterov's momentum: what the next gradient, if it is like this one, makes of m.
    ahead = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
    step = 0.2 * np.sqrt(max(m.shape)) * _newton_schulz(ahead)
    steps.append(-rate * (step.reshape(kernel.shape) + decay * kernel))
    kernel = kernel + steps[-1]
  return steps


def test_muon_by_hand():
  """Kernels of two layers with two axes of outputs or of inputs; the rest has AdamW."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape)
  head, embedding = {'kernel': draw(6, 9)}, {'embedding': draw(9, 6)}
  attn = {'q': {'kernel': draw(2, 6, 4, 5), 'bias': draw(2, 4, 5)}}
  attn['o'] = {'kernel': draw(2, 4, 5, 6)}
  params = {'layers': {'attn': attn}, 'lm_head': head, 'embed': embedding}
  gradients = [jax.tree.map(lambda x: draw(*x.shape), params) for _ in range(3)]
  options = {'kind': 'muon', 'clip_norm': 1e9, 'weight_decay': 0.1}
  found, with_adam = [], []
  for kind, steps in (('muon', found), ('adamw', with_adam)):
    options['kind'] = kind
    optimizer = optimizers.make(config_lib.Optimizer(**options), 1e-2)
    here = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state, update = optimizer.init(here), jax.jit(optimizer.update)
    for grads in gradients:
      grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads)
      updates, state = update(grads, state, here)
      here = optax.apply_updates(here, updates)
      steps.append(updates)
  for name, inputs in (('q', 6), ('o', 20)):
    take = lambda tree, name=name: tree['layers']['attn'][name].pop('kernel')
    given, kernel = [take(x) for x in gradients], take(params)
    steps, _ = [take(x) for x in found], [take(x) for x in with_adam]
    for layer in range(2):
      expected = _muon(
        [g[layer] for g in given],
        rate=1e-2,
        decay=0.1,
        kernel=kernel[layer],
        inputs=inputs,
      )
      for step, want in zip(steps, expected, strict=True):
        np.testing.assert_allclose(step[layer], want, rtol=0, atol=1e-3 * 1e-2)
  assert len(jax.tree.leaves(found[0])) == 3  # The bias, the head and the embedding.
  jax.tree.map(np.testing.assert_array_equal, found, with_adam)


def test_rounding_is_right_on_average():
  encode = jax.jit(optimizers._encode, static_argnames='least')
  x = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (4, 64)), jnp.float32)
  many, key = jnp.tile(x[None], (2000, 1, 1)), jax.random.key(0)
  mean = optimizers._decode(*encode(many, key)).mean(0)
  # A step is an eighth of a number at most; its mean over 2000 is 30 times nearer.
  far = np.abs(x) > 1e-3
  np.testing.assert_allclose(mean[far], x[far], rtol=0.02)
  some = jnp.abs(x).at[:, 1:].set(0.0)
  codes, scales = encode(some, key, least=2.0**-9)
  assert (np.asarray(codes, np.float32) > 0).all()
  none = jnp.zeros_like(x)
  found = optimizers._decode(*encode(none, key, least=2.0**-9))
  np.testing.assert_array_equal(found, none)


# As those of an adapter's A, of tokens not met yet, and of a batch without advantages;
# and of rows whose moments have become too small to be squared.
@pytest.mark.parametrize('before', [0, 1, 3000])
def test_gradients_that_were_zero_leave_no_trace_in_8_bits(before):
  params, steps = {'kernel': jnp.zeros((4, 64))}, {}
  some = {'kernel': jnp.asarray(np.random.default_rng(0).normal(size=(4, 64))) * 1e-4}
  none = jax.tree.map(jnp.zeros_like, some)
  for name, make in {'adam': optax.scale_by_adam, '8': optimizers.scale_by_adam8}.items():
    optimizer = make(b1=0.9, b2=0.95, eps=1e-8)
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    if before > 1:
      _, state = update(some, state)
    for _ in range(before):
      _, state = update(none, state)
    for _ in range(5):
      step, state = update(some, state)
    steps[name] = np.abs(step['kernel']).mean()
  assert steps['8'] == pytest.approx(steps['adam'], rel=0.03)


def test_an_unknown_optimizer_is_refused():
  with pytest.raises(ValueError, match="optimizer.kind is 'sgd'; give one of"):
    optimizers.make(config_lib.Optimizer(kind='sgd'), 1e-3)


def test_state_moves_to_the_hosts_memory_and_back():
  params = {'kernel': jnp.ones((4, 8))}
  optimizer = optimizers.adamw8(1e-2, 0.0)
  state = optimizer.init(params)
  away = sharding.to_host(state)
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  assert kinds(away) == {'pinned_host'}
  back = sharding.to_device(away)
  assert kinds(back) == {'device'} and kinds(
    sharding.match_memory_kind(back, away)
  ) == kinds(away)
  jax.tree.map(np.testing.assert_array_equal, back, state)
  # Arrays that are on the device already are not copied.
  here = sharding.to_device(state)
  assert all(x is y for x, y in zip(jax.tree.leaves(here), jax.tree.leaves(state)))
