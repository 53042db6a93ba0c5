"""Harbor reads episodes that a program played, as ATIF: `make test-with-atif`."""

import json
import subprocess

import numpy as np
import openai
import pytest
import serving
from test_convert_episodes import contexts, document, read_back
from test_episodes import ROOT, failed, trajectory, write
import with_package

from agent_r1_jax import sft, types
from agent_r1_jax.agent import calls
from agent_r1_jax.contrib.logs import atif
from agent_r1_jax.rl import table
from agent_r1_jax.serve import program

pytestmark = pytest.mark.skipif(
  not with_package.has('harbor'),
  reason='`make test-with-atif` installs harbor, for Python 3.12',
)
USER = {'role': 'user', 'content': 'Who is it?'}

# Harbor's own validator, and what its exporter makes of a document for supervised
# fine-tuning.
READER = """
import json, pathlib, sys
from harbor.utils import traces_utils, trajectory_validator
names = ('agent_name', 'model_name', 'model_provider', 'start_time', 'run_id')
for path in map(pathlib.Path, sys.argv[1:]):
  validator = trajectory_validator.TrajectoryValidator()
  validator.validate(path)
  given = dict.fromkeys(names, 'x')
  made = traces_utils.extract_conversations_from_trajectory(path, given)
  print(json.dumps([validator.get_errors(), [row['conversations'] for row in made]]))
"""


def read(*paths):
  done = subprocess.run(
    [with_package.PYTHON, '-c', READER, *paths],
    capture_output=True,
    cwd=ROOT,
    timeout=300,
    check=True,
  )
  return [json.loads(line) for line in done.stdout.splitlines()]


async def delegate(task, url):
  """Asks, lets a sub-agent answer, goes on, and goes back and on in another way."""
  async with openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0) as client:

    async def ask(messages):
      answer = await client.chat.completions.create(
        model='policy', messages=messages, max_tokens=12
      )
      return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]

    first = await ask(task.messages)
    helped = await ask([{'role': 'system', 'content': 'You are a helper.'}, USER])
    await ask([*first, {'role': 'user', 'content': helped[-1]['content']}])
    await ask([*first, {'role': 'user', 'content': 'Are you sure?'}])


def test_harbor_reads_an_episode_with_the_tokens_of_each_context(tmp_path):
  make_env = lambda: program.Program(delegate, lambda task, messages: 1.0)
  (played,) = serving.collect(make_env, serving.tasks()[:1])
  assert played.error is None and len(played.segments) == 3
  root = document(tmp_path, played)
  ((errors, rows),) = read(next(tmp_path.glob('*.json')))
  assert errors == [] and rows[-1][-1]['role'] == 'assistant'
  parts = [*root['subagent_trajectories'], root]
  chat = serving.policy()[2]
  for part, segment in zip(parts, played.segments, strict=True):
    ids, mask, logprobs = read_back(part)
    np.testing.assert_array_equal(ids, segment.tokens)
    np.testing.assert_array_equal(mask, segment.action_mask)
    np.testing.assert_allclose(logprobs, segment.behaviour_logprobs, atol=1e-4)
    for step in part['steps']:
      if 'metrics' in step:
        sampled = chat.decode(step['metrics']['completion_token_ids'])
        assert sampled == step.get('extra', {}).get('text', step['message'])
  # And back: a conversation for each context, which fine-tuning learns the replies of.
  render = lambda name, arguments: chat.format.render(calls.ToolCall(name, arguments))
  pairs = atif.read_conversations(next(tmp_path.glob('*.json')), render)
  learned = [sft.segment(chat, sft.Conversation(*pair)) for pair in pairs]
  assert len(learned) == 3 and all(segment.action_mask.any() for segment in learned)


def test_harbor_reads_every_kind_of_episode(tmp_path):
  statuses = [trajectory(0, s, status) for s, status in enumerate([*types.Status][:3])]
  odd = [
    {'role': 'tool', 'content': 'out of the blue'},
    {'role': 'assistant', 'content': 'half a \ud800 pair \x00\x9b'},
    {'role': 'tool', 'content': 'no call'},
    {'role': 'developer', 'content': 'x'},
  ]
  played = [*statuses, failed(), trajectory(7, messages=odd, turns=[]), contexts(2)]
  played[-1].group = 8
  columns = [table.build([t]).list_tokens() for t in statuses]
  lines = write(tmp_path / 'log', played, columns=columns)
  paths = [atif.write_episode(line, tmp_path, run='run', model='base') for line in lines]
  (_, rows), *rest = read(*paths)
  assert [errors for errors, _ in read(*paths)] == [[]] * len(played)
  call = '<tool_call>\n{"name": "search", "arguments": {"query": "Arden Bridge"}}'
  assert rows[0][-1] == {'role': 'assistant', 'content': f'{call}\n</tool_call>'}
  assert len(rest) == len(played) - 1
