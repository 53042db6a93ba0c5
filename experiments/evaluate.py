r"""Measures a policy on a task by several methods; resumes after a stop.

  agent-r1-jax evaluate --task=miniwiki --workdir=runs/miniwiki
  agent-r1-jax evaluate --task=gsm8k --data=$AGENT_R1_DATA/gsm8k/train.jsonl.gz \
    --config.model.path=DIR --methods=direct,react,tools --n=8 --workdir=runs/gsm8k

The methods are a direct answer, Naive RAG (`rag`), ReAct, tools in the chat template
(`tools`: Base Tool Call or, with a trained model, the trained agent), and for miniwiki a
`workflow`. With --n=1 replies are greedy; with more they are sampled according to
--config.evaluation.<field>, at temperature 1 by default.

With --candidates=8 each reply is sampled eight times, and --critic=DIR chooses one
(docs/reward_models.md); without a critic it is the likeliest.

Prints a table and writes it to WORKDIR/table.md, its numbers to results.json, and all
episodes to episodes.jsonl, which `python -m agent_r1_jax.report.episodes` prints. Each
episode is saved as it ends: the same command plays only the missing ones; another model,
configuration or task is an error. --n may grow from 2 on (--n=1 is greedy, and so another
configuration), and --methods may change.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any

from absl import app, flags
from ml_collections import config_flags
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, playing, report, types
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.guided import choice, implicit_value
from agent_r1_jax.host import processes, runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.report import episodes as episodes_lib
from agent_r1_jax.report import tables
from agent_r1_jax.rollout import evaluate
from agent_r1_jax.train import fingerprint
from experiments import model_formats, react, task_list
from experiments import tables as tables_lib

# Trajectories by method and set; those of a task are adjacent.
Played = Mapping[str, Mapping[str, Sequence[types.Trajectory]]]
# The costs of an episode, by the names of evaluate.summarize.
COSTS = ('tokens', 'action_tokens', 'turns', 'status/error')

_TASK = flags.DEFINE_enum('task', None, [*task_list.TASKS], 'The task.', required=True)
_DATA = flags.DEFINE_string('data', '', 'Its file or folder; miniwiki has none.')
_METHODS = flags.DEFINE_list('methods', [], 'Methods to play; all by default.')
_RETRIEVER = flags.DEFINE_string(
  'retriever', '', 'What nq, triviaqa, popqa and bamboogle search: address or indexes.'
)
_ENCODER = flags.DEFINE_string('encoder', '', 'Directory of the model of dense indexes.')
_N = flags.DEFINE_integer('n', 1, 'Samples of each task.', lower_bound=1)
_LIMIT = flags.DEFINE_integer('limit', 100, 'Most tasks of a set; 0 is all.', 0)
_CRITIC = flags.DEFINE_string('critic', '', 'The critic that chooses among candidates.')
_CANDIDATES = flags.DEFINE_integer('candidates', 1, 'Candidates of each reply.', 1)
_BETA = flags.DEFINE_float('beta', 0.0, 'With it, exp(value / beta) weighs candidates.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/evaluate', 'Where it writes.')
_CFG = fields.define_flags(config_lib.Config())


def main(_):
  runtime.quiet_logging()
  given = config_flags.get_override_values(flags.FLAGS['config'])
  workdir, n = pathlib.Path(_WORKDIR.value), _N.value
  model = given.get('model.path', '')
  searched = (_RETRIEVER.value, _ENCODER.value)
  source = task_list.Source(_DATA.value, model, _LIMIT.value, *searched)
  benchmark = task_list.TASKS[_TASK.value](source)
  # Otherwise the model would continue after its action and invent the observation.
  stops = {'chat.stop_strings': json.dumps(react.FORMAT.stop_strings)}
  config = fields.replace(benchmark.config, stops | given)
  config = model_formats.add(config)
  config = set_temperature(config, given, max(n, _CANDIDATES.value))
  methods = choose_methods(benchmark, _METHODS.value)
  made_of = {'task': _TASK.value, 'limit': source.limit} | benchmark.made_of
  if _CANDIDATES.value > 1:
    made_of |= {
      'candidates': _CANDIDATES.value,
      'critic': _CRITIC.value and fingerprint.model_digest(_CRITIC.value),
      'beta': _BETA.value,
    }
  workdir_lib.check_config(workdir, made_of, name='task.json')
  path = config.model.path
  choose = functools.partial(make_choice, path) if _CANDIDATES.value > 1 else None
  played = playing.play(
    config,
    path,
    methods,
    samples=n,
    workdir=workdir,
    choose=choose,
    watcher=report.Watcher(),
  )
  numbers = summarize(played, benchmark, n)
  if processes.is_first():
    text = format_table(numbers, benchmark, n)
    results = {'task': _TASK.value, 'model': path, 'n': n, 'methods': numbers}
    (workdir / 'table.md').write_text(text + '\n')
    (workdir / 'results.json').write_text(json.dumps(results, indent=2) + '\n')
    write_episodes(workdir / 'episodes.jsonl', played)
    print(f'\n{text}\ntable, numbers and episodes: {workdir}')


def make_choice(policy: str, engine: engine_lib.Engine) -> choice.ReplyChoice:
  """Makes the choice among each reply's candidates that the flags ask for."""
  candidates, beta = _CANDIDATES.value, _BETA.value
  if not _CRITIC.value:
    return choice.ReplyChoice(candidates, choice.mean_logprob, beta)
  implicit = (pathlib.Path(_CRITIC.value) / implicit_value.FILE).exists()
  by_value = functools.partial(choice.by_value, formats=model_formats.find())
  make = choice.by_implicit_value if implicit else by_value
  return make(engine, _CRITIC.value, policy, candidates=candidates, beta=beta)


