"""tau2-bench's telecom tasks without a user: an agent solves a ticket with tools alone.

  tasks = tau.load('tau2-bench')  # A checkout of github.com/sierra-research/tau2-bench.
  train.run(..., tasks=tasks, make_env=tau.SoloEnv)

The agent has both sides' tools, the service's and the customer's phone, and ends with
the tool `done`, like tau2's own LLMSoloAgent. State, tools and evaluators come from the
checkout (MIT licence); only the parts that need no client of a language model are
imported. The PyPI package named tau2 is a different one.
"""

import ast
from collections.abc import Sequence
import functools
import importlib
import json
import math
import os
import pathlib
import sys
import types as python_types
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls, env
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import workers

SPLITS = ('base', 'train', 'test', 'small', 'full')
POLICIES = ('manual', 'workflow')
# As in tau2: this many failed calls end an episode.
MAX_ERRORS = 10
DONE = 'done'
# Larger amounts are rejected.
_LARGEST = 1e12
_TELECOM = 'tau2.domains.telecom.environment'
_INSTALL = (
  '{} is not installed: pip install loguru toml PyYAML docstring-parser addict deepdiff '
  'python-dotenv pandas (contrib/benchmarks/guide.md).'
)


def load(
  folder: str | os.PathLike, split: str = SPLITS[0], policy: str = POLICIES[0]
) -> list[types.Task]:
  """Reads the tasks of a split.

  A task's message is the prompt of tau2's LLMSoloAgent, with the policy and the ticket;
  its answer has the calls that solve it, as [name, arguments].

  Args:
    folder: The checkout.
    split: One of SPLITS; 'base' has the 114 tasks of reported results.
    policy: One of POLICIES: the agent's text on technical support.

  Raises:
    FileNotFoundError: The folder is not a checkout.
    ModuleNotFoundError: A requirement is not installed; says which.
    ValueError: There is no such split or policy, or another checkout is in use.
  """
  for name, value, known in (('split', split, SPLITS), ('policy', policy, POLICIES)):
    if value not in known:
      raise ValueError(f'{name} is {value!r}; give one of {", ".join(known)}.')
  source = _open(folder)
  data = source.parent / 'data' / 'tau2' / 'domains' / 'telecom'
  chosen = set(json.loads((data / 'split_tasks.json').read_text())[split])
  rows = json.loads((data / 'tasks.json').read_text())
  instruction, template = _read_prompts(source / 'tau2' / 'agent' / 'llm_agent.py')
  instruction = instruction.format(stop_function_name=DONE, stop_token='')
  world = _import(_TELECOM).get_environment(solo_mode=True, policy_type=policy)
  texts = {'agent_instruction': instruction, 'domain_policy': world.get_policy()}
  return [
    _make_task(row, template.format(**texts, ticket=row['ticket']))
    for row in rows
    if row['id'] in chosen
  ]


def solve(task: types.Task) -> list[str]:
  """Returns replies that solve a task: its own calls, then `done`."""
  steps = [*task.answer, [DONE, {}]]
  return [call_formats.HERMES.render(calls.ToolCall(*call)) for call in steps]


class SoloEnv(env.ToolEnv):
  """An agent alone with a ticket; the tool `done` ends the episode.

  The reward is tau2's evaluation of the task: its assertions on the final state and, for
  some tasks, its actions. It is 0 if the agent ended other than by `done`: by a reply
  without a call, after MAX_ERRORS failed calls, or by a budget.
  """

  def __init__(self):
    """Creates the environment; call `load` first, which finds tau2."""
    tools = [self._make_tool(schema) for schema in _schemas()]
    super().__init__(tools, self._score, metrics=self._measure, in_order=True)

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins in the task's state."""
    self._said: list[Any] = []  # tau2's messages: a call, its result, a call, ...
    self._errors, self._stopped, self._scored = 0.0, False, 0.0
    # In a thread, since it takes 10 ms.
    self._row, self._world = await workers.call(_begin, task.info['row'], name='reset')
    return await super().reset(task)

  async def step(self, reply: str) -> types.Step:
    """Answers a reply; `done`, or too many errors, ends the episode."""
    step = await super().step(reply)
    self._errors += step.metrics['tool_errors'] + step.metrics['format_errors']
    if not step.done and (self._stopped or self._errors >= MAX_ERRORS):
      end = await self.finish('done')
      metrics = step.metrics | end.metrics
      step = types.Step([], step.reward + end.reward, done=True, metrics=metrics)
    return step

  def _make_tool(self, schema: dict[str, Any]) -> tool_lib.Tool:
    name = schema['function']['name']

    def run(**arguments: Any) -> str:
      if self._stopped:
        raise ValueError('the episode has ended')
      for key, x in arguments.items():
        if isinstance(x, int | float) and abs(x) > _LARGEST:
          raise ValueError(f'argument {key!r} must be a number of at most {_LARGEST:.0e}')
      if name == DONE:
        self._stopped = True
        return ''
      return self._ask(name, arguments)

    return tool_lib.Tool(name, schema, run, timeout=10.0)

  def _ask(self, name: str, arguments: dict[str, Any]) -> str:
    """Calls a tool of either side, as tau2 does; exceptions become text."""
    message = _import('tau2.data_model.message')
    call = message.ToolCall(id=str(len(self._said)), name=name, arguments=arguments)
    answer = self._world.get_response(call)
    self._said += [message.AssistantMessage(role='assistant', tool_calls=[call]), answer]
    self._errors += answer.error
    return answer.content

  def _score(self, task: types.Task, messages: Sequence[types.Message]) -> float:
    """Returns the product of the parts that the task's reward is based on."""
    if not self._stopped:
      return 0.0
    state = _import('tau2.evaluator.evaluator_env').EnvironmentEvaluator
    actions = _import('tau2.evaluator.evaluator_action').ActionEvaluator
    found = [state.calculate_reward(_make_world, self._row, self._said, solo_mode=True)]
    if 'ACTION' in self._row.evaluation_criteria.reward_basis:
      found.append(actions.calculate_reward(self._row, self._said))
    self._scored = math.prod(info.reward for info in found)
    return self._scored

  def _measure(
    self, task: types.Task, messages: Sequence[types.Message]
  ) -> dict[str, float]:
    return {'passed': self._scored, 'ended': float(self._stopped)}


