"""Checks the arguments of a run before anything is compiled."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import importlib.util
import logging
import threading
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.host import thread_pool, workers
from agent_r1_jax.models import four_bits, lora
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import fingerprint

_LOGGER = logging.getLogger(__name__)
# An upper bound of the tokens that a chat template adds to a message. If a template adds
# more, prompts that are too long are found only in the rollout.
_TEMPLATE_TOKENS = 64


def check_config(config: config_lib.Config, algorithm: algorithms.Algorithm) -> None:
  """Raises ValueError for settings that have no effect, or fail only after a rollout.

  Raises:
    ValueError: The message names the field and the remedy.
  """
  config.check()
  model, schedule, batch = config.model, config.schedule, config.batch
  if not isinstance(algorithm, algorithms.Algorithm):
    raise ValueError(
      f'algorithm is {algorithm!r:.100}; it must be an algorithms.Algorithm, such as '
      'algorithms.grpo() gives.'
    )
  if model.lora_rank:
    lora.check_targets(model.adapter_targets)
    if config.optimizer.kind == 'muon':
      raise ValueError(
        "optimizer.kind is 'muon', which updates kernels of layers, and with "
        "model.lora_rank only adapters are learned; take 'adamw'."
      )
  _check_numbers(config)
  fields.check_takes('algorithm.loss', algorithm.loss, 'stats', 'batch')
  fields.check_takes('algorithm.advantages', algorithm.advantages, 'table')
  if 0 < batch.row_tokens < config.engine.slots:
    raise ValueError(
      f'batch.row_tokens is {batch.row_tokens}, less than engine.slots '
      f'({config.engine.slots}): a long text would not fit a training row. Raise it, or '
      'leave it 0.'
    )
  _check_reference(config, algorithm)
  _check_sinks(config)
  times = {'epochs': schedule.epochs, 'minibatches': schedule.minibatches}
  algorithms.check(algorithm, schedule.samples, **times)
  if config.sampling.temperature == 0:
    raise ValueError(
      'sampling.temperature is 0: a policy is trained on samples of its own '
      'distribution, so it must be above 0.'
    )
  if not config.sampling.on_policy and not algorithm.correction:
    raise ValueError(
      'sampling: top_k, top_p, min_p and tool_grammar take tokens from another '
      'distribution than the one that is trained, and the algorithm has no correction '
      'for that (rl/losses.py); set them in evaluation only.'
    )
  _check_staleness(schedule, algorithm)
  if schedule.ahead and config.mesh.tensor > 1 and not config.mesh.samplers:
    raise ValueError(
      'schedule.ahead: the chips of a replica (mesh.tensor) cannot sample and train at '
      'the same time; give some of them to sampling alone (mesh.samplers).'
    )


def _check_sinks(config: config_lib.Config):
  """Raises ValueError for sinks that are not installed, or not sinks."""
  for name in config.sink_names:
    # TensorBoard's files need no extra package.
    if name != 'tensorboard' and importlib.util.find_spec(name) is None:
      raise ValueError(
        f"sinks: {name} is not installed; pip install 'agent_r1_jax[{name}]', or leave "
        'it out.'
      )
  for name in config.sink_modules:
    try:
      _ = importlib.import_module(name).Sink
    except (ImportError, AttributeError) as error:
      raise ValueError(
        f'sinks: {name} is no module with a class Sink ({error}); install what it '
        'needs, correct its name, or leave it out.'
      ) from error


def _check_reference(config: config_lib.Config, algorithm: algorithms.Algorithm):
  """Raises ValueError for a reference policy that is missing or unused."""
  model, schedule = config.model, config.schedule
  for name in ('model.reference', 'schedule.reference_every'):
    if fields.get(config, name) and not algorithm.needs_reference:
      raise ValueError(f'{name}: the algorithm reads no reference policy; leave it out.')
  if algorithm.reads_reference and not model.reference:
    raise ValueError(
      'model.reference: the algorithm learns from a teacher; give its directory.'
    )
  if schedule.reference_every and algorithm.reads_reference:
    raise ValueError('schedule.reference_every: a teacher stays as it is; make it 0.')
  if schedule.reference_every and model.reference and model.lora_rank:
    raise ValueError(
      'schedule.reference_every: with adapters it needs model.reference to be empty.'
    )


def _check_numbers(config: config_lib.Config):
  """Raises ValueError for frozen kernels that conflict with another setting."""
  frozen, unpacks = config.model.frozen, config.engine.weights == four_bits.UNPACKED
  if unpacks and frozen != four_bits.FORMAT:
    raise ValueError(
      f'engine.weights is {four_bits.UNPACKED!r}, but model.frozen is {frozen!r}: only '
      f"experts of 4 bits ({four_bits.FORMAT!r}) are unpacked; leave it 'model'."
    )
  if frozen == 'float32':
    return
  if not config.model.lora_rank:
    raise ValueError(
      f'model.frozen is {frozen!r}, but without model.lora_rank no kernel is frozen.'
    )
  if config.engine.rounds_weights:
    raise ValueError(
      f'engine.weights: with model.frozen={frozen!r} the engine samples with these '
      "kernels anyway; leave it 'model'."
    )


def correct_rounding(
  config: config_lib.Config, algorithm: algorithms.Algorithm
) -> algorithms.Algorithm:
  """Adds token_truncated() if the engine rounds and the algorithm has no correction."""
  known = isinstance(algorithm, algorithms.Algorithm)
  if not known or algorithm.correction or not config.engine.rounds:
    return algorithm
  return algorithm._replace(correction=losses.token_truncated())


def _check_staleness(schedule: config_lib.Schedule, algorithm: algorithms.Algorithm):
  """Raises ValueError if an algorithm cannot learn from episodes of older policies."""
  for name, least in (('sync_every', 2), ('ahead', 1)):
    if getattr(schedule, name) >= least and not algorithm.correction:
      raise ValueError(
        f'schedule.{name} is {getattr(schedule, name)}: episodes are of an older policy, '
        'and the algorithm has no correction for that (rl/losses.py).'
      )
  if schedule.ahead and (schedule.max_refills or algorithm.greedy_baseline):
    raise ValueError(
      f'schedule.ahead is {schedule.ahead}: schedule.max_refills, and algorithms with a '
      'greedy baseline, play more episodes once a rollout has ended; make ahead 0.'
    )


@contextlib.contextmanager
def open_environment(
  make_env: Callable[[], Any], limits: config_lib.Limits
) -> Iterator[Any]:
  """Makes an environment to inspect before any episode; closes it at the end.

  An environment that is made too late is closed once it exists. Errors of `make_env` are
  raised; a `close` that fails or takes too long is logged.

  Raises:
    ValueError: `make_env` is not a function, or took longer than limits.reset_seconds.
  """
  if not callable(make_env):
    raise ValueError(
      f'make_env is {make_env!r:.100}; it must be a function that gives a new '
      'environment for each episode: make_env=lambda: env.ToolEnv(...).'
    )
  fields.check_takes('make_env', make_env)
  made, over = [], threading.Event()

  def close():
    asyncio.run(env_lib.close_env(made, limits.close_seconds, 'make_env'))

  def make():
    made.append(make_env())
    if over.is_set():
      close()

  try:
    call = thread_pool.POOL.submit(make)
    try:
      call.result(min(limits.reset_seconds, threading.TIMEOUT_MAX))
    except TimeoutError:
      if not call.cancel():
        raise  # The error is make_env's own.
      raise ValueError(
        f'make_env gave no environment within {limits.reset_seconds:g} seconds '
        '(limits.reset_seconds).'
      ) from None
    env = made[0]
    playable = hasattr(env, 'reset') and hasattr(env, 'step')
    if not (playable or isinstance(env, sockets.Player)):
      raise ValueError(
        f'make_env gave {env!r:.100}; it must give an environment, with reset and step, '
        'or a serve/program.py Program.'
      )
    yield env
  finally:
    over.set()
    # In a thread, because this one may have an event loop, as in a notebook. The bound
    # includes the wait for a thread.
    bound = min(limits.close_seconds + workers.BLOCKED_SECONDS, threading.TIMEOUT_MAX)
    try:
      thread_pool.POOL.submit(close).result(bound)
    except Exception as error:
      _LOGGER.warning('make_env: close failed: %s', workers.describe_error(error))


def describe_tool_prompt(chat: chat_lib.Chat, env: env_lib.Env) -> str | None:
  """Returns a line on how prompts render tools and answers; None if as the template does.

  Raises:
    ValueError: The template describes no tools, and tools_in_prompt is 'refuse'; or the
      template does not render tools' answers.
  """
  schemas = _schemas(env)
  names = ', '.join(schema['function']['name'] for schema in schemas)
  if not schemas:
    return None
  opening = [{'role': 'user', 'content': 'x'}]
  chat.encode_prompt(opening, schemas)  # Raises if tools_in_prompt is 'refuse'.
  answer = {'role': 'tool', 'content': 'qz7'}
  ids = chat.encode_delta([answer, answer], history=opening, tools=schemas)
  if chat.decode_exactly(ids.tolist()).count('qz7') != 2:
    raise ValueError(
      f'the chat template of {chat.tokenizer.name_or_path} does not write what tools '
      'answer, in the role tool or of a user; fix "chat_template" in its '
      'tokenizer_config.json, or choose another chat.tool_format.'
    )
  lines = []
  if chat.tools_in_prompt == 'own':
    lines.append(
      f"Only the tasks' own messages tell of the tools ({names}): chat.tools_in_prompt."
    )
  elif chat.supports_tools and chat.detected is None:
    lines.append(
      'The chat template shows no format of tool calls that is known: they are parsed as '
      f'{chat.format.name}. chat.tool_format changes that.'
    )
  elif not chat.supports_tools:
    lines.append(
      f'The chat template knows no tools in the format {chat.format.name}: the system '
      f"message tells of them ({names}). chat.tools_in_prompt = 'own' or 'refuse' "
      'changes that.'
    )
  if chat.answer_role is None and not chat.format.answer:
    lines.append(
      'The chat template has no role for what tools answer: a message of the user has '
      'it, between <tool_response> and </tool_response>.'
    )
  return ' '.join(lines) or None


def select_fitting_tasks(
  chat: chat_lib.Chat,
  env: env_lib.Env,
  tasks: Sequence[types.Task],
  *,
  slots: int,
  long_prompts: str = 'refuse',
  name: str = 'tasks',
) -> tuple[Sequence[types.Task], str | None]:
  """Returns the tasks whose prompts leave room for a reply, and a line about the others.

  Encodes the tasks' own messages, with which a ToolEnv begins. The prompts of other
  environments are known only in their episodes. If `tasks` is not a list, only a sample
  is encoded and no task is left out: an episode whose prompt does not fit is not learned
  from. `long_prompts` is 'refuse', or 'skip' to leave such tasks out.

  Raises:
    ValueError: A message is malformed; a prompt leaves no room and long_prompts is
      'refuse'; or no prompt leaves room.
  """
  inner: Any = env
  # A context strategy (tasks/context.py) that begins with the prompt of the wrapped env.
  while getattr(inner, 'keeps_opening', False):
    inner = inner.env
  is_tool_env = isinstance(inner, env_lib.ToolEnv)
  if not (is_tool_env and type(inner).reset is env_lib.ToolEnv.reset):
    return tasks, None
  schemas = _schemas(env)
  least = len(chat.encode_prompt([{'role': 'user', 'content': ''}], schemas))
  long: dict[int, int] = {}  # Index of a task that does not fit -> its tokens.
  checked, seen = 0, {}
  for number, task in fingerprint.sample_tasks(tasks):
    checked += 1
    try:
      roles = [messages_lib.check(message)['role'] for message in task.messages]
      # A token has at least one byte, so counting bytes clears most prompts. The first
      # prompt of each sequence of roles is encoded, since the template may refuse it.
      is_short = least + sum(map(_bound_tokens, task.messages)) < slots
      if seen.setdefault(tuple(roles), number) != number and is_short:
        continue
      tokens = len(chat.encode_prompt(task.messages, schemas))
    except ValueError as error:
      raise ValueError(f'{name}[{number}] ({task.id!r}): {error}') from None
    if tokens >= slots:
      long[number] = tokens
  if not long:
    return tasks, None
  first, tokens = next(iter(long.items()))
  line = (
    f'{len(long)} of {checked} {name} leave no room for a reply in a row of '
    f'engine.slots = {slots} tokens; the first is {tasks[first].id!r} with a prompt of '
    f'{tokens}, the longest has {max(long.values())}.'
  )
  if long_prompts == 'refuse' or len(long) == checked:
    raise ValueError(
      f'{line} Raise engine.slots, shorten these prompts, or leave them out: '
      "chat.long_prompts = 'skip' does that while others are left."
    )
  if isinstance(tasks, list | tuple):
    tasks = [t for n, t in enumerate(tasks) if n not in long]
  return tasks, line


def check_prompts(
  chat: chat_lib.Chat,
  env: env_lib.Env,
  tasks: Sequence[types.Task],
  evals: Mapping[str, Sequence[types.Task]],
  config: config_lib.Config,
) -> tuple[Sequence[types.Task], list[str]]:
  """Returns the tasks to train on, and lines to show.

  Evaluations keep all tasks, so that their metrics cover the complete set; a task that
  does not fit counts as unanswered.

  Raises:
    ValueError: See `describe_tool_prompt` and `select_fitting_tasks`.
  """
  options = {'slots': config.engine.slots, 'long_prompts': config.chat.long_prompts}
  lines = [describe_tool_prompt(chat, env)]
  tasks, line = select_fitting_tasks(chat, env, tasks, **options)
  lines.append(line and f'{line} They are left out.')
  for name, held_out in evals.items():
    _, line = select_fitting_tasks(
      chat, env, held_out, name=f'tasks of evals[{name!r}]', **options
    )
    lines.append(line and f'{line} They count as unanswered.')
  return tasks, [line for line in lines if line]


def _schemas(env: env_lib.Env) -> list[dict[str, Any]]:
  return [tool.schema for tool in getattr(env, 'tools', ())]


def _bound_tokens(message: types.Message) -> float:
  """Returns an upper bound of the tokens of a message."""
  content = message.get('content')
  if not isinstance(content, str) or len(message) > 2:
    return float('inf')
  return _TEMPLATE_TOKENS + len(content.encode(errors='replace'))
