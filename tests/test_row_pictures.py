"""Pictures in the engine and in the learner, which compute the same."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import transcript
from agent_r1_jax.engine import request
from agent_r1_jax.models import attention
from agent_r1_jax.rl import learner, packing, table

_CONFIG = tiny.config('qwen2_5_vl', 2)


@pytest.fixture(scope='module')
def params():
  return tiny.params(_CONFIG)


def _engine(params, **sizes):
  """With few programs, which take long to compile."""
  sizes = {'bucket': tiny.SIZES['slots'], 'narrow': False, 'shape': _CONFIG} | sizes
  return tiny.engine(params, **sizes)


def picture(seed: int, rows: int = 2, columns: int = 3) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (8 * rows, 8 * columns, 3), np.uint8)


def write(*parts) -> np.ndarray:
  """Token ids of texts, given as numbers, and of pictures."""
  ids = [types.make_picture_ids(x, 8) if np.ndim(x) == 3 else [x] for x in parts]
  return np.concatenate(ids).astype(np.int32)


def make_film(seed: int) -> np.ndarray:
  """Two frames, which are one picture."""
  return np.concatenate([picture(seed, 1, 3), picture(seed + 1, 1, 3)], axis=-1)


async def play(engine, number: int, turns):
  """Plays an episode; each turn is what the policy reads before its reply."""
  text, made = None, transcript.Transcript()
  passage = made.begin()
  for turn, parts in enumerate(turns):
    shown = [x for x in parts if np.ndim(x) == 3]
    ids, key = write(*parts), request.make_key(number, turn)
    prompt = types.Prompt(ids, shown)
    asked = request.Request(prompt, text, max_tokens=9, key=key)
    generation = engine.submit(asked)
    reply = await generation
    text = generation.sequence
    made.add_turn(passage, prompt, reply)
  return made.collect()[0][0]


EPISODES = [
  [(1, picture(0), 2, 3), (4, picture(1, 3, 1), 5)],
  [(1, picture(0), 2, 3), (4, picture(0), picture(2, 1, 1), 5), (6,)],
  [(1, picture(3), 2, 3), (7, 8)],
  [(1, 2, 3, 4, 5), (7, picture(4, 4, 2), 8)],
  [(9, 8, 7), (6, 5)],
]


def learned(params, segments, *, trees: bool, config=_CONFIG):
  """The learner's log-probs of each segment's tokens."""
  tokens = table.from_segments(segments)
  shape = packing.MicrobatchShape(2, 128, trees, config.vision)
  batches, layout = packing.pack_microbatches(tokens, shape)
  found = [learner.logprobs(params, batch, config=config) for batch in batches]
  lengths = [len(s.tokens) for s in segments]
  return np.split(layout.extract(np.concatenate(found)), np.cumsum(lengths)[:-1])


def assert_learned(params, segments, layouts=(False, True), **options):
  """Checks the sampler's log-probs, in whole rows and in trees."""
  for trees in layouts:
    found = learned(params, segments, trees=trees, **options)
    for segment, logprobs in zip(segments, found, strict=True):
      mask = segment.action_mask
      np.testing.assert_allclose(
        segment.behaviour_logprobs[mask], logprobs[mask], rtol=0, atol=2e-5
      )
      assert (logprobs[segment.tokens >= types.FIRST_PICTURE_ID] == 0).all()


@pytest.mark.parametrize('sizes', [{}, {'rows': 2, 'prefill_tokens': 4}])
def test_log_probs_are_the_learners(params, sizes):
  engine = _engine(params, **sizes)
  segments = engine.run([play(engine, n, turns) for n, turns in enumerate(EPISODES)])
  assert_learned(params, segments)


@pytest.mark.parametrize(
  ('family', 'layers', 'ahead'),
  [('qwen3_vl', 3, False), ('gemma4', 4, False), ('gemma4', 2, True)],
)
def test_other_towers_give_the_learners_log_probs(family, layers, ahead):
  """In two rows: texts begin again, fork, and lose a reply midway.

  Qwen3-VL has films, and features of several depths; Gemma 4 sliding layers, and layers
  that share keys and values, and its tokens of a picture may see later ones, so that a
  prefill has all of them.
  """
  shape = dataclasses.replace(tiny.config(family, layers), sees_ahead=ahead)
  film = make_film if shape.vision.films else picture
  params = tiny.params(shape)
  engine = _engine(params, shape=shape, rows=2, prefill_tokens=12 if ahead else 4)
  frames = [(1, film(0), 2, film(2), 3), (4, film(0), picture(1), 5)]

  async def branch():
    prompt = types.Prompt(write(1, film(0), 2, film(4), 3), [film(0), film(4)])
    asked = lambda *given, n: request.Request(
      *given, max_tokens=9, key=request.make_key(9, n)
    )
    first = engine.submit(asked(prompt, n=0))
    await first
    lost = engine.submit(asked(types.Prompt(write(7)), first.sequence, n=1))
    async for _ in lost:
      break
    lost.cancel()
    shown = types.Prompt(write(6, picture(3), 8), [picture(3)])
    # From within the reply, behind both films.
    fork = request.Fork(first.sequence, len(prompt) + 2)
    reply = await engine.submit(asked(shown, fork, n=2))
    begun = types.Prompt(first.sequence.tokens[: fork.length], prompt.pictures)
    return types.Segment.read(begun).add_turn(shown, reply)

  plays = [play(engine, n, turns) for n, turns in enumerate([*EPISODES, frames])]
  segments = engine.run([*plays, branch()])
  # test_window_cache.py compares layers that share keys in rows without trees.
  layouts = (True,) if layers == 4 else (False, True)
  assert_learned(params, segments, layouts, config=shape)
  # What only later frames show changes what is sampled.
  last = [(1, film(0), 2, film(2), 3)], [(1, film(0), 2, film(3), 3)]
  first, other = engine.run([play(engine, 5, turns) for turns in last])
  assert np.abs(first.behaviour_logprobs - other.behaviour_logprobs).max() > 1e-3


