"""What playing ahead gives as episode lengths get a tail: chips that only take time.

  python -m experiments.bench.utilization

The schedule, the engine and the environments are those of training. The chips are not:
a decode takes its time whatever the rows (decoding is bound by the weights'
bytes), an update takes its own, and neither computes anything. In turn, all chips sample
and then all train; otherwise one half samples and the other trains, each with half of the
rows and, for the update, twice the time. Both halves have the same work on average.

An episode is one reply; lengths are log-normal with the same mean. A line of JSON for
each cell: seconds a step, the speed over that in turn, the share of the samplers'
row-steps that sampled and of the trainers' time that trained, the share of all chips'
time that either makes, and the age of the tokens. About 6 minutes, most of it asleep.
"""

import dataclasses
import json
import pathlib
import time
import types as types_lib
from typing import Any

from absl import app, flags
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import device as device_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, correction, packing, updates
from agent_r1_jax.rl import train_state as train_state_lib
from agent_r1_jax.train import decoding as decoding_lib
from agent_r1_jax.train import run_files, schedule, watch

_TAILS = flags.DEFINE_list('tails', ['0', '0.5', '1', '1.5'], 'σ of the log of a length.')
_STEPS = flags.DEFINE_integer(
  'steps', 30, 'Updates of a cell; the first 5 are not counted.'
)
_EPISODES = flags.DEFINE_integer('episodes', 64, 'Episodes of an update.')
_MEAN = flags.DEFINE_integer('mean', 128, 'Tokens of an episode.')
_SEGMENT = flags.DEFINE_float('segment', 0.01, 'Seconds of a decode of 8 tokens.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the lengths.')

_TOKENIZER = pathlib.Path(__file__).parents[1] / 'miniwiki' / 'model'
_SLOTS, _TOKENS, _WARM = 4096, 8, 5
_LONGEST = _SLOTS // 2  # The most tokens of an episode.
MODES: dict[str, dict[str, Any]] = {
  'in turn': {},
  'one step off-policy': {'ahead': 1},
  'partial, ahead 1': {'ahead': 1, 'partial': True},
  'partial, ahead 2': {'ahead': 2, 'partial': True},
  'partial, ahead 4': {'ahead': 4, 'partial': True},
}


class Chips(device_lib.Device):
  """Chips that compute nothing; each text has a length that its key gives."""

  tail, stop_id = 0.0, 0

  def copy(self, *args):
    """Nothing."""

  def prefill(self, *args):
    """Nothing."""

  def decode(self, params, batch, bucket, places=None, adapters=None, routed=()):
    """Takes its time, and continues each text by what its length leaves."""
    until = time.perf_counter() + _SEGMENT.value
    # All requests may sample _LONGEST tokens: what is missing of that has been sampled.
    left = np.array([self._length(key) for key in batch.keys]) - _LONGEST + batch.budget
    running = batch.budget > 0
    count = np.where(running, np.minimum(self.sizes.decode_steps, left), 0)
    said = np.full((len(count), self.sizes.decode_steps), self.stop_id, np.int32)
    nothing = np.zeros((*said.shape, 0), np.float32)
    counts = count, count, running & (left == count)
    zeros = np.float32(0 * said)
    out: Any = (said, zeros, zeros, zeros, *counts, np.int32(nothing), nothing)
    time.sleep(max(0.0, until - time.perf_counter()))
    return batch.guide_states, programs_lib.Decoded(*out), {}

  def _length(self, key: np.ndarray) -> int:
    normal = np.random.default_rng([_SEED.value, *key.tolist()]).normal()
    length = _MEAN.value * np.exp(self.tail * normal - self.tail**2 / 2)
    return int(np.clip(round(length), 1, _LONGEST))


