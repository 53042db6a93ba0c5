"""tau2-bench's telecom tasks: solutions, and what is none; hostile calls."""

import os
import pathlib
import time

import benchmark_mutants
import pytest
import script

from agent_r1_jax import testing
from agent_r1_jax.contrib.benchmarks import tau

write, play = benchmark_mutants.write, benchmark_mutants.play
DONE = write([[tau.DONE, {}]])


@pytest.fixture(scope='module')
def tasks():
  if not (folder := os.environ.get('TAU2_BENCH')):
    pytest.skip('TAU2_BENCH names no checkout of tau2-bench')
  pytest.importorskip('loguru', reason='`make test-with-tau2` installs its requirements')
  return tau.load(folder)


def test_wrong_names_are_refused(refused, tmp_path):
  with refused('github.com', FileNotFoundError):
    tau.load(tmp_path)
  with refused('dev'):
    tau.load(tmp_path, 'dev')
  with refused("policy is 'x'; give"):
    tau.load(tmp_path, policy='x')


def test_a_command_says_that_a_folder_is_no_checkout(tmp_path):
  command = ['experiments.evaluate', '--task=tau2-telecom', f'--data={tmp_path}']
  done = script.run('-m', *command, timeout=120)
  assert done.returncode in (1, 2) and 'Traceback' not in done.stderr
  assert 'is no checkout of github.com' in done.stderr


def test_a_second_checkout_is_refused(tmp_path, tasks):
  (tmp_path / 'src' / 'tau2' / 'domains' / 'telecom').mkdir(parents=True)
  with pytest.raises(ValueError, match='tau2 is already imported from'):
    tau.load(tmp_path)


def test_the_prompt_has_the_policy_and_the_ticket(tasks):
  (message,) = tasks[0].messages
  assert len(tasks) == 114 and message['role'] == 'system'
  assert '`done` tool' in message['content'] and '<main_policy>' in message['content']
  assert tasks[0].info['row']['ticket'] in message['content']
  domain = (
    pathlib.Path(os.environ['TAU2_BENCH']) / 'data' / 'tau2' / 'domains' / 'telecom'
  )
  assert (domain / 'main_policy_solo.md').read_text() in message['content']


async def test_a_solution_is_rewarded_and_less_is_not(tasks):
  task = next(t for t in tasks if len(t.answer) == 3)
  steps = await testing.check_env(tau.SoloEnv, task, tau.solve(task))
  assert steps[-1].reward == steps[-1].metrics['passed'] == 1.0
  assert steps[-1].metrics['ended'] == 1.0
  solution = tau.solve(task)
  assert await play(tau.SoloEnv(), task, [DONE]) == 0.0
  assert await play(tau.SoloEnv(), task, [*solution[1:-1], DONE]) == 0.0
  # Only who says so has ended.
  assert await play(tau.SoloEnv(), task, solution[:-1]) == 0.0
  assert await play(tau.SoloEnv(), task, [*solution[:-1], 'Solved.']) == 0.0
  assert await play(tau.SoloEnv(), task, [DONE + ''.join(solution[:-1])]) == 0.0


async def test_calls_of_a_reply_run_one_after_another(tasks, monkeypatch):
  task, ask = next(t for t in tasks if len(t.answer) == 3), tau.SoloEnv._ask

  def slow(env, name, arguments):
    time.sleep(0.2 if name == task.answer[0][0] else 0.0)
    return ask(env, name, arguments)

  monkeypatch.setattr(tau.SoloEnv, '_ask', slow)
  env = tau.SoloEnv()
  assert await play(env, task, [''.join(tau.solve(task))]) == 1.0
  assert [m.tool_calls[0].name for m in env._said[::2]] == [c[0] for c in task.answer]


async def test_who_cannot_solve_a_ticket_hands_it_on(tasks):
  hand_on = ['transfer_to_human_agents', {'summary': 'no'}]
  task = next(t for t in tasks if t.answer[0][0] == hand_on[0])
  assert await play(tau.SoloEnv(), task, [DONE]) == 0.0
  assert await play(tau.SoloEnv(), task, [write([hand_on]), DONE]) == 1.0


HOSTILE = {
  'NaN': ('refuel_data', {'gb_amount': float('nan')}, 'a number is not finite'),
  'a huge number': ('refuel_data', {'gb_amount': 10**400}, 'must be a number of at most'),
  'a text': ('refuel_data', {'gb_amount': 'all'}, "'all' is not of type 'number'"),
  'nothing': ('refuel_data', None, 'is a required property'),
  'another argument': ('toggle_roaming', {'x': 1}, "unknown argument 'x'"),
  'a private method': ('_get_line_by_phone', {'phone_number': '1'}, 'there is no tool'),
  'what only tasks may call': ('set_user_info', {}, 'there is no tool'),
  'nobody': ('get_customer_by_id', {'customer_id': 'x' * 10**5}, 'Error: Customer'),
  'another choice': ('set_network_mode_preference', {'mode': {'a': []}}, 'not valid'),
}


@pytest.mark.parametrize('name', HOSTILE)
async def test_hostile_calls_are_answered(tasks, name):
  function, arguments, answer = HOSTILE[name]
  if function == 'refuel_data':
    line = {'customer_id': 'C1001', 'line_id': 'L1001'}
    arguments = line | arguments if arguments else {}
  env = tau.SoloEnv()
  await env.reset(tasks[0])
  for _ in range(tau.MAX_ERRORS - 1):
    step = await env.step(write([[function, arguments]]))
    assert answer in step.messages[0]['content'] and not step.done
  # With so many errors it ends.
  assert (await env.step(write([[function, arguments]]))).done