def set_temperature(
  config: config_lib.Config, given: Mapping[str, Any], n: int
) -> config_lib.Config:
  """Returns the configuration with temperature 1 for n > 1 samples, unless one is given.

  Raises:
    ValueError: Several samples would be greedy.
  """
  if n == 1:
    return config
  if 'evaluation.temperature' not in given:
    return fields.replace(config, {'evaluation.temperature': 1.0})
  if config.evaluation.temperature == 0:
    raise ValueError(
      f'evaluation.temperature is 0, so that all {n} samples or candidates of a task '
      'would be equal; raise it, or ask for one.'
    )
  return config


def choose_methods(benchmark: task_list.Benchmark, names: Sequence[str]):
  """Returns the named methods; all if none is named.

  Raises:
    app.UsageError: The task has no such method.
  """
  if unknown := set(names) - set(benchmark.methods):
    there = ', '.join(benchmark.methods)
    raise app.UsageError(f'--methods: no {", ".join(sorted(unknown))}; give {there}.')
  return {name: benchmark.methods[name] for name in names or benchmark.methods}


def write_episodes(path: pathlib.Path, played: Played) -> None:
  """Writes all episodes to one log; their ids name method, set and task."""
  episodes, groups = [], {}
  for method, sets in played.items():
    for name, trajectories in sets.items():
      for t in trajectories:
        identity = '/'.join(part for part in (method, name, t.task.id) if part)
        group = groups.setdefault((identity, t.group), len(groups))
        task = dataclasses.replace(t.task, id=identity)
        episodes.append(dataclasses.replace(t, task=task, group=group))
  episodes_lib.write(path, episodes, step=0)


def summarize(
  played: Played, benchmark: task_list.Benchmark, n: int
) -> dict[str, dict[str, Any]]:
  """Returns the numbers of each method and set; see tables.estimate."""
  numbers: dict[str, dict[str, Any]] = {}
  for method, sets in played.items():
    for name, episodes in sets.items():
      right = [t.metrics.get(benchmark.score, 0.0) for t in episodes]
      groups = [episodes[i : i + n] for i in range(0, len(episodes), n)]
      answers = benchmark.answers and [
        benchmark.answers([_get_last_reply(t) for t in group]) for group in groups
      ]
      found = tables_lib.estimate(np.reshape(right, (-1, n)), answers)
      costs = evaluate.summarize(episodes)
      rest = {m: costs.get(m, 0.0) for m in (*benchmark.rest, *COSTS)}
      numbers.setdefault(method, {})[name] = {'tasks': len(groups), **found, **rest}
  return numbers


def _get_last_reply(episode: types.Trajectory) -> str:
  """Returns the text that contains the answer."""
  replies = [m['content'] for m in episode.messages if m['role'] == 'assistant']
  return replies[-1] if replies and episode.turns else ''


def format_table(
  numbers: Mapping[str, Mapping[str, Any]], benchmark: task_list.Benchmark, n: int
) -> str:
  """Formats the table: a row for each method and set, with 95 % intervals."""
  rows = {}
  for method, sets in numbers.items():
    for name, found in sets.items():
      mean: Any = f'{found["mean"]:.3f} ± {1.96 * found.get("error", np.nan):.3f}'
      if n == 1:
        if found['mean'] == found['pass@1']:  # All scores are 0 or 1.
          mean = tables.Count(round(found['mean'] * found['tasks']), found['tasks'])
        row = {benchmark.score: mean}
      else:
        row = {f'mean@{n}': mean, f'best@{n}': found['best']}
        row |= {f'majority@{n}': found['majority']} if 'majority' in found else {}
        row |= {key: value for key, value in found.items() if key.startswith('pass@')}
      row |= {key: found[key] for key in benchmark.rest}
      row |= {key.split('/')[-1]: found[key] for key in COSTS}
      rows[f'{method}, {name}' if name else method] = row
  return tables.format_table(rows, next(iter(rows.values())))


if __name__ == '__main__':
  app.run(main)
