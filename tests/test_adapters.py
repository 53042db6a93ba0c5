"""Several adapters in one batch: each samples as the engine of its merged copy does."""

import asyncio
import dataclasses
import functools
import json
import os
import signal
import threading
from typing import Any

import clients
import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import openai
import plain
import pytest
from safetensors import numpy as safetensors_numpy
import script
import serving
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import (
  decoder,
  engine_params,
  families,
  kv_cache,
  lora,
  stacked_adapters,
)
from agent_r1_jax.models.files import peft_files

_TENSOR = 'base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight'
_RANK, _NAMES = 4, ('all', 'few', 'one')
# Of several targets and ranks, each below or at that of the engine.
_KINDS = {
  'all': (tuple(families.TARGETS), 4),
  'few': (('q', 'o', 'down'), 3),
  'one': (('v',), 1),
}


@functools.cache
def _adapted(name, seed=0):
  """The base with an adapter that changes what is sampled."""
  targets, rank = _KINDS[name]
  params = lora.add(clients.params(), rank, targets, 2.0 * rank, jax.random.key(seed))
  learned, frozen = lora.split(params)

  def draw(path, x):
    key = jax.random.fold_in(jax.random.key(seed), len(jax.tree_util.keystr(path)))
    scale = 0.6 if name == 'one' else 0.2
    return scale * jax.random.normal(key, x.shape) if 'lora_b' in str(path) else x

  return lora.join(jax.tree_util.tree_map_with_path(draw, learned), frozen)


def _adapter(name, seed=0):
  return lora.take(_adapted(name, seed))


def _engine(names=_NAMES, count=4, rank=_RANK, **sizes):
  sizes = clients.EXACT | sizes
  engine = clients.engine(adapters=count, adapter_rank=rank, **sizes)
  for name in names:
    engine.set_adapter(name, _adapter(name))
  return engine


@functools.cache
def _merged(name, seed=0):
  """An engine of a merged copy; None is the base."""
  return tiny.engine(lora.merge(_adapted(name, seed)) if name else clients.params())


def _run(engine, *coroutines):
  return tiny.within(engine.run, coroutines)


async def _ask(engine, seed, name, parent=None, most=20, **fields):
  """A reply and its text, to the tokens of a seed."""
  given = clients.tokens(seed, 9 + seed)
  fields = {'key': seed, **clients.ENDLESS, **fields}
  generation = engine.submit(clients.request(given, parent, most, adapter=name, **fields))
  return await generation, generation.text


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
    engine = _engine()
    asked = [_ask(engine, seed, name, **fields) for seed, name, fields in _MIXED]
    _assert_same(_run(engine, *asked), _expect())
    # Not because adapters change nothing.
    greedy = [_ask(_merged(name), 1, None, **_GREEDY) for name in (None, *_NAMES)]
    texts = {
      _run(_merged(name), ask)[0][0].tokens.tobytes()
      for name, ask in zip((None, *_NAMES), greedy, strict=True)
    }
    assert len(texts) == 4

  @pytest.mark.parametrize(
    ('family', 'dtype'),
    [
      ('qwen2', 'bfloat16'),
      ('gemma2', 'float32'),
      ('qwen3_moe', 'float32'),
    ],
  )
  def test_each_row_of_a_call_is_that_of_a_merged_copy(self, family, dtype):
    """Biases, norms after a projection, and experts, which have no adapters."""
    shape = dataclasses.replace(tiny.config(family), dtype=dtype)
    targets = [*stacked_adapters.list_targets(shape)]
    assert ('gate' in targets) == (not shape.num_experts)
    base = tiny.params(shape)
    adapted = jax.tree_util.tree_map_with_path(
      lambda path, x: (
        x + 0.2 * jnp.sin(jnp.arange(x.size)).reshape(x.shape)
        if 'lora_b' in str(path)
        else x
      ),
      lora.add(base, 2, targets, 4.0, jax.random.key(0)),
    )
    values = stacked_adapters.prepare(shape, lora.take(adapted), 2)
    stacks = stacked_adapters.put(stacked_adapters.make(shape, 3, 2), 2, values)
    tokens = jnp.asarray(clients.tokens(0, 12).reshape(2, 6))
    positions = jnp.tile(jnp.arange(6), (2, 1))

    @functools.partial(jax.jit, static_argnames='c')
    def extend(params, adapters=None, c=shape):
      rows = types.Rows(tokens, positions, adapters=adapters)
      x, _ = decoder.extend(params, c, rows, kv_cache.empty(c, 2, 8))
      return x.astype(jnp.float32)

    plain, merged = (engine_params.unstack(x, shape) for x in (base, adapted))
    found = extend(plain, lora.Adapters(stacks, jnp.array([2, 0])))
    expected, bare = extend(merged), extend(plain)
    # Neither an adapter's slot nor other rows change a bit.
    np.testing.assert_array_equal(found[1], bare[1])
    moved = stacked_adapters.put(stacked_adapters.make(shape, 3, 2), 1, values)
    same = extend(plain, lora.Adapters(moved, jnp.array([1, 0])))
    np.testing.assert_array_equal(same, found)
    tolerance: dict[str, Any] = {'atol': 1e-4, 'rtol': 1e-4}
    if dtype == 'bfloat16':  # It rounds about as a merged copy does.
      wide = dataclasses.replace(shape, dtype='float32')
      exact = extend(engine_params.unstack(adapted, wide), c=wide)
      tolerance = {'atol': 3 * float(jnp.abs(expected - exact)[0].max()), 'rtol': 0}
      assert 0 < tolerance['atol'] < jnp.abs(bare - exact)[0].max()
      expected = exact
    np.testing.assert_allclose(found[0], expected[0], **tolerance)
    assert not np.allclose(found[0], bare[0], **tolerance)


