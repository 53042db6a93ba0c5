"""The learner: one forward pass for every log-prob, accumulated gradients, one update.

Letters: B rows, T tokens, M tokens of the flattened batch, D embed, V vocabulary.
"""

from collections.abc import Callable, Iterable
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.host import sharding
from agent_r1_jax.models import decoder, head, lora
from agent_r1_jax.rl import algorithms, losses

# What a batch says of each token and a loss may read.
_NUMBERS = (
  'logprobs',
  'advantages',
  'ref_logprobs',
  'kl_weights',
  'correction',
  'values',
  'returns',
)
Watched = dict[str, Float[Array, 'B T']]
Loss = Callable[[losses.TokenStats, types.Batch], tuple[Array, Watched]]


class ModelState(NamedTuple):
  """What training changes: of the policy, and of a critic that is a model of its own.

  Attributes:
    params: The parameters of one model; with a 'value_head' in the policy's, its critic
      is a second head.
    opt_state: Optax's state for what lora.split says is learned: all parameters, or the
      adapters.
    step: Updates so far, int32 [].
  """

  params: decoder.Params
  opt_state: Any
  step: Array


class NotFiniteError(FloatingPointError):
  """A loss or a gradient is not finite; `batches` are the micro-batches it came from."""

  def __init__(self, message: str, batches: list[types.Batch]):
    super().__init__(message)
    self.batches = batches


def init(params: decoder.Params, optimizer: optax.GradientTransformation) -> ModelState:
  """A ModelState at step 0; on the mesh that is set, with the parameters."""
  step = lambda: jnp.zeros((), jnp.int32)
  opt_state = sharding.init_sharded(optimizer.init, lora.split(params)[0])
  return ModelState(params, opt_state, sharding.init_sharded(step))


def token_stats(
  params: decoder.Params,
  batch: types.Batch,
  *,
  config: decoder.DecoderConfig,
  temperature: float = 1.0,
  wanted: Bool[Array, 'B T'] | None = None,
) -> losses.TokenStats:
  """Log-probs, entropies and values of tokens; 0 at the first of a segment.

  Args:
    params: The parameters of one model; values are given if it has a value head.
    batch: Only tokens, positions and segment_ids are read.
    config: The model's shape.
    temperature: What the tokens were sampled at.
    wanted: Others get 0 and cost no logits; None is all.
  """
  text = (batch.tokens, batch.positions, batch.segment_ids)
  x_BTD = _before(decoder.hidden(params, config, *text))
  # The first token of a segment was given, not predicted.
  wanted = batch.positions > 0 if wanted is None else wanted & (batch.positions > 0)
  logprobs, entropy = head.logprobs(
    x_BTD,
    decoder.head_kernel(params, config),
    batch.tokens,
    wanted,
    temperature,
    head.block_tokens(config.vocab_size),
  )
  values = decoder.values(params, x_BTD) if 'value_head' in params else None
  stats = losses.TokenStats(logprobs, entropy, values)
  return jax.tree.map(lambda y: jnp.where(wanted, y, 0.0), stats)


def logprobs(params, batch, *, config, temperature=1.0) -> np.ndarray:
  """token_stats' log-probs alone, float32 [B, T] on the host."""
  batch = sharding.shard_batch(batch)
  return np.asarray(_logprobs(params, batch, config=config, temperature=temperature))


def values(params, batch, *, config) -> np.ndarray:
  """The critic's value of the state after each token: token_stats' shifted by one."""
  return np.asarray(_values(params, sharding.shard_batch(batch), config=config))


@functools.partial(jax.jit, static_argnames=('config', 'temperature'))
def _logprobs(params, batch, *, config, temperature):
  stats = token_stats(params, batch, config=config, temperature=temperature)
  return sharding.replicate(stats.logprobs)


@functools.partial(jax.jit, static_argnames='config')
def _values(params, batch, *, config):
  text = (batch.tokens, batch.positions, batch.segment_ids)
  return sharding.replicate(decoder.values(params, decoder.hidden(params, config, *text)))


def objective(algorithm: algorithms.Algorithm, *, shared_critic: bool = False) -> Loss:
  """The policy's whole loss: the algorithm's, entropy, KL, the critic's if it is shared.

  Give the same object to every `update`: it is compiled once for each.
  """
  kl, value_loss = algorithm.kl, algorithm.value_loss

  def loss(stats, batch):
    per_token, watched = algorithm.loss(stats, batch)
    if batch.correction is not None:
      per_token = per_token * batch.correction
    total = losses.weighted(per_token, batch.weights)
    watched = watched | {'entropy': stats.entropy}
    total -= algorithm.entropy_coef * losses.weighted(stats.entropy, batch.weights)
    if kl and batch.kl_weights is not None:
      watched['kl'] = kl.estimator(stats.logprobs, batch.ref_logprobs)
      total += losses.weighted(watched['kl'], batch.kl_weights)
    if shared_critic and value_loss:
      error = value_loss(stats.values, batch)
      if algorithm.advantage_mask:  # Other tokens have no return to learn.
        error = jnp.where(batch.action_mask, error, 0.0)
      watched['value_loss'] = error
      total += algorithm.value_coef * losses.weighted(error, batch.weights)
    return total, watched

  return loss


