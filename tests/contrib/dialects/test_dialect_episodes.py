"""Episodes of programs in every dialect are those of chat completions."""

import asyncio
import functools

import dialect_clients
import httpx2
import numpy as np
import openai
import pytest
import serving

from agent_r1_jax.contrib import dialects
from agent_r1_jax.contrib.dialects import kept_responses

_USER = dialect_clients.USER
_MANY = serving.replace(serving.LIMITS, max_turns=20)


_run_programs = functools.partial(serving.run_programs, dialects=dialects.ALL)


async def _play_script(agent, task):
  """Calls a tool, forks, changes the past, and begins texts of its own."""
  ask = functools.partial(agent.ask, tools=dialect_clients.TOOLS)
  items, forks = [*task.messages], []
  for _ in range(3):
    answer = await ask(items)
    items = [*items, *answer.items]
    forks.append(items)
    found = [
      (id_, await dialect_clients.SEARCH.fn(arguments.get('query', '')))
      for id_, _, arguments in answer.calls
      if isinstance(arguments, dict)
    ]
    if not found:
      break
    items = [*items, *agent.results(found)]
  for side in ('left', 'right'):
    await ask([*forks[0], {'role': 'user', 'content': side}])
  changed = {'role': 'assistant', 'content': 'No'}
  await ask([*task.messages, changed, _USER])
  system = {'role': 'system', 'content': 'Be brief.'}
  alone = [system, _USER]
  answer = await agent.ask(alone)
  await agent.ask([*alone, *answer.items, {'role': 'user', 'content': 'And then?'}])


@functools.cache
def _play(name, stream=False, remembers=False):
  """The trajectories of some tasks."""
  make = functools.partial(dialect_clients.ALL[name], stream=stream)
  make = functools.partial(make, remembers=True) if remembers else make

  async def run(task, url):
    agent = make(url)
    async with agent.client:
      await _play_script(agent, task)

  return _run_programs(run, serving.tasks()[2:3], limits=_MANY)


@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    ('messages', {}),
    ('messages', {'stream': True}),
    ('responses', {}),
    ('responses', {'remembers': True}),
  ],
)
def test_an_episode_is_that_of_chat_completions(name, fields):
  """To the last bit: the same tokens, masks and log-probs, forks and rewritten pasts."""
  expected, played = _play('chat'), _play(name, **fields)
  assert any(t.metrics['tool_calls'] for t in expected)
  for one, other in zip(played, expected, strict=True):
    assert one.error is None and other.error is None
    assert one.metrics == other.metrics and one.metrics['rewritten'] == 1
    assert one.metrics['forks'] >= 1 and len(one.segments) == one.metrics['forks'] + 3
    for s, t in zip(one.segments, other.segments, strict=True):
      for column in ('tokens', 'action_mask', 'behaviour_logprobs', 'policy_steps'):
        np.testing.assert_array_equal(getattr(s, column), getattr(t, column))
    assert one.turns == other.turns and one.messages == other.messages


def test_sub_agents_at_the_same_time():
  """In each dialect at once, beside each other in one episode."""

  async def run(task, url):
    async def play(name):
      agent = dialect_clients.ALL[name](url)
      async with agent.client:
        opening = [{'role': 'system', 'content': name}, _USER]
        answer = await agent.ask(opening)
        await agent.ask([*opening, *answer.items, _USER])

    await asyncio.gather(*map(play, dialect_clients.ALL))

  (one,) = _run_programs(run, serving.tasks()[:1], limits=_MANY)
  assert one.error is None and len(one.segments) == 3
  assert [turn.segment for turn in one.turns].count(0) == 2


def test_an_episode_keeps_its_own_responses(monkeypatch):
  monkeypatch.setattr(kept_responses, '_MOST_KEPT', 1)
  both, names = asyncio.Barrier(2), set()

  async def run(task, url):
    async with openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0) as client:
      create = functools.partial(client.responses.create, model='policy', input='a')
      own = (await create()).id
      names.add(own)
      await both.wait()
      (other,) = names - {own}
      with pytest.raises(openai.BadRequestError, match='there is no response'):
        await create(previous_response_id=other)
      assert await create(previous_response_id=own)

  played = _run_programs(run, serving.tasks()[:1], samples=2)
  assert [(t.error, len(t.turns)) for t in played] == [(None, 2)] * 2


def test_an_episode_has_replies_of_one_call_and_none_that_is_begun():
  """The turn is ended by the template, which is no action."""

  async def run(task, url):
    async with openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0) as client:
      create = functools.partial(client.chat.completions.create, model='policy')
      asked = {'tools': dialect_clients.TOOLS, 'parallel_tool_calls': False}
      reply = await create(messages=task.messages, **asked)
      message = reply.choices[0].message
      (call,) = message.tool_calls
      said = message.model_dump(exclude_none=True)
      found = {'role': 'tool', 'tool_call_id': call.id, 'content': 'Nothing.'}
      await create(messages=[*task.messages, said, found], **asked)
      begun = [*task.messages, {'role': 'assistant', 'content': 'It is'}]
      with pytest.raises(openai.BadRequestError, match='prefill'):
        await create(messages=begun, extra_body={'continue_final_message': True})

  chat = serving.policy()[2]
  (one,) = _run_programs(run, serving.tasks()[2:3])
  (segment,), (first, second) = one.segments, one.turns
  assert one.error is None and segment.tokens[first.stop] == chat.stop_ids[0]
  assert not segment.action_mask[first.stop : second.start].any()
  text = chat.decode_exactly(segment.tokens[first.start : first.stop])
  assert text.endswith('</tool_call>') and text.count('</tool_call>') == 1


def test_a_count_that_is_refused_does_not_end_the_episode():
  """An agent asks for it to see that its conversation has to become shorter."""

  async def run(task, url):
    async with (
      openai.AsyncOpenAI(base_url=url, api_key='none') as client,
      httpx2.AsyncClient(timeout=60) as http_client,
    ):
      for content, count in (('x' * 4_000_000, 1), ('x', 1000)):
        messages = [{**_USER, 'content': content}] * count
        answer = await http_client.post(
          f'{url}/responses/input_tokens', json={'input': messages}
        )
        assert answer.json()['error']['code'] == 'context_length_exceeded'
        answer = await http_client.post(
          f'{url}/messages/count_tokens', json={'messages': messages}
        )
        assert answer.status_code == 400
      tools = [serving.search_tool().schema]
      create = client.chat.completions.create
      await create(model='policy', messages=task.messages, tools=tools)

  (played,) = _run_programs(run, serving.tasks()[:1])
  assert (played.status, played.error, len(played.turns)) == ('done', None, 1)
