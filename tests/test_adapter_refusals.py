"""Adapters that do not fit their base or their engine are refused."""

import functools

import adapted
import clients
import numpy as np
import pytest
import tiny

from agent_r1_jax.models import (
  lora,
)


def _change(leaf, x):
  """An adapter with another number of leaves, or another leaf."""
  adapter = adapted.make('few')
  q = adapter['layers']['attn']['q']
  return {'layers': {'attn': {'q': {**q, leaf: x} if leaf else {}}}}


@pytest.mark.parametrize(
  ('adapter', 'message'),
  [
    (
      lambda: adapted.make('all', 0)['layers'],
      r"\['attn', 'mlp'\], and must be the leaves",
    ),
    (lambda: adapted.add('all'), 'under "layers" alone; lora.take'),
    (lambda: {'layers': {}}, 'it has no leaves'),
    (
      lambda: _change('kernel', 0),
      r"attn/q has the leaves \['kernel', 'lora_a', .* must",
    ),
    (lambda: _change(None, 0), r'attn/q has the leaves \[\]'),
    (lambda: {'layers': {'moe': {'q': {}}}}, 'layers/moe/q has no adapter in a llama'),
    (lambda: {'layers': {'attn_norm': {'scale': np.ones(2)}}}, 'attn_norm/scale has no'),
    (
      lambda: _change('lora_a', np.ones((1, 8, 3))),
      r'shape \(1, 8, 3\), and by .* 16, 3',
    ),
    (lambda: _change('lora_scale', np.ones(3)), r'lora_scale has the shape \(3,\)'),
    (lambda: _change('lora_b', np.full((1, 3, 4, 8), np.nan)), 'lora_b has numbers that'),
    (lambda: lora.take(_with_rank(5)), 'the rank 5, and there is room for 4; make the'),
  ],
)
def test_an_adapter_that_does_not_fit_is_refused(adapter, message):
  engine = _refusing()
  with pytest.raises(ValueError, match=message):
    engine.adapters.set('a', adapter())
  assert engine.adapters.names == ['few']


def _with_rank(rank):
  return tiny.add_adapters(clients.params(), rank, ('q',), 1.0)


@functools.cache
def _refusing():
  return adapted.make_engine(('few',), count=1)


def test_names_and_numbers_out_of_range_are_refused():
  engine = _refusing()
  with pytest.raises(ValueError, match="named ''; give it a text"):
    engine.adapters.set('', adapted.make('few'))
  with pytest.raises(ValueError, match="no room for the adapter 'b': few .* all 1 slots"):
    engine.adapters.set('b', adapted.make('few'))
  with pytest.raises(ValueError, match="no adapter 'b'; there are: few"):
    engine.adapters.remove('b')
  for sizes in ({'count': -1}, {'count': 1, 'rank': 0}):
    with pytest.raises(ValueError, match='they must be at least 0 and 1'):
      adapted.make_engine((), **sizes)
  none = clients.engine()
  with pytest.raises(ValueError, match='make it with adapters=n'):
    none.adapters.set('a', adapted.make('few'))

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

  tiny.within(none.run, [ask()])
  assert engine.adapters._users == [0, 0]


def test_a_base_with_adapters_of_its_own_is_refused_beside_named_ones():
  with pytest.raises(ValueError, match='which would be added to them'):
    tiny.engine(adapted.add('all'), adapters=1)
  with pytest.raises(ValueError, match='which would be added to them'):
    _refusing().make_policy(adapted.add('all'), 0)
  with pytest.raises(ValueError, match='params have no adapters; lora.add'):
    lora.take(clients.params())
