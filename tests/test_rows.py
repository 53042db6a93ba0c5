"""The host's record of the rows, against a model that knows what each slot holds."""

import numpy as np
import pytest

from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib

_B, _S, _LEAST = 5, 64, rows_lib.MIN_SHARED
# The most tokens that a decode computes, and the window of a layer that slides.
_DECODE, _WINDOW = 5, 6


def _text(*parts):
  """A text of random parts (seed, number of tokens)."""
  tokens = [np.random.default_rng(seed).integers(0, 50, n) for seed, n in parts]
  return request_lib.Sequence(None, np.concatenate(tokens))


def _generation(text, number):
  request = request_lib.Request(text.tokens)
  return request_lib.Generation(request, text, number, lambda: None)


def _prefixes(text, begin, end):
  """The bytes of a text's first `begin` + 1 to `end` tokens."""
  whole, size = text.tokens[:end].tobytes(), text.tokens[:0].itemsize
  return [whole[: size * (i + 1)] for i in range(begin, end)]


class Cache:
  """Rows, and what the device would hold in each slot: (version, the text up to it).

  It is what layers hold that keep all, those that keep a window in `ring` slots, and
  those that have a state, of which they keep `states` for each row.
  """

  def __init__(self, width=_B, ring=_S, states=0):
    rewind = ring - _WINDOW if ring < _S else None
    self.rows = rows_lib.CacheRows(_B, _S, rewind, states)
    self.states = [[None] * states for _ in range(_B)]
    self.slots = [[None] * _S for _ in range(_B)]
    self.rings = [[None] * ring for _ in range(_B)]
    self.width, self.number = width, 0
    # Whether each request under way asks for a policy of its own.
    self.live = {}
    self.computed = self.copied = 0

  def submit(self, text, own=False):
    generation = _generation(text, self.number)
    self.number += 1
    self.live[generation] = own
    return generation

  def leave(self, generation):
    del self.live[generation]
    row = self.rows.find(generation.sequence)
    if row is not None and row.generation is generation:
      row.generation = None

  def work(self, version, own=False, chunk=7, copies_at_once=3):
    """One piece of work of the replica, for one policy; True if all rows are filled."""
    chosen = []
    for generation in [g for g, its_own in self.live.items() if its_own == own]:
      row = self.rows.find(generation.sequence)
      if row is None or row.generation is not generation:
        row = self.rows.assign(generation, version)
      if row is not None:
        row.note_policy(version)
        chosen.append(row)
      if len(chosen) == self.width:
        break
    self.check()
    missing = [row for row in chosen if not row.prefilled]
    copies, waiting = self.rows.find_sources(missing, copies_at_once)
    assert len(copies) <= copies_at_once
    # The device reads all sources before it writes a row.
    kinds = self.rings, self.states
    held = [[[*kind[s.row.index]] for kind in kinds] for s, _ in copies]
    for (source, row), copied in zip(copies, held, strict=True):
      self._copy(source, row, version)
      self.rings[row.index], self.states[row.index] = copied
      row.copy(source)
    going = [row for row in missing if row not in waiting]
    if not copies:
      # Nobody waits for a row that waits: somebody is computed while anybody waits.
      assert going or not waiting
      for row in going:
        part = row.missing[:chunk]
        self._compute(row, len(part), version, row.plan_states(len(part)))
        row.prefill(len(part))
        self.computed += len(part)
    self.check()
    return chosen, not missing

  def _copy(self, source, row, version):
    assert source.row is not row and source.length > row.cached
    assert source.row.version == version == row.version
    # The source is computed, by this policy, and of the same tokens.
    assert source.length <= min(source.row.cached, row.size - 1)
    held = self.slots[source.row.index][: source.length]
    assert held == self._wanted(row, source.length, version)
    self.slots[row.index][: source.length] = held
    self.copied += source.length - row.cached

  def _compute(self, row, n, version, plan):
    slots, ring = self.slots[row.index], self.rings[row.index]
    window = range(max(0, row.cached - _WINDOW + 1), row.cached)
    assert [ring[i % len(ring)] for i in window] == [slots[i] for i in window]
    texts = _prefixes(row.sequence, row.cached, row.cached + n)
    for i, text in enumerate(texts, row.cached):
      slots[i] = ring[i % len(ring)] = (version, text)
    states = self.states[row.index]
    if states:
      assert not row.cached or states[plan.begin] == slots[row.cached - 1]
      if plan.keep < len(states):
        states[plan.keep] = states[plan.begin]
      states[0] = slots[row.cached + n - 1]
      if plan.save < len(states):
        states[plan.save] = states[0]

  def _wanted(self, row, n, version):
    return [(version, text) for text in _prefixes(row.sequence, 0, n)]

  def decode(self, row, tokens, version):
    """Samples tokens: all but the last are computed."""
    assert row.prefilled
    begin, none = row.cached, len(row.states)
    plan = rows_lib.StatePlan(row.begin, none, none, [])
    row.note_write(_DECODE)
    row.extend(np.asarray(tokens))
    row.cached, end = begin, row.cached
    self._compute(row, end - begin, version, plan)
    # Tokens of a draft that were not sampled.
    for i in range(end, begin + _DECODE):
      self.rings[row.index][i % len(self.rings[row.index])] = None
    row.cached = end

  def check(self):
    """Asserts that what the host notes of each row is true."""
    held = [row.sequence for row in self.rows.rows if row.sequence is not None]
    assert len({id(text) for text in held}) == len(held)
    for row in self.rows.rows:
      if row.sequence is None:
        continue
      assert self.rows.find(row.sequence) is row
      slots = self.slots[row.index][: row.cached]
      assert [slot[1] for slot in slots] == _prefixes(row.sequence, 0, row.cached)
      for n, state in zip(row.states, self.states[row.index], strict=True):
        assert n <= row.cached and (n < 1 or state == slots[n - 1])
      if row.version != rows_lib.MIXED:
        assert {slot[0] for slot in slots} <= {row.version}
      if row.generation is not None:
        assert row.cached <= row.size - 1
        np.testing.assert_array_equal(row.tokens[: row.size], row.sequence.tokens)
        assert (row.tokens[row.size :] == -1).all()


