"""The sizes of a resumed run, and what may differ from the run that it resumes."""

import dataclasses
import datetime
import json
from typing import Any

import pytest
import runs
import script
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.host import runtime
from agent_r1_jax.train import metrics, run_files
from agent_r1_jax.train.plan import footprint, setup, sizes

model = runs.model
# One step of a second or two; these sizes are left to be chosen.
_SHORT: dict[str, Any] = {'steps': 1, 'eval_every': 0, 'max_turns': 1}
_CHOSEN = {'rows': 0, 'microbatch': 0}


class TestRun:
  def test_a_resumed_run_has_the_sizes_and_the_date_that_it_began_with(
    self, model, tmp_path, capfd
  ):
    runs.run(runs.config(model, **_SHORT), tmp_path)
    said = [line for line in capfd.readouterr().err.splitlines() if 'sizes:' in line]
    assert len(said) == 1 and 'estimated peak' in said[0]
    first = json.loads((tmp_path / 'config.json').read_text())
    assert (first['engine']['rows'], first['batch']['microbatch']) == (4, 2)
    assert datetime.date.fromisoformat(first['chat']['date'])
    first['chat']['date'] = '2001-02-03'
    (tmp_path / 'config.json').write_text(json.dumps(first))
    # Now they are to be chosen, and a new run would get others.
    config = runs.config(model, **_SHORT | _CHOSEN | {'steps': 2})
    assert sizes.resolve(config, runs.GRPO).engine.rows == 8
    runs.run(config, tmp_path)
    first['schedule']['steps'] = 2
    assert json.loads((tmp_path / 'config.json').read_text()) == first
    assert [line['step'] for line in metrics.read(tmp_path)][-1] == 2

  def _record(self, workdir, config, **others):
    written = {'devices': runtime.describe_devices()} | dataclasses.asdict(config)
    (workdir / 'config.json').write_text(json.dumps(written | others))

  def test_sizes_of_a_resumed_run_that_no_longer_fit_are_chosen_again(
    self, model, tmp_path, monkeypatch
  ):
    """But for the slots, which bound episodes: if these do not fit, it is refused."""
    config = runs.config(model, **_SHORT | _CHOSEN | {'slots': 0})
    monkeypatch.setenv(sizes.MEMORY_VARIABLE, '1.2')
    self._record(tmp_path, tiny.run_config(config, rows=65_536, slots=2048))
    chosen = sizes.resolve(config, runs.GRPO, tmp_path, seconds=0.0)
    assert chosen.engine.rows < 65_536 and chosen.engine.slots == 2048
    self._record(tmp_path, tiny.run_config(config, rows=4, slots=8_388_608))
    monkeypatch.setattr(setup, 'load', None)  # Nothing is loaded before a refusal.
    message = r'(?s)has 1.2 GB.*engine.slots are those that this run'
    with pytest.raises(ValueError, match=message):
      runs.run(config, tmp_path)

  @pytest.mark.parametrize(
    'chips, axes', [(4, {}), (4, {'data': 2}), (4, {'context': 4})]
  )
  def test_a_run_goes_on_with_other_chips(
    self, model, tmp_path, chips, axes, monkeypatch
  ):
    """With the command that it began with, or with what the message says."""
    config = runs.config(model, **_SHORT | _CHOSEN | {'slots': 130})
    began = sizes.resolve(config, runs.GRPO)
    assert began.batch.microbatch == 1
    self._record(tmp_path, began)
    elsewhere = footprint.Machine('cpu', 64 * sizes.GB, chips=chips, engines=chips)
    # These chips are not here.
    monkeypatch.setattr(setup, 'split_chips', lambda *_: None)
    config = tiny.run_config(config, **axes)
    other = sizes.resolve(config, runs.GRPO, tmp_path, machine=elsewhere)
    groups = config.mesh.count_groups(chips)
    assert (
      other.batch.microbatch % groups == 0 == other.batch.row_tokens % config.mesh.context
    )
    given = tiny.run_config(config, microbatch=2 * groups, row_tokens=384)
    given = sizes.resolve(given, runs.GRPO, tmp_path, machine=elsewhere)
    for resumed in (other, given):
      run_files.check_config(dataclasses.asdict(resumed), tmp_path, write=True)

  @pytest.mark.parametrize(
    ('may', 'name'),
    [(True, name) for name in ('mesh.data', 'checkpoint.keep', 'checkpoint.every')]
    + [(True, name) for name in ('schedule.eval_every', 'max_error_rate', 'engine.rows')]
    + [(True, name) for name in ('batch.microbatch', 'alarms.kl', 'model.remat')]
    + [(False, name) for name in ('engine.slots', 'seed', 'optimizer.learning_rate')]
    + [(False, name) for name in ('model.dtype', 'limits.max_turns', 'schedule.ahead')],
  )
  def test_only_what_changes_no_number_may_change(self, tmp_path, may, name):
    before = config_lib.Config()
    run_files.check_config(dataclasses.asdict(before), tmp_path, write=True)
    value = fields.get(before, name)
    other = 'x' if isinstance(value, str) else not value if value in (0, 1) else value * 2
    after = fields.replace(before, {name: other})
    if not may:
      with pytest.raises(ValueError, match=f'{name}: .* there, .* now'):
        run_files.check_config(dataclasses.asdict(after), tmp_path, write=True)
      return
    run_files.check_config(dataclasses.asdict(after), tmp_path, write=True)
    found = json.loads((tmp_path / 'config.json').read_text())
    assert found.pop('devices') and found.pop('version')
    assert found == dataclasses.asdict(after)

  def test_eight_devices_are_compiled_for_and_not_refused(self, model):
    """In a process of its own: this one has one device."""
    code = (
      'import sys; from agent_r1_jax import config, train; '
      'from agent_r1_jax.train.plan import footprint, sizes; footprint._OBVIOUS = 0.0; '
      'from agent_r1_jax.rl import algorithms; '
      'run = config.Config(model=config.Model(sys.argv[1])); '
      'run = sizes.resolve(run, algorithms.grpo()); '
      'print(run.batch.microbatch, train.make_mesh(run.mesh).size)'
    )
    # Eight devices share what the machine has, whatever else runs on it.
    memory = {sizes.MEMORY_VARIABLE: '32'}
    done = script.run('-c', code, model, JAX_NUM_CPU_DEVICES='8', **memory)
    assert done.returncode == 0, done.stderr
    microbatch, devices = map(int, done.stdout.split())
    assert devices == 8 and microbatch % 8 == 0
