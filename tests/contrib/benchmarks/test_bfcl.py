"""BFCL's multi-turn tasks: solutions, and what is none; hostile calls."""

import asyncio
import json
import re
import sys
import threading
import time

import benchmark_mutants
import pytest
import script

from agent_r1_jax import testing
from agent_r1_jax.contrib.benchmarks import bfcl

play, write = benchmark_mutants.play, benchmark_mutants.write


@pytest.fixture(scope='module')
def tasks():
  pytest.importorskip('bfcl_eval', reason='`make test-with-bfcl` installs bfcl-eval')
  return {t.id: t for c in bfcl.CATEGORIES for t in bfcl.load(c)}


def test_a_missing_package_says_how_it_is_installed(refused, monkeypatch):
  monkeypatch.setitem(sys.modules, 'bfcl_eval', None)
  with refused('eval', ModuleNotFoundError):
    bfcl.load()


def test_wrong_names_are_refused(refused, tmp_path):
  with refused('multi_turn_ba'):
    bfcl.load('simple')
  with refused('BFCL_v4_multi_turn_base', FileNotFoundError):
    bfcl.load(folder=tmp_path)


def test_a_command_names_what_is_missing(tmp_path):
  command = ['experiments.evaluate', '--task=bfcl-multi-turn', f'--data={tmp_path}']
  done = script.run('-m', *command, timeout=120)
  assert done.returncode in (1, 2) and 'Traceback' not in done.stderr
  said = 'pip install --no-deps bfcl-eval==|give a folder of the data of BFCL'
  assert re.search(said, done.stderr)


def test_all_tasks_but_five_are_offered(tasks):
  assert len(tasks) == 800 - len(bfcl.NOT_OFFERED) == 795
  assert not set(bfcl.NOT_OFFERED) & set(tasks)


# One whose arguments an API keeps and changes later; one that gets functions late; one
# that asks for what is missing; one with long results.
SOME = ('base_147', 'base_0', 'miss_func_2', 'miss_param_5', 'long_context_110')


@pytest.mark.parametrize('name', SOME)
async def test_a_solution_passes_and_less_does_not(tasks, name):
  task = tasks[f'multi_turn_{name}']
  steps = await testing.check_env(bfcl.MultiTurnEnv, task, bfcl.solve(task))
  assert steps[-1].reward == steps[-1].metrics['turns_passed'] == 1.0
  one_by_one = [
    reply for turn in task.answer for reply in (*(write([c]) for c in turn), 'Done.')
  ]
  assert await play(bfcl.MultiTurnEnv(), task, one_by_one) == 1.0
  assert await play(bfcl.MultiTurnEnv(), task, one_by_one[:-1]) == 0.0
  assert await play(bfcl.MultiTurnEnv(), task, ['Done.'] * len(task.answer)) == 0.0


async def test_states_and_results_are_both_compared(tasks):
  task = tasks['multi_turn_base_1']
  solution = bfcl.solve(task)
  more = [*task.answer[0], ['mkdir', {'dir_name': 'more'}]]
  assert await play(bfcl.MultiTurnEnv(), task, [write(more), *solution[1:]]) == 0.0
  (index,) = (i for i, turn in enumerate(task.answer) if turn[-1][0] == 'grep')
  solution[2 * index] = write(task.answer[index][:-1])
  assert await play(bfcl.MultiTurnEnv(), task, solution) == 0.0


async def test_calls_of_a_reply_run_one_after_another(tasks, monkeypatch):
  task, call = tasks['multi_turn_base_0'], bfcl._Apis.call

  def slow(apis, name, arguments):
    if name == 'mkdir':
      time.sleep(0.2)
    return call(apis, name, arguments)

  monkeypatch.setattr(bfcl._Apis, 'call', slow)
  assert await play(bfcl.MultiTurnEnv(), task, bfcl.solve(task)) == 1.0


async def test_a_check_that_waits_for_others_holds_nobody_up(tasks):
  env, task = bfcl.MultiTurnEnv(), tasks['multi_turn_base_0']
  await env.reset(task)
  bfcl._LOCK.acquire()
  late = threading.Timer(60, bfcl._LOCK.release)  # Else it would hang this loop for ever.
  late.start()
  step = asyncio.ensure_future(env.step('I will not.'))
  done, _ = await asyncio.wait([step], timeout=0.2)
  late.cancel()
  bfcl._LOCK.release()
  assert not done and (await step).reward == 0.0


async def test_new_apis_are_made_in_a_thread(tasks, monkeypatch):
  threads = []

  class Apis(bfcl._Apis):
    def __init__(self, task):
      threads.append(threading.get_ident())
      super().__init__(task)

  monkeypatch.setattr(bfcl, '_Apis', Apis)
  await bfcl.MultiTurnEnv().reset(tasks['multi_turn_base_0'])
  assert len(threads) == 2 and threading.get_ident() not in threads