@pytest.mark.parametrize(('ring', 'states'), [(_S, 0), (20, 0), (_S, 1), (_S, 4)])
@pytest.mark.parametrize('seed', range(8))
def test_after_any_sequence_of_events_the_record_of_the_rows_is_true(seed, ring, states):
  """Texts begin, go on, fork, end and are cancelled; one of two policies changes."""
  rng = np.random.default_rng(seed)
  cache, texts, version = Cache(int(rng.integers(2, _B + 1)), ring, states), [], 1
  for _ in range(300):
    busy = [generation.sequence for generation in cache.live]
    idle = [text for text in texts if text not in busy and len(text) < _S - 12]
    own = bool(rng.random() < 0.3)
    kind = rng.choice(['new', 'fork', 'on', 'work', 'work', 'work', 'leave', 'policy'])
    if kind == 'new' and len(busy) < 9:
      # Few beginnings, so that much is shared.
      texts.append(_text((int(rng.integers(2)), 24), (int(rng.integers(3)), 9)))
      cache.submit(texts[-1], own)
    elif kind == 'fork' and texts and len(busy) < 9:
      text = texts[rng.integers(len(texts))]
      begin = text.tokens[: rng.integers(1, min(len(text), _S - 20) + 1)]
      texts.append(request_lib.Sequence(None, begin))
      texts[-1].append(rng.integers(0, 50, 3))
      cache.submit(texts[-1], own)
    elif kind == 'on' and idle:
      text = idle[rng.integers(len(idle))]
      text.append(rng.integers(0, 50, int(rng.integers(1, 4))))
      cache.submit(text, own)
    elif kind == 'work':
      policy = 0 if own else version
      chosen, filled = cache.work(policy, own)
      for row in chosen if filled else ():
        cache.decode(row, rng.integers(0, 50, int(rng.integers(1, 5))), policy)
        # Room for the next.
        if rng.random() < 0.5 or row.size > _S - 12:
          cache.leave(row.generation)
    elif kind == 'leave' and cache.live:
      generation = [*cache.live][rng.integers(len(cache.live))]
      cache.leave(generation)
      if rng.random() < 0.5:
        generation.sequence.close()
    elif kind == 'policy' and rng.random() < 0.3:
      version += 1
    cache.check()
  # All requests that are left get their turn.
  for turn in range(400):
    chosen, filled = cache.work(*((version, False) if turn % 2 else (0, True)))
    for row in chosen if filled else ():
      cache.leave(row.generation)
    if not cache.live:
      break
  assert not cache.live and cache.copied and cache.computed


