"""A run without a watcher of the upper floor: what it prints, keeps and refuses."""

import contextlib
import sys
import types

import pytest
import runs
import tiny

from agent_r1_jax import report, train
from agent_r1_jax.train import metrics

model = runs.model
pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')


def _run(config, workdir, **given):
  options = {'tasks': runs.tasks(), 'evals': {'dev': runs.tasks(2)}}
  options |= {'make_env': runs.make_env, 'algorithm': runs.GRPO}
  return tiny.within(train.run, config, str(workdir), **options, **given)


def test_a_run_prints_a_line_a_step_and_keeps_metrics_and_model(model, tmp_path, capsys):
  _run(runs.config(model, steps=2), tmp_path)
  printed = capsys.readouterr().out.splitlines()
  assert [line.split(':')[0] for line in printed if line.startswith('Step')] == [
    'Step 0',
    'Step 1',
    'Step 2',
  ]
  assert printed[1].startswith('Step 1: rollout/reward ')
  assert [line['step'] for line in metrics.read(tmp_path)] == [0, 1, 2]
  assert (tmp_path / 'model' / 'config.json').exists()
  assert not (tmp_path / 'curve.png').exists()
  assert not (tmp_path / 'trajectories').exists()


@pytest.mark.parametrize('name', ['sinks', 'profile'])
def test_a_setting_that_only_a_watcher_serves_is_refused_at_once(model, tmp_path, name):
  config = runs.config(model, steps=2)
  setattr(config, name, {'sinks': 'tensorboard, ', 'profile': '2'}[name])
  with pytest.raises(ValueError, match=f'{name} is .*watcher=report.Watcher()'):
    _run(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_without_sinks_no_watcher_is_needed(model, tmp_path):
  config = runs.config(model, steps=1)
  config.sinks = ''
  _run(config, tmp_path)
  assert len(metrics.read(tmp_path)) == 2


class Sink:
  """Keeps the steps that it is told, inside the run alone."""

  made = []

  def __init__(self):
    self.made.append(self)
    self.steps, self.is_open = [], False

  @contextlib.contextmanager
  def open(self, run):
    assert run.next_line == 0
    self.is_open = True
    yield
    self.is_open = False

  def write(self, step, values):
    assert self.is_open and 'eval/dev/reward' in values
    self.steps.append(step)


def test_sinks_of_others_are_modules_or_given(model, tmp_path, monkeypatch):
  package, module = types.ModuleType('theirs'), types.ModuleType('theirs.sink')
  monkeypatch.setattr(module, 'Sink', Sink, raising=False)
  monkeypatch.setitem(sys.modules, 'theirs', package)
  monkeypatch.setitem(sys.modules, 'theirs.sink', module)
  config = runs.config(model, steps=2, eval_every=1, sinks='theirs.sink')
  _run(config, tmp_path, watcher=report.Watcher(Sink()))
  assert [sink.steps for sink in Sink.made] == [[0, 1, 2]] * 2
  assert not any(sink.is_open for sink in Sink.made)
