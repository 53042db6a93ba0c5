"""Several policies at a time: a sync in the midst of replies, and requests for one."""

import asyncio
import gc
import threading
import weakref

import clients
import numpy as np
import pytest
import tiny

from agent_r1_jax.engine import engine as engine_lib


def _run(engine, *coroutines):
  return tiny.within(engine.run, coroutines)


class TestSync:
  def test_a_policy_is_taken_over_in_the_midst(self):
    engine, other = (
      clients.engine(decode_steps=3, **clients.EXACT),
      clients.other_params(),
    )

    async def syncs():
      while engine.stats.sampled < 60:
        await asyncio.sleep(0)
      engine.sync_weights(other, 5)

    _, *played = _run(engine, syncs(), *(clients.play(engine, n) for n in range(16)))
    before, after = (tiny.learned(tree, played) for tree in (clients.params(), other))
    mixed = []
    for number, segment in enumerate(played):
      mask, steps = segment.action_mask, segment.policy_steps
      assert set(steps[mask]) <= {0, 5} and (np.diff(steps[mask]) >= 0).all()
      assert not steps[~mask].any()
      if len(set(steps[mask])) == 2:
        mixed.append(number)
      # Of one policy are the tokens before the change, and texts that begin after it.
      for step, expected in ((0, before), (5, after if number >= 12 else None)):
        at = mask & (steps == step)
        if expected is not None:
          got = segment.behaviour_logprobs[at]
          np.testing.assert_allclose(got, expected[number][at], atol=2e-5)
      assert number < 12 or (steps[mask] == 5).all()
    assert mixed
    # Others than the same policy would have sampled.
    one = mixed[0]
    assert not np.array_equal(played[one].tokens, clients.reference()[one].tokens)

  @pytest.mark.parametrize('when', range(0, 40, 7))
  def test_no_text_copies_what_another_policy_computed(self, when):
    """Whenever the sync comes while prompts that have much in common are prefilled."""
    engine, other = (
      clients.engine(prefill_tokens=4, **clients.EXACT),
      clients.other_params(),
    )
    prompt = clients.prompt(9)

    async def play(number):
      given = np.append(prompt, np.int32(30 + number // 2))
      for _ in range(3 * number):
        await asyncio.sleep(0)
      reply = await engine.submit(clients.request(given, None, 9, number))
      return clients.segment([(given,), reply[:3]]), engine.stats.prefilled

    async def syncs():
      while engine.stats.prefilled < when:
        await asyncio.sleep(0)
      engine.sync_weights(other, 5)
      return engine.stats.prefilled

    begun, *played = _run(engine, syncs(), *(play(number) for number in range(10)))
    # Rows: six; the last ones certainly began after the sync, with nothing of the first.
    late = [s for s, _ in played[8:]]
    assert all((s.policy_steps[s.action_mask] == 5).all() for s in late)
    tiny.assert_on_policy(other, late)

  def test_the_same_policy_under_another_number_is_not_copied(self, engine):
    async def play():
      await engine.submit(clients.request(clients.prompt(4)))
      engine.sync_weights(clients.params(), 7)
      return await engine.submit(clients.request(clients.prompt(4)))

    (reply,) = _run(engine, play())
    assert (reply.policy_steps == 7).all()
    assert engine.stats.shared == len(clients.prompt(4)) - 1

  def test_from_another_thread_while_a_reply_that_nobody_awaits_is_sampled(
    self, engine, monkeypatch
  ):
    """No client is under way, but the replica is at work: it needs a policy."""
    began, over = threading.Event(), threading.Event()
    copy = engine_lib.Engine._copy_params

    def slow_copy(self, params):
      if params is not clients.params():
        sampled = self.stats.sampled
        began.set()
        # Of several segments, some end while the new policy is made.
        for _ in range(200):
          if self.stats.sampled >= sampled + 3 * clients.STEPS or over.wait(0.05):
            break
      return copy(self, params)

    async def asks():
      request = clients.request(clients.tokens(0, 9), None, 100, automata=())
      generations.append(engine.submit(request))

    def play():
      with engine.open():
        engine.start([asks()]).result()
        engine.sync_weights(clients.other_params(), 5)
        over.set()
        return engine.start([clients.play(engine, 0)]).result()

    generations = []
    monkeypatch.setattr(engine_lib.Engine, '_copy_params', slow_copy)
    (segment,) = tiny.within(play, seconds=60)
    assert began.is_set()
    tiny.assert_on_policy(clients.other_params(), [segment])


class TestMakePolicy:
  def test_two_policies_play_side_by_side(self, engine):
    """Each as it plays alone, its tokens marked with its step."""
    other = clients.other_params()
    policy = engine.make_policy(other, 3)
    alone = clients.run(tiny.engine(other), range(12))

    async def plays(policy):
      coroutines = [clients.play(engine, n, policy=policy) for n in range(12)]
      return dict(enumerate(await asyncio.gather(*coroutines)))

    def play():
      with engine.open():
        # At one time: more clients than rows are in.
        both = [engine.start([plays(p)]) for p in (None, policy)]
        return [future.result()[0] for future in both]

    own, others = tiny.within(play)
    clients.assert_same(own, {n: clients.reference()[n] for n in range(12)})
    clients.assert_same(others, alone)
    for played, step in ((own, 0), (others, 3)):
      for segment in played.values():
        assert (segment.policy_steps[segment.action_mask] == step).all()

  def test_a_sync_changes_nothing_of_a_policy_that_was_asked_for(self):
    """As evaluation has it, which began with the engine's own policy."""
    engine, other = (
      clients.engine(decode_steps=3, **clients.EXACT),
      clients.other_params(),
    )

    async def syncs():
      while engine.stats.sampled < 60:
        await asyncio.sleep(0)
      engine.sync_weights(other, 5)
      return engine.make_policy(other, 5).version

    def play():
      with engine.open():
        policy = engine.make_policy(clients.params(), 0)
        assert policy.copies is engine.replicas[0].policy.copies
        coroutines = [clients.play(engine, n, policy=policy) for n in range(16)]
        version, *played = engine.start([syncs(), *coroutines]).result()
        assert version != policy.version
        return played

    played = tiny.within(play)
    clients.assert_same(dict(enumerate(played)), clients.reference())

  def test_one_text_may_be_played_by_two(self, engine):
    """Who goes on from there reads what the other has computed, and shares nothing."""
    other = clients.other_params()
    given = clients.prompt(4), clients.tokens(1, 5)

    async def play():
      policy = engine.make_policy(other, 3)
      first = engine.submit(clients.request(given[0]))
      await first
      second = await engine.submit(
        clients.request(given[1], first.sequence, policy=policy)
      )
      assert (second.policy_steps == 3).all()
      assert engine.stats.shared == 0
      third = await engine.submit(clients.request(given[0], policy=policy))
      assert engine.stats.shared == 0  # Neither from the first row, which is of both.
      fourth = await engine.submit(clients.request(given[0], key=1, policy=policy))
      assert engine.stats.shared == len(given[0]) - 1
      return [clients.segment([(given[0],), reply[:3]]) for reply in (third, fourth)]

    (segments,) = _run(engine, play())
    tiny.assert_on_policy(other, segments)

  def test_it_is_freed_with_its_last_user(self, engine):
    freed = threading.Event()

    async def play():
      policy = engine.make_policy(clients.other_params(), 3)
      weakref.finalize(policy, freed.set)
      await engine.submit(clients.request(clients.tokens(0, 9), policy=policy))

    async def waits():
      while not freed.is_set():
        await asyncio.sleep(0.01)
        gc.collect()

    def both():
      with engine.open():
        engine.start([play()]).result()
        engine.start([waits()]).result(timeout=30)

    tiny.within(both, seconds=60)
