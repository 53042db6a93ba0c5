"""The cache: prefilled, copied and decoded in any order, it gives the packed forward."""

import functools

import jax
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import automata
from agent_r1_jax.engine import automaton as automaton_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import running as running_lib
from agent_r1_jax.models import decoder

_B, _S, _STEPS = (tiny.SIZES[name] for name in ('rows', 'slots', 'steps'))
_M, _T = tiny.SIZES['feed_rows'], tiny.SIZES['feed_tokens']


@functools.cache
def _params(family='llama'):
  return tiny.params(tiny.config(family))


class Rows:
  """A cache, and the texts that its rows should hold."""

  def __init__(self, family='llama', stop=(), temperature=1.0, bucket=_S):
    self.config = tiny.config(family)
    self.learned = _params(family)
    self.params = decoder.unstack(self.learned, self.config)
    self.pool, self.stop = automaton_lib.AutomatonPool(tiny.VOCAB), stop
    self.bucket, self.temperature = bucket, temperature
    self.cache = decoder.empty_cache(self.config, _B, _S)
    self.keys = {row: 0 for row in range(_B)}
    self.texts = [[] for _ in range(_B)]  # of (token, chosen, log-prob)
    self.cached = [0] * _B
    self.states = [self._begin() for _ in range(_B)]
    self.finished = []

  def _begin(self):
    return self.pool.acquire(self.stop)

  def reset(self, keys):
    """Begins new texts in rows and gives them keys: {row: number}."""
    for row, number in keys.items():
      self._finish(row)
      self.keys[row], self.cached[row] = number, 0

  def feed(self, parts):
    """Appends {row: tokens} and prefills them: at most M rows of T tokens."""
    rows, count = np.full(_M, _B + 3, np.int32), np.ones(_M, np.int32)
    start = np.zeros(_M, np.int32)
    tokens = np.full((_M, _T), 11, np.int32)  # what lies behind `count` has no effect
    for m, (row, part) in enumerate(parts.items()):
      self.texts[row] += [(int(t), False, 0.0) for t in part]
      self.states[row] = self._begin()
      missing = [t for t, *_ in self.texts[row][self.cached[row] : -1]]
      assert len(missing) <= _T
      rows[m], start[m], count[m] = row, self.cached[row], len(missing)
      tokens[m, : len(missing)] = missing
      self.cached[row] += len(missing)
    self.cache = programs_lib.prefill(
      self.params,
      self.cache,
      *(rows, start, tokens, count),
      config=self.config,
      bucket=self.bucket,
    )

  def fork(self, pairs):
    """Begins texts with the first tokens of others: {row: (source, count)}."""
    source, rows = np.zeros(_M, np.int32), np.full(_M, _B, np.int32)
    begun = {row: self.texts[origin][:n] for row, (origin, n) in pairs.items()}
    for m, (row, (origin, n)) in enumerate(pairs.items()):
      source[m], rows[m] = origin, row
      self._finish(row)
      self.texts[row], self.cached[row] = list(begun[row]), n - 1
      self.states[row] = self._begin()
    self.cache = programs_lib.copy(self.cache, source, rows, bucket=self.bucket)

  def decode(self, budgets, in_place=False):
    """Samples with {row: budget}; returns {row: (tokens, stopped)}."""
    numpy, nothing = np, self.pool.acquire([])
    where = [row if in_place else m for m, row in enumerate(budgets)]
    places = programs_lib.Places(
      rows=numpy.full(_B, _B + 3, np.int32),
      length=numpy.zeros(_B, np.int32),
      last=numpy.zeros(_B, np.int32),
      # An unused place does not run, whatever it says.
      budget=numpy.full(_B, 5, np.int32),
      keys=numpy.zeros((_B, 2), np.uint32),
      temperature=numpy.full(_B, self.temperature, np.float32),
      top=numpy.zeros(_B, bool),
    )
    states = [nothing] * _B
    for m, (row, n) in zip(where, budgets.items(), strict=True):
      places.rows[m], places.length[m], places.budget[m] = row, self.cached[row], n
      places.last[m], places.keys[m] = self.texts[row][-1][0], (self.keys[row], 7)
      states[m] = self.states[row]
    states = {name: np.stack([s[name] for s in states]) for name in nothing}
    self.cache, (states,), out = programs_lib.decode(
      self.params,
      self.cache,
      places,
      np.zeros((1, _B), bool),
      (states,),
      (automaton_lib.make_tables(self.pool.entries),),
      config=self.config,
      guides=(automaton_lib.AUTOMATA,),
      steps=_STEPS,
      bucket=_S if in_place else self.bucket,
      in_place=in_place,
    )
    out, states = jax.device_get((out, states))
    replies = {}
    for m, row in zip(where, budgets, strict=True):
      n = out.count[m]
      tokens, logprobs = out.tokens[m, :n], out.logprobs[m, :n]
      self.texts[row] += [(int(t), True, float(x)) for t, x in zip(tokens, logprobs)]
      self.cached[row] += int(n)
      self.states[row] = {name: state[m] for name, state in states.items()}
      replies[row] = (tokens.tolist(), bool(out.stopped[m]))
      assert n <= min(places.budget[m], _STEPS)
    assert not np.delete(out.count, where).any()
    return replies

  def check(self):
    """Asserts that the log-probs of all texts so far are the learner's."""
    for row in range(_B):
      self._finish(row)
    segments = [
      types.Segment(
        *(np.array(x, kind) for x, kind in zip(zip(*text), 'i?f', strict=True))
      )
      for text in self.finished
    ]
    tiny.assert_on_policy(
      self.learned, segments, shape=self.config, temperature=self.temperature
    )
    return segments

  def _finish(self, row):
    if self.texts[row]:
      self.finished.append(self.texts[row])
    self.texts[row], self.cached[row], self.states[row] = [], 0, self._begin()


