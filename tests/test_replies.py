"""Replies as clients get them: what a stream shows, what is a call, what bytes are."""

import functools
from unittest import mock

import numpy as np
import pytest
import serving

from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import request
from agent_r1_jax.serve import completions, replies, requests
from agent_r1_jax.web import http

_FUNCTION = {'name': 'search', 'parameters': {'type': 'object', 'properties': {}}}
TOOLS = [{'type': 'function', 'function': _FUNCTION}]
CALL = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'


@functools.cache
def _chat(tool_format=call_formats.HERMES):
  tokenizer = tokenizer_lib.load(serving.ROOT / 'experiments' / 'miniwiki' / 'model')
  return chat_lib.Chat(tokenizer, tool_format=tool_format)


def _chunk(tokens, stopped=False, top=1):
  columns = np.int32(tokens), np.float32([-1.5] * len(tokens))
  tops = np.repeat(columns[0][:, None], top, 1), np.repeat(columns[1][:, None], top, 1)
  return request.Chunk(
    columns[0], columns[1], columns[0], stopped, *tops, *[columns[1]] * 2
  )


def _stream(ids, stopped=True, chat=None, **fields):
  """What is shown after each token or chunk, and the reply with its last text."""
  body = {'messages': [{'role': 'user', 'content': 'x'}], **fields}
  chunks = [i if isinstance(i, list) else [i] for i in ids]
  generation = mock.Mock(chunks=[_chunk(chunk) for chunk in chunks[:-1]])
  generation.chunks.append(_chunk(chunks[-1], stopped))
  asked = http.check_fields(requests.ChatRequest, body)
  choice = replies.PartialReply(0, generation, asked, chat or _chat())
  shown = [choice.add(chunk) for chunk in generation.chunks]
  return shown, *choice.finish()


def _spell(text):
  """A token for each byte, so that a stop string is met in the middle."""
  pieces = tokenizer_lib.token_bytes(_chat().tokenizer)
  return [pieces.index(bytes([byte])) for byte in text.encode()]


@pytest.mark.parametrize(
  ('text', 'fields', 'shown'),
  [
    # What may be the beginning of a stop string is held back until it is none.
    ('a stone', {'stop': 'stop'}, ['a', ' ', '', '', '', 'ston', 'e']),
    ('a stop', {'stop': 'stop'}, ['a', ' ', '', '', '', '']),
    # The longest of several beginnings counts.
    ('xaab', {'stop': ['aac', 'ad']}, ['x', '', '', 'aab']),
    ('a <t', {'tools': TOOLS}, ['a', ' ', '', '']),
    ('a <t', {}, ['a', ' ', '<', 't']),
    # Half of a character is held back, too.
    ('é!', {}, ['', 'é', '!']),
  ],
)  # fmt: skip
def test_what_a_stream_holds_back(text, fields, shown):
  found, reply, rest = _stream(_spell(text), **fields)
  assert found == shown
  # In the end the client has the reply's text.
  assert ''.join(found) + rest == reply.text == text.removesuffix('stop')


@pytest.mark.parametrize('size', [1, 2, 5])
def test_a_stream_decodes_each_token_once_and_ends_with_the_whole_text(size, monkeypatch):
  ids = [*_spell('é漢😀'), *_chat().encode_text('So it is. ' * 50)] * 2
  decoded = []
  decode = tokenizer_lib.make_stream_decoder(_chat().tokenizer)
  counted = lambda ids: decoded.extend(ids) or decode(ids)
  monkeypatch.setattr(tokenizer_lib, 'make_stream_decoder', lambda tokenizer: counted)
  monkeypatch.setattr(_chat(), 'decode', mock.Mock(wraps=_chat().decode))
  chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
  found, reply, rest = _stream(chunks)
  assert ''.join(found) + rest == reply.text == _chat().decode_exactly(ids)
  # The end of the stream decodes the whole reply once, as it is trained.
  assert decoded == ids and _chat().decode.call_count == 1


def test_a_call_is_not_streamed_as_text():
  ids = _chat().encode_reply(f'So. {CALL}').tolist()
  shown, reply, rest = _stream(ids, tools=TOOLS)
  assert ''.join(shown) + rest == reply.text == 'So. '
  assert reply.calls == [('search', {})] and reply.reason == 'tool_calls'


def test_an_unfinished_reply_has_no_calls():
  """Not even one that is complete: what would have followed might have changed it."""
  ids = _chat().encode_reply(CALL).tolist()[:-1]
  _, reply, _ = _stream(ids, stopped=False, tools=TOOLS)
  assert (reply.calls, reply.reason, reply.text) == ([], 'length', CALL)
  # In another format a call needs no end, so that half of one reads as a call.
  chat = _chat(call_formats.QWEN3_CODER)
  half = '<tool_call>\n<function=search>\n<parameter=query>\nhalf of'
  assert chat.format.parse(half, TOOLS)
  ids = _chat().encode_reply(half).tolist()[:-1]
  _, reply, _ = _stream(ids, stopped=False, chat=chat, tools=TOOLS)
  assert (reply.calls, reply.reason, reply.text) == ([], 'length', half)


def test_the_bytes_of_tokens_are_their_own():
  """Those of tokens that are parts of a character, too."""
  chat = _chat()
  text = 'né 漢😀 <answer>'
  spelt = [*_spell('é'), *_spell('漢'), *_spell('😀')]
  written = replies.write_logprobs(_chunk(spelt, top=2), chat)
  assert [item['bytes'] for item in written] == [[byte] for byte in 'é漢😀'.encode()]
  for item in written:
    assert [top['bytes'] for top in item['top_logprobs']] == [item['bytes']] * 2
  ids = [*chat.encode_text(text), chat.stop_ids[0]]
  written = replies.write_logprobs(_chunk(ids), chat)
  assert bytes(byte for item in written for byte in item['bytes']) == (
    f'{text}<|im_end|>'.encode()
  )
  # The model may have more rows than the tokenizer has ids.
  (none,) = replies.write_logprobs(_chunk([len(chat.tokenizer) + 5]), chat)
  assert (none['token'], none['bytes']) == ('', [])


def test_tokens_of_a_text_completion_are_told_apart():
  """Its log-probs are named by their tokens, of which several are parts of characters."""
  chat = _chat()
  first, second = _spell('é')
  chunk = _chunk([first], top=2)._replace(top_tokens=np.int32([[first, second]]))
  choice = completions.TEXT.choice('', [], replies.write_logprobs(chunk, chat))
  assert choice['logprobs']['tokens'] == ['bytes:\\xc3']
  assert [*choice['logprobs']['top_logprobs'][0]] == ['bytes:\\xc3', 'bytes:\\xa9']
