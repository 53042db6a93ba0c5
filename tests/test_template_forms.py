import json
import re

import numpy as np
import pytest
import templates
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.grammars import byte_grammars, compiler
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import rollout
from agent_r1_jax.serve import requests
from agent_r1_jax.web import http

FAMILIES = [*templates.TEMPLATES, 'qwen2.5', 'qwen3']
USER = {'role': 'user', 'content': 'Who?'}


@tool_lib.tool
def look(place: str) -> str:
  """Looks.

  Args:
    place: Where.
  """
  return f'nonce of {place}'


SCHEMA = {
  'name': 'search',
  'description': 'Finds.',
  'parameters': {'type': 'object', 'properties': {'query': {'type': 'string'}}},
}
TOOLS = [{'type': 'function', 'function': SCHEMA}]


@pytest.fixture(scope='session')
def chats(tmp_path_factory, data_dir):
  """The chat of each family; a tokenizer is made when it is first asked for."""
  made = {}

  def get(name: str) -> chat_lib.Chat:
    if name not in made:
      if name in templates.TEMPLATES:
        tokenizer = templates.load(name, tmp_path_factory.mktemp(name))
      else:
        tokenizer = tokenizer_lib.load(data_dir / 'models' / name)
      made[name] = chat_lib.Chat(tokenizer)
    return made[name]

  return get


@pytest.fixture(scope='module', params=FAMILIES)
def name(request):
  """The tests of a family run one after another, while its template has a process."""
  return request.param


def text_of(chat, ids):
  return chat.decode_exactly(ids)


def write_call(chat, *queries):
  made = [calls.ToolCall('search', {'query': q}) for q in queries]
  return '\n'.join(map(chat.format.render, made))


def play(chat):
  """Four turns: a call, two calls, a failed call after a thought, and the answer."""
  answer = lambda text: {'role': 'tool', 'name': 'search', 'content': text}
  return [
    ('So: ' + write_call(chat, 'one'), [answer('nonce1 <|im_end|>')]),
    (write_call(chat, 'two', 'three'), [answer('nonce2'), answer('nonce3')]),
    (
      f'<think>\nHm.\n</think>\n{chat.format.openings[0]}oh',
      [{'role': 'tool', 'content': 'Error: nonce4'}],
    ),
    ('It is he.', [{'role': 'user', 'content': 'And nonce5?'}]),
  ]


def test_what_tools_answer_is_in_the_next_prompt(name, chats):
  chat = chats(name)
  messages = [USER]
  prompt = text_of(chat, chat.encode_prompt(messages, TOOLS))
  assert 'search' in prompt and 'Finds.' in prompt
  nonces = iter(['1', '2 3', '4', '5'])
  for reply, said in play(chat):
    delta = chat.encode_delta(said, history=messages, tools=TOOLS)
    messages += [{'role': 'assistant', 'content': reply}, *said]
    whole = text_of(chat, chat.encode_prompt(messages, TOOLS))
    for number in next(nonces).split():
      assert f'nonce{number}' in text_of(chat, delta)
      assert f'nonce{number}' in whole
    # What the template writes for the reply to come, and nothing of the conversation.
    assert whole.endswith(text_of(chat, delta)[-12:])
    assert 'Who?' not in text_of(chat, delta)
  for number in range(1, 6):
    assert f'nonce{number}' in whole
  # The names of control tokens in answers stay data.
  ids = [i for n, i in chat.tokenizer.added_tokens_encoder.items() if n == '<|im_end|>']
  attacked = chat.encode_delta(play(chat)[0][1], history=[USER])
  harmless = chat.encode_delta([{'role': 'tool', 'content': 'x'}], history=[USER])
  assert np.isin(attacked, ids).sum() == np.isin(harmless, ids).sum()


def make_call(name, arguments, id_):
  return {
    'id': id_,
    'type': 'function',
    'function': {'name': name, 'arguments': arguments},
  }


THOUGHTS = {'reasoning_content': 'I think.'}


