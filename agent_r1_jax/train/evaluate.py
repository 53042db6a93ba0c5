"""Evaluation: the same episodes without the update, and the paper's baselines."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_grammar
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.report import tables
from agent_r1_jax.train import preflight, rollout

# What goes wrong in an episode; 0 is worth a line, too.
_FAULTS = ('timeouts', 'abandoned_calls')
GREEDY = rollout.Decoding(sampling_lib.GREEDY)


def run(
  engine: engine_lib.Engine,
  chat: chat_lib.Chat,
  sets: Mapping[str, Sequence[types.Task]],
  make_env: rollout.MakeEnv,
  *,
  limits: rollout.Limits,
  decoding: rollout.Decoding = GREEDY,
  seed: int = 0,
  on_done: Callable[[types.Trajectory], None] = lambda trajectory: None,
) -> dict[str, list[types.Trajectory]]:
  """Plays one episode of every task of every set.

  Args:
    engine: With the policy's weights; other clients may be playing on it.
    chat: Messages to tokens, with the policy's tokenizer.
    sets: Tasks by the name of their set.
    make_env: Makes a new environment for each episode.
    limits: What each episode may use.
    decoding: How replies are sampled; greedy unless said otherwise.
    seed: The seed of the randomness, where there is any.
    on_done: Called with each trajectory as it ends.

  Returns:
    Trajectories by set, in the order of the tasks.
  """
  tasks = [task for tasks in sets.values() for task in tasks]
  played = rollout.collect(
    engine,
    chat,
    tasks,
    make_env,
    limits=limits,
    decoding=decoding,
    seed=seed,
    on_done=on_done,
  )
  parts = iter(played)
  return {name: [next(parts) for _ in tasks] for name, tasks in sets.items()}


def play(
  engine: engine_lib.Engine,
  chat: chat_lib.Chat,
  rows: Mapping[str, tuple[Mapping[str, Sequence[types.Task]], rollout.MakeEnv]],
  *,
  limits: rollout.Limits,
  sampling: config_lib.Sampling | None = None,
) -> dict[str, dict[str, list[types.Trajectory]]]:
  """Plays the rows of a table, each under a progress bar.

  Args:
    engine: With the policy's weights.
    chat: Messages to tokens, with the policy's tokenizer.
    rows: Method -> (tasks by set, a new environment for each episode).
    limits: Of each episode.
    sampling: How tokens are chosen; greedy unless said otherwise.

  Returns:
    Method -> set -> trajectories, as `table` takes them.
  """
  played = {}
  for label, (sets, make_env) in rows.items():
    with progress_lib.Progress(sum(map(len, sets.values())), label=label) as progress:
      ended = progress.step_counter()
      env = preflight.make_environment(make_env, limits.reset_seconds)
      if said := preflight.describe_tool_prompt(chat, env):
        progress.print_line(said)
      played[label] = run(
        engine,
        chat,
        sets,
        make_env,
        limits=limits,
        decoding=decoding(sampling, engine, chat, env) if sampling else GREEDY,
        on_done=ended,
      )
      long = [t for ts in played[label].values() for t in ts if not t.turns and t.error]
      if lost := [t for t in long if t.status == 'truncated']:
        progress.print_line(f'{len(lost)} tasks count as unanswered: {lost[0].error}.')
  return played


def decoding(
  config: config_lib.Sampling,
  engine: engine_lib.Engine,
  chat: chat_lib.Chat,
  env: env_lib.Env,
) -> rollout.Decoding:
  """How replies are sampled in an environment, as a configuration says."""
  names = ('temperature', 'top_k', 'top_p', 'min_p')
  sampling = sampling_lib.Sampling(**{name: getattr(config, name) for name in names})
  grammar = calls_of(env, engine, chat) if config.tool_grammar else None
  return rollout.Decoding(sampling, grammar)


def calls_of(
  env: env_lib.Env, engine: engine_lib.Engine, chat: chat_lib.Chat
) -> types.Automaton | None:
  """The grammar of calls of an environment's tools; None if it has no tools."""
  schemas = [tool.schema for tool in getattr(env, 'tools', ())]
  if not schemas:
    return None
  pieces = tokenizer_lib.token_bytes(chat.tokenizer)
  return call_grammar.tool_calls(schemas, pieces, engine.config.vocab_size)


@dataclasses.dataclass(frozen=True)
class Score:
  """A mean over episodes.

  Attributes:
    mean: Of the metric.
    count: Episodes.
  """

  mean: float
  count: int

  @property
  def interval(self) -> tuple[float, float]:
    """95 % Wilson interval; for a metric that is 0 or 1 in each episode."""
    return tables.wilson_interval(round(self.mean * self.count), self.count)


def score(
  trajectories: Sequence[types.Trajectory],
  metric: str = 'em',
  where: Callable[[types.Task], bool] = lambda task: True,
) -> Score:
  """The mean of a metric; an episode that did not get to it, errors included, counts 0.

  Args:
    trajectories: Of one set.
    metric: A key of Trajectory.metrics.
    where: Which tasks to count.
  """
  values = [t.metrics.get(metric, 0.0) for t in trajectories if where(t.task)]
  return Score(float(np.mean(values)) if values else 0.0, len(values))


def table(
  rows: Mapping[str, Mapping[str, Sequence[types.Trajectory]]],
  metric: str = 'em',
  where: Callable[[types.Task], bool] = lambda task: True,
) -> str:
  """The paper's Table 3: a metric of each method on each set, with counts and intervals.

  Args:
    rows: Method -> set -> trajectories.
    metric: 0 or 1 in each episode.
    where: Which tasks to count.
  """
  columns = list(dict.fromkeys(name for sets in rows.values() for name in sets))
  cells = {
    row: {
      name: tables.Count(round(s.mean * s.count), s.count)
      for name, trajectories in sets.items()
      if (s := score(trajectories, metric, where)).count
    }
    for row, sets in rows.items()
  }
  return tables.format_table(cells, columns)


def by_kind(
  trajectories: Sequence[types.Trajectory],
  kinds: Mapping[str, Callable[[types.Task], bool]],
  metric: str = 'em',
) -> dict[str, dict[str, float]]:
  """Mean and count of a metric over all tasks ('all') and over each kind of task."""
  scores = {'all': score(trajectories, metric)}
  scores |= {kind: score(trajectories, metric, where) for kind, where in kinds.items()}
  return {kind: {'mean': s.mean, 'count': s.count} for kind, s in scores.items()}


def summary(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
  """Means to log: reward, tokens, turns, every metric, and the share of each status.

  Those called _FAULTS are always among the metrics: the share of episodes that something
  of a user's was late for, and the calls that were abandoned, of an episode.
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
    **{name: score(trajectories, name).mean for name in names},
    **{
      f'status/{status}': float(np.mean([t.status == status for t in trajectories]))
      for status in types.STATUSES
    },
  }
