"""Programs that run their commands in a container, which is a task's workspace."""

import asyncio
import os
import subprocess
import threading
from unittest import mock

import confined
import directory_tasks
import pytest

from agent_r1_jax import types
from agent_r1_jax.contrib.harbor import containers, directories
from agent_r1_jax.serve import program

pytestmark = pytest.mark.usefixtures('needs_shell')
needs_shell = confined.needs_shell
URL = 'http://nowhere'


@pytest.fixture
def play(tmp_path):
  """Plays the task by a script, which has docker's command as $0."""

  def play_script(script, changes=None, **options):
    (task,) = directories.load(directory_tasks.write(tmp_path / 'task', changes))
    command = lambda task, docker: ['bash', '-c', script, docker]
    run = containers.WorkspaceRun(command, directories.open_workspace, **options)
    return asyncio.run(run(task, URL))

  return play_script


def test_a_program_works_in_the_workspace_and_is_judged(play, tmp_path):
  seen = tmp_path / 'seen'
  script = f"""
    id=$("$0" run -d --name x -w /app --rm image sleep 2h)
    "$0" exec -w /data -e A='b c' -i $id bash -lc 'pwd; echo $A; exit 3' > {seen}
    echo $? >> {seen}
    "$0" exec $id cat in.txt /etc/passwd >> {seen} 2>&1
    "$0" exec -w /app $id bash -c "{directory_tasks.SOLVE}"
    "$0" stop $id; "$0" rm -f $id
  """
  assert play(script) == {'solved': 1.0}
  assert seen.read_text().splitlines()[:4] == ['/data', 'b c', '3', '42']
  assert 'root:' not in seen.read_text()


def test_how_commands_end(play, tmp_path):
  seen = tmp_path / 'seen'
  script = f"""
    "$0" build . >> {seen}; echo $? >> {seen}
    "$0" >> {seen}; echo $? >> {seen}
    "$0" exec >> {seen}; echo $? >> {seen}
    long=$(head -c 60000 /dev/zero | tr '\\0' 'x')
    "$0" exec x echo $long $long >> {seen}; echo $? >> {seen}
    "$0" exec x printf '\\xff\\xc3\\xa9' >> {seen}
  """
  assert play(script, seconds=60.0) == {'solved': 0.0}
  text = seen.read_text()
  assert 'docker build: only run -d, exec, stop, kill and rm work here\n125\n' in text
  assert 'docker : only run' in text and text.endswith('é')
  assert 'a command has at most 100000 bytes, and no NUL among them\n125\n' in text


def test_a_command_that_is_late_is_ended(play, tmp_path):
  seen = tmp_path / 'seen'
  script = f"""
    for i in 1 2 3; do "$0" exec x sleep 60 >> {seen} & done; wait -n; echo $? >> {seen}
    wait
  """
  assert play(script, seconds=0.3) == {'solved': 0.0}
  text = seen.read_text()
  assert text.count('it took longer than 0.3 seconds') == 3 and '\n124\n' in text


UNKNOWN = 'is not among the options that work here'
OPTIONS = {
  '--workdir=/data --env=A=b': '/data b 0',
  '--workdir /data --env A=b': '/data b 0',
  '-w /data -e A=b=c -u root --user=root': '/data b=c 0',
  '-i -t -it -d --interactive --tty': '/app 0',
  '--env-file f': f'docker exec: --env-file {UNKNOWN} 125',
  '--privileged=true': f'docker exec: --privileged {UNKNOWN} 125',
  '-w': 'docker exec: -w has no value 125',
}


def test_options_of_a_command(play, tmp_path):
  seen = tmp_path / 'seen'
  command = "x bash -c 'pwd; echo $A'"
  lines = [
    f'"$0" exec {o} {command if o != "-w" else ""} >> {seen}; echo $? \\$ >> {seen}'
    for o in OPTIONS
  ]
  play('\n'.join(lines), seconds=60.0)
  *found, _ = (' '.join(text.split()) for text in seen.read_text().split('$\n'))
  assert found == [*OPTIONS.values()]


def test_a_program_that_fails_is_an_error_unless_it_was_refused(play):
  with pytest.raises(RuntimeError, match='ended with status 3: .*no'):
    play('echo no >&2; exit 3')
  script = f'"$0" exec x bash -c "{directory_tasks.SOLVE}"; '
  script += "echo \"400 {'code': 'max_turns'}\"; exit 1"
  assert play(script) == {'solved': 1.0}


def test_the_time_of_the_agent_bounds_the_program(play):
  """What it left then is judged: here what was there at first."""
  changes = {
    'task.toml': directory_tasks.FILES['task.toml'].replace('60.0', '0.5'),
    'environment/Dockerfile': None,
    'environment/out.txt': '42',
  }
  assert play('sleep 600', changes) == {'solved': 1.0}


def test_an_episode_has_to_last_as_long_as_its_task_may(tmp_path):
  (task,) = directories.load(directory_tasks.write(tmp_path))
  run = containers.WorkspaceRun(lambda task, docker: [], directories.open_workspace)
  assert program.Program(run).least_limits(task) == {'episode_seconds': 140.0}
  assert program.Program(run).least_limits(types.Task('x', [])) == {'episode_seconds': 0}
  assert program.Program(lambda task, url: None).least_limits(task) == {}


async def test_who_connects_and_sends_nothing_is_let_go(monkeypatch):
  """Since Python 3.12 a server waits in the end for all connections."""
  monkeypatch.setattr(containers, '_SECONDS', 0.01)
  async with containers.open_docker(mock.Mock(), 1.0) as docker:
    reader, writer = await asyncio.open_unix_connection(
      docker.removesuffix('docker') + 'socket'
    )
    async with asyncio.timeout(60):
      assert await reader.read() == b''
  writer.close()


async def test_many_commands_at_a_time_are_run_one_after_the_other(tmp_path):
  workspace = directories.open_workspace(
    directories.load(directory_tasks.write(tmp_path))[0]
  )
  results = []
  async with containers.open_docker(workspace, 60.0) as docker:
    assert os.stat(os.path.dirname(docker)).st_mode & 0o77 == 0

    def run(n):
      command = [docker, 'exec', 'x', 'bash', '-c', f'echo {n} >> all; wc -l < all']
      results.append(int(subprocess.run(command, capture_output=True).stdout))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      await asyncio.to_thread(thread.join, 60)
  workspace.close()
  assert sorted(results) == [*range(1, 9)]
