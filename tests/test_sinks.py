"""Sinks of metrics: a failing one costs nothing, a resumed one doubles nothing."""

import re
import threading
import warnings

import jax
import jax.numpy as jnp
import mounts
import pytest
import tiny
import waiting

from agent_r1_jax.models import decoder
from agent_r1_jax.report import profile, sinks, tensorboard


class Sink:
  """Fails at a step, hangs in a method, or takes what it gets."""

  run = 'r1'

  def __init__(self, fails_at=-1, hangs_in='', gate=None):
    self.steps, self.runs, self.closed = [], [], threading.Event()
    self.fails_at, self.hangs_in, self.gate = fails_at, hangs_in, gate

  def make(self, run):
    self.runs.append(run)
    self._hang('make')
    return self

  def write(self, step, values):
    self._hang('write')
    if step == self.fails_at:
      raise SystemExit('no such project')
    self.steps.append(step)

  def close(self):
    self._hang('close')
    self.closed.set()

  def _hang(self, method):
    if method == self.hangs_in:
      self.gate.wait()


def write(workdir, sink, steps, until=lambda: True):
  """Writes steps, and closes the sink once `until` holds; returns the warnings."""
  background = sinks.Background('fake', sink.make, workdir / 'sinks' / 'fake.json')
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter('always')
    for step in steps:
      background.write(step, {'reward': 0.1 * step})
    waiting.until(until, 'what the sink was to do')
    background.close()
  return [str(warning.message) for warning in said]


def test_a_resumed_run_goes_on_without_doubled_steps(tmp_path):
  sink = Sink()
  assert write(tmp_path, sink, range(5)) == []
  assert write(tmp_path, sink, range(3, 8)) == []
  assert sink.steps == [*range(8)] and sink.runs == ['', 'r1']


def test_a_sink_that_fails_is_named_once_and_its_lines_are_counted(tmp_path):
  sink = Sink(fails_at=3)
  first, last = write(tmp_path, sink, range(9))
  assert first.startswith('fake does not take all metrics: no such project. The run')
  assert last == 'fake: 6 lines were not written'
  assert sink.closed.is_set()


@pytest.mark.parametrize(('method', 'lost'), [('make', 5), ('write', 5), ('close', 0)])
def test_a_sink_that_hangs_is_not_waited_for(tmp_path, monkeypatch, gate, method, lost):
  monkeypatch.setattr(sinks, '_CLOSE_SECONDS', 0.2)
  sink = Sink(hangs_in=method, gate=gate)
  taken = lambda: method != 'close' or len(sink.steps) == 5
  said = tiny.within(write, tmp_path, sink, range(5), taken, seconds=60)
  assert 'metrics: it did not end within 0.2 sec' in said[0]
  assert said[1:] == ([f'fake: {lost} lines were not written'] if lost else [])


def test_a_sink_that_is_behind_loses_lines_and_the_queue_stays_short(
  tmp_path, monkeypatch, gate
):
  monkeypatch.setattr(sinks, '_CLOSE_SECONDS', 0.2)
  monkeypatch.setattr(sinks, '_MOST_LINES', 3)
  first, last = write(tmp_path, Sink(hangs_in='make', gate=gate), range(10))
  assert 'it is 3 lines behind' in first and last == 'fake: 10 lines were not written'


def test_tensorboard_has_the_scalars(tmp_path):
  (sink,) = sinks.start(['tensorboard'], tmp_path, {})
  sink.write(7, {'loss/policy': 1.5})
  sink.close()
  (events,) = (tmp_path / 'tensorboard').iterdir()
  assert events.name.startswith('events.out.tfevents')
  assert b'loss/policy' in events.read_bytes()


@pytest.mark.parametrize('when', ['before', 'while'])
def test_tensorboard_on_a_full_disk_is_given_up(tmp_path, when, monkeypatch):
  """Its writer's thread once died of it, and `write` waited for ever on its queue."""
  monkeypatch.setattr(tensorboard, '_FLUSH_SECONDS', 0.0)
  numbers = {f'number/{i}': 0.1 * i for i in range(300)}
  with mounts.mounted(tmp_path / 'tensorboard', 'size=64k') as disk:
    if when == 'before':
      mounts.fill(disk)

    def write():
      (sink,) = sinks.start(['tensorboard'], tmp_path, {})
      if when == 'while':
        sink.write(-1, {'reward': 0.5})
        mounts.fill(disk)
      for step in range(50):
        sink.write(step, numbers)
      sink.close()

    with pytest.warns(UserWarning) as said:
      tiny.within(write, seconds=60)
    first, last = (str(warning.message) for warning in said)
    assert first.startswith('tensorboard does not take all metrics: the disk is full')
    assert re.fullmatch(r'tensorboard: \d+ lines were not written', last)


