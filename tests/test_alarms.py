"""Alarms ring beyond their limits, not at them, and not for what was not measured."""

import dataclasses
import math

import episodes
import pytest

from agent_r1_jax import config, types
from agent_r1_jax.report import alarms
from agent_r1_jax.rollout import evaluate

_GIVEN = {'entropy': 0.5, 'kl': 2.0, 'dead_groups': 0.75, 'truncated': 0.25}
_SHARES = 'invalid_calls', 'tool_failures', 'action_share', 'reward_fall', 'hacking'
_GIVEN |= dict.fromkeys(_SHARES, 0.5)
_LIMITS = config.Alarms(**_GIVEN)
_UP, _DOWN = 1e-9, -1e-9


def _find(numbers, limits=_LIMITS):
  """Returns the names of the alarms that ring."""
  return [name for name, (*_, on) in alarms.compare(numbers, limits).items() if on]


_CALLS, _UNREAD = 'rollout/tool_calls', 'rollout/format_errors'
_ERRORS = 'rollout/tool_errors'
_TRUNCATED, _TURNS = 'rollout/status/truncated', 'rollout/status/max_turns'


@pytest.mark.parametrize(
  ('alarm', 'name', 'limit', 'beyond', 'others'),
  [
    ('entropy_collapse', 'train/entropy', 0.5, _DOWN, {}),
    ('kl_blow_up', 'train/kl', 2.0, _UP, {'train/behaviour_kl': 0.1}),
    ('kl_blow_up', 'train/kl', -2.0, _DOWN, {}),
    ('kl_blow_up', 'train/behaviour_kl', 2.0, _UP, {'train/kl': 0.1}),
    ('kl_blow_up', 'train/behaviour_kl', -2.0, _DOWN, {}),
    ('dead_groups', 'rollout/dead_groups', 0.75, _UP, {}),
    ('truncated', _TRUNCATED, 0.25, _UP, {}),
    ('truncated', _TURNS, 0.25, _UP, {}),
    # Each of the budgets counts.
    ('truncated', _TRUNCATED, 0.125, _UP, {_TURNS: 0.125, 'rollout/status/error': 0.5}),
    # Of four calls two failed; of three, and one that could not be read, one.
    ('invalid_calls', 'rollout/tool_errors', 2.0, _UP, {_CALLS: 4.0}),
    ('invalid_calls', 'rollout/tool_errors', 1.0, _UP, {_CALLS: 3.0, _UNREAD: 1.0}),
    ('invalid_calls', _UNREAD, 2.0, _UP, {_CALLS: 2.0}),
    # What the tool raised is no invalid call.
    ('tool_failures', 'rollout/tool_failures', 2.0, _UP, {_CALLS: 4.0, _ERRORS: 2.0}),
    ('invalid_calls', _ERRORS, 3.0, _UP, {_CALLS: 4.0, 'rollout/tool_failures': 1.0}),
    ('isolated_calls', 'rollout/isolated_calls', 0.0, _UP, {_CALLS: 4.0}),
    ('action_share', 'rollout/action_tokens', 8.0, _DOWN, {'rollout/tokens': 16.0}),
    ('reward_fall', 'fall', 0.5, _UP, {}),
    ('reward_hacking', 'hacking', 0.5, _UP, {}),
    ('action_share', 'rollout/tokens', 16.0, _UP, {'rollout/action_tokens': 8.0}),
  ],
)
def test_an_alarm_rings_just_beyond_its_limit(alarm, name, limit, beyond, others):
  assert _find(others | {name: limit}) == []
  assert _find(others | {name: limit + beyond}) == [alarm]


def test_a_metric_that_is_absent_or_of_no_call_rings_no_alarm():
  assert _find({}) == _find({}, config.Alarms()) == []
  none = {'rollout/tool_calls': 0.0, 'rollout/tool_errors': 0.0, 'rollout/tokens': 0.0}
  assert _find(none) == []


