"""The plan of a training run, made once from its configuration.

`make` checks tasks and tools with an environment, chooses the sizes (sizes.py), loads the
model (setup.py) and makes the first train state (first_state.py).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
from typing import Any, NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.rl import algorithms
from agent_r1_jax.rl import train_state as train_state_lib
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import evaluate, rollout
from agent_r1_jax.train import fingerprint, preflight, task_checks
from agent_r1_jax.train.plan import first_state, setup, sizes


class Plan(NamedTuple):
  """The constants of a training run, read by the loop, the schedule and the files.

  Attributes:
    config: The configuration with all sizes, as the run's files and watcher record it.
    made_of: Describes the algorithm, tools, rewards and tasks; see fingerprint.py.
    tasks: The tasks to train on, whose prompts fit.
    evals: The sets of tasks to evaluate, by name.
    make_env: Makes a new environment for each episode.
    privileged: Returns text about a task that only the critic reads; or None.
    lines: Lines to print about tasks, prompts and tools.
    chat: Turns messages into tokens.
    training: How replies are sampled in training rollouts.
    evaluation: How replies are sampled in evaluations.
    update_config: The constants of the updates: models, algorithm, optimizers, schedule.
    limits: The budgets of one episode.
    curriculum: How tasks are drawn.
    seed: The seed of the order of tasks and of all sampling.
    max_error_rate: The largest share of episodes whose environment may raise or be late.
    refuses_long_prompts: Whether the run ends if no prompt of its first rollout fits.
    log_episodes: How many episodes per rollout keep messages in all processes.
  """

  config: config_lib.Config
  made_of: Mapping[str, Any]
  tasks: Sequence[types.Task]
  evals: Mapping[str, Sequence[types.Task]]
  make_env: rollout.MakeEnv
  privileged: Callable[[types.Task], str] | None
  lines: Sequence[str]
  chat: chat_lib.Chat
  training: decoding_lib.Decoding
  evaluation: decoding_lib.Decoding
  update_config: train_state_lib.UpdateConfig
  limits: config_lib.Limits
  curriculum: config_lib.Curriculum
  seed: int
  max_error_rate: float
  refuses_long_prompts: bool
  log_episodes: int

  @property
  def schedule(self) -> config_lib.Schedule:
    """The number of episodes and updates, and their order."""
    return self.update_config.schedule


def make(
  config: config_lib.Config,
  workdir: str | os.PathLike,
  *,
  tasks: Sequence[types.Task],
  make_env: rollout.MakeEnv,
  algorithm: algorithms.Algorithm,
  evals: Mapping[str, Sequence[types.Task]],
  privileged: Callable[[types.Task], str] | None,
  guides: Mapping[guide_lib.Guide, Any],
  make_engine: setup.MakeEngine,
) -> tuple[Plan, train_state_lib.TrainState, protocol.AnyEngine]:
  """Plans a run; the arguments and the errors are those of `loop.run`.

  Checks the tasks with an environment, chooses the sizes and loads the models. It raises
  as many errors as possible, before anything is written to the workdir.

  Returns:
    The plan, the train state before the first step, and the engine, not yet open.
  """
  limits = config.limits
  with preflight.open_environment(make_env, limits) as env:
    sets = {**evals, 'tasks': tasks}
    task_checks.check_times(env, sets, limits)
    task_checks.check_answers(env, tasks, limits)
    made_of = fingerprint.describe_run(algorithm, env, tasks, privileged, guides)
    fingerprint.check_hosts(made_of | {'config': dataclasses.asdict(config)}, sets)
    config = sizes.resolve(config, algorithm, workdir)
    mesh = setup.make_mesh(config.mesh)
    model, params, chat = setup.load(config.model, config.chat, mesh, config.model.frozen)
    engine = make_engine(config, model, params, mesh, guides)
    _check_engine(engine, algorithm)
    tasks, lines = preflight.check_prompts(chat, env, tasks, evals, config)
    training, evaluation = (
      evaluate.make_decoding(sampling, engine, chat, env)._replace(guides=guides)
      for sampling in (config.sampling, config.evaluation)
    )
  update_config, state = first_state.load(config, model, params, algorithm, mesh)
  _check_options(algorithm, state, privileged, guides)
  plan = Plan(
    config=config,
    made_of=made_of,
    tasks=tasks,
    evals=evals,
    make_env=make_env,
    privileged=privileged,
    lines=lines,
    chat=chat,
    training=training._replace(replay=config.batch.replay),
    evaluation=evaluation,
    update_config=update_config,
    limits=limits,
    curriculum=config.curriculum,
    seed=config.seed,
    max_error_rate=config.max_error_rate,
    refuses_long_prompts=config.chat.long_prompts == 'refuse',
    log_episodes=config.log_episodes,
  )
  return plan, state, engine


def _check_engine(engine: protocol.AnyEngine, algorithm: algorithms.Algorithm):
  """Raises ValueError for a foreign engine if the algorithm has no correction."""
  if not isinstance(engine, engine_lib.Engine) and not algorithm.correction:
    raise ValueError(
      'make_engine: the log-probs of another engine differ from those of the learner, '
      'and the algorithm has no correction for that; give it one, such as '
      'algorithms.grpo()._replace(correction=losses.token_truncated()).'
    )


def _check_options(
  algorithm: algorithms.Algorithm,
  state: train_state_lib.TrainState,
  privileged: Callable | None,
  guides: Mapping[guide_lib.Guide, Any],
):
  """Raises ValueError for arguments that do not fit the algorithm."""
  if privileged and 'critic' not in state.states:
    raise ValueError('privileged: the algorithm has no critic of its own to tell it to.')
  if any(guide.needs_correction for guide in guides) and not algorithm.correction:
    raise ValueError(
      'guides: one changes the logits, so that tokens come from another distribution '
      'than the one that is trained, and the algorithm has no correction for that '
      '(rl/losses.py).'
    )
