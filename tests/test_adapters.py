"""Several adapters in one batch: each samples as the engine of its merged copy does."""

import asyncio
import dataclasses
import functools
import threading
from typing import Any

import adapted
import clients
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import adapters as adapters_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import (
  decoder,
  engine_params,
  kv_cache,
  lora,
)


@functools.cache
def _merged(name, seed=0):
  """An engine of a merged copy; None is the base."""
  params = lora.merge(adapted.add(name, seed)) if name else clients.params()
  return tiny.engine(params, **clients.EXACT)


def _run(engine, *coroutines):
  return tiny.within(engine.run, coroutines)


async def _ask(engine, seed, name, parent=None, most=20, **fields):
  """A reply and its text, to the tokens of a seed."""
  given = clients.tokens(seed, 9 + seed)
  fields = {'key': seed, **clients.ENDLESS, **fields}
  generation = engine.submit(clients.request(given, parent, most, adapter=name, **fields))
  return await generation, generation.sequence


def _assert_same(replies, expected):
  for (reply, _), (other, _) in zip(replies, expected, strict=True):
    np.testing.assert_array_equal(reply.tokens, other.tokens)
    np.testing.assert_allclose(reply.logprobs, other.logprobs, rtol=0, atol=1e-5)


_GREEDY: dict[str, Any] = {'sampling': config_lib.GREEDY}
# Seeds, adapters and sampling of twelve requests.
_MIXED = [
  (seed, name, _GREEDY if seed % 2 else {})
  for seed, name in enumerate((None, 'all', 'few', 'one') * 3)
]


def _expect(asked=_MIXED):
  """What the engines of merged copies reply."""
  return [
    _run(_merged(name), _ask(_merged(name), seed, None, **fields))[0]
    for seed, name, fields in asked
  ]


def _continue(name, begun, seed):
  """What the engine of a merged copy replies after `begun` and the tokens of a seed."""
  given = np.concatenate([begun, clients.tokens(seed, 9 + seed)]).astype(np.int32)

  async def ask():
    fields = {'key': seed, **clients.ENDLESS}
    return await _merged(name).submit(clients.request(given, None, 20, **fields))

  return _run(_merged(name), ask())[0]


class TestTokens:
  def test_tokens_of_one_batch_are_those_of_merged_copies(self):
    """Greedy and sampled, three adapters and the base, in fewer rows than requests."""
    engine = adapted.make_engine()
    asked = [_ask(engine, seed, name, **fields) for seed, name, fields in _MIXED]
    _assert_same(_run(engine, *asked), _expect())
    # Not because adapters change nothing.
    greedy = [_ask(_merged(name), 1, None, **_GREEDY) for name in (None, *adapted.NAMES)]
    texts = {
      _run(_merged(name), ask)[0][0].tokens.tobytes()
      for name, ask in zip((None, *adapted.NAMES), greedy, strict=True)
    }
    assert len(texts) == 4

  @pytest.mark.parametrize(
    ('family', 'dtype'),
    [
      ('qwen2', 'bfloat16'),
      ('gemma2', 'float32'),
      ('gemma4_text', 'float32'),
      ('gpt_oss', 'float32'),
      ('qwen3_5_text', 'float32'),
    ],
  )
  def test_each_row_of_a_call_is_that_of_a_merged_copy(self, family, dtype):
    """Biases, norms after a projection, states, and experts, which have no adapters."""
    shape = dataclasses.replace(tiny.config(family, 2), dtype=dtype)
    targets = [*dict.fromkeys(x.target for x in lora.list_targets(shape))]
    assert ('gate' in targets) == ('mlp_dim' in dict(shape.facts.sizes.values()))
    base = tiny.params(shape)
    params = tiny.add_adapters(base, 2, targets, 4.0, b=0.2)
    values = adapters_lib.prepare(shape, lora.take(params), 2)
    stacks = adapters_lib.put(adapters_lib.make_stacks(shape, 3, 2), 2, values)
    tokens = jnp.asarray(clients.tokens(0, 12).reshape(2, 6))
    positions = jnp.tile(jnp.arange(6), (2, 1))

    @functools.partial(jax.jit, static_argnames='c')
    def extend(params, adapters=None, c=shape):
      rows = types.Rows(tokens, positions, adapters=adapters)
      x, _ = decoder.extend(params, c, rows, kv_cache.empty(c, 2, 8))
      return x.astype(jnp.float32)

    unstack = jax.jit(engine_params.unstack, static_argnums=1)
    plain, merged = (unstack(x, shape) for x in (base, params))
    found = extend(plain, lora.Adapters(stacks, jnp.array([2, 0])))
    expected, bare = extend(merged), extend(plain)
    # Neither an adapter's slot nor other rows change a bit.
    np.testing.assert_array_equal(found[1], bare[1])
    moved = adapters_lib.put(adapters_lib.make_stacks(shape, 3, 2), 1, values)
    same = extend(plain, lora.Adapters(moved, jnp.array([1, 0])))
    np.testing.assert_array_equal(same, found)
    tolerance: dict[str, Any] = {'atol': 1e-4, 'rtol': 1e-4}
    if dtype == 'bfloat16':  # It rounds about as a merged copy does.
      wide = dataclasses.replace(shape, dtype='float32')
      exact = np.asarray(extend(unstack(params, wide), c=wide))
      tolerance = {'atol': 3 * float(np.abs(expected - exact)[0].max()), 'rtol': 0}
      assert 0 < tolerance['atol'] < np.abs(bare - exact)[0].max()
      expected = exact
    np.testing.assert_allclose(found[0], expected[0], **tolerance)
    assert not np.allclose(found[0], bare[0], **tolerance)


