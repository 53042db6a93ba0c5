"""Compares a base policy's methods, and a trained policy, on the same tasks.

The scripts problems.py, miniwiki/search.py, wikipedia/search.py and worlds/learn.py
differ in tasks, tools and rewards. games.py and directories.py only train.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import pathlib
import time
from typing import Any

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, playing, report, train, types
from agent_r1_jax.agent import env, tool
from agent_r1_jax.report import tables
from agent_r1_jax.retrieval import documents
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.rollout import rollout
from agent_r1_jax.tasks import qa
from agent_r1_jax.train import fingerprint
from experiments import model_formats
from experiments import react as react_lib

# Tasks by the name of their set.
Sets = Mapping[str, Sequence[types.Task]]
# Plays greedy episodes and returns each method's numbers: `play` with a workdir.
Play = Callable[..., dict[str, Any]]
Method = rollout.Method
Ask = Callable[[types.Task], types.Task]

# The base policy's methods that the tables compare with, and their names there.
LABELS = {'direct': 'Direct answer', 'rag': 'Naive RAG', 'tools': 'Base Tool Call'}


def make_envs(
  search_tool: tool.Tool, reward: env.Reward
) -> tuple[rollout.MakeEnv, rollout.MakeEnv]:
  """Makes the environment with the search tool, and the one without tools."""
  make = lambda tools: env.ToolEnv(tools, reward, metrics=qa.metrics)
  return lambda: make([search_tool]), lambda: make([])


def qa_methods(
  sets: Sets,
  retriever: documents.Retriever,
  search_tool: tool.Tool,
  reward: env.Reward,
  *,
  direct: Ask,
  rag: Callable[..., types.Task],
  agent: Ask,
  react: Ask | None = None,
  rag_k: int = 3,
) -> dict[str, Method]:
  """Makes the methods of answering questions, with a search tool or without.

  Args:
    sets: The tasks.
    retriever: Finds the passages of the method 'rag'.
    search_tool: The tool of the methods 'tools' and 'react'.
    reward: The reward of all episodes.
    direct: Turns a task into a question to a model without tools.
    rag: The same, with passages found for it.
    agent: The same, to an agent with the tool.
    react: The same, in ReAct's form; None puts that form before `agent`'s messages.
    rag_k: How many passages `rag` gets.
  """
  with_tool, alone = make_envs(search_tool, reward)
  react = react or (lambda task: react_lib.ask(agent(task), [search_tool]))
  each = lambda ask: {name: [ask(t) for t in tasks] for name, tasks in sets.items()}
  found = {
    name: with_passages(tasks, retriever, rag, rag_k) for name, tasks in sets.items()
  }
  return {
    'direct': (each(direct), alone),
    'rag': (found, alone),
    'react': (each(react), lambda: react_lib.ReAct([search_tool], reward, qa.metrics)),
    'tools': (each(agent), with_tool),
  }


def with_passages(
  tasks: Sequence[types.Task],
  retriever: documents.Retriever,
  rag_task: Callable[..., types.Task],
  k: int = 3,
) -> list[types.Task]:
  """Adds the k passages found for each question to its prompt."""
  found = retriever.search([task.info['question'] for task in tasks], k)
  return [rag_task(task, hits) for task, hits in zip(tasks, found, strict=True)]


def recall(
  retriever: documents.Retriever, tasks: Sequence[types.Task]
) -> dict[str, float]:
  """Measures how many supporting passages are among the first 5.

  Returns:
    The mean share of a task's supporting_titles ('recall@5') and the share of tasks with
    all of them ('all in 5'); nothing if no task names its passages.
  """
  tasks = [task for task in tasks if task.info.get('supporting_titles')]
  if not tasks:
    return {}
  hits = retriever.search([task.info['question'] for task in tasks], 5)
  shares = []
  for task, five in zip(tasks, hits, strict=True):
    gold = set(task.info['supporting_titles'])
    found = {hit.document.title for hit in five}
    shares.append(len(gold & found) / len(gold))
  complete = np.equal(shares, 1)
  return {'recall@5': float(np.mean(shares)), 'all in 5': float(np.mean(complete))}


def split(tasks: Sequence[types.Task], *sizes: int) -> list[Sequence[types.Task]]:
  """Cuts off parts of the given sizes; the last part is the rest.

  Raises:
    ValueError: The sizes leave nothing.
  """
  if sum(sizes) >= len(tasks):
    raise ValueError(f'sizes {sizes} leave nothing of {len(tasks)} tasks: hold out fewer')
  ends = np.cumsum((0, *sizes)).tolist()
  return [tasks[i:j] for i, j in zip(ends, (*ends[1:], None), strict=True)]


def watch(sets: Sets) -> Sets:
  """Names sets by the split 'dev', so that no curve has the name of a table's set."""
  return {f'{name}-dev': tasks for name, tasks in sets.items()}


