"""Programming: HumanEval and MBPP, judged by tests that the program cannot reach.

A task's `answer` has the tests. An agent tries its code with the Python tool, and answers
with the last block of Python (```python ... ```) of its last message.

The tests run in one process and the program in a sandbox. Each call of one of its
functions crosses between them, and only plain values, or handles of objects, come back
(plain_values). So a program cannot pass by ending the process, patching builtins,
printing what the judge expects, reading the tests, or returning an object that equals
everything.
"""

import ast
import builtins
from collections.abc import Callable, Sequence
import functools
import importlib
import inspect
import json
import os
import re
from typing import Any

from agent_r1_jax.agent import calls, env
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.host import isolated, workers
from agent_r1_jax.retrieval import documents
from agent_r1_jax.tasks import plain_values
from agent_r1_jax.tools import sandbox
from agent_r1_jax.types import Message, Task

AGENT = (
  'Solve the programming problem. Try your code with the python tool, read what it '
  'prints, and fix it until it is right. Then give the whole program in one block that '
  'begins with ```python and ends with ```.\n\n'
)
DIRECT = (
  'Solve the programming problem. Give the whole program in one block that begins with '
  '```python and ends with ```.\n\n'
)

# A block's label and content; ```this``` within a line is no block. Fences come in pairs.
_BLOCK = re.compile(r'```(?:[^\n`]+```|([^\n`]*)\n(.*?)```)', re.DOTALL)
_LABELS = 'python', 'py', 'python3'
_MAX_RESULT = 1 << 20  # Bytes of a returned value.
_LONGEST_TEXT = 1000  # Characters of an error, which may quote a returned value.
_LONGEST_RANGE = 1_000_000  # Items of a returned range, which is written in few bytes.
# MiB that the tests may allocate: they may turn a short returned value into a long one.
_MEMORY_MB = 1024
# Time limit of one call; the limit of all tests is on the judge's process.
_SECONDS = 3600.0
# Modules that MBPP's tests use without importing them.
_MODULES = ('collections', 'datetime', 'itertools', 'math', 're', 'sys')
# Predicates of plain values, such as str.startswith: if a program's object had them, it
# could answer the test's questions itself.
_VERDICTS = {'startswith', 'endswith', 'is_integer'}
_VERDICTS |= {name for name in dir(str) + dir(set) if name.startswith('is')}
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class ProgramError(Exception):
  """A call of the program raised, or did not return."""


def load_humaneval(path: str | os.PathLike) -> list[Task]:
  """Reads HumanEval's rows {task_id, prompt, entry_point, test, ...}.

  Raises:
    ValueError: A row lacks a field; names the file and the row.
  """
  tasks = []
  for where, row in documents.read_rows(path):
    names = ('task_id', 'prompt', 'entry_point', 'test')
    task_id, prompt, entry, test = (documents.read_text(where, row, n) for n in names)
    question = f'Complete this function:\n\n```python\n{prompt.rstrip()}\n```'
    tests = [f'{test}\ncheck({entry})']
    answer = {'prompt': prompt, 'tests': tests, 'entry_point': entry}
    tasks.append(_make_task(task_id, question, answer))
  return tasks


def load_mbpp(path: str | os.PathLike) -> list[Task]:
  """Reads MBPP's rows {task_id, text, test_list, test_setup_code, ...}.

  The prompt shows the first test, which names the function; the others are hidden.

  Raises:
    ValueError: A row lacks a field, or its first test is not Python or calls no function
      by name; names the file and the row.
  """
  tasks = []
  for where, row in documents.read_rows(path):
    text, tests = documents.read_text(where, row, 'text'), row.get('test_list')
    if not isinstance(tests, list) or not tests:
      raise documents.field_error(where, row, 'test_list', 'a list of tests')
    if 'task_id' not in row:
      raise documents.field_error(where, row, 'task_id', 'the number of the problem')
    if not (entry := _find_tested_name(tests[0])):
      raise documents.field_error(where, row, 'test_list', 'tests that call a function')
    setup = row.get('test_setup_code') or ''
    tests = [setup, *tests]
    tasks.append(make_mbpp_task(f'mbpp/{row["task_id"]}', text, tests, entry))
  return tasks


def make_mbpp_task(task_id: str, text: str, tests: list[str], entry: str) -> Task:
  """Makes a task of MBPP's form.

  Args:
    task_id: The task's id.
    text: A description of the function.
    tests: Set-up code, which may be empty; the test that the prompt shows; the hidden
      tests.
    entry: The name of the function.
  """
  question = f'{text}\nYour code must pass this test:\n\n```python\n{tests[1]}\n```'
  answer = {'prompt': '', 'tests': tests, 'entry_point': entry}
  return _make_task(task_id, question, answer)


def agent_task(task: Task) -> Task:
  """Returns the task with the prompt for an agent that has the Python tool."""
  return task.ask(AGENT + task.info['question'])