class TestPlace:
  def test_closed_texts_go_first_then_those_that_were_used_longest_ago(self):
    cache = Cache()
    texts = [_text((n, 20)) for n in range(_B)]
    for text in texts:
      cache.submit(text)
    while not cache.work(0)[1]:
      pass
    for generation in [*cache.live]:
      cache.leave(generation)
    again = cache.submit(texts[0])
    cache.work(0)
    cache.leave(again)
    texts[3].close()
    gone = []
    for n in range(3):
      cache.submit(_text((10 + n, 20)))
      cache.work(0)
      gone += [t for t in texts if cache.rows.find(t) is None and t not in gone]
    assert gone == [texts[3], texts[1], texts[2]]

  @pytest.mark.parametrize('version, kept', [(0, 12), (1, 0)])
  def test_a_text_keeps_the_prefix_of_the_last_one_in_its_row(self, version, kept):
    rows = rows_lib.CacheRows(1, _S)
    first, second = _text((0, 12), (1, 8)), _text((0, 12), (2, 8))
    generation = _generation(first, 0)
    row = rows.assign(generation, 0)
    row.cached, row.generation = 19, None
    assert rows.assign(_generation(second, 1), version) is row
    # Tokens may be the same by chance.
    assert row.cached >= kept and (row.cached == 0) == (kept == 0)
    assert rows.find(first) is None and row.version == version

  def test_an_equal_text_keeps_all_but_the_last_token(self):
    rows = rows_lib.CacheRows(1, _S)
    row = rows.assign(_generation(_text((0, 12)), 0), 0)
    row.extend(np.array([7, 7]))
    row.cached, row.generation = 13, None
    assert rows.assign(_generation(_text((0, 12)), 1), 0).cached == 11


class TestRewind:
  """Rows of 64 slots whose layers slide: a text may go on 8 tokens before the last."""

  def _go_back(self, rows, row, tokens, number):
    row.generation = None
    text = request_lib.Sequence(None, row.sequence.tokens[:tokens])
    row.sequence.close()
    assert rows.assign(_generation(text, number), 0) is row
    return row

  @pytest.mark.parametrize('tokens, kept', [(18, 17), (17, 16), (16, 0), (1, 0)])
  def test_a_text_goes_on_where_the_window_is_still_there(self, tokens, kept):
    rows = rows_lib.CacheRows(1, _S, max_rewind=8)
    row = rows.assign(_generation(_text((0, 20)), 0), 0)
    row.prefill(19)
    row.note_write(_DECODE)
    assert (row.cached, row.written) == (19, 24)
    self._go_back(rows, row, tokens, 1)
    # From 16 on: 24 slots were written, and the last 8 are not needed.
    assert (row.cached, row.written) == (kept, 24 if kept else 0)
    row.prefill(len(row.missing))
    assert row.prefilled and row.written == (24 if kept else tokens - 1)

  def test_what_was_written_counts_however_often_it_goes_back(self):
    rows = rows_lib.CacheRows(1, _S, max_rewind=8)
    row = rows.assign(_generation(_text((0, 20)), 0), 0)
    row.prefill(19)
    row.note_write(_DECODE)
    row = self._go_back(rows, row, 18, 1)
    row.note_write(1)  # Less than the text before it: this is still there.
    assert row.written == 24
    assert self._go_back(rows, row, 17, 2).cached == 16
    assert self._go_back(rows, row, 16, 3).cached == 0


class TestStates:
  """Rows that keep four states: that of now, and three from before."""

  def test_a_text_goes_on_where_a_state_is_and_a_cut_reply_at_its_prompts_end(self):
    rows = rows_lib.CacheRows(1, _S, states=4)
    row = rows.assign(_generation(_text((0, 20)), 0), 0)
    row.prefill(19)
    row.note_write(_DECODE)  # Of a decode whose tokens do not count.
    lost = rows_lib.LOST
    assert row.states == [lost, 19, lost, lost] and row.begin == 1
    row.extend(np.array([7, 7]))
    assert row.states == [21, 19, lost, lost] and row.begin == 0
    row.sequence.append(np.arange(3))
    row.tokens[: row.size] = row.sequence.tokens
    row.prefill(3)
    assert row.states == [24, 19, 21, 24]  # The reply's end, and the next prompt's.
    for tokens, kept in ((24, 21), (21, 19), (19, 0)):
      row.generation, text = (
        None,
        request_lib.Sequence(None, row.sequence.tokens[:tokens]),
      )
      assert rows.assign(_generation(text, 1), 0).cached == kept

  def test_the_third_task_of_a_system_prompt_copies_it(self):
    """The second one, which leaves the first, keeps the state where it does."""
    cache = Cache(states=4)
    computed = []
    for task in range(1, 4):
      cache.submit(_text((0, 24), (task, 20)))
      before = cache.computed
      while not cache.work(0)[1]:
        pass
      computed.append(cache.computed - before)
      for generation in [*cache.live]:
        cache.leave(generation)
    assert computed == [43, 43, 19]


