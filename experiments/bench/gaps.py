"""How far the sampler's and the learner's log-probs of one text are apart, and why.

`list_scores` begins with the sampler's way to compute them and ends with the learner's;
each differs from the one before it in one thing, so that the signed gaps of all add up to
that of the two ends.

Letters: B texts, T tokens of a text, R packed rows, M tokens of all texts, C those of a
block of A, D embed, V vocabulary; in attention, those of attention.py.
"""

import asyncio
from collections.abc import Iterator, Sequence
import contextlib
import functools
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import (
  attention,
  block_attention,
  decoder,
  head,
  kv_cache,
  sampling_params,
)
from agent_r1_jax.rl import learner, packing, prefix_trees, table


class Played(NamedTuple):
  """A text that an engine sampled, with random answers between its replies."""

  segment: types.Segment
  likeliest: np.ndarray  # int32 [T], where the token is an action; else -1.


class Scores(NamedTuple):
  """What a way to compute log-probs says of the tokens of B texts of T tokens."""

  logprobs: np.ndarray  # float32 [B, T]; 0 at the first token of each text.
  likeliest: np.ndarray  # int32 [B, T], the token with the highest log-prob.


async def play(
  engine: engine_lib.Engine,
  vocab_size: int,
  number: int,
  *,
  turns: int = 4,
  prompt: int = 128,
  reply: int = 64,
  answer: int = 128,
  group: int = 8,
) -> Played:
  """Plays turns with random answers; texts of a group begin with the same prompt.

  Args:
    engine: Samples the replies.
    vocab_size: The number of tokens that prompts and answers are drawn from.
    number: The text's number, which says all its randomness.
    turns: Replies of the text.
    prompt: Tokens of the prompt.
    reply: Tokens of a reply.
    answer: Tokens of an answer.
    group: Texts that share a prompt.
  """
  draw = lambda n, *seed: (
    np.random.default_rng(seed).integers(0, vocab_size, n).astype(np.int32)
  )
  pieces, new, routes = [], draw(prompt, number // group), None
  text: request_lib.Text | None = None
  key = request_lib.make_key('bench', number)
  async with engine.reserve(number // group) as replica:
    for turn in range(turns):
      generation = replica.submit(
        request_lib.Request(
          new, text, max_tokens=reply, key=key, top_logprobs=1, routes=True
        )
      )
      said, text = await generation, generation.text
      routes = said.routes
      pieces += [(new, None, None), (*said[:2], said.top_tokens[:, 0])]
      new = draw(answer, 1, number, turn)
      await asyncio.sleep(0)
    if text:
      text.close()
  fill = lambda i, x: np.concatenate(
    [np.full(len(p[0]), x) if p[i] is None else p[i] for p in pieces]
  )
  segment = types.Segment(
    np.concatenate([p[0] for p in pieces]),
    np.concatenate([np.full(len(p[0]), p[1] is not None) for p in pieces]),
    fill(1, np.float32(0)),
  )
  if routes is not None:
    none = [(0, len(segment.tokens) - len(routes)), (0, 0), (0, 0)]
    segment.routes = np.pad(routes, none, constant_values=types.NO_EXPERT)
  return Played(segment, fill(2, np.int32(-1)))


def describe(difference: np.ndarray) -> dict[str, Any]:
  """Describes differences of log-probs in nats, [n]; k1 and k3 estimate the KL."""
  x = difference.astype(np.float64)
  return {
    'tokens': len(x),
    'mean_difference': float(np.abs(x).mean()),
    'p99_difference': float(np.quantile(np.abs(x), 0.99)),
    'max_difference': float(np.abs(x).max()),
    'equal': float((x == 0).mean()),
    'mean_ratio_deviation': float(np.abs(np.expm1(x)).mean()),
    'kl_k1': float(-x.mean()),
    'kl_k3': float((np.expm1(x) - x).mean()),
  }


class Model(NamedTuple):
  """A policy, and the texts that are scored."""

  config: decoder.DecoderConfig
  params: decoder.Params
  played: Sequence[Played]  # Of equal lengths.
  row_tokens: int  # Of a packed row.
  weights: str = 'model'  # The numbers of the engine's kernels.
  cache: str = 'model'  # The numbers of its cache.

  @property
  def tokens(self) -> np.ndarray:
    """The tokens of all texts, [B, T]."""
    return np.stack([p.segment.tokens for p in self.played])


def list_scores(model: Model, rows: int) -> Iterator[tuple[str, Scores]]:
  """Computes the log-probs in each way, from the sampler's to the learner's.

  Args:
    model: The policy and the texts.
    rows: Texts that are computed at a time, except in packed rows and in the head's
      blocks.
  """
  yield (
    'engine',
    Scores(
      np.stack([p.segment.behaviour_logprobs for p in model.played]),
      np.stack([p.likeliest for p in model.played]),
    ),
  )
  # The text alone is decoded with the engine's kernels and its cache; then each of the
  # two that has 8 bits gets the learner's numbers.
  ways = [('decoded', decode, model.weights, model.cache)]
  if model.weights != 'model':
    ways.append(('rounded', decode, 'model', model.cache))
  if model.cache != 'model':
    ways.append(('cached', decode, 'model', 'model'))
  ways.append(('prefilled', prefill, 'model', 'model'))
  tokens = model.tokens
  for name, compute, kind, cache in ways:
    params = sampling_params.unstack(model.params, model.config, kind)
    parts = [
      compute(params, tokens[i : i + rows], config=model.config, cache=cache)
      for i in range(0, len(tokens), rows)
    ]
    yield name, _score_rows(model, jnp.concatenate(parts), rows)
  yield from list_learner_scores(model, rows)


def list_learner_scores(model: Model, rows: int) -> Iterator[tuple[str, Scores]]:
  """Does `list_scores` from the learner's hidden states on."""
  x_BTD = pack(model)
  yield 'packed', _score_rows(model, x_BTD, rows)
  before_MD = x_BTD[:, :-1].reshape(-1, x_BTD.shape[-1])
  after_M = jnp.asarray(model.tokens[:, 1:].reshape(-1))
  kernel_DV = jax.jit(decoder.head_kernel, static_argnums=1)(model.params, model.config)
  block = head.block_tokens(model.config.vocab_size)
  unshift = lambda x: np.pad(np.reshape(x, (len(x_BTD), -1)), ((0, 0), (1, 0)))
  logprobs, likeliest = score_blocks(before_MD, kernel_DV, after_M, block=block)
  likeliest = unshift(likeliest)
  yield 'blocks', Scores(unshift(logprobs), likeliest)
  score = jax.jit(head.logprobs, static_argnums=(4, 5))
  everywhere = jnp.ones(len(after_M), bool)
  logprobs, _ = score(before_MD, kernel_DV, after_M, everywhere, 1.0, block)
  yield 'head', Scores(unshift(logprobs), likeliest)
  yield 'learner', Scores(learn(model), likeliest)


@contextlib.contextmanager
def float32_attention() -> Iterator[None]:
  """Keeps attention's weights in float32 inside `with`, where a CPU computes it.

  Else they are rounded to bfloat16: in attention to the cache after the division by their
  sum, and in blocks before it.
  """

  def attend(q_BTNH, k_BKSH, v_BKSH, mask_BTS, cap, scales=None):
    B, T, N, H = q_BTNH.shape
    if scales:
      slots = zip((k_BKSH, v_BKSH), scales, strict=True)
      k_BKSH, v_BKSH = (x * scale[..., None] for x, scale in slots)
    q_BKGTH = (
      (q_BTNH * H**-0.5).reshape(B, T, k_BKSH.shape[1], -1, H).transpose(0, 2, 3, 1, 4)
    )
    scores = attention.cap_scores(dot('bkgth,bksh->bkgts', q_BKGTH, k_BKSH), cap)
    scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    out_BTKGH = dot('bkgts,bksh->btkgh', jax.nn.softmax(scores), v_BKSH)
    return out_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)

  def dot(form, x, y):
    return jnp.einsum(form, x.astype(jnp.float32), y.astype(jnp.float32))

  with (
    mock.patch.object(attention, '_attend', attend),
    mock.patch.object(block_attention, '_dot', dot),
  ):
    yield


@functools.partial(jax.jit, static_argnames=('config', 'cache'))
def decode(params, tokens_BT, *, config, cache: str) -> Array:
  """Computes hidden states [B, T, D] one token at a time, through the cache."""
  B, T = tokens_BT.shape

  def step(slots, t):
    token_B1 = jax.lax.dynamic_slice_in_dim(tokens_BT, t, 1, axis=1)
    position_B1 = jnp.full((B, 1), t)
    x_B1D, slots = decoder.extend(params, config, token_B1, position_B1, slots)
    return slots, x_B1D[:, 0]

  slots = kv_cache.empty(config, B, T, cache)
  _, x_TBD = jax.lax.scan(step, slots, jnp.arange(T))
  return jnp.swapaxes(x_TBD, 0, 1)


@functools.partial(jax.jit, static_argnames=('config', 'cache'))
def prefill(params, tokens_BT, *, config, cache: str) -> Array:
  """Computes hidden states [B, T, D] by one call for the whole text, with a cache."""
  B, T = tokens_BT.shape
  positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
  slots = kv_cache.empty(config, B, T, cache)
  return decoder.extend(params, config, tokens_BT, positions_BT, slots)[0]


def _batch(
  model: Model, *, trees: bool = False
) -> tuple[list[types.Batch], packing.Layout | prefix_trees.TreeLayout]:
  """Packs the texts into micro-batches of one row."""
  texts = table.from_segments([p.segment for p in model.played])
  shape = packing.MicrobatchShape(1, model.row_tokens, trees=trees)
  return packing.pack_microbatches(texts, shape)


def pack(model: Model) -> Array:
  """Computes hidden states [B, T, D] in the learner's packed rows, one at a time."""
  rows, layout = _batch(model)
  hidden = jax.jit(decoder.hidden, static_argnums=1)
  text = lambda row: (row.tokens, row.positions, row.segment_ids)
  x_RTD = jnp.concatenate([hidden(model.params, model.config, *text(r)) for r in rows])
  x_MD = x_RTD.reshape(-1, x_RTD.shape[-1])[layout.index]
  return x_MD.reshape(*model.tokens.shape, -1)


def learn(model: Model, *, trees: bool = False) -> np.ndarray:
  """Computes the log-probs of all tokens as the learner does, [B, T]."""
  rows, layout = _batch(model, trees=trees)
  found = [learner.logprobs(model.params, r, config=model.config) for r in rows]
  return layout.extract(np.concatenate(found)).reshape(model.tokens.shape)


@functools.partial(jax.jit, static_argnames='config')
def score_steps(params, x_BTD, tokens_BT, *, config) -> tuple[Array, Array]:
  """Computes logits as a decode does: of one token of each text at a time.

  Returns:
    The log-probs of tokens 1 to T - 1, and the likeliest tokens in their place.
  """

  def step(t):
    logits_BV = decoder.logits(params, config, x_BTD[:, t])
    return _softmax(logits_BV, tokens_BT[:, t + 1])

  found = jax.lax.map(step, jnp.arange(tokens_BT.shape[1] - 1))
  return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)