def openai_messages():
  """As an OpenAI client has them: ids of its own, JSON in strings."""
  call = lambda i, q: make_call('search', json.dumps({'query': q}), f'call_{i}')
  answer = lambda i, text: {'role': 'tool', 'tool_call_id': f'call_{i}', 'content': text}
  turn = lambda calls, content=None: {
    'role': 'assistant',
    'content': content,
    'tool_calls': calls,
  }
  return [
    {'role': 'user', 'content': 'Who?'},
    turn([call(0, 'asked1')], 'So:'),
    answer(0, 'nonce1'),
    turn([call(1, 'asked2'), call(2, 'asked3')]) | THOUGHTS,
    answer(2, 'nonce3'),
    answer(1, 'nonce2'),
    turn([make_call('search', '{"query', 'call_3')]),
    answer(3, 'Error: nonce4'),
    {'role': 'assistant', 'content': 'It is he.'},
    {'role': 'user', 'content': 'And nonce5?'},
  ]


def test_calls_and_answers_of_clients_are_in_the_prompt(name, chats):
  asked = {'messages': openai_messages(), 'tools': TOOLS}
  request = http.check_fields(requests.ChatRequest, asked)
  thoughts = [m.get('reasoning_content') for m in request.messages]
  assert thoughts.count('I think.') == 1
  check_prompt(chats(name), request)


def check_prompt(chat, request):
  """All calls and answers of `openai_messages` are there, in their order."""
  messages = requests.to_chat(request.messages, chat.format)
  text = text_of(chat, chat.encode_prompt(messages, request.tools))
  found = [text.find(f'asked{i}') for i in (1, 2, 3)]
  assert -1 not in found and found == sorted(found)
  assert all(f'nonce{i}' in text for i in range(1, 6))


def test_calls_and_thoughts_of_a_message_are_written(name, chats):
  chat, messages = chats(name), openai_messages()[:4]
  messages[1] |= THOUGHTS
  text = text_of(chat, chat.encode_prompt([*messages[:3], USER][:3]))
  assert 'asked1' in text and 'nonce1' in text and 'So:' in text
  for message in (messages[1], messages[3]):
    reply = chat.encode_reply(message)
    assert reply[-1] in chat.stop_ids
    written = chat.decode(reply)
    assert 'I think.' in written and chat.format.parse(written) == [
      calls.ToolCall('search', json.loads(call['function']['arguments']))
      for call in message['tool_calls']
    ]


def test_the_form_of_each_family(name, chats):
  chat = chats(name)
  own = name in ('phi4', 'phi3', 'olmo2', 'gemma2', 'gemma3')
  role = None if own else 'environment' if name == 'olmo3' else 'tool'
  assert chat.answer_role == role
  said = [{'role': 'tool', 'content': 'a'}, {'role': 'tool', 'content': 'b'}]
  text = text_of(chat, chat.encode_delta(said, history=[USER]))
  form = '<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>'
  assert not own or form in text
  named = {'mistral-v0.3': 'mistral', 'nemo': 'mistral', 'llama3.2': 'llama3'}
  named |= {'gpt-oss': 'harmony', 'qwen3.5': 'qwen3_coder', 'gemma4': 'gemma4'}
  assert chat.format is call_formats.FORMATS[named.get(name, 'hermes')]


def test_a_call_and_its_answer_are_one_turn_of_gemma_4(chats):
  """Whether the reply ended with its turn or with the token that begins an answer."""
  chat = chats('gemma4')
  ids, said = chat.tokenizer.get_added_vocab(), [{'role': 'tool', 'content': 'a "x"'}]
  options = {'history': [USER], 'tools': TOOLS}
  delta = lambda messages, token: text_of(
    chat, chat.encode_delta(messages, ids[token], **options)
  )
  answer = 'response:tool{value:<|"|>a "x"<|"|>}<tool_response|>'
  assert delta(said, '<|tool_response>') == answer
  assert delta(said, '<turn|>') == f'<|tool_response>{answer}'
  begin = '<|turn>model\n<|channel>thought\n<channel|>'
  assert delta([USER], '<turn|>') == f'\n<|turn>user\nWho?<turn|>\n{begin}'
  assert {ids['<turn|>'], ids['<|tool_response>']} <= {*chat.stop_ids}


def write_turns(chat, messages):
  """What a rollout would have encoded, had the policy sampled the replies."""
  return text_of(chat, np.concatenate([x for x, _ in chat.encode_turns(messages, TOOLS)]))


@pytest.mark.parametrize('said', ['He.', '<think>\nHm.\n</think>\n\nHe.'])
def test_turns_of_qwen_3_5_are_as_the_template_writes_them(said, chats):
  """Replies without a thought too, which end the one that the prompt has opened."""
  chat, messages = chats('qwen3.5'), openai_messages()[:6]
  messages = [*messages, {'role': 'assistant', 'content': said}]
  given = [messages_lib.check(message) for message in messages]
  given = [m | {'content': m['content'] or ''} for m in given]
  whole = tokenizer_lib.render(
    chat.tokenizer, given, TOOLS, {'add_generation_prompt': False}
  )
  assert write_turns(chat, messages) == whole.removesuffix('\n')


