"""What requests in each dialect become: grammars, prompts of all families, pictures."""

import json

import httpx2
import pytest
import test_picture_runs
import test_pictures
import test_request_grammars
import test_template_forms
import tiny

from agent_r1_jax.contrib import dialects as dialects_lib
from agent_r1_jax.contrib.dialects import messages, responses
from agent_r1_jax.serve import request_grammars
from agent_r1_jax.web import http

chats, name, model = (
  test_template_forms.chats,
  test_template_forms.name,
  test_picture_runs.model,
)


@pytest.mark.parametrize('dialect', ['messages', 'responses'])
@pytest.mark.parametrize('in_tool', [True, False])
async def test_what_no_grammar_says_is_refused_by_its_keyword(dialect, in_tool):
  """For schemas of replies and of tools that must be called."""
  value = test_request_grammars.UNSUPPORTED
  function, said = {'name': 'f', 'parameters': value}, {'role': 'user', 'content': 'x'}
  schema = {'type': 'json_schema', 'name': 'x', 'schema': value}
  bodies: dict[str, list[dict]] = {
    'messages': [
      {'output_config': {'format': schema}},
      {'tools': [{'name': 'f', 'input_schema': value}], 'tool_choice': {'type': 'any'}},
    ],
    'responses': [
      {'text': {'format': schema}},
      {'tools': [function | {'type': 'function'}], 'tool_choice': 'required'},
    ],
  }
  dialects = {'messages': messages.MESSAGES, 'responses': responses.RESPONSES}
  body = {'messages': [said], 'input': [said], 'max_tokens': 9} | bodies[dialect][in_tool]
  asked = dialects[dialect].read(body, {})
  grammars = request_grammars.Grammars(tiny.chat(), tiny.VOCAB)
  with pytest.raises(http.RefusedError, match='no grammar.*multipleOf') as refused:
    await grammars.make(asked.request, restrict=True)
  assert refused.value.status == 400


def anthropic_fields():
  messages = []
  for m in test_template_forms.openai_messages():
    if m['role'] == 'tool':
      content = {'type': 'tool_result', 'tool_use_id': m['tool_call_id']}
      blocks = [content | {'content': m['content']}]
      if messages[-1]['role'] == 'user':
        messages[-1]['content'] += blocks
        continue
      messages.append({'role': 'user', 'content': blocks})
      continue
    blocks = [{'type': 'text', 'text': m['content']}] if m['content'] else []
    for call in m.get('tool_calls', ()):
      try:
        given = json.loads(call['function']['arguments'])
      except ValueError:
        given = {'malformed_arguments': call['function']['arguments']}
      blocks.append(
        {'type': 'tool_use', 'id': call['id'], 'name': 'search', 'input': given}
      )
    messages.append({'role': m['role'], 'content': blocks})
  tool = {
    'name': 'search',
    'description': 'Finds.',
    'input_schema': test_template_forms.SCHEMA['parameters'],
  }
  return {'max_tokens': 1, 'messages': messages, 'tools': [tool]}


def responses_fields():
  items = []
  for m in test_template_forms.openai_messages():
    if m['role'] == 'tool':
      output = {'call_id': m['tool_call_id'], 'output': m['content']}
      items.append({'type': 'function_call_output'} | output)
      continue
    if m['content']:
      items.append({'role': m['role'], 'content': m['content']})
    for call in m.get('tool_calls', ()):
      items.append({'type': 'function_call', 'call_id': call['id']} | call['function'])
  return {'input': items, 'tools': [{'type': 'function'} | test_template_forms.SCHEMA]}


REQUESTS = {
  'messages': lambda: messages.MESSAGES.read(anthropic_fields(), {}).request,
  'responses': lambda: responses.RESPONSES.read(responses_fields(), {}).request,
}


@pytest.mark.parametrize('dialect', REQUESTS)
def test_calls_and_answers_of_clients_are_in_the_prompt(name, dialect, chats):
  request = REQUESTS[dialect]()
  assert not any(m.get('reasoning_content') for m in request.messages)
  test_template_forms.check_prompt(chats(name), request)


@pytest.fixture(scope='module')
def served(model):
  with test_picture_runs.serve(model, dialects=dialects_lib.ALL) as url:
    yield url


def test_pictures_and_blocks_are_the_same_in_every_dialect(served):
  """Through the engine: with it each dialect has one reply, and without it another."""
  url = test_pictures.url(test_pictures.image())
  kind, data = url.removeprefix('data:').split(';base64,')
  source = {'type': 'base64', 'media_type': kind, 'data': data}
  parts = {
    'chat/completions': {'type': 'image_url', 'image_url': {'url': url}},
    'messages': {'type': 'image', 'source': source},
    'responses': {'type': 'input_image', 'image_url': url},
  }

  def ask(path, *shown):
    text = {'type': 'input_text' if path == 'responses' else 'text', 'text': 'What?'}
    said, brief = [{'role': 'user', 'content': [text, *shown]}], 'Be brief.'
    given = {
      'chat/completions': {'messages': [{'role': 'system', 'content': brief}, *said]},
      'messages': {'messages': said, 'system': [{'type': 'text', 'text': brief}]},
      'responses': {'input': said, 'instructions': brief, 'max_output_tokens': 8},
    }[path] | {'max_tokens': 8}
    asked = {'json': {'seed': 0, **given}, 'timeout': 120}  # The first one compiles.
    answer = httpx2.post(f'{served}/v1/{path}', **asked).json()
    usage = answer['usage']
    return usage.get('prompt_tokens') or usage['input_tokens'], _find_text(answer)

  seen = [ask(path, part) for path, part in parts.items()]
  assert len({*seen}) == 1 and seen[0][1]
  assert seen[0][0] == ask('messages')[0] + 8 and seen[0][1] != ask('messages')[1]


def _find_text(answer):
  """The text of a reply, in whatever dialect."""
  match answer:
    case {'choices': [{'message': {'content': text}}]}:
      return text
    case {'content': [{'text': text}]} | {'output': [{'content': [{'text': text}]}]}:
      return text
