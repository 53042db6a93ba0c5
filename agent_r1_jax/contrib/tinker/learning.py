"""Clients' training runs: adapters over one base model, gradients, Adam.

Every adapter has all projections and the server's maximum rank; parts that a client did
not ask for are zeros, with zero gradients and updates. So all runs share their programs:
nothing is compiled for another client, rank, learning rate or number of data.

The functions run in one thread (work.py), never in the event loop.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.contrib.tinker import data as data_lib
from agent_r1_jax.contrib.tinker import losses as losses_lib
from agent_r1_jax.models import decoder, lora
from agent_r1_jax.rl import learner, losses, packing

# The scale of an adapter of rank r is ALPHA / r, as in the Tinker cookbook.
ALPHA = 32.0


class Shape(NamedTuple):
  """The shape of a requested or saved adapter."""

  rank: int
  seed: int
  targets: tuple[str, ...]  # Names in families.TARGETS.


@dataclasses.dataclass
class TrainingRun:
  """A client's training run.

  Attributes:
    shape: The adapter's shape.
    state: The base's parameters with the adapter, and Adam's state.
    gradients: The sum of forward_backward since the last optim_step.
  """

  shape: Shape
  state: learner.ModelState
  gradients: learner.Gradients | None = None


class Result(NamedTuple):
  """The result of a pass: per datum, arrays of its targets' shape; and the total loss."""

  logprobs: list[np.ndarray]
  losses: list[np.ndarray]
  loss: float


# A pass that yields before each of its micro-batches, and returns the result.
Steps = Generator[None, None, Result]


