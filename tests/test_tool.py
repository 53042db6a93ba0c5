import asyncio
import functools
import json
import pathlib
import pickle
import socket
import threading
from typing import Any, Literal, Optional

import pytest
import waiting

from agent_r1_jax.agent import calls
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent.tool import Tool, tool
from agent_r1_jax.grammars import byte_grammars
from agent_r1_jax.host import thread_pool


def bare(fn, timeout=5.0, more=False, **properties):
  """A Tool with little of a schema."""
  parameters = {'type': 'object', 'properties': properties}
  parameters |= {'additionalProperties': True} if more else {}
  function = {'name': 'bare', 'description': 'x', 'parameters': parameters}
  return Tool('bare', {'type': 'function', 'function': function}, fn, timeout)


@tool
def book(
  title: str,
  pages: int,
  price: float = 1.0,
  tags: list[str] | None = None,
  kind: Literal['novel', 'poem'] = 'novel',
  extra: dict[str, int] = {},  # noqa: B006
  lent: bool = False,
  key: int | str = 0,
  rows: list[list[int]] | dict = [],  # noqa: B006
  anything: Any = None,
  level: Literal[1, 2, 'x'] = 1,
  old: Optional[int] = None,  # noqa: UP045
) -> str:
  """Finds a book.

  In two paragraphs.

  Args:
    title: Of the book,
      on two lines: yes.
    pages: How many.
    price: In euros.
    tags: Words.
    kind: Which.
    extra: More.
    lent: Whether.
    key: Either.
    rows: Nested.
    anything: Whatever.
    level: Mixed.
    old: May be null.

  Returns:
    Its name.
  """
  return f'{title} {pages}'


def test_the_decorator_takes_a_name_and_a_timeout():
  @tool(name='other', timeout=2)
  def named():
    """Does it."""
    return 'x'

  assert (named.name, named.timeout) == ('other', 2)
  assert book.name == 'book' and 'return' not in book.schema['function']
  assert named.schema['function'] == {
    'name': 'other',
    'description': 'Does it.',
    'parameters': {'type': 'object', 'properties': {}},
  }
  assert named() == 'x'


def no_docstring(x: str):
  return x


def odd_type(x: pathlib.Path):
  """Doc.

  Args:
    x: Doc.
  """


def starred(*words: str):
  """Doc.

  Args:
    words: Doc.
  """


@pytest.mark.parametrize(
  'fn, message',
  [
    (no_docstring, 'no_docstring'),
    (odd_type, 'odd_type'),
    (starred, 'tool starred: *args'),
  ],
)
def test_functions_without_a_schema_are_refused(refused, fn, message):
  with refused(message):
    tool(fn)


def test_a_tool_with_a_wrong_schema_or_timeout_is_refused(refused):
  with refused('tool x: schema must be'):
    Tool('x', {'name': 'x'}, print)
  with refused('properties.x.type'):
    bare(print, x={'type': 'strin'})
  with refused('timeout'):
    Tool('book', book.schema, print, timeout=0)


@pytest.mark.parametrize(
  'change, message',
  [
    ({'pages': None}, "argument 'pages': None is not of type 'integer'"),
    ({'pages': 3.0}, "argument 'pages': 3.0 is not of type 'integer'"),
    ({'pages': True}, "argument 'pages': True is not of type 'integer'"),
    ({'title': [0] * 10**6}, ", 0, 0] is not of type 'string'"),
    ({'price': False}, "argument 'price': False is not of type 'number'"),
    ({'tags': ['a', 1]}, "argument 'tags[1]': 1 is not of type 'string'"),
    ({'kind': 'song'}, "argument 'kind': 'song' is not one of ['novel', 'poem']"),
    ({'extra': {'a': 'b'}}, "argument 'extra.a': 'b' is not of type 'integer'"),
    ({'key': 1.5}, "argument 'key': 1.5 is not of type 'integer', 'string'"),
    ({'rows': [[1], ['a']]}, "argument 'rows[1][0]': 'a' is not of type 'integer'"),
    ({'rows': None}, "argument 'rows': None is not "),
    ({'old': 'a'}, "argument 'old': 'a' is not of type 'integer'"),
    ({'author': 'x'}, "unknown argument 'author'; it takes title, pages, price"),
  ],
)
async def test_a_wrong_argument_is_named_in_an_error_text(change, message):
  good = {'title': 'Emma', 'pages': 3}
  result = await tool_lib.call(book, {**good, **change})
  assert not result.ok
  assert result.text.startswith('Error: book: ')
  assert message in result.text and len(result.text) < 400


