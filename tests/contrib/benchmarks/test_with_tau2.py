"""All telecom tasks of tau2-bench, from the checkout that TAU2_BENCH names.

`make test-with-tau2 TAU2_BENCH=FOLDER` runs it.
"""

import collections
import os
import sys

import benchmark_mutants
import pytest
import with_package

from agent_r1_jax.contrib.benchmarks import tau

FOLDER = os.environ.get('TAU2_BENCH', '')
pytestmark = pytest.mark.skipif(
  not (with_package.PYTHON and FOLDER),
  reason='`make test-with-tau2 TAU2_BENCH=FOLDER` installs what tau2-bench needs',
)
DONE = benchmark_mutants.write([[tau.DONE, {}]])


@pytest.fixture(scope='module', autouse=True)
def packages():
  sys.path.append(with_package.site_packages())
  yield
  sys.path.pop()


def test_the_tests_that_need_it():
  line = with_package.run_tests('tests/contrib/benchmarks/test_tau.py')
  assert ' passed' in line and 'skipped' not in line


async def test_solutions_are_rewarded_and_mutants_are_not():
  """The mutants that are: needless restarts, and another summary for a human agent."""
  passed, played = collections.Counter(), collections.Counter()
  for task in tau.load(FOLDER, 'base'):
    mutants = benchmark_mutants.mutate([task.answer])
    for kind, (calls,) in [('solution', [task.answer]), *mutants]:
      replies = [*(benchmark_mutants.write([call]) for call in calls), DONE]
      played[kind] += 1
      passed[kind] += int(await benchmark_mutants.play(tau.SoloEnv(), task, replies))
  assert played == {'solution': 114, 'no call': 114, 'dropped': 516, 'changed': 430}
  assert passed == {'solution': 114, 'no call': 0, 'dropped': 7, 'changed': 20}


async def test_all_solutions_are_rewarded():
  tasks = tau.load(FOLDER, 'full')
  rewards = [
    await benchmark_mutants.play(tau.SoloEnv(), task, tau.solve(task)) for task in tasks
  ]
  assert len(tasks) == sum(rewards) == 2285
