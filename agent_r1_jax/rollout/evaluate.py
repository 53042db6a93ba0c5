"""Plays evaluation episodes, and averages the metrics of episodes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import rollout

# Metrics that `summarize` returns even if no episode has them.
_FAULTS = ('timeouts', 'abandoned_calls')
GREEDY = decoding_lib.Decoding(config_lib.GREEDY)


def run(
  engine: protocol.AnyEngine,
  chat: chat_lib.Chat,
  sets: Mapping[str, Sequence[types.Task]],
  make_env: rollout.MakeEnv,
  *,
  limits: config_lib.Limits,
  decoding: decoding_lib.Decoding = GREEDY,
  samples: int = 1,
  **options: Any,
) -> dict[str, list[types.Trajectory]]:
  """Plays `samples` episodes of every task of every set.

  `sets` has the tasks by the name of their set; the other arguments are as in
  rollout.start, with greedy decoding by default. Other clients may use the engine at the
  same time.

  Returns:
    Trajectories by set, in the order of the tasks; episodes of a task are adjacent.
  """
  tasks = [task for tasks in sets.values() for task in tasks]
  options |= {'limits': limits, 'decoding': decoding, 'samples': samples}
  parts = iter(rollout.collect(engine, chat, tasks, make_env, **options))
  return {
    name: [next(parts) for _ in range(samples * len(tasks))]
    for name, tasks in sets.items()
  }


def make_decoding(
  config: config_lib.Sampling,
  engine: protocol.AnyEngine,
  chat: chat_lib.Chat,
  env: env_lib.Env,
) -> decoding_lib.Decoding:
  """Makes the decoding of a configuration; `env` has the grammar of its calls.

  Raises:
    ValueError: `tool_grammar` is set, and there is no grammar for these calls.
  """
  schemas = [tool.schema for tool in getattr(env, 'tools', ())]
  if not (config.tool_grammar and schemas):
    return decoding_lib.Decoding(config)
  if chat.format != call_formats.HERMES:
    raise ValueError(
      f'tool_grammar: calls in the format {chat.format.name} have no grammar; make it '
      "False, or chat.tool_format 'hermes'."
    )
  if not (make := getattr(env, 'call_grammar', None)):
    raise ValueError(
      'tool_grammar: the environment has no call_grammar; give it one, as in '
      'ToolEnv(..., call_grammar=compiler.tool_calls) of agent_r1_jax.grammars, or make '
      'it False.'
    )
  grammar = make(schemas, chat.token_bytes, engine.config.vocab_size)
  return decoding_lib.Decoding(config, grammar)


def mean_metric(trajectories: Sequence[types.Trajectory], metric: str = 'em') -> float:
  """Returns the mean of a metric; episodes without it, including failed ones, count 0."""
  values = [t.metrics.get(metric, 0.0) for t in trajectories]
  return float(np.mean(values)) if values else 0.0


def by_kind(
  trajectories: Sequence[types.Trajectory],
  kinds: Mapping[str, Callable[[types.Task], bool]],
  metric: str = 'em',
) -> dict[str, dict[str, float]]:
  """Returns mean and count of a metric over all tasks ('all') and each kind of task."""
  members = {'all': list(trajectories)}
  for kind, matches in kinds.items():
    members[kind] = [t for t in trajectories if matches(t.task)]
  return {
    kind: {'mean': mean_metric(chosen, metric), 'count': len(chosen)}
    for kind, chosen in members.items()
  }


def summarize(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
  """Returns means over episodes: reward, tokens, turns, metrics, share of each status.

  'timeouts' (the share of episodes in which the user's code was late) and
  'abandoned_calls' (per episode) are always included.
  """
  if not trajectories:
    return {}
  names = sorted({name for t in trajectories for name in t.metrics}.union(_FAULTS))
  actions = [sum(int(s.action_mask.sum()) for s in t.segments) for t in trajectories]
  lengths = [sum(len(s.tokens) for s in t.segments) for t in trajectories]
  return {
    'reward': float(np.mean([t.reward for t in trajectories])),
    'turns': float(np.mean([len(t.turns) for t in trajectories])),
    'tokens': float(np.mean(lengths)),
    'action_tokens': float(np.mean(actions)),
    **{name: mean_metric(trajectories, name) for name in names},
    **{
      f'status/{status}': float(np.mean([t.status == status for t in trajectories]))
      for status in types.Status
    },
  }