def test_a_picture_of_more_tokens_than_a_prefill_is_refused():
  """If its tokens see each other."""
  shape = dataclasses.replace(tiny.config('gemma4', 2), sees_ahead=True)
  engine = _engine(tiny.params(shape), shape=shape, prefill_tokens=4)
  shown = [picture(0)]
  prompt = types.Prompt(write(1, *shown, 2), shown)

  async def ask():
    await engine.submit(request.Request(prompt, max_tokens=2))

  with pytest.raises(ValueError, match='is 4, and a picture has 6 tokens'):
    engine.run([ask()])


def test_what_a_picture_shows_changes_what_is_sampled(params):
  engine = _engine(params)
  turns = lambda seed: [(1, picture(seed), 2, 3)]
  first, again, other = engine.run([play(engine, 0, turns(s)) for s in (0, 0, 5)])
  np.testing.assert_array_equal(first.behaviour_logprobs, again.behaviour_logprobs)
  assert np.abs(first.behaviour_logprobs - other.behaviour_logprobs).max() > 1e-3


def test_prefixes_are_shared_by_what_pictures_show(params):
  """Of one place and size; a placeholder alone would make them equal."""
  for second, shared in ((0, 28), (6, 0)):
    engine = _engine(params)
    texts = [[(1, picture(seed, 5, 5), 2, 3, 4)] for seed in (0, second)]
    engine.run([play(engine, n, text) for n, text in enumerate(texts)])
    assert (engine.stats.shared, engine.stats.prefilled) == (shared, 56 - shared)


def test_features_are_computed_once_for_a_policy(params, monkeypatch):
  engine = _engine(params, prefill_tokens=4)
  pictures, seen = engine.replicas[0].device.pictures, []
  see = pictures._see
  monkeypatch.setattr(pictures, '_see', lambda *args: seen.append(1) or see(*args))
  turns = [(1, picture(0), 2, 3), (4, picture(0), picture(1), 5)]
  engine.run([play(engine, n, turns) for n in range(3)])
  assert len(seen) == 2
  scale = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.01, tree))
  engine.sync_weights(scale(params), 1)
  engine.run([play(engine, 0, turns[:1])])
  assert len(seen) == 3


def test_pictures_that_a_request_does_not_bring_are_refused(params):
  engine = _engine(params)
  ids = write(1, picture(0))

  async def ask(*shown):
    await engine.submit(request.Request(types.Prompt(ids, shown), max_tokens=2))

  with pytest.raises(ValueError, match='end in a picture'):
    engine.run([ask(picture(0))])
  ids = np.append(ids, 2)
  with pytest.raises(ValueError, match='is outside the vocabulary of 300'):
    engine.run([ask()])
  with pytest.raises(ValueError, match='is outside the vocabulary of 300'):
    engine.run([ask(picture(1))])
  blind = tiny.engine(tiny.params(tiny.config()))
  with pytest.raises(ValueError, match='is outside the vocabulary of 300'):
    blind.run([_ask(blind, ids)])


async def _ask(engine, ids):
  await engine.submit(request.Request(types.Prompt(ids, [picture(0)]), max_tokens=2))


def test_a_fork_sees_what_its_parent_saw(params):
  engine = _engine(params)

  async def branch():
    shown = [picture(0)]
    prompt = types.Prompt(write(1, *shown, 9), shown)
    first = engine.submit(request.Request(prompt, max_tokens=3))
    await first
    fork = request.Fork(first.sequence, 8)
    second = engine.submit(request.Request(write(2, 3), fork, max_tokens=4))
    await second
    with pytest.raises(ValueError, match='those of the fork, end in a picture'):
      engine.submit(
        request.Request(write(2), request.Fork(first.sequence, 6), max_tokens=4)
      )
    alone = types.Prompt(write(1, *shown, 9, 2, 3), shown)
    return await second, await engine.submit(request.Request(alone, max_tokens=4))

  ((forked, alone),) = engine.run([branch()])
  np.testing.assert_array_equal(forked.tokens, alone.tokens)
  np.testing.assert_allclose(forked.logprobs, alone.logprobs, rtol=0, atol=1e-5)


def test_a_group_in_a_row_shares_its_picture():
  """Of two texts with one prompt: the row has the patches of its picture once."""
  assert attention.supports_trees()
  ids = write(1, picture(0), 2)
  segments = [
    types.Segment(
      np.append(ids, [n]).astype(np.int32),
      np.arange(9) == 8,
      np.zeros(9, np.float32),
      pictures=[picture(0)],
    )
    for n in (3, 4)
  ]
  shape = packing.MicrobatchShape(1, 32, True, _CONFIG.vision)
  ((batch,), _) = packing.pack_microbatches(table.from_segments(segments), shape)
  assert batch.rows.pictures.patches.patches.shape == (1, 32, 48)
  assert (batch.rows.pictures.patches.pictures == 1).sum() == 4 * 6
  assert (batch.rows.pictures.index >= 0).sum() == 6
  with pytest.raises(ValueError, match=r'give MicrobatchShape\(vision='):
    packing.pack_microbatches(table.from_segments(segments), shape._replace(vision=None))
