"""Guides in the jitted loop: automata, a user's own guide; and the pool of automata."""

import asyncio
import threading
from typing import Any

import clients
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
import test_call_grammar
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import automata, call_formats
from agent_r1_jax.agent import calls as calls_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.engine import active_request, automaton_guide
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.grammars import byte_grammars, compiler
from agent_r1_jax.guided import value_guide

_EOS = tiny.chat().tokenizer.eos_token_id


def _states(*taken):
  return {name: np.stack([t[name] for t in taken]) for name in taken[0]}


def test_a_guide_changes_only_the_entries_that_use_it():
  """Whatever the state of the others is: that of FORCED forces token 0."""
  double = guide_lib.Guide(off=np.int32(0), logits=lambda params, state, x, h: 2 * x)
  forced, off = guide_lib.forced_state(np.array([3, 4], np.int32)), guide_lib.FORCED.off
  used = np.array([[True, False, False, True], [False, False, True, True]])
  logits = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
  states = (_states(forced, off, off, forced), jnp.zeros(4, jnp.int32))
  apply = jax.jit(lambda *given: guide_lib.apply((guide_lib.FORCED, double), *given))
  changed = apply((None, None), states, used, logits, logits)
  only_three = np.where(np.arange(9) == 3, logits, -np.inf)
  expected = [only_three[0], logits[1], 2 * logits[2], 2 * only_three[3]]
  np.testing.assert_array_equal(changed, expected)


# A user's own guide: from token to token, fewer of the likeliest may be chosen.
def _narrow(params, state, logits, hidden):
  del hidden
  allowed = jnp.maximum(params - state['sampled'], 1)
  ranks = jnp.argsort(jnp.argsort(-logits, axis=-1), axis=-1)
  return jnp.where(ranks < allowed[:, None], logits, -jnp.inf)


def _count(params, state, tokens):
  del params
  sampled = state['sampled'] + 1
  # The off state, -1000, never gets there.
  return {'sampled': sampled}, (sampled == 11) & (tokens > 0)


NARROW = guide_lib.Guide({'sampled': np.int32(-1000)}, _narrow, _count)
_NARROWED: dict[str, Any] = {'guides': {NARROW: {'sampled': np.int32(0)}}}
_MOST = 6


def _own_engine(tree=None, **sizes):
  guides = {NARROW: np.int32(_MOST)}
  return tiny.engine(tree or clients.params(), guides=guides, **clients.EXACT | sizes)


class TestOwnGuide:
  async def _reply(self, engine, number, **fields):
    """The reply, and a segment of it and its prompt."""
    given = clients.tokens(number, 7)
    request = clients.request(given, None, 30, number, top_logprobs=20, **fields)
    reply = await engine.submit(request)
    return reply, clients.segment([(given,), reply[:3]])

  def test_own_guide_restricts_tokens_and_ends_the_reply(self):
    engine = _own_engine()
    mine = [self._reply(engine, n, **_NARROWED, **clients.ENDLESS) for n in range(4)]
    plain = self._reply(engine, 9, **clients.ENDLESS)
    *guided, (free, _) = tiny.within(engine.run, [*mine, plain])
    for reply, _ in guided:
      assert len(reply.tokens) == 11 and reply.stopped
      for i, token in enumerate(reply.tokens):
        assert token in reply.top_tokens[i, : max(_MOST - i, 1)]
    assert any(reply.tokens[0] != reply.top_tokens[0, 0] for reply, _ in guided)
    assert len(free.tokens) == 30 and not free.stopped
    # The log-probs are the policy's own.
    tiny.assert_on_policy(clients.params(), [segment for _, segment in guided])

  def test_own_guide_composes_with_stop_ids_and_a_grammar(self):
    """Each restricts what the others leave, and each may end the reply."""
    pieces = test_call_grammar.of_tiny().pieces
    seven = pieces.index(b'7')
    digits = compiler.compile_and_wait(
      byte_grammars.regex, ['[0-9 ]*'], [_EOS], pieces, tiny.VOCAB
    )
    tree = tiny.params(tiny.config(), {seven: 0.4})
    allowed = np.flatnonzero(digits.table[0, digits.classes] >= 0)
    ends, engine = set(), _own_engine(tree)
    fields = _NARROWED | {'automata': (tiny.stop([seven]), digits)}
    coroutines = [self._reply(engine, n, **fields) for n in range(24)]
    played = tiny.within(engine.run, coroutines)
    for reply, _ in played:
      assert {*reply.tokens} <= {*allowed} and reply.stopped
      assert not {*reply.tokens[:-1]} & {_EOS, seven}
      ends.add('own' if len(reply.tokens) == 11 else int(reply.tokens[-1]))
    assert {_EOS, seven} <= ends <= {_EOS, seven, 'own'}
    tiny.assert_on_policy(tree, [segment for _, segment in played])

  @pytest.mark.parametrize(
    'state, message',
    [
      (None, 'uses 1 guides that the engine was not made with'),
      ({}, 'state of a guide'),
      ({'sampled': np.zeros(2, np.int32)}, 'state of a guide'),
      ({'sampled': False}, 'state of a guide .*bool'),
      ({'sampled': np.float32(0)}, 'state of a guide .*float32'),
      ({'other': np.int32(0)}, 'state of a guide'),
    ],
  )
  def test_a_bad_guide_is_refused(self, state, message):
    """It would else end the engine for all."""
    engine = _own_engine()
    other = guide_lib.Guide(NARROW.off)
    guides = {other: NARROW.off} if state is None else {NARROW: state}

    async def play():
      with pytest.raises(ValueError, match=message):
        engine.submit(clients.request(clients.tokens(0, 3), guides=guides))

    tiny.within(engine.run, [play()])
    assert not engine.replicas[0].load


