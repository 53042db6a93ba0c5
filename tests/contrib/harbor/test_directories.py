"""Tasks that are directories: what is read, refused, played, judged and checked."""

import json
import re
import threading
from unittest import mock

import confined
import directory_tasks
import pytest

from agent_r1_jax import testing
from agent_r1_jax.contrib.harbor import directories, task_folders
from agent_r1_jax.tools import shell

pytestmark = pytest.mark.usefixtures('needs_shell')
needs_shell, layers = confined.needs_shell, confined.layers


def call(command):
  call = {'name': 'shell', 'arguments': {'command': command}}
  return f'<tool_call>{json.dumps(call)}</tool_call>'


@pytest.fixture
def workspace(tmp_path):
  """Opens workspaces, with changed files, in which the task is laid."""
  opened = []

  def lay(changes=None, **limits):
    folder = directory_tasks.write(tmp_path / f'task{len(opened)}', changes)
    made = directories.Workspace(shell.ShellLimits(**limits))
    opened.append(made)
    made.lay(task_folders.read(folder))
    return made

  yield lay
  for made in opened:
    made.close()


def test_a_folder_becomes_a_task(tmp_path):
  directory_tasks.write(tmp_path / 'b')
  directory_tasks.write(
    tmp_path / 'a', {'instruction.md': 'Another.', 'environment/Dockerfile': None}
  )
  first, second = directories.load(tmp_path)
  assert (first.id, second.id) == ('a', 'b')
  assert second.messages == [
    {'role': 'user', 'content': directory_tasks.FILES['instruction.md']}
  ]
  (same,) = directories.load(tmp_path / 'b')
  assert same == second
  assert directories.DirectoryEnv.least_limits(mock.Mock(), second) == {
    'step_seconds': 80.0,
    'episode_seconds': 140.0,
  }
  read = directories.read(second)
  assert read.files == {
    '/app/in.txt': '42\n',
    '/data/deep/where.sh': directory_tasks.FILES['environment/more/deep/where.sh'],
  }
  assert (read.workdir, read.agent_seconds, read.test_seconds) == ('/app', 60.0, 20.0)
  assert '/app/more/deep/where.sh' in directories.read(first).files
  (tmp_path / 'b' / 'tests' / 'grade.py').write_text('print(1)')
  with pytest.raises(ValueError, match='has changed since it was loaded'):
    directories.read(second)


def test_the_paths_of_the_container_are_seen(layers, workspace):
  played = workspace()
  shown = played.run('pwd; sh /data/deep/where.sh; ls -d /tests; cat /app/in.txt; ls ~')
  assert shown.text.splitlines() == [
    '/app',
    '/data/deep is /app',
    "ls: cannot access '/tests': No such file or directory",
    '42',
    'app',
    'data',
  ]
  # What is no place of the task stays as it is.
  assert played.run('echo /application x/app ./app /app.py').text.split() == [
    *('/application', 'x/app', './app', '/app.py')
  ]
  assert played.run('python3 -c "import pytest; print(1)"', 60.0).text == '1\n'
  played.run('echo 21 > /app/out.txt')
  assert (played.judge(), played.reason) == (0.5, '')


@pytest.mark.parametrize('root', ['', '/tmp/shell-1'])
def test_a_place_may_be_called_as_the_workspace(root):
  """That of a shell with namespaces is /workspace."""
  paths = directories.Paths(f'{root}/workspace', ('/tests', '/workspace', '/app'))
  texts = '/workspace', '/workspace/x', '/workspace/app/x', '/workspace/workspace', '/app'
  for text in texts:
    entered = paths.enter(text)
    assert entered == f'{root}/workspace{text}' and paths.leave(entered) == text
  assert paths.leave(f'{root}/workspace/x') == f'{root}/workspace/x'


def test_a_working_directory_may_be_called_as_the_workspace(layers, workspace):
  dockerfile = 'FROM debian\nWORKDIR /workspace/tests\nCOPY in.txt .\n'
  played = workspace({'environment/Dockerfile': dockerfile})
  shown = played.run('pwd; ls -d /workspace/tests/in.txt; ls -d /workspace')
  assert shown.text.split() == [
    '/workspace/tests',
    '/workspace/tests/in.txt',
    '/workspace',
  ]


