"""Records: everything comes back to the last bit, and nothing in them runs."""

import collections
import dataclasses
import enum
import pickle

import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.host import records
from agent_r1_jax.rollout import store as store_lib

_TASK = types.Task('t0', [{'role': 'user', 'content': 'name'}], answer={'x'})


def _same(a, b):
  """Equal in value and type, NaN and the sign of 0 included, all the way down."""
  assert type(a) is type(b), (a, b)
  if dataclasses.is_dataclass(a):
    assert a is b or all(
      _same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
    )
  elif isinstance(a, np.ndarray | np.generic):
    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
  elif isinstance(a, dict):
    assert [*a] == [*b] and all(_same(a[k], b[k]) for k in a)
  elif isinstance(a, list | tuple):
    assert len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
  elif isinstance(a, float):
    assert a.hex() == b.hex()
  else:
    assert a == b
  return True


def _trajectory(group=0, sample=0, metrics=None):
  rng = np.random.default_rng(sample)
  segments = [
    types.Segment(
      rng.integers(0, 300, n, np.int32),
      rng.random(n) < 0.5,
      rng.normal(size=n).astype(np.float32),
      np.arange(n, dtype=np.int32),
    )
    for n in (5, 3)
  ]
  turns = [types.Turn(0, 1, 4, 0.1), types.Turn(1, 0, 2, -0.0)]
  messages = [*_TASK.messages, {'role': 'assistant', 'content': 'é\ud83d 😀\x00'}]
  metrics = metrics or {'em': np.float32(0.1), 'inf': float('inf')}
  return types.Trajectory(
    _TASK, group, sample, segments, turns, messages, types.Status.DONE, metrics
  )


@pytest.mark.parametrize(
  'value',
  [
    [None, True, 1, -(2**63), '', 'é\x00', b'\xff'],
    [0.1, -0.0, float('nan'), float('-inf')],
    '\ud83d\ude00',  # two halves of a character, which are not the character
    [2**63, 2**64, -(2**64), 10**5000],
    {'a': {1: 2, 1.5: 3, None: 4, (1, 'b'): 5}, 'z': {}, 'b': []},
    ((), (1, (2, [3])), {1, 2}, {'a'}, frozenset({(1, 2)})),
    [np.float32(0.1), np.float64(0.1), np.int8(-3), np.bool_(True), np.complex64(1j)],
    np.arange(24, dtype=np.int32).reshape(2, 3, 4)[:, ::2],
    [np.zeros((0, 3), np.float16), np.array(7), np.array([True, False])],
  ],
)
def test_what_is_packed_comes_back(value):
  assert _same(records.unpack(records.pack(value)), value)


def test_subclasses_become_what_they_stand_for():
  value = [collections.OrderedDict(a=1), np.str_('x'), collections.Counter('aa')]
  assert _same(records.unpack(records.pack(value)), [{'a': 1}, 'x', {'a': 2}])
  message = {'role': _Role.USER, _Role.USER: _Level.HIGH}
  assert _same(records.unpack(records.pack(message)), {'role': 'user', 'user': 2})


class _Role(str, enum.Enum):  # noqa: UP042
  USER = 'user'


class _Level(enum.IntEnum):
  HIGH = 2


class _Thing:
  pass


def _deep():
  value = []
  for _ in range(100_000):
    value = [value]
  return value


def _own():
  value = []
  value.append(value)
  return value


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (_Thing, '_Thing is no plain data; give text, numbers'),
    (lambda: {'x': [len]}, 'builtin_function_or_method is no plain data; give'),
    (lambda: np.array(['text']), 'an array of'),
    (lambda: np.array([None]), 'an array of object'),
    (_deep, 'recursion limit'),
    (_own, 'recursion limit'),
  ],
)
def test_what_cannot_be_written_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    records.pack(make())


