"""The learner: one forward pass for every log-prob, accumulated gradients, one update.

Letters: B rows, T tokens, M tokens of the flattened batch, D embed, V vocabulary.
"""

from collections.abc import Callable, Iterable
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import losses

# Logits are made for at most this many (token, vocabulary) pairs at a time: 128 MiB.
_LOGIT_BLOCK = 2**25

Loss = Callable[[losses.TokenStats, types.Batch], tuple[Array, dict[str, Array]]]


class TrainState(NamedTuple):
  """What training changes.

  Attributes:
    params: {'policy': ...}, and 'critic' where the critic is a model of its own; a
      'value_head' inside the policy makes it a second head.
    opt_state: Of optax.
    step: Updates so far, int32 [].
  """

  params: dict[str, decoder.Params]
  opt_state: Any
  step: Array


def init(params: dict[str, decoder.Params], optimizer: optax.GradientTransformation):
  """A TrainState at step 0."""
  return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def token_stats(
  params: dict[str, decoder.Params],
  batch: types.Batch,
  *,
  config: decoder.DecoderConfig,
  temperature: float = 1.0,
) -> losses.TokenStats:
  """Log-probs, entropies and values of every token; 0 at the first of a segment.

  Args:
    params: As in TrainState.
    batch: Only tokens, positions and segment_ids are read.
    config: Of the policy (and of the critic).
    temperature: That the tokens were sampled at.
  """
  text = (batch.tokens, batch.positions, batch.segment_ids)
  x_BTD = _before(decoder.hidden(params['policy'], config, *text))
  head = functools.partial(_head, params['policy'], config, temperature)
  logprobs, entropy = _in_blocks(head, x_BTD, batch.tokens, config.vocab_size)
  if 'critic' in params:
    critic = params['critic']
    values = decoder.values(critic, _before(decoder.hidden(critic, config, *text)))
  elif 'value_head' in params['policy']:
    values = decoder.values(params['policy'], x_BTD)
  else:
    values = None
  stats = losses.TokenStats(logprobs, entropy, values)
  # The first token of a segment was given, not predicted.
  return jax.tree.map(lambda y: jnp.where(batch.positions > 0, y, 0.0), stats)


score = jax.jit(token_stats, static_argnames=('config', 'temperature'))


def update(
  state: TrainState,
  batches: Iterable[types.Batch],
  *,
  config: decoder.DecoderConfig,
  loss: Loss,
  optimizer: optax.GradientTransformation,
  temperature: float = 1.0,
) -> tuple[TrainState, dict[str, float]]:
  """One optimizer step on the sum of the micro-batches' gradients.

  Args:
    state: Donated.
    batches: Micro-batches of one shape; their weights add up over all of them.
    config: Of the policy.
    loss: An Algorithm's.
    optimizer: That made state.opt_state.
    temperature: That the tokens were sampled at.

  Returns:
    The new state and the metrics, grad_norm among them.

  Raises:
    FloatingPointError: A gradient is not finite; names the leaf. `state` is not used up.
  """
  total = None
  for batch in batches:
    part = _gradient(
      state.params, batch, config=config, loss=loss, temperature=temperature
    )
    total = part if total is None else _add(total, part)
  if total is None:
    raise ValueError('update got no micro-batch.')
  grads, metrics = total
  norms = jax.device_get(_leaf_norms(grads))
  for path, norm in jax.tree_util.tree_leaves_with_path(norms):
    if not np.isfinite(norm):
      raise FloatingPointError(
        f'The gradient of {jax.tree_util.keystr(path)} is not finite at step '
        f'{int(state.step)}: lower the learning rate or look at the batch.'
      )
  metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
  metrics['grad_norm'] = float(np.sqrt(sum(n**2 for n in jax.tree.leaves(norms))))
  return _apply(state, grads, optimizer=optimizer), metrics


@functools.partial(jax.jit, static_argnames=('config', 'loss', 'temperature'))
def _gradient(params, batch, *, config, loss, temperature):
  def objective(params):
    stats = token_stats(params, batch, config=config, temperature=temperature)
    # Whatever the loss, a token without weight sends no gradient, not even 0 · NaN.
    stats = jax.tree.map(lambda x: jnp.where(batch.weights != 0, x, 0.0), stats)
    return loss(stats, batch)

  (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params)
  return grads, metrics


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
  return TrainState(params, opt_state, state.step + 1)


def _before(x_BTD: Array) -> Array:
  """Shifts right by one: what was known before each token."""
  return jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))


def _head(params, config, temperature, x_MD, tokens_M):
  logits_MV = decoder.logits(params, config, x_MD) / temperature
  chosen_M = jnp.take_along_axis(logits_MV, tokens_M[:, None], axis=1)[:, 0]
  return chosen_M - jax.nn.logsumexp(logits_MV, -1), losses.entropy(logits_MV)


def _in_blocks(head, x_BTD: Array, tokens_BT: Array, vocab_size: int):
  """Applies `head` to blocks of tokens, each recomputed in the backward pass."""
  B, T, D = x_BTD.shape
  M, block = B * T, max(1, _LOGIT_BLOCK // vocab_size)
  if M <= block:
    flat = head(x_BTD.reshape(M, D), tokens_BT.reshape(M))
    return tuple(y.reshape(B, T) for y in flat)
  pad = -M % block
  x = jnp.pad(x_BTD.reshape(M, D), ((0, pad), (0, 0))).reshape(-1, block, D)
  tokens = jnp.pad(tokens_BT.reshape(M), (0, pad)).reshape(-1, block)
  blocks = jax.lax.map(jax.checkpoint(lambda xt: head(*xt)), (x, tokens))
  return tuple(y.reshape(-1)[:M].reshape(B, T) for y in blocks)
