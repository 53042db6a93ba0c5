"""Tasks of mending: which lines change, and that a task is right."""

import ast
import contextlib
import tarfile

import confined
import pytest
import script

from agent_r1_jax.contrib.harbor import directories
from experiments import task_list
from experiments.repairs import mutations

needs_shell = confined.needs_shell
SOURCE = '''"""1 + 1"""
def f(a, b, *, é='é'):
  if not a and (b < 3) or b:  # 4 < 5
    return a[1:] + [é == 'x']
  return f'{a + b} {1}'
'''
MODEL = script.ROOT / 'experiments' / 'miniwiki' / 'model'
CHEATS = {
  'a pytest of its own': 'touch /app/pytest.py',
  'the end of the process': (
    'printf "import os\\nos._exit(0)\\n" > /app/inflection/__init__.py'
  ),
  'a summary of its own': (
    'printf "import os\\nprint(\\"9 passed in 1s\\", flush=True)\\nos._exit(0)\\n" '
    '> /app/inflection/__init__.py'
  ),
}


def test_each_mutation_changes_one_line_of_code():
  found = mutations.find(SOURCE)
  assert {(m.line, m.kind, m.new.strip()) for m in found} == {
    (2, 'a comparison', 'if not a and (b <= 3) or b:  # 4 < 5'),
    (2, 'a connective', 'if not a and (b < 3) and b:  # 4 < 5'),
    (2, 'a connective', 'if not a or (b < 3) or b:  # 4 < 5'),
    (2, 'a constant', 'if not a and (b < 4) or b:  # 4 < 5'),
    (2, 'a dropped not', 'if a and (b < 3) or b:  # 4 < 5'),
    (3, 'a comparison', "return a[1:] + [é != 'x']"),
    (3, 'a constant', "return a[2:] + [é == 'x']"),
    (3, 'an operator', "return a[1:] - [é == 'x']"),
  }
  assert [m.line for m in found] == [2] * 5 + [3] * 3
  for mutation in found:
    changed = mutation.apply(SOURCE)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
    back = mutation._replace(old=mutation.new, new=mutation.old)
    assert back.apply(changed) == SOURCE


@pytest.mark.usefixtures('needs_shell')
def test_tasks_are_made_and_checked(tmp_path):
  """A package stands in for inflection, whose archive would have to be fetched."""
  top = tmp_path / 'inflection-0.5.1'
  (top / 'inflection').mkdir(parents=True)
  (top / 'inflection' / '__init__.py').write_text(
    'def more(n):\n  return n + 1\n\n\ndef unused(n):\n  return n * 2\n'
  )
  (top / 'test_inflection.py').write_text(
    'import inflection\n\n\ndef test_more():\n  assert inflection.more(1) == 2\n'
  )
  with tarfile.open(tmp_path / 'inflection-0.5.1.tar.gz', 'w:gz') as archive:
    archive.add(top, top.name)
  folder = tmp_path / 'tasks'
  script.run(
    '-m',
    'experiments.repairs.make',
    '--packages=inflection',
    f'--sdists={tmp_path}',
    f'--folder={folder}',
  )
  (task,) = directories.load(folder)  # Its two mutations are of one line.
  assert 'test_inflection.py::test_more' in task.messages[0]['content']
  assert 'assert ' in task.messages[0]['content']
  assert directories.check([task]) == {}
  for name, cheat in CHEATS.items():
    with contextlib.closing(directories.open_workspace(task)) as workspace:
      assert workspace.run(cheat).code == 0
      assert (name, workspace.judge(), workspace.reason) == (name, 0.0, '')
  for options in (
    ['experiments.directories', '--watched=1'],
    ['experiments.evaluate', '--task=directories', f'--config.model.path={MODEL}'],
  ):
    options += [f'--data={folder}', f'--workdir={tmp_path}/run']
    refused = script.run('-m', *options, '--config.limits.step_seconds=79')
    assert 'limits.step_seconds is 79, and tasks[0]' in refused.stderr
  benchmark = task_list.TASKS['directories'](task_list.Source(str(folder), '', 100))
  ((sets, make_env),) = benchmark.methods.values()
  assert sets == {'': [task]} and make_env is directories.DirectoryEnv