def direct_task(task: Task) -> Task:
  """Returns the task with the prompt for a model without tools."""
  return task.ask(DIRECT + task.info['question'])


def extract_program(text: str) -> str | None:
  """Returns a reply's last block labelled Python, else its last unlabelled block.

  None if there is no such block outside thoughts, or it is blank.
  """
  found = _BLOCK.findall(calls.remove_thoughts(text))
  blocks = [(label.strip().lower(), block) for label, block in found]
  programs = [block for label, block in blocks if label in _LABELS]
  programs = programs or [block for label, block in blocks if not label]
  return programs[-1] if programs and programs[-1].strip() else None


class Tester:
  """Reward and metrics of an episode: whether the program passes all tests.

  judge = programming.Tester()
  env.ToolEnv([python.python_tool(box)], judge.reward, metrics=judge.metrics)
  """

  def __init__(self, *, seconds: float = 20.0, processes: int = 2):
    """Starts no process yet.

    Args:
      seconds: Time limit of all tests of a program; exceeding it is a failure.
      processes: The maximum number of programs judged at a time.
    """
    self._run_tests = isolated.in_subprocess(
      run_tests, seconds=seconds, processes=processes, memory_mb=_MEMORY_MB
    )

  async def reward(self, task: Task, messages: Sequence[Message]) -> env.Score:
    """Returns 1.0 if all tests pass, else 0.0."""
    return (await self.metrics(task, messages))['passed']

  async def metrics(self, task: Task, messages: Sequence[Message]) -> dict[str, float]:
    """Returns passed, answered (there was a program), and late (it took too long).

    A program that brings down the judge's process, for example by its memory, has failed:
    otherwise an agent could escape its reward that way. The process may allocate 1 GiB.
    """
    program = extract_program(messages_lib.last_reply(messages))
    values = {'passed': 0.0, 'answered': float(program is not None), 'late': 0.0}
    if program is None:
      return values
    try:
      values['passed'] = float(await self._run_tests(program, task.answer) is None)
    except TimeoutError:
      values['late'] = 1.0
    except isolated.EndedError:
      pass
    return values


@functools.cache
def _get_sandbox() -> sandbox.Sandbox:
  """The sandbox of this process."""
  return sandbox.Sandbox(max_output=_MAX_RESULT)


def run_tests(program: str, answer: dict[str, Any]) -> str | None:
  """Runs a task's tests on a program; returns None if they pass, else what failed.

  The tests are trusted and run here, so call this in a process that may hang and has a
  memory limit.

  Args:
    program: Python that defines what the tests call. For HumanEval, the function's body
      is enough: it is appended to the prompt.
    answer: The answer of a task.

  Raises:
    MemoryError: The tests needed more memory than this process may have.
  """
  entry, prompt = answer['entry_point'], answer['prompt']
  scope: dict[str, Any] = {}
  with _get_sandbox().open_session() as session:
    try:
      remote = _LoadedProgram(session, _split(program, prompt, entry))
      if entry not in remote.names:
        return f'there is no function {entry}'
      if prompt:
        # The program must not redefine the prompt's helpers, which tests call too.
        exec(_finish_prompt(prompt), scope)
      else:
        # Tests of MBPP call what the program defines. Builtins and modules are this
        # process's, so that a program cannot replace them.
        known = {*_MODULES, *dir(builtins)}
        new = [n for n in remote.names if n not in known and not n.startswith('__')]
        scope |= {name: remote.function(name) for name in new}
        scope |= {n: importlib.import_module(n) for n in remote.names if n in _MODULES}
      scope[entry] = remote.function(entry)
      for test in answer['tests']:
        exec(test, scope)
    except MemoryError:
      raise
    except (Exception, SystemExit) as error:
      text = workers.describe_error(error)[:_LONGEST_TEXT]
      if isinstance(error, AssertionError):
        return 'a test failed' + text.removeprefix(type(error).__name__)
      return text
    finally:
      scope.clear()  # A reference cycle, which holds what the program returned.
  return None


def _find_tested_name(test: Any) -> str | None:
  """Finds the function that a test of MBPP calls; a builtin only if there is no other."""
  try:
    nodes = [*ast.walk(ast.parse(test))]
  except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
    return None
  calls = [node.func for node in nodes if isinstance(node, ast.Call)]
  names = [function.id for function in calls if isinstance(function, ast.Name)]
  return next((n for n in names if n not in dir(builtins)), names[0] if names else None)


def _split(program: str, prompt: str, entry: str) -> list[str]:
  """Returns the texts to run: the prompt, whose helpers may be needed; the program.

  A program may begin with an import of __future__, so it needs a text of its own.
  """
  if not prompt:
    return [program]
  if not re.search(rf'^(async\s+)?def\s+{entry}\b', program, re.MULTILINE):
    return [prompt + program]
  return [_finish_prompt(prompt), program]


