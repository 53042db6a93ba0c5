"""Programs that try to pass without solving their task; the judge fails them."""

import coding_tasks
from confined import needs_sandbox  # noqa: F401
import pytest

from agent_r1_jax.tasks import programming

pytestmark = pytest.mark.usefixtures('needs_sandbox')

CHEATS = {
  'it exits with 0': 'import sys\nsys.exit(0)',
  'it ends the process': 'import os\nos._exit(0)',
  'it ends the process when asked': 'def double(x):\n  import os\n  os._exit(0)',
  'it becomes another program': 'import os\nos.execv("/bin/true", ["true"])',
  'an equal of everything': (
    'class E:\n  def __eq__(self, other):\n    return True\n'
    'class L(list):\n  def __eq__(self, other):\n    return True\n'
    'def double(x):\n  return E()'
  ),
  'a list that equals everything': (
    'class L(list):\n  def __eq__(self, other):\n    return True\n'
    'def double(x):\n  return L()'
  ),
  'patched builtins': (
    'import builtins\nbuiltins.AssertionError = Warning\nbuiltins.sum = lambda x: 0\n'
    'def double(x):\n  return 5'
  ),
  'a helper of the tests': 'def helper(x):\n  return 0\ndef double(x):\n  return 0 * x',
  'the check itself': 'def check(f):\n  pass\ndef double(x):\n  return 5',
  'a builtin of the tests': 'def double(x):\n  return 5\n__builtins__ = None',
  'the frames of the judge': (
    'import sys\ndef double(x):\n  f = sys._getframe()\n'
    '  while f:\n    f.f_globals["double"] = lambda x: 2 * x\n    f = f.f_back\n'
    '  return 5'
  ),
  'what the judge reads': (
    'def double(x):\n  print("null", flush=True)\n  import os\n'
    '  os.write(1, b"\\ntrue\\n")\n  return 5'
  ),
  'the tests in a file': 'def double(x):\n  return open("rows.jsonl").read()',
  'a lying class': (
    'class C:\n  __class__ = int\n  def __index__(self): return 4\n'
    '  def __eq__(self, other): return True\ndef double(x):\n  return C()'
  ),
  'a number that equals everything': (
    'class N(int):\n  def __eq__(self, other): return True\n  __hash__ = None\n'
    'def double(x):\n  return N(5)'
  ),
  'a text that equals everything': (
    'class S(str):\n  def __eq__(self, other): return True\n'
    '  def __str__(self): return self\ndef double(x):\n  return S("5")'
  ),
  'an iterator that equals everything': (
    'class I:\n  def __next__(self): raise StopIteration\n'
    '  def __eq__(self, other): return True\ndef double(x):\n  return I()'
  ),
  'its own values': (
    '_judge_values["encode"] = lambda *a: {"object": 0}\ndef double(x):\n  return 5'
  ),
  'its own JSON': (
    'import json\njson.dumps = lambda *a: "{\\"handle\\": 0}"\ndef double(x):\n  return 5'
  ),
  'no JSON': '_judge_values["print"] = lambda *a: None\ndef double(x):\n  return 4',
  'a thread that prints': (
    'import threading\ndef f():\n  while True: print("null", flush=True)\n'
    'threading.Thread(target=f, daemon=True).start()\ndef double(x):\n  return 5'
  ),
  'the word of the worker': (
    'import os\ndef double(x):\n  for f in range(3, 9):\n    try: os.write(f, b"0000")\n'
    '    except OSError: pass\n  return 5'
  ),
  'closed files': 'import os\ndef double(x):\n  os.closerange(0, 64)\n  return 5',
  'an assertion of its own': 'def double(x):\n  raise AssertionError("passed")',
  'the end of the process': 'def double(x):\n  raise SystemExit(0)',
  'an interruption': 'def double(x):\n  raise KeyboardInterrupt',
  'the end of an iteration': 'def double(x):\n  raise StopIteration',
  'a signal to itself': 'import os\ndef double(x):\n  os.kill(os.getpid(), 9)',
  'a signal to the judge': 'import os\ndef double(x):\n  os.kill(os.getppid(), 9)',
  'the memory of the judge': (
    'import os\ndef double(x):\n  return open(f"/proc/{os.getppid()}/mem", "rb").read(9)'
  ),
  'no end': 'def double(x):\n  return double(x)',
  'a list in itself': 'def double(x):\n  x = []\n  x.append(x)\n  return x',
  'a deep list': (
    'def double(x):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x'
  ),
  'much memory': 'def double(x):\n  return bytearray(1 << 30)',
  'a long text': 'def double(x):\n  return "a" * (2 << 20)',
  'a flood': 'def double(x):\n  while True: print("a" * (1 << 20))',
  'a thing that has all': (
    'class E:\n  def __getattr__(self, name): return lambda *a: True\n'
    '  __eq__ = __lt__ = __gt__ = __contains__ = __bool__ = lambda *a: True\n'
    'def double(x):\n  return E()'
  ),
  'an array of too many': (
    'class A:\n  pass\nA.__module__, A.__name__ = "numpy", "generic"\n'
    'class D: str = "i8"\nA.dtype, A.shape = D, (1 << 40,)\n'
    'A.ravel = lambda self: self\nA.tolist = lambda self: [1]\n'
    'def double(x):\n  return A()'
  ),
  'an exception that ends the judge': 'def double(x):\n  raise GeneratorExit',
  'no memory': 'def double(x):\n  raise MemoryError',
  'no number': 'def double(x):\n  return float("nan")',
  'a number of no sense': (
    'import decimal\ndef double(x):\n  return decimal.Decimal("sNaN")'
  ),
  'a coroutine': 'async def double(x):\n  return 2 * x',
  'a class': 'class double:\n  def __init__(self, x): pass\n  __eq__ = lambda *_: True',
  'names that are none': (
    '_judge_values["globals"] = lambda: {"double": 0, "x = 1; double": 0, 5: 0}\n'
    'def double(x):\n  return 5'
  ),
  'the garbage': (
    'import gc\ndef double(x):\n'
    '  return [o for o in gc.get_objects() if "candidate" in str(o)][0]'
  ),
}