class TestTexts:
  def test_a_prefix_is_shared_within_an_adapter_and_not_across(self):
    engine = _engine()
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
    engine = _engine()

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
    engine = _engine(('all',))

    async def play():
      _, text = await _ask(engine, 0, 'all')
      begun = text.tokens[:]
      engine.remove_adapter('all')
      engine.set_adapter('all', _adapter('few'))
      reply, _ = await _ask(engine, 1, 'all', text)
      return reply, begun

    ((reply, begun),) = _run(engine, play())
    _assert_same([(reply, None)], [(_continue('few', begun, 1), None)])

  def test_a_cancelled_request_leaves_its_neighbours_and_its_slot(self):
    engine = _engine()

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
    engine = _engine()

    async def play():
      old = await _ask(engine, 1, 'all')
      engine.set_adapter('all', _adapter('all', 1), 7)
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
    engine = _engine()

    async def play():
      fields = {**clients.ENDLESS, **_GREEDY}
      given = clients.tokens(1, 30)
      first = engine.submit(clients.request(given, None, 24, adapter='all', **fields))
      async for _ in first:
        if len(first.chunks) == 1:
          engine.set_adapter('all', _adapter('all', 1))
      shared = engine.stats.shared
      other = await engine.submit(
        clients.request(first.text.tokens[:40], None, 4, adapter='all', **fields)
      )
      return request_lib.join(first.chunks), engine.stats.shared - shared, other

    ((reply, shared, _),) = _run(engine, play())
    assert set(reply.policy_steps[:8]) == {0} and set(reply.policy_steps[8:]) == {1}
    assert shared == 0

  def test_the_base_changes_under_its_adapters(self):
    engine = _engine()
    engine.sync_weights(clients.other_params(), 3)
    other = lora.join(_adapter('all'), clients.other_params())
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
    engine = _engine(('all', 'few'))
    for name in ('b', 'c'):
      engine.set_adapter(name, _adapter('few'))

    async def play():
      first = asyncio.ensure_future(_ask(engine, 1, 'all'))
      await asyncio.sleep(0)
      engine.remove_adapter('all')
      with pytest.raises(ValueError, match="no adapter 'all'; there are: few, b, c"):
        await _ask(engine, 2, 'all')
      with pytest.raises(ValueError, match="no room for the adapter 'one': few, b, c"):
        engine.set_adapter('one', _adapter('one'))
      first = await first
      # It ends one step of the engine after its reply.
      while engine.adapters._users != [0] * 5:
        await asyncio.sleep(0)
      engine.set_adapter('one', _adapter('one'))
      return first, await _ask(engine, 1, 'one'), await _ask(engine, 1, 'few')

    names = 'all', 'one', 'few'
    _assert_same(_run(engine, play())[0], _expect([(1, name, {}) for name in names]))
    assert engine.adapters.names == ['few', 'b', 'c', 'one']

  def test_threads_set_adapters_while_others_sample(self):
    engine = _engine(('all', 'few'))
    texts = clients.run(engine, range(4), adapter='all')

    def change():
      for seed in range(12):
        engine.set_adapter('one', _adapter('one', seed % 2))
        engine.remove_adapter('one')

    thread = threading.Thread(target=change)
    thread.start()
    again = clients.run(engine, range(4), adapter='all')
    thread.join()
    clients.assert_same(again, texts)


