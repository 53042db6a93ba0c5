"""Automata in the jitted loop, and the pool of those in use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.engine import automaton_guide

_read = jax.jit(automaton_guide.AUTOMATA.advance)
_allow = jax.jit(automaton_guide.AUTOMATA.logits)


def _automaton(seed, states=6, classes=5, vocab=tiny.VOCAB, forbid=0.3):
  """A random one: in each state some token is allowed."""
  rng = np.random.default_rng(seed)
  table = rng.integers(0, states, (states, classes))
  table[rng.random((states, classes)) < forbid] = -1
  table[np.arange(states), rng.integers(0, classes, states)] = 0
  ends = np.arange(states) == states - 1
  return types.Automaton(rng.integers(0, classes, vocab).astype(np.int32), table, ends)


def _states(*taken):
  return {name: np.stack([t[name] for t in taken]) for name in taken[0]}


class TestAutomata:
  def test_masked_logits_and_next_states_equal_the_automata_tables(self):
    """In rows that use none, one or two automata, in any of their states."""
    pool, (one, two) = automaton_guide.AutomatonPool(tiny.VOCAB), map(_automaton, (1, 2))
    rows = [(), (one,), (two,), (one, two), (two, one)]
    state = _states(*(pool.acquire(row) for row in rows))
    tables = automaton_guide.make_tables(pool.entries)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(len(rows), tiny.VOCAB)), jnp.float32)
    for _ in range(30):
      masked = np.asarray(_allow(tables, state, logits, logits))
      tokens, ends = [], []
      for m, row in enumerate(rows):
        after = [
          a.table[q, a.classes] for a, q in zip(row, np.asarray(state['state'])[m])
        ]
        fits = np.all([x >= 0 for x in after], axis=0) & np.ones(tiny.VOCAB, bool)
        np.testing.assert_array_equal(masked[m], np.where(fits, logits[m], -np.inf))
        some = np.flatnonzero(fits)
        tokens.append(int(rng.choice(some)) if len(some) else 7)
        # A forbidden token leaves an automaton where it is.
        q = [
          x[tokens[m]] if x[tokens[m]] >= 0 else q
          for x, q in zip(after, np.asarray(state['state'])[m])
        ]
        ends.append(any(a.ends[i] for a, i in zip(row, q)))
      state, ended = _read(tables, state, jnp.array(tokens, jnp.int32))
      np.testing.assert_array_equal(ended, ends)

  @pytest.mark.parametrize('vocab', [31, 32, 33, 300])
  def test_vocabulary_of_any_size_is_masked_in_full(self, vocab):
    pool, one = automaton_guide.AutomatonPool(vocab), _automaton(3, vocab=vocab)
    rows = [pool.acquire([]), pool.acquire([one])]
    tables, logits = automaton_guide.make_tables(pool.entries), jnp.zeros((2, vocab))
    masked = _allow(tables, _states(*rows), logits, logits)
    free, guided = np.isfinite(masked)
    assert free.all()
    np.testing.assert_array_equal(guided, one.table[0, one.classes] >= 0)

  def test_a_forbidden_token_leaves_an_automaton_in_its_state(self):
    """Another guide may let it through; the reply does not begin anew."""
    # Token 0 leads to states 1 and 2; other tokens are allowed in states 2 and 3 only.
    table = np.array([[1, -1], [2, -1], [2, 3], [3, 3]])
    classes = np.minimum(np.arange(tiny.VOCAB), 1).astype(np.int32)
    ends = np.arange(4) == 3
    pool = automaton_guide.AutomatonPool(tiny.VOCAB)
    state = _states(*[pool.acquire([types.Automaton(classes, table, ends)])] * 3)
    tables = automaton_guide.make_tables(pool.entries)
    for tokens, expected in (
      ([0, 0, 5], [1, 1, 0]),
      ([0, 9, 0], [2, 1, 1]),
      ([1, 0, 0], [3, 2, 2]),
    ):
      state, ended = _read(tables, state, jnp.array(tokens, jnp.int32))
      assert np.asarray(state['state'])[:, 0].tolist() == expected
      assert np.asarray(ended).tolist() == [q == 3 for q in expected]


class TestPool:
  def test_automaton_acquired_twice_has_one_number(self):
    pool, one = automaton_guide.AutomatonPool(tiny.VOCAB), _automaton(1)
    first = pool.acquire([one])
    entries = pool.entries
    second = pool.acquire([one])
    assert pool.entries is entries
    np.testing.assert_array_equal(first['automaton'], second['automaton'])

  def test_released_numbers_are_reused_and_the_pool_doubles_when_full(self):
    pool = automaton_guide.AutomatonPool(tiny.VOCAB)
    for seed in range(20):
      pool.release(pool.acquire([_automaton(seed)]))
    assert len(pool.entries) == 4
    held = [pool.acquire([_automaton(seed)]) for seed in range(4)]
    assert len(pool.entries) == 8
    numbers = [int(state['automaton'][0]) for state in held]
    assert len(set(numbers)) == 4 and 0 not in numbers

  def test_automaton_in_use_keeps_its_number(self):
    pool, used = automaton_guide.AutomatonPool(tiny.VOCAB), _automaton(99)
    number = int(pool.acquire([used])['automaton'][0])
    pool.release(pool.acquire([used]))  # One request still uses it.
    for seed in range(10):
      pool.release(pool.acquire([_automaton(seed), _automaton(seed + 50)]))
    assert pool.entries[number] is used
    tables = automaton_guide.make_tables(pool.entries)
    np.testing.assert_array_equal(tables.classes[number], used.classes)
    np.testing.assert_array_equal(tables.table[number, :6, :5], used.table)

  def test_sizes_of_tables_only_grow(self):
    """So that the programs for a large grammar are there when it comes again."""
    pool = automaton_guide.AutomatonPool(tiny.VOCAB)
    pool.release(pool.acquire([_automaton(0, states=100, classes=70)]))
    large = automaton_guide.make_tables(pool.entries)
    for seed in range(6):
      pool.release(pool.acquire([_automaton(seed)]))
    small = automaton_guide.make_tables(pool.entries)
    tables = automaton_guide.make_tables(pool.entries, large)
    for before, alone, now in zip(large, small, tables, strict=True):
      assert before.shape == now.shape and alone.size <= now.size
    assert small.table.size < tables.table.size

  def test_three_automata_or_one_of_another_policy_are_refused(self):
    pool = automaton_guide.AutomatonPool(tiny.VOCAB)
    with pytest.raises(ValueError, match='3 automata guide one request; it can have 2'):
      pool.acquire([_automaton(0)] * 3)
    with pytest.raises(ValueError, match='vocab_size=300'):
      pool.acquire([_automaton(0, vocab=301)])
