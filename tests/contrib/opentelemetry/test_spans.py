"""The spans of a run are the steps of its metrics and the turns of its episodes."""

import pytest
import runs
import traced

from agent_r1_jax.contrib.opentelemetry import gauges, providers
from agent_r1_jax.rl import losses
from agent_r1_jax.train import metrics

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model = runs.model
STEPS = 4
CORRECTED = runs.GRPO._replace(correction=losses.token_truncated())


def _config(model, **kwargs):
  return runs.config(model, steps=STEPS, sinks='', **kwargs)


@pytest.fixture(scope='module')
def run(model, tmp_path_factory):
  """The memory of a run, its watcher, its workdir and its parameters."""
  memory, workdir = traced.Memory(), tmp_path_factory.mktemp('run')
  params, watcher = traced.run(_config(model), workdir, memory.make_sink)
  return memory, watcher, workdir, params


def _key(trajectory):
  return (
    trajectory.task.id,
    trajectory.sample,
    str(trajectory.status),
    trajectory.reward,
    len(trajectory.turns),
  )


def _read_key(span):
  names = ('task.id', 'sample', 'status', 'reward', 'turns')
  return tuple(span.attributes[f'agent_r1_jax.{name}'] for name in names)


def _sum_of(name, spans):
  return sum(span.attributes[name] for span in spans)


def _check_episodes(memory, rollout, played, line, prefix):
  """A rollout's spans say what its episodes and a line of metrics.jsonl say."""
  episodes = memory.list_under(rollout, 'invoke_agent')
  assert sorted(map(_read_key, episodes)) == sorted(map(_key, played))
  turns = [memory.list_under(episode, 'turn') for episode in episodes]
  for episode, mine in zip(episodes, turns, strict=True):
    assert len(mine) == episode.attributes['agent_r1_jax.turns']
    assert [t.attributes['agent_r1_jax.turn'] for t in mine] == [*range(len(mine))]
  every_turn = [turn for mine in turns for turn in mine]
  replies = [memory.list_under(turn, 'chat') for turn in every_turn]
  assert all(len(mine) == 1 for mine in replies)
  calls = [call for t in every_turn for call in memory.list_under(t, 'execute_tool')]
  assert {call.name for call in calls} <= {'execute_tool look'}
  count = len(played)
  sampled = _sum_of('gen_ai.usage.output_tokens', [reply for (reply,) in replies])
  for name, total in {
    'turns': len(every_turn),
    'tool_calls': len(calls),
    'action_tokens': sampled,
  }.items():
    # A metric that no episode has is not in the line.
    assert line.get(f'{prefix}/{name}', 0.0) * count == pytest.approx(total), name
  return len(calls)


def test_the_tree_is_that_of_metrics_and_episodes(run):
  memory, watcher, workdir, _ = run
  lines = {line['step']: line for line in metrics.read(workdir)}
  loops = memory.find('rl.loop')
  assert [loop.attributes['rl.loop.iteration'] for loop in loops] == [*range(1, 5)]
  evaluations, calls = memory.find('evaluation'), 0
  for step, played in watcher.played:
    prefix = 'rollout' if len(played) == 8 else 'eval/dev'
    if prefix == 'rollout':
      loop = loops[step - 1]
      (rollout,) = memory.list_under(loop, 'rl.sample')
      (update,) = memory.list_under(loop, 'rl.train')
      assert rollout.end_time <= update.start_time
      assert update.attributes['rl.train.batch_size'] <= len(played)
    else:
      rollout = evaluations.pop(0)
    calls += _check_episodes(memory, rollout, played, lines[step], prefix)
  assert calls > 0 and not evaluations and len(lines) == STEPS + 1


def test_each_step_is_a_trace_and_knows_its_run(run):
  memory, _, workdir, _ = run
  (whole,) = memory.find('run')
  roots = [whole, *memory.find('rl.loop'), *memory.find('evaluation')]
  assert len({span.context.trace_id for span in memory.spans}) == len(roots)
  for root in roots[1:]:
    assert root.parent is None and root.attributes['rl.run.id'].startswith(workdir.name)
    assert [link.context.span_id for link in root.links] == [whole.context.span_id]


