"""Supervised fine-tuning on conversations, with RL's learner."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.models.pictures.vision_config import VisionConfig
from agent_r1_jax.rl import learner, losses, optimizers, packing, spans, table

# Called with the number of finished steps, the last step's metrics and the parameters.
OnStep = Callable[[int, dict[str, float], decoder.Params], None]
# `batches` gives up after this many consecutive segments that do not fit a row.
_MOST_SKIPPED = 1000


class Conversation(NamedTuple):
  """Messages that end with an assistant's, and the schemas of the prompt's tools."""

  messages: Sequence[types.Message]
  tools: Sequence[dict] = ()


@dataclasses.dataclass
class Config:
  """The configuration of a supervised run.

  Attributes:
    steps: Number of optimizer steps.
    rows: Packed rows per step.
    row_tokens: Tokens per row; longer conversations are left out.
    learning_rate: Peak learning rate, after the warm-up; then a cosine to 0.
    warmup: Steps of linear warm-up.
    weight_decay: AdamW's weight decay, for matrices.
    decay_all: Whether scales of norms and biases decay too.
    adam_b1: Decay rate of AdamW's first moment.
    adam_b2: Decay rate of its second moment; PyTorch has .999.
    adam_eps: Added to the root of the second moment.
    other_weight: Loss weight of tokens that are not the assistant's.
  """

  steps: int = 1000
  rows: int = 16
  row_tokens: int = 384
  learning_rate: float = 3e-3
  warmup: int = 50
  weight_decay: float = 0.1
  decay_all: bool = False
  adam_b1: float = 0.9
  adam_b2: float = 0.98
  adam_eps: float = 1e-8
  other_weight: float = 0.02

  def check(self) -> None:
    """Raises ValueError unless the warm-up ends before the last step."""
    if self.warmup >= self.steps:
      raise ValueError(
        f'warmup: {self.warmup} steps of warm-up leave nothing of {self.steps} steps; '
        'give fewer of them, or more steps.'
      )


def _likelihood(stats, batch):
  """Returns -w log π; the tokens' weights w are in batch.advantages."""
  return losses.weighted(-batch.advantages * stats.logprobs, batch.weights), {}


def segment(chat: chat_lib.Chat, conversation: Conversation) -> types.Segment:
  """Encodes a conversation as a rollout would: prompt, reply, delta, reply, ..."""
  messages = conversation.messages
  if not messages or messages_lib.check(messages[-1])['role'] != 'assistant':
    raise ValueError('A conversation must end with a message of the assistant.')
  return encode(chat, conversation)


def encode(chat: chat_lib.Chat, conversation: Conversation) -> types.Segment:
  """Encodes a conversation like `segment`; it need not end with a reply."""
  messages = list(conversation.messages)
  turns = chat.encode_turns(messages, conversation.tools)
  parts, mask = zip(*turns, strict=True)
  sizes = [len(part) for part in parts]
  tokens = np.concatenate(parts).astype(np.int32)
  return types.Segment(
    tokens,
    np.repeat(mask, sizes),
    np.zeros(len(tokens), np.float32),
    pictures=chat.list_pictures(messages),
  )


def batches(
  segments: Iterable[types.Segment], config: Config, vision: VisionConfig | None = None
) -> Iterator[types.Batch]:
  """Packs a stream of segments into batches of config.rows rows, in order.

  Segments longer than a row are left out. The last batch may have empty rows. `vision` is
  the shape of the tower that sees their pictures, if they have any.

  Raises:
    ValueError: _MOST_SKIPPED consecutive segments are longer than a row; an endless
      stream of such segments would never yield a batch.
  """
  pool: list[types.Segment] = []
  full, too_long = config.rows * config.row_tokens, 0
  for s in segments:
    if len(s.tokens) > config.row_tokens:
      too_long += 1
      if too_long == _MOST_SKIPPED:
        raise ValueError(
          f'{_MOST_SKIPPED} consecutive segments are longer than row_tokens, '
          f'{config.row_tokens} (the last has {len(s.tokens)} tokens): raise it.'
        )
      continue
    too_long = 0
    pool.append(s)
    if sum(len(s.tokens) for s in pool) >= full:
      yield _take(pool, config, vision)
  while pool:
    yield _take(pool, config, vision)


def run(
  model: decoder.DecoderConfig,
  params: decoder.Params,
  segments: Iterable[types.Segment],
  config: Config,
  *,
  on_step: OnStep = lambda step, metrics, params: None,
) -> decoder.Params:
  """Fits the policy to the action tokens of a stream of segments.

  On several chips: with parameters on a mesh, inside `jax.set_mesh`, and with the same
  segments in every process.

  The segments must fill config.steps batches; see `segment`. `params` are donated, and
  each step donates the previous step's parameters, which `on_step` receives.

  Returns:
    The new parameters.

  Raises:
    ValueError: The stream ended before the last step, or the warm-up does not.
  """
  config.check()
  rate = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup, config.steps
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optimizers.adamw(
      rate,
      config.weight_decay,
      optimizers.Adam(config.adam_b1, config.adam_b2, config.adam_eps),
      decay_all=config.decay_all,
    ),
  )
  state = learner.init(params, optimizer)
  stream = batches(segments, config, model.vision)
  for step, batch in zip(range(1, config.steps + 1), stream, strict=False):
    gradients = learner.forward_backward(
      state.params, [batch], config=model, loss=_likelihood
    )
    state, metrics = learner.optim_step(state, gradients, optimizer=optimizer)
    on_step(step, metrics, state.params)
  if int(state.step) < config.steps:
    raise ValueError(
      f'segments ended after {int(state.step)} of {config.steps} steps: give more.'
    )
  return state.params


def _take(pool: list[types.Segment], config, vision) -> types.Batch:
  """Removes the longest prefix of the pool that fits a batch, and packs it."""
  count = len(pool)
  layout = _lay_out(pool, config)
  while layout.rows > config.rows:
    count -= 1
    layout = _lay_out(pool[:count], config)
  tokens = table.from_segments(pool[:count])
  del pool[:count]
  weight = np.where(tokens.action_mask, 1.0, config.other_weight)
  weight[spans.starts(tokens.segment)] = 0.0  # Nothing predicts the first token.
  weight[tokens.tokens >= types.FIRST_PICTURE_ID] = 0.0  # Nor predicts a picture.
  # A batch without replies may have no weight, and then no gradient.
  weights = (weight > 0) / (weight.sum() or 1.0)
  weighted = dataclasses.replace(tokens, advantages=weight, weights=weights)
  return packing.pack(weighted, layout, vision)


def _lay_out(segments, config):
  return packing.plan_layout(
    [len(s.tokens) for s in segments],
    row_tokens=config.row_tokens,
    row_multiple=config.rows,
  )
