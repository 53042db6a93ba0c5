"""The learner: log-probs and values of packed tokens, gradients, and optimizer steps.

  gradients = learner.forward_backward(state.params, batches, config=config, loss=loss)
  state, metrics = learner.optim_step(state, gradients, optimizer=optimizer)

All training uses these two functions: updates.py, sft.py, the reward models, and
experiments/one_page.py.

Letters: B packed rows, T tokens and E entries per row (types.Batch), D embed.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.models import decoder, lora, sharding
from agent_r1_jax.models import ops as ops_lib
from agent_r1_jax.models import rows as rows_lib
from agent_r1_jax.rl import algorithms, losses

Loss = Callable[[losses.TokenStats, types.Batch], tuple[Array, losses.TokenMetrics]]


class ModelState(NamedTuple):
  """The training state of one model: the policy, or a separate critic."""

  # The parameters. A policy with a 'value_head' has its critic as a second head.
  params: decoder.Params
  # Optax's state for the learned parameters (lora.split): all parameters, or LoRA's.
  opt_state: Any
  step: Array  # int32 [], the number of updates so far.


class Gradients(NamedTuple):
  """Sums over the micro-batches of one or several calls of `forward_backward`."""

  # The gradient of the loss, float32, with the shapes of the learned parameters.
  learned: Any
  # 'loss'; 'weight', the sum of the tokens' weights; and the sum of each token metric,
  # weighted as in the loss. float32 [] each.
  sums: dict[str, Array]


class NotFiniteError(FloatingPointError):
  """A loss or gradient is not finite; `batches` has its micro-batches, if known."""

  def __init__(self, message: str, batches: Sequence[types.Batch] = ()):
    super().__init__(message)
    self.batches = list(batches)


def init(params: decoder.Params, optimizer: optax.GradientTransformation) -> ModelState:
  """Makes a ModelState at step 0, on the current mesh."""
  step = lambda: jnp.zeros((), jnp.int32)
  opt_state = sharding.init_sharded(optimizer.init, lora.split(params)[0])
  return ModelState(params, opt_state, sharding.init_sharded(step))


def token_stats(
  params: decoder.Params,
  batch: types.Batch,
  *,
  config: decoder.DecoderConfig,
  temperature: float = 1.0,
  wanted: Bool[Array, 'B E'] | None = None,
) -> losses.TokenStats:
  """Computes log-probs, entropies and values; 0 at the first token of each segment.

  Reads only `rows` and `columns` of the batch. Values are computed if the params have a
  value head. Where `wanted` is False the result is 0 and no logits are computed; None
  means all tokens. `temperature` is the sampling temperature.
  """
  options = {'config': config, 'temperature': temperature, 'wanted': wanted}
  return _stats_and_loads(params, batch, **options)[0]


def _stats_and_loads(params, batch: types.Batch, *, config, **options):
  """Computes token_stats, and the loads of the experts [L, E] or None."""
  compute = functools.partial(_compute_stats, batch=batch, **options)
  return ops_lib.choose(config).differentiate(compute, config)(params)


def _compute_stats(params, batch: types.Batch, *, config, temperature, wanted):
  ops, rows = ops_lib.choose(config), batch.rows
  take_entries = functools.partial(_take_entries, batch.columns)
  # The first token of a segment has no prediction, and pictures are not predicted.
  predicted_BT = (rows.positions > 0) & (rows.tokens < types.FIRST_PICTURE_ID)
  predicted_BE = take_entries(predicted_BT)
  wanted = predicted_BE if wanted is None else wanted & predicted_BE
  x_BTD, loads_LE = ops.hidden_and_loads(params, config, rows)
  x_BTD = rows_lib.take_previous(x_BTD, rows)
  computed_BT = _any_entry(wanted, batch.columns, rows)
  options = x_BTD, rows.tokens, computed_BT, temperature
  logprobs_BT, entropy_BT = ops.logprobs(params, config, *options)
  values = decoder.values(params, x_BTD) if 'value_head' in params else None
  stats = losses.TokenStats(logprobs_BT, entropy_BT, values)
  stats = jax.tree.map(take_entries, stats)
  return jax.tree.map(lambda y: jnp.where(wanted, y, 0.0), stats), loads_LE


def _take_entries(columns_BE: Array | None, x_BT: Array) -> Array:
  """Gathers the value of each entry's token; with None, entries are the tokens."""
  if columns_BE is None:
    return x_BT
  return jnp.take_along_axis(x_BT, columns_BE, axis=1)


