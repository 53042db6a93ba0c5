"""A judge over a real HTTP server: its score is checked, cached, counted and bounded."""

import asyncio
import contextlib
import dataclasses
import json
import pickle

import answers
import pytest

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.guided import judge as judge_lib
from agent_r1_jax.tasks import rewards

TASK = types.Task('t', [{'role': 'user', 'content': 'Who {wrote} it?'}], answer='Ann')
PROMPT = 'Q: {question} Gold: {answer} Said: {conversation} Write "Score: " and a number.'


def said(text='It was Ann.'):
  return [*TASK.messages, {'role': 'assistant', 'content': text}]


@contextlib.contextmanager
def server(text='Fine. Score: 0.75', status=200):
  """An OpenAI-compatible endpoint; yields its address and what it was asked."""
  asked = []

  def answer(handler, body):
    asked.append((handler.path, handler.headers['Authorization'], body))
    return status, json.dumps({'choices': [{'message': {'content': text}}]}).encode()

  with answers.serve_posts(answer) as url:
    yield f'{url}/v1', asked


async def test_an_endpoint_judges_once_each_conversation():
  with server() as (url, asked):
    judge = judge_lib.Judge(judge_lib.openai_endpoint(url, 'm', key='k'), PROMPT)
    env = env_lib.ToolEnv([], rewards.hybrid(judge=(2.0, judge)))
    for _ in range(2):
      await env.reset(TASK)
      step = await env.step('It was Ann.')
      assert (step.reward, step.metrics['reward/judge']) == (1.5, 1.5)
  ((path, key, body),) = asked
  assert (path, key, body['model']) == ('/v1/chat/completions', 'Bearer k', 'm')
  content = body['messages'][0]['content']
  assert 'Q: Who {wrote} it? Gold: Ann Said: assistant: It was Ann. Write' in content
  assert judge.counts == {'calls': 1, 'cached': 1}


async def test_a_picture_is_named_to_a_judge():
  asked = []

  async def ask(prompt):
    asked.append(prompt)
    return 'Score: 1'

  part = {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,AAAA'}}
  content = [{'type': 'text', 'text': 'What is it?'}, part]
  task = dataclasses.replace(TASK, messages=[{'role': 'user', 'content': content}])
  shown = {'role': 'tool', 'content': [part]}
  assert await judge_lib.Judge(ask, PROMPT)(task, [*task.messages, shown]) == 1
  assert 'What is it?\n[picture]' in asked[0] and 'tool: [picture]' in asked[0]
  assert 'AAAA' not in asked[0]


@pytest.mark.parametrize(
  ('text', 'status', 'message'),
  [
    ('I like it.', 200, "no 'Score: NUMBER'"),
    ('Score: 7', 200, 'not within 0.0 and 1.0'),
    ('Score: 1', 500, '500'),
  ],
)
async def test_what_is_no_score_is_a_failure(text, status, message):
  with server(text, status) as (url, _):
    ask = judge_lib.openai_endpoint(url, 'm')
    judge = judge_lib.Judge(ask, PROMPT)
    with pytest.raises(judge_lib.JudgeError, match=message):
      await judge(TASK, said())
    lenient = judge_lib.Judge(ask, PROMPT, fallback=0.5)
    assert await lenient(TASK, said()) == 0.5
  # Only scores are remembered.
  assert judge.counts == lenient.counts == {'calls': 1, 'failures': 1}


async def test_a_judge_that_hangs_is_not_waited_for():
  judge = judge_lib.Judge(lambda prompt: asyncio.Event().wait(), PROMPT, seconds=0.05)
  with pytest.raises(judge_lib.JudgeError, match='judge gave no answer'):
    await judge(TASK, said())
  assert judge.counts['failures'] == 1
  # It no longer counts as one of the calls at a time.
  assert judge._running == 0


async def test_the_budget_and_the_calls_at_a_time_are_bounded():
  inside, most, gate = 0, 0, asyncio.Event()

  async def ask(prompt):
    nonlocal inside, most
    inside += 1
    most = max(most, inside)
    await gate.wait()
    inside -= 1
    return 'Score: 1 ... **Score: 0**'

  judge = judge_lib.Judge(ask, PROMPT, budget=3, parallel=2, fallback=0.25)
  calls = [asyncio.ensure_future(judge(TASK, said(str(i)))) for i in range(5)]
  while inside < 2:
    await asyncio.sleep(0)
  gate.set()
  scores = await asyncio.gather(*calls)
  assert most == 2 and sorted(scores) == [0.0, 0.0, 0.0, 0.25, 0.25]
  assert judge.counts == {'calls': 3, 'refused': 2, 'failures': 2}


async def test_equal_conversations_at_the_same_time_are_asked_once():
  gate = asyncio.Event()

  async def ask(prompt):
    await gate.wait()
    return 'none' if 'Bob' in prompt else 'Score: 1'

  judge = judge_lib.Judge(ask, PROMPT, budget=2)
  calls = [asyncio.ensure_future(judge(TASK, said())) for _ in range(4)]
  calls += [asyncio.ensure_future(judge(TASK, said('Bob'))) for _ in range(2)]
  await asyncio.sleep(0)
  calls.pop(0).cancel()  # The one that asked; the others still wait.
  gate.set()
  scores = await asyncio.gather(*calls, return_exceptions=True)
  assert scores[:3] == [1.0] * 3 and not judge._calls
  assert all(isinstance(score, judge_lib.JudgeError) for score in scores[3:])
  assert judge.counts == {'calls': 2, 'cached': 4, 'failures': 1}


async def test_the_oldest_scores_are_forgotten():
  async def ask(prompt):
    return 'Score: 1'

  judge = judge_lib.Judge(ask, PROMPT, remember=2)
  for text in 'abcab':
    await judge(TASK, said(text))
  assert judge.counts['calls'] == 5 and len(judge._scores) == 2
  await judge(TASK, said('b'))
  assert judge.counts['cached'] == 1


async def test_what_is_remembered_is_short_however_long_a_conversation_is():
  async def ask(prompt):
    return 'Score: 1'

  judge = judge_lib.Judge(ask, PROMPT)
  for text in ('a' * 10**6, '\ud800', 'a' * 10**6):
    assert await judge(TASK, said(text)) == 1.0
  assert judge.counts == {'calls': 2, 'cached': 1}
  assert len(pickle.dumps(judge._scores)) < 200


def test_a_prompt_has_known_fields():
  with pytest.raises(
    ValueError, match='prompt: .*conversaton.*its fields are {question}'
  ):
    judge_lib.Judge(None, 'Judge {conversaton}')
