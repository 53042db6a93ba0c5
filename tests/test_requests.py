"""A request: its reply, chunk by chunk or whole; texts that go on, fork, and are left."""

import asyncio

import clients
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.agent import automata
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import decoder, engine_params

_SLOTS, _STEPS, _LONG = clients.SLOTS, clients.STEPS, clients.ENDLESS


def _run(engine, *coroutines):
  return tiny.within(engine.run, coroutines)


def _assert_on_policy(*segments):
  tiny.assert_on_policy(clients.params(), segments)


def test_a_key_depends_on_every_part_and_on_nothing_else():
  parts = [(0, 0, 'a', 0), (1, 0, 'a', 0), (0, 1, 'a', 0), (0, 0, 'b', 0), (0, 0, 'a', 1)]
  keys = {tuple(request_lib.make_key(*p).tolist()) for p in parts}
  assert len(keys) == len(parts)
  # In every version, process and machine.
  assert request_lib.make_key(0, 0, 'a', 0).tolist() == [687195798, 1807713719]


class TestReply:
  def test_a_reply_ends_at_a_stop_token_or_out_of_budget(self, engine):
    replies = []

    async def play(number):
      text = None
      for most in (1, 7, 20):
        given = clients.tokens(number, 3)
        generation = engine.submit(clients.request(given, text, most, number))
        replies.append((await generation, most))
        text = generation.sequence

    _run(engine, *(play(number) for number in range(8)))
    for reply, most in replies:
      assert len(reply.tokens) == len(reply.logprobs) <= most
      stops = [t in clients.STOPS for t in reply.tokens]
      assert not any(stops[:-1]) and stops[-1] == reply.stopped
      assert reply.stopped or len(reply.tokens) == most
    assert len({reply.stopped for reply, most in replies if most == 20}) == 2

  def test_a_text_may_fill_its_row_to_the_last_slot(self, engine):
    async def play():
      parts, text, length = [], None, 0
      while _SLOTS - length > 1:
        given = clients.tokens(length, min(30, _SLOTS - length - 1))
        most = min(7, _SLOTS - length - len(given))
        generation = engine.submit(clients.request(given, text, most))
        parts += [(given,), (await generation)[:3]]
        text, length = generation.sequence, len(generation.sequence)
      return clients.segment(parts)

    (segment,) = _run(engine, play())
    assert len(segment.tokens) >= _SLOTS - 1
    _assert_on_policy(segment)

  def test_a_stop_string_ends_it_whichever_decode_samples_its_tokens(self, engine):
    texts = [(b'a', b'b', b'cab')[t % 3] for t in range(tiny.VOCAB)]
    fields = {'automata': (automata.stop([], tiny.VOCAB, ['abba'], texts),)}
    given = np.int32([6, 7, 7])  # 'abb' of the prompt is no part of a reply.

    async def play(number):
      reply = await engine.submit(clients.request(given, None, 60, number, **fields))
      said = [texts[token] for token in reply.tokens]
      assert (b'abba' in b''.join(said)) == reply.stopped
      assert b'abba' not in b''.join(said[:-1])
      # Where the string begins, in tokens.
      return reply.stopped and len(said) // _STEPS > (len(said) - 4) // _STEPS

    assert any(_run(engine, *(play(number) for number in range(16))))

  def test_greedy_is_the_likeliest_whatever_the_key(self, engine):
    async def play(key):
      greedy = {'sampling': config_lib.GREEDY, 'top_logprobs': 1}
      given = clients.tokens(3, 9)
      return await engine.submit(clients.request(given, key=key, **_LONG, **greedy))

    first, second = _run(engine, play(0), play(1))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.tokens, first.top_tokens[:, 0])

  def test_top_logprobs_are_those_of_the_full_softmax(self, engine):
    """At the request's temperature, whatever is truncated; others are told none."""
    temperature = 0.7
    sampling = config_lib.Sampling(temperature, top_k=3)

    async def play(top):
      given = clients.tokens(1, 9)
      fields = {'sampling': sampling, 'top_logprobs': top, **_LONG}
      reply = await engine.submit(clients.request(given, **fields))
      return given, reply

    (given, reply), (_, less), (_, none) = _run(engine, play(20), play(4), play(0))
    text = np.concatenate([given, reply.tokens])
    full = _log_softmax(text, temperature)[len(given) - 1 : -1]
    order = np.argsort(-full, axis=1)[:, :20]
    np.testing.assert_array_equal(reply.top_tokens, order)
    expected = np.take_along_axis(full, order, 1)
    np.testing.assert_allclose(reply.top_logprobs, expected, atol=2e-5)
    np.testing.assert_array_equal(less.top_tokens, reply.top_tokens[:, :4])
    np.testing.assert_array_equal(less.top_logprobs, reply.top_logprobs[:, :4])
    assert none.top_tokens.shape == none.top_logprobs.shape == (len(none.tokens), 0)
    for other in (less, none):
      np.testing.assert_array_equal(other.tokens, reply.tokens)