CHEATS = {
  'it writes the reward': 'mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt',
  'it writes the other reward': (
    'mkdir -p /logs/verifier; echo \'{"reward": 1}\' > /logs/verifier/reward.json'
  ),
  'it writes tests': 'mkdir /tests; echo "print(1)" > /tests/grade.py; chmod 0 /tests',
  'tests are a link': 'mkdir /app/x; ln -s /app/x /tests',
  'the logs are a file': 'echo > /logs',
  'it leaves a process': (
    '(setsid sh -c "while :; do echo 42 > /app/out.txt; '
    'echo 1 > /logs/verifier/reward.txt; done" >/dev/null 2>&1 &)'
  ),
  'it changes what Python imports': (
    'd=$(python3 -m site --user-site); mkdir -p $d; '
    'echo "import os; print(1, flush=True); os._exit(0)" > $d/usercustomize.py'
  ),
}


@pytest.mark.parametrize('name', CHEATS)
def test_a_cheat_has_no_reward(workspace, name):
  played = workspace()
  played.run(CHEATS[name])
  played.run('rm -f /app/out.txt')  # What was left would write it again.
  assert (played.judge(), played.reason) == (0.0, '')


@pytest.mark.parametrize('name', ['reward.txt', 'reward.json'])
def test_a_reward_that_the_agent_wrote_is_gone_where_the_tests_write_none(
  workspace, name
):
  played = workspace({'tests/test.sh': 'ls -A /logs/verifier'})
  path = f'/logs/verifier/{name}'
  made = played.run(
    f'mkdir -p /logs/verifier; echo \'{{"reward": 1}}\' > {path}; ls {path}'
  )
  assert made.text == f'{path}\n'
  assert played.judge() == 0.0 and "they printed ''" in played.reason


FAULTS = {
  'hangs': ('sleep 600', 'longer than 1 seconds'),
  'forks': (':(){ :|:& };:; while :; do :; done', 'longer than 1 seconds'),
  'floods': ('yes', 'printed too much'),
  'fills the disk': ('yes > /logs/x', 'workspace|no number'),
  'writes nothing': ('echo well', "no number .* they printed 'well"),
  'writes NaN': ('echo NaN > /logs/verifier/reward.txt', 'no number'),
  'writes 2': ('echo 2 > /logs/verifier/reward.txt', 'no number'),
  'writes true': ('echo true > /logs/verifier/reward.txt', 'no number'),
  'writes a text': ('echo "{" > /logs/verifier/reward.txt', 'no number'),
  'nests': ('printf "[%.0s" {1..4000} > /logs/verifier/reward.txt', 'no number'),
  'makes a pipe': ('mkfifo /logs/verifier/reward.txt', 'no number'),
  'writes a huge number': (
    'printf "{\\"reward\\": 1%0400d}" 0 > /logs/verifier/reward.json',
    'no number',
  ),
  'is no object': ('echo 1 > /logs/verifier/reward.json', 'no number'),
}


@pytest.mark.parametrize('name', FAULTS)
def test_tests_that_fail_give_no_reward_and_a_reason(workspace, name):
  script, reason = FAULTS[name]
  settings = directory_tasks.FILES['task.toml'].replace(
    '20.0', '1' if 'longer' in reason else '60'
  )
  played = workspace({'tests/test.sh': script, 'task.toml': settings}, disk_mb=8)
  assert played.judge() == 0.0
  assert re.search(reason, played.reason, re.DOTALL)


def test_a_working_directory_that_is_a_file_is_an_error(workspace):
  with pytest.raises(
    shell.CommandError, match='/app/x/in.txt is no directory: .*File exists'
  ):
    workspace(
      {
        'environment/Dockerfile': 'FROM debian\nWORKDIR /app/x\nCOPY in.txt .\n'
        'WORKDIR /app/x/in.txt\n'
      }
    )


def test_a_reward_in_json(workspace):
  script = 'echo \'{"reward": 0.75, "style": 3}\' > /logs/verifier/reward.json'
  played = workspace({'tests/test.sh': script})
  assert (played.judge(), played.reason) == (0.75, '')


