"""A tiny policy, critic and reference, and their scores of a text, computed plainly."""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any, NamedTuple

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.models import decoder, lora
from agent_r1_jax.rl import algorithms, learner, losses, packing, scoring, table
from agent_r1_jax.rl import credit as credit_lib

CONFIG = decoder.DecoderConfig(
  family='qwen3',
  vocab_size=64,
  embed_dim=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=24,
)
TEMPERATURE = 0.7
# One shape for most tests, so that they share what is compiled.
SHAPE = packing.MicrobatchShape(rows=2, row_tokens=32, trees=False)
_PADDED = 64

GRPO = algorithms.grpo(kl_coef=0.0, dual_clip=None)
# Of equal algorithms it is the same object, and is compiled once.
objective = functools.cache(learner.objective)
critic_objective = functools.cache(learner.critic_objective)
GRPO_OBJECTIVE = objective(GRPO, shared_critic=False)


@functools.cache
def tree(seed: int, value_head: bool = False) -> decoder.Params:
  """Makes random parameters, also of norms and value head."""
  rng, shapes = np.random.default_rng(seed), tiny.init_shapes(CONFIG)
  if value_head:
    shapes = jax.eval_shape(decoder.add_value_head, shapes)

  def draw(path, x):
    scale = rng.normal(scale=0.3, size=x.shape).astype(np.float32)
    return 1 + scale if 'norm' in jax.tree_util.keystr(path) else scale

  return jax.device_put(jax.tree_util.tree_map_with_path(draw, shapes))


def copy_tree(params: Any) -> Any:
  """Copies arrays, for a function that donates them."""
  return jax.device_put(jax.tree.map(np.array, params))


def policy() -> decoder.Params:
  return tree(0)


def shared() -> decoder.Params:
  """The parameters of a policy whose critic is a second head."""
  return tree(0, True)


def reference() -> decoder.Params:
  return tree(1)


def critic() -> decoder.Params:
  """The parameters of a critic that is a model of its own."""
  return tree(2, True)


def models(*, own_critic: bool = False) -> scoring.Models:
  """The models, with a critic of its own or one that is a head of the policy."""
  if own_critic:
    return scoring.Models(policy(), CONFIG, critic(), reference(), CONFIG)
  return scoring.Models(shared(), CONFIG, shared(), reference(), CONFIG)


class Credit(NamedTuple):
  """The results of credit.estimate."""

  table: table.TokenTable
  metrics: dict[str, float]


def credit(
  trajectories,
  algorithm,
  which=None,
  *,
  shape=SHAPE,
  kl_coef=0.0,
  baselines=None,
  prefixes=None,
) -> Credit:
  """Calls scoring.score and credit.estimate with the models and sizes of this module."""
  options = {'shape': shape, 'temperature': TEMPERATURE, 'prefixes': prefixes}
  built = table.build(trajectories, baselines)
  scored = scoring.score(built, algorithm, which or models(), **options)
  return Credit(*credit_lib.estimate(scored, algorithm, kl_coef=kl_coef))


@functools.cache
def trajectories(n: int = 14) -> tuple[types.Trajectory, ...]:
  """Trajectories of several turns, in one or two segments."""
  return tuple(episodes.make_varied(n))


class Scores(NamedTuple):
  """A model's scores of the tokens of each segment; 0 at its first but for `after`.

  Attributes:
    logprobs: The log-prob of the token.
    entropy: The entropy of its distribution.
    values: The value of the state before it.
    after: The value of the state after it.
  """

  logprobs: list[np.ndarray]
  entropy: list[np.ndarray]
  values: list[np.ndarray]
  after: list[np.ndarray]


def direct(params: decoder.Params, tokens: Any) -> tuple[jax.Array, ...]:
  """Computes the fields of Scores for rows [B, T] of one text each."""
  x = decoder.hidden(params, CONFIG, tiny.rows(tokens))
  log_p = jax.nn.log_softmax(x[:, :-1] @ params['lm_head']['kernel'] / TEMPERATURE)
  chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
  entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
  if 'value_head' in params:
    head = params['value_head']
    after = x @ head['kernel'][:, 0] + head['bias'][0]
  else:
    after = jnp.zeros_like(x[..., 0])
  shifted = (jnp.pad(y, ((0, 0), (1, 0))) for y in (chosen, entropy, after[:, :-1]))
  return *shifted, after


_direct = jax.jit(direct)


