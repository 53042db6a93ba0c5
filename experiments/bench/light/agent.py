"""First light, part 6: two steps of agent RL at 0.6B, with a tool of .2 seconds.

The policy has random parameters and learns nothing: this measures where the time of a
step goes. A tool that takes .2 seconds answers each of four replies except the last; GRPO
with groups of eight.
"""

import asyncio
from collections.abc import Iterator
from concurrent import futures
import functools
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax import algorithms, config, train, types
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import weights
from agent_r1_jax.rollout import sockets
from experiments.bench import common
from experiments.bench.light import lines, quickstart

_TOOL_SECONDS, _TURNS, _PROMPT, _ANSWER = 0.2, 4, 256, 128
_MINIWIKI = pathlib.Path(__file__).parents[2] / 'miniwiki' / 'model'


class Player(sockets.Player):
  """Answers each reply with random tokens, after the tool's seconds.

  A policy with random parameters never ends a reply, so an environment's episode would
  end with the first one.
  """

  async def play(self, episode: Any, task: types.Task) -> str:
    """Plays the turns; the reward depends on the sum of the sampled tokens."""
    rng = np.random.default_rng(int(task.id))
    draw = lambda n: rng.integers(0, episode.context.vocab_size, n).astype(np.int32)
    transcript, ids, total = episode.transcript, draw(_PROMPT), 0
    transcript.begin()
    for turn in range(_TURNS):
      reply = await episode.context.reply(ids, episode.limits.max_turn_tokens)
      transcript.add_turn(transcript.passage, ids, reply)
      total += int(reply.tokens.sum())
      if turn < _TURNS - 1:
        await asyncio.sleep(_TOOL_SECONDS)
        ids = draw(_ANSWER)
    episode.add_reward(types.Step([], total % 1000 / 1000, True))
    return 'done'


def run() -> Iterator[lines.Line]:
  """Yields a line per step."""
  shape, tasks, tokens = ('tiny', 2, 8) if lines.is_tiny() else ('0.6b', 16, 64)
  model, workdir = map(quickstart.make_workdir, ('model', 'agent'))
  _write_model(shape, model)
  settings = config.Config(
    model=config.Model(path=str(model), dtype='bfloat16', remat='full'),
    schedule=config.Schedule(steps=2, tasks=tasks, samples=8),
    limits=config.Limits(max_turn_tokens=tokens),
    engine=config.Engine(
      slots=1024, rows=8 * tasks, decode_steps=16, bucket=1024, narrow=False
    ),
    # Set here, because choosing them automatically compiles programs.
    batch=config.Batch(row_tokens=512 * tasks, microbatch=1),
    sinks='',
  )
  question = [{'role': 'user', 'content': 'Which of the two was founded first?'}]
  play = functools.partial(
    train.run,
    settings,
    str(workdir),
    tasks=[types.Task(str(n), question, '') for n in range(tasks)],
    make_env=Player,
    algorithm=algorithms.grpo(),
  )
  # Every episode takes at least its tools' time, whatever overlaps with it.
  more = {'tool_seconds': _TOOL_SECONDS * (_TURNS - 1), 'episodes': 8 * tasks}
  # In a thread, to yield lines before the run ends, which writes gigabytes.
  with futures.ThreadPoolExecutor(1) as pool:
    future = pool.submit(play)
    is_running = lambda: not future.done()
    for line in quickstart.follow(f'agent RL, {shape}', workdir, is_running):
      yield line | more
    future.result()
  shutil.rmtree(model)


def _write_model(shape: str, folder: pathlib.Path) -> None:
  """Writes random parameters of a shape, with the tokenizer of the quickstart."""
  decoder_config = common.SHAPES[shape]
  if shape == 'tiny':  # Its vocabulary is smaller than the tokenizer's.
    decoder_config = common.SHAPES['s5']
  params = jax.jit(decoder.init, static_argnums=0)(decoder_config, jax.random.key(0))
  weights.save(folder, decoder_config, params, dtype=jnp.bfloat16)
  for file in _MINIWIKI.glob('*token*'):
    shutil.copyfile(file, folder / file.name)
  for file in _MINIWIKI.glob('*.jinja'):
    shutil.copyfile(file, folder / file.name)


MEASUREMENTS = (run,)

if __name__ == '__main__':
  lines.run(MEASUREMENTS)