def _finish_prompt(prompt: str) -> str:
  """Adds a body to the function at the end of a prompt, so that it compiles."""
  return f'{prompt}    pass\n'


class _LoadedProgram:
  """A program in the sandbox, whose functions can be called from here.

  Attributes:
    names: The names that it defines or imports.
  """

  def __init__(self, session: sandbox.Interpreter, texts: list[str]):
    """Runs the program once, as an imported module.

    Raises:
      ProgramError: It raised or ended.
    """
    self._session = session
    # The prefix avoids names that programs use.
    self._run(
      '_judge_values = {}\n'
      f'exec({inspect.getsource(plain_values)!r}, _judge_values)\n'
      'import json, sys\n'
      '_judge_values |= {"json": json, "print": print, "objects": []}\n'
      '_judge_values |= {"globals": globals, "setattr": setattr}\n'
      '__name__, sys.modules["program"] = "program", sys.modules["__main__"]\n'
      'del json, sys\n'
      '_judge_values["before"] = {*globals()}'
    )
    for text in texts:
      self._run(text)
    self.names = self._run_for_json(
      '_judge_values["list_names"](_judge_values["globals"](), _judge_values["before"])'
    )
    self._errors = {}
    for name, types in self.names.items():
      kinds = [plain_values.TYPES.get(kind, object) for kind in types]
      base = next((kind for kind in kinds if issubclass(kind, BaseException)), None)
      if base and name not in dir(builtins):
        self._errors[name] = type(name, (base,), {})

  def function(self, name: str) -> Callable[..., Any]:
    """Returns a function that calls the program's, or its exception."""
    return self._errors.get(name) or functools.partial(self.call, name)

  def call(self, function: str, /, *args, **kwargs) -> Any:
    """Calls the value of an expression of the program; raises what the call raises.

    Raises:
      ProgramError: The interpreter ended, or the result cannot be read.
    """
    sent = plain_values.encode((args, kwargs), objects := [], shared := [])
    if objects:
      raise ProgramError(f'{function} cannot be given {objects[0]!r:.100}')
    result = self._run_for_json(
      f'_judge_values["call"]({function}, _judge_values["json"].loads('
      f'{json.dumps(sent)!r}), _judge_values["objects"])'
    )
    handle: Any = functools.partial(_Object, self)
    try:
      raised, value = plain_values.decode(
        result,
        longest_range=_LONGEST_RANGE,
        shared=shared,
        sent=sent['shared'],
        types=plain_values.TYPES | self._errors,
        handle=handle,
      )
    except _UNREADABLE as error:
      raise ProgramError(f'{function} returned what cannot be read') from error
    if raised is not True:
      return value
    raise value if isinstance(value, Exception | SystemExit) else ProgramError(function)

  def _run_for_json(self, expression: str) -> Any:
    """Returns the value of an expression, from the last printed line."""
    text = self._run(
      f'_judge_values["print"]("\\n" + _judge_values["json"].dumps({expression}))'
    )
    try:
      return json.loads(text.rstrip('\n').rpartition('\n')[2])
    except (ValueError, RecursionError) as error:
      raise ProgramError('the program printed where its result belongs') from error

  def _run(self, code: str) -> str:
    output = self._session.run(code, _SECONDS)
    if output.status != 'ok':
      last = output.text.strip().rpartition('\n')[2]
      raise ProgramError(f'{output.status}: {last:.200}')
    return output.text


class _Object(plain_values.Handle):
  """An object of the program; never equal to a value of this process."""

  def __init__(self, program: _LoadedProgram, number: int):
    vars(self).update(_program=program, _number=number)

  def __call__(self, *args, **kwargs):
    function = f'_judge_values["objects"][{self._number}]'
    return self._program.call(function, *args, **kwargs)

  def __getattr__(self, name):
    if name in _VERDICTS:
      raise AttributeError(name)
    return self._program.call(f'(lambda x: x.{name})', self)

  def __setattr__(self, name, value):
    self._program.call('_judge_values["setattr"]', self, name, value)

  def __eq__(self, other):
    same = '(lambda x, y: x == y)'
    return isinstance(other, _Object) and self._program.call(same, self, other) is True

  __hash__, __bool__ = object.__hash__, lambda self: True


def _make_method(name: str) -> Callable[..., Any]:
  def method(self, *args):
    # Otherwise the program could claim to differ from the right answer by 0.
    if name in ('__add__', '__sub__') and not isinstance(args[0], _Object):
      return NotImplemented
    return self.__getattr__(name)(*args)

  return method


# Methods whose results are compared here; none that could claim to be right.
for _name in ('len', 'iter', 'getitem', 'setitem', 'str', 'add', 'sub', 'mul'):
  setattr(_Object, f'__{_name}__', _make_method(f'__{_name}__'))


def _make_task(task_id: str, question: str, answer: dict[str, Any]) -> Task:
  message = {'role': 'user', 'content': question}
  return Task(task_id, [message], answer, {'question': question})