def critic_objective(algorithm: algorithms.Algorithm) -> Loss:
  """The loss of a critic that is a model of its own."""
  value_loss = algorithm.value_loss
  if value_loss is None:
    raise ValueError('The algorithm has no value_loss, so it has no critic.')

  def loss(stats, batch):
    per_token = value_loss(stats.values, batch)
    return losses.weighted(per_token, batch.weights), {'value_loss': per_token}

  return loss


def update(
  state: ModelState,
  batches: Iterable[types.Batch],
  *,
  config: decoder.DecoderConfig,
  loss: Loss,
  optimizer: optax.GradientTransformation,
  temperature: float = 1.0,
) -> tuple[ModelState, dict[str, float]]:
  """One optimizer step on the sum of the micro-batches' gradients.

  Args:
    state: Donated, but for what is frozen: that may be shared with other models. If
      opt_state lies in the host's memory (sharding.to_host), so does the new one; it is
      on the device only while it is updated.
    batches: Micro-batches of one shape; their weights add up over all of them.
    config: The model's shape.
    loss: (TokenStats, Batch) -> this micro-batch's share of the loss, and numbers a token
      to watch.
    optimizer: The one that made state.opt_state.
    temperature: What the tokens were sampled at.

  Returns:
    The new state and the metrics: loss, grad_norm, and the means of the watched numbers
    over the tokens, weighted as in the loss.

  Raises:
    NotFiniteError: The loss or a gradient; names the leaf. `state` is not used up.
  """
  batches, total = list(batches), None
  for batch in batches:
    part = _gradient(
      state.params,
      sharding.shard_batch(batch),
      config=config,
      loss=loss,
      temperature=temperature,
    )
    total = part if total is None else _add(total, part)
  if total is None:
    raise ValueError('update got no micro-batch.')
  grads, sums = total
  norms, sums = jax.device_get((_leaf_norms(grads), sums))
  weight, value = float(sums.pop('weight')), float(sums.pop('loss'))
  lost = [] if np.isfinite(value) else ['the loss']
  for path, norm in jax.tree_util.tree_leaves_with_path(norms):
    if not np.isfinite(norm):
      lost.append(f'the gradient of {jax.tree_util.keystr(path)}')
  if lost:
    more = f' and {len(lost) - 3} more' if len(lost) > 3 else ''
    raise NotFiniteError(
      f'{", ".join(lost[:3])}{more}: not finite at step {int(state.step)}.', batches
    )
  metrics = {name: float(x) / weight if weight else 0.0 for name, x in sums.items()}
  metrics['loss'] = value
  metrics['grad_norm'] = float(np.sqrt(sum(n**2 for n in jax.tree.leaves(norms))))
  learned, frozen = lora.split(state.params)
  opt_state = sharding.to_device(state.opt_state)
  new = _apply(ModelState(learned, opt_state, state.step), grads, optimizer=optimizer)
  opt_state = sharding.match_memory_kind(new.opt_state, state.opt_state)
  return ModelState(lora.join(new.params, frozen), opt_state, new.step), metrics


@functools.partial(jax.jit, static_argnames=('config', 'loss', 'temperature'))
def _gradient(params, batch, *, config, loss, temperature):
  # Whatever the loss, a token without weight sends no gradient, not even 0 · NaN.
  wanted = batch.weights != 0
  counted = lambda x: jnp.where(wanted, x, 0.0)
  learned, frozen = lora.split(params)

  def objective(learned):
    params = lora.join(learned, frozen)
    stats = token_stats(
      params, batch, config=config, temperature=temperature, wanted=wanted
    )
    numbers = {name: getattr(batch, name) for name in _NUMBERS}
    clean = batch._replace(**jax.tree.map(counted, numbers))
    total, watched = loss(jax.tree.map(counted, stats), clean)
    sums = {name: losses.weighted(x, batch.weights) for name, x in watched.items()}
    return total, sums | {'loss': total, 'weight': batch.weights.sum()}

  (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(learned)
  return grads, sums


@functools.partial(jax.jit, donate_argnums=0)
def _add(total, part):
  return jax.tree.map(jnp.add, total, part)


@jax.jit
def _leaf_norms(grads):
  return jax.tree.map(
    lambda g: jnp.sqrt(jnp.sum(jnp.square(g.astype(jnp.float32)))), grads
  )


@functools.partial(jax.jit, static_argnames='optimizer', donate_argnums=0)
def _apply(state, grads, *, optimizer):
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params: Any = optax.apply_updates(state.params, updates)
  return ModelState(params, opt_state, state.step + 1)


def _before(x_BTD: Array) -> Array:
  """Shifts right by one: what was known before each token."""
  return jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
