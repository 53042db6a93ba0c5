"""A trained reward model in use: it predicts whether a conversation succeeds.

model = reward_model.load('runs/reward_model/model', tools=[search_tool.schema])
reward = rewards.hybrid(outcome=(1.0, qa.em_reward), model=(0.2, model))
best = int(np.argmax(model.score(trajectories)))
ToolEnv(tools, reward, process_reward=rewards.potential_based(model))

It is an implicit value (guided/implicit_value.py): a language model whose log-probs of
the replies predict success, after each turn as well as at the end.
"""

from collections.abc import Sequence
import os

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.guided import implicit_value
from agent_r1_jax.models import decoder
from agent_r1_jax.retrieval import batching
from agent_r1_jax.rl import learner, packing, table
from agent_r1_jax.train import fingerprint
from agent_r1_jax.train.plan import setup


class RewardModel:
  """Scores conversations: a reward function, a potential, and a selector.

  A score is the predicted probability of success, from 0 to 1. It depends only on the
  conversation; if that is too long, only its end is read.
  """

  def __init__(
    self,
    shape: decoder.DecoderConfig,
    params: decoder.Params,
    chat: chat_lib.Chat,
    odds: implicit_value.Odds,
    row_tokens: int,
    *,
    tools: Sequence[dict] = (),
    rows: int = 8,
    timeout: float = 30.0,
  ):
    """Wraps a model; use `load`.

    One forward pass scores `rows` conversations of up to `row_tokens`. A call that takes
    longer than `timeout` seconds raises, which marks its trajectory as an error.
    """
    self._model, self._params, self._chat, self._odds = shape, params, chat, odds
    self._tools, self._rows, self._row_tokens = tools, rows, row_tokens
    # Compile now, not within the time limit of the first call.
    none = np.zeros(1, np.int32)
    self._score([types.Segment(none, none > 0, none.astype(np.float32))])
    self._batcher = batching.Batcher(self._score, 'reward_model', timeout=timeout)

  def score(self, trajectories: Sequence[types.Trajectory]) -> np.ndarray:
    """Returns the probability that each complete trajectory succeeds, float [n]."""
    return self._score([self._encode(t.messages) for t in trajectories])

  async def __call__(self, task: types.Task, messages: list[types.Message]) -> float:
    """Scores a conversation, batched with others that arrive at the same time.

    The forward pass runs in a thread, off the engine's event loop.
    """
    # Encode first, so that a bad conversation fails alone.
    return float(await self._batcher.ask(self._encode(messages)))

  def _encode(self, messages) -> types.Segment:
    encoded, end = (
      encode(self._chat, messages, self._tools),
      slice(-self._row_tokens, None),
    )
    return types.Segment(
      encoded.tokens[end], encoded.action_mask[end], encoded.behaviour_logprobs[end]
    )

  def _score(self, texts: Sequence[types.Segment]) -> np.ndarray:
    """Scores each sequence in a packed row of its own, so that no other affects it."""
    log_odds = [np.zeros(0)]
    for start in range(0, len(texts), self._rows):
      tokens = table.from_segments(texts[start : start + self._rows])
      lengths = np.bincount(tokens.segment)
      starts = tuple((row, 0) for row in range(len(lengths)))
      layout = packing.Layout(
        tuple(lengths.tolist()), starts, self._rows, self._row_tokens
      )
      batch = packing.pack(tokens, layout)
      found = layout.extract(learner.logprobs(self._params, batch, config=self._model))
      log_odds.append(self._odds.of(found, tokens.action_mask, tokens.segment))
    return 1 / (1 + np.exp(-np.concatenate(log_odds)))


def encode(
  chat: chat_lib.Chat, messages: Sequence[types.Message], tools: Sequence[dict]
) -> types.Segment:
  """Encodes a conversation for the reward model, with a mask of the replies' tokens.

  Raises:
    ValueError: A message has a picture.
  """
  encoded = sft.encode(chat, sft.Conversation(messages, tools))
  if encoded.pictures:
    raise ValueError(
      'A message has a picture, and a reward model reads text only: score by a function '
      'of your own, or give the messages without their pictures.'
    )
  return encoded


def load(directory: str | os.PathLike, *, min_auc: float = 0.6, **options) -> RewardModel:
  """Loads what experiments/train_reward_model.py wrote.

  `min_auc` is the minimum held-out AUC; `options` are RewardModel's.

  Raises:
    ValueError: It is not a reward model, does not separate successes from failures well
      enough, or has another tokenizer than in training.
  """
  found = implicit_value.read(directory)
  if 'auc' not in found:
    raise ValueError(
      f'{directory}: {implicit_value.FILE} does not say the AUC on held-out tasks, by '
      'which a reward model is known; take one of experiments/train_reward_model.py.'
    )
  # Not `auc < min_auc`: an AUC that could not be measured is NaN.
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
  odds, row_tokens = implicit_value.make_odds(found), found['row_tokens']
  return RewardModel(*setup.load(model, config_lib.Chat()), odds, row_tokens, **options)
