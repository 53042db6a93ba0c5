"""The driver: many episodes on few rows, whatever their tools do meanwhile."""

import asyncio
import functools
import itertools
import random
import threading
import types as types_lib

import jax
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.engine import driver as driver_lib
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.engine import state as state_lib
from agent_r1_jax.engine import stop as stop_lib

_STOPS = tuple(range(5, 25))
_HALVES = (range(8), range(8, 16))
_SLOTS = tiny.SIZES['slots']


@functools.cache
def _params():
  return tiny.params(tiny.config())


def _driver(**kwargs):
  tree = kwargs.pop('params', _params())
  return tiny.driver(tree, stop=stop_lib.stop(_STOPS), **kwargs)


def _tokens(seed, n):
  return np.random.default_rng(seed).integers(25, tiny.VOCAB, n).astype(np.int32)


async def _play(driver, number, *, latency=None, group=4, turns=3, reply=12):
  """A prompt shared by a group, then answers that depend on what was said."""
  pieces = []
  async with driver.row(driver_lib.key('test', number), number // group) as row:
    tokens = _tokens(number // group, 9 + 5 * (number // group))
    for _ in range(turns):
      answer = await row.generate(tokens, reply)
      pieces += [(tokens, None), answer[:3]]
      if latency:
        await asyncio.sleep(latency())
      tokens = _tokens(int(answer.tokens.sum()), 1 + int(answer.tokens.sum()) % 11)
  return _segment(pieces)


def _segment(pieces):
  """Of (tokens, None) and (tokens, log-probs[, policy steps])."""
  zeros = lambda tokens: np.zeros(len(tokens), np.int32)
  said = [(t, x, *rest) if rest else (t, x, zeros(t)) for t, x, *rest in pieces]
  return types.Segment(
    np.concatenate([t for t, _, _ in said]),
    np.concatenate([np.full(len(t), x is not None) for t, x, _ in said]),
    np.concatenate([np.float32(zeros(t)) if x is None else x for t, x, _ in said]),
    np.concatenate([steps for _, _, steps in said]),
  )


def _run(driver, numbers, **kwargs):
  """{number: segment}"""
  episodes = [_play(driver, number, **kwargs) for number in numbers]
  return dict(zip(numbers, tiny.within(driver.run, episodes), strict=True))


@functools.cache
def _reference():
  return _run(_driver(), range(16))


def _random_latency(seconds=0.004):
  rng = random.Random(0)
  return lambda: rng.random() * seconds if rng.random() < 0.7 else 0


def _assert_same(played, expected, exactly=False):
  assert played.keys() == expected.keys()
  for number, segment in played.items():
    np.testing.assert_array_equal(segment.tokens, expected[number].tokens)
    np.testing.assert_array_equal(segment.action_mask, expected[number].action_mask)
    np.testing.assert_allclose(
      segment.logprobs, expected[number].logprobs, atol=0 if exactly else 2e-5
    )


class TestOnPolicy:
  def test_log_probs_are_the_learners(self):
    """Of ragged, forked and interrupted texts, in rows that were used before."""
    played = _reference()
    assert len({len(s.tokens) for s in played.values()}) > 8
    tiny.assert_on_policy(_params(), list(played.values()))

  def test_also_at_another_temperature_and_with_slow_tools(self):
    sampling = sampling_lib.Sampling(0.7)
    exact = {'bucket': _SLOTS, 'narrow': False}
    drivers = [_driver(sampling=sampling, **exact) for _ in range(2)]
    played = _run(drivers[0], range(16), latency=_random_latency())
    tiny.assert_on_policy(_params(), list(played.values()), temperature=0.7)
    # The shapes are always the same here, and so is every bit.
    _assert_same(_run(drivers[1], range(16)), played, exactly=True)

  def test_new_params_forget_what_the_rows_hold(self):
    driver = _driver()
    _run(driver, range(4))
    other = tiny.params(tiny.config(), likely={100: 1.0, 200: 1.0})
    driver.params = other
    # Fewer than before: the other rows still hold the prompt as it was.
    tiny.assert_on_policy(other, list(_run(driver, range(2)).values()))


class TestScheduleIndependence:
  def test_latencies(self):
    for seconds in (0.002, 0.02):
      played = _run(_driver(), range(16), latency=_random_latency(seconds))
      _assert_same(played, _reference())

  def test_order_and_company(self):
    numbers = random.Random(1).sample(range(16), 16)
    _assert_same(_run(_driver(), numbers), _reference())
    some = {number: _reference()[number] for number in (6, 3, 13)}
    _assert_same(_run(_driver(), list(some)), some)

  def test_sizes(self):
    sizes = {'rows': 2, 'steps': 5, 'feed_rows': 7, 'feed_tokens': 3, 'bucket': _SLOTS}
    driver = _driver(**sizes)
    _assert_same(_run(driver, range(16), latency=_random_latency()), _reference())

  def test_the_same_driver_again(self):
    driver = _driver()
    _run(driver, range(3, 11))
    _assert_same(_run(driver, range(16)), _reference())


class TestKey:
  def test_it_depends_on_every_part_and_on_nothing_else(self):
    parts = [
      (0, 0, 'a', 0),
      (1, 0, 'a', 0),
      (0, 1, 'a', 0),
      (0, 0, 'b', 0),
      (0, 0, 'a', 1),
    ]
    keys = {tuple(driver_lib.key(*p).tolist()) for p in parts}
    assert len(keys) == len(parts)
    # Of every version, process and machine.
    assert driver_lib.key(0, 0, 'a', 0).tolist() == [687195798, 1807713719]


class TestPrompts:
  def test_a_groups_prompt_is_computed_once(self):
    driver = _driver()
    _run(driver, range(6), group=6, turns=1)
    distinct = len(_tokens(0, 9))
    assert driver.stats.fed == distinct
    assert driver.stats.forked == 5 * distinct

  def test_so_is_one_that_is_longer_than_a_chunk_and_all_the_rest_once(self):
    driver = _driver()
    played = _run(driver, range(24, 30), group=3)
    prompts = [len(_tokens(8, 9 + 40)), len(_tokens(9, 9 + 45))]
    given = sum(int((~s.action_mask).sum()) for s in played.values())
    assert driver.stats.fed == given - 2 * sum(prompts)
    assert driver.stats.forked == 2 * sum(prompts)
    assert driver.stats.sampled == sum(int(s.action_mask.sum()) for s in played.values())

  def test_a_late_comer_forks_from_a_row_that_has_gone_on(self):
    driver = _driver()
    arrived = asyncio.Event()

    async def late():
      await arrived.wait()
      return await _play(driver, 1, turns=1)

    async def early():
      async with driver.row(driver_lib.key('test', 0)) as row:
        await row.generate(_tokens(0, 9), 12)
        await row.generate(_tokens(1, 9), 12)
        arrived.set()
        await row.generate(_tokens(2, 9), 12)

    _, segment = tiny.within(driver.run, [early(), late()])
    assert driver.stats.forked == 9
    tiny.assert_on_policy(_params(), [segment])

  def test_more_samples_than_rows(self):
    driver = _driver()
    _assert_same(_run(driver, range(16)), _reference())
    assert driver.stats.forked > 0


class TestGenerate:
  def test_a_reply_ends_at_a_stop_token_or_out_of_budget(self):
    driver = _driver()
    replies = []

    async def play(number):
      async with driver.row(driver_lib.key(number)) as row:
        for budget in (1, 7, 20):
          reply = await row.generate(_tokens(number, 3), budget)
          replies.append((reply, budget))
          assert row.length <= _SLOTS

    driver.run([play(number) for number in range(8)])
    for reply, budget in replies:
      assert len(reply.tokens) == len(reply.logprobs) <= budget
      stops = [t in _STOPS for t in reply.tokens]
      assert not any(stops[:-1]) and stops[-1] == reply.stopped
      assert reply.stopped or len(reply.tokens) == budget
    assert len({reply.stopped for reply, budget in replies if budget == 20}) == 2

  def test_a_text_may_fill_its_row_to_the_last_slot(self):
    driver = _driver()

    async def play():
      pieces = []
      async with driver.row(driver_lib.key('full')) as row:
        while row.length < _SLOTS:
          tokens = _tokens(row.length, min(30, _SLOTS - row.length - 1))
          reply = await row.generate(tokens, min(7, _SLOTS - row.length - len(tokens)))
          pieces += [(tokens, None), (reply.tokens, reply.logprobs)]
          if _SLOTS - row.length == 1:
            break
      return _segment(pieces)

    (segment,) = driver.run([play()])
    assert len(segment.tokens) >= _SLOTS - 1
    tiny.assert_on_policy(_params(), [segment])

  @pytest.mark.parametrize(
    'tokens, budget, message',
    [
      (_SLOTS - 7, 8, f'text of 0 . {_SLOTS - 7} tokens and a reply of 8 do not fit'),
      (0, 8, '0 tokens to feed, 8 to sample'),
      (4, 0, '4 tokens to feed, 0 to sample'),
    ],
  )
  def test_what_does_not_fit_is_refused(self, tokens, budget, message):
    driver = _driver()

    async def play():
      async with driver.row(driver_lib.key(0)) as row:
        await row.generate(_tokens(0, tokens), budget)

    with pytest.raises(ValueError, match=message):
      tiny.within(driver.run, [play()])


@pytest.fixture
def slow_decodes(monkeypatch):
  """While a decode is under way, others have this many turns of the event loop."""

  async def decode(replica, fn):
    for _ in range(6):
      await asyncio.sleep(0)
    return fn()

  monkeypatch.setattr(replica_lib.Replica, '_in_thread', decode)


class TestRaces:
  def test_who_asks_during_a_decode_is_not_handed_its_result(self, slow_decodes):
    driver = _driver()

    async def play(number):
      pieces = []
      async with driver.row(driver_lib.key('test', number)) as row:
        for turn in range(4):
          tokens = _tokens(10 * number + turn, 3)
          reply = await row.generate(tokens, 5 if number % 2 else 24)
          pieces += [(tokens, None), (reply.tokens, reply.logprobs)]
          for _ in range(number):  # A tool that is ready in the midst of a decode.
            await asyncio.sleep(0)
      return _segment(pieces)

    segments = tiny.within(driver.run, [play(number) for number in range(6)])
    tiny.assert_on_policy(_params(), segments)

  @pytest.mark.parametrize('when', range(4))
  def test_a_row_that_was_left_during_a_decode_begins_anew(self, slow_decodes, when):
    """Its next episode gets nothing of the decode that was meant for the last one."""
    driver = _driver(rows=2)
    alone = _run(_driver(), [0, 1])

    async def impatient():
      async with driver.row(driver_lib.key('left')) as row:
        asked = asyncio.ensure_future(row.generate(_tokens(99, 20), 40))
        while row.length < 20:
          await asyncio.sleep(0)
        for _ in range(when):
          await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
          await asked

    episodes = [impatient(), _play(driver, 0), _play(driver, 1)]
    _, *played = tiny.within(driver.run, episodes)
    _assert_same(dict(enumerate(played)), alone)

  def test_a_prompt_that_was_left_half_fed_is_fed_by_another(self):
    driver, begun = _driver(), asyncio.Event()
    prompt = _tokens(8, 9 + 40)  # of episodes 24 to 27, in seven chunks

    async def impatient():
      async with driver.row(driver_lib.key('left')) as row:
        asked = asyncio.ensure_future(row.generate(prompt, 5))
        while not row.length:
          await asyncio.sleep(0)
        begun.set()
        for _ in range(3):
          await asyncio.sleep(0)
        assert 0 < row.length < len(prompt)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
          await asked

    async def waits_for_its_prompt():
      await begun.wait()
      return await _play(driver, 24, group=3, turns=1)

    _, segment = tiny.within(driver.run, [impatient(), waits_for_its_prompt()])
    assert segment.tokens[: len(prompt)].tolist() == prompt.tolist()
    assert driver.stats.fed > len(prompt)
    tiny.assert_on_policy(_params(), [segment])

  def test_a_row_may_begin_a_new_text(self):
    driver = _driver()

    async def play():
      segments = []
      async with driver.row(driver_lib.key('a')) as row:
        for part in range(3):
          tokens = _tokens(part, 6)
          reply = await row.generate(tokens, 9)
          segments.append(_segment([(tokens, None), (reply.tokens, reply.logprobs)]))
          row.restart(driver_lib.key('a', part))
      return segments

    parts = [part for parts in driver.run([play(), play()]) for part in parts]
    tiny.assert_on_policy(_params(), parts)
    _assert_same(dict(enumerate(parts[:3])), dict(enumerate(parts[3:])))


class TestOpen:
  def test_runs_may_overlap(self):
    driver = _driver()

    def play():
      with driver.open():
        halves = [driver.start([_play(driver, n) for n in part]) for part in _HALVES]
        return [segment for half in halves for segment in half.result()]

    played = tiny.within(play)
    _assert_same(dict(zip(itertools.chain(*_HALVES), played, strict=True)), _reference())

  def test_a_policy_is_taken_over_in_the_midst(self):
    driver, other = _driver(steps=3), tiny.params(tiny.config(), likely={100: 0.5})

    async def hands_over():
      while driver.stats.sampled < 60:
        await asyncio.sleep(0)
      driver.params, driver.policy_step = other, 5
      driver.hand_over()
      return None

    episodes = [hands_over(), *(_play(driver, number) for number in range(16))]
    _, *played = tiny.within(driver.run, episodes)
    before, after = (tiny.learned(tree, played) for tree in (_params(), other))
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
          got = segment.logprobs[at]
          np.testing.assert_allclose(got, expected[number][at], atol=2e-5)
      assert number < 12 or (steps[mask] == 5).all()
    assert mixed
    # Others than the same policy would have sampled.
    one = mixed[0]
    assert not np.array_equal(played[one].tokens, _reference()[one].tokens)

  @pytest.mark.parametrize('changed', [False, True])
  def test_a_new_policy_reads_a_prompt_anew_that_a_row_still_holds(self, changed):
    """In the midst of a run, in which an equal prompt would else be copied."""
    driver, prompt = _driver(), _tokens(0, 9)
    other = tiny.params(tiny.config(), likely={100: 0.5}) if changed else _params()

    async def play():
      async with driver.row(driver_lib.key('before')) as first:
        await first.generate(prompt, 12)
        if changed:
          driver.params, driver.policy_step = other, 5
          driver.hand_over()
        async with driver.row(driver_lib.key('after')) as second:
          return await second.generate(prompt, 12)

    (reply,) = tiny.within(driver.run, [play()])
    assert driver.stats.forked == (0 if changed else len(prompt))
    assert (reply.policy_steps == (5 if changed else 0)).all()
    tiny.assert_on_policy(other, [_segment([(prompt, None), reply[:3]])])

  def test_while_episodes_play_only_the_policy_changes(self):
    driver = _driver()

    def play():
      with driver.open():
        under_way = driver.start([_play(driver, 0)])
        sampling, driver.sampling = driver.sampling, sampling_lib.Sampling(0.0)
        with pytest.raises(RuntimeError, match='under way with another sampling'):
          driver.start([])
        driver.sampling = sampling
        return under_way.result()

    _assert_same(dict(enumerate(tiny.within(play))), {0: _reference()[0]})

  def test_nothing_starts_where_it_is_closed(self):
    with pytest.raises(RuntimeError, match='not open'):
      _driver().start([])

  def test_a_run_does_not_depend_on_the_one_before(self):
    """As it would if it forked the prompts that rows still hold."""
    driver, fed = _driver(), [0]

    def play():
      with driver.open():
        for _ in range(2):
          driver.start([_play(driver, n) for n in range(4)]).result()
          fed.append(driver.stats.fed)

    tiny.within(play)
    assert fed[2] - fed[1] == fed[1] > 0

  @pytest.mark.parametrize('end', [SystemExit('bad data'), KeyboardInterrupt()])
  def test_an_episode_cannot_end_the_process(self, end):
    async def leaves():
      await asyncio.sleep(0)
      raise end

    driver = _driver()
    with pytest.raises(RuntimeError, match='wanted to end the process'):
      tiny.within(driver.run, [leaves(), _play(driver, 0)], seconds=60)
    _assert_same(_run(driver, range(16)), _reference())

  def test_an_episode_that_cancels_itself_says_so(self):
    async def leaves():
      await asyncio.sleep(0)
      raise asyncio.CancelledError

    driver = _driver()
    with pytest.raises(RuntimeError, match='raised CancelledError by itself'):
      tiny.within(driver.run, [leaves(), _play(driver, 0)], seconds=60)
    _assert_same(_run(driver, range(16)), _reference())

  def test_threads_that_hang_hold_no_decode_up(self):
    """As many as asyncio's own executor can have; they go on once all have played."""
    driver, over = _driver(), threading.Event()
    episodes = [asyncio.to_thread(over.wait, 60) for _ in range(64)]

    async def plays():
      played = await asyncio.gather(*(_play(driver, number) for number in range(16)))
      over.set()
      return played

    *waited, played = tiny.within(driver.run, [*episodes, plays()])
    assert all(waited)
    _assert_same(dict(enumerate(played)), _reference())

  def test_what_is_left_ends(self):
    driver, ended = _driver(), []

    async def waits():
      try:
        async with driver.row(driver_lib.key(1)):
          await asyncio.sleep(3600)
      finally:
        ended.append(True)

    def leave():
      with driver.open():
        future = driver.start([waits(), _play(driver, 3)])
        tiny.within(driver.run, [_play(driver, 4)])
      return future

    assert tiny.within(leave, seconds=60).cancelled() and ended == [True]
    _assert_same(_run(driver, range(16)), _reference())

  def test_after_an_error_of_the_engine_nothing_plays(self, monkeypatch):
    def broken(out):
      raise RuntimeError('device lost')

    monkeypatch.setattr(replica_lib, 'jax', types_lib.SimpleNamespace(device_get=broken))
    driver = _driver()

    def play():
      with driver.open():
        for number in range(2):
          with pytest.raises(RuntimeError, match='device lost'):
            driver.start([_play(driver, number)]).result()

    tiny.within(play, seconds=60)


class TestFailure:
  def test_an_episode_that_raises_ends_the_run(self):
    driver = _driver()

    async def fails():
      async with driver.row(driver_lib.key(0)) as row:
        await row.generate(_tokens(0, 9), 12)
        raise LookupError('a bug in the caller')

    async def waits():
      async with driver.row(driver_lib.key(1)):
        await asyncio.sleep(3600)

    episodes = [waits(), *(_play(driver, n) for n in range(8)), fails()]
    with pytest.raises(LookupError, match='a bug in the caller'):
      tiny.within(driver.run, episodes)
    # The driver is as good as new.
    _assert_same(_run(driver, range(16)), _reference())

  @pytest.mark.parametrize('name', ['reset', 'feed', 'fork', 'decode'])
  def test_an_engine_that_raises_ends_the_run(self, monkeypatch, name):
    def broken(*args, **kwargs):
      raise MemoryError('out of device memory')

    monkeypatch.setattr(state_lib, name, broken)
    driver = _driver()
    with pytest.raises(MemoryError, match='out of device memory'):
      tiny.within(driver.run, [_play(driver, number) for number in range(8)])

  def test_a_result_that_cannot_be_fetched_ends_the_run(self, monkeypatch):
    def broken(out):
      raise RuntimeError('device lost')

    monkeypatch.setattr(replica_lib, 'jax', types_lib.SimpleNamespace(device_get=broken))
    driver = _driver()
    with pytest.raises(RuntimeError, match='device lost'):
      tiny.within(driver.run, [_play(driver, number) for number in range(8)])


class TestTools:
  def test_others_go_on_while_one_waits(self):
    """Its tool ends when they have: a driver that waited for it would hang."""
    driver = _driver()
    others_done = asyncio.Event()

    async def waits():
      async with driver.row(driver_lib.key('waits')) as row:
        await row.generate(_tokens(0, 9), 12)
        await others_done.wait()
        await row.generate(_tokens(1, 9), 12)

    async def others():
      await asyncio.gather(*(_play(driver, number) for number in range(10)))
      others_done.set()

    tiny.within(driver.run, [waits(), others()])

  def test_they_run_while_the_device_does(self, monkeypatch):
    """A decode that ends only after a tool's answer."""
    driver, answered = _driver(), threading.Event()

    def device_get(out):
      assert answered.wait(60)
      return jax.device_get(out)

    async def tool():
      await asyncio.sleep(0.01)
      answered.set()

    monkeypatch.setattr(
      replica_lib, 'jax', types_lib.SimpleNamespace(device_get=device_get)
    )
    tiny.within(driver.run, [_play(driver, 0), tool()])

  def test_a_wait_for_tools_alone_is_counted_and_costs_no_step(self):
    driver = _driver()
    _run(driver, [0], latency=lambda: 0.05, turns=2)
    assert 0.04 < driver.stats.idle_seconds < 5
    # One row runs in the program for the fewest.
    assert driver.stats.steps == driver.stats.sampled * driver.sizes.decode_rows[0]

  def test_who_is_ready_at_once_runs_in_the_next_segment(self):
    driver = tiny.driver(_params(), stop=stop_lib.stop([-1] * len(_STOPS)))
    steps = tiny.SIZES['steps']

    async def play(number):
      async with driver.row(driver_lib.key(number)) as row:
        for budget in ([2 * steps], [steps, steps])[number % 2]:
          await row.generate(_tokens(number, 3), budget)

    driver.run([play(number) for number in range(tiny.SIZES['rows'])])
    assert driver.stats.steps == driver.stats.sampled == 2 * steps * tiny.SIZES['rows']


def test_inside_a_running_loop():
  """As in a notebook."""
  driver = _driver()

  async def cell():
    return _run(driver, range(4))

  _assert_same(asyncio.run(cell()), {n: _reference()[n] for n in range(4)})
  with pytest.raises(LookupError):
    asyncio.run(_fails_in_a_loop(driver))


async def _fails_in_a_loop(driver):
  async def fails():
    raise LookupError

  driver.run([fails()])


@pytest.mark.parametrize('name', [*tiny.SIZES, 'bucket'])
def test_sizes_must_allow_something(name):
  with pytest.raises(ValueError, match=f'{name} is 0; it must be at least 1'):
    _driver(**{name: 0})


def test_no_episodes_are_no_work():
  assert tiny.within(_driver().run, []) == []


class TestCompilations:
  def test_warm_up_is_all_of_them(self):
    """Whatever the lengths and however many rows want something."""
    driver = _driver(rows=5, feed_tokens=6)  # which no other test has
    seen = []
    with tiny.compilations() as compiled:
      driver.warm_up(lambda *progress: seen.append(progress))
    assert len(compiled) == driver.sizes.programs == 2 * (1 + 2 + 2) + 1
    assert seen == [(i + 1, driver.sizes.programs) for i in range(driver.sizes.programs)]
    with tiny.compilations() as compiled:
      played = _run(driver, range(16))
      _run(driver, range(24, 30), group=3)  # the longest texts: both buckets
      _run(driver, [2, 7, 11], latency=_random_latency(), turns=2)
    assert not compiled
    _assert_same(played, _reference())

  def test_warm_up_is_for_other_samplings_too(self):
    driver, seen = _driver(rows=5, feed_tokens=6), []
    greedy, own = sampling_lib.Sampling(0.0), driver.sampling
    driver.warm_up(lambda *progress: seen.append(progress), [greedy])
    assert seen[-1] == (15, 15) and driver.sampling == own
    driver.sampling = greedy
    with tiny.compilations() as compiled:
      _run(driver, range(24, 30), group=3)
    assert not compiled

  def test_warm_up_leaves_no_trace(self):
    driver = _driver()
    played = _run(driver, range(8))
    state = jax.device_get(driver.replicas[0].state)
    driver.warm_up()
    for before, after in zip(
      jax.tree.leaves(state), jax.tree.leaves(driver.replicas[0].state), strict=True
    ):
      np.testing.assert_array_equal(before, after)
    _assert_same(_run(driver, range(8)), played)

  def test_few_rows_run_in_narrow_programs(self):
    narrow, wide = _driver(), _driver(narrow=False)
    for driver in (narrow, wide):
      _assert_same(_run(driver, [0]), {0: _reference()[0]})
    assert narrow.stats.sampled == wide.stats.sampled
    assert narrow.stats.steps < wide.stats.steps

  def test_more_rows_than_are_decoded_at_once(self):
    """All come to their turn, and are told the same."""
    driver = _driver(width=2)
    _assert_same(_run(driver, range(16)), _reference())
    # Of six rows no more than two share a step, and none is sampled for nothing else.
    assert driver.sizes.decode_rows == [1, 2]
    assert driver.stats.sampled <= driver.stats.steps < 1.5 * driver.stats.sampled

  def test_replicas_share_a_chip(self, monkeypatch):
    """They have the rows between them, one copy of the policy, and decode at one time."""
    both, met = threading.Barrier(2), set()
    decode = replica_lib.Replica._call_decode

    def meet(replica, *args):
      if replica not in met:
        met.add(replica)
        both.wait(20)
      return decode(replica, *args)

    driver = _driver(replicas=2, width=4, narrow=False, bucket=_SLOTS)
    monkeypatch.setattr(replica_lib.Replica, '_call_decode', meet)
    played = _run(driver, range(16))
    monkeypatch.undo()
    _assert_same(played, _reference())
    first, second = driver.replicas
    assert first.params is second.params
    assert len(first.rows) == len(second.rows) == 3
    assert driver.sizes.decode_rows == [2]

  def test_replicas_that_do_not_divide_the_rows(self):
    with pytest.raises(ValueError, match='rows = 6 and width = 6 .* 4, replicas'):
      _driver(replicas=4)

  def test_replicas_on_chips_that_share_a_layer(self):
    mesh = jax.sharding.Mesh(jax.devices() * 2, ['tensor'])  # one device, twice
    with pytest.raises(ValueError, match='replicas is 2: with tensor > 1'):
      _driver(replicas=2, mesh=mesh)

  def test_buckets_double_up_to_the_slots(self):
    assert _driver(bucket=7).sizes.buckets == [7, 14, 28, 56, 112, _SLOTS]
    assert (
      _driver(bucket=_SLOTS).sizes.buckets
      == _driver(bucket=1000).sizes.buckets
      == [_SLOTS]
    )
