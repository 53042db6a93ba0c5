"""The notebook runs from top to bottom, in small, and is kept without outputs."""

import os
import pathlib
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
EXECUTE = """
import sys, nbclient, nbformat
for path in sys.argv[2:]:
  notebook = nbformat.read(path, as_version=4)
  try:
    nbclient.NotebookClient(notebook, timeout=1800).execute(cwd=sys.argv[1])
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


def write(path: pathlib.Path, left_out: str | None = None, **settings):
  """Writes the notebook with other settings, and without a cell."""
  notebook = nbformat.read(ROOT / 'launch' / 'quickstart.ipynb', as_version=4)
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


def test_quickstart_shows_what_it_promises_and_stops_where_its_run_fails(tmp_path):
  workdir, paths = tmp_path / 'run', [tmp_path / f'{x}.ipynb' for x in ('good', 'bad')]
  flags = ' '.join(['--questions=2 --watched=1', *SMALL])
  write(paths[0], WORKDIR=str(workdir), FLAGS=flags)
  write(paths[1], FLAGS='--no_such_flag', left_out='devices')
  command = [sys.executable, '-c', EXECUTE, str(ROOT / 'launch'), *map(str, paths)]
  environment = os.environ | {'PYTHON': sys.executable}
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=1800, env=environment
  )
  assert done.returncode == 0, done.stderr[-3000:]
  good, bad = map(read, paths)
  assert str(paths[0]) not in done.stdout, done.stdout[-3000:]
  assert 'CpuDevice' in good['devices']
  assert 'minutes in all' in good['train']
  assert '\x1b' not in good['train'], 'a moving bar'
  assert 'image/png' in good['curve'] and '| GRPO ' in good['curve']
  for step in (0, 1):
    assert f'step-{step:05}-miniwiki-musique-dev.jsonl' in good['look']
  assert 'assistant (reward ' in good['look']
  assert (workdir / 'model' / 'model.safetensors').exists()
  assert str(paths[1]) in done.stdout
  assert 'no_such_flag' in bad['train'] and not bad['curve']