@pytest.mark.filterwarnings('ignore')  # Theirs.
def test_mlflow_and_a_database_in_the_workdir(tmp_path, monkeypatch):
  mlflow = pytest.importorskip('mlflow', reason='pip install agent_r1_jax[mlflow]')
  monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
  for steps in (range(3), range(1, 5)):
    (sink,) = sinks.start(['mlflow'], tmp_path, {'seed': 7})
    for step in steps:
      sink.write(step, {'rollout/reward': float(step), 'error/a: b': float('nan')})
    sink.close()
  client = mlflow.MlflowClient(f'sqlite:///{tmp_path}/mlflow.db')
  (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
  assert run.info.status == 'FINISHED' and run.data.params == {'seed': '7'}
  history = client.get_metric_history(run.info.run_id, 'rollout/reward')
  assert [(m.step, m.value) for m in history] == [(s, float(s)) for s in range(5)]


@pytest.mark.filterwarnings('ignore')
def test_wandb_offline(tmp_path, monkeypatch):
  wandb = pytest.importorskip('wandb', reason='pip install agent_r1_jax[wandb]')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  for steps in (range(3), range(1, 5)):
    (sink,) = sinks.start(['wandb'], tmp_path, {'seed': 7})
    for step in steps:
      sink.write(step, {'rollout/reward': step + 0.125})
    sink.close()
  wandb.teardown()  # As at the end of a process: what it holds is written.
  files = sorted(tmp_path.glob('wandb/offline-run-*/run-*.wandb'))
  assert len({path.stem for path in files}) == 1  # One run, written by two starts.
  found = [[s for s in range(5) if f'{s}.125'.encode() in f.read_bytes()] for f in files]
  assert found == [[0, 1, 2], [3, 4]]


@pytest.mark.filterwarnings('ignore')
def test_wandb_without_a_key_asks_nobody(tmp_path, monkeypatch):
  pytest.importorskip('wandb', reason='pip install agent_r1_jax[wandb]')
  monkeypatch.setenv('HOME', str(tmp_path))
  for name in ('WANDB_MODE', 'WANDB_API_KEY'):
    monkeypatch.delenv(name, raising=False)
  with pytest.raises(ValueError, match='there is no API key: run `wandb login`'):
    sinks.WandbSink(tmp_path, {}, '')


def test_named_steps_are_traced(tmp_path):
  """The scopes of the model are in the programs that the trace holds."""
  config = tiny.config()
  params, tokens = tiny.params(config), jnp.zeros((1, 8), jnp.int32)

  @jax.jit
  def read(params):
    x = decoder.hidden(params, config, tiny.rows(tokens))
    return decoder.logits(params, config, x)

  for step in (1, 2):
    with profile.trace_step([2], tmp_path, step):
      read(params).block_until_ready()
  (folder,) = (tmp_path / 'profile').iterdir()
  assert folder.name == 'step-00002'
  (for_perfetto,) = folder.rglob('perfetto_trace.json.gz')
  assert for_perfetto.stat().st_size > 100
  (for_xprof,) = folder.rglob('*.xplane.pb')
  programs = for_xprof.read_bytes()
  for scope in (b'Decoder/', b'/layers/attn/', b'/layers/mlp/', b'/head/'):
    assert scope in programs, scope


def test_a_trace_that_fails_ends_no_step(tmp_path):
  (tmp_path / 'profile').write_text('in the way')
  with pytest.warns(UserWarning, match='there is no complete trace in .*step-00001'):
    with profile.trace_step([1], tmp_path, 1):
      done = True
  assert done
  (tmp_path / 'profile').unlink()
  with profile.trace_step([2], tmp_path, 2):  # The failure left no trace open.
    pass
  assert list((tmp_path / 'profile').rglob('*.xplane.pb'))