class TestValueGuide:
  """Tokens weighed by a head's values, on an engine of its own."""

  def _head(self, scale):
    rng = np.random.default_rng(0)
    shapes = {'state': (tiny.config().embed_dim, 4), 'token': (tiny.VOCAB, 4)}
    return {n: scale * rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}

  def test_equal_values_are_plain_sampling(self):
    plain = {n: clients.reference()[n] for n in range(4)}
    guide = value_guide.make_value_guide(8)
    guides = {guide: self._head(0.0)}
    engine = tiny.engine(clients.params(), guides=guides, **clients.EXACT)
    using = {'guides': {guide: {'inverse_beta': np.float32(3.0)}}}
    clients.assert_same(clients.run(engine, range(4), **using), plain)

  def test_weighs_the_likeliest_and_leaves_the_others(self):
    guide, head = value_guide.make_value_guide(3), self._head(1.0)
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, tiny.VOCAB)).astype(np.float32)
    hidden = rng.normal(size=(2, tiny.config().embed_dim)).astype(np.float32)
    state = {'inverse_beta': np.float32([0.5, 2.0])}
    assert guide.logits is not None
    weighed = jax.jit(guide.logits)(head, state, logits, hidden)
    found, before = special.softmax(weighed, -1), special.softmax(logits, -1)
    for m, beta in enumerate((2.0, 0.5)):
      top = np.argsort(-logits[m])[:3]
      weighed = before[m, top] * np.exp(
        head['token'][top] @ (hidden[m] @ head['state']) / beta
      )
      expected = before[m].copy()
      expected[top] = weighed / weighed.sum() * before[m, top].sum()
      np.testing.assert_allclose(found[m], expected, rtol=1e-4)


def _talkative():
  """Makes the policy begin calls and end strings, which no schema fits by chance."""
  pieces = test_call_grammar.of_tiny().pieces
  bias = {i: 0.9 for i, piece in enumerate(pieces) if set(piece) & {*b'"}]'}}
  # The vocabulary is larger than the tokenizer's.
  bias |= dict.fromkeys(range(len(pieces), tiny.VOCAB), -9.0)
  return bias | {test_call_grammar.of_tiny().opening: 2.0}


def test_only_guides_that_change_logits_cost_their_pass():
  """Stop strings, and a user's guide that only ends replies, do not."""
  never = lambda params, state, tokens: (state, jnp.zeros(tokens.shape, bool))
  ends = guide_lib.Guide(off=np.int32(0), advance=never)
  changes = guide_lib.Guide(off=np.int32(0), logits=lambda params, state, x, hidden: x)
  guides = (automaton_guide.AUTOMATA, guide_lib.TRUNCATION, ends, changes)
  used = {'guides': {ends: np.int32(1), changes: np.int32(2)}}
  assert [guide.needs_correction for guide in guides] == [True, True, False, True]
  request = clients.request(clients.tokens(0, 3), sampling=config_lib.Sampling(), **used)
  text = request_lib.Sequence(None, request.tokens)
  generation = request_lib.Generation(request, text, 0, lambda: None)
  active = active_request.ActiveRequest(generation, guides, automaton_guide.AUTOMATA.off)
  assert active.guide_mask.tolist() == [False, False, False, True]
  assert active.guide_states[2:] == [1, 2]


_PLAIN = config_lib.Sampling()