class TestTexts:
  def test_a_prefix_is_shared_within_an_adapter_and_not_across(self):
    engine = adapted.make_engine()
    given = clients.tokens(0, 40)

    async def play():
      shared = []
      for name in ('all', 'all', 'few', None, 'few', None):
        before = engine.stats.shared, engine.stats.prefilled
        await engine.submit(clients.request(given, None, 2, adapter=name, key=name))
        after = engine.stats.shared, engine.stats.prefilled
        shared.append(tuple(np.subtract(after, before).tolist()))
      return shared

    computed, copied = (0, 39), (39, 0)
    (shared,) = _run(engine, play())
    assert shared == [computed, copied, computed, computed, copied, copied]

  @pytest.mark.parametrize('fork', [False, True])
  def test_a_text_that_another_adapter_continues_is_prefilled_again(self, fork):
    engine = adapted.make_engine()

    async def play():
      _, text = await _ask(engine, 0, 'all')
      turns = []
      for turn, name in enumerate(('few', None, None), 1):
        begun, before = text.tokens[: 25 if fork else None], engine.stats.prefilled
        parent = request_lib.Fork(text, 25) if fork else text
        reply, text = await _ask(engine, turn, name, parent)
        turns.append((begun, turn, name, reply, engine.stats.prefilled - before))
      return turns

    (turns,) = _run(engine, play())
    for begun, turn, name, reply, _ in turns:
      _assert_same([(reply, None)], [(_continue(name, begun, turn), None)])
    if not fork:  # What the same adapter continues is not computed again.
      computed = [(n > len(begun), n < 15) for begun, *_, n in turns]
      assert computed == [(True, False), (True, False), (False, True)]

  def test_a_name_that_comes_again_is_another_adapter(self):
    engine = adapted.make_engine(('all',))

    async def play():
      _, text = await _ask(engine, 0, 'all')
      begun = text.tokens[:]
      engine.adapters.remove('all')
      engine.adapters.set('all', adapted.make('few'))
      reply, _ = await _ask(engine, 1, 'all', text)
      return reply, begun

    ((reply, begun),) = _run(engine, play())
    _assert_same([(reply, None)], [(_continue('few', begun, 1), None)])

  def test_a_cancelled_request_leaves_its_neighbours_and_its_slot(self):
    engine = adapted.make_engine()

    async def play():
      first = engine.submit(
        clients.request(clients.tokens(0, 9), None, 90, adapter='all', **clients.ENDLESS)
      )
      others = asyncio.gather(*(_ask(engine, *asked[:2], **asked[2]) for asked in _MIXED))
      async for _ in first:
        break
      first.cancel()
      return await others

    (found,) = _run(engine, play())
    _assert_same(found, _expect())
    assert engine.adapters._users == [0] * 5


