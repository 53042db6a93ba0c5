"""Which sequence each request to a conversation goes on from."""

import asyncio
import threading
from unittest import mock

import numpy as np
import pytest
import serving

from agent_r1_jax import types
from agent_r1_jax.agent import transcript
from agent_r1_jax.engine import request
from agent_r1_jax.serve import conversation, replies, requests, sources
from agent_r1_jax.web import http

USER = {'role': 'user', 'content': 'Who is it?'}


TASK = types.Task('who', [USER])


class _Context:
  """Takes requests and samples nothing."""

  slots = serving.SLOTS
  make_key = staticmethod(lambda *parts: parts)

  def submit(self, prompt, parent, max_tokens, key, **fields):
    if not isinstance(parent, request.Sequence):
      prefix = parent.sequence.prompt[: parent.length] if parent else types.Prompt()
      sequence = request.Sequence(None, prefix + prompt)
    else:
      sequence = parent
      sequence.append(prompt)
    return mock.Mock(sequence=sequence, key=key, origin=parent, ids=prompt.tokens)


def _read(*messages, **fields):
  return http.check_fields(requests.ChatRequest, {'messages': [*messages], **fields})


def _submit(asked, request):
  """The one generation of a request to a conversation."""
  (generation,) = asyncio.run(asked.submit(request, []))
  return generation


def _accept(asked, generation, text):
  """Ends a reply with a text."""
  tokens = np.int32(serving.policy()[2].encode_reply(text))
  generation.sequence.append(tokens)
  generation.chunks = [request.Chunk(*[tokens] * 3, True, *[tokens] * 4)]
  asked.accept(generation, replies.Reply(text, [], 'stop'))


def _conversation(chat):
  record = transcript.Transcript()
  return conversation.EpisodeSource(chat, TASK, _Context(), record, 9, 9)


def test_a_request_that_is_made_again_has_its_own_randomness():
  """Of two equal prompts the first one's client goes; neither it nor a third shares."""

  asked = _conversation(serving.policy()[2])
  request = _read({'role': 'system', 'content': 'x'}, USER)
  first, second = (_submit(asked, request) for _ in range(2))
  asked.close(first)
  again, third = (_submit(asked, request) for _ in range(2))
  assert again.key == first.key
  assert len({again.key, second.key, third.key}) == 3


def test_a_sequence_goes_on_under_its_own_tools_only():
  """Its prompt describes them, and no others."""
  tool = lambda name: {'type': 'function', 'function': {'name': name}}
  chat = serving.policy()[2]
  later = [USER, {'role': 'assistant', 'content': 'Yes.'}, USER]
  read = lambda messages, *names: _read(*messages, tools=[tool(name) for name in names])
  asked = _conversation(chat)
  first = _submit(asked, read([USER], 'one'))
  _accept(asked, first, 'Yes.')
  for names in (['other'], ['one', 'other'], []):
    anew = _submit(asked, read(later, *names))
    prompt = chat.encode_prompt(later, [tool(name) for name in names])
    assert anew.origin is None and anew.ids.tolist() == prompt.tolist()
  assert _submit(asked, read(later, 'one')).origin is first.sequence


def test_a_sequence_that_nothing_goes_on_from_gives_its_row_up():
  """Else what a client breaks off takes the rows of its neighbours."""
  said = {'role': 'assistant', 'content': 'Yes.'}
  asked = _conversation(serving.policy()[2])
  dropped = _submit(asked, _read(USER))
  asked.close(dropped)
  assert dropped.sequence.closed
  first = _submit(asked, _read(USER))
  _accept(asked, first, 'Yes.')
  later = _read(USER, said, USER)
  # The sequence goes on, and then has tokens that its client never got: it is forked.
  second = _submit(asked, later)
  assert second.sequence is first.sequence
  asked.close(second)
  assert not first.sequence.closed
  assert _submit(asked, later).sequence is not first.sequence
  assert first.sequence.closed
  # A sequence from which another one goes on keeps its row.
  other = _submit(asked, _read(USER, said, {**USER, 'content': 'Or?'}))
  assert other.sequence is not other.origin.sequence and not other.origin.sequence.closed


def test_a_reply_that_ends_while_a_long_request_is_encoded(monkeypatch):
  """The request goes on from the end of the sequence, and later ones come after it."""
  chat, entered, gate = serving.policy()[2], threading.Event(), threading.Event()
  plain = chat._control._encode_plain

  def encode(text):
    if 'long' in text:
      entered.set()
      assert gate.wait(60)
    return plain(text)

  say = lambda text: {'role': 'user', 'content': text}
  said = lambda text: {'role': 'assistant', 'content': text}

  async def play():
    asked = _conversation(chat)
    (first,) = await asked.submit(_read(USER), [])
    _accept(asked, first, 'One.')
    second_request = [USER, said('One.'), say('And?')]
    (second,) = await asked.submit(_read(*second_request), [])
    loop = asyncio.get_running_loop()
    # Just now it goes on from the first reply, since the second is being sampled.
    third_request = [*second_request, said('Two.'), say('long ' * 20)]
    third = asyncio.ensure_future(asked.submit(_read(*third_request), []))
    assert await loop.run_in_executor(None, entered.wait, 60)
    fourth = asyncio.ensure_future(asked.submit(_read(USER), []))
    _accept(asked, second, 'Two.')
    await asyncio.sleep(0)
    assert not fourth.done()
    gate.set()
    (third,), (fourth,) = await third, await fourth
    assert third.origin is second.sequence and fourth.origin is None
    assert third.ids.tolist() == chat.encode_delta([say('long ' * 20)]).tolist()
    _accept(asked, third, 'Three.')
    segments, turns = asked._transcript.collect()
    assert len(turns) == 3 and asked.metrics['rewritten'] == 0
    assert len(segments) == 1
    # Of a request whose episode ends meanwhile nothing is sampled.
    entered.clear()
    gate.clear()
    late = asyncio.ensure_future(asked.submit(_read(say('a long one')), []))
    assert await loop.run_in_executor(None, entered.wait, 60)
    asked.end()
    gate.set()
    with pytest.raises(http.RefusedError, match='the episode is over'):
      await late

  monkeypatch.setattr(chat._control, '_encode_plain', encode)
  monkeypatch.setattr(sources, '_MAX_CHARACTERS', 0)
  asyncio.run(play())
