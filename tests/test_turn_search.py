"""Beams and trees over turns: by scripted values, and on the engine."""

import copy
import functools
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import rollouts
import test_choice
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.guided import choice as choice_lib
from agent_r1_jax.guided import implicit_value
from agent_r1_jax.guided import search as search_lib
from agent_r1_jax.rollout import decoding as decoding_lib

TURNS, TRIED = 3, 4
ODDS = implicit_value.Odds(0.0, 1.0)
NONE: Any = None  # No critic: values are scripted.


class Line:
  """A game of three turns of random digits; the largest sum of digits wins."""

  def __init__(self, digits=()):
    self.digits, self.context, self.closed = digits, self, 0
    self.number, self.reply = 0, mock.Mock(logprobs=[-1.0])

  @property
  def status(self):
    return 'done' if len(self.digits) == TURNS else None

  async def fork(self, number):
    other = copy.copy(self)
    other.number = number
    return other

  async def take_turn(self):
    rng = np.random.default_rng([*self.digits, 5, self.number])
    self.digits += (int(rng.integers(100)),)

  def close(self):
    self.closed += 1


def _digits(prefix):
  """What the turns after a state would be."""
  rngs = [np.random.default_rng([*prefix, 5, i]) for i in range(TRIED)]
  return [int(rng.integers(100)) for rng in rngs]


def _best(prefix=()):
  """The largest sum after a state: a perfect value."""
  if len(prefix) == TURNS:
    return sum(prefix)
  return max(_best((*prefix, digit)) for digit in _digits(prefix))


async def _perfect(lines):
  return np.array([_best(line.digits) for line in lines])


@pytest.mark.parametrize(
  'search',
  [
    search_lib.BeamSearch(1, TRIED, NONE),
    search_lib.BeamSearch(3, TRIED, NONE),
    search_lib.TreeSearch(TRIED, TRIED, NONE),
    search_lib.TreeSearch(24, TRIED, NONE, exploration=10.0),
  ],
)
async def test_a_perfect_value_finds_the_best(search):
  found = await search.search(Line(), _perfect)
  assert sum(found.digits) == _best()


async def test_a_tree_looks_further_than_one_turn():
  """Where only ends have values, more simulations find better ones."""

  async def read(lines):
    return np.array([float(sum(x.digits)) if x.status else 0.0 for x in lines])

  play = lambda n: search_lib.TreeSearch(n, TRIED, NONE, exploration=1000.0).search(
    Line(), read
  )
  few, many = await play(TRIED), await play(120)
  assert sum(few.digits) < sum(many.digits) == _best()


@pytest.mark.parametrize('width', [1, 2, 3])
async def test_an_episode_that_ended_stays_in_the_beam(width):
  """The first one ends after one turn, and is better than what the others come to."""

  class Early(Line):
    async def take_turn(self):
      self.digits += (self.number if len(self.digits) else 9 - self.number,)

    @property
    def status(self):
      return 'done' if self.digits[:1] == (9,) else super().status

  async def read(lines):
    return np.array([float(x.digits[0]) for x in lines])

  root = Early()
  found = await search_lib.BeamSearch(width, 3, NONE).search(root, read)
  assert found.digits == (9,) and not found.closed


class Env(rollouts.Env):
  def clone(self):
    return copy.copy(self)


LONG_REPLIES = config_lib.Limits(max_turns=3, max_turn_tokens=48)


def _play(make, n=3, limits=rollouts.LIMITS, **env):
  engine = rollouts.make_engine()
  decoding = decoding_lib.Decoding(
    choice=make(engine.make_policy(test_choice._critic(), 0))
  )
  tasks = rollouts.make_tasks(n, test_choice.LONG)
  played = rollouts.collect(
    lambda: Env(**env), tasks, engine=engine, decoding=decoding, limits=limits
  )
  return played, engine.stats.prefilled


