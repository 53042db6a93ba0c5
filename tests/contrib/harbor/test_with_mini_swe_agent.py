"""mini-swe-agent plays a task: `make test-with-mini-swe-agent` installs and tries it."""

import asyncio
import contextlib
import json
import os
import pathlib

import answers
import confined
import directory_tasks
import pytest
import runs
import tiny

from agent_r1_jax import report, train
from agent_r1_jax.contrib.harbor import directories, mini_swe_agent
from agent_r1_jax.rl import algorithms
from agent_r1_jax.serve import program

PYTHON = os.environ.get('PACKAGE_PYTHON', '')
pytestmark = [
  pytest.mark.skipif(not PYTHON, reason='`make test-with-mini-swe-agent` installs it'),
  pytest.mark.usefixtures('needs_shell'),
]
needs_shell = confined.needs_shell
MINI = str(pathlib.Path(PYTHON).parent / 'mini')
END = 'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'


@contextlib.contextmanager
def _serve(commands):
  """The address of a policy that gives one command after the other, and its requests."""
  asked = []

  def answer(handler, body):
    asked.append(body)
    command = commands[sum(m['role'] == 'assistant' for m in body['messages'])]
    function = {'name': 'bash', 'arguments': json.dumps({'command': command})}
    call = {'id': f'c{len(asked)}', 'type': 'function', 'function': function}
    message = {'role': 'assistant', 'content': 'Well.', 'tool_calls': [call]}
    choice = {'index': 0, 'message': message, 'finish_reason': 'tool_calls'}
    usage = {'prompt_tokens': 1, 'completion_tokens': 1, 'total_tokens': 2}
    reply = {'id': 'x', 'object': 'chat.completion', 'created': 1, 'model': 'policy'}
    return 200, json.dumps({**reply, 'choices': [choice], 'usage': usage}).encode()

  with answers.serve_posts(answer, **{'Content-Type': 'application/json'}) as url:
    yield f'{url}/v1', asked


@pytest.fixture
def task(tmp_path):
  (task,) = directories.load(directory_tasks.write(tmp_path / 'task'))
  return task


def test_a_policy_that_knows_the_commands_solves_the_task(task):
  here = pathlib.Path(__file__).parent
  commands = [
    f'pwd; cat in.txt; ls /tests; ls {here}; echo $OPENAI_API_KEY',
    'python3 -c "import socket; socket.socket()" || cp in.txt out.txt',
    END,
  ]
  with _serve(commands) as (url, asked):
    reward = asyncio.run(mini_swe_agent.make_run(MINI, seconds=60.0)(task, url))
  assert reward == {'solved': 1.0}
  assert len(asked) == 3 and directory_tasks.FILES['instruction.md'].strip() in str(
    asked[0]['messages'][1]['content']
  )
  first, second = (body['messages'][-1]['content'] for body in asked[1:])
  assert '/app' in first and '42' in first and 'cannot access' in first
  assert 'test_directories.py' not in first and 'none' not in first
  assert 'PermissionError' in second or 'Operation not permitted' in second


def test_an_agent_that_does_nothing_has_no_reward(task):
  with _serve([END]) as (url, _):
    assert asyncio.run(mini_swe_agent.make_run(MINI)(task, url)) == {'solved': 0.0}


def test_a_program_that_fails_is_an_error(task):
  with pytest.raises(RuntimeError, match='the program ended with status 1'):
    asyncio.run(mini_swe_agent.make_run(MINI)(task, 'http://127.0.0.1:9/v1'))


def test_an_untrained_policy_plays_and_is_trained(task, tmp_path):
  """Its nonsense ends mini-swe-agent, and is an episode like any other."""
  model = tiny.save(tmp_path / 'model', runs.likely())
  run = mini_swe_agent.make_run(MINI, mini_swe_agent.SHORT, seconds=60.0)
  config = tiny.run_config(
    model=model,
    steps=1,
    tasks=1,
    samples=2,
    max_turns=2,
    max_turn_tokens=8,
    rows=2,
    slots=1024,
  )
  train.run(
    config,
    str(tmp_path / 'run'),
    tasks=[task],
    make_env=lambda: program.Program(run),
    algorithm=algorithms.grpo(),
    watcher=report.Watcher(),
  )
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  (step,) = [json.loads(line) for line in lines if 'rollout/reward' in line]
  assert step['rollout/status/error'] == 0 and step['rollout/turns'] == 2