def make_grpo(config: config_lib.Config, kl_coef: float) -> algorithms.Algorithm:
  """Makes GRPO, with a correction if an older policy may sample."""
  corrected = losses.token_truncated() if config.schedule.oldest else None
  return algorithms.grpo(kl_coef=kl_coef, correction=corrected)


def train_on_rest(
  config: config_lib.Config,
  workdir: str,
  tasks: Sequence[types.Task],
  make_env: rollout.MakeEnv,
  watched: int,
) -> None:
  """Trains by GRPO on all but the first `watched` tasks, which are evaluated meanwhile.

  Raises:
    ValueError: No task is left to train on.
  """
  if not 0 <= watched < len(tasks):
    raise ValueError(
      f'--watched={watched} must leave some of {len(tasks)} to train on; 0 watches none.'
    )
  train.run(
    model_formats.add(config),
    workdir,
    tasks=tasks[watched:],
    make_env=make_env,
    algorithm=algorithms.grpo(),
    evals={'watched': tasks[:watched]} if watched else {},
    watcher=report.Watcher(),
  )


def run(
  config: config_lib.Config,
  workdir: pathlib.Path,
  play: Play,
  methods: Mapping[str, Method],
  *,
  tasks: Sequence[types.Task],
  evals: Sets,
  algorithm: algorithms.Algorithm,
  label: str,
  name: str = 'GRPO',
  labels: Mapping[str, str] = LABELS,
  also: Sequence[str] = (),
) -> tuple[dict[str, Any], dict[str, float]]:
  """Plays the baselines, trains, and plays the trained policy.

  Args:
    config: Configuration of the run; `model.path` is the base policy.
    workdir: Directory of the run.
    play: Plays (config, model, methods) and returns each method's numbers.
    methods: The held-out tasks in each method's form; 'tools' is trained.
    tasks: Tasks to train on.
    evals: Tasks to evaluate during training.
    algorithm: The training algorithm.
    label: Name of the training in its progress lines.
    name: Name of the trained policy in the tables.
    labels: The baselines' names in the tables, by their keys in `methods`.
    also: Keys of further methods for the trained policy, besides 'tools'.

  Returns:
    The numbers of each method, and the seconds of the three parts.
  """
  clock, config = [time.time()], model_formats.add(config)
  baselines = {label: methods[key] for key, label in labels.items() if key in methods}
  # Before anything is played: two runs would write to the same files, and only the
  # training would reject a workdir of another configuration.
  with playing.reserve(config, workdir, algorithm):
    numbers = play(config, config.model.path, baselines)
  clock.append(time.time())
  train.run(
    config,
    str(workdir),
    tasks=tasks,
    make_env=methods['tools'][1],
    algorithm=algorithm,
    evals=evals,
    label=label,
    watcher=report.Watcher(),
  )
  clock.append(time.time())
  with playing.reserve(config, workdir, algorithm):
    trained = {f'{name}, {labels[key].lower()}': methods[key] for key in also}
    trained[name] = methods['tools']
    numbers |= play(config, workdir / 'model', trained)
  clock.append(time.time())
  parts = ('baselines', 'training', 'trained agent')
  seconds = [end - start for start, end in zip(clock, clock[1:], strict=False)]
  return numbers, dict(zip(parts, seconds, strict=True))


def play(
  config: config_lib.Config,
  model: str | os.PathLike,
  methods: Mapping[str, Method],
  *,
  workdir: pathlib.Path,
  summarize: Callable[[Mapping[str, Sequence[types.Trajectory]]], Any],
  made_of: Any = None,
) -> dict[str, Any]:
  """Plays the methods with a policy; reads episodes that were already played.

  Each policy, configuration and list of tasks has its folder in WORKDIR/episodes, so that
  a resumed run with a new policy does not mix with the old one.

  Args:
    config: The configuration of engine and episodes.
    model: The policy's directory.
    methods: The tasks and the environment of each method, by name.
    workdir: Directory of the run.
    summarize: Maps trajectories by set to the method's numbers.
    made_of: What else the episodes depend on, such as the corpus.

  Returns:
    The numbers of each method.
  """
  config = fields.replace(config, {'model.path': str(model)})
  # A resumed run may change fields that do not affect episodes.
  default = config_lib.Config()
  unused = {name: fields.get(default, name) for name in config_lib.MAY_CHANGE}
  tasks = {name: fingerprint.tasks_digest(sets) for name, (sets, _) in methods.items()}
  shared = dataclasses.asdict(fields.replace(config, unused))
  depends_on = [shared, fingerprint.model_digest(model), tasks, made_of]
  folder = workdir / 'episodes' / fingerprint.digest(depends_on)
  played = playing.play(config, model, methods, workdir=folder, watcher=report.Watcher())
  return {name: summarize(sets) for name, sets in played.items()}


def count(cell: Mapping[str, Any]) -> tables.Count:
  """Returns the number of right answers of a cell with exact match's mean and count."""
  return tables.Count(round(cell['mean'] * cell['count']), cell['count'])
