"""All multi-turn tasks of BFCL, and the verdicts of its own checker.

`make test-with-bfcl` runs it.
"""

import collections
import importlib
import itertools
import sys

import benchmark_mutants
import pytest
import with_package

from agent_r1_jax.contrib.benchmarks import bfcl

pytestmark = pytest.mark.skipif(
  not with_package.PYTHON, reason='`make test-with-bfcl` installs bfcl-eval'
)
# A dropped call that another one makes needless, and arguments that the APIs read only
# in part, such as a text that is no number.
SURVIVORS = {
  'multi_turn_base': {'dropped': 1, 'changed': 132},
  'multi_turn_miss_func': {'dropped': 1, 'changed': 130},
  'multi_turn_miss_param': {'dropped': 1, 'changed': 132},
  'multi_turn_long_context': {'changed': 131},
}


def test_the_tests_that_need_it():
  line = with_package.run_tests('tests/contrib/benchmarks/test_bfcl.py')
  assert ' passed' in line and 'skipped' not in line


@pytest.fixture(scope='module')
def checker():
  """BFCL's checker, which evaluates calls as Python; ours are of its own answers."""
  sys.path.append(with_package.site_packages())
  package = 'bfcl_eval.eval_checker.multi_turn_eval'
  multi_turn_checker = importlib.import_module(f'{package}.multi_turn_checker')
  multi_turn_utils = importlib.import_module(f'{package}.multi_turn_utils')
  folder, numbers = bfcl._package_folder() / 'data', itertools.count()
  read = lambda *path: {row['id']: row for row in bfcl._read(folder.joinpath(*path))}
  names = [f'BFCL_v4_{category}.json' for category in bfcl.CATEGORIES]
  rows = {id_: row for name in names for id_, row in read(name).items()}
  answers = {id_: x for n in names for id_, x in read('possible_answer', n).items()}

  def check(task, turns):
    before = set(vars(multi_turn_utils))
    # A step of a turn is a list of the texts of its calls.
    said = [[[_write(*call) for call in turn]] if turn else [] for turn in turns]
    right = answers[task.id]['ground_truth']
    name = f'model_{next(numbers)}'
    found = multi_turn_checker.multi_turn_checker(said, right, rows[task.id], '', name)
    for made in set(vars(multi_turn_utils)) - before:  # It keeps all that it made.
      delattr(multi_turn_utils, made)
    return found['valid']

  yield check
  sys.path.pop()


def _write(name, arguments):
  return f'{name}({", ".join(f"{key}={value!r}" for key, value in arguments.items())})'


@pytest.mark.parametrize('category', bfcl.CATEGORIES)
async def test_solutions_pass_and_mutants_are_judged_as_bfcl_judges(checker, category):
  passed, played = collections.Counter(), collections.Counter()
  for task in bfcl.load(category):
    mutants = benchmark_mutants.mutate(task.answer)
    for kind, turns in [('solution', task.answer), *mutants]:
      replies = [
        reply
        for turn in turns
        for reply in ([benchmark_mutants.write(turn)] * bool(turn) + ['Done.'])
      ]
      reward = await benchmark_mutants.play(bfcl.MultiTurnEnv(), task, replies)
      played[kind] += 1
      passed[kind] += int(reward)
      assert checker(task, turns) == bool(reward), (task.id, turns)
  assert passed['solution'] == played['solution'] == played['no call'] >= 198
  assert {k: n for k, n in passed.items() if n and k != 'solution'} == SURVIVORS[category]
  print(category, dict(played), dict(passed))