def _any_entry(which_BE: Array, columns_BE: Array | None, rows: types.Rows) -> Array:
  """Whether any of a token's entries is in `which`, [B, T]."""
  if columns_BE is None:
    return which_BE
  none = jnp.zeros(rows.tokens.shape[1], bool)
  return jax.vmap(lambda columns, x: none.at[columns].max(x))(columns_BE, which_BE)


def _measure_balance(loads_LE: Float[Array, 'L E']) -> dict[str, Array]:
  """Measures how evenly a micro-batch's tokens are spread over experts, over all layers.

  `expert_max_load` is the load of a layer's busiest expert divided by the mean load;
  `expert_idle` is the share of experts without tokens. Tokens are never dropped, so there
  is no overflow. A token counts as often as it is computed: in trees, shared ones once.
  """
  mean_L = jnp.maximum(loads_LE.mean(1), 1.0)
  busiest = (loads_LE.max(1) / mean_L).mean()
  return {'expert_max_load': busiest, 'expert_idle': (loads_LE == 0).mean()}


def logprobs(params, batch, *, config, temperature=1.0) -> np.ndarray:
  """Computes only the log-probs of token_stats, float32 [B, E] on the host."""
  batch = sharding.shard_batch(batch)
  return np.asarray(_logprobs(params, batch, config=config, temperature=temperature))


def values(params, batch, *, config) -> np.ndarray:
  """Computes the critic's value of the state after each token, float32 [B, T].

  The values of token_stats are of the state before each token.
  """
  return np.asarray(_values(params, sharding.shard_batch(batch), config=config))


@functools.partial(jax.jit, static_argnames=('config', 'temperature'))
def _logprobs(params, batch, *, config, temperature):
  stats = token_stats(params, batch, config=config, temperature=temperature)
  return sharding.replicate(stats.logprobs)


@functools.partial(jax.jit, static_argnames='config')
def _values(params, batch, *, config):
  hidden_and_loads = ops_lib.choose(config).hidden_and_loads
  x_BTD, _ = hidden_and_loads(params, config, batch.rows)
  return sharding.replicate(decoder.values(params, x_BTD))


def objective(algorithm: algorithms.Algorithm, *, shared_critic: bool = False) -> Loss:
  """Makes the policy's loss: the algorithm's, entropy, KL, and a shared critic's.

  The function is a static argument of jitted code: make it once for all updates, since
  every new function is compiled again.
  """
  kl, value_loss = algorithm.kl, algorithm.value_loss

  def loss(stats, batch):
    per_token, metrics = algorithm.loss(stats, batch)
    if batch.correction is not None:
      per_token = per_token * batch.correction
    total = losses.weighted(per_token, batch.weights)
    metrics = metrics | {'entropy': stats.entropy}
    total -= algorithm.entropy_coef * losses.weighted(stats.entropy, batch.weights)
    if kl and batch.kl_weights is not None:
      metrics['kl'] = kl.estimator(stats.logprobs, batch.ref_logprobs)
      total += losses.weighted(metrics['kl'], batch.kl_weights)
    if shared_critic and value_loss:
      error = value_loss(stats.values, batch)
      if algorithm.advantage_mask:  # Only action tokens have a return.
        error = jnp.where(batch.action_mask, error, 0.0)
      metrics['value_loss'] = error
      total += algorithm.value_coef * losses.weighted(error, batch.weights)
    return total, metrics

  return loss


def critic_objective(algorithm: algorithms.Algorithm) -> Loss:
  """Makes the loss of a separate critic."""
  value_loss = algorithm.value_loss
  if value_loss is None:
    raise ValueError('The algorithm has no value_loss, so it has no critic.')

  def loss(stats, batch):
    per_token = value_loss(stats.values, batch)
    return losses.weighted(per_token, batch.weights), {'value_loss': per_token}

  return loss