def _prompt(seed, n):
  return np.random.default_rng(seed).integers(5, tiny.VOCAB, n).tolist()


def _feed_all(rows, row, tokens, chunk=_T):
  for i in range(0, len(tokens), chunk):
    rows.feed({row: tokens[i : i + chunk]})


@pytest.mark.parametrize(
  'family, temperature, in_place',
  [('llama', 1.0, False), ('qwen3', 0.7, False), ('llama', 0.9, True)],
)
def test_any_schedule_is_the_packed_forward(family, temperature, in_place):
  """A random walk of feeds, forks, decodes and resets over all rows."""
  rng = np.random.default_rng(0)
  rows = Rows(family, (tiny.stop(range(5, 40)),), temperature)
  rows.reset({row: row for row in range(_B)})
  for step in range(120):
    room = [row for row in range(_B) if len(rows.texts[row]) + _STEPS <= _S]
    held = [row for row in range(_B) if rows.texts[row]]
    some = rng.permutation(room)[: rng.integers(1, _M + 1)].tolist()
    kind = rng.choice(['feed', 'feed', 'decode', 'decode', 'fork', 'reset'])
    if kind == 'feed':
      # Behind a reply, its last token is computed with them.
      rows.feed({row: _prompt(step, rng.integers(1, _T + 1)) for row in some})
    elif kind == 'decode':
      some = [row for row in some if rows.texts[row]]
      budgets = {row: int(rng.integers(0, 12)) for row in some}
      replies = rows.decode(budgets, in_place)
      for tokens, stopped in replies.values():
        ends = [5 <= t < 40 for t in tokens]
        assert not any(ends[:-1]) and any(ends) == stopped
    elif kind == 'fork' and held:
      origin = int(rng.choice(held))
      others = [row for row in range(_B) if row != origin][: rng.integers(1, _M + 1)]
      most = len(rows.texts[origin]) + 1
      rows.fork({row: (origin, int(rng.integers(1, most))) for row in others})
    elif kind == 'reset' and step % 3 == 0:
      rows.reset({int(rng.integers(_B)): 100 + step})
  segments = rows.check()
  assert len(segments) > 20
  assert sum(s.action_mask.sum() for s in segments) > 300


