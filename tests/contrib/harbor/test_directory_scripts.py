"""The scripts that take tasks which are directories."""

import confined
import directory_tasks
import pytest
import script

from agent_r1_jax.contrib.harbor import directories
from experiments import task_list

needs_shell = confined.needs_shell
MODEL = script.ROOT / 'experiments' / 'miniwiki' / 'model'


@pytest.mark.usefixtures('needs_shell')
def test_scripts_take_a_folder_of_tasks_and_refuse_too_little_time(tmp_path):
  folder = directory_tasks.write(tmp_path / 'tasks' / 'one').parent
  for options in (
    ['experiments.directories', '--watched=1'],
    ['experiments.evaluate', '--task=directories', f'--config.model.path={MODEL}'],
  ):
    options += [f'--data={folder}', f'--workdir={tmp_path}/run']
    refused = script.run('-m', *options, '--config.limits.step_seconds=79')
    assert 'limits.step_seconds is 79, and tasks[0]' in refused.stderr
  benchmark = task_list.TASKS['directories'](task_list.Source(str(folder), '', 100))
  ((sets, make_env),) = benchmark.methods.values()
  assert sets == {'': directories.load(folder)}
  assert make_env is directories.DirectoryEnv