def _assert_nested(memory):
  spans = {span.context.span_id: span for span in memory.spans}
  for span in spans.values():
    if span.parent:
      parent = spans[span.parent.span_id]
      assert parent.start_time <= span.start_time, (parent.name, span.name)
      assert span.end_time <= parent.end_time, (parent.name, span.name)


def test_durations_nest_and_are_those_of_the_metrics(run):
  memory, _, workdir, _ = run
  _assert_nested(memory)
  lines = [line for line in metrics.read(workdir) if line['step']]
  for loop, line in zip(memory.find('rl.loop'), lines, strict=True):
    for name, column in {'rl.sample': 'time/rollout', 'rl.train': 'time/update'}.items():
      (span,) = memory.list_under(loop, name)
      assert (span.end_time - span.start_time) / 1e9 <= line[column], name


def test_the_metrics_are_the_lines(run):
  memory, _, workdir, _ = run
  points, lines = memory.read_metrics(), metrics.read(workdir)
  last = {}
  for line in lines:
    last |= line
  del last['step']
  for name, value in last.items():
    (point,) = points[f'agent_r1_jax.{name.replace("/", ".")}']
    assert point.value == pytest.approx(value, nan_ok=True), name
  for name, column in {'sample': 'time/rollout', 'train': 'time/update'}.items():
    (point,) = points[f'rl.{name}.duration']
    assert point.sum == pytest.approx(sum(line.get(column, 0) for line in lines))
    assert point.count == STEPS
  (episodes,), (steps,) = points['rl.sample.episodes'], points['rl.train.steps']
  assert (episodes.value, steps.value) == (8 * STEPS, STEPS)
  (reward,) = points['rl.environment.reward.mean']
  assert reward.value == last['eval/dev/reward']
  assert reward.attributes['agent_r1_jax.tasks'] == 'dev'


def test_a_name_that_is_not_ascii_costs_no_number_of_its_line():
  memory = traced.Memory()
  lines = gauges.Lines(memory.meters.get_meter('test'), {})
  lines.record({'eval/tôt/reward': 0.5, 'rollout/turns': 2.0})
  points = memory.read_metrics()
  assert points['agent_r1_jax.eval.t_t.reward'][0].value == 0.5
  assert points['agent_r1_jax.rollout.turns'][0].value == 2.0
  (mean,) = points['rl.environment.reward.mean']
  assert mean.attributes['agent_r1_jax.tasks'] == 'tôt'


def test_nothing_that_is_trained_changes(run, model, tmp_path):
  _, _, workdir, params = run
  plain, _ = traced.run(_config(model), tmp_path, None)
  runs.assert_equal(plain, params)
  assert runs.read_numbers(tmp_path) == runs.read_numbers(workdir)


@pytest.mark.parametrize('partial', [False, True])
def test_a_rollout_ahead_belongs_to_the_step_that_learns_from_it(
  model, tmp_path, partial
):
  memory = traced.Memory()
  config = _config(model, ahead=1, partial=partial)
  _, watcher = traced.run(config, tmp_path, memory.make_sink, CORRECTED)
  _assert_nested(memory)
  loops = memory.find('rl.loop')
  assert len(loops) == STEPS and loops[1].start_time < loops[0].end_time
  played = {step: ts for step, ts in watcher.played if len(ts) == 8}
  lines = {line['step']: line for line in metrics.read(tmp_path)}
  for loop in loops:
    step = loop.attributes['rl.loop.iteration']
    (rollout,) = memory.list_under(loop, 'rl.sample')
    _check_episodes(memory, rollout, played[step], lines[step], 'rollout')
    assert len(memory.list_under(loop, 'rl.train')) == 1


def test_a_configuration_names_the_sink_as_a_module(model, tmp_path, monkeypatch):
  memory = traced.Memory()
  monkeypatch.setattr(providers, 'find', lambda: (memory.tracers, memory.meters))
  config = runs.config(
    model, steps=1, sinks='tensorboard,agent_r1_jax.contrib.opentelemetry.sink'
  )
  traced.run(config, tmp_path, None)
  assert len(memory.find('rl.loop')) == 1 and (tmp_path / 'tensorboard').is_dir()
