"""Layers that slide, or have a state: the engine samples as if they kept everything."""

import dataclasses
import functools
import random

import clients
import numpy as np
import pytest
import tiny

from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.models import kv_cache

_STATEFUL = ('qwen3_5_moe_text',)
_SLIDING: dict[str, tuple[bool, ...]] = {
  'mistral': (True,),
  'gemma2': (True, False),
  'gpt_oss': (True, False),
}
# Its last two layers read the keys and values of the first two.
_SLIDING['gemma4_text'] = (True, False, True, False)


@functools.cache
def shape(family):
  """Layers of which some slide by 9 tokens, or one has a state."""
  config = tiny.config(family, len(_SLIDING.get(family, (0, 0))))
  if family in _STATEFUL:
    return config
  return dataclasses.replace(config, sliding=_SLIDING[family], window=9)


@functools.cache
def params(family):
  """Its parameters."""
  return tiny.params(shape(family))


@pytest.fixture
def few(monkeypatch):
  """Room for two calls behind the window: rings of 9 + 16 slots."""
  monkeypatch.setattr(sizes_lib, '_MAX_REWIND', 8)
  monkeypatch.setattr(sizes_lib, '_TILE', 1)


async def play(engine, number):
  """A text of three turns, and forks of it from anywhere, the last ones first."""
  rng, request = random.Random(number // 2), functools.partial(clients.request, most=8)
  given, text, parts, segments = clients.prompt(number // 4), None, [], []
  for turn in range(3):
    generation = engine.submit(request(given, text, key=(number, turn)))
    answer, text = await generation, generation.sequence
    parts += [(given,), answer[:3]]
    given = clients.tokens(int(answer.tokens.sum()), 1 + int(answer.tokens.sum()) % 11)
  segments.append(clients.segment(parts))
  for back in sorted(rng.sample(range(1, len(text)), 3)):
    fork = request_lib.Fork(text, len(text) - back)
    given = clients.tokens(back, rng.randint(1, 20))
    generation = engine.submit(request(given, fork, key=(number, back)))
    answer = await generation
    begin = (np.array(text.tokens[: fork.length]),)
    segments.append(clients.segment([begin, (given,), answer[:3]]))
  return segments


def run(family, texts=12, **sizes):
  """Plays texts on 5 rows; returns the engine and the segments."""
  engine = tiny.engine(
    params(family), shape=shape(family), **{'rows': 5, 'bucket': 16} | sizes
  )
  played = tiny.within(engine.run, [play(engine, n) for n in range(texts)])
  return engine, [segment for segments in played for segment in segments]


@pytest.mark.parametrize('family', _SLIDING)
def test_log_probs_of_windows_are_the_learners(few, family):
  """Of texts that have gone round the ring, and of forks before what it holds."""
  # One family in reads of many lengths; the others differ in what a layer does.
  sizes = {} if family == 'gemma2' else {'bucket': clients.SLOTS}
  engine, segments = run(family, **sizes)
  cache = engine.replicas[0].device.cache
  kept = [25 if slides else tiny.SIZES['slots'] for slides in _SLIDING[family]]
  found = [None if x.keys is None else x.keys.shape[2] for x in cache]
  own = len(kept) - shape(family).shared_layers
  assert found == kept[:own] + [None] * shape(family).shared_layers
  assert max(len(s.tokens) for s in segments) >= 2 * 25
  tiny.assert_on_policy(params(family), segments, shape=shape(family))


@pytest.mark.parametrize('family', _STATEFUL)
def test_log_probs_of_states_are_the_learners(family, monkeypatch):
  """Wherever texts fork; the fewer states a row keeps, the more is computed again."""
  sizes = {'rows': 24, 'texts': 6, **clients.EXACT}
  engine, segments = run(family, **sizes)
  tiny.assert_on_policy(params(family), segments, shape=shape(family))
  monkeypatch.setattr(kv_cache, 'STATES', 1)
  one, expected = run(family, **sizes)
  assert one.stats.shared < engine.stats.shared
  assert one.stats.prefilled > engine.stats.prefilled
  clients.assert_same(dict(enumerate(segments)), dict(enumerate(expected)))


def test_what_is_lost_is_computed_again_and_drafts_change_nothing(few, monkeypatch):
  """In rows enough for all texts, so that whatever is kept is found again."""
  sizes = {'texts': 6, 'rows': 24, **clients.EXACT}
  engine, segments = run('mistral', **sizes)
  _, drafted = run('mistral', drafts=3, **sizes)
  monkeypatch.setattr(sizes_lib, 'count_window_slots', lambda config, slots, most: slots)
  whole, expected = run('mistral', **sizes)
  assert engine.stats.prefilled > whole.stats.prefilled
  assert 0 < engine.stats.shared < whole.stats.shared
  for found in (segments, drafted):
    clients.assert_same(dict(enumerate(found)), dict(enumerate(expected)))
