"""Plays a policy from a directory, and locks a run's workdir meanwhile."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import os
import pathlib
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import guide, protocol
from agent_r1_jax.host import memory, preemption, processes, runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.rl import algorithms
from agent_r1_jax.rollout import evaluate, rollout, sockets
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.train import fingerprint, preflight, run_files, task_checks
from agent_r1_jax.train.plan import setup, sizes

_GREEDY = (
  'evaluation.temperature is 0: the {} samples of a task differ only where its '
  'environment is random.'
)


@contextlib.contextmanager
def reserve(
  config: config_lib.Config, workdir: str | os.PathLike, algorithm: algorithms.Algorithm
) -> Iterator[None]:
  """Locks a run's workdir inside `with`, and rejects settings that `run` would reject.

  For scripts that play episodes before or after calling `run`: with a wrong setting, or
  if another run has the workdir, they raise before anything is played.

  Raises:
    ValueError: The configuration does not fit the workdir, the algorithm or the device's
      memory; or another run holds the workdir.
  """
  preflight.check_config(config, algorithm)
  # The lock asks JAX for this process's index, which starts JAX's threads: malloc must be
  # configured before.
  runtime.initialize()
  made_of = {'algorithm': fingerprint.describe(algorithm)}
  fingerprint.check_hosts(made_of | {'config': dataclasses.asdict(config)}, {})
  with run_files.lock(workdir):
    resolved = sizes.resolve(config, algorithm, workdir)
    run_files.check_config(dataclasses.asdict(resolved), workdir)
    yield


@preemption.watch()
@processes.exit_together()
def play(
  config: config_lib.Config,
  model: str | os.PathLike,
  methods: Mapping[str, rollout.Method],
  *,
  samples: int = 1,
  workdir: str | os.PathLike | None = None,
  choose: Callable[[engine_lib.Engine], sockets.Choice] | None = None,
  guides: Mapping[guide.Guide, guide.State] | None = None,
  watcher: sockets.Watcher = sockets.PLAIN,
) -> dict[str, dict[str, list[types.Trajectory]]]:
  """Plays one or several methods' tasks with the policy in a directory.

  An episode's randomness depends only on (config.seed, task id, sample).

  `model`, a directory in HF layout, replaces the configuration's model.path. Each episode
  is written to `workdir` as it ends; a repeated call, even with more samples or methods,
  plays only the missing episodes. `choose` makes, for the engine, the choice among
  several candidates of each reply; `guides` are as in train.run.

  Returns:
    Trajectories by method and set; those of one task are adjacent.

  Raises:
    ValueError: The workdir is in use, or has episodes of another configuration, model,
      task, environment or tool; the message lists the differences.
  """
  runtime.quiet_logging()
  runtime.initialize()  # From here on, an error ends the other processes too.
  config.check()
  config = fields.replace(config, {'model.path': str(model)})
  folder = None if workdir is None else pathlib.Path(workdir)
  made_of = {}
  if folder or processes.is_distributed():
    made_of = _describe(config, methods, guides or {})
  config = sizes.resolve(config, None, workdir)
  with contextlib.ExitStack() as stack:
    if folder:
      stack.enter_context(run_files.lock(folder))
      _check_same(config, folder, made_of)
    mesh = setup.make_mesh(config.mesh)
    shape, params, chat = setup.load(config.model, config.chat, mesh)
    used = [*(guides or {}), *([guide.FORCED] if choose else [])]
    engine = setup.make_engine(config, shape, params, mesh, used)
    # The same watch that began with `play`.
    signals = stack.enter_context(preemption.watch())
    signals.phase, engine.interrupted = 'an evaluation', signals.is_requested
    if samples > 1 and config.evaluation.temperature == 0:
      watcher.print_line(_GREEDY.format(samples))
    options = {'limits': config.limits, 'samples': samples, 'seed': config.seed}
    added = {'choice': choose and choose(engine), 'guides': guides or {}}
    played = {}
    try:
      for label, (sets, make_env) in methods.items():
        total = samples * sum(map(len, sets.values()))
        with watcher.count_episodes(label, total) as ended:
          with preflight.open_environment(make_env, config.limits) as env:
            task_checks.check_times(
              env, {n or 'tasks': s for n, s in sets.items()}, config.limits
            )
            if line := preflight.describe_tool_prompt(chat, env):
              watcher.print_line(line)
            way = evaluate.make_decoding(config.evaluation, engine, chat, env)
          options |= {'decoding': way._replace(**added), 'on_done': ended}
          options['store'] = folder and store_lib.EpisodeStore(folder / label)
          played[label] = evaluate.run(engine, chat, sets, make_env, **options)
          _report_too_long(played[label], watcher)
        memory.release_freed_memory()
      return played
    except protocol.PreemptedError:
      raise signals.end_unsaved() from None


def _report_too_long(
  played: Mapping[str, list[types.Trajectory]], watcher: sockets.Watcher
) -> None:
  """Prints how many episodes have no turn because their prompt left no room for one."""
  trajectories = [t for ts in played.values() for t in ts]
  if too_long := [t for t in trajectories if t.metrics.get('prompt_too_long')]:
    text = f'{len(too_long)} tasks count as unanswered: {too_long[0].error}.'
    watcher.print_line(text)


def _describe(config: config_lib.Config, methods, guides) -> dict[str, dict[str, Any]]:
  """Describes each method; raises ValueError if the processes' methods differ."""
  made_of = {}
  for method, (sets, make_env) in methods.items():
    tasks = [task for tasks in sets.values() for task in tasks]
    with preflight.open_environment(make_env, config.limits) as env:
      made_of[method] = fingerprint.describe_run(None, env, tasks, guides=guides)
    made_of[method]['sets'] = fingerprint.tasks_digest(sets)
  fingerprint.check_hosts(made_of | {'config': dataclasses.asdict(config)}, {})
  return made_of


def _check_same(
  config: config_lib.Config, workdir: pathlib.Path, made_of: dict[str, dict[str, Any]]
) -> None:
  """Raises ValueError if the workdir has episodes of another configuration or method."""
  run_files.check_config(dataclasses.asdict(config), workdir, write=True)
  model = fingerprint.model_digest(config.model.path)
  for method, parts in made_of.items():
    workdir_lib.check_config(
      workdir / method,
      parts | {'model': model},
      name='made_of.json',
      remedy=f'Give another workdir, or delete {workdir / method} to play all again',
    )
