"""Programs that run their commands in a container, which is a task's workspace."""

import asyncio
import os
import subprocess
import threading

import confined
import pytest
from test_directories import FILES, SOLVE, write

from agent_r1_jax.serve import containers
from agent_r1_jax.tasks import directories

pytestmark = pytest.mark.usefixtures('needs_shell')
needs_shell = confined.needs_shell
URL = 'http://nowhere'


@pytest.fixture
def play(tmp_path):
  """Plays the task by a script, which has docker's command as $0."""

  def play_script(script, changes=None, **options):
    (task,) = directories.load(write(tmp_path / 'task', changes))
    command = lambda task, docker: ['bash', '-c', script, docker]
    run = containers.in_workspace(command, directories.open_workspace, **options)
    return asyncio.run(run(task, URL))

  return play_script


def test_a_program_works_in_the_workspace_and_is_judged(play, tmp_path):
  seen = tmp_path / 'seen'
  script = f"""
    id=$("$0" run -d --name x -w /app --rm image sleep 2h)
    "$0" exec -w /data -e A='b c' -i $id bash -lc 'pwd; echo $A; exit 3' > {seen}
    echo $? >> {seen}
    "$0" exec $id cat in.txt /etc/passwd >> {seen} 2>&1
    "$0" exec -w /app $id bash -c "{SOLVE}"
    "$0" stop $id; "$0" rm -f $id
  """
  assert play(script) == {'solved': 1.0}
  assert seen.read_text().splitlines()[:4] == ['/data', 'b c', '3', '42']
  assert 'root:' not in seen.read_text()


def test_how_commands_end(play, tmp_path):
  seen = tmp_path / 'seen'
  script = f"""
    for i in 1 2 3; do "$0" exec x sleep 60 >> {seen} & done; wait -n; echo $? >> {seen}
    wait
    "$0" build . >> {seen}; echo $? >> {seen}
    "$0" >> {seen}; echo $? >> {seen}
    "$0" exec >> {seen}; echo $? >> {seen}
    "$0" exec x bash -c "$(head -c 200000 /dev/zero | tr '\\0' 'x')" >> {seen} 2>&1
    "$0" exec x printf '\\xff\\xc3\\xa9' >> {seen}
  """
  assert play(script, seconds=0.3) == {'solved': 0.0}
  text = seen.read_text()
  assert text.count('it took longer than 0.3 seconds') == 3 and '\n124\n' in text
  assert 'docker build: only run -d, exec, stop, kill and rm work here\n125\n' in text
  assert 'docker : only run' in text and text.endswith('é')


def test_a_program_that_fails_is_an_error_unless_it_was_refused(play):
  with pytest.raises(RuntimeError, match='ended with status 3: .*no'):
    play('echo no >&2; exit 3')
  script = (
    f'"$0" exec x bash -c "{SOLVE}"; echo "400 {{\'code\': \'max_turns\'}}"; exit 1'
  )
  assert play(script) == {'solved': 1.0}


def test_the_time_of_the_agent_bounds_the_program(play):
  changes = {'task.toml': FILES['task.toml'].replace('60.0', '2')}
  script = f'"$0" exec x bash -c "{SOLVE}"; sleep 600'
  assert play(script, changes) == {'solved': 1.0}


async def test_many_commands_at_a_time_are_run_one_after_the_other(tmp_path):
  workspace = directories.open_workspace(directories.load(write(tmp_path))[0])
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