def _play(likely, grammar, *, turns=1, sampling=_PLAIN):
  """Returns [(segment, replies)] of six clients, each reply as long as it can be."""
  tree = tiny.params(tiny.config(), likely)
  engine = tiny.engine(tree, **clients.EXACT)
  guides = (tiny.stop(),) if grammar is None else (tiny.stop(), grammar)

  async def play(number):
    parts, replies, text = [], [], None
    for turn in range(turns):
      given = np.array([30 + number, 40 + turn], np.int32)
      fields = {'automata': guides, 'sampling': sampling}
      request = clients.request(given, text, 110 // turns, number, **fields)
      generation = engine.submit(request)
      reply, text = await generation, generation.sequence
      parts += [(given,), reply[:3]]
      replies.append(reply.tokens.tolist())
    return clients.segment(parts), replies

  played = tiny.within(engine.run, [play(number) for number in range(6)])
  tiny.assert_on_policy(
    tree, [s for s, _ in played], temperature=sampling.temperature or 1.0
  )
  return played


class TestGrammar:
  def test_free_text_is_as_without_a_grammar(self):
    """To the last bit."""
    never = {test_call_grammar.of_tiny().opening: -9.0}
    played = _play(never, test_call_grammar.of_tiny().grammar)
    for (segment, _), (other, _) in zip(played, _play(never, None), strict=True):
      for ours, theirs in zip(vars(segment).values(), vars(other).values()):
        np.testing.assert_array_equal(ours, theirs)

  @pytest.mark.parametrize('temperature', [1.0, 0.0])
  def test_sampled_calls_fit_the_grammar(self, temperature):
    """Over many segments, in which a call's state is kept."""
    sampling, tokens = config_lib.Sampling(temperature), test_call_grammar.of_tiny()
    played = _play(_talkative(), tokens.grammar, sampling=sampling)
    assert any(tokens.opening in reply[:-16] for _, (reply,) in played)
    complete = self._count_complete(played)
    if temperature:
      assert complete
      without = _play(_talkative(), None, sampling=sampling)
      assert any(tokens.walk(reply) < 0 for _, (reply,) in without)

  def _count_complete(self, played):
    """Counts the calls that were completed; all calls fit."""
    tokens, complete = test_call_grammar.of_tiny(), 0
    for _, replies in played:
      for reply in replies:
        assert tokens.walk(reply) >= 0
        calls = call_formats.HERMES.parse(tokens.text(tokens.completed(reply)))
        assert all(isinstance(call, calls_lib.ToolCall) for call in calls)
        for call in calls:
          called = tool_lib.call(test_call_grammar.TOOLS[call.name], call.arguments)
          assert asyncio.run(called).ok
        complete += len(calls) - (not tokens.free[tokens.walk(reply)])
    return complete

  def test_copied_prompt_starts_the_grammar_from_its_beginning(self):
    """In rows that were left in the midst of a call."""
    tokens = test_call_grammar.of_tiny(required=True)
    engine = clients.engine(**clients.EXACT)

    async def play(number, prompt):
      prompt, fields = np.array(prompt, np.int32), {'automata': (tokens.grammar,)}
      request = clients.request(prompt, None, 12, number, **fields)
      return (await engine.submit(request)).tokens.tolist()

    rows = range(clients.ROWS)
    different = [play(number, [30 + number, 40]) for number in rows]
    states = [tokens.walk(reply) for reply in tiny.within(engine.run, different)]
    assert all(state > 0 and not tokens.free[state] for state in states)
    assert engine.stats.shared == 0
    prompt = clients.tokens(0, 20)
    replies = tiny.within(engine.run, [play(number, prompt) for number in rows])
    assert engine.stats.shared == 19 * (clients.ROWS - 1)
    for reply in replies:
      self._assert_begins_a_call(reply)

  def _assert_begins_a_call(self, reply):
    tokens = test_call_grammar.of_tiny(required=True)
    start = test_call_grammar.call_text('', {}).partition('{"name": ')[0]
    assert tokens.walk(reply) >= 0 and _EOS not in reply
    said = b''.join(tokens.pieces[t] for t in reply)
    assert said.startswith(start.encode())


class TestTogether:
  """Requests of all kinds in one decode."""

  def _engine(self):
    """An engine that has compiled everything, and the kinds of requests."""
    tree = tiny.params(tiny.config(), _talkative())
    engine = _own_engine(tree, rows=7, narrow=True)
    grammar = test_call_grammar.of_tiny().grammar
    required = test_call_grammar.of_tiny(required=True).grammar
    engine.warm_up(automata=[clients.stop(), grammar, required])
    return engine, {
      'plain': {},
      'warm': {'sampling': config_lib.Sampling(0.7)},
      'greedy': {'sampling': config_lib.GREEDY},
      'truncated': {'sampling': config_lib.Sampling(1.3, 40, 0.9, 0.01)},
      'grammar': {'automata': (clients.stop(), grammar)},
      'required': {'automata': (required,)},
      'own': _NARROWED,
      'other': {'policy': engine.make_policy(clients.other_params(), 3)},
      'top': {'top_logprobs': 5},
    }

  def test_mixed_requests_give_the_same_replies_as_alone_without_compiling(self):
    (engine, kinds), alone = self._engine(), {}
    with tiny.compilations() as compiled:
      for kind, fields in kinds.items():
        alone |= self._play(engine, {kind: fields})
      together = self._play(*self._engine())
    assert not compiled
    clients.assert_same(together, alone)
    different = {tuple(alone[kind, 0].tokens.tolist()) for kind in kinds}
    assert len(different) > 5

  def _play(self, engine, kinds):
    names = [(kind, number) for number in range(4) for kind in kinds]
    played = [
      clients.play(engine, number, turns=2, reply=20, **kinds[kind])
      for kind, number in names
    ]
    return dict(zip(names, tiny.within(engine.run, played), strict=True))


class TestCompilations:
  def test_nothing_is_compiled_after_warm_up(self):
    """Whatever the lengths, and however many rows are prefilled or decoded."""
    # No other test has these sizes.
    engine, seen = clients.engine(rows=5, prefill_tokens=6), []
    with tiny.compilations() as compiled:
      engine.warm_up(lambda *progress: seen.append(progress))
    # The copy of the parameters is none of them.
    programs = [name for name in compiled if 'unstack' not in name]
    assert len(programs) == engine.sizes.programs == 2 * (1 + 2 + 2)
    assert seen == [(i + 1, engine.sizes.programs) for i in range(engine.sizes.programs)]
    with tiny.compilations() as compiled:
      played = clients.run(engine, range(16))
      clients.run(engine, range(24, 30), group=3)  # the longest texts: both buckets
      clients.run(engine, [2, 7, 11], latency=clients.random_latency(), turns=2)
    assert not compiled
    clients.assert_reference(played)


class TestLargerAutomata:
  def test_others_are_served_while_programs_for_them_are_compiled(self, monkeypatch):
    engine, tokens = clients.engine(**clients.EXACT), np.array([7, 8, 9], np.int32)
    engine.warm_up(automata=[clients.stop()])
    (replica,) = engine.replicas
    grow, go_on = replica.device._grow, threading.Event()
    monkeypatch.setattr(replica.device, '_grow', lambda: go_on.wait(600) and grow())
    classes = np.arange(tiny.VOCAB, dtype=np.int32) % 64
    table = np.tile(np.arange(1, 101)[:, None] % 100, (1, 64)).astype(np.int32)
    large = types.Automaton(classes, table, np.arange(100) == 99)

    def submit(automaton, i, most=4):
      key = request_lib.make_key(i)
      asked = {'max_tokens': most, 'key': key, 'automata': [automaton]}
      return engine.submit(request_lib.Request(tokens, **asked))

    async def play():
      waiting = submit(large, 0, most=120)
      # One that fits comes in as always, and so do more of them than there were places.
      small = [automata.stop([i], tiny.VOCAB) for i in range(20, 23)]
      for i, automaton in enumerate((clients.stop(), *small[:2])):
        await submit(automaton, i)
      assert not waiting.chunks and not waiting.done
      many = [submit(x, i) for i, x in enumerate(small)]
      go_on.set()
      with tiny.compilations() as compiled:
        chunks = [x async for x in waiting]
      for one in many:
        await one
      return sum(len(chunk.tokens) for chunk in chunks), compiled

    count, compiled = engine.run([play()])[0]
    assert count == 99  # It ends in its last state, so that it was not cut off.
    assert len(compiled) == len(replica.device._called), compiled

  def test_what_does_not_compile_fails_alone(self, monkeypatch):
    engine, tokens = clients.engine(**clients.EXACT), np.array([7, 8, 9], np.int32)
    engine.warm_up(automata=[clients.stop()])

    def fail():
      raise MemoryError('no room for it')

    monkeypatch.setattr(engine.replicas[0].device, '_grow', fail)
    classes = np.arange(tiny.VOCAB, dtype=np.int32) % 64
    table = np.zeros((100, 64), np.int32)
    large = types.Automaton(classes, table, np.arange(100) == 99)

    async def ask(automaton, i):
      asked = {'max_tokens': 4, 'key': request_lib.make_key(i), 'automata': [automaton]}
      return await engine.submit(request_lib.Request(tokens, **asked))

    async def play():
      asks = ask(large, 0), ask(clients.stop(), 1)
      failed, reply = await asyncio.gather(*asks, return_exceptions=True)
      again = await asyncio.gather(ask(large, 2), return_exceptions=True)
      return failed, again[0], len(reply.tokens), await ask(clients.stop(), 3)

    failed, again, count, reply = tiny.within(engine.run, [play()], seconds=120)[0]
    for error in (failed, again):
      assert isinstance(error, RuntimeError) and 'no room for it' in str(error)
    assert count and len(reply.tokens)
