"""A simulated user."""

import json

import answers
import pytest

from agent_r1_jax import testing, types
from agent_r1_jax.agent import tool
from agent_r1_jax.host import workers
from agent_r1_jax.tasks import dialogue

TASK = types.Task(
  'room', [{'role': 'system', 'content': 'Book a room.'}], 'May', {'user': 'In May.'}
)


@tool.tool
def book(month: str) -> str:
  """Books.

  Args:
    month: When.
  """
  return f'Booked in {month}.'


CALL = '<tool_call>{"name": "book", "arguments": {"month": "May"}}</tool_call>'


def user(messages):
  """Is led by the last thing that was said."""
  assert messages[0]['role'] == 'system' and messages[0]['content'].endswith('In May.')
  assert {m['role'] for m in messages[1::2]} <= {'assistant'}
  said = [m['content'] for m in messages[2::2]]
  if not said:
    return 'A room, please.'
  assert not any('Booked' in text for text in said)
  return 'Thanks! [END] Bye.' if 'done' in said[-1] else 'In May. <|im_end|>'


async def later(messages):
  return user(messages)


def reward(task, messages, status):
  booked = any(f'Booked in {task.answer}' in m['content'] for m in messages)
  return {'booked': booked, 'thanked': messages[-1]['content'] == 'Thanks!'}


@pytest.mark.parametrize('plays', [user, later])
async def test_a_dialogue_with_a_tool(plays):
  make = lambda: dialogue.DialogueEnv([book], reward, plays)
  assert (await make().reset(TASK))[-1] == {'role': 'user', 'content': 'A room, please.'}
  steps = await testing.check_env(make, TASK, ['When?', CALL, 'It is done.'])
  assert steps[0].messages == [{'role': 'user', 'content': 'In May. <|im_end|>'}]
  assert steps[1].messages[0]['content'] == 'Booked in May.'
  assert [step.reward for step in steps] == [0.0, 0.0, 2.0]
  asked = types.Task('r', [{'role': 'user', 'content': 'A room.'}], info=TASK.info)
  env = dialogue.DialogueEnv([], lambda task, messages: 0.0, lambda messages: '[END]')
  assert await env.reset(asked) == asked.messages
  assert (await env.step('When?')).done


async def test_a_user_that_fails_is_an_error(refused, no_clock, gate):
  import late

  def hangs(messages):
    late.hang()
    gate.wait()

  for plays, error, message in (
    (hangs, workers.CallTimeoutError, r'user gave no .* 60 seconds \(user_seconds\)'),
    (lambda messages: None, ValueError, 'the user said None; it must be a text'),
  ):
    with pytest.raises(error, match=message):
      await dialogue.DialogueEnv([], reward, plays).reset(TASK)
  with refused('user_seconds'):
    dialogue.DialogueEnv([], reward, user, user_seconds=0)


async def test_an_endpoint_plays_the_user():
  def answer(handler, asked):
    assert handler.path == '/v1/chat/completions' and asked['temperature'] == 0.5
    text = user(asked['messages'])
    return 200, json.dumps({'choices': [{'message': {'content': text}}]}).encode()

  with answers.serve_posts(answer) as url:
    plays = dialogue.endpoint_user(f'{url}/v1', 'model', temperature=0.5)
    env = dialogue.DialogueEnv([], reward, plays)
    assert (await env.reset(TASK))[-1]['content'] == 'A room, please.'
    assert (await env.step('done')).reward == 1.0