def forward_backward(
  params: decoder.Params,
  batches: Iterable[types.Batch],
  *,
  config: decoder.DecoderConfig,
  loss: Loss,
  temperature: float = 1.0,
  earlier: Gradients | None = None,
  logprobs: list[Array] | None = None,
) -> Gradients:
  """Computes a loss and its gradient, summed over micro-batches.

  Args:
    params: The model's parameters; they are not donated.
    batches: Micro-batches of one shape, whose weights have a common denominator.
    config: The model's shape.
    loss: (TokenStats, Batch) -> the micro-batch's share of the loss, and token metrics.
    temperature: The temperature at which the tokens were sampled.
    earlier: The result of an earlier call to add to this one's; donated.
    logprobs: A list to which each micro-batch's log-probs are appended, float32 [B, E], 0
      where the weight is 0. None: the device does not return them.

  Raises:
    ValueError: There is no micro-batch and no `earlier`.
  """
  total = earlier
  for batch in batches:
    part: Any = _gradient(
      params,
      sharding.shard_batch(batch),
      config=config,
      loss=loss,
      temperature=temperature,
      scores=logprobs is not None,
    )
    if logprobs is not None:
      part, scored = part
      logprobs.append(scored)
    total = part if total is None else _add(total, part)
  if total is None:
    raise ValueError('forward_backward got no micro-batch.')
  return total


def optim_step(
  state: ModelState,
  gradients: Gradients,
  *,
  optimizer: optax.GradientTransformation,
) -> tuple[ModelState, dict[str, float]]:
  """Makes one optimizer step.

  Args:
    state: The state, whose learned arrays are donated; frozen arrays may be shared with
      other models. If opt_state is in host memory (sharding.to_host), it is on the device
      only during the step, and the new one is in host memory too.
    gradients: The gradients at state.params, summed over the step's micro-batches.
    optimizer: The optimizer that made state.opt_state.

  Returns:
    The new state, and metrics: loss, grad_norm, and the means of the token metrics,
    weighted as in the loss.

  Raises:
    NotFiniteError: The loss or a gradient is not finite; the message names the leaf.
      `state` is not donated.
  """
  norms, sums = jax.device_get((_leaf_norms(gradients.learned), gradients.sums))
  weight, value = float(sums.pop('weight')), float(sums.pop('loss'))
  if bad := _name_not_finite(value, norms):
    raise NotFiniteError(f'{bad}: not finite at step {int(state.step)}.')
  metrics = {name: float(x) / weight if weight else 0.0 for name, x in sums.items()}
  metrics['loss'] = value
  metrics['grad_norm'] = float(np.sqrt(sum(n**2 for n in jax.tree.leaves(norms))))
  learned, frozen = lora.split(state.params)
  opt_state = sharding.to_device(state.opt_state)
  new = ModelState(learned, opt_state, state.step)
  new = _apply(new, gradients.learned, optimizer=optimizer)
  opt_state = sharding.match_memory_kind(new.opt_state, state.opt_state)
  return ModelState(lora.join(new.params, frozen), opt_state, new.step), metrics


def _name_not_finite(loss: float, norms: Any) -> str:
  """Names the loss and gradients that are not finite, three at most."""
  names = [] if np.isfinite(loss) else ['the loss']
  for path, norm in jax.tree_util.tree_leaves_with_path(norms):
    if not np.isfinite(norm):
      names.append(f'the gradient of {jax.tree_util.keystr(path)}')
  more = f' and {len(names) - 3} more' if len(names) > 3 else ''
  return ', '.join(names[:3]) + more


@functools.partial(jax.jit, static_argnames=('config', 'loss', 'temperature', 'scores'))
def _gradient(params, batch, *, config, loss, temperature, scores=False):
  # For any loss, a token of weight 0 has no gradient, not even 0 · NaN.
  wanted = batch.weights != 0

  def clean(x):
    return jnp.where(wanted, x, 0.0) if jnp.issubdtype(x.dtype, jnp.floating) else x

  learned, frozen = lora.split(params)

  def objective(learned):
    params = lora.join(learned, frozen)
    stats, loads_LE = _stats_and_loads(
      params, batch, config=config, temperature=temperature, wanted=wanted
    )
    with jax.named_scope('loss'):
      total, metrics = loss(*jax.tree.map(clean, (stats, batch)))
    sums = {name: losses.weighted(x, batch.weights) for name, x in metrics.items()}
    weight = batch.weights.sum()
    if loads_LE is not None:
      sums |= {name: weight * x for name, x in _measure_balance(loads_LE).items()}
    sums |= {'loss': total, 'weight': weight}
    return total, (sums, stats.logprobs if scores else None)

  (_, (sums, scored)), grads = jax.value_and_grad(objective, has_aux=True)(learned)
  gradients = Gradients(grads, sums)
  return (gradients, scored) if scores else gradients


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
