"""Programs: the layouts of HumanEval and MBPP, and a judge that cannot be cheated."""

import collections
import datetime
import decimal
import fractions
import gc
import itertools
import json
import sys

import coding_tasks
from confined import needs_sandbox  # noqa: F401
import graders
import pytest

from agent_r1_jax.agent import env
from agent_r1_jax.retrieval import documents
from agent_r1_jax.tasks import plain_values, programming

pytestmark = pytest.mark.usefixtures('needs_sandbox')


@pytest.mark.parametrize('row', [coding_tasks.HUMANEVAL, coding_tasks.MBPP])
def test_a_loaded_task_shows_neither_hidden_tests_nor_its_solution(tmp_path, row):
  (task,) = coding_tasks.load(tmp_path, row)
  assert (
    task.id == {0: 'HumanEval/0', 7: 'mbpp/7'}[0 if row is coding_tasks.HUMANEVAL else 7]
  )
  for ask in (programming.agent_task, programming.direct_task):
    (message,) = ask(task).messages
    assert message['content'].endswith(task.info['question'])
    # Hidden tests and solutions are nowhere in what the agent sees.
    assert "'aa'" not in message['content'] and 'candidate' not in message['content']
    assert 'x + x' not in message['content'] and '2 * x\n```' not in message['content']


@pytest.mark.parametrize(
  'row, name',
  [
    (coding_tasks.HUMANEVAL, 'test'),
    (coding_tasks.HUMANEVAL, 'prompt'),
    (coding_tasks.MBPP, 'text'),
    (coding_tasks.MBPP, 'test_list'),
  ],
)
def test_a_broken_row_is_named(tmp_path, row, name):
  broken = {key: value for key, value in row.items() if key != name}
  load = programming.load_mbpp if row is coding_tasks.MBPP else programming.load_humaneval
  path = tmp_path / 'rows.jsonl'
  path.write_text(json.dumps(broken))
  with pytest.raises(ValueError, match=f'row 1: .*{name}'):
    load(path)


@pytest.mark.parametrize('test', ['assert 1 == 1', 'assert obj.f() == 1', 'assert (', 5])
def test_a_test_that_calls_no_function_is_named(tmp_path, test):
  with pytest.raises(ValueError, match="row 2: 'test_list' is .* that call a function"):
    coding_tasks.load(
      tmp_path, coding_tasks.MBPP, {**coding_tasks.MBPP, 'test_list': [test]}
    )


@pytest.mark.parametrize(
  'reply, program',
  [
    ('So:\n```python\nx = 1\n```\nDone.', 'x = 1\n'),
    ('```python\nx = 1\n```\nor\n```py\nx = 2\n```', 'x = 2\n'),
    ('```\nx = 3\n```', 'x = 3\n'),
    ('x = 1', None),
    ('```python\n\n```', None),
    ('```python\nx = 1', None),
    ('```bash\nls\n```\nThen:\n```python\nx = 1\n```', 'x = 1\n'),
    ('```python\nx = 1\n```\nIt prints:\n```\n1\n```', 'x = 1\n'),
    ('```json\n{}\n```\n```python\nx = 1\n```\n```text\n1\n```', 'x = 1\n'),
    ('Use ```f```\nin ```Python\nx = 1\n```', 'x = 1\n'),
    ('```bash\nls\n```', None),
  ],
)
def test_the_last_block_is_the_program(reply, program):
  assert programming.extract_program(reply) == program


@pytest.mark.parametrize('row', [coding_tasks.HUMANEVAL, coding_tasks.MBPP])
def test_right_and_wrong_programs(tmp_path, row):
  (task,) = coding_tasks.load(tmp_path, row)
  judge = lambda program: programming.run_tests(program, task.answer)
  assert judge('def double(x):\n  return x + x') is None
  assert judge('def double(x):\n  return 5') == 'a test failed'
  assert judge('def other(x):\n  return 5') in (
    'there is no function double',
    'a test failed',  # Of HumanEval the prompt defines it, without a body.
  )
  assert 'ZeroDivisionError' in (judge('def double(x):\n  return x / 0') or '')
  assert 'SyntaxError' in (judge('def double(x:') or '')
  if row is coding_tasks.HUMANEVAL:
    assert judge(row['canonical_solution']) is None


HONEST = {
  'from the future': 'from __future__ import annotations\n{}',
  'a script too': '{}\nif __name__ == "__main__":\n  print(double(input()))',
  'names of the judge': '_values = _objects = _json = _args = _before = 0\n{}',
  'names of builtins': 'list = sum = str = print = globals = None\n{}',
  'a dataclass': (
    'from __future__ import annotations\nimport dataclasses\n'
    '@dataclasses.dataclass\nclass P:\n  x: int\n{}'
  ),
  'prints': 'print("a", end="")\n{}',
}