@pytest.mark.parametrize('sign', '+-')
def test_an_object_does_not_say_how_far_it_is_from_the_right_answer(sign):
  program = 'class D:\n  def __sub__(self, other): return 0.0\n  __add__ = __sub__\n'
  program += 'def double(x):\n  return D()'
  test = f'assert abs(double(2) {sign} 4) < 1e-6'
  answer = {'entry_point': 'double', 'prompt': '', 'tests': [test]}
  assert 'TypeError' in programming.run_tests(program, answer)


@pytest.mark.parametrize(
  'asked', ['startswith("4")', 'isdigit()', 'issubset({4})', 'is_integer()']
)
def test_an_object_does_not_say_what_only_a_value_can(asked):
  program = 'class D:\n  def __getattr__(self, name): return lambda *a: True\n'
  program += 'def double(x):\n  return D()'
  test = f'assert double(2).{asked}'
  answer = {'entry_point': 'double', 'prompt': '', 'tests': [test]}
  assert 'AttributeError' in programming.run_tests(program, answer)


# Names that a program of MBPP defines, and what its tests mean by them.
SHADOWS = {
  'a builtin': ('set = lambda x: 0', 'set(double([1])) == set([1, 1, 2])'),
  'a builtin function': ('def len(x):\n  return 0', 'len(double([1])) == len([1, 1])'),
  'an exception': (
    'class AssertionError(Exception):\n  pass',
    'isinstance(double([1]), AssertionError)',
  ),
  'a module': (
    'class math:\n  def isclose(a, b):\n    return True',
    'math.isclose(double(1), 2)',
  ),
  'all builtins': (
    '_judge_values["before"] = {}\n__builtins__ = {"set": lambda x: 0}',
    'set(double([1])) == set([1, 1, 2])',
  ),
}


@pytest.mark.parametrize('name', SHADOWS)
def test_the_names_of_a_program_are_not_those_of_its_tests(tmp_path, name):
  shadow, test = SHADOWS[name]
  (task,) = coding_tasks.load(
    tmp_path, coding_tasks.MBPP | {'test_list': [f'assert {test}']}
  )
  program = f'{shadow}\ndef double(x):\n  return 5'
  assert programming.run_tests(program, task.answer) is not None


def test_what_only_the_program_defines_its_tests_may_call(tmp_path):
  (task,) = coding_tasks.load(
    tmp_path, coding_tasks.MBPP | {'test_list': ['assert double(half(4)) == 4']}
  )
  program = 'def half(x):\n  return x // 2\ndef double(x):\n  return 2 * x'
  assert programming.run_tests(program, task.answer) is None


@pytest.mark.parametrize('row', [coding_tasks.HUMANEVAL, coding_tasks.MBPP])
@pytest.mark.parametrize('name', CHEATS)
def test_a_cheat_fails(tmp_path, row, name):
  (task,) = coding_tasks.load(tmp_path, row)
  assert programming.run_tests(CHEATS[name], task.answer) is not None
