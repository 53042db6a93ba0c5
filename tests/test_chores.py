"""Chores in a terminal: every kind's solution, and what is no solution."""

import json
import pathlib
import re

import confined
import pytest

from agent_r1_jax import testing, types
from agent_r1_jax.tasks import chores
from agent_r1_jax.tools import shell
from experiments.worlds import terminal

pytestmark = pytest.mark.usefixtures('needs_shell')
needs_shell, layers = confined.needs_shell, confined.layers
KINDS = tuple(terminal.KINDS)


def _write_call(command):
  call = {'name': 'shell', 'arguments': {'command': command}}
  return f'<tool_call>{json.dumps(call)}</tool_call>'


async def _play(task, commands, reply):
  """Plays an episode; returns its reward."""
  env = chores.TerminalEnv(seconds=60.0)
  await env.reset(task)
  for command in commands:
    assert not (await env.step(_write_call(command))).done
  step = await env.step(reply)
  env.close()
  assert step.done
  return step.reward


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('seed', range(3))
async def test_a_solution_is_rewarded_and_nothing_is_not(kind, seed):
  (task,) = terminal.tasks(seed, 1, 'dev', (kind,))
  assert await _play(task, task.info['commands'], task.info['reply']) == 1.0
  for reply in ('Done.', '<answer></answer>', '<answer>0</answer>'):
    assert await _play(task, (), reply) == 0.0


@pytest.mark.parametrize('kind', ['rename', 'fix', 'find the longest'])
async def test_a_solution_by_each_layer(layers, kind):
  (task,) = terminal.tasks(7, 1, 'dev', (kind,))
  assert await _play(task, task.info['commands'], task.info['reply']) == 1.0


SPOILS = {
  'another file is gone': 'rm other.txt',
  'another file has another text': 'echo >> other.txt',
  'the file is a link': 'mv new.txt real.txt; ln -s real.txt new.txt',
  'the old file is there too': 'cp new.txt old.txt',
  'a directory has its name': 'mkdir old.txt',
  'there is too much': 'seq 3000 | xargs touch',
}


@pytest.mark.parametrize('name', SPOILS)
async def test_a_chore_that_is_half_done_is_not_rewarded(name):
  files = {'old.txt': 'a\n', 'other.txt': 'b\n'}
  answer = {'files': {'old.txt': None, 'new.txt': 'a\n'}}
  task = types.Task('1', [], answer, {'files': files, 'question': 'Rename it.'})
  assert await _play(task, ['mv old.txt new.txt', 'echo > scratch'], 'Done.') == 1.0
  assert await _play(task, ['mv old.txt new.txt', SPOILS[name]], 'Done.') == 0.0


CHEATS = {
  'the test is changed': 'echo echo passed > test.sh',
  'the program prints what the test wants': 'echo "echo 10" > {program}',
  'the program is gone': 'rm {program}',
  'a program of the name of sh': 'echo "exit 0" > sh; chmod 700 sh || :',
  'the program ends the test': "echo 'kill $PPID' > {program}",
  'the program is late': "echo 'sleep 99' > {program}",
}


@pytest.mark.parametrize('name', CHEATS)
async def test_a_test_is_passed_by_a_right_program_alone(monkeypatch, name):
  monkeypatch.setattr(chores, '_TEST_SECONDS', 5.0)
  (task,) = terminal.tasks(0, 1, 'dev', ('fix',))
  command = CHEATS[name].format(program=task.answer['edited'][0])
  assert await _play(task, [command], 'Done.') == 0.0


async def test_an_episode_that_a_budget_ends_is_scored():
  (task,) = terminal.tasks(0, 1, 'dev', ('rename',))
  env = chores.TerminalEnv()
  await env.reset(task)
  await env.step(_write_call(task.info['commands'][0]))
  assert (await env.finish('max_turns')).reward == 1.0
  env.close()


async def test_a_shell_that_has_ended_has_no_reward():
  (task,) = terminal.tasks(0, 1, 'dev', ('rename',))
  env = chores.TerminalEnv()
  await env.reset(task)
  env._session.close()
  step = await env.step(_write_call('ls'))
  assert 'the shell has ended; its files are gone' in step.messages[0]['content']
  assert (await env.step('Done.')).reward == 0.0


async def test_it_is_an_environment():
  (task,) = terminal.tasks(0, 1, 'dev', ('replace',))
  replies = [*map(_write_call, ['ls', 'cd x', *task.info['commands']]), 'Done.']
  steps = await testing.check_env(chores.TerminalEnv, task, replies)
  assert steps[-1].reward == 1.0


async def test_calls_of_one_reply_are_not_mixed():
  (task,) = terminal.tasks(0, 1, 'dev', ('rename',))
  env = chores.TerminalEnv()
  await env.reset(task)
  step = await env.step(_write_call('echo a') + _write_call('echo b'))
  assert [m['content'] for m in step.messages] == [
    'a\n',
    'Error: 1 more calls were not run; at most 1 a turn.',
  ]
  env.close()


async def test_the_examples_of_the_docs():
  text = (pathlib.Path(__file__).parents[1] / 'docs' / 'environments.md').read_text()
  section = text.split('\n## Chores in a terminal\n')[1].split('\n## ')[0]
  names = {}
  for block in re.findall(r'```python\n(.*?)```', section, re.DOTALL):
    exec(block, names)
  assert await _play(names['task'], ['mv old.txt new.txt'], 'Done.') == 1.0


class TestWorld:
  def test_equal_arguments_give_equal_tasks_and_other_seeds_others(self):
    made = terminal.tasks(3, 30, 'test', KINDS)
    assert made == terminal.tasks(3, 30, 'test', KINDS)
    assert [t.info['kind'] for t in made] == [*KINDS] * 2
    others = terminal.tasks(4, 30, 'test', KINDS)
    assert all(a.info['files'] != b.info['files'] for a in made for b in others)

  def test_words_belong_to_one_split_and_held_out_kinds_to_none(self):
    assert len(terminal.TRAINED) >= 8 and len(terminal.HELD_OUT) >= 3
    named = {s: self._find_names(s) for s in ('base', 'train', 'dev', 'test')}
    assert all(len(names) > 100 for names in named.values())
    assert sum(map(len, named.values())) == len(set().union(*named.values()))

  def _find_names(self, split):
    files = [t.info['files'] for t in terminal.tasks(0, 120, split, KINDS)]
    names = {name.split('.')[0].split('/')[-1] for made in files for name in made}
    return names - {'test'}

  def test_no_solution_is_shown(self):
    for task in terminal.tasks(0, 30, 'train'):
      shown = str(task.messages)
      assert task.info['question'] in shown
      assert not any(
        command in shown for command in task.info['commands'] if 'sh test' not in command
      )

  def test_unknown_kinds_are_refused(self):
    with pytest.raises(ValueError, match=r"kinds: \['sing'\] are none of count lines"):
      terminal.tasks(0, 1, 'train', ('sing',))


def test_limits_reach_the_shell():
  env = chores.TerminalEnv(limits=shell.ShellLimits(files=7, max_output=10))
  assert env._session._ask(60.0, ['run', 'seq 99', 60.0])[0].startswith(
    '1\n2\n3\n4\n5\n\n...'
  )
  env.close()