def _log_softmax(text, temperature):
  """Of every position, float32 [T, V], by the learner's forward."""
  padded = np.zeros((1, 64), np.int32)
  padded[0, : len(text)] = text
  found = _log_softmax_of_64(clients.params(), padded, np.float32(temperature))
  return np.asarray(found)[: len(text)]


@jax.jit
def _log_softmax_of_64(params, tokens, temperature):
  config, positions = tiny.config(), jnp.arange(64)[None]
  hidden = decoder.hidden(params, config, tiny.rows(tokens, positions))
  rows = decoder.logits(engine_params.unstack(params, config), config, hidden[0])
  return jax.nn.log_softmax(rows / temperature)


def _fork(length):
  text = request_lib.Sequence(clients.engine().replicas[0], clients.tokens(0, 9))
  return request_lib.Fork(text, length)


class TestRefused:
  @pytest.mark.parametrize(
    'given, parent, fields, message',
    [
      (_SLOTS - 7, None, {'most': 8}, rf'0 \+ {_SLOTS - 7} tokens and a reply of 8'),
      (0, None, {'most': 8}, '0 tokens to append, 8 to sample'),
      (4, None, {'most': 0}, '4 tokens to append, 0 to sample'),
      (2, -1, {}, 'a fork of the first -1 tokens of a sequence that has 9'),
      (2, 10, {}, 'a fork of the first 10 tokens of a sequence that has 9'),
      (3, None, {'top_logprobs': -1}, 'top_logprobs is -1; it must be 0 to 20'),
      (3, None, {'top_logprobs': 21}, 'top_logprobs is 21; it must be 0 to 20'),
      ([30, -1, 31], None, {}, f'token -1 .* {tiny.VOCAB}'),
      ([30, tiny.VOCAB, 31], None, {}, f'token {tiny.VOCAB} .* {tiny.VOCAB}'),
    ],
  )
  def test_a_bad_request_leaves_nothing_behind(
    self, engine, given, parent, fields, message
  ):
    tokens = clients.tokens(0, given) if isinstance(given, int) else np.int32(given)
    parent = None if parent is None else _fork(parent)
    self._assert_refused(engine, clients.request(tokens, parent, **fields), message)

  def test_a_key_of_another_shape_is_refused(self, engine):
    request = request_lib.Request(clients.tokens(0, 3), key=np.zeros(3, np.uint32))
    self._assert_refused(engine, request, 'key')

  def _assert_refused(self, engine, request, message):
    """Other clients are not disturbed."""

    async def play():
      with pytest.raises(ValueError, match=message):
        engine.submit(request)

    _, segment = _run(engine, play(), clients.play(engine, 0))
    clients.assert_reference({0: segment})

  def test_a_text_that_is_being_sampled_may_be_forked_alone(self, engine):
    async def play():
      first = engine.submit(clients.request(clients.tokens(0, 9)))
      with pytest.raises(ValueError, match='being sampled for another request'):
        engine.submit(clients.request(clients.tokens(1, 2), first.sequence))
      fork = request_lib.Fork(first.sequence, 9)
      other = engine.submit(clients.request(clients.tokens(1, 2), fork))
      reply = await first
      assert first.sequence.tokens[9:].tolist() == reply.tokens.tolist()
      await other

    _run(engine, play())


