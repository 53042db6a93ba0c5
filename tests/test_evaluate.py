"""Evaluation: which episodes, and what their numbers say."""

import functools
import json
import pathlib
import re

import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import playing, types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.grammars import compiler
from agent_r1_jax.rollout import evaluate

_LIMITS = config_lib.Limits(max_turns=2, max_turn_tokens=12)


@functools.cache
def _params():
  return tiny.params(tiny.config(), likely={tiny.chat().stop_ids[0]: 1.4})


class Env:
  async def reset(self, task):
    return list(task.messages)

  async def step(self, reply):
    return types.Step([], 1.0, done=True, metrics={'em': float(len(reply) % 2)})


def _sets():
  def tasks(name, n):
    return [
      types.Task(f'{i}', [{'role': 'user', 'content': f'{name} {i}'}]) for i in range(n)
    ]

  return {'rivers': tasks('river', 3), 'none': [], 'cities': tasks('city', 4)}


def _engine():
  return tiny.engine(_params(), bucket=tiny.SIZES['slots'])


def _run(engine, **kwargs):
  return tiny.within(
    evaluate.run, engine, tiny.chat(), _sets(), Env, limits=_LIMITS, **kwargs
  )


class TestRun:
  def test_greedy_episodes_of_every_set_in_order(self):
    engine = _engine()
    ended = []
    played = _run(engine, on_done=ended.append)
    assert {name: [t.task.id for t in ts] for name, ts in played.items()} == {
      'rivers': ['0', '1', '2'],
      'none': [],
      'cities': ['0', '1', '2', '3'],
    }
    assert [t.task.messages for t in played['cities']] == [
      t.messages for t in _sets()['cities']
    ]
    assert len(ended) == 7
    # Greedy: another seed changes nothing.
    again = _run(engine, seed=5)
    for name, trajectories in played.items():
      for a, b in zip(trajectories, again[name], strict=True):
        assert a.messages == b.messages
    segments = [s for ts in played.values() for t in ts for s in t.segments]
    tiny.assert_on_policy(_params(), segments)

  def test_without_sets_nothing_is_played(self):
    engine = _engine()
    assert evaluate.run(engine, tiny.chat(), {}, Env, limits=_LIMITS) == {}


@tool_lib.tool
def look(place: str) -> str:
  """Looks something up.

  Args:
    place: Where.
  """
  return place


def _make_tool_env(call_grammar=compiler.tool_calls):
  return env_lib.ToolEnv([look], lambda task, messages: 0.0, call_grammar=call_grammar)


def test_calls_are_held_by_the_grammar_of_the_environment():
  sampling, engine = config_lib.Sampling(tool_grammar=True), _engine()
  with pytest.raises(ValueError, match='the environment has no call_grammar'):
    evaluate.make_decoding(sampling, engine, tiny.chat(), _make_tool_env(None))


@pytest.mark.parametrize('hold', [False, True])
def test_calls_can_be_held_to_their_schemas(hold):
  """Of a policy that begins one and knows nothing of how it goes on."""
  (opening,) = tiny.chat().tokenizer.encode('<tool_call>', add_special_tokens=False)
  params = tiny.params(tiny.config(), likely={opening: 4.0})
  engine = tiny.engine(params, bucket=tiny.SIZES['slots'])
  rows = {'tools': (_sets(), _make_tool_env), 'none': (_sets(), Env)}
  limits = config_lib.Limits(max_turns=1, max_turn_tokens=60)
  sampling = config_lib.Sampling(temperature=0.0, tool_grammar=hold)
  played = {}
  for name, (sets, make_env) in rows.items():
    decoding = evaluate.make_decoding(sampling, engine, tiny.chat(), make_env())
    play = functools.partial(evaluate.run, limits=limits, decoding=decoding)
    played[name] = tiny.within(play, engine, tiny.chat(), sets, make_env)
  said = [t.messages[-1]['content'] for t in played['tools']['cities']]
  begin = '<tool_call>\n{"name": "look", "arguments": {"place": "'
  assert [text.startswith(begin) for text in said] == [hold] * 4
  free = [t.messages[-1]['content'] for t in played['none']['cities']]
  assert not any(text.startswith(begin) for text in free)


def _trajectory(number, status='done', turns=((0, 2, 4, 1.0),), **numbers):
  task = types.Task(f't{number}', [], info={'even': number % 2 == 0})
  segments = [
    types.Segment(np.arange(10), np.arange(10) % 2 == 0, np.zeros(10, np.float32))
    for _ in range(1 + max((turn[0] for turn in turns), default=-1))
  ]
  return types.Trajectory(
    task,
    number,
    0,
    segments,
    [types.Turn(*t) for t in turns],
    [],
    status,
    metrics=numbers,
  )


class TestNumbers:
  four = [
    _trajectory(0, em=1.0),
    _trajectory(1, em=0.0, turns=((0, 2, 4, 0.5), (1, 2, 4, 0.25))),
    _trajectory(2, em=1.0, status='max_turns'),
    _trajectory(3, status='error', turns=()),
  ]

  def test_means_of_kinds_count_their_tasks(self):
    assert evaluate.mean_metric(self.four, 'unknown') == evaluate.mean_metric([]) == 0.0
    assert evaluate.by_kind(self.four, {'even': lambda task: task.info['even']}) == {
      'all': {'mean': 0.5, 'count': 4},
      'even': {'mean': 1.0, 'count': 2},
    }

  def test_a_summary_has_means_shares_and_counts(self):
    assert evaluate.summarize(self.four) == {
      'reward': (1 + 0.75 + 1 + 0) / 4,
      'turns': (1 + 2 + 1 + 0) / 4,
      'tokens': (10 + 20 + 10 + 0) / 4,
      'action_tokens': (5 + 10 + 5 + 0) / 4,
      'abandoned_calls': 0.0,
      'em': 0.5,
      'timeouts': 0.0,
      'status/done': 0.5,
      'status/truncated': 0.0,
      'status/max_turns': 0.25,
      'status/error': 0.25,
    }
    assert evaluate.summarize([]) == {}


def test_the_questions_of_the_documentation_are_measured(tmp_path, monkeypatch):
  page = pathlib.Path(__file__).parents[1] / 'docs' / 'evaluation.md'
  (block,) = re.findall(r'```python\n(.*?)```', page.read_text(), re.S)
  names: dict = {}
  exec(block, names)
  task = types.Task('1', [], '27')
  for reply, score in ((' 27 ', 1.0), ('72', 0.0)):
    assert names['reward'](task, [{'role': 'assistant', 'content': reply}]) == score
  # Sizes whose programs compile at once.
  play = playing.play
  sizes = tiny.SIZES | {'bucket': tiny.SIZES['slots'], 'max_turn_tokens': 12}
  small = lambda config, *args, **options: play(
    tiny.run_config(config, **sizes), *args, **options
  )
  monkeypatch.setattr(playing, 'play', small)
  # What a policy with random weights says is not known: whom the reward pays is.
  names['reward'] = lambda task, messages: float(task.answer == 'a')
  rows = [{'question': f'{x}?', 'answer': x} for x in 'abca']
  (tmp_path / 'mine.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  model = tiny.save(tmp_path / 'model')
  found = tiny.within(names['main'], model, tmp_path / 'mine.jsonl', tmp_path / 'run')
  assert found == (0.5, 0.5)