@pytest.mark.parametrize('row', [coding_tasks.HUMANEVAL, coding_tasks.MBPP])
@pytest.mark.parametrize('name', HONEST)
def test_an_honest_program_passes(tmp_path, row, name):
  (task,) = coding_tasks.load(tmp_path, row)
  program = HONEST[name].format('def double(x):\n  return x + x')
  assert programming.run_tests(program, task.answer) is None


@pytest.mark.parametrize(
  ('returned', 'test'),
  [
    ('(i for i in range(x))', 'list(double(2)) == [0, 1]'),
    ('range(x)', 'double(2) == range(2)'),
    ('fractions.Fraction(x, 4)', 'double(2) == 0.5'),
    ('decimal.Decimal(x)', 'str(double(2)) == "2"'),
  ],
)
def test_a_program_may_return_more_than_json_has(tmp_path, returned, test):
  (task,) = coding_tasks.load(
    tmp_path, coding_tasks.MBPP | {'test_list': [f'assert {test}']}
  )
  program = f'import decimal, fractions\ndef double(x):\n  return {returned}'
  assert programming.run_tests(program, task.answer) is None


# What a program is, and tests that Python passes.
AS_IN_PYTHON = {
  'an exception': (
    'def f(x):\n  raise ValueError("no", x)',
    'try:\n  f(1)\n  assert False\nexcept ValueError as e:\n  assert e.args == ("no", 1)',
  ),
  'an exception of its own': (
    'class Empty(KeyError):\n  pass\ndef f():\n  raise Empty("a")',
    'for kind in (Empty, KeyError, Exception):\n  try:\n    f()\n    assert 0\n'
    '  except kind as e:\n    assert e.args == ("a",)',
  ),
  'its end': ('def f():\n  raise SystemExit(3)', 'try: f()\nexcept SystemExit: pass'),
  'a list in place': (
    'def f(x):\n  x.sort()',
    'x = [[3, 1, 2]]\ny = x[0]\nassert f(y) is None and x == [[1, 2, 3]]',
  ),
  'changes of all kinds': (
    'def f(a, b, c, d, e):\n  a["k"] = 1; b.add(2); c.append(3); d.extend(b"x")\n'
    '  e["l"][0].append(4)',
    'x = ({}, set(), [], bytearray(), {"l": [[]]})\nf(*x)\n'
    'assert x == ({"k": 1}, {2}, [3], bytearray(b"x"), {"l": [[4]]})',
  ),
  'the same list': ('def f(x):\n  return x', 'x = []\nassert f(x) is x'),
  'a list in itself': ('def f(x):\n  x.append(x)', 'x = []\nf(x)\nassert x[0] is x'),
  'what is iterated over': (
    'def f(d, k):\n  return d[k]',
    'd = {"a": 1, "b": 2}\nassert [f(d, k) for k in d] == [1, 2]',
  ),
  'the keys of a dict': ('def f():\n  return {1: 2}.keys()', 'assert f() == {1}'),
  'the items of a dict': ('def f():\n  return {1: 2}.items()', 'assert f() == {(1, 2)}'),
  'a bytearray': ('def f():\n  return bytearray(b"a")', 'assert f() == b"a"'),
  'a timedelta': (
    'import datetime\ndef f():\n  return datetime.timedelta(-1, 5)',
    'assert f() == datetime.timedelta(-1, 5) and f().days == -1',
  ),
  'collections': (
    'import collections as c\ndef f():\n'
    '  return c.Counter("aab"), c.OrderedDict(a=1), c.deque([1]), c.defaultdict(int)',
    'c, o, d, e = f()\nassert c.most_common(1) == [("a", 2)] and e == {}\n'
    'o.move_to_end("a")\nd.append(2)\nassert [*d] == [1, 2]',
  ),
  'an integer of numpy': (
    'import numpy as np\ndef f():\n  return np.int64(3), np.bool_(True), np.float64(.5)',
    'a, b, c = f()\nassert (a, b, c) == (3, True, 0.5) and [7, 8, 9, 10][a] == 10',
  ),
  'an array of numpy': (
    'import numpy as np\ndef f(x):\n  return x + np.ones(2, int)',
    'import numpy\nassert (f(numpy.array([7, 2])) == [8, 3]).all()',
  ),
  'an object': (
    'class Stack:\n  def __init__(self):\n    self.items = []\n'
    '  def push(self, x):\n    self.items.append(x)\n  def __len__(self):\n'
    '    return len(self.items)\ndef f():\n  return Stack()',
    's = f()\ns.push(3)\nassert s and s.items == [3] and len(s) == 1\n'
    's.items = [1, 2]\nassert len(s) == 2',
  ),
  'objects that it compares': (
    'import dataclasses\n@dataclasses.dataclass\nclass P:\n  x: int\n'
    '  def __add__(self, p):\n    return P(self.x + p.x)\ndef f(x):\n  return P(x)',
    'assert f(1) + f(2) == P(3) and f(1) != P(2) and str(f(1)) == "P(x=1)"',
  ),
  'an object that has no length': ('class C: pass\ndef f():\n  return C()', 'assert f()'),
  'a function': ('def f(x):\n  return lambda y: x + y', 'assert f(1)(2) == 3'),
  'a type': (
    'def f(x):\n  return x, KeyError',
    'assert f(OSError) == (OSError, KeyError)',
  ),
}


