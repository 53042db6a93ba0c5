"""Opens a planned run: locks its workdir, restores it, and compiles the engine."""

from collections.abc import Iterator
import contextlib
import dataclasses

from agent_r1_jax.engine import protocol
from agent_r1_jax.host import memory, preemption
from agent_r1_jax.rl import train_state as train_state_lib
from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import run_files, schedule
from agent_r1_jax.train.plan import plan as plan_lib


@dataclasses.dataclass
class OpenRun:
  """An open training run.

  Attributes:
    plan: The plan of the run.
    train_state: The policy, the critic and the reference after the last update.
    engine: The open engine.
    rollouts: Starts the rollouts of each step.
    files: The files of the workdir, and the loop state from which the run resumes.
    signals: Knows whether the process received a signal to end.
    watcher: The observer of the run.
    samplers: Play the rollouts' episodes elsewhere; None if the engine plays them.
  """

  plan: plan_lib.Plan
  train_state: train_state_lib.TrainState
  engine: protocol.AnyEngine
  rollouts: schedule.Rollouts
  files: run_files.RunFiles
  signals: preemption.Watch
  watcher: sockets.Watcher
  samplers: sockets.Samplers | None


@contextlib.contextmanager
def open_run(
  plan: plan_lib.Plan,
  state: train_state_lib.TrainState,
  engine: protocol.AnyEngine,
  workdir: str,
  *,
  label: str,
  watcher: sockets.Watcher,
  samplers: sockets.Samplers | None = None,
) -> Iterator[OpenRun]:
  """Opens a training run, restored from its newest checkpoint if there is one.

  Inside `with` the workdir is locked and the engine is open. plan.make returns the first
  three arguments. The caller must not keep `state`: the run frees its arrays as it makes
  new ones. The other arguments, and the errors, are those of `loop.run`.
  """
  with contextlib.ExitStack() as stack:
    # Inside train.run this returns the watch that train.run began.
    signals = stack.enter_context(preemption.watch())
    files = run_files.RunFiles(plan, workdir)
    stack.enter_context(files)
    run = OpenRun(
      plan=plan,
      train_state=_restore(state, engine, files, signals),
      engine=engine,
      rollouts=schedule.Rollouts(plan, engine, files, watcher, samplers),
      files=files,
      signals=signals,
      watcher=watcher,
      samplers=samplers,
    )
    # This generator's locals live as long as the run and would keep old arrays alive.
    del state
    stack.enter_context(watcher.begin(_describe(run, label)))
    for line in plan.lines:
      watcher.print_line(line)
    if samplers:
      stack.enter_context(samplers.open(_describe_job(plan)))
      # The samplers load and compile at the same time as this process.
      samplers.sync_weights(run.train_state.sampler, run.train_state.sampler_step)
    _compile(run)
    stack.enter_context(engine.open())
    yield run


def _describe(run: OpenRun, label: str) -> sockets.RunInfo:
  """Describes the run to its watcher."""
  return sockets.RunInfo(
    config=run.plan.config,
    workdir=run.files.workdir,
    label=label,
    step=run.files.loop_state.step,
    next_line=run.files.next_line,
    call_format=run.plan.chat.format,
    engine=run.engine,
  )


def _describe_job(plan: plan_lib.Plan) -> sockets.Job:
  """Describes the run's episodes to samplers elsewhere."""
  return sockets.Job(
    config=plan.config,
    model=plan.update_config.model,
    chat=plan.chat,
    make_env=plan.make_env,
    decoding=plan.training,
    made_of=plan.made_of,
    corrected=plan.update_config.algorithm.correction is not None,
  )


def _restore(
  state: train_state_lib.TrainState,
  engine: protocol.AnyEngine,
  files: run_files.RunFiles,
  signals: preemption.Watch,
) -> train_state_lib.TrainState:
  """Returns the newest checkpoint's train state, and syncs the engine to it."""
  signals.newest_step = files.find_newest_checkpoint
  signals.raise_if_requested()
  signals.phase = 'restoring'
  state = files.restore(state)
  engine.sync_weights(state.sampler, state.sampler_step)
  engine.interrupted = signals.is_requested
  return state


def _compile(run: OpenRun):
  """Compiles the engine's programs, and shows the progress."""
  run.signals.phase = 'compilation'
  plan = run.plan
  automata = [plan.chat.stop_automaton(run.engine.config.vocab_size)]
  automata += [d.grammar for d in (plan.training, plan.evaluation) if d.grammar]

  def report(done: int, programs: int):
    run.watcher.set_phase('compile', done, programs)
    run.signals.raise_if_requested()

  run.engine.warm_up(report, automata)
  memory.release_freed_memory()