async def test_the_turn_that_fails_is_the_last(tasks):
  task = tasks['multi_turn_base_0']
  env = bfcl.MultiTurnEnv()
  await env.reset(task)
  for reply in bfcl.solve(task)[:2]:
    step = await env.step(reply)
  assert step.messages == task.info['requests'][1]
  step = await env.step('I will not.')
  assert step.done and step.reward == 0.0
  assert step.metrics['turns_passed'] == 1 / 4


async def test_functions_that_come_late_are_told_and_not_there_before(tasks):
  task = tasks['multi_turn_miss_func_2']
  (turn, names) = next(iter(task.info['late'].items()))
  env = bfcl.MultiTurnEnv()
  await env.reset(task)
  assert not {tool.name for tool in env.tools} & {*names}
  step = await env.step(write([['cp', {'source': 'a', 'destination': 'b'}]]))
  assert 'there is no tool "cp"' in step.messages[0]['content']
  replies = bfcl.solve(task)
  told = [m for r in replies for m in (await env.step(r)).messages if m['role'] == 'user']
  assert {tool.name for tool in env.tools} >= {*names}
  functions, _, words = told[int(turn) - 1]['content'].rpartition('\n')
  assert {f['name'] for f in json.loads(functions)} == {*names}
  assert words.startswith('I have updated some more functions')


async def test_a_turn_of_too_many_replies_fails(tasks):
  task = tasks['multi_turn_base_1']
  (call,), *_ = task.answer
  for replies, passed in ((bfcl.MAX_REPLIES, 1), (bfcl.MAX_REPLIES + 1, 0)):
    env = bfcl.MultiTurnEnv()
    await env.reset(task)
    for _ in range(replies):
      await env.step(write([call]))
    assert (await env.step('Done.')).done == (not passed)


NO_NUMBER = 'must be a number of at most'
NOT_FINITE = 'a number is not finite'
HOSTILE = {
  'a power of a billion': ('power', {'base': 2, 'exponent': 10**9}, NO_NUMBER),
  'a long number': ('power', {'base': 10**18, 'exponent': 1000}, 'Exceeds the limit'),
  'NaN': ('add', {'a': float('nan'), 'b': 1}, NOT_FINITE),
  'infinity in a list': ('mean', {'numbers': [1, float('inf')]}, NOT_FINITE),
  'digits': ('square_root', {'number': 2, 'precision': 10**9}, NO_NUMBER),
  'more digits': ('round_number', {'number': 5, 'decimal_places': -(10**9)}, NO_NUMBER),
  'a text': ('add', {'a': '1', 'b': 1}, "'1' is not of type 'number'"),
  'an unknown argument': ('add', {'a': 1, 'b': 1, 'c': 1}, "unknown argument 'c'"),
  'a missing argument': ('add', {'a': 1}, "'b' is a required property"),
  'a private method': ('_load_scenario', {'scenario': {}}, 'there is no tool'),
  'a special method': ('__init__', {}, 'there is no tool'),
  'code': ('__import__("os").system("true")', {}, 'there is no tool'),
  'division by zero': ('power', {'base': 0, 'exponent': -1}, 'Error during execution'),
  'a long text': ('cat', {'file_name': 'x' * 10**6}, 'cut: 1,000,047 characters'),
}


@pytest.mark.parametrize('name', HOSTILE)
async def test_hostile_calls_are_answered(tasks, name):
  function, arguments, answer = HOSTILE[name]
  # A task with both classes.
  task = next(
    t for t in tasks.values() if {'MathAPI', 'GorillaFileSystem'} <= {*t.info['classes']}
  )
  env = bfcl.MultiTurnEnv()
  await env.reset(task)
  step = await env.step(write([[function, arguments]]))
  assert answer in step.messages[0]['content'] and not step.done


async def test_a_file_system_does_not_grow_without_bound(tasks):
  """Each round puts two copies of a directory into a new one."""
  env = bfcl.MultiTurnEnv()
  await env.reset(tasks['multi_turn_base_0'])
  await env.step(write([['mkdir', {'dir_name': 'd0'}]]))
  for i in range(20):
    a, b, c = f'd{i}', f'e{i}', f'd{i + 1}'
    calls = [
      ['cp', {'source': a, 'destination': b}],
      ['mkdir', {'dir_name': c}],
      ['mv', {'source': a, 'destination': c}],
      ['mv', {'source': b, 'destination': c}],
    ]
    step = await env.step(write(calls))
  assert 'the file system is full' in step.messages[-1]['content']
  assert (await env.step('Done.')).reward == 0.0


async def test_calls_leave_the_precision_of_others_alone(tasks):
  import decimal

  import mpmath

  task = next(t for t in tasks.values() if 'MathAPI' in t.info['classes'])
  env = bfcl.MultiTurnEnv()
  await env.reset(task)
  call = ['logarithm', {'value': 2, 'base': 10, 'precision': 40}]
  step = await env.step(write([call, ['square_root', {'number': 2, 'precision': 3}]]))
  assert "mpf('0.30102999566398119521373889472449302676" in step.messages[0]['content']
  assert "Decimal('1.41')" in step.messages[1]['content']
  assert mpmath.mp.dps == 15 and decimal.getcontext().prec == 28
