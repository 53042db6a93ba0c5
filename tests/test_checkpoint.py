"""Checkpoints: exact, atomic, and clear about what is wrong."""

import gc
import json
import pathlib
import shutil
import signal
import time
from unittest import mock

from absl import logging as absl_logging
import jax
from jax import numpy as jnp
import mounts
import numpy as np
import optax
import pytest
import script as script_lib

from agent_r1_jax.host import checkpoint
from agent_r1_jax.host import workdir as workdir_lib

ROOT = pathlib.Path(__file__).parents[1]


def state(seed: int = 0):
  """Every kind of leaf that a run has: optax's named tuples, bfloat16, None."""
  key = jax.random.key(seed)
  params = {
    'layers': [{'w': jax.random.normal(key, (7, 5))}, {'w': jnp.zeros((5, 3))}],
    'b': jax.random.normal(key, (3,)).astype(jnp.bfloat16),
    'none': None,
  }
  return {
    'params': params,
    'opt': optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
    'count': jnp.asarray(seed, jnp.int32),
  }


def assert_equal(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def save(workdir, steps, keep=3):
  with checkpoint.Checkpointer(workdir, every=1, keep=keep) as checkpoints:
    for step in steps:
      assert checkpoints.save(step, state(step), {'step': step})
      checkpoints.wait()


def open_(workdir, every=1, keep=3):
  return checkpoint.Checkpointer(workdir, every=every, keep=keep)


class TestRoundTrip:
  def test_every_leaf_comes_back_exactly(self, tmp_path):
    host = {'cursor': 12, 'order': [3, 1, 2], 'nested': {'x': None, 'y': 0.1, 'z': True}}
    with open_(tmp_path) as checkpoints:
      assert checkpoints.restore(state()) is None
      checkpoints.save(4, state(4), host)
      host['order'].append(9)  # after the call, the caller's again
    with open_(tmp_path) as checkpoints:
      step, arrays, got = checkpoints.restore(state(0))
    assert step == 4
    assert_equal(arrays, state(4))
    assert got == host | {'order': [3, 1, 2]}

  def test_donating_the_arrays_after_save_changes_nothing(self, tmp_path):
    overwrite = jax.jit(
      lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0
    )
    arrays = {'w': jnp.arange(1_000_000.0)}
    with open_(tmp_path) as checkpoints:
      checkpoints.save(1, arrays, {})
      jax.block_until_ready(overwrite(arrays))
      like = {'w': jax.ShapeDtypeStruct((1_000_000,), jnp.float32)}
      _, got, _ = checkpoints.restore(like)
    np.testing.assert_array_equal(got['w'], np.arange(1_000_000.0))

  def test_older_ones_than_the_newest_k_are_deleted(self, tmp_path):
    save(tmp_path, range(5), keep=2)
    with open_(tmp_path) as checkpoints:
      assert checkpoints.steps == [3, 4]

  def test_a_step_that_is_saved_again_keeps_the_first(self, tmp_path):
    with open_(tmp_path) as checkpoints:
      assert checkpoints.save(1, state(1), {})
      assert not checkpoints.save(1, state(2), {})
      assert_equal(checkpoints.restore(state())[1], state(1))


class TestMistakes:
  def test_another_model_is_refused_leaf_by_leaf(self, tmp_path):
    save(tmp_path, [1])
    other = state()
    other['params']['layers'][0]['w'] = jnp.zeros((7, 6))
    other['params']['extra'] = jnp.zeros(1)
    other['count'] = jnp.zeros((), jnp.float32)
    with open_(tmp_path) as checkpoints, pytest.raises(ValueError) as caught:
      checkpoints.restore(other)
    assert 'params.layers.0.w: float32[7, 5] there, float32[7, 6] now' in str(
      caught.value
    )
    assert 'params.extra: absent there, float32[1] now' in str(caught.value)
    assert 'count: int32[] there, float32[] now' in str(caught.value)
    assert (tmp_path / 'checkpoints' / '1').is_dir()  # refused, not put aside

  def test_two_leaves_of_one_name_are_refused(self, tmp_path):
    with open_(tmp_path) as checkpoints, pytest.raises(ValueError, match='the same name'):
      checkpoints.save(1, {'a.b': jnp.zeros(1), 'a': {'b': jnp.zeros(1)}}, {})


def damage(directory: pathlib.Path, name: str, how: str):
  for path in directory.rglob('*'):
    if path.is_file() and path.parent.name != 'ocdbt.process_0' and name in str(path):
      content = path.read_bytes()
      path.write_bytes(content[: len(content) // 2]) if how == 'cut' else path.unlink()


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited:RuntimeWarning')
class TestDamage:
  """Orbax's unfinished coroutines warn when they are collected: so in these tests."""

  def test_one_of_several_processes_puts_no_damaged_one_aside(
    self, tmp_path, monkeypatch
  ):
    save(tmp_path, [1, 2, 3])
    damage(tmp_path / 'checkpoints' / '3', 'manifest', 'remove')
    with open_(tmp_path) as checkpoints:
      with pytest.raises(checkpoint._UnreadableError) as damaged:
        checkpoints._read(3, state())
      monkeypatch.setattr(checkpoints, '_read', mock.Mock(side_effect=damaged.value))
      monkeypatch.setattr(jax, 'process_count', lambda: 2)
      monkeypatch.setattr(checkpoints, 'wait', lambda: None)
      with pytest.raises(ValueError, match=r'away to go on from \[1, 2\]'):
        checkpoints.restore(state())
      monkeypatch.undo()

  @pytest.mark.parametrize('how', ['cut', 'remove'])
  @pytest.mark.parametrize('name', ['/d/', '_METADATA', 'manifest', 'data.json'])
  def test_an_older_one_is_used_and_the_damaged_one_kept_aside(self, tmp_path, name, how):
    save(tmp_path, [1, 2])
    damage(tmp_path / 'checkpoints' / '2', name, how)
    with open_(tmp_path) as checkpoints:
      with pytest.warns(
        UserWarning, match=r'checkpoints/2 cannot be read \(.+2.unreadable'
      ):
        step, arrays, host = checkpoints.restore(state())
      assert (step, host, checkpoints.steps) == (1, {'step': 1}, [1])
      assert_equal(arrays, state(1))
      assert checkpoints.save(2, state(2), {'step': 2})  # the run goes on
      assert checkpoints.restore(state())[0] == 2
    assert (tmp_path / 'checkpoints' / '2.unreadable').is_dir()
    gc.collect()

  def test_where_none_can_be_read_every_start_is_refused(self, tmp_path):
    save(tmp_path, [1])
    shutil.copytree(tmp_path / 'checkpoints' / '1', tmp_path / 'sound')
    damage(tmp_path / 'checkpoints' / '1', 'manifest', 'remove')
    said = r'no checkpoint in .* can be read; they are kept there as 1\.unreadable'
    with open_(tmp_path) as checkpoints:
      with pytest.warns(UserWarning), pytest.raises(ValueError, match=said):
        checkpoints.restore(state())
    for _ in range(2):  # nor at any later start
      with open_(tmp_path) as checkpoints, pytest.raises(ValueError, match=said):
        checkpoints.restore(state())
    shutil.copytree(tmp_path / 'sound', tmp_path / 'checkpoints' / '1')
    with open_(tmp_path) as checkpoints:
      assert_equal(checkpoints.restore(state())[1], state(1))
    gc.collect()

  def test_no_flipped_bit_is_restored(self, tmp_path):
    """In every file of a checkpoint; of most, Orbax alone notices nothing."""
    save(tmp_path, [1])
    folder, rng = tmp_path / 'checkpoints' / '1', np.random.default_rng(0)
    files = sorted(p for p in folder.rglob('*') if p.is_file() and p.stat().st_size)
    assert len(files) >= 6 and any('/d/' in str(path) for path in files)
    with open_(tmp_path) as checkpoints:
      for path in files:
        if path.name in ('_CHECKPOINT_METADATA', 'commit_success.txt'):
          continue  # names, times and a marker, which no restored value depends on
        whole = path.read_bytes()
        for position in {0, len(whole) - 1, *rng.integers(len(whole), size=4)}:
          data = bytearray(whole)
          data[position] ^= 1 << rng.integers(8)
          path.write_bytes(data)
          with pytest.raises(
            checkpoint._UnreadableError, match=r'checkpoints/1 cannot be read \(.+\)'
          ):
            checkpoints._read(1, state())
        path.write_bytes(whole)
      assert_equal(checkpoints.restore(state())[1], state(1))
      path = next(path for path in files if '/arrays/d/' in str(path))
      path.write_bytes(path.read_bytes()[:-1] + b'x')
      with pytest.raises(checkpoint._UnreadableError, match='its checksum differs'):
        checkpoints._read(1, state())
    gc.collect()

  def test_a_checkpoint_without_checksums_is_passed_over(self, tmp_path):
    """Of two, the older is read: flipped values cannot pass as the written ones."""
    save(tmp_path, [1, 2])
    folder = tmp_path / 'checkpoints' / '2'
    (folder / 'checksums.json').unlink()
    data = max((folder / 'arrays' / 'd').iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with open_(tmp_path) as checkpoints:
      with pytest.warns(UserWarning, match=r'checkpoints/2 .*checksums.json is missing'):
        step, arrays, _ = checkpoints.restore(state())
    assert step == 1
    assert_equal(arrays, state(1))
    gc.collect()


class TestDeleted:
  """The record that there has been a checkpoint, in the folder around `checkpoints`."""

  said = r'the checkpoint of step 3 was completed, and there is no checkpoint in .*delete'

  def refuse(self, workdir):
    for _ in range(2):
      with open_(workdir) as checkpoints, pytest.raises(ValueError, match=self.said):
        checkpoints.restore(state())

  def begin_anew(self, workdir):
    for _ in range(2):
      with open_(workdir) as checkpoints:
        assert checkpoints.restore(state()) is None

  def test_where_all_were_deleted_a_run_is_refused_until_the_record_is_too(
    self, tmp_path
  ):
    save(tmp_path, [3])
    checkpoints = tmp_path / 'checkpoints'
    checkpoints.rename(tmp_path / 'away')
    self.refuse(tmp_path)
    shutil.rmtree(checkpoints)
    (tmp_path / 'away').rename(checkpoints)
    with open_(tmp_path) as opened:
      assert opened.restore(state())[0] == 3
    shutil.rmtree(checkpoints)
    (tmp_path / 'first_checkpoint').unlink()  # As the message says.
    self.begin_anew(tmp_path)

  def test_where_the_newest_was_deleted_it_is_said(self, tmp_path):
    save(tmp_path, [3, 6])
    shutil.rmtree(tmp_path / 'checkpoints' / '6')
    for _ in range(2):
      with open_(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match='step 6 is gone .* That of step 3 is used'):
          assert checkpoints.restore(state())[0] == 3
    save(tmp_path, [9])
    # Half of a later one is no checkpoint that was deleted.
    (tmp_path / 'first_checkpoint').write_text('12\n')
    (tmp_path / 'checkpoints' / '12.orbax-checkpoint-tmp').mkdir()
    with open_(tmp_path) as checkpoints:
      assert checkpoints.restore(state())[0] == 9
    assert (tmp_path / 'first_checkpoint').read_text() == '9\n'

  def test_where_all_were_deleted_half_of_a_later_one_is_no_checkpoint(self, tmp_path):
    save(tmp_path, [3])
    shutil.rmtree(tmp_path / 'checkpoints' / '3')
    (tmp_path / 'checkpoints' / '6.orbax-checkpoint-tmp').mkdir()
    self.refuse(tmp_path)

  def test_a_run_killed_before_its_first_is_complete_begins_anew(self, tmp_path):
    """Its record is on disk, it has no final name, and the run begins anew."""
    script = """
import os, signal, sys
import jax
from agent_r1_jax.host import checkpoint
def prepare_and_die(self, prepare=checkpoint.Checkpointer._prepare_commit):
  prepare(self)
  os.kill(os.getpid(), signal.SIGKILL)
checkpoint.Checkpointer._prepare_commit = prepare_and_die
with checkpoint.Checkpointer(sys.argv[1], every=1) as checkpoints:
  checkpoints.save(3, {'w': jax.numpy.zeros(3)}, {})
"""
    assert script_lib.run('-c', script, tmp_path).returncode == -signal.SIGKILL
    assert (tmp_path / 'first_checkpoint').read_text() == '3\n'
    self.begin_anew(tmp_path)

  def test_a_run_whose_first_could_not_be_completed_begins_anew(
    self, tmp_path, monkeypatch
  ):
    def prepare(self, prepare=checkpoint.Checkpointer._prepare_commit):
      prepare(self)
      raise OSError(28, 'No space left on device')

    with open_(tmp_path) as checkpoints:
      with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, '_prepare_commit', prepare)
        checkpoints.save(3, state(), {})
        with pytest.raises(OSError, match='step 3 .* disk is full'):
          checkpoints.wait()
      assert checkpoints.restore(state()) is None
    self.begin_anew(tmp_path)


@pytest.fixture
def small_disk(tmp_path):
  """A disk of 1.5 MB."""
  with mounts.mounted(tmp_path, 'size=1500k'):
    yield tmp_path


class TestDisk:
  def test_a_full_disk_leaves_the_earlier_ones_and_one_message(self, small_disk, caplog):
    def arrays(step):
      return {'w': jax.random.normal(jax.random.key(step), (400, 400))}  # 0.6 MB

    absl_logging.get_absl_logger().addHandler(caplog.handler)
    with open_(small_disk, keep=9) as checkpoints:
      checkpoints.save(1, arrays(1), {})
      checkpoints.save(2, arrays(2), {})
      checkpoints.save(3, arrays(3), {})
      with pytest.raises(
        OSError, match=r'step 3 .* disk is full .* needs up to 0\.6.* steps \[1, 2\]'
      ) as full:
        checkpoints.wait()
      assert full.value.errno == 28
      assert checkpoints.restore(arrays(0))[0] == 2
    absl_logging.get_absl_logger().removeHandler(caplog.handler)
    tracebacks = [r for r in caplog.records if r.name == 'absl' and r.exc_info]
    assert not tracebacks, 'they bury the message'
    left = sorted(path.name for path in (small_disk / 'checkpoints').iterdir())
    assert left == ['1', '2'], 'the rest of the failed one takes no room'
    with open_(small_disk, keep=1) as checkpoints:
      assert_equal(checkpoints.restore(arrays(0))[1], arrays(2))

  def test_full_disk_is_told_by_the_next_save(self, small_disk):
    big = {'w': jax.random.normal(jax.random.key(0), (800, 800))}
    checkpoints = open_(small_disk)
    checkpoints.save(1, big, {})
    with pytest.raises(OSError, match='step 1 .* disk is full'):
      checkpoints.save(2, big, {})
    checkpoints.close()

  def test_a_read_only_workdir_is_refused(self, tmp_path):
    said = r'workdir=.* cannot be written to \(Read-only'
    with mounts.mounted(tmp_path, 'ro'):
      with pytest.raises(ValueError, match=said):
        open_(tmp_path / 'run')
      with pytest.raises(ValueError, match=said):
        workdir_lib.check_config(tmp_path, {})

  def test_a_workdir_that_is_a_file_is_refused(self, tmp_path):
    (tmp_path / 'run').write_text('')
    with pytest.raises(ValueError, match='cannot be written to'):
      open_(tmp_path / 'run')


_SAVER = """
import sys
import jax
from agent_r1_jax.host import checkpoint
def arrays(step):
  return {'w': jax.random.normal(jax.random.key(step), (512, 512))}
if __name__ == '__main__':
  with checkpoint.Checkpointer(sys.argv[1], every=1, keep=2) as checkpoints:
    restored = checkpoints.restore(arrays(0))
    start = restored[0] if restored else 0
    print('start', start, flush=True)
    for step in range(start + 1, 10_000):
      checkpoints.save(step, arrays(step), {'step': step})
      print('done', step - 1, flush=True)  # save waits for the one before
"""


def test_a_run_killed_while_writing_restores_the_newest_complete_one(tmp_path):
  """SIGKILL at random moments: what was complete stays, and the newest restores."""
  script = tmp_path / 'saver.py'
  script.write_text(_SAVER)
  moments = np.random.default_rng(0).uniform(0.02, 0.15, 3)
  complete = 0
  for saves, moment in enumerate(moments, start=2):
    with script_lib.Process(script, tmp_path / 'run') as process:
      start = int(process.stdout.readline().split()[1])
      assert start >= complete, 'a finished checkpoint was lost'
      for _ in range(saves):
        process.stdout.readline()
      time.sleep(moment)
      process.send_signal(signal.SIGKILL)
      rest = process.stdout.read().split()
    complete = int(rest[-1]) if rest and rest[-1].isdigit() else start + saves - 1

  def like(step):
    return {'w': jax.random.normal(jax.random.key(step), (512, 512))}

  with open_(tmp_path / 'run') as checkpoints:
    step, arrays, host = checkpoints.restore(like(0))
    assert step >= complete > 3
    assert host == {'step': step}
    assert_equal(arrays, like(step))
    assert not list((tmp_path / 'run' / 'checkpoints').glob('*tmp*'))


class TestConfig:
  config = {'train': {'steps': 40, 'lr': 1e-3, 'groups': (4, 8)}, 'seed': 0, 'mesh': {}}

  def test_a_config_is_written_once_and_then_compared(self, tmp_path):
    workdir_lib.check_config(tmp_path / 'run', self.config)
    written = (tmp_path / 'run' / 'config.json').read_text()
    assert json.loads(written)['train']['groups'] == [4, 8]
    workdir_lib.check_config(tmp_path / 'run', self.config)
    assert (tmp_path / 'run' / 'config.json').read_text() == written
    assert [p.name for p in (tmp_path / 'run').iterdir()] == ['config.json']

  def test_a_config_with_other_fields_is_refused_with_a_list_of_them(self, tmp_path):
    workdir_lib.check_config(tmp_path, self.config)
    other = {'train': {'steps': 40, 'lr': 2e-3, 'groups': (4, 8)}, 'mesh': {}, 'new': 'x'}
    with pytest.raises(ValueError) as caught:
      workdir_lib.check_config(tmp_path, other)
    lines = str(caught.value).splitlines()[1:-2]
    assert 'another version' in str(caught.value)
    assert lines == [
      '  new: absent there, "x" now',
      '  seed: 0 there, absent now',
      '  train.lr: 0.001 there, 0.002 now',
    ]

  def test_fields_that_may_change_do(self, tmp_path):
    workdir_lib.check_config(tmp_path, self.config)
    longer = self.config | {'train': self.config['train'] | {'steps': 80}}
    with pytest.raises(ValueError, match=r'train\.steps: 40 there, 80 now'):
      workdir_lib.check_config(tmp_path, longer)
    workdir_lib.check_config(tmp_path, longer, may_change=['train.steps'])
    workdir_lib.check_config(tmp_path, longer)

  def test_a_broken_file_and_a_config_that_is_no_json(self, tmp_path):
    with pytest.raises(ValueError, match='configuration cannot be written as JSON'):
      workdir_lib.check_config(tmp_path, {'fn': print})
    (tmp_path / 'config.json').write_text('{"seed": ')
    with pytest.raises(ValueError, match='is no JSON'):
      workdir_lib.check_config(tmp_path, self.config)


def test_arrays_of_four_devices_are_restored_on_two_and_one(tmp_path):
  """In a process of its own: four devices write, two and one read."""
  script = """
import sys, warnings, numpy as np, jax
warnings.simplefilter('error')
jax.config.update('jax_num_cpu_devices', 4)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from agent_r1_jax.host import checkpoint
def put(n, spec):
  mesh = Mesh(np.array(jax.devices()[:n]), ('x',))
  w = np.arange(32.0, dtype=np.float32).reshape(8, 4)
  return {'w': jax.device_put(w, NamedSharding(mesh, spec))}
with checkpoint.Checkpointer(sys.argv[1], every=1) as checkpoints:
  checkpoints.save(1, put(4, P('x')), {})
  for like in (put(2, P(None, 'x')), put(1, P()), put(4, P('x', None))):
    _, got, _ = checkpoints.restore(like)
    assert got['w'].sharding == like['w'].sharding
    np.testing.assert_array_equal(got['w'], like['w'])
print('read on three meshes')
"""
  result = script_lib.run('-c', script, tmp_path)
  assert result.stdout == 'read on three meshes\n', result.stderr


def test_a_second_run_on_a_workdir_is_refused(tmp_path):
  """Until the first ends, even by a kill."""
  script = """
import sys, time
from agent_r1_jax.host import workdir as workdir_lib
with workdir_lib.lock(sys.argv[1]):
  print('locked', flush=True)
  time.sleep(600)
"""
  with script_lib.Process('-c', script, tmp_path) as process:
    assert process.stdout.readline() == 'locked\n'
    said = f'in use by another run .process {process.pid}'
    with pytest.raises(ValueError, match=said), workdir_lib.lock(tmp_path):
      pass
  with workdir_lib.lock(tmp_path):
    pass