def test_other_rows_keep_every_bit():
  rows = Rows()
  rows.reset({row: row for row in range(_B)})
  for row in range(4):
    _feed_all(rows, row, _prompt(row, 20 + row))
  before = jax.device_get(rows.cache)

  def assert_kept(kept):
    after = jax.device_get(rows.cache)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
      np.testing.assert_array_equal(old[kept], new[kept])

  rows.decode({})  # nothing to do
  rows.feed({})
  rows.fork({})
  rows.reset({})
  assert_kept(list(range(_B)))
  rows.decode({1: 8})
  rows.feed({3: [9, 9]})
  rows.fork({5: (0, 7)})
  rows.reset({4: 4})
  assert_kept([0, 2])
  rows.check()


# Every token has a text, so that a stop string is sampled soon.
_VOCABULARY = [(b'a', b'b', b'cab')[t % 3] for t in range(tiny.VOCAB)]


def _stopped_replies(budgets):
  stop = automata.stop([], tiny.VOCAB, ['abba', 'ccc'], _VOCABULARY)
  rows = Rows(stop=(stop,))
  rows.reset({row: row for row in range(_B)})
  for row in range(_B):
    rows.feed({row: [6, 7, 7]})  # 'abb' of the prompt is no part of a reply
  replies, stopped = {row: [] for row in range(_B)}, set()
  for budget in budgets:
    running = set(range(_B)) - stopped
    for row, (tokens, ended) in rows.decode(dict.fromkeys(running, budget)).items():
      replies[row] += tokens
      stopped |= {row} if ended else set()
  return replies, stopped


def test_the_state_of_a_stop_string_lives_across_segments():
  replies, stopped = _stopped_replies([8] * 6)
  assert 1 < len(stopped)
  for row, tokens in replies.items():
    text = b''.join(_VOCABULARY[t] for t in tokens)
    assert (b'abba' in text) == (row in stopped)
    assert b'abba' not in b''.join(_VOCABULARY[t] for t in tokens[:-1])
  for budgets in ([1] * 48, [5, 1, 2, 8] * 3):
    assert _stopped_replies(budgets) == (replies, stopped)


def test_a_bucket_is_compiled_once_and_changes_nothing():
  fns = (programs_lib.prefill, programs_lib.decode, programs_lib.copy)

  def play(rows, length):
    rows.reset({0: 1, 1: 1})
    _feed_all(rows, 0, _prompt(0, length))
    rows.fork({1: (0, length), 5: (0, 1)})
    return rows.decode({0: length % 7 + 2, 1: length % 7 + 2, 5: 3})

  lengths = (9, 2, 5, 17, 40, 61)
  expected = [play(Rows(), length) for length in lengths]
  assert all(replies[0] == replies[1] for replies in expected)
  rows, before = Rows(bucket=96), [fn._cache_size() for fn in fns]
  assert play(rows, lengths[0]) == expected[0]
  assert [fn._cache_size() for fn in fns] == [n + 1 for n in before]
  with tiny.compilations() as compiled:
    assert [play(rows, length) for length in lengths] == expected
  assert not compiled
  rows.check()


def test_a_decode_in_place_has_no_second_cache():
  """Its temporaries are less than a tenth of a cache of long rows; a copy is as large."""
  config, slots = tiny.config(layers=4), 8192
  shapes = jax.eval_shape(lambda: decoder.empty_cache(config, _B, slots))
  params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
  params = jax.eval_shape(lambda params: decoder.unstack(params, config), params)
  arguments = running_lib.make_decode_arguments({}, _B, (), unused_row=_B)
  sizes = {'config': config, 'guides': (), 'steps': _STEPS, 'bucket': slots}
  cache, temporaries = sum(x.size * 4 for x in jax.tree.leaves(shapes)), {}
  for in_place in (False, True):
    program = programs_lib.decode.lower(
      params, shapes, *arguments, (), **sizes, in_place=in_place
    )
    memory = program.compile().memory_analysis()
    temporaries[in_place] = memory.temp_size_in_bytes / cache
  assert temporaries[True] < 0.1 < 1 < temporaries[False]