def measure(mode: str, tail: float, chat: chat_lib.Chat) -> dict[str, Any]:
  """One cell."""
  apart = bool(MODES[mode])
  rows = _EPISODES.value // (2 if apart else 1)
  # In one half, as long as sampling takes there on average.
  segments = _EPISODES.value * _MEAN.value / (rows * _TOKENS)
  seconds = segments * _SEGMENT.value
  # It goes on past what is counted: otherwise the last updates would start no rollouts.
  steps = _STEPS.value + MODES[mode].get('ahead', 0)
  config = config_lib.Config(
    schedule=config_lib.Schedule(
      steps=steps, tasks=_EPISODES.value // 8, samples=8, **MODES[mode]
    ),
    limits=config_lib.Limits(1, _LONGEST),
  )
  engine, train_state, update_config = _system(config.schedule, rows, tail, chat)
  loop_state = run_files.LoopState()
  run_log: Any = types_lib.SimpleNamespace(loop_state=loop_state, store=None)
  tasks = [types.Task(str(i), [{'role': 'user', 'content': '?'}]) for i in range(4096)]
  ages, begun, sampled = [], 0.0, 0
  with engine.open():
    make_env = lambda: env.ToolEnv([], lambda task, messages: 0.0)
    clients = (engine, chat, run_log, watch.PLAIN, decoding_lib.ON_POLICY)
    rollouts = schedule.Schedule(config, tasks, *clients, make_env)
    for step in range(_STEPS.value):
      if step == _WARM:
        begun, sampled = time.perf_counter(), engine.stats.sampled
      train_state, found, draws = rollouts.next_groups(train_state, update_config)
      ages += [train_state.step - t.policy_steps for group in found for t in group]
      time.sleep(seconds)
      train_state = dataclasses.replace(train_state, step=train_state.step + 1)
      if not update_config.syncs_before_update:
        train_state = updates.sync_sampler(train_state, update_config)
      loop_state.advance({}, draws)
    wall = (time.perf_counter() - begun) / (_STEPS.value - _WARM)
  tokens = (engine.stats.sampled - sampled) / (_STEPS.value - _WARM)
  sampling = tokens / (rows * _TOKENS) * _SEGMENT.value / wall
  training = seconds / wall
  return {
    'mode': mode,
    'tail': tail,
    'seconds': round(wall, 3),
    'sampling': round(sampling, 3),
    'training': round(training, 3),
    'used': round((sampling + training) / (2 if apart else 1), 3),
    'age': round(float(np.concatenate(ages).mean()), 2),
    'oldest': int(np.concatenate(ages).max()),
  }


def _system(config, rows, tail, chat):
  """Makes the engine with its chips, and updates that change nothing."""
  shape = decoder.DecoderConfig('llama', len(chat.tokenizer), 2, 1, 1, 1, 2, 2)
  sizes = {'rows': rows, 'slots': _SLOTS, 'decode_steps': _TOKENS, 'narrow': False}
  nothing = {'layers': {}}
  engine = engine_lib.Engine(shape, nothing, **sizes)
  chips: Any = Chips(shape, engine.sizes, {})
  chips.tail, chips.stop_id = tail, chat.stop_ids[0]
  engine.replicas[0].device = chips
  algorithm = algorithms.grpo(kl_coef=0.0, correction=correction.token_truncated())
  rows_of_updates = packing.MicrobatchShape(1, 1)  # There are none.
  update_config = train_state_lib.UpdateConfig(
    shape, algorithm, rows_of_updates, {}, config
  )
  state: Any = types_lib.SimpleNamespace(params=nothing)
  return engine, updates.TrainState({'policy': state}, None, nothing), update_config


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  chat = chat_lib.Chat(tokenizer_lib.load(_TOKENIZER))
  cells = []
  for tail in map(float, _TAILS.value):
    for mode in MODES:
      cell = measure(mode, tail, chat)
      base = next(c for c in [*cells, cell] if c['tail'] == tail)
      cells.append(cell | {'speed': round(base['seconds'] / cell['seconds'], 2)})
      print(json.dumps(cells[-1]), flush=True)


if __name__ == '__main__':
  app.run(main)
