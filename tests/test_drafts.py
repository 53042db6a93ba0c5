"""Drafts: what an index finds, and that sampling with them gives the same tokens."""

import asyncio
from typing import Any

import clients
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_call_grammar
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.engine import drafts
from agent_r1_jax.engine import request as request_lib

_compiled_propose = jax.jit(drafts.propose, static_argnums=2)


def _propose(index: drafts.Index, *texts: list[int]) -> list[list[int]]:
  """What an index drafts after at most six texts, without NONE at the end."""
  ends = np.full((6, drafts.WIDTH), drafts.NONE, np.int32)
  for row, text in zip(ends, texts, strict=False):
    row[-len(text[-drafts.WIDTH :]) :] = text[-drafts.WIDTH :]
  places = index.offer()
  assert places is not None
  found = np.asarray(_compiled_propose(places, ends, 4))[: len(texts)]
  return [row[row != drafts.NONE].tolist() for row in found]


def _index(*texts: list[int]) -> drafts.Index:
  index = drafts.Index()
  for text in texts:
    index.add(np.array(text), len(text))
  return index


class TestIndex:
  def test_what_followed_the_longest_end_is_drafted(self):
    index = _index([1, 2, 3, 4, 5, 6, 7], [9, 3, 4, 50, 51], [8, 3, 4, 60, 61])
    found = _propose(index, [2, 3, 4], [0, 9, 3, 4], [7, 3, 4], [4], [70, 71], [60, 61])
    # Three tokens count more than two; of equal ends the latest place counts; one token
    # is no end; and an end that was never said, or that nothing followed, has no draft.
    assert found == [[5, 6, 7, 9], [50, 51, 8, 3], [60, 61], [], [], []]

  def test_a_text_that_grows_is_found_across_its_pieces(self):
    index, text = drafts.Index(), np.arange(30)
    for begin in range(0, 30, 3):
      index.add(text[: begin + 3], 3)
    assert _propose(index, [10, 11], [26, 27]) == [[12, 13, 14, 15], [28, 29]]

  def test_what_is_there_is_not_added_again(self):
    """Siblings' prompts and replies would push out what was said before."""
    index = _index([1, 2, 3])
    for _ in range(10_000):
      index.add(np.arange(100, 140), 40)
    assert _propose(index, [1, 2]) == [[3, *range(100, 103)]]

  def test_the_oldest_tokens_are_overwritten(self):
    rng, index = np.random.default_rng(0), _index([1, 2, 3, 4])
    for _ in range(40):
      last = rng.integers(10, 10_000, 2_000)
      index.add(last, len(last))
    places = index.offer()
    assert places is not None and places.tokens.nbytes + places.table.nbytes < 1.5e6
    assert _propose(index, [1, 2], last[:-4].tolist()) == [[], last[-4:].tolist()]

  def test_a_text_longer_than_the_index(self):
    index, text = drafts.Index(), np.arange(200_000) % 65_521
    index.add(text, len(text))
    assert _propose(index, text[-40:-4].tolist()) == [text[-4:].tolist()]

  def test_drafts_end_where_few_stay_and_are_tried_again(self):
    index, offered = drafts.Index(), []
    for _ in range(200):
      places = index.offer()
      offered.append(places is not None)
      if places is not None:
        index.note(tokens=32, calls=32)
    assert offered[0] and offered.count(True) < 20 and any(offered[100:])
    while index.offer() is None:
      pass
    for _ in range(50):
      index.note(tokens=64, calls=32)
      assert index.offer() is not None


def _engine(k: int, **fields: Any):
  # One program for each step: others only take time to compile here.
  engine = clients.engine(drafts=k, **clients.EXACT | fields)
  engine.warm_up(automata=[clients.stop()])
  return engine


@pytest.fixture
def always(monkeypatch):
  """Drafts, even where few of them stay."""
  monkeypatch.setattr(drafts, '_LEAST_TOKENS', 0.0)


@pytest.mark.parametrize('k', [1, 4])
def test_the_same_tokens_in_fewer_calls(k, always):
  """What is sampled once more stands in the index."""
  engine, expected = _engine(k), clients.reference()
  first = clients.run(engine, range(16))
  calls, sampled = engine.stats.calls, engine.stats.sampled
  again = clients.run(engine, range(16))
  clients.assert_same(first, expected)
  clients.assert_same(again, first)
  sampled, calls = engine.stats.sampled - sampled, engine.stats.calls - calls
  assert sampled / calls > min(k + 1, 3) * 0.7


def test_whatever_is_drafted(monkeypatch, always):
  """Wrong tokens and none, some that would end the reply, change nothing."""

  def propose(places, ends, k):
    wrong = (ends[:, -1:] * 7 + 5 * jnp.arange(k)[None]) % 40
    return jnp.where(wrong == 25, drafts.NONE, wrong)

  monkeypatch.setattr(drafts, 'propose', propose)
  engine = _engine(4, rows=9)  # No other test compiles programs of this size.
  clients.assert_reference(clients.run(engine, range(16)))
  assert 0.9 < engine.stats.calls / engine.stats.sampled <= 1


class TestTogether:
  """Requests of all kinds in one decode, the second time with drafts that stay."""

  def _play(self, engine, kinds):
    played = [
      clients.play(engine, number, turns=2, reply=20, **kinds[kind])
      for number in range(3)
      for kind in kinds
    ]
    return dict(enumerate(tiny.within(engine.run, played)))

  def test_guides_and_budgets_hold_inside_a_draft(self, always):
    grammar = test_call_grammar.of_tiny(required=True).grammar
    engines = [clients.engine(drafts=k, **clients.EXACT) for k in (0, 4)]
    found = []
    for engine in engines:
      engine.warm_up(automata=[clients.stop(), grammar])
      kinds = {
        'plain': {},
        'greedy': {'sampling': config_lib.GREEDY},
        'truncated': {'sampling': config_lib.Sampling(1.3, 40, 0.9, 0.01)},
        'required': {'automata': (grammar,)},
        'other': {'policy': engine.make_policy(clients.other_params(), 3)},
        'top': {'top_logprobs': 5},
      }
      with tiny.compilations() as compiled:
        found += [self._play(engine, kinds), self._play(engine, kinds)]
      assert not compiled
    for played in found[1:]:
      clients.assert_same(played, found[0])
    plain, drafted = (engine.stats for engine in engines)
    assert plain.calls == plain.sampled == drafted.sampled > 1.5 * drafted.calls

  def test_a_reply_is_continued_forked_and_cancelled(self, always):
    """After a draft of which only some tokens stayed."""

    async def talk(engine):
      first = engine.submit(clients.request(clients.tokens(1, 9), most=20, key=1))
      fork = request_lib.Fork(first.sequence, 9)
      forked = engine.submit(clients.request(clients.tokens(2, 3), fork, 20, key=3))
      replies = [(await first).tokens, (await forked).tokens]
      then = engine.submit(
        clients.request(clients.tokens(4, 5), first.sequence, 20, key=5)
      )
      other = engine.submit(clients.request(clients.tokens(6, 30), key=7))
      await asyncio.sleep(0)
      other.cancel()
      replies.append((await then).tokens)
      assert len(first.sequence) == 9 + len(replies[0]) + 5 + len(replies[2])
      return np.concatenate(replies).tolist()

    drafted, plain = _engine(4), clients.engine(**clients.EXACT)
    expected = tiny.within(plain.run, [talk(plain)])
    for _ in range(3):
      assert tiny.within(drafted.run, [talk(drafted)]) == expected
    assert drafted.stats.sampled > 1.3 * drafted.stats.calls