def test_a_supervised_call_of_gemma_4_ends_where_its_answer_begins(chats):
  chat, messages = chats('gemma4'), openai_messages()
  messages[6:] = [{'role': 'assistant', 'content': 'It is he.'}]
  text = write_turns(chat, messages)
  assert '}<tool_call|><|tool_response>response:' in text
  thought = '<|channel>thought\nI think.\n<channel|><|tool_call>call:search{'
  assert thought in text and '<think>' not in text
  assert text.count('<turn|>') == 3  # Of the system, the user and the model.


def test_structured_calls_are_as_the_template_writes_them(name, chats):
  if name not in ('mistral-v0.3', 'nemo', 'llama3.2', 'qwen2.5'):
    return
  chat, messages = chats(name), openai_messages()
  del messages[3]['reasoning_content']  # Those of three do not write it.
  if name == 'llama3.2':
    messages = [messages[0], messages[1] | {'content': ''}, messages[2]]
  else:
    messages = [messages[0], messages[3], messages[5], messages[4]]
  given = json.loads(json.dumps(messages))
  for i, message in enumerate(given):
    for k, call in enumerate(message.get('tool_calls', ())):
      call['id'] = f'call{k:05}'
      call['function']['arguments'] = json.loads(call['function']['arguments'])
    message['content'] = message['content'] or ''
    if message['role'] == 'tool':
      message['tool_call_id'] = f'call{i - 2:05}'
  theirs = tokenizer_lib.render(
    chat.tokenizer, given, TOOLS, {'add_generation_prompt': True}
  )
  assert text_of(chat, chat.encode_prompt(messages, TOOLS)) == theirs


@pytest.mark.parametrize('where', ['prompt', 'delta'])
def test_what_a_template_derives_from_the_system_message_holds(where, chats):
  chat = chats('smollm3')
  for system, empty in (('Be short. /no_think', True), ('Be short.', False)):
    opening = [{'role': 'system', 'content': system}, USER]
    for said in ([{'role': 'tool', 'content': 'x'}], [USER]):
      if where == 'prompt':
        ids = chat.encode_prompt(opening)
      else:
        history = [*opening, {'role': 'assistant', 'content': 'a'}, *said]
        ids = chat.encode_delta(said, history=history)
      assert text_of(chat, ids).endswith('<think>\n\n</think>\n') is empty


@pytest.mark.parametrize(
  ('model', 'said'), [('llama3.2', '03 Feb 2001'), ('smollm3', '03 February 2001')]
)
def test_the_date_is_that_of_the_run(model, said, chats):
  tokenizer = chats(model).tokenizer
  chat = chat_lib.Chat(tokenizer, date='2001-02-03')
  assert f'Today Date: {said}\n' in text_of(chat, chat.encode_prompt([USER]))
  with pytest.raises(ValueError, match="chat.date is 'today'; give a day"):
    config_lib.Chat(date='today').check()


def test_a_turn_is_rendered_with_few_others(chats, monkeypatch):
  """Not with all of them, which would take quadratic time."""
  chat, counts, render = chats('gemma3'), [], tokenizer_lib.render
  spy = lambda x, messages, *more: (
    counts.append(len(messages)),
    render(x, messages, *more),
  )
  monkeypatch.setattr(tokenizer_lib, 'render', lambda *args: spy(*args)[1])
  messages = [USER, {'role': 'assistant', 'content': 'x'}] * 60
  assert len(chat.encode_turns(messages)) == len(messages)
  assert max(counts) < 40


def test_tools_stand_where_the_template_moves_them(chats):
  chat = chats('mistral-v0.3')
  said, reply = [{'role': 'user', 'content': 'Again?'}], {'role': 'assistant'}
  history = [{'role': 'system', 'content': 'Be short.'}, USER]
  delta = text_of(chat, chat.encode_delta(said, history=history, tools=TOOLS))
  whole = chat.encode_prompt([*history, reply | {'content': 'he'}, *said], TOOLS)
  assert delta.startswith('[AVAILABLE_TOOLS] [{') and 'Be short.\n\nAgain?' in delta
  assert text_of(chat, whole).endswith(delta)