def test_an_agent_that_ends_its_shell_or_removes_all_has_no_reward(workspace):
  played = workspace()
  played.run(f'{directory_tasks.SOLVE}; rm -rf /app')
  assert played.judge() == 0.0 and 'No such file' in played.reason
  played.close()
  assert played.judge() == 0.0 and 'shell has ended' in played.reason


def test_the_time_of_the_agent_is_bounded(workspace, monkeypatch):
  clock = mock.Mock(monotonic=lambda: clock.now, now=1000.0)
  monkeypatch.setattr(directories, 'time', clock)
  played = workspace()
  assert played.seconds_left == 60
  clock.now += 59.5
  assert 'longer than 0.5 seconds' in played.run('sleep 60').reason
  clock.now += 0.5
  assert played.seconds_left == 0
  with pytest.raises(shell.CommandError, match='time of this task is over'):
    played.run(directory_tasks.SOLVE)
  assert (played.judge(), played.reason) == (0.0, '')


def test_no_command_of_the_agent_runs_among_those_of_the_judge(workspace):
  played = workspace({'tests/test.sh': 'sleep 1; echo 0 > /logs/verifier/reward.txt'})
  judge = threading.Thread(target=played.judge)
  judge.start()
  with pytest.raises(shell.CommandError, match='is over'):
    while True:  # At first the judge may not have begun.
      played.run('mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt')
  judge.join()
  assert (played.judge(), played.reason) == (0.0, '')


async def test_it_is_an_environment(tmp_path):
  (task,) = directories.load(directory_tasks.write(tmp_path))
  replies = [call('ls'), call(directory_tasks.SOLVE), 'Done.']
  make_env = lambda: directories.DirectoryEnv(seconds=60.0)
  steps = await testing.check_env(make_env, task, replies)
  assert steps[0].messages[0]['content'] == 'in.txt\n'
  assert steps[-1].reward == steps[-1].metrics['reward/solved'] == 1.0
  assert steps[-1].metrics['unjudged'] == steps[-1].metrics['late'] == 0.0


async def test_a_folder_is_read_in_a_thread(tmp_path, monkeypatch):
  (task,), read, threads = (
    directories.load(directory_tasks.write(tmp_path)),
    directories.read,
    [],
  )
  monkeypatch.setattr(
    directories, 'read', lambda task: threads.append(threading.get_ident()) or read(task)
  )
  env = directories.DirectoryEnv()
  await env.reset(task)
  env.close()
  assert len(threads) == 1 and threading.get_ident() not in threads


async def test_an_episode_whose_time_is_over_is_judged(tmp_path):
  (task,) = directories.load(directory_tasks.write(tmp_path))
  env = directories.DirectoryEnv(seconds=60.0)
  await env.reset(task)
  assert not (await env.step(call(directory_tasks.SOLVE))).done
  env._workspace._end = 0.0
  step = await env.step(call('ls'))
  env.close()
  assert step.done and step.reward == step.metrics['late'] == 1.0


def test_every_task_is_checked(tmp_path):
  directory_tasks.write(tmp_path / 'right')
  directory_tasks.write(tmp_path / 'none', {'solution/solve.sh': None})
  directory_tasks.write(
    tmp_path / 'wrong', {'solution/solve.sh': 'echo no; echo 21 > /app/out.txt'}
  )
  directory_tasks.write(
    tmp_path / 'easy', {'tests/test.sh': 'echo 1 > /logs/verifier/reward.txt'}
  )
  found = directories.check(directories.load(tmp_path))
  assert found == {
    'none': 'it has no solution/solve.sh',
    'wrong': "the solution scores 0.5; it ended with status 0, 'no\\n'",
    'easy': 'doing nothing scores 1',
  }


def test_bytes_that_are_no_text_travel_as_they_are(tmp_path):
  folder = directory_tasks.write(tmp_path)
  data = bytes(range(256)) + b' /app/x '
  (folder / 'environment' / 'in.txt').write_bytes(data)
  played = directories.Workspace()
  played.lay(task_folders.read(folder))
  assert played.read_files()['app/in.txt'] == data.decode(errors='surrogateescape')
  played.close()