@pytest.mark.parametrize('name', AS_IN_PYTHON)
def test_a_test_means_what_it_means_in_python(name):
  program, test = AS_IN_PYTHON[name]
  scope = {'datetime': datetime}
  exec(f'{program}\nimport datetime\n{test}', scope)  # It passes in Python itself.
  task = programming.make_mbpp_task('t', '', ['', test], 'f')
  assert programming.run_tests(program, task.answer) is None


def test_a_message_of_a_test_that_cannot_be_printed(tmp_path):
  test = 'assert double(2) == 4, ("wrong", double(2))'
  (task,) = coding_tasks.load(tmp_path, coding_tasks.MBPP | {'test_list': [test]})
  program = 'def double(x):\n  return 10 ** 5000'
  assert programming.run_tests(program, task.answer) == 'a test failed'


async def _play(judge, tmp_path, reply):
  (task,) = coding_tasks.load(tmp_path, coding_tasks.MBPP)
  agent = env.ToolEnv([], judge.reward, metrics=judge.metrics)
  await agent.reset(task)
  step = await agent.step(reply)
  return step.reward, step.metrics


async def test_an_episode_is_judged_in_a_process(tmp_path):
  judge = programming.Tester(seconds=120.0, processes=1)
  reply = '```python\ndef double(x):\n  return {}\n```'
  replies = (reply.format('x + x'), reply.format('x'), 'I do not know.')
  found = [await _play(judge, tmp_path, reply) for reply in replies]
  assert [reward for reward, _ in found] == [1.0, 0.0, 0.0]
  assert [metrics['answered'] for _, metrics in found] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
  ('run_tests', 'seconds', 'late'), [(graders.hang, 0.5, 1.0), (graders.leave, 60.0, 0.0)]
)
async def test_a_program_that_never_ends_or_ends_the_judge_has_failed(
  tmp_path, monkeypatch, run_tests, seconds, late
):
  monkeypatch.setattr(programming, 'run_tests', run_tests)
  judge = programming.Tester(seconds=seconds, processes=1)
  reward, metrics = await _play(judge, tmp_path, '```python\nx = 1\n```')
  assert (reward, metrics['answered'], metrics['late']) == (0.0, 1.0, late)


async def test_a_program_that_fills_the_memory_of_the_judge_has_failed(tmp_path):
  """By a number of a few bytes, with which the tests make 2 GiB."""
  test = 'assert len(bytes(double(2))) == 1 << 31'
  (task,) = coding_tasks.load(tmp_path, coding_tasks.MBPP | {'test_list': [test]})
  judge = programming.Tester(seconds=120.0, processes=1)
  reply = '```python\ndef double(x):\n  return 1 << 31\n```'
  found = await judge.metrics(task, [{'role': 'assistant', 'content': reply}])
  assert found == {'passed': 0.0, 'answered': 1.0, 'late': 0.0}
  assert programming.run_tests('def double(x):\n  return 1 << 31', task.answer) is None
  # The next one has a process that is as new.
  reward, _ = await _play(
    judge, tmp_path, '```python\ndef double(x):\n  return x + x\n```'
  )
  assert reward == 1.0


def test_a_range_that_a_program_returns_is_not_too_long(tmp_path):
  (task,) = coding_tasks.load(
    tmp_path, coding_tasks.MBPP | {'test_list': ['assert 5 in double(10)']}
  )
  judge = lambda text: programming.run_tests(
    f'def double(x):\n  return {text}', task.answer
  )
  assert judge('range(10**6)') is None
  for text in ('range(10**12)', '[range(10**30)]', '{1: range(10**6 + 1)}'):
    assert 'double returned what cannot be read' in (judge(text) or '')