def _make_adam(
  learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm
) -> optax.GradientTransformation:
  return optax.chain(
    optax.clip_by_global_norm(grad_clip_norm),
    optax.scale_by_adam(beta1, beta2, eps),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


class Learning:
  """Creates and trains runs over one base model.

  Attributes:
    config: The model's shape.
    shape: The shape of all requests' micro-batches.
    rank: The maximum rank of an adapter.
    targets: The projections that adapters may have: names in families.TARGETS.
    no_adapter: An adapter of zeros.
  """

  def __init__(
    self,
    config: decoder.DecoderConfig,
    params: decoder.Params,
    shape: packing.MicrobatchShape,
    rank: int,
  ):
    """Takes the base's parameters, which have no adapters, without copying them."""
    self.config, self.shape, self.rank = config, shape, rank
    self.targets = tuple(dict.fromkeys(x.target for x in lora.list_targets(config)))
    # The hyperparameters are arrays in its state, so that a step may change them.
    self._adam = optax.inject_hyperparams(_make_adam)(*[1.0] * 6)
    # A value head would be trained.
    self._base = {k: v for k, v in params.items() if k != 'value_head'}
    self.no_adapter = self.pad({'layers': {}})

  def start(self, shape: Shape) -> TrainingRun:
    """Starts a run of a rank that `check_rank` allows; its adapter has no effect yet."""
    key = jax.random.key(shape.seed)
    added = lora.add(self._base, shape.rank, shape.targets, ALPHA, key)
    return self.resume(shape, lora.take(added))

  def check_rank(self, rank: int):
    """Raises ValueError if an adapter of this rank does not fit."""
    if not 1 <= rank <= self.rank:
      raise ValueError(
        f'the rank of the adapter is {rank}, and this server has room for 1 to '
        f'{self.rank}; start it with a higher --adapter_rank'
      )

  def resume(
    self,
    shape: Shape,
    adapter: decoder.Params,
    moments: Mapping[str, Any] | None = None,
  ) -> TrainingRun:
    """Makes a run from an adapter of its own rank, and the result of `get_moments`."""
    params = lora.join(self.pad(adapter), self._base)
    state = learner.init(params, self._adam)
    if moments is not None:
      _check_finite(moments)
      # Padded alike, and without the scale, which is not trained.
      new = {name: lora.split(self.pad(moments[name]))[0] for name in ('mu', 'nu')}
      count = jnp.array(moments['count'], jnp.int32)
      adam: Any = state.opt_state
      inner = optax.tree.set(adam.inner_state, count=count, **new)
      adam = adam._replace(count=count, inner_state=inner)
      # Copied, since each is donated and no two may share a buffer.
      state = state._replace(opt_state=jax.tree.map(jnp.copy, adam), step=count)
    return TrainingRun(shape, state)

  def score(
    self, adapter: decoder.Params, data: Sequence[data_lib.Datum], loss: losses_lib.Loss
  ) -> Steps:
    """Computes log-probs and the loss, one micro-batch per step.

    The adapter has the server's rank, as `pad` and `get_adapter` return it.
    """
    params = lora.join(adapter, self._base)
    compute = lambda batch: learner.logprobs(params, batch, config=self.config)
    return (yield from self._compute(data, loss, compute))

  def differentiate(
    self, run: TrainingRun, data: Sequence[data_lib.Datum], loss: losses_lib.Loss
  ) -> Steps:
    """Adds the gradient of the loss to the run's, one micro-batch per step."""
    # The run keeps its gradients until the pass is complete; a call would donate them.
    gradients = jax.tree.map(jnp.copy, run.gradients)

    def compute(batch: types.Batch) -> Any:
      nonlocal gradients
      scored: list[Any] = []
      gradients = learner.forward_backward(
        run.state.params,
        [batch],
        config=self.config,
        loss=loss.objective,
        earlier=gradients,
        logprobs=scored,
      )
      return scored[0]

    result = yield from self._compute(data, loss, compute)
    run.gradients = gradients
    return result

  def _compute(self, data, loss: losses_lib.Loss, compute) -> Steps:
    """Packs data; computes each micro-batch's log-probs and loss."""
    packed = data_lib.pack(data, self.shape)
    if loss.kind.sequence and not packed.plain:
      raise ValueError(
        'the loss reads a datum as one sequence, and a target is not the next token of '
        'model_input; shift the targets by one'
      )
    logprobs, each = [], []
    for batch in packed.batches:
      yield
      logprobs.append(np.asarray(compute(batch)))
      each.append(_score(loss, logprobs[-1], batch))
    per_token = packed.unpack(each)
    total = float(sum(x.sum(dtype=np.float64) for x in per_token))
    return Result(packed.unpack(logprobs), per_token, total)

  def optim_step(self, run: TrainingRun, adam: Mapping[str, float]) -> dict[str, float]:
    """Makes a step with the gradient since the last one; returns its norm.

    Args:
      run: The run.
      adam: The arguments of _make_adam; without `grad_clip_norm` if that is 0.

    Raises:
      ValueError: There is no gradient.
      NotFiniteError: The loss or the gradient is not finite; the gradient is dropped.
    """
    if run.gradients is None:
      raise ValueError('optim_step: there is no gradient; call forward_backward first')
    gradients, run.gradients = run.gradients, None
    numbers = {**adam, 'grad_clip_norm': adam['grad_clip_norm'] or np.inf}
    state: Any = run.state.opt_state
    state = state._replace(
      hyperparams={name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()}
    )
    run.state, metrics = learner.optim_step(
      run.state._replace(opt_state=state), gradients, optimizer=self._adam
    )
    return {'grad_norm': metrics['grad_norm']}

  def get_adapter(self, run: TrainingRun) -> decoder.Params:
    """Copies a run's adapter, at the server's rank, to the host.

    Raises:
      FloatingPointError: It is not finite.
    """
    adapter = lora.take(run.state.params)
    return _check_finite(jax.tree.map(lambda x: np.array(x, copy=True), adapter))

  def get_moments(self, run: TrainingRun) -> dict[str, Any]:
    """Copies Adam's count and moments to the host, at the run's own rank."""
    moments = {
      name: self.trim(optax.tree.get(run.state.opt_state, name), run.shape)
      for name in ('mu', 'nu')
    }
    return _check_finite(moments | {'count': int(run.state.step)})

  def pad(self, adapter: Mapping[str, Any]) -> decoder.Params:
    """Pads an adapter to all projections and the server's rank."""
    layers: dict[str, Any] = {}
    for place, name, shapes in self._list_shapes(self.rank):
      padded = {leaf: np.zeros(shape, np.float32) for leaf, shape in shapes.items()}
      for leaf, x in adapter['layers'].get(place, {}).get(name, {}).items():
        padded[leaf][tuple(slice(size) for size in x.shape)] = x
      layers.setdefault(place, {})[name] = padded
    return {'layers': jax.tree.map(jnp.array, layers)}

  def trim(self, adapter: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Inverts `pad`, on the host; the scale may be missing."""
    layers: dict[str, Any] = {}
    for place, name, shapes in self._list_shapes(shape.rank):
      if name in shape.targets:
        layers.setdefault(place, {})[name] = {
          leaf: np.array(x)[tuple(slice(size) for size in shapes[leaf])]
          for leaf, x in adapter['layers'][place][name].items()
        }
    return {'layers': layers}

  def _list_shapes(self, rank: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Lists each projection's place, name and adapter shapes."""
    for target in lora.list_targets(self.config):
      shapes = lora.get_shapes(self.config, target, rank)
      yield target.place, target.target, shapes


def _check_finite(tree: Any) -> Any:
  """Returns finite arrays; raises FloatingPointError for others."""
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if not np.isfinite(x).all():
      raise FloatingPointError(
        f'{jax.tree_util.keystr(path)} of the adapter has numbers that are not finite: a '
        'step was too large. Load an earlier state, and lower the learning rate'
      )
  return tree


def _score(loss: losses_lib.Loss, logprobs: np.ndarray, batch: types.Batch) -> np.ndarray:
  """Computes the loss of each entry of a micro-batch, outside the model's program."""
  stats = losses.TokenStats(jnp.asarray(logprobs), jnp.zeros(logprobs.shape))
  return np.asarray(loss.surrogate(stats, jax.tree.map(jnp.asarray, batch))[0])