class TestFindSources:
  def _placed(self, *texts, version=0):
    rows = rows_lib.CacheRows(_B, _S)
    placed = [rows.assign(_generation(t, n), version) for n, t in enumerate(texts)]
    return rows, placed

  def test_short_prefixes_are_computed_again(self):
    for n, waits in ((_LEAST - 1, False), (_LEAST, True)):
      rows, placed = self._placed(_text((0, n), (1, 9)), _text((0, n), (2, 9)))
      shared = int((placed[0].tokens[: n + 9] != placed[1].tokens[: n + 9]).argmax())
      assert shared == n, 'the seeds share a token more'
      assert rows.find_sources(placed, 4) == ([], {placed[1]} if waits else set())

  @pytest.mark.parametrize('system, task, rounds', [(0, 10, 1), (0, 40, 2), (24, 6, 2)])
  def test_equal_texts_wait_only_for_what_is_worth_sharing(self, system, task, rounds):
    """Few tokens are computed side by side, at once or after what is there is copied."""
    cache = Cache()
    if system:
      first = cache.submit(_text((0, system), (1, 30)))
      cache.work(0, chunk=_S)
      cache.leave(first)
    for _ in range(_B - 1):
      cache.submit(_text((0, system), (2, task)))
    for done in range(rounds + 1):
      assert cache.work(0, chunk=_S, copies_at_once=_B)[1] == (done == rounds)

  def test_without_windows_everything_can_be_copied_from_a_full_row(self):
    rows, placed = self._placed(_text((0, 24), (1, 39)), _text((0, 24), (2, 9)))
    placed[0].prefill(62)
    placed[0].note_write(512)  # What one decode writes at most.
    [(source, _)], _ = rows.find_sources(placed[1:], 4)
    assert source.length == 24

  @pytest.mark.parametrize('passed', [4, 5])
  def test_nobody_waits_for_what_a_window_has_lost(self, passed):
    """A long text is under way; another shares its beginning, 24 tokens."""
    rows = rows_lib.CacheRows(_B, _S, max_rewind=4)
    texts = _text((0, 24), (1, 30)), _text((0, 24), (2, 9))
    placed = [rows.assign(_generation(t, n), 0) for n, t in enumerate(texts)]
    placed[0].prefill_started = True
    placed[0].cached = placed[0].written = 24 + passed
    copies, waiting = rows.find_sources(placed, 4)
    assert not waiting and len(copies) == (passed == 4)

  def test_no_more_copies_than_there_is_room_for(self):
    rows, placed = self._placed(*(_text((0, 30)) for _ in range(4)))
    placed[0].cached, placed[0].prefill_started = 29, True
    copies, waiting = rows.find_sources(placed[1:], 2)
    assert [row for _, row in copies] == placed[1:3] and waiting == {placed[3]}

  @pytest.mark.parametrize('left', [False, True])
  def test_nothing_is_copied_from_a_row_whose_reply_has_ended_once_sharing_stopped(
    self, left
  ):
    """Whether or not the reply has left its row."""
    rows, placed = self._placed(_text((0, 30)), _text((0, 30), (1, 5)))
    placed[0].cached = 29
    if left:
      placed[0].generation = None
    else:
      placed[0].generation.cancel()
    rows.stop_sharing()
    assert placed[0].version == rows_lib.MIXED and placed[1].version == 0
    assert rows.find_sources([placed[1]], 4) == ([], set())

  def test_the_longer_of_two_is_waited_for(self):
    parts = (0, 20), (1, 20), (2, 5)
    rows, placed = self._placed(*(_text(*parts[:n]) for n in (1, 2, 3)))
    placed[0].cached = 19
    placed[0].prefill_started = placed[1].prefill_started = True
    assert rows.find_sources(placed[1:], 4) == ([], {placed[2]})
    placed[1].cached = 39
    ((source, row),), waiting = rows.find_sources(placed[2:], 4)
    assert (source.row, source.length, row) == (placed[1], 40 - 1, placed[2])
    assert not waiting