def test_nothing_of_a_program_is_kept(tmp_path):
  test = 'class Kept(set):\n  def f(self): pass\nkept = Kept(double([1]))\nassert kept'
  (task,) = coding_tasks.load(
    tmp_path, coding_tasks.MBPP | {'test_list': ['assert double(2) == 4', test]}
  )
  gc.disable()
  try:
    programming.run_tests('def double(x):\n  return 2 * x', task.answer)
    assert not [o for o in gc.get_objects() if type(o).__name__ == 'Kept']
  finally:
    gc.enable()


class TestPlainValues:
  """What crosses between the judge and the program."""

  @pytest.mark.parametrize(
    'value',
    [
      *(None, True, 0, -(2**70), 0.1, float('inf'), 1 + 2j, 'é\n', b'\x00', [], ()),
      *({1, 2}, frozenset({'a'}), {(1, 'a'): [None, {'b': 2.5}]}, [[1], (2, [3])], int),
      *(range(2, 2**70, 3), fractions.Fraction(-1, 3), decimal.Decimal('1.10')),
      *(datetime.date(2026, 11, 23), datetime.time(1, 2, 3, 4)),
      datetime.datetime(2026, 11, 23, 1, tzinfo=datetime.UTC),
      *(datetime.timedelta(-1, 2, 3), bytearray(b'a'), collections.deque([1])),
      *(collections.Counter('aab'), collections.OrderedDict(b=1, a=2), KeyError),
    ],
  )
  def test_plain_values_are_as_they_were(self, value):
    data = json.loads(json.dumps(plain_values.encode(value, [])))
    found = plain_values.decode(data)
    assert found == value and type(found) is type(value)

  def test_iterators_travel_with_their_items(self):
    for value in ((x * x for x in [1, 2]), map(str, 'ab'), iter([iter([3])])):
      data = json.loads(json.dumps(plain_values.encode(value, [])))
      found = list(plain_values.decode(data))
      assert found in ([1, 4], ['a', 'b']) or list(found[0]) == [3]
    endless = plain_values.decode(plain_values.encode(itertools.count(), []))
    assert [next(endless) for _ in range(10_000)] == [*range(10_000)]
    with pytest.raises(ValueError, match='more items'):
      next(endless)

  def test_subclasses_become_plain_and_others_are_handles(self):
    flag = type('Flag', (int,), {'__eq__': lambda self, other: True, '__hash__': None})
    objects = []
    found = plain_values.decode(plain_values.encode([flag(3), sys], objects))
    assert type(found[0]) is int and found[0] == 3
    assert isinstance(found[1], plain_values.Handle) and found[1] != sys
    assert objects == [sys]
    back = plain_values.encode(found[1], [])
    assert plain_values.decode(back, objects) is sys

  @pytest.mark.parametrize(
    'data',
    [
      *({'int': 'x'}, {'nothing': 1}, {}, [1], {'int': '1', 'float': '2'}, 5),
      *({'fractions.Fraction': '1/0'}, {'decimal.Decimal': 'x'}, {'os.system': 'true'}),
      *({'range': [{'int': '1'}]}, {'a.b.c': ''}),
      {'fractions.Fraction': '1e99999'},
    ],
  )
  def test_data_that_encodes_no_value_is_an_error(self, data):
    with pytest.raises(programming._UNREADABLE):
      plain_values.decode(data)


@pytest.mark.parametrize(
  'file, solution, every, named',
  [
    ('humaneval/HumanEval.jsonl.gz', 'canonical_solution', 1, []),
    # Two of 974 whose tests build a tree of the program's nodes, and some of the others.
    ('mbpp/mbpp.jsonl.gz', 'code', 10, []),
    ('mbpp/mbpp.jsonl.gz', 'code', 0, ['mbpp/367', 'mbpp/927']),
  ],
)
def test_the_reference_solutions(data_dir, file, solution, every, named):
  path = data_dir / file
  load = programming.load_mbpp if 'mbpp' in file else programming.load_humaneval
  pairs = list(zip(load(path), documents.read_rows(path), strict=True))
  chosen = pairs[::every] if every else [p for p in pairs if p[0].id in named]
  failed = []
  for task, (_, row) in chosen:
    if programming.run_tests(row[solution], task.answer) is not None:
      failed.append(task.id)
  assert not failed and chosen