class TestChunks:
  def test_chunks_come_while_a_reply_is_sampled(self, engine):
    async def play():
      given = clients.tokens(0, 9)
      chunks, progress = [], []
      generation = engine.submit(clients.request(given, None, 3 * _STEPS, **_LONG))
      async for chunk in generation:
        progress.append((len(generation.sequence), generation.done))
        chunks.append(chunk)
      assert [len(chunk.tokens) for chunk in chunks] == 3 * [_STEPS]
      assert progress == [(9 + _STEPS * i, i == 3) for i in (1, 2, 3)]
      whole = await generation
      for ours, theirs in zip(request_lib.join(chunks), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)
      np.testing.assert_array_equal(generation.sequence.tokens[9:], whole.tokens)
      return clients.segment([(given,), whole[:3]])

    (segment,) = _run(engine, play())
    _assert_on_policy(segment)

  def test_several_listeners_get_the_same_reply(self, engine):
    async def play():
      given = clients.tokens(0, 9)
      generation = engine.submit(clients.request(given, None, 3 * _STEPS, **_LONG))
      first, second = await asyncio.gather(generation, generation)
      assert first.tokens.tolist() == second.tokens.tolist()

    _run(engine, play())


@pytest.fixture
def slow_decodes(monkeypatch):
  """While a decode is under way, others have this many turns of the event loop."""

  async def decode(replica, fn):
    for _ in range(6):
      await asyncio.sleep(0)
    return fn()

  monkeypatch.setattr(replica_lib.Replica, '_in_thread', decode)


class TestCancel:
  @pytest.mark.parametrize('by_its_task', [False, True])
  @pytest.mark.parametrize('when', range(6))
  def test_the_row_is_free_and_the_text_goes_on(self, slow_decodes, by_its_task, when):
    """From its last chunk; at any time of a decode. Another text waits for the row."""
    engine = clients.engine(rows=1, **clients.EXACT)
    given, more = clients.tokens(9, 9), clients.tokens(8, 5)

    async def play():
      generation = engine.submit(clients.request(given, None, 100, **_LONG))
      task = asyncio.ensure_future(generation)
      while not generation.chunks:
        await asyncio.sleep(0)
      waiting = engine.submit(clients.request(clients.tokens(7, 9), None, 5, 1))
      for _ in range(when):
        await asyncio.sleep(0)
      (task if by_its_task else generation).cancel()
      with pytest.raises(asyncio.CancelledError):
        await task
      assert generation.done
      had = len(generation.sequence)
      assert had == 9 + sum(len(chunk.tokens) for chunk in generation.chunks)
      sampled = engine.stats.sampled
      other = [(clients.tokens(7, 9),), (await waiting)[:3]]
      # The decode that was under way is the last one that it was in.
      assert engine.stats.sampled - sampled <= _STEPS + 5
      assert len(generation.sequence) == had
      said = request_lib.join(generation.chunks)
      again = engine.submit(clients.request(more, generation.sequence))
      parts = [(given,), said[:3], (more,), (await again)[:3]]
      # Nor has the other text anything of that decode, which was not meant for it.
      return clients.segment(parts), clients.segment(other)

    (segments,) = _run(engine, play())
    _assert_on_policy(*segments)

  def test_leaving_the_loop_over_chunks_cancels(self, engine):
    async def play():
      given = clients.tokens(0, 9)
      generation = engine.submit(clients.request(given, None, 100, **_LONG))
      async for _ in generation:
        break
      while not generation.done:
        await asyncio.sleep(0)
      assert generation.remaining > 0

    _run(engine, play())

  def test_what_waits_for_a_row_can_be_cancelled(self):
    engine = clients.engine(rows=1, **clients.EXACT)

    async def play():
      first = engine.submit(clients.request(clients.tokens(0, 9), None, 60, **_LONG))
      second = engine.submit(clients.request(clients.tokens(1, 9)))
      await asyncio.sleep(0.01)
      second.cancel()
      second.cancel()  # nothing more
      with pytest.raises(asyncio.CancelledError):
        await second
      assert len((await first).tokens) == 60
      assert second.sequence.tokens.tolist() == clients.tokens(1, 9).tolist()
      third = engine.submit(clients.request(clients.tokens(2, 3), second.sequence))
      given = np.concatenate([clients.tokens(1, 9), clients.tokens(2, 3)])
      return clients.segment([(given,), (await third)[:3]])

    (segment,) = _run(engine, play())
    _assert_on_policy(segment)

  def test_cancelling_a_whole_reply_changes_nothing(self, engine):
    async def play():
      generation = engine.submit(clients.request(clients.tokens(0, 9)))
      reply = await generation
      generation.cancel()
      assert (await generation).tokens.tolist() == reply.tokens.tolist()

    _run(engine, play())

  def test_a_cancelled_request_gives_its_automata_back(self):
    """More times than there are places for automata."""
    engine = clients.engine(rows=1, **clients.EXACT)
    pool = engine.replicas[0].device.pool
    size = len(pool.entries)

    async def play():
      for number in range(3 * size):
        own = (tiny.stop([number + 5]),)
        given = clients.tokens(number, 5)
        generation = engine.submit(clients.request(given, None, 90, automata=own))
        if number % 2:
          await asyncio.sleep(0)
        generation.cancel()
        await engine.submit(clients.request(given, None, 1, automata=()))

    _run(engine, play())
    assert len(pool.entries) == size