class TestPrograms:
  def test_no_mixture_compiles_anything(self):
    engine = _engine((), bucket=tiny.BUCKET, narrow=True)
    engine.warm_up(automata=[clients.stop()])
    adapters = {name: _adapter(name) for name in _NAMES}
    with tiny.compilations() as compiled:
      for name, adapter in adapters.items():
        engine.set_adapter(name, adapter)
      for names in ((None,), ('all',), ('all', None, 'few'), _NAMES):
        _run(engine, *(_ask(engine, n, name) for n, name in enumerate(names)))
      engine.set_adapter('all', adapters['few'])
      engine.remove_adapter('few')
      _run(engine, _ask(engine, 1, 'all'))
    assert not compiled

  def test_without_adapters_the_programs_have_none(self):
    engine = clients.engine()
    assert engine.adapters.slots.copies == []
    assert engine.adapters.slots.select(0, np.zeros(3, np.int32)) is None


_SHARDED = """
import json, sys
import jax
jax.config.update('jax_num_cpu_devices', 2)
import clients, tiny
import test_adapters as t
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.models import sharding

mesh = sharding.make_mesh(tensor=2)
params = sharding.shard_params(clients.params(), mesh)
sizes = tiny.SIZES | clients.EXACT
engine = engine_lib.Engine(
  tiny.config(), params, mesh=mesh, adapters=4, adapter_rank=4, **sizes
)
for name in t._NAMES:
  engine.set_adapter(name, t._adapter(name))
stacks = engine.adapters.slots.copies[0][1]
part = lambda x: x.addressable_shards[0].data.shape
assert part(stacks['attn']['q']['b']) == (5, 4, 16) != stacks['attn']['q']['b'].shape
assert part(stacks['mlp']['down']['a']) == (5, 4, 12)
assert part(stacks['attn']['q']['a']) == stacks['attn']['q']['a'].shape
asked = [t._ask(engine, *asked, most=8) for asked in enumerate(t._NAMES)]
found = [reply.tokens.tolist() for reply, _ in t._run(engine, *asked)]
assert found == json.loads(sys.argv[1]), found
"""


def test_tensor_sharded_replicas_sample_the_same():
  paths = os.pathsep.join(map(str, (script.ROOT / 'tests', script.ROOT)))
  expected = _expect([(seed, name, {'most': 8}) for seed, name in enumerate(_NAMES)])
  tokens = json.dumps([reply.tokens.tolist() for reply, _ in expected])
  done = script.run('-c', _SHARDED, tokens, PYTHONPATH=paths)
  assert done.returncode == 0, done.stderr


def _change(leaf, x):
  """An adapter with another number of leaves, or another leaf."""
  adapter = _adapter('few')
  q = adapter['layers']['attn']['q']
  return {'layers': {'attn': {'q': {**q, leaf: x} if leaf else {}}}}


@pytest.mark.parametrize(
  ('adapter', 'message'),
  [
    (lambda: _adapter('all', 0)['layers'], r"\['attn', 'mlp'\], and must be the leaves"),
    (lambda: _adapted('all'), 'under "layers" alone; lora.take'),
    (lambda: {'layers': {}}, 'it has no leaves'),
    (
      lambda: _change('kernel', 0),
      r"attn/q has the leaves \['kernel', 'lora_a', .* must",
    ),
    (lambda: _change(None, 0), r'attn/q has the leaves \[\]'),
    (lambda: {'layers': {'moe': {'q': {}}}}, 'layers/moe/q has no adapter in a llama'),
    (lambda: {'layers': {'attn_norm': {'scale': np.ones(2)}}}, 'attn_norm/scale has no'),
    (
      lambda: _change('lora_a', np.ones((2, 8, 3))),
      r'shape \(2, 8, 3\), and by .* 16, 3',
    ),
    (lambda: _change('lora_scale', np.ones(3)), r'lora_scale has the shape \(3,\)'),
    (lambda: _change('lora_b', np.full((2, 3, 4, 8), np.nan)), 'lora_b has numbers that'),
    (lambda: lora.take(_with_rank(5)), 'the rank 5, and there is room for 4; make the'),
  ],
)
def test_an_adapter_that_does_not_fit_is_refused(adapter, message):
  engine = _refusing()
  with pytest.raises(ValueError, match=message):
    engine.set_adapter('a', adapter())
  assert engine.adapters.names == ['few']


def _with_rank(rank):
  return lora.add(clients.params(), rank, ('q',), 1.0, jax.random.key(0))


