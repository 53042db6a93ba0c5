"""A trained reward model in use: it scores conversations, on the device, for the host.

model = reward_model.load('runs/reward_model/model', tools=[search_tool.schema])
reward = rewards.hybrid(outcome=(1.0, qa.em_reward), model=(0.2, model))
best = int(np.argmax(model.score(trajectories)))
ToolEnv(tools, reward, process_reward=rewards.potential_based(model))
"""

from collections.abc import Mapping, Sequence
import os
import pathlib
from typing import Any

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.guided import reward_training
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import json_fields, weights
from agent_r1_jax.retrieval import batching
from agent_r1_jax.rl import packing
from agent_r1_jax.train import fingerprint
from agent_r1_jax.train.plan import setup


class RewardModel:
  """Scores conversations: a reward function, a potential, and a selector.

  A score is normalised by the mean and the deviation of the training scores, and clipped.
  It depends on the conversation alone; of one that is too long the end is read.
  """

  def __init__(
    self,
    shape: decoder.DecoderConfig,
    params: decoder.Params,
    chat: chat_lib.Chat,
    training: Mapping[str, Any],
    *,
    tools: Sequence[dict] = (),
    clip: float = 3.0,
    rows: int = 8,
    timeout: float = 30.0,
  ):
    """Holds the model; `load` makes it.

    `training` is what `save` was told of its training. A normalised score is clipped to
    `clip`; one forward pass scores so many `rows`. A call that is later than `timeout`
    seconds raises, and so marks its trajectory as an error.
    """
    self._model, self._params, self._chat = shape, params, chat
    self._mean, self._std = training['mean'], training['std']
    self._tools, self._clip = tools, clip
    self._shape = packing.MicrobatchShape(rows, training['row_tokens'])
    # It is compiled now, and not within the time of the first call.
    reward_training.score(
      params, [np.zeros(1, np.int32)], config=shape, shape=self._shape
    )
    self._batcher = batching.Batcher(self._score, 'reward_model', timeout=timeout)

  def score(self, trajectories: Sequence[types.Trajectory]) -> np.ndarray:
    """Scores whole trajectories: normalised, clipped, float [n]."""
    return self._score([self._encode(t.messages) for t in trajectories])

  async def __call__(self, task: types.Task, messages: list[types.Message]) -> float:
    """Scores a conversation in one batch with those that arrive at the same time.

    The forward pass runs in a thread, off the engine's loop.
    """
    # What cannot be encoded is refused alone.
    return float(await self._batcher.ask(self._encode(messages)))

  def _encode(self, messages) -> np.ndarray:
    return encode(self._chat, messages, self._tools)[-self._shape.row_tokens :]

  def _score(self, texts) -> np.ndarray:
    raw = reward_training.score(
      self._params, texts, config=self._model, shape=self._shape
    )
    return np.clip((raw - self._mean) / self._std, -self._clip, self._clip)


def encode(
  chat: chat_lib.Chat, messages: Sequence[types.Message], tools: Sequence[dict]
) -> np.ndarray:
  """Encodes what the reward model reads, in training and in use alike.

  Raises:
    ValueError: A message has a picture.
  """
  encoded = sft.encode(chat, sft.Conversation(messages, tools))
  if encoded.pictures:
    raise ValueError(
      'A message has a picture, and a reward model reads text only: score by a function '
      'of your own, or give the messages without their pictures.'
    )
  return encoded.tokens


def save(
  directory: str | os.PathLike,
  shape: decoder.DecoderConfig,
  params: decoder.Params,
  *,
  tokenizer_from: str | os.PathLike,
  **training: Any,
) -> None:
  """Writes a reward model in HF layout; config.json says how it was trained.

  `training` has the `loss` and the `limit` of success; `mean` and `std` of the scores
  that it was trained on; its `auc` on held-out tasks; `row_tokens`, the longest
  conversation that it reads, in tokens.
  """
  training['tokenizer'] = fingerprint.tokenizer_digest(tokenizer_from)
  options = {'tokenizer_from': tokenizer_from, 'value_head': training}
  weights.save(directory, shape, params, **options)


def load(directory: str | os.PathLike, *, min_auc: float = 0.6, **options) -> RewardModel:
  """Loads what `save` wrote.

  `min_auc` is the least held-out AUC of a model that may be used; `options` are those of
  RewardModel.

  Raises:
    ValueError: It is no reward model, does not know successes from failures well enough,
      or has another tokenizer than the one that it was trained with.
  """
  found = json_fields.read_json(pathlib.Path(directory) / 'config.json').get('value_head')
  if not isinstance(found, dict) or 'auc' not in found:
    raise ValueError(
      f'{directory}: config.json does not say in value_head how a reward model was '
      'trained; take one of experiments/train_reward_model.py.'
    )
  # Not `auc < min_auc`: one that could not be measured is NaN.
  if not found['auc'] >= min_auc:
    raise ValueError(
      f'{directory}: the reward model has an AUC of {found["auc"]:.3f} on held-out '
      f'tasks, below min_auc = {min_auc:g}. Train it longer or on more trajectories.'
    )
  if fingerprint.tokenizer_digest(directory) != found['tokenizer']:
    raise ValueError(
      f'{directory}: its tokenizer is not the one that the reward model was trained '
      'with: put the files back, or train it anew.'
    )
  model = config_lib.Model(path=str(directory))
  return RewardModel(*setup.load(model, config_lib.Chat()), found, **options)
