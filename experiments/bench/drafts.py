"""Drafts on the quickstart's episodes: calls, CPU-seconds, and tokens that moved."""

from collections.abc import Iterator
import copy
import time
from typing import Any

from absl import flags
import numpy as np

from agent_r1_jax import train, types
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import rollout, sizes
from experiments import comparison
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki

_DRAFTS = flags.DEFINE_integer('drafts', 4, 'Tokens that are drafted for a call (k).')


def drafts(_) -> dict[str, Any]:
  """Rollouts of the quickstart's policy with drafts beside those without.

  The first rollout warms up and is not counted: the index begins empty.
  """
  found: dict[str, Any] = {'k': _DRAFTS.value}
  sides = {'plain': _play_rollouts(0), 'drafts': _play_rollouts(_DRAFTS.value)}
  compared, moved = 0, 0
  for number in range(1 + flags.FLAGS.repeats):
    played = {}
    for name, rollouts in sides.items():
      played[name], numbers = next(rollouts)
      for key, value in numbers.items():
        total = found.get(f'{name}/{key}', 0) if number > 1 else 0
        found[f'{name}/{key}'] = round(total + value, 3)
    for one, other in zip(*played.values(), strict=True):
      first, same = _compare(one, other)
      compared, moved = compared + first, moved + (not same)
  found['tokens_a_call'] = round(found['drafts/sampled'] / found['drafts/calls'], 3)
  for key in ('calls', 'steps', 'cpu_seconds'):
    found[f'ratio/{key}'] = round(found[f'drafts/{key}'] / found[f'plain/{key}'], 3)
  return found | {'compared_tokens': compared, 'moved': moved}


def _play_rollouts(k: int) -> Iterator[tuple[list[types.Trajectory], dict[str, float]]]:
  """Plays rollouts of other tasks each; yields the episodes and what they cost."""
  config = copy.deepcopy(shapes.CONFIG)
  config.engine.drafts = k
  config = sizes.resolve(config, None, None)
  shape, params, chat = train.load(config.model, config.chat)
  engine = train.make_engine(config, shape, params)
  engine.warm_up()
  tool = search.search_tool(miniwiki.index(0), k=1)
  make_env, _ = comparison.make_envs(tool, qa.paper_reward)
  tasks, n = miniwiki.train_tasks(0, 4096), config.schedule.tasks
  for number in range(len(tasks) // n):
    options = {'limits': config.limits, 'samples': config.schedule.samples}
    before = engine.stats.sampled, engine.stats.calls, engine.stats.steps
    begun = time.process_time()
    played = rollout.collect(
      *(engine, chat, tasks[number * n :][:n], make_env),
      rollout_number=number,
      **options,
    )
    cpu = time.process_time() - begun
    after = engine.stats.sampled, engine.stats.calls, engine.stats.steps
    sampled, calls, steps = (b - a for a, b in zip(before, after, strict=True))
    yield (
      played,
      {'sampled': sampled, 'calls': calls, 'steps': steps, 'cpu_seconds': cpu},
    )


def _compare(one: types.Trajectory, other: types.Trajectory) -> tuple[int, bool]:
  """Counts the sampled tokens before two episodes differ; says whether they do not."""
  texts = [np.concatenate([s.tokens for s in t.segments]) for t in (one, other)]
  mask = np.concatenate([s.action_mask for s in one.segments])
  n = min(map(len, texts))
  differ = np.flatnonzero(texts[0][:n] != texts[1][:n])
  first = int(differ[0]) if len(differ) else n
  return int(mask[:first].sum()), not len(differ) and len(texts[0]) == len(texts[1])