async def test_missing_arguments_are_named():
  result = await tool_lib.call(book, {'title': 'Emma'})
  assert not result.ok
  assert result.text == "Error: book: 'pages' is a required property"


@pytest.mark.parametrize(
  'change',
  [
    {'price': 2},
    {'key': 'a'},
    {'rows': {}},
    {'rows': [[]]},
    {'anything': [{}]},
    {'level': 'x'},
    {'old': None},
  ],
)
async def test_arguments_that_fit_the_schema_are_passed(change):
  assert (await tool_lib.call(book, {'title': 'E', 'pages': 3, **change})).ok


async def test_schemas_of_others_may_allow_more():
  open_tool = bare(lambda **words: sorted(words), more=True)
  assert (await tool_lib.call(open_tool, {'a': 1, 'b': 2})).text == '["a", "b"]'
  nested = {'type': 'object', 'properties': {'x': {'type': 'null'}}, 'required': ['x']}
  function = {'name': 'n', 'parameters': {'properties': {'deep': nested}}}
  strict = Tool('n', {'type': 'function', 'function': function}, lambda deep: 'ok')
  assert (await tool_lib.call(strict, {'deep': {'x': None}})).text == 'ok'
  assert "'deep': 'x' is a req" in (await tool_lib.call(strict, {'deep': {}})).text
  assert "'deep.x': 0 is not" in (await tool_lib.call(strict, {'deep': {'x': 0}})).text
  whole = {'type': 'string', 'pattern': '^[a-z]+$', 'minLength': 2}
  named = bare(lambda word: word, word=whole)
  assert (await tool_lib.call(named, {'word': 'ab'})).ok
  assert "'A1' does not match" in (await tool_lib.call(named, {'word': 'A1'})).text


async def test_schemas_of_others_download_nothing(monkeypatch):
  monkeypatch.setattr(socket, 'socket', lambda *_, **__: pytest.fail('a connection'))
  far = bare(lambda x: x, x={'$ref': 'http://localhost:1/schema.json'})
  result = await tool_lib.call(far, {'x': 1})
  assert not result.ok and 'Unresolvable' in result.text


class Word(str):
  __slots__ = ()

  def __len__(self):
    raise RuntimeError('no length')

  def __str__(self):
    return 'a lie'


class Mute:
  def __str__(self):
    raise RuntimeError('no words')


circle: list = []
circle.append(circle)


# pytest would ask some of these for their length: it gets the row's number instead.
RESULTS = [
  ('é', 'é'),
  (Word('true'), 'true'),
  (b'a\xff', 'a\ufffd'),
  (bytearray(b'ab'), 'ab'),
  (None, 'null'),
  (3, '3'),
  ({'é': [1, 2.5, True]}, '{"é": [1, 2.5, true]}'),
  ({1}, '{1}'),
  ({(1, 2): 3}, '{(1, 2): 3}'),
  (circle, '[[...]]'),
  ('\ud800', '\ud800'),
]


@pytest.mark.parametrize('row', range(len(RESULTS)))
async def test_results_become_text(row):
  value, text = RESULTS[row]

  async def later():
    return value

  for fn in (lambda: value, later):
    result = await tool_lib.call(bare(fn), {})
    assert (result.text, result.ok) == (text, True)
    assert type(result.text) is str


@pytest.mark.parametrize('value', [Mute(), 10**10_000], ids=['mute', 'long'])
async def test_results_without_text_are_errors(value):
  result = await tool_lib.call(bare(lambda: value), {})
  assert not result.ok
  assert result.text.startswith('Error: bare: ')


async def test_a_forgotten_async_is_an_error():
  async def real():
    return 'x'

  made = []
  hidden = bare(lambda: made.append(real()) or made[0])
  result = await tool_lib.call(hidden, {})
  assert not result.ok
  assert 'define it with async def' in result.text
  made[0].close()
  partial = bare(functools.partial(real))
  assert (await tool_lib.call(partial, {})).text == 'x'