def test_the_names_are_those_of_a_rollouts_summary():
  t = episodes.trajectory('..........0')
  t.status = 'max_turns'
  t.metrics = {'tool_calls': 1.0, 'tool_errors': 1.0, 'format_errors': 0.0}
  numbers = {f'rollout/{k}': v for k, v in evaluate.summarize([t]).items()}
  assert _find(numbers) == ['truncated', 'invalid_calls', 'action_share']


@pytest.mark.parametrize(
  ('rewards', 'expected'),
  [
    ([0.5] * 6, 0.0),  # There are no five before the last two.
    ([0.5] * 5 + [0.2, 0.1], 0.7),
    # The best five in a row are not the last ones; one good step is not enough.
    ([0.2, *[0.6] * 5, 0.1, 0.9, 0.1, 0.4, 0.2], 0.5),
    ([0.5] * 5 + [0.7, 0.7], -0.4),
    ([-1.0] * 5 + [-2.0, -2.0], 0.0),
  ],
)
def test_a_fall_is_of_two_steps_below_the_best_five_before(rewards, expected):
  assert alarms.fall(rewards) == pytest.approx(expected)


def test_a_resumed_run_knows_the_rewards_before_its_fall():
  rows = [{'rollout/reward': x} for x in [0.6] * 5 + [0.3, 0.3, 0.3]]
  monitor = alarms.AlarmMonitor(config.Alarms(), print, before=rows[:6])
  rung = [
    monitor.check(7 + i, row)['alarm/reward_fall'] for i, row in enumerate(rows[6:])
  ]
  assert rung == [1.0, 1.0]


def test_a_line_is_printed_when_an_alarm_begins_and_when_it_ends():
  said = []
  monitor = alarms.AlarmMonitor(config.Alarms(), said.append)
  good, bad = {'rollout/status/truncated': 0.1}, {'rollout/status/truncated': 1.0}
  rung = [monitor.check(step, n) for step, n in enumerate([good, bad, bad, good, bad], 1)]
  assert [r['alarm/truncated'] for r in rung] == [0, 1, 1, 0, 1]
  assert [line.partition(':')[0] for line in said] == [
    'Alarm at step 2, truncated',
    'Alarm over at step 4',
    'Alarm at step 5, truncated',
  ]
  assert '100% of the episodes ran out of tokens or turns, above 30%. Raise' in said[0]


def test_every_limit_has_an_alarm_and_every_alarm_a_message():
  limits = {f.name for f in dataclasses.fields(_LIMITS)} - {'true_metric', 'window'}
  bad = {'train/entropy': 0.001, 'train/kl': 9.0, 'rollout/dead_groups': 1.0}
  bad |= {_TRUNCATED: 1.0, _CALLS: 1.0, _UNREAD: 3.0, 'rollout/isolated_calls': 1.0}
  bad |= {'rollout/tool_failures': 1.0, 'rollout/tool_errors': 1.0}
  bad |= {'rollout/tokens': 1000.0, 'rollout/action_tokens': 1.0}
  said = []
  # The reward rises from the first two of four steps to the last two, far below earlier
  # ones; the true metric never does.
  earlier = *[9.0] * 5, 0.0, 0.1, 0.9
  before = [{'rollout/reward': r, 'rollout/em': 0.5} for r in earlier]
  monitor = alarms.AlarmMonitor(config.Alarms(window=4), said.append, before)
  found = monitor.check(4, bad | {'rollout/reward': 1.0, 'rollout/em': 0.5})
  assert len(said) == len(found) == len(limits) and set(found.values()) == {1.0}
  assert '0.001 nats' in ' '.join(said)


# Two halves of three steps; a standard error is 0.1 · sqrt(2 / 3) = 0.0816.
_RISING = (0.1, 0.2, 0.3, 0.6, 0.7, 0.8)
_LEVEL = (0.4, 0.5, 0.6, 0.5, 0.4, 0.6)


