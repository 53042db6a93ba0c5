"""Makes the objects of a run before its first step: mesh, model, engine, files.

`start` makes all objects of a training run; scripts that only play a policy use the other
functions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.agent import call_formats, pictures
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.host import preemption, runtime
from agent_r1_jax.models import decoder, quantization, sharding, weights
from agent_r1_jax.rl import algorithms, updates
from agent_r1_jax.rl import train_state as train_state_lib
from agent_r1_jax.train import decoding as decoding_lib
from agent_r1_jax.train import (
  evaluate,
  identity,
  initial_state,
  preflight,
  rollout,
  run_files,
  schedule,
  sizes,
  task_times,
  watch,
)


@dataclasses.dataclass
class Run:
  """A training run that has been set up.

  Attributes:
    config: The run's configuration, with every engine and batch size chosen.
    train_state: The models, optimizer states and counters; replaced at each step.
    update_config: The constants of the updates.
    chat: Encodes messages with the policy's tokenizer.
    engine: The engine, open.
    rollouts: Starts the rollouts of each step and waits for them.
    files: The files of the workdir, and the loop state from which the run resumes.
    signals: Knows whether the process received a signal to end.
    evaluation: How the replies of evaluations are sampled.
    watcher: Shows the run to people.
    evals: Sets of tasks to evaluate, by name.
    make_env: Makes a new environment for each episode.
    privileged: Returns a text on a task that only the critic reads.
  """

  config: config_lib.Config
  train_state: updates.TrainState
  update_config: train_state_lib.UpdateConfig
  chat: chat_lib.Chat
  engine: engine_lib.Engine
  rollouts: schedule.Schedule
  files: run_files.RunFiles
  signals: preemption.Watch
  evaluation: decoding_lib.Decoding
  watcher: watch.Watcher
  evals: Mapping[str, Sequence[types.Task]]
  make_env: rollout.MakeEnv
  privileged: Callable[[types.Task], str] | None


@contextlib.contextmanager
def start(
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
  watcher: watch.Watcher,
) -> Iterator[Run]:
  """Sets up a training run, restored from its newest checkpoint if there is one.

  Inside `with` the workdir is locked and the engine is open. The arguments and the errors
  are those of `loop.run`. As many errors as possible are raised before the workdir is
  made.
  """
  config = sizes.resolve(config, algorithm, workdir)
  mesh = make_mesh(config.mesh)
  model, params, chat = load(config.model, config.chat, mesh, config.model.frozen)
  engine = make_engine(config, model, params, mesh, guides)
  with preflight.open_environment(make_env, config.limits) as env:
    task_times.check(env, {**evals, 'tasks': tasks}, config.limits)
    tasks, lines = preflight.check_prompts(chat, env, tasks, evals, config)
    made_of = identity.describe_run(algorithm, env, tasks, privileged, guides)
    training, evaluation = (
      evaluate.make_decoding(sampling, engine, chat, env)._replace(guides=guides)
      for sampling in (config.sampling, config.evaluation)
    )
  with sharding.use_mesh(mesh):
    reference = initial_state.load_reference(config.model, model, mesh)
    update_config, train_state = initial_state.make(
      config, model, params, algorithm, mesh, reference
    )
  _check_options(algorithm, train_state, privileged, guides)
  with contextlib.ExitStack() as stack:
    # Inside train.run this is the watch that began with it.
    signals = stack.enter_context(preemption.watch())
    files = stack.enter_context(run_files.RunFiles(config, workdir, made_of))
    train_state = _restore(train_state, update_config, engine, files, signals)
    stack.enter_context(watcher.begin(_describe(config, label, files, chat, engine)))
    run = Run(
      config=config,
      train_state=train_state,
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
    del params, reference, train_state
    for line in lines:
      watcher.print_line(line)
    _compile(run, (training, evaluation))
    stack.enter_context(engine.open())
    yield run


def _describe(config, label, files, chat, engine) -> watch.RunInfo:
  """Describes the run to its watcher."""
  step, line = files.loop_state.step, files.next_line
  return watch.RunInfo(config, files.workdir, label, step, line, chat.format, engine)


def _check_options(algorithm, train_state, privileged, guides):
  """Raises ValueError for arguments of a run that do not fit its algorithm."""
  if privileged and 'critic' not in train_state.states:
    raise ValueError('privileged: the algorithm has no critic of its own to tell it to.')
  if any(guide.needs_correction for guide in guides) and not algorithm.correction:
    raise ValueError(
      'guides: one changes the logits, so that tokens come from another distribution '
      'than the one that is trained, and the algorithm has no correction for that '
      '(rl/correction.py).'
    )


def _restore(
  train_state: updates.TrainState,
  update_config: train_state_lib.UpdateConfig,
  engine: engine_lib.Engine,
  files: run_files.RunFiles,
  signals: preemption.Watch,
) -> updates.TrainState:
  """Returns the newest checkpoint's train state, and syncs the engine's weights to it."""
  signals.newest_step = files.find_newest_checkpoint
  signals.raise_if_requested()
  signals.phase = 'restoring'
  train_state = files.restore(train_state, update_config)
  engine.sync_weights(train_state.sampler, train_state.sampler_step)
  engine.interrupted = signals.is_requested
  return train_state


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


def make_mesh(config: config_lib.Mesh) -> Mesh | None:
  """Returns the mesh of the chips that train; None for one chip."""
  runtime.initialize()
  mesh, samplers = initial_state.make_mesh(config)
  if mesh:
    sharding.make_replica_meshes(mesh, samplers)  # Raises if these chips cannot sample.
  return mesh


def load(
  config: config_lib.Model,
  chat: config_lib.Chat,
  mesh: Mesh | None = None,
  frozen: str = 'float32',
) -> tuple[decoder.DecoderConfig, decoder.Params, chat_lib.Chat]:
  """Loads the shape, the float32 parameters and the chat of the model in `config.path`.

  On a mesh the parameters are sharded as they are read. If `frozen` is a format of 8
  bits, they are stored in it as they are read; see quantization.freeze_leaf.
  """
  chat.check()
  runtime.initialize()
  # A run before this one, in the same process, may have left its engine in a cycle.
  runtime.release_freed_memory(cycles=True)
  place, scales = sharding.make_placer(mesh), {}

  def place_frozen(path: str, x: np.ndarray) -> Any:
    leaf, scale = quantization.freeze_leaf(path, place(path, x), config.dtype, frozen)
    if scale is not None:
      scales[path] = scale
    return leaf

  rounds = frozen != 'float32'
  shape, params = weights.load(
    config.path, dtype='float32', place=place_frozen if rounds else place
  )
  if rounds:
    params = quantization.add_scales(params, scales)
    if mesh:  # What programs have made may lie elsewhere.
      params = jax.device_put(params, sharding.make_shardings(params, mesh))
  shape = dataclasses.replace(shape, dtype=config.dtype, remat=config.remat or 'none')
  return (
    shape,
    params,
    chat_lib.Chat(
      tokenizer_lib.load(config.path),
      max_tool_tokens=chat.max_tool_tokens,
      tools_in_prompt=chat.tools_in_prompt,
      tool_format=call_formats.FORMATS.get(chat.tool_format),
      stop_strings=fields.parse_json('chat.stop_strings', chat.stop_strings, list),
      template_kwargs=fields.parse_json('chat.template', chat.template, dict),
      pictures=shape.vision and pictures.load(config.path, shape.vision.token_size),
    ),
  )


def make_engine(
  config: config_lib.Config,
  model: decoder.DecoderConfig,
  params: decoder.Params,
  mesh: Mesh | None = None,
  guides: Iterable[guide_lib.Guide] = (),
  **adapters: int,
) -> engine_lib.Engine:
  """Makes an engine of the sizes in `config.engine` on the chips of this process.

  Its requests may use the guides, which have no parameters. `adapters` and `adapter_rank`
  are those of Engine, which has room for none by default.
  """
  sizes = dataclasses.asdict(config.engine)
  # Here 0 means all rows, and one replica.
  sizes |= {'width': sizes['width'] or None, 'replicas': sizes['replicas'] or 1}
  sizes |= adapters
  return engine_lib.Engine(
    model,
    params,
    guides=dict.fromkeys(guides),
    mesh=mesh,
    chips=sharding.split_devices(config.mesh.samplers)[1],
    **sizes,
  )