@functools.cache
def _refusing():
  return _engine(('few',), count=1)


def test_names_and_numbers_out_of_range_are_refused():
  engine = _refusing()
  with pytest.raises(ValueError, match="named ''; give it a text"):
    engine.set_adapter('', _adapter('few'))
  with pytest.raises(ValueError, match="no room for the adapter 'b': few .* all 1 slots"):
    engine.set_adapter('b', _adapter('few'))
  with pytest.raises(ValueError, match="no adapter 'b'; there are: few"):
    engine.remove_adapter('b')
  for sizes in ({'count': -1}, {'count': 1, 'rank': 0}):
    with pytest.raises(ValueError, match='they must be at least 0 and 1'):
      _engine((), **sizes)
  none = clients.engine()
  with pytest.raises(ValueError, match='make it with adapters=n'):
    none.set_adapter('a', _adapter('few'))

  async def ask():
    with pytest.raises(ValueError, match="no adapter 'few'; there are: none"):
      none.submit(clients.request(clients.tokens(0, 9), adapter='few'))
    # A refused request holds no adapter.
    with pytest.raises(ValueError, match='automata guide one request'):
      engine.submit(
        clients.request(
          clients.tokens(0, 9), adapter='few', automata=[clients.stop()] * 9
        )
      )

  _run(none, ask())
  assert engine.adapters._users == [0, 0]


def test_a_base_with_adapters_of_its_own_is_refused_beside_named_ones():
  with pytest.raises(ValueError, match='which would be added to them'):
    tiny.engine(_adapted('all'), adapters=1)
  with pytest.raises(ValueError, match='which would be added to them'):
    _refusing().make_policy(_adapted('all'), 0)
  with pytest.raises(ValueError, match='params have no adapters; lora.add'):
    lora.take(clients.params())


class TestFiles:
  @pytest.mark.parametrize('name', _NAMES)
  def test_what_is_loaded_is_what_was_saved(self, tmp_path, name):
    peft_files.save(tmp_path, _adapted(name), 'base')
    found = peft_files.load(tmp_path, tiny.config())
    plain.equal(found, _adapter(name))
    plain.equal(lora.join(clients.params(), found), _adapted(name))

  def test_adapters_of_a_mixture_of_experts(self, tmp_path):
    config = tiny.config('qwen3_moe')
    params = lora.add(
      tiny.params(config), 2, ('q', 'k', 'v', 'o'), 4.0, jax.random.key(0)
    )
    peft_files.save(tmp_path, params, 'base')
    plain.equal(peft_files.load(tmp_path, config), lora.take(params))

  def test_numbers_of_16_bits_are_read(self, tmp_path):
    peft_files.save(tmp_path, _adapted('one'), 'base')
    file = tmp_path / 'adapter_model.safetensors'
    tensors = safetensors_numpy.load_file(file)
    halved = {k: x.astype(jnp.bfloat16) for k, x in tensors.items()}
    safetensors_numpy.save_file(halved, file)
    found = peft_files.load(tmp_path, tiny.config())['layers']['attn']['v']['lora_b']
    expected = _adapter('one')['layers']['attn']['v']['lora_b']
    np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16).astype('float32'))

  @pytest.mark.parametrize(
    ('settings', 'message'),
    [
      ({'init_lora_weights': 'pissa_niter_4'}, 'only True is computed here; merge'),
      ({'peft_type': 'IA3'}, "adapter_config.json: peft_type is 'IA3', and only 'LORA'"),
      ({'use_rslora': True}, 'use_rslora is True, and only False .*merge_and_unload'),
      ({'alpha_pattern': {'q_proj': 2}}, "alpha_pattern is {'q_proj': 2}"),
      ({'r': 0}, 'adapter_config.json: r is 0; a positive int'),
      ({'lora_alpha': None}, 'adapter_config.json: lora_alpha is None'),
      ({'r': 2}, r'q_proj.lora_A.weight has shape \[3, 16\], by .* it is \[2, 16\]'),
    ],
  )
  def test_other_settings_are_refused(self, tmp_path, settings, message):
    peft_files.save(tmp_path, _adapted('few'), 'base')
    file = tmp_path / 'adapter_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ValueError, match=message):
      peft_files.load(tmp_path, tiny.config())

  def test_settings_that_are_off_are_none(self, tmp_path):
    peft_files.save(tmp_path, _adapted('few'), 'base')
    file = tmp_path / 'adapter_config.json'
    off = {'use_dora': None, 'rank_pattern': None, 'modules_to_save': []}
    file.write_text(json.dumps(json.loads(file.read_text()) | off))
    plain.equal(peft_files.load(tmp_path, tiny.config()), _adapter('few'))

  @pytest.mark.parametrize(
    ('change', 'message'),
    [
      (lambda x: x.pop(_TENSOR), f'no tensor {_TENSOR}; every layer'),
      (lambda x: x.update(extra=np.ones(2)), 'tensor extra has no place in a llama of 2'),
      (lambda x: x[_TENSOR].fill(np.inf), f'{_TENSOR} has numbers that are not finite'),
      (lambda x: x.update({_TENSOR: x[_TENSOR].T.copy()}), r'shape \[3, 32\], by'),
      (lambda x: x.clear(), 'has no tensors; write the adapter again'),
    ],
  )
  def test_tensors_that_do_not_fit_are_refused(self, tmp_path, change, message):
    peft_files.save(tmp_path, _adapted('few'), 'base')
    file = tmp_path / 'adapter_model.safetensors'
    tensors = {k: x.copy() for k, x in safetensors_numpy.load_file(file).items()}
    change(tensors)
    tensors = {k: x.astype(np.float32) for k, x in tensors.items()}
    safetensors_numpy.save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
      peft_files.load(tmp_path, tiny.config())

  def test_a_missing_or_broken_file_is_named(self, tmp_path):
    for name in ('adapter_model.safetensors', 'adapter_config.json'):
      peft_files.save(tmp_path, _adapted('few'), 'base')
      (tmp_path / name).write_bytes(b'{')
      with pytest.raises(ValueError, match=f'{name}: '):
        peft_files.load(tmp_path, tiny.config())
      (tmp_path / name).unlink()
      with pytest.raises(ValueError, match=f'{name}: missing; give a directory'):
        peft_files.load(tmp_path, tiny.config())