def test_sft_trains_on_calls_and_thoughts_in_openais_form(name, chats):
  chat, messages = chats(name), openai_messages()
  del messages[6:8]  # The malformed call.
  messages[1] |= THOUGHTS
  messages[1]['content'] = [{'type': 'text', 'text': 'So:'}]
  del messages[3]['content']
  s = sft.segment(chat, sft.Conversation(messages[:-1], TOOLS))
  edges = np.flatnonzero(np.diff(np.concatenate([[0], s.action_mask, [0]])))
  replies = [chat.decode(s.tokens[a:b]) for a, b in edges.reshape(-1, 2)]
  made = [calls.ToolCall('search', {'query': f'asked{i}'}) for i in (1, 2, 3)]
  found = [chat.format.parse(reply) for reply in replies]
  assert found == [made[:1], made[1:], []]
  assert 'I think.' in replies[0] and 'So:' in replies[0]
  closed = '\n</think>\n\n' if name == 'qwen3.5' else ''
  assert replies[2] == closed + chat.format.frame('It is he.')
  assert 'nonce2' in text_of(chat, s.tokens)


@pytest.mark.parametrize('model', ['qwen2.5', 'qwen3'])
def test_a_reply_in_openais_form_is_as_the_template_writes_it(model, chats):
  chat, message = chats(model), openai_messages()[3]
  message |= {'reasoning_content': 'I think.' if model == 'qwen3' else ''}
  given = json.loads(json.dumps(message)) | {'content': ''}
  for call in given['tool_calls']:
    call['function']['arguments'] = json.loads(call['function']['arguments'])
  ids = [*chat.encode_prompt([USER]), *chat.encode_reply(message)]
  whole = tokenizer_lib.render(
    chat.tokenizer, [USER, given], (), {'add_generation_prompt': False}
  )
  assert text_of(chat, ids) == whole.removesuffix('\n')


@pytest.mark.parametrize(
  ('message', 'said'),
  [
    ({}, 'has no content'),
    ({'content': None}, 'has no content'),
    ({'content': 3, 'tool_calls': [make_call('search', '{}', 'a')]}, 'a content of'),
    ({'tool_calls': [make_call('search', '{"query', 'a')]}, 'is no call of a tool'),
    ({'tool_calls': [make_call('search', '[1]', 'a')]}, 'is no call of a tool'),
    ({'tool_calls': ['search']}, 'is no call of a tool'),
    ({'tool_calls': 3}, 'is no call of a tool'),
    ({'tool_calls': [make_call(3, '{}', 'a')]}, 'its name is no text'),
    ({'tool_calls': [make_call('search', '{"n": NaN}', 'a')]}, 'not finite'),
    ({'content': [{'type': 'audio'}]}, 'is no part of a message'),
  ],
)
def test_replies_that_say_nothing_are_refused(message, said, chats):
  with pytest.raises(ValueError, match=said):
    chats('qwen2.5').encode_reply({'role': 'assistant', **message})


@pytest.mark.parametrize('model', ['gemma2', 'mistral-v0.3', 'phi4', 'gpt-oss', 'gemma4'])
def test_an_episode_trains_on_what_its_tool_answered(model, chats):
  """From the logits to the segment; the grammar stands for a policy that has learnt."""
  chat = chats(model)
  chat = chat_lib.Chat(chat.tokenizer, tools_in_prompt='own')
  call = chat.format.render(calls.ToolCall('look', {'place': 'X'}))
  said = re.escape(call).replace('X', '[ab]')
  grammar = compiler.compile_and_wait(
    byte_grammars.regex,
    [said],
    chat.stop_ids,
    tokenizer_lib.token_bytes(chat.tokenizer),
    tiny.VOCAB,
  )
  played = tiny.within(
    rollout.collect,
    tiny.engine(tiny.params(tiny.config()), slots=512, bucket=512),
    chat,
    [types.Task('t', [USER])],
    lambda: env_lib.ToolEnv([look], lambda *_: 1.0),
    samples=2,
    limits=config_lib.Limits(max_turns=3, max_turn_tokens=120),
    decoding=decoding_lib.Decoding(grammar=grammar),
  )
  for t in played:
    assert t.status == 'max_turns' and t.metrics['tool_calls'] == 3, t.error
    text = chat.decode_exactly(t.segments[0].tokens.tolist())
    assert text.count('nonce of') == 2