class TestChanges:
  def test_new_weights_answer_and_share_nothing_with_the_old(self):
    engine = adapted.make_engine()

    async def play():
      old = await _ask(engine, 1, 'all')
      engine.adapters.set('all', adapted.make('all', 1), 7)
      prefilled = engine.stats.prefilled
      new = await _ask(engine, 1, 'all')
      return old, new, engine.stats.prefilled - prefilled

    ((old, new, prefilled),) = _run(engine, play())
    _assert_same([old], _run(_merged('all'), _ask(_merged('all'), 1, None)))
    _assert_same([new], _run(_merged('all', 1), _ask(_merged('all', 1), 1, None)))
    assert not np.array_equal(old[0].tokens, new[0].tokens) and prefilled == 9
    assert set(old[0].policy_steps) == {0} and set(new[0].policy_steps) == {7}

  def test_new_weights_in_the_middle_of_a_reply_sample_the_rest(self):
    """With the keys and values of the old ones, from which no other text copies."""
    engine = adapted.make_engine()

    async def play():
      fields = {**clients.ENDLESS, **_GREEDY}
      given = clients.tokens(1, 30)
      first = engine.submit(clients.request(given, None, 24, adapter='all', **fields))
      async for _ in first:
        if len(first.chunks) == 1:
          engine.adapters.set('all', adapted.make('all', 1))
      shared = engine.stats.shared
      other = await engine.submit(
        clients.request(first.sequence.tokens[:40], None, 4, adapter='all', **fields)
      )
      return request_lib.join(first.chunks), engine.stats.shared - shared, other

    ((reply, shared, _),) = _run(engine, play())
    assert set(reply.policy_steps[:8]) == {0} and set(reply.policy_steps[8:]) == {1}
    assert shared == 0

  def test_the_base_changes_under_its_adapters(self):
    engine = adapted.make_engine()
    engine.sync_weights(clients.other_params(), 3)
    other = lora.join(adapted.make('all'), clients.other_params())
    merged = tiny.engine(lora.merge(other))
    found = _run(engine, _ask(engine, 1, 'all'), _ask(engine, 1, None))
    _assert_same(found[:1], _run(merged, _ask(merged, 1, None)))
    assert set(found[1][0].policy_steps) == {3}
    # Named policies have them too.
    policy = engine.make_policy(clients.params(), 0)
    _assert_same(
      _run(engine, _ask(engine, 1, 'all', policy=policy)), _expect([(1, 'all', {})])
    )

  def test_a_removed_adapter_answers_what_it_has_begun(self):
    """Its slot is another's only afterwards."""
    engine = adapted.make_engine(('all', 'few'))
    for name in ('b', 'c'):
      engine.adapters.set(name, adapted.make('few'))

    async def play():
      first = asyncio.ensure_future(_ask(engine, 1, 'all'))
      await asyncio.sleep(0)
      engine.adapters.remove('all')
      with pytest.raises(ValueError, match="no adapter 'all'; there are: few, b, c"):
        await _ask(engine, 2, 'all')
      with pytest.raises(ValueError, match="no room for the adapter 'one': few, b, c"):
        engine.adapters.set('one', adapted.make('one'))
      first = await first
      # It ends one step of the engine after its reply.
      while engine.adapters._users != [0] * 5:
        await asyncio.sleep(0)
      engine.adapters.set('one', adapted.make('one'))
      return first, await _ask(engine, 1, 'one'), await _ask(engine, 1, 'few')

    names = 'all', 'one', 'few'
    _assert_same(_run(engine, play())[0], _expect([(1, name, {}) for name in names]))
    assert engine.adapters.names == ['few', 'b', 'c', 'one']

  def test_threads_set_adapters_while_others_sample(self):
    engine = adapted.make_engine(('all', 'few'))
    texts = clients.run(engine, range(4), adapter='all')

    def change():
      for seed in range(12):
        engine.adapters.set('one', adapted.make('one', seed % 2))
        engine.adapters.remove('one')

    thread = threading.Thread(target=change)
    thread.start()
    again = clients.run(engine, range(4), adapter='all')
    thread.join()
    clients.assert_same(again, texts)


class TestPrograms:
  def test_no_mixture_compiles_anything(self):
    engine = adapted.make_engine(())
    engine.warm_up(automata=[clients.stop()])
    adapters = {name: adapted.make(name) for name in adapted.NAMES}
    with tiny.compilations() as compiled:
      for name, adapter in adapters.items():
        engine.adapters.set(name, adapter)
      for names in ((None,), ('all',), ('all', None, 'few'), adapted.NAMES):
        _run(engine, *(_ask(engine, n, name) for n, name in enumerate(names)))
      engine.adapters.set('all', adapters['few'])
      engine.adapters.remove('few')
      _run(engine, _ask(engine, 1, 'all'))
    assert not compiled

  def test_without_adapters_the_programs_have_none(self):
    engine = clients.engine()
    assert engine.adapters.slots.copies == []
    assert engine.adapters.slots.select(0, np.zeros(3, np.int32)) is None