def padded(segments: Sequence[types.Segment], rows: int | None = None):
  """Packs each segment into a row of its own; returns the layout and the batch."""
  where = packing.Layout(
    tuple(len(s.tokens) for s in segments),
    tuple((i, 0) for i in range(len(segments))),
    rows or len(segments),
    32,
  )
  return where, packing.pack(table.from_segments(segments), where)


def by_segment(segments: Sequence[types.Segment], column: np.ndarray) -> list[np.ndarray]:
  """Splits a column into the parts of the segments."""
  lengths = [len(s.tokens) for s in segments]
  return np.split(column, np.cumsum(lengths)[:-1])


def score(params: decoder.Params, segments: Iterable[types.Segment]) -> Scores:
  """Scores texts of at most 32 tokens."""
  segments = list(segments)
  where, batch = padded(segments, _PADDED)
  columns = (where.extract(np.asarray(x)) for x in _direct(params, batch.rows.tokens))
  return Scores(*(by_segment(segments, column) for column in columns))


def segments_of(trajectories_) -> list[types.Segment]:
  return [s for t in trajectories_ for s in t.segments]


def tokens_of_entries(batch: types.Batch) -> np.ndarray:
  """The token of each entry, [B, E]."""
  tokens = np.asarray(batch.rows.tokens)
  columns = batch.columns
  return tokens if columns is None else np.take_along_axis(tokens, columns, axis=1)


def whole(batches: Iterable[types.Batch]) -> types.Batch:
  """Joins micro-batches into one batch."""
  return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def unpacked(batches: Sequence[types.Batch], segments, shape=SHAPE) -> types.Batch:
  """Unpacks batches into one whose fields are columns [n]."""
  lengths = [len(s.tokens) for s in segments]
  where = packing.plan_layout(
    lengths, row_tokens=shape.row_tokens, row_multiple=shape.rows
  )
  assert {b.weights.shape for b in batches} == {shape[:2]}
  return jax.tree.map(where.extract, whole(batches))


def gradient(
  params: decoder.Params, batches: Iterable[types.Batch], loss: Callable
) -> tuple[decoder.Params, dict[str, np.ndarray]]:
  """Computes the gradient and the sums of all micro-batches together."""
  kwargs = {'config': CONFIG, 'loss': loss, 'temperature': TEMPERATURE}
  parts = [learner._gradient(params, batch, **kwargs) for batch in batches]
  return jax.tree.map(lambda *xs: np.sum(xs, axis=0), *parts)


def chained_gradient(
  params: decoder.Params, batches: Iterable[types.Batch], loss: Callable
) -> tuple[decoder.Params, dict[str, np.ndarray]]:
  """Computes what `gradient` does by the chain rule.

  The model's part, which takes most time to compile, is one program for all losses.
  """
  given = lambda stats, *_, **__: (losses.TokenStats(**stats), None)
  parts = []
  for batch in batches:
    seen = batch.rows, batch.columns, batch.weights != 0
    nothing = dict.fromkeys(('logprobs', 'entropy'), np.zeros_like(batch.weights))
    if 'value_head' in params:
      nothing['values'] = nothing['logprobs']
    stats, _ = _pull_back(params, seen, nothing)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(learner, '_stats_and_loads', given)
      slopes, sums = gradient(stats, [batch], loss)
    parts.append((_pull_back(params, seen, slopes)[1], sums))
  return jax.tree.map(lambda *xs: np.sum(xs, axis=0), *parts)


@jax.jit
def _pull_back(params, seen, slopes):
  """The token stats of an update, and the gradient of Σ stats · slopes."""
  rows, columns, wanted = seen
  batch = types.Batch(rows, *[None] * 5, columns=columns)
  options = {'config': CONFIG, 'temperature': TEMPERATURE, 'wanted': wanted}
  learned, frozen = lora.split(params)

  def compute(learned):
    stats = learner.token_stats(lora.join(learned, frozen), batch, **options)
    return {name: x for name, x in stats._asdict().items() if x is not None}

  stats, pull = jax.vjp(compute, learned)
  return stats, pull(slopes)[0]


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
  """Asserts that trees are equal, relative to the largest number of a leaf."""

  def check(path, a, b):
    a, b = np.asarray(a), np.asarray(b)
    scale = np.abs(b).max()
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=name)

  jax.tree_util.tree_map_with_path(check, actual, expected)


def equal(actual: Any, expected: Any) -> None:
  """Asserts that trees are equal bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, actual, expected)
