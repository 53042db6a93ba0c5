"""The notebook runs from top to bottom, in small, and is kept without outputs."""

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
notebook = nbformat.read(sys.argv[1], as_version=4)
try:
  nbclient.NotebookClient(notebook, timeout=1800).execute(cwd=sys.argv[2])
finally:
  nbformat.write(notebook, sys.argv[1])
"""


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_is_valid_and_kept_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  for cell in notebook.cells:
    assert cell.get('outputs', []) == [] and cell.get('execution_count') is None


def executed(name: str, tmp_path, monkeypatch, **settings):
  """Runs a notebook with other settings; returns the run and its output, cell by cell."""
  notebook = nbformat.read(ROOT / 'launch' / name, as_version=4)
  (cell,) = [c for c in notebook.cells if 'parameters' in c.metadata.get('tags', ())]
  cell.source += ''.join(f'\n{key} = {value!r}' for key, value in settings.items())
  path = tmp_path / name
  nbformat.write(notebook, path)
  monkeypatch.setenv('PYTHON', sys.executable)
  command = [sys.executable, '-c', EXECUTE, str(path), str(ROOT / 'launch')]
  done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
  cells = nbformat.read(path, as_version=4).cells
  return done, {cell.id: _shown(cell.get('outputs', ())) for cell in cells}


def _shown(outputs) -> str:
  """What was printed, in one piece, and whatever else was displayed."""
  return ''.join(out['text'] if 'text' in out else str(out) for out in outputs)


def test_quickstart_trains_and_shows_what_it_promises(tmp_path, monkeypatch):
  workdir = tmp_path / 'run'
  done, shown = executed(
    'quickstart.ipynb',
    tmp_path,
    monkeypatch,
    WORKDIR=str(workdir),
    FLAGS=' '.join(['--questions=2 --watched=1', *SMALL]),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'CpuDevice' in shown['devices']
  assert 'minutes in all' in shown['train']
  assert '\x1b' not in shown['train'], 'a moving bar'
  assert 'image/png' in shown['curve'] and '| GRPO ' in shown['curve']
  for step in (0, 1):
    assert f'step-{step:05}-miniwiki-musique.jsonl' in shown['look']
  assert 'assistant (reward ' in shown['look']
  assert (workdir / 'model' / 'model.safetensors').exists()


def test_a_failing_run_stops_the_notebook(tmp_path, monkeypatch):
  done, shown = executed(
    'quickstart.ipynb', tmp_path, monkeypatch, FLAGS='--no_such_flag'
  )
  assert done.returncode != 0
  assert 'no_such_flag' in shown['train'] and not shown['curve']
