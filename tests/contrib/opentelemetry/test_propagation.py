"""What runs inside a tool call, or is started or asked by it, knows its span."""

import asyncio
import json
import sys

import answers
import httpx2
from opentelemetry import trace
from opentelemetry.sdk import trace as trace_sdk
import pytest
import rollouts
import serving
import tiny
import traced

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import calls
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.serve import program
from agent_r1_jax.web import bounded_http

# Asks once, and says what it finds in its environment.
SCRIPT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({'messages': task['messages'], 'max_tokens': 4}).encode()
for _ in range(2):
  url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'
  json.load(urllib.request.urlopen(urllib.request.Request(url, body)))
with open(sys.argv[1], 'a') as file:
  file.write(json.dumps([task['id'], os.environ.get('TRACEPARENT')]) + '\\n')
"""


def _name(context) -> str:
  return f'00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}'


@pytest.fixture
def memory():
  return traced.Memory()


def _collect(memory, make_env):
  engine, chat, tasks = rollouts.make_engine(), tiny.chat(), rollouts.make_tasks(4)
  limits = config_lib.Limits(max_turns=2, max_turn_tokens=48)
  return traced.collect(memory, engine, chat, tasks, make_env, limits=limits)


def _play(memory, tool):
  """Plays episodes whose every complete reply calls a tool once."""
  parse = lambda reply: [calls.ToolCall(tool.name, {})]
  make_env = lambda: env_lib.ToolEnv([tool], lambda task, said: 0.0, parse=parse)
  return _collect(memory, make_env)


def _in_a_thread(note):
  @tool_lib.tool
  def act() -> str:
    """Acts in a thread."""
    note()
    return 'done'

  return act


def _in_a_loop(note):
  @tool_lib.tool
  async def act() -> str:
    """Acts in the loop of users, and in a thread of its own."""
    await asyncio.to_thread(note)
    return 'done'

  return act


@pytest.mark.parametrize('make', [_in_a_thread, _in_a_loop])
def test_a_tool_runs_inside_the_span_of_its_call(memory, make):
  inside = []
  own = memory.tracers.get_tracer('a tool')

  def note():
    with own.start_as_current_span('own'):
      inside.append(trace.get_current_span().get_span_context().span_id)

  _play(memory, make(note))
  called = memory.find('execute_tool')
  assert called and len(called) == len(inside)
  for call in called:
    (child,) = memory.list_under(call, 'own')
    assert child.context.span_id in inside


def test_a_request_of_a_tool_has_the_span_in_its_header(memory):
  seen = []

  def answer(handler, fields):
    seen.append(handler.headers['traceparent'])
    return 200, b'{}'

  with answers.serve_posts(answer) as url, httpx2.Client() as client:

    def ask():
      bounded_http.post(client, url, {}, seconds=30, max_bytes=100)

    _play(memory, _in_a_thread(ask))
    names = [_name(span.context) for span in memory.find('execute_tool')]
    assert sorted(seen) == sorted(names) and seen


def test_a_program_has_its_episode_in_its_environment(memory, tmp_path):
  file = tmp_path / 'found.jsonl'
  run = program.process([sys.executable, '-c', SCRIPT, str(file)])
  engine, (_, _, chat) = serving.engine(), serving.policy()
  make_env, tasks = lambda: program.Program(run), serving.tasks()[:3]
  options = {'limits': serving.LIMITS}
  played = traced.collect(memory, engine, chat, tasks, make_env, **options)
  found = dict(json.loads(line) for line in file.read_text().splitlines())
  episodes = memory.find('invoke_agent')
  assert {
    span.attributes['agent_r1_jax.task.id']: _name(span.context) for span in episodes
  } == found
  # Each request is a reply of its own episode, though one server takes those of all.
  by_task = {trajectory.task.id: trajectory for trajectory in played}
  for episode in episodes:
    trajectory = by_task[episode.attributes['agent_r1_jax.task.id']]
    replies = memory.list_under(episode, 'chat')
    assert len(replies) == len(trajectory.turns) == 2
    sampled = [reply.attributes['gen_ai.usage.output_tokens'] for reply in replies]
    assert sampled == [turn.stop - turn.start for turn in trajectory.turns]


def test_what_fails_is_an_error(memory):
  @tool_lib.tool
  def act() -> str:
    """Fails."""
    raise KeyError('no such thing')

  def reward(task, messages):
    raise OverflowError

  _play(memory, act)
  for call in memory.find('execute_tool'):
    assert call.status.status_code is trace.StatusCode.ERROR
    assert call.attributes['error.type'] == 'KeyError'
  make_env = lambda: env_lib.ToolEnv([], reward)
  _collect(memory, make_env)
  failed = [
    span
    for span in memory.find('invoke_agent')
    if span.attributes['agent_r1_jax.status'] == types.Status.FAILED
  ]
  assert {span.attributes['error.type'] for span in failed} == {'OverflowError'}
  assert {span.status.status_code for span in failed} == {trace.StatusCode.ERROR}


@pytest.mark.parametrize('moment', ['on_start', 'on_end'])
def test_a_processor_that_raises_ends_no_episode(memory, caplog, moment):
  def fail(span, **_):
    # One that cannot begin a run's span ends the run before its first step.
    if span.name != 'run' or moment == 'on_end':
      raise OSError('the disk is full')

  processor = trace_sdk.SpanProcessor()
  setattr(processor, moment, fail)
  memory.tracers.add_span_processor(processor)
  played = _collect(memory, lambda: env_lib.ToolEnv([], lambda task, said: 1.0))
  assert [t.status for t in played if t.status == types.Status.FAILED] == []
  assert 'the disk is full' in caplog.text


def test_without_a_watcher_nothing_is_passed_on(tmp_path):
  file = tmp_path / 'found.jsonl'
  run = program.process([sys.executable, '-c', SCRIPT, str(file)])
  serving.run_programs(run, serving.tasks()[:1])
  ((_, found),) = map(json.loads, file.read_text().splitlines())
  assert found is None