class TestRaces:
  def test_who_asks_during_a_decode_is_not_handed_its_result(self, slow_decodes, engine):
    async def play(number):
      parts, text = [], None
      for turn in range(4):
        given = clients.tokens(10 * number + turn, 3)
        most = 5 if number % 2 else 24
        generation = engine.submit(clients.request(given, text, most, number))
        parts += [(given,), (await generation)[:3]]
        text = generation.sequence
        for _ in range(number):  # A tool that is ready in the midst of a decode.
          await asyncio.sleep(0)
      return clients.segment(parts)

    segments = _run(engine, *(play(number) for number in range(6)))
    _assert_on_policy(*segments)

  def test_a_text_that_goes_on_in_the_decode_in_which_it_was_cancelled(
    self, family, slow_decodes, engine
  ):
    """Nothing of that decode is in it."""
    given, more = clients.tokens(1, 9), clients.tokens(2, 4)

    async def play():
      generation = engine.submit(clients.request(given, None, 60, **_LONG))
      while not generation.chunks:
        await asyncio.sleep(0)
      await asyncio.sleep(0)
      await asyncio.sleep(0)
      generation.cancel()
      again = engine.submit(clients.request(more, generation.sequence, 30, 5, **_LONG))
      reply, said = await again, request_lib.join(generation.chunks)
      assert len(generation.sequence) == 9 + len(said.tokens) + 4 + 30
      return clients.segment([(given,), said[:3], (more,), reply[:3]])

    (segment,) = _run(engine, play())
    _assert_on_policy(segment)

  def test_a_prompt_that_was_left_half_prefilled_is_computed_by_another(
    self, family, engine
  ):
    begun = asyncio.Event()
    prompt = clients.prompt(8)  # of numbers 24 to 26 in groups of 3, in seven chunks

    async def impatient():
      generation = engine.submit(clients.request(prompt, None, 5))
      while not engine.stats.prefilled:
        await asyncio.sleep(0)
      begun.set()
      for _ in range(3):
        await asyncio.sleep(0)
      assert 0 < engine.stats.prefilled < len(prompt) - 1
      generation.cancel()

    async def waits_for_its_prompt():
      await begun.wait()
      return await clients.play(engine, 24, group=3, turns=1)

    _, segment = _run(engine, impatient(), waits_for_its_prompt())
    assert segment.tokens[: len(prompt)].tolist() == prompt.tolist()
    _assert_on_policy(segment)