def test_no_bytes_make_it_run_or_break_it():
  """For every cut, flipped bits, and malformed extension types."""
  whole: bytes = records.pack(store_lib.list_fields(_trajectory()))
  rng = np.random.default_rng(0)
  flipped = []
  for _ in range(2000):
    data = bytearray(whole)
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    flipped.append(bytes(data))
  strange = [whole[:i] for i in range(len(whole))] + flipped
  strange += [b'\xc7\x00\x04', b'\xdf\xff\xff\xff\xff', b'\xc9\xff\xff\xff\xff\x04']
  strange += [
    records.msgpack.packb(records.msgpack.ExtType(4, records.pack(a)))
    for a in (['|O', [1], bytes(8)], ['<f4', [2**40], b''], ['<f4', [-1]], 3)
  ]
  strange.append(b'\x91' * 100_000)
  refused = 0
  for data in strange:
    try:
      store_lib.make_trajectory(records.unpack(data), _TASK)
    except ValueError:
      refused += 1
  assert refused > len(whole)


class _Bomb:
  """Pickle would call `explode` on reading it."""

  def __reduce__(self):
    return (_Bomb.explode, ())

  @staticmethod
  def explode():
    raise AssertionError('code of a file has run')


class TestEpisodeStore:
  def _kept(self, tmp_path, n=3):
    rollout = store_lib.EpisodeStore(tmp_path).open_rollout(0, [_TASK])
    for number in range(n):
      rollout.add(('t0', number), _trajectory(sample=number))
    (path,) = (tmp_path / 'rollouts' / '0').iterdir()
    return path

  def test_stored_episodes_come_back(self, tmp_path):
    self._kept(tmp_path)
    rollout = store_lib.EpisodeStore(tmp_path).open_rollout(0, [_TASK])
    for number in range(3):
      assert _same(rollout.get(('t0', number)), _trajectory(sample=number))
    assert rollout.get(('t0', 3)) is None

  def test_a_kill_may_cut_a_file_anywhere(self, tmp_path):
    path = self._kept(tmp_path)
    whole, found = path.read_bytes(), []
    for size in range(len(store_lib._MAGIC), len(whole), 7):
      path.write_bytes(whole[:size])
      rollout = store_lib.EpisodeStore(tmp_path).open_rollout(0, [_TASK])
      found.append(sum(rollout.get(('t0', n)) is not None for n in range(3)))
    assert found == sorted(found) and {*found} == {0, 1, 2}

  @pytest.mark.parametrize('name', ['0-0-1.pickle', '0-0-1.episodes'])
  def test_nothing_in_a_file_runs(self, tmp_path, name):
    good = self._kept(tmp_path)
    bad = pickle.dumps((('t0', 0), _Bomb()))
    with pytest.raises(AssertionError, match='has run'):
      pickle.loads(bad)
    good.with_name(name).write_bytes(bad)
    with pytest.warns(UserWarning, match=f'{name} is skipped'):
      rollout = store_lib.EpisodeStore(tmp_path).open_rollout(0, [_TASK])
    assert rollout.get(('t0', 0)) is not None  # of the other file

  def test_an_episode_whose_bytes_changed_is_skipped_with_a_warning(self, tmp_path):
    path = self._kept(tmp_path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match='its bytes changed'):
      rollout = store_lib.EpisodeStore(tmp_path).open_rollout(0, [_TASK])
    assert rollout.get(('t0', 1)) and not rollout.get(('t0', 2))

  def test_an_episode_of_another_task_is_skipped_with_a_warning(self, tmp_path):
    self._kept(tmp_path)
    other = types.Task('another', [])
    with pytest.warns(UserWarning, match="an episode of task 't0' where 'another'"):
      rollout = store_lib.EpisodeStore(tmp_path).open_rollout(0, [other])
    assert not rollout.get(('t0', 0)) and not rollout.get(('another', 0))

  def test_what_cannot_be_written_is_told_once_and_played_again(self, tmp_path, recwarn):
    rollout = store_lib.EpisodeStore(tmp_path).open_rollout(0, [_TASK])
    rollout.add(('t0', 0), _trajectory(metrics={'x': _Thing()}))
    rollout.add(('t0', 1), _trajectory(metrics={'x': _Thing()}))
    rollout.add(('t0', 2), _trajectory(sample=2))
    (warning,) = recwarn
    assert 'finished episodes are not written to' in str(warning.message)
    rollout = store_lib.EpisodeStore(tmp_path).open_rollout(0, [_TASK])
    assert not rollout.get(('t0', 0)) and rollout.get(('t0', 2))