@functools.cache
def _served_adapter():
  params = lora.add(serving.policy()[1], 2, ('q', 'down'), 4.0, jax.random.key(0))
  key = jax.random.key(1)
  draw = lambda path, x: (
    0.5 * jax.random.normal(key, x.shape) if 'lora_b' in str(path) else x
  )
  return jax.tree_util.tree_map_with_path(draw, params)


class TestServer:
  def test_the_script_serves_adapters_of_several_ranks(self, tmp_path):
    peft_files.save(tmp_path / 'a', _served_adapter(), 'base')
    other = lora.add(serving.policy()[1], 3, ('v',), 1.0, jax.random.key(0))
    peft_files.save(tmp_path / 'b', other, 'base')
    model = serving.ROOT / 'experiments/miniwiki/model'
    command = ['-m', 'experiments.serve', '--port=0', f'--config.model.path={model}']
    command += [f'--adapter={name}={tmp_path / name}' for name in 'ab']
    sizes = {'rows': 4, 'slots': 64, 'bucket': 64, 'replicas': 1, 'narrow': False}
    command += [f'--config.engine.{name}={size}' for name, size in sizes.items()]
    with script.Process(*command) as process:
      url = next(line for line in process.stdout if line.startswith('http')).strip()
      with openai.OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0) as client:
        body = {'prompt': 'Who', 'max_tokens': 8, 'temperature': 0}
        ask = lambda name: client.completions.create(model=name, **body)
        replies = {name: ask(name) for name in ('policy', 'a', 'b')}
        assert [x.id for x in client.models.list().data] == [*replies]
        assert [x.model for x in replies.values()] == [*replies]
        with pytest.raises(openai.NotFoundError) as refused:
          ask('c')
        assert refused.value.code == 'model_not_found'
        assert "'c' does not exist; there are: policy, a, b" in str(refused.value)
        unnamed = httpx2.post(f'{url}/v1/completions', json=body).json()
        process.send_signal(signal.SIGTERM)
      assert process.wait(60) == 0
    texts = {name: reply.choices[0].text for name, reply in replies.items()}
    # B of the second one is zeros.
    assert texts['policy'] == texts['b'] == unnamed['choices'][0]['text'] != texts['a']

  @pytest.mark.parametrize(
    ('names', 'message'),
    [
      (['=a'], '--adapter==a: give it as NAME=DIR'),
      (['a=b', 'a=c'], '--adapter=a=c: a is the name of another one already'),
      (['policy=b'], '--adapter=policy=b: policy is the name of another one'),
    ],
  )
  def test_a_flag_that_cannot_be_read_is_refused(self, names, message):
    flags = [f'--adapter={name}' for name in names]
    done = script.run('-m', 'experiments.serve', *flags)
    assert done.returncode and message in done.stderr
