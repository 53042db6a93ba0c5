"""Makes the objects of a training run before its first step, and opens its workdir."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.host import preemption, runtime
from agent_r1_jax.rl import algorithms
from agent_r1_jax.rl import train_state as train_state_lib
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import evaluate, rollout, sockets
from agent_r1_jax.train import fingerprint, preflight, run_files, schedule, task_checks
from agent_r1_jax.train.plan import setup, sizes


@dataclasses.dataclass
class Run:
  """A training run that has been set up; loop.run says what its arguments are.

  Attributes:
    config: The run's configuration, with every engine and batch size chosen.
    train_state: The models, optimizer states and counters; replaced at each step.
    engine: The engine, open.
    files: The files of the workdir, and the loop state from which the run resumes.
    signals: Knows whether the process received a signal to end.
    evaluation: How the replies of evaluations are sampled.
  """

  config: config_lib.Config
  train_state: train_state_lib.TrainState
  update_config: train_state_lib.UpdateConfig
  chat: chat_lib.Chat
  engine: engine_lib.Engine
  rollouts: schedule.Schedule
  files: run_files.RunFiles
  signals: preemption.Watch
  evaluation: decoding_lib.Decoding
  watcher: sockets.Watcher
  evals: Mapping[str, Sequence[types.Task]]
  make_env: rollout.MakeEnv
  privileged: Callable[[types.Task], str] | None


@contextlib.contextmanager
def open_run(
  config: config_lib.Config,
  workdir: str,
  *,
  tasks: Sequence[types.Task],
  make_env: rollout.MakeEnv,
  algorithm: algorithms.Algorithm,
  evals: Mapping[str, Sequence[types.Task]],
  privileged: Callable[[types.Task], str] | None,
  guides: Mapping[guide_lib.Guide, Any],
  label: str,
  watcher: sockets.Watcher,
) -> Iterator[Run]:
  """Sets up a training run, restored from its newest checkpoint if there is one.

  Inside `with` the workdir is locked and the engine is open. The arguments and the errors
  are those of `loop.run`. As many errors as possible are raised before the workdir is
  made.
  """
  with preflight.open_environment(make_env, config.limits) as env:
    sets = {**evals, 'tasks': tasks}
    task_checks.check_times(env, sets, config.limits)
    task_checks.check_answers(env, tasks, config.limits)
    made_of = fingerprint.describe_run(algorithm, env, tasks, privileged, guides)
    fingerprint.check_hosts(config, made_of, sets)
    config = sizes.resolve(config, algorithm, workdir)
    mesh = setup.make_mesh(config.mesh)
    model, params, chat = setup.load(config.model, config.chat, mesh, config.model.frozen)
    engine = setup.make_engine(config, model, params, mesh, guides)
    tasks, lines = preflight.check_prompts(chat, env, tasks, evals, config)
    training, evaluation = (
      evaluate.make_decoding(sampling, engine, chat, env)._replace(guides=guides)
      for sampling in (config.sampling, config.evaluation)
    )
  update_config, state = setup.load_state(config, model, params, algorithm, mesh)
  _check_options(algorithm, state, privileged, guides)
  with contextlib.ExitStack() as stack:
    # Inside train.run this is the watch that began with it.
    signals = stack.enter_context(preemption.watch())
    files = stack.enter_context(run_files.RunFiles(config, workdir, made_of))
    run = Run(
      config=config,
      train_state=_restore(state, update_config, engine, files, signals),
      update_config=update_config,
      chat=chat,
      engine=engine,
      rollouts=schedule.Schedule(
        config, tasks, engine, chat, files, watcher, training, make_env
      ),
      files=files,
      signals=signals,
      evaluation=evaluation,
      watcher=watcher,
      evals=evals,
      make_env=make_env,
      privileged=privileged,
    )
    # This generator's locals live as long as the run: they would keep old arrays alive.
    del params, state
    stack.enter_context(watcher.begin(_describe(run, label)))
    for line in lines:
      watcher.print_line(line)
    _compile(run, (training, evaluation))
    stack.enter_context(engine.open())
    yield run


def _describe(run: Run, label: str) -> sockets.RunInfo:
  """Describes the run to its watcher."""
  files, call_format = run.files, run.chat.format
  step, line = files.loop_state.step, files.next_line
  return sockets.RunInfo(
    run.config, files.workdir, label, step, line, call_format, run.engine
  )


def _check_options(algorithm, state: train_state_lib.TrainState, privileged, guides):
  """Raises ValueError for arguments of a run that do not fit its algorithm."""
  if privileged and 'critic' not in state.states:
    raise ValueError('privileged: the algorithm has no critic of its own to tell it to.')
  if any(guide.needs_correction for guide in guides) and not algorithm.correction:
    raise ValueError(
      'guides: one changes the logits, so that tokens come from another distribution '
      'than the one that is trained, and the algorithm has no correction for that '
      '(rl/correction.py).'
    )


def _restore(
  state: train_state_lib.TrainState,
  update_config: train_state_lib.UpdateConfig,
  engine: engine_lib.Engine,
  files: run_files.RunFiles,
  signals: preemption.Watch,
) -> train_state_lib.TrainState:
  """Returns the newest checkpoint's train state, and syncs the engine's weights to it."""
  signals.newest_step = files.find_newest_checkpoint
  signals.raise_if_requested()
  signals.phase = 'restoring'
  state = files.restore(state, update_config)
  engine.sync_weights(state.sampler, state.sampler_step)
  engine.interrupted = signals.is_requested
  return state


def _compile(run: Run, decodings: Sequence[decoding_lib.Decoding]):
  """Compiles the engine's programs, and shows the progress."""
  run.signals.phase = 'compilation'
  automata = [run.chat.stop_automaton(run.engine.config.vocab_size)]
  automata += [decoding.grammar for decoding in decodings if decoding.grammar]

  def report(done: int, programs: int):
    run.watcher.set_phase('compile', done, programs)
    run.signals.raise_if_requested()

  run.engine.warm_up(report, automata)
  runtime.release_freed_memory()