async def test_hung_tools_time_out():
  release = threading.Event()

  async def stubborn():
    while not release.is_set():
      try:
        await asyncio.sleep(3600)
      except asyncio.CancelledError:
        await asyncio.sleep(0.01)

  async def asleep():
    await asyncio.sleep(3600)

  for fn in (release.wait, asleep, stubborn):
    result = await tool_lib.call(bare(fn, timeout=0.05), {})
    assert not result.ok
    assert result.text == 'Error: bare gave no answer within 0.05 seconds'
    assert result.seconds >= 0.05
  release.set()


async def test_a_late_answer_is_dropped(monkeypatch):
  problems = []
  loop = asyncio.get_running_loop()
  loop.set_exception_handler(lambda loop, context: problems.append(context))
  pool, gate = thread_pool.Pool(), threading.Event()
  monkeypatch.setattr(thread_pool, 'POOL', pool)
  result = await tool_lib.call(bare(gate.wait, timeout=0.02), {})
  gate.set()
  await waiting.soon(lambda: not (pool.abandoned or pool.busy), 'its end')
  await asyncio.sleep(0)  # What the answer asked of the loop would happen here.
  assert (result.ok, problems) == (False, [])


async def test_huge_results_are_cut():
  result = await tool_lib.call(bare(lambda: 'x' * 10_000_000), {})
  assert result.text.endswith('x\n[cut: 10,000,000 characters in all]')
  assert len(result.text) < tool_lib.MAX_CHARS + 100


async def test_arguments_of_500_levels_are_passed():
  deep = json.loads('[' * 500 + ']' * 500)
  free = bare(lambda x: 'ok', x={})
  assert (await tool_lib.call(free, {'x': deep})).text == 'ok'


async def test_a_call_without_a_free_thread_is_an_error_text(monkeypatch):
  def fail(thread):
    raise RuntimeError("can't start new thread")

  monkeypatch.setattr(thread_pool, 'POOL', thread_pool.Pool())  # without idle threads
  monkeypatch.setattr(threading.Thread, 'start', fail)
  result = await tool_lib.call(bare(lambda: 'x'), {})
  assert (result.ok, "can't start new thread" in result.text) == (False, True)


@pytest.mark.parametrize(
  'value', [object(), [object()], lambda: 0, (x for x in 'ab'), ValueError, {1: object()}]
)
def test_a_result_without_a_text_is_an_error(value):
  @tool_lib.tool
  def look() -> str:
    """Looks."""
    return value

  result = asyncio.run(tool_lib.call(look, {}))
  if value is ValueError:  # A class has a name.
    assert result.ok and result.text == "<class 'ValueError'>"
    return
  assert not result.ok and ' at 0x' not in result.text
  kind = type(value).__name__
  assert result.text.startswith(
    f'Error: look: TypeError: the function returned a {kind},'
  )
  assert 'return a str, a number, or a list or dict' in result.text


@pytest.mark.parametrize('error', [SystemExit(0), StopIteration(0)])
async def test_what_would_end_more_than_the_call_is_no_failure_of_the_tool(error):
  def leave():
    raise error

  result = await tool_lib.call(bare(leave), {})
  assert result.text == f'Error: bare: {type(error).__name__}: 0'
  assert not (result.ok or result.failed)


@pytest.mark.parametrize('field', ['parameters', 'description'])
async def test_a_field_of_a_schema_that_is_null_is_absent(field):
  function = {'name': 'now', 'description': 'Tells.', 'parameters': {'type': 'object'}}
  without = {key: value for key, value in function.items() if key != field}
  schema = {'type': 'function', 'function': function | {field: None}}
  clock = Tool('now', schema, lambda: 'noon')
  assert clock.schema == {'type': 'function', 'function': without}
  assert (await tool_lib.call(clock, {})).text == 'noon'
  assert not (await tool_lib.call(clock, {'x': 1})).ok
  # A program or a data set may give it as it is.
  assert calls.find_parameters('now', [schema]) == without.get('parameters', {})
  found = [byte_grammars.tool_calls([x], True) for x in (schema, clock.schema)]
  assert pickle.dumps(found[0]) == pickle.dumps(found[1])