_CHOICE = functools.partial(choice_lib.ReplyChoice, 3, choice_lib.value, 0.0)
_BEAMS = functools.partial(search_lib.BeamSearch, 1, 2)
_TREE = functools.partial(search_lib.TreeSearch, 2, 2)
_searches = pytest.mark.parametrize('make', [_BEAMS, _TREE], ids=['beams', 'tree'])
_all_kinds = pytest.mark.parametrize(
  'make', [_CHOICE, _BEAMS, _TREE], ids=['choice', 'beams', 'tree']
)


@pytest.mark.parametrize(
  'make',
  [
    functools.partial(search_lib.BeamSearch, 1, 1),
    functools.partial(search_lib.TreeSearch, 1, 3),
  ],
)
def test_search_over_one_candidate_is_plain_sampling(make):
  for a, b in zip(test_choice._play(None), _play(make)[0], strict=True):
    rollouts.assert_same(a, b)


@_searches
def test_searched_episode_is_on_policy_and_prefills_nothing_twice(make, monkeypatch):
  states, read = [], choice_lib.StateValues.read

  async def note(self, texts):
    states.extend(text.tokens for text in texts)
    return await read(self, texts)

  monkeypatch.setattr(choice_lib.StateValues, 'read', note)
  (t,), prefilled = _play(make, 1, LONG_REPLIES, forever=True)
  (segment,) = t.segments
  rollouts.assert_exact(t)
  tiny.assert_on_policy(rollouts.params(), [segment])
  assert len(t.turns) == 3 and t.status == 'max_turns'
  # Policy and critic compute a prefix once, but for less than what is worth a copy.
  distinct = {tuple(text[:n]) for text in states for n in range(1, len(text) + 1)}
  assert len(states) > 5
  assert prefilled < 2 * len(distinct) - t.metrics['sampled_tokens'] + 16 * len(states)
  assert prefilled < sum(map(len, states)) / 1.5


@pytest.mark.parametrize('fresh', [False, True])
@_all_kinds
def test_no_randomness_is_used_twice(make, fresh, monkeypatch):
  """A key that sampled a reply samples another only where that one goes on from it."""
  submit = replica_lib.Replica.submit
  found: list[tuple[request_lib.Generation, np.ndarray]] = []

  def note(self, request):
    generation = submit(self, request)
    if request.policy is None:
      found.append((generation, generation.sequence.tokens))
    return generation

  monkeypatch.setattr(replica_lib.Replica, 'submit', note)
  _play(make, 3, LONG_REPLIES, forever=True, fresh=lambda turn: fresh)
  ends: dict[bytes, np.ndarray] = {}
  for generation, start in found:
    key = generation.request.key.tobytes()
    end = ends.get(key, start[:0])
    np.testing.assert_array_equal(start[: len(end)], end)
    sampled = [chunk.tokens for chunk in generation.chunks]
    ends[key] = np.concatenate([start, *sampled])
  assert len(ends) > 9


class Failing(Env):
  """Fails in the second turn of the first fork that comes so far."""

  failed = False

  async def step(self, reply):
    if self.turn == 1 and not Failing.failed:
      Failing.failed = True
      raise OSError('it is broken')
    return await super().step(reply)


@pytest.mark.parametrize('make_env', [Env, Failing])
@_searches
def test_all_texts_are_closed_at_the_end(make, make_env, monkeypatch):
  """Those of an episode that failed too: else their rows are kept from other texts."""
  submit, found = replica_lib.Replica.submit, []

  def note(self, request):
    found.append(submit(self, request))
    return found[-1]

  monkeypatch.setattr(replica_lib.Replica, 'submit', note)
  monkeypatch.setattr(Failing, 'failed', False)
  engine = rollouts.make_engine()
  decoding = decoding_lib.Decoding(
    choice=make(engine.make_policy(test_choice._critic(), 0))
  )
  (t,) = rollouts.collect(
    lambda: make_env(forever=True),
    rollouts.make_tasks(1),
    engine=engine,
    decoding=decoding,
    limits=LONG_REPLIES,
  )
  assert t.status == ('error' if make_env is Failing else 'max_turns')
  assert len(found) > 4 and all(generation.sequence.closed for generation in found)


