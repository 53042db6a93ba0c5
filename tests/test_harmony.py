"""The format of gpt-oss: channels, calls, and what its template is given."""

import time

import pytest
import templates

from agent_r1_jax.agent import call_formats, calls, harmony
from agent_r1_jax.agent import chat as chat_lib

USER = {'role': 'user', 'content': 'Who?'}
CALL = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": "x"}'
THOUGHT = '<|channel|>analysis<|message|>I <answer>think</answer>.<|end|>'
NEXT = '<|start|>assistant'


@pytest.fixture(scope='module')
def chat(tmp_path_factory):
  tokenizer = templates.load('gpt-oss', tmp_path_factory.mktemp('gpt-oss'))
  return chat_lib.Chat(tokenizer, date='2001-02-03')


def test_long_texts_take_linear_time():
  start = time.process_time()
  for text in ('x' * 10**6, '<|channel|>' * 10**5, 'to=' * 10**5 + CALL, CALL * 10**4):
    harmony.parse(text)
  assert time.process_time() - start < 20


def test_thoughts_are_removed():
  final = '<|channel|>final<|message|>He.'
  assert calls.remove_thoughts(THOUGHT + NEXT + final) == final
  # What is cut in a thought has no answer.
  assert calls.remove_thoughts(THOUGHT.removesuffix('<|end|>')) == ''


def test_the_chat_is_detected_and_stops_at_calls_and_returns(chat):
  assert chat.format is call_formats.HARMONY and chat.supports_tools
  names = chat.tokenizer.convert_ids_to_tokens(chat.stop_ids)
  assert names == ['<|return|>', '<|call|>']


@pytest.mark.parametrize('last', ['<|call|>', '<|return|>', None])
def test_what_follows_a_reply(chat, last):
  """A call is answered, and a new question asked; a reply that was cut is closed."""
  ids = chat.tokenizer.added_tokens_encoder
  last_id = ids[last] if last else ids['<|message|>']
  answer = {'role': 'tool', 'name': 'find', 'content': 'It "is" <|end|> he.'}
  said = [answer] if last == '<|call|>' else [USER]
  delta = chat.encode_delta(said, last_id, history=[USER])
  text = chat.decode_exactly(delta.tolist())
  who = (
    '<|start|>functions.find to=assistant<|channel|>commentary<|message|>'
    '"It \\"is\\" <|end|> he."<|end|>'
    if last == '<|call|>'
    else '<|start|>user<|message|>Who?<|end|>'
  )
  assert text == ('' if last else '<|end|>') + who + NEXT
  # What the tool said is data.
  assert (delta == ids['<|end|>']).sum() == (1 if last else 2)


def test_replies_are_framed(chat):
  reply = lambda text: chat.decode_exactly(chat.encode_reply(text).tolist())
  assert reply('He.') == '<|channel|>final<|message|>He.<|return|>'
  sampled = THOUGHT + NEXT + '<|channel|>final<|message|>He.'
  assert reply(sampled) == sampled + '<|return|>'
  function = {'name': 'find', 'arguments': {'q': 'x'}}
  message = {'role': 'assistant', 'tool_calls': [{'function': function}]}
  assert reply(message | {'reasoning_content': 'Hm.'}) == (
    '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.find'
    '<|channel|>commentary json<|message|>{"q": "x"}<|call|>'
  )


def test_the_template_gets_thoughts_and_calls_apart():
  """What was sampled; and answers behind their calls, whatever their order."""
  make = lambda name, id_: {'id': id_, 'function': {'name': name, 'arguments': {}}}
  answer = lambda text, **fields: {'role': 'tool', 'content': text, **fields}
  both = {
    'role': 'assistant',
    'content': 'So:',
    'tool_calls': [make('a', 1), make('b', 2)],
  }
  written = harmony.write(
    [
      USER,
      {'role': 'assistant', 'content': THOUGHT + NEXT + CALL},
      answer('one', name='find'),
      both,
      answer('of b', tool_call_id=2),
      answer('of a', tool_call_id=1),
      {'role': 'assistant', 'content': 'cut'},
      answer('who?'),
    ]
  )
  assert [m['role'] for m in written[1:]] == ['assistant', 'tool'] * 4
  calls_ = [m['tool_calls'][0]['function'] for m in written[1::2]]
  assert [f['name'] for f in calls_] == ['find', 'a', 'b', 'tool']
  assert calls_[0]['arguments'] == {'q': 'x'} and calls_[3]['arguments'] == {
    'said': 'cut'
  }
  assert [m['content'] for m in written[2::2]] == ['one', 'of a', 'of b', 'who?']
  assert written[1]['thinking'] == 'I <answer>think</answer>.'
  assert written[3]['thinking'] == 'So:' and not any(m['content'] for m in written[1::2])