def test_a_rise_by_hand():
  assert alarms.rise(_RISING) == pytest.approx(0.5 / (0.01 * 2 / 3) ** 0.5)
  assert alarms.rise(_LEVEL) == pytest.approx(0.0, abs=1e-6)
  assert alarms.rise([0.3] * 6) == 0.0
  assert alarms.rise([0.0, 1.0, 9.0, 1.0, 2.0]) == pytest.approx(1.0 / 0.5**0.5)


def test_a_window_of_less_than_four_steps_is_refused():
  with pytest.raises(ValueError, match='alarms.window is 3; it must be at least 4'):
    config.Config(alarms=config.Alarms(window=3)).check()


@pytest.mark.parametrize(
  ('rewards', 'metrics', 'rings'),
  [
    (_RISING, _LEVEL, True),
    (_RISING, _RISING[::-1], True),
    (_RISING, _RISING, False),
    (_LEVEL, _LEVEL, False),
    (_RISING[::-1], _LEVEL, False),
    (_RISING, [None] * 6, False),  # There is no such metric.
  ],
)
@pytest.mark.parametrize('resumed', [0, 4])
def test_a_reward_that_rises_alone_rings_when_the_window_is_full(
  rewards, metrics, rings, resumed
):
  rows = [
    {'rollout/reward': r} | ({} if m is None else {'rollout/f1': m})
    for r, m in zip(rewards, metrics, strict=True)
  ]
  limits = config.Alarms(window=6, true_metric='rollout/f1')
  monitor = alarms.AlarmMonitor(limits, lambda line: None, rows[:resumed])
  rung = [monitor.check(7, row)['alarm/reward_hacking'] for row in rows[resumed:]]
  assert rung == [0.0] * (5 - resumed) + [float(rings)]


def _episode(error='', **metrics):
  return types.Trajectory(
    types.Task('1', []), 0, 0, [], [], [], 'error', metrics, error or None
  )


def test_a_fault_is_printed_when_it_is_new_and_counted_at_the_end():
  said = []
  faults = alarms.FaultCounter(said.append)
  faults.count(1, [_episode(em=1.0, tool_calls=2.0)])
  faults.report_totals()
  assert said == []
  given = {'error/CallTimeoutError': 1.0, 'tool_errors': math.nan}
  late = _episode('reset gave no answer', **given)
  faults.count(1, [late, late, _episode(tool_timeouts=2.0, em=1.0)])
  faults.count(2, [late])
  first, second = said
  assert 'step 1, error/CallTimeoutError: 2' in first and 'reset gave no answer' in first
  assert 'step 1, tool_timeouts: 2' in second
  faults.report_totals()
  assert said[2].endswith('error/CallTimeoutError 3, tool_timeouts 2')


def test_the_first_exception_of_each_tool_is_in_the_line_of_its_fault():
  said = []
  faults = alarms.FaultCounter(said.append)
  search, late = 'outage/search/ConnectionError', 'outage/nap/CallTimeoutError'
  unread = {'tool_errors': 3.0, 'format_errors': 2.0, 'tool_failures': 1.0}
  episode = _episode(**{search: 1.0, 'tool_error/calc/ValueError': 1.0}, **unread)
  answers = [
    ('search', "Error: search: unknown argument 'x'; it takes query"),
    ('search', 'Error: search: ConnectionError: the index is down'),
    ('calc', 'Error: calc: ValueError: no number'),
  ]
  episode.messages = [
    {'role': 'tool', 'name': name, 'content': text} for name, text in answers
  ]
  slow = _episode(**{late: 1.0})
  text = 'Error: nap gave no answer within 0.1 seconds'
  slow.messages = [{'role': 'tool', 'name': 'nap', 'content': text}]
  faults.count(1, [episode, slow])
  faults.count(2, [episode, slow])
  assert [line.partition(' (counted')[0] for line in said] == [
    f'Fault at step 1, {late}: 1 so far: {text}',
    f'Fault at step 1, {search}: 1 so far: {answers[1][1]}',
    f'Fault at step 1, tool_error/calc/ValueError: 1 so far: {answers[2][1]}',
  ]