@functools.partial(jax.jit, static_argnames='block')
def score_blocks(x_MD, kernel_DV, tokens_M, *, block) -> tuple[Array, Array]:
  """Computes logits as the learner does, in blocks, with the sampler's softmax."""
  M = len(tokens_M)
  at_AC = jnp.arange(M + -M % block).reshape(-1, block)

  def step(at_C):
    logits_CV, _ = head._logits(x_MD, kernel_DV, at_C, 1.0, None)
    return _softmax(logits_CV, tokens_M.at[at_C].get(mode='clip'))

  return jax.tree.map(lambda x: x.reshape(-1)[:M], jax.lax.map(step, at_AC))


def _softmax(logits_MV, tokens_M) -> tuple[Array, Array]:
  logprobs_MV = jax.nn.log_softmax(logits_MV)
  chosen_M1 = jnp.take_along_axis(logprobs_MV, tokens_M[:, None], axis=1)
  return chosen_M1[:, 0], jnp.argmax(logprobs_MV, axis=-1)


def _score_rows(model: Model, x_BTD: Array, rows: int) -> Scores:
  params, tokens = sampling_params.unstack(model.params, model.config), model.tokens
  found = [
    score_steps(params, x_BTD[i : i + rows], tokens[i : i + rows], config=model.config)
    for i in range(0, len(tokens), rows)
  ]
  pad = lambda parts: np.pad(np.concatenate(parts), ((0, 0), (1, 0)))
  return Scores(*map(pad, zip(*found, strict=True)))