class Reader(NamedTuple):
  """In place of a search: one episode, whose value is read after each turn."""

  critic: Any
  seen: list
  implicit: implicit_value.Odds = ODDS
  rows: int = 2

  async def search(self, root, read):
    while root.status is None:
      await root.take_turn()
      self.seen.extend(await read([root]))
    return root

  def begin(self, replica):
    return search_lib.Searcher(replica, self)


def test_an_implicit_value_is_the_log_prob_of_the_replies_so_far():
  critic, seen = tiny.params(tiny.config(), likely={100: 0.5}), []
  size = rollouts.SLOTS
  engine = tiny.engine(
    rollouts.params(), guides={guide_lib.FORCED: None}, slots=size, bucket=size
  )
  reader: Any = Reader(engine.make_policy(critic, 0), seen)
  (t,) = rollouts.collect(
    lambda: Env(forever=True),
    rollouts.make_tasks(1),
    engine=engine,
    decoding=decoding_lib.Decoding(choice=reader),
  )
  (logprobs,) = tiny.learned(critic, t.segments)
  sums = [logprobs[turn.start : turn.stop].sum() for turn in t.turns]
  assert len(sums) == 3
  np.testing.assert_allclose(seen, np.cumsum(sums), atol=1e-3)


class LongText(Env):
  """The environment of task 0 is ordinary; the others give more than a row holds.

  Task 1 in the answer to the first reply, task 2 in a new prompt, task 3 in the first.
  """

  TEXT = {'role': 'user', 'content': 'one two three ' * 100}

  async def reset(self, task):
    messages = await super().reset(task)
    return [self.TEXT] if task.id == 'task 3' else messages

  async def step(self, reply):
    step = await super().step(reply)
    if self.task.id in ('task 1', 'task 2'):
      step = types.Step([self.TEXT], 0.5, fresh=self.task.id == 'task 2')
    return step


@pytest.mark.parametrize('implicit', [None, ODDS], ids=['head', 'implicit'])
@_all_kinds
def test_an_episode_without_room_is_truncated_as_without_a_search(make, implicit):
  size = rollouts.SLOTS
  engine = tiny.engine(
    rollouts.params(), guides={guide_lib.FORCED: None}, slots=size, bucket=size
  )
  critic = engine.make_policy(test_choice._critic(), 0)
  for choice in (None, make(critic, implicit)):
    ordinary, answer, fresh, prompt = rollouts.collect(
      LongText,
      engine=engine,
      decoding=decoding_lib.Decoding(choice=choice),
      limits=LONG_REPLIES,
    )
    assert ordinary.status in ('done', 'max_turns')
    for t in (answer, fresh):
      assert (t.status, len(t.turns), t.reward) == ('truncated', 1, 0.5)
      assert t.messages[-1] == LongText.TEXT and t.error is None
      assert len(t.segments[0].tokens) == t.turns[0].stop
    assert prompt.status == 'truncated' and not prompt.turns
    assert prompt.metrics['prompt_too_long'] == 1 and 'a row 256' in prompt.error


def test_environment_without_clone_is_an_error():
  critic = test_choice._critic()
  engine = rollouts.make_engine()
  beams = search_lib.BeamSearch(1, 2, engine.make_policy(critic, 0))
  (t,) = test_choice._play(beams, 1, engine)
  assert t.status == 'error' and 'has no method clone' in t.error


def test_a_tool_environment_is_cloned():
  env = env_lib.CloneableToolEnv([], lambda task, messages: 0.0)
  env.messages = [{'role': 'user', 'content': 'a'}]
  other = env.clone()
  other.messages.append({'role': 'user', 'content': 'b'})
  assert len(env.messages) == 1
