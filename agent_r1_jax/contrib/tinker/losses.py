"""The losses of the Tinker API, as sums over tokens, in terms of rl/losses.py.

Notation as there: ρ = π/π_old with π_old from the datum's 'logprobs', A its 'advantages',
w its 'weights'. All losses are summed over the tokens of all data, without averaging.
"""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from agent_r1_jax import types
from agent_r1_jax.rl import learner, losses
from agent_r1_jax.web import http

# Each set of options is compiled, so a server allows this many besides the defaults.
_MOST = 32
_RL = ('logprobs', 'advantages')


class _Kind(NamedTuple):
  """A loss that takes options from a client."""

  make: Callable[..., losses.Surrogate]
  defaults: dict[str, float] = {}  # Of its options.
  columns: tuple[str, ...] = _RL  # Required besides target_tokens.
  optional: tuple[str, ...] = ()  # Optional columns.
  sequence: bool = False  # Whether it reads all tokens of a datum together.


class Loss(NamedTuple):
  """A loss with its options; the same object for the same options."""

  surrogate: losses.Surrogate  # (TokenStats, Batch) -> the loss of each token, metrics.
  objective: learner.Loss  # Their sum, for learner.forward_backward.
  kind: _Kind


def _importance_sampling() -> losses.Surrogate:
  """-ρ A."""

  def surrogate(stats: losses.TokenStats, batch: types.Batch):
    log = losses.log_ratio(stats.logprobs, batch.old_logprobs)
    return -jnp.exp(log) * batch.advantages, {}

  return surrogate


def _ppo(clip_low_threshold: float, clip_high_threshold: float) -> losses.Surrogate:
  """max(-A ρ, -A clip(ρ, low, high)); the thresholds are ratios, below and above 1."""
  clip = {'clip_low': 1 - clip_low_threshold, 'clip_high': clip_high_threshold - 1}
  return losses.ppo_clip(**clip, dual_clip=None)


def _cispo(clip_low_threshold: float, clip_high_threshold: float) -> losses.Surrogate:
  """-sg(clip(ρ, low, high)) A log π; with the defaults of Tinker's tutorial 202."""
  return losses.cispo(clip_low=1 - clip_low_threshold, clip_high=clip_high_threshold - 1)


def _dro(beta: float) -> losses.Surrogate:
  """-(A log π - β/2 (log ρ)²); direct reward optimization, arXiv 2405.19107."""
  if beta < 0:
    raise ValueError(f'beta is {beta}; it must be at least 0.')

  def surrogate(stats: losses.TokenStats, batch: types.Batch):
    square = jnp.square(stats.logprobs - batch.old_logprobs)
    return -(batch.advantages * stats.logprobs - 0.5 * beta * square), {}

  return surrogate


def _gspo(clip_low_threshold: float, clip_high_threshold: float) -> losses.Surrogate:
  """PPO's clip of s = exp(mean log ρ) over the tokens of the mask.

  Without a mask, over tokens that have a log-prob or an advantage.
  """
  inner = losses.gspo(clip_low=1 - clip_low_threshold, clip_high=clip_high_threshold - 1)

  def surrogate(stats: losses.TokenStats, batch: types.Batch):
    sampled = (batch.old_logprobs != 0) | (batch.advantages != 0)
    if batch.correction is not None:  # data.pack puts the mask here.
      sampled = batch.correction != 0
    counted = jnp.where(sampled, batch.weights, 0.0)
    return inner(stats, batch._replace(weights=counted))

  return surrogate


def _dppo(delta_low: float, delta_high: float, cap: float) -> losses.Surrogate:
  """rl.losses.dppo_tv with the names and bounds of SkyRL's server of this API."""
  return losses.dppo_tv(low=delta_low, high=delta_high, cap=cap)


_KINDS = {
  'cross_entropy': _Kind(losses.likelihood, columns=(), optional=('weights',)),
  'importance_sampling': _Kind(_importance_sampling),
  'ppo': _Kind(_ppo, {'clip_low_threshold': 0.8, 'clip_high_threshold': 1.2}),
  'cispo': _Kind(_cispo, {'clip_low_threshold': 0.0, 'clip_high_threshold': 4.0}),
  'dro': _Kind(_dro, {'beta': 0.05}),
  'gspo': _Kind(
    _gspo,
    {'clip_low_threshold': 1 - 3e-4, 'clip_high_threshold': 1 + 4e-4},
    optional=('sequence_ratio_mask',),
    sequence=True,
  ),
  'dppo': _Kind(_dppo, {'delta_low': 0.2, 'delta_high': 0.2, 'cap': 20.0}),
}


class Losses:
  """The losses that clients have asked for; each set of options is made once."""

  def __init__(self):
    self._made: dict[Any, Loss] = {}
    for name in _KINDS:
      self.find(name, {})

  def find(self, name: str, options: Mapping[str, float]) -> Loss:
    """Finds or makes a loss.

    Raises:
      RefusedError: There is no such loss or option, a number is out of range, or there
        are too many sets of options already.
    """
    kind = _KINDS.get(name)
    if kind is None:
      text = f'the loss {name!r:.80} is not supported; there are {", ".join(_KINDS)}'
      raise http.RefusedError(400, text)
    if unknown := sorted(options.keys() - kind.defaults.keys()):
      known = ', '.join(kind.defaults) or 'none'
      text = f'loss_fn_config: {name} has no option {unknown[0]!r:.80}; it has {known}'
      raise http.RefusedError(400, text)
    values = kind.defaults | dict(options)
    key = (name, *values.values())
    if key in self._made:
      return self._made[key]
    if not all(math.isfinite(value) for value in values.values()):
      raise http.RefusedError(
        400, f'loss_fn_config: {name} has a number that is not finite'
      )
    if len(self._made) >= _MOST + len(_KINDS):
      text = (
        f'this server has compiled {_MOST} sets of loss options, and makes no more: use '
        'one of these, or start it again'
      )
      raise http.RefusedError(400, text)
    try:
      surrogate = kind.make(**values)
    except ValueError as error:
      text = str(error).replace('clip_low', '1 - clip_low_threshold')
      text = text.replace('clip_high', 'clip_high_threshold - 1')
      raise http.RefusedError(400, f'loss_fn_config: {text}') from None
    self._made[key] = Loss(surrogate, functools.partial(_add_up, surrogate), kind)
    return self._made[key]


def _add_up(surrogate: losses.Surrogate, stats: losses.TokenStats, batch: types.Batch):
  per_token, _ = surrogate(stats, batch)
  return losses.weighted(per_token, batch.weights), {}


def check_columns(loss: Loss, number: int, columns: Mapping[str, Any]):
  """Rejects a datum that lacks a column of its loss, or has an unused one."""
  kind = loss.kind
  if missing := set(kind.columns) - columns.keys():
    text = f'data[{number}]: loss_fn_inputs has no {min(missing)}, which the loss reads'
    raise http.RefusedError(400, text)
  if unknown := columns.keys() - {*kind.columns, *kind.optional}:
    text = (
      f'data[{number}]: loss_fn_inputs has {min(unknown)!r:.80}, which the loss does not '
      'read; leave it out'
    )
    raise http.RefusedError(400, text)
