"""A trained reward model in use: it scores conversations, on the device, for the host.

model = reward_model.load('runs/reward_model', tools=[search_tool.schema])
reward = rewards.hybrid(outcome=(1.0, qa.em_reward), model=(0.2, model))
best = int(np.argmax(model.score(trajectories)))
ToolEnv(tools, reward, process_reward=rewards.potential_based(model))
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
import pathlib

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import batching
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.models import decoder, weights
from agent_r1_jax.rl import packing
from agent_r1_jax.rl import reward_model as rl_reward_model
from agent_r1_jax.train import setup, sft

_FILE = 'reward_model.json'


@dataclasses.dataclass(frozen=True)
class Training:
  """How a reward model was trained; saved beside its weights.

  Attributes:
    loss: The name of its loss.
    limit: The greatest reward that counts as no success.
    mean: Mean of the scores that it was trained on.
    std: Their standard deviation.
    auc: Area under the ROC curve on held-out tasks.
    row_tokens: The longest conversation that it reads, in tokens.
    tokenizer: A digest of its tokenizer's files.
  """

  loss: str
  limit: float
  mean: float
  std: float
  auc: float
  row_tokens: int
  tokenizer: str


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
    training: Training,
    *,
    tools: Sequence[dict] = (),
    clip: float = 3.0,
    rows: int = 8,
    timeout: float = 30.0,
  ):
    """Holds the model; `load` makes it.

    Args:
      shape: The model's shape.
      params: Its parameters, with a value head.
      chat: Encodes conversations with its tokenizer.
      training: How it was trained.
      tools: The schemas of the tools in the prompt.
      clip: The greatest absolute value of a normalised score.
      rows: How many conversations one forward pass scores.
      timeout: The most seconds of a batch; a later call raises, and so marks its
        trajectory as an error.
    """
    self._model, self._params, self._chat = shape, params, chat
    self._training, self._tools, self._clip = training, tools, clip
    self._shape = packing.MicrobatchShape(rows, training.row_tokens)
    self._batcher = batching.Batcher(self._score, 'reward_model', timeout=timeout)

  def score(self, trajectories: Sequence[types.Trajectory]) -> np.ndarray:
    """Scores whole trajectories: normalised, clipped, float [n]."""
    return self._score([t.messages for t in trajectories])

  async def __call__(self, task: types.Task, messages: list[types.Message]) -> float:
    """Scores a conversation in one batch with those that arrive at the same time.

    The forward pass runs in a thread, off the engine's loop.
    """
    return float(await self._batcher.ask(messages))

  def _score(self, conversations) -> np.ndarray:
    texts = [encode(self._chat, messages, self._tools) for messages in conversations]
    texts = [tokens[-self._shape.row_tokens :] for tokens in texts]
    raw = rl_reward_model.score(
      self._params, texts, config=self._model, shape=self._shape
    )
    mean, std = self._training.mean, self._training.std
    return np.clip((raw - mean) / std, -self._clip, self._clip)


def encode(
  chat: chat_lib.Chat, messages: Sequence[types.Message], tools: Sequence[dict]
) -> np.ndarray:
  """Encodes what the reward model reads, in training and in use alike."""
  return sft.encode(chat, sft.Conversation(messages, tools)).tokens


def save(
  directory: str | os.PathLike,
  shape: decoder.DecoderConfig,
  params: decoder.Params,
  *,
  tokenizer_from: str | os.PathLike,
  **training,
) -> None:
  """Writes DIRECTORY/model in HF layout and, in JSON, the other fields of Training."""
  path = pathlib.Path(directory)
  # Nobody may take new weights for those that it describes.
  (path / _FILE).unlink(missing_ok=True)
  weights.save(path / 'model', shape, params, tokenizer_from=tokenizer_from)
  made = Training(**training, tokenizer=_fingerprint(path / 'model'))
  (path / _FILE).write_text(json.dumps(dataclasses.asdict(made), indent=2) + '\n')


def load(directory: str | os.PathLike, *, min_auc: float = 0.6, **options) -> RewardModel:
  """Loads what `save` wrote.

  Args:
    directory: The directory.
    min_auc: The least held-out AUC of a model that may be used.
    **options: The options of RewardModel.

  Raises:
    ValueError: The model does not know successes from failures well enough, or its
      tokenizer is not the one that it was trained with.
  """
  path = pathlib.Path(directory)
  if not (path / _FILE).is_file():
    raise ValueError(f'{path} has no {_FILE}: train one by train_reward_model.')
  training = Training(**json.loads((path / _FILE).read_text()))
  # Not `auc < min_auc`: one that could not be measured is NaN.
  if not training.auc >= min_auc:
    raise ValueError(
      f'{path}: the reward model has an AUC of {training.auc:.3f} on held-out tasks, '
      f'below min_auc = {min_auc:g}. Train it longer or on more trajectories.'
    )
  if _fingerprint(path / 'model') != training.tokenizer:
    raise ValueError(
      f'{path}/model: its tokenizer is not the one that the reward model was trained '
      'with: put the files back, or train it anew.'
    )
  model = config_lib.Model(path=str(path / 'model'))
  return RewardModel(*setup.load(model, config_lib.Chat()), training, **options)


def _fingerprint(directory: pathlib.Path) -> str:
  """Digests the tokenizer and its chat template."""
  files = ('tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja')
  found = [path.read_bytes() for f in files if (path := directory / f).is_file()]
  return hashlib.sha256(b'\0'.join(found)).hexdigest()
