"""The notebooks run from top to bottom, in small, and are kept without outputs."""

import os
import pathlib
import shutil
import subprocess
import sys

import nbformat
import pytest
import script

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'launch').glob('*.ipynb'))
# The least that has every part: baselines, an update, evaluations, table, trajectories.
SMALL = script.config_flags(
  script.QUICKSTART
  | {'schedule.steps': 1, 'schedule.tasks': 2, 'schedule.samples': 3}
  | {'schedule.eval_every': 1, 'limits.max_turns': 2}
)
_OWN = ('what', 'settings')
# Each notebook, with the folder that it runs in, in one process.
EXECUTE = """
import sys, nbclient, nbformat
for path, folder in zip(sys.argv[1::2], sys.argv[2::2]):
  notebook = nbformat.read(path, as_version=4)
  try:
    nbclient.NotebookClient(notebook, timeout=1800).execute(cwd=folder)
  except nbclient.exceptions.CellExecutionError as error:
    print(path, error)
  nbformat.write(notebook, path)
"""


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_is_valid_and_kept_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  for cell in notebook.cells:
    assert cell.get('outputs', []) == [] and cell.get('execution_count') is None


def load(name: str) -> nbformat.NotebookNode:
  return nbformat.read(ROOT / 'launch' / name, as_version=4)


def write(
  path: pathlib.Path,
  name: str = 'quickstart.ipynb',
  left_out: str | None = None,
  **settings,
):
  """Writes the notebook with other settings, and without a cell."""
  notebook = load(name)
  notebook.cells = [cell for cell in notebook.cells if cell.id != left_out]
  (cell,) = [c for c in notebook.cells if 'parameters' in c.metadata.get('tags', ())]
  cell.source += ''.join(f'\n{key} = {value!r}' for key, value in settings.items())
  nbformat.write(notebook, path)


def read(path: pathlib.Path) -> dict[str, str]:
  """Reads a notebook's output, cell by cell."""
  cells = nbformat.read(path, as_version=4).cells
  return {cell.id: _shown(cell.get('outputs', ())) for cell in cells}


def _shown(outputs) -> str:
  """What was printed, in one piece, and whatever else was displayed."""
  return ''.join(out['text'] if 'text' in out else str(out) for out in outputs)


def copy_checkout(folder: pathlib.Path) -> str:
  tracked = subprocess.check_output(['git', 'ls-files'], cwd=ROOT, text=True)
  for name in tracked.splitlines():
    if (ROOT / name).is_file() and not name.startswith(('tests/', 'docs/')):
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, folder / name)
  return str(folder)


def test_notebooks_show_what_they_promise_and_stop_where_something_fails(tmp_path):
  workdir, launch, empty = tmp_path / 'run', ROOT / 'launch', tmp_path / 'empty'
  folders = {'good': launch, 'kaggle': empty, 'bad': launch, 'unnamed': empty}
  paths = {name: tmp_path / f'{name}.ipynb' for name in folders}
  empty.mkdir()
  flags = ' '.join(['--questions=2 --watched=1', *SMALL])
  write(paths['good'], WORKDIR=str(workdir), FLAGS=flags)
  # It finds the run of the first one finished. Its own copy has the policy elsewhere.
  write(
    paths['kaggle'],
    'kaggle_tpu.ipynb',
    REPOSITORY=copy_checkout(tmp_path / 'input'),
    WHEELS=str(tmp_path / 'wheels'),
    FOLDER=str(tmp_path),
    WORKDIR=str(workdir),
    FLAGS=f'{flags} --config.model.path={ROOT / "experiments/miniwiki/model"}',
  )
  write(paths['bad'], FLAGS='--no_such_flag', left_out='devices')
  write(paths['unnamed'])
  command = [sys.executable, '-c', EXECUTE]
  command += [str(x) for name in folders for x in (paths[name], folders[name])]
  # What the cells start; the kernels are processes of their own.
  environment = os.environ | {'PYTHON': script.write_python(tmp_path / 'python')}
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=1800, env=environment
  )
  assert done.returncode == 0, done.stderr[-3000:]
  shown = {name: read(path) for name, path in paths.items()}
  assert str(paths['good']) not in done.stdout, done.stdout[-3000:]
  assert str(paths['kaggle']) not in done.stdout, done.stdout[-3000:]
  for name in ('good', 'kaggle'):
    good = shown[name]
    assert 'CpuDevice' in good['devices']
    assert 'minutes in all' in good['train']
    assert '\x1b' not in good['train'], 'a moving bar'
    assert 'image/png' in good['curve'] and '| GRPO ' in good['curve']
    for step in (0, 1):
      assert f'step-{step:05}-miniwiki-musique-dev.jsonl' in good['look']
    assert 'assistant (reward ' in good['look']
  assert (workdir / 'model' / 'model.safetensors').exists()
  assert (tmp_path / 'agent_r1_jax' / 'launch' / 'run.sh').exists()
  assert str(paths['bad']) in done.stdout
  assert 'no_such_flag' in shown['bad']['train'] and not shown['bad']['curve']
  assert 'REPOSITORY is empty: say above what to clone.' in shown['unnamed']['install']
  assert not shown['unnamed']['devices']


def test_both_have_the_same_cells():
  """But for these, whoever changes a cell of one changes it in the other too."""
  first, second = (
    {cell.id: cell.source for cell in load(name).cells if cell.id not in _OWN}
    for name in ('quickstart.ipynb', 'kaggle_tpu.ipynb')
  )
  shared = first.keys() & second.keys()
  assert shared >= {'install', 'devices', 'train', 'curve', 'look'}
  assert {name: second[name] for name in shared} == {name: first[name] for name in shared}


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_the_first_cell_says_to_name_a_repository(path):
  assert '**First name a repository.**' in load(path.name).cells[0].source