def _make_task(row: dict[str, Any], prompt: str) -> types.Task:
  criteria = row['evaluation_criteria']
  if other := set(criteria['reward_basis']) - {'DB', 'ENV_ASSERTION', 'ACTION'}:
    raise ValueError(f'task {row["id"]} is judged by {sorted(other)}, which is not here.')
  answer = [[action['name'], action['arguments']] for action in criteria['actions']]
  message = {'role': 'system', 'content': prompt}
  return types.Task(row['id'], [message], answer, {'row': row})


def _begin(row: dict[str, Any]) -> tuple[Any, Any]:
  """Returns a row as tau2 has it, and an environment in its initial state."""
  task = _import('tau2.data_model.tasks').Task.model_validate(row)
  world, first = _make_world(solo_mode=True), task.initial_state
  world.set_state(first.initialization_data, first.initialization_actions, [])
  return task, world


def _make_world(solo_mode: bool = False) -> Any:
  """Makes an environment of tau2 in the state of its files."""
  world = _import(_TELECOM).get_environment(*(x.model_copy(deep=True) for x in _states()))
  # set_solo_mode would make all tools again to compare their names: 0.2 seconds.
  world.solo_mode = solo_mode
  return world


@functools.cache
def _states() -> tuple[Any, Any]:
  """Returns the state of the service and of the phone."""
  telecom = _import(_TELECOM)
  service = telecom.TelecomDB.load(telecom.TELECOM_DB_PATH)
  return service, telecom.TelecomUserDB.load(telecom.TELECOM_USER_DB_PATH)


@functools.cache
def _schemas() -> list[dict[str, Any]]:
  """Returns the schemas of all tools: the service's, the phone's, and `done`."""

  def done() -> str:
    """Call this function when you are done with the task."""
    return ''

  world = _make_world()
  end = _import('tau2.environment.tool').as_tool(done)
  tools = [*world.get_tools(), *world.get_user_tools(), end]
  return [tool.openai_schema for tool in tools]


def _read_prompts(path: pathlib.Path) -> list[str]:
  """Returns the instruction and the template of LLMSoloAgent.

  Reads them from the source, since importing the module needs a language model client.
  """
  names = ('AGENT_SOLO_INSTRUCTION', 'SYSTEM_PROMPT_SOLO')
  found = {}
  for node in ast.parse(path.read_text(encoding='utf-8')).body:
    # Each is `NAME = """...""".strip()`.
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
      found[node.targets[0].id] = node.value
  return [ast.literal_eval(found[name].func.value).strip() for name in names]


def _open(folder: str | os.PathLike) -> pathlib.Path:
  """Makes `tau2` importable from a checkout; returns the checkout's folder `src`.

  Skips the package's own `__init__`, which imports every client and server.
  """
  source = pathlib.Path(folder).resolve() / 'src'
  package = source / 'tau2'
  if not (package / 'domains' / 'telecom').is_dir():
    raise FileNotFoundError(
      f'{str(folder)!r} is no checkout of github.com/sierra-research/tau2-bench.'
    )
  if 'tau2' not in sys.modules:
    module = python_types.ModuleType('tau2')
    module.__path__ = [str(package)]
    sys.modules['tau2'] = module
  if [*sys.modules['tau2'].__path__] != [str(package)]:
    raise ValueError(f'tau2 is already imported from {sys.modules["tau2"].__path__}.')
  # Each tool call would print a line on the terminal.
  _import('loguru').logger.disable('tau2')
  return source


def _import(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if str(error.name).partition('.')[0] == 'tau2':
      raise
    raise ModuleNotFoundError(_INSTALL.format(error.name), name=error.name) from None
