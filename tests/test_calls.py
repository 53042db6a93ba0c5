import json
import re

import pytest

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.agent.calls import CallError, ToolCall
from agent_r1_jax.tasks import games, mathematics, programming, qa


def call(name='search', **arguments):
  return (
    f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'
  )


def test_no_call():
  for reply in ('', 'Paris.', '</tool_call>', '<answer>tool_call</answer>', '<tool_call'):
    assert call_formats.HERMES.parse(reply) == []


def test_one_call_in_any_spacing():
  payload = '{"name": "search", "arguments": {"query": "a"}}'
  expected = [ToolCall('search', {'query': 'a'})]
  for reply in (
    f'<tool_call>{payload}</tool_call>',
    f'I look. <tool_call>\n\n {payload} \n</tool_call> done',
    f'<tool_call>{payload}',
    f'<tool_call>{payload}\n',
  ):
    assert call_formats.HERMES.parse(reply) == expected


def test_parallel_calls_in_order():
  reply = call(query='a') + '\n' + call('calculator', expression='1') + call(query='b')
  assert [c.arguments for c in call_formats.HERMES.parse(reply)] == [
    {'query': 'a'},
    {'expression': '1'},
    {'query': 'b'},
  ]


@pytest.mark.parametrize(
  'text', ['</tool_call>', '<tool_call>', '<think>', '</think>', '"}}', '\\', '\n', '中']
)
def test_any_text_can_be_an_argument(text):
  reply = call(query=f'a{text}b') + call(query='c')
  assert call_formats.HERMES.parse(reply) == [
    ToolCall('search', {'query': f'a{text}b'}),
    ToolCall('search', {'query': 'c'}),
  ]


def test_arguments_may_be_nested_or_left_out():
  assert call_formats.HERMES.parse(call(x=[1, {'y': None}])) == [
    ToolCall('search', {'x': [1, {'y': None}]})
  ]
  assert call_formats.HERMES.parse('<tool_call>{"name": "now"}</tool_call>') == [
    ToolCall('now', {})
  ]


@pytest.mark.parametrize(
  'payload, reason',
  [
    ('', 'Expecting value'),
    ('search("a")', 'Expecting value'),
    ('{"name": "search", "arguments": {"query": "a"}', "Expecting ',' delimiter"),
    ('{"name": "search", "arguments": {"query": "a"}}}', 'expected </tool_call>'),
    ('{"name": "a", "arguments": {}} {"name": "b"}', 'expected </tool_call>'),
    ("{'name': 'search'}", 'property name'),
    ('[1]', 'expected a JSON object'),
    ('"search"', 'expected a JSON object'),
    ('{"arguments": {}}', '"name" must be'),
    ('{"name": "", "arguments": {}}', '"name" must be'),
    ('{"name": 3, "arguments": {}}', '"name" must be'),
    ('{"name": "search", "arguments": "Paris"}', '"arguments" must be'),
    ('{"name": "search", "arguments": null}', '"arguments" must be'),
    (
      '{"name": "search", "arguments": {}, "id": 3}',
      'unknown key "id"; a call has "name"',
    ),
    ('{"name": "a", "arguments": {}, "parameters": {}}', 'unknown key "parameters"'),
    ('{"type": "call", "name": "a", "arguments": {}}', 'unknown key "type"'),
    ('{"name": "a", "argument": {"x": 1}}', 'unknown key "argument"'),
    ('{"type": "function", "function": {"name": "a", "arguments": "{}"}}', '"name" must'),
    ('[' * 100_000, 'recursion'),
    ('{"name": "a", "arguments": {"x": ' + '9' * 10_000 + '}}', 'limit'),
  ],
)
def test_malformed_calls(payload, reason):
  reply = f'so <tool_call>{payload}</tool_call>' + call(query='b')
  error, after = call_formats.HERMES.parse(reply)
  assert isinstance(error, CallError)
  assert error.message.startswith('invalid tool call: ')
  assert reason in error.message
  assert error.text == payload
  assert after == ToolCall('search', {'query': 'b'})


def test_a_broken_call_does_not_swallow_the_next():
  error, good = call_formats.HERMES.parse('<tool_call>{"name": ' + call(query='a'))
  assert isinstance(error, CallError)
  assert error.text == '{"name": '
  assert good == ToolCall('search', {'query': 'a'})


@pytest.mark.parametrize(
  'reply, queries',
  [
    ('<think>' + call(query='a') + '</think>' + call(query='b'), ['b']),
    (
      call(query='a') + '<think>' + call(query='b') + '</think>' + call(query='c'),
      ['a', 'c'],
    ),
    # The prompt may have opened the block.
    ('Hm. ' + call(query='a') + '</think>' + call(query='b'), ['b']),
    # Never closed: generation stopped at the call.
    ('<think>Hm. ' + call(query='a'), ['a']),
    ('<think>' + call(query='a') + '</think>Paris', []),
    ('<think>I write <tool_call> and {</think>' + call(query='b'), ['b']),
    ('<think>x</think>' + call(query='a') + '<think>y</think>', ['a']),
  ],
)
def test_a_closed_thought_is_no_call(reply, queries):
  assert [c.arguments['query'] for c in call_formats.HERMES.parse(reply)] == queries


def test_parameters_and_a_type_are_understood():
  for body in (
    '{"name": "a", "parameters": {"x": 1}}',
    '{"type": "function", "name": "a", "arguments": {"x": 1}}',
  ):
    for call_format in (call_formats.HERMES, call_formats.LLAMA3):
      reply = call_format.openings[0] + body
      assert call_format.parse(reply) == [ToolCall('a', {'x': 1})], reply


_NO_JSON = ['NaN', '[-Infinity]', '{"a": 1e999}', r'"\ud800"', r'{"\udfff": 1}']


@pytest.mark.parametrize('value', _NO_JSON)
@pytest.mark.parametrize('name', ['hermes', 'llama3', 'qwen3_coder', 'react'])
def test_what_not_every_parser_of_json_reads_is_malformed(name, value):
  """Who takes the call would fail on it, and the episode would end as an error."""
  body = f'{{"name": "note", "arguments": {{"x": {value}}}}}'
  twice = json.dumps({'name': 'note', 'arguments': f'{{"x": {value}}}'})
  replies = {
    'hermes': [f'<tool_call>{text}</tool_call>' for text in (body, twice)],
    'llama3': [body, twice],
    'qwen3_coder': [f'<function=note><parameter=x>{value}</parameter></function>'],
    'react': [f'Action: note\nAction Input: {{"x": {value}}}'],
  }
  for reply in replies[name]:
    (error,) = call_formats.FORMATS[name].parse(f'So.\n{reply}')
    assert isinstance(error, CallError), error
    assert 'JSON has no NaN' in error.message or 'surrogate' in error.message
    assert f'So.\n{reply}'[error.begin : error.end] == reply


@pytest.mark.parametrize(
  'payload', ['{"name": "a", "arguments": null}', '{"x": 1}', 'no', '{"name": "a"} {}']
)
def test_a_malformed_call_is_found_with_its_tags(payload):
  written = f'<tool_call>\n{payload}\n</tool_call>'
  error, good = call_formats.HERMES.parse(reply := f'So. {written}\n{call(query="a")}')
  assert isinstance(error, CallError) and reply[error.begin : error.end] == written
  assert reply[good.begin :] == call(query='a')


@pytest.mark.parametrize(
  'reply, rest',
  [
    ('<think>a</think>b', 'b'),
    ('a</think>b', 'b'),  # The prompt may have opened the block.
    ('a<think>b', 'ab'),
    ('a<think>b</think>c<think>d</think>e', 'ace'),
    ('a<think>b<think>c</think>d', 'ad'),
    ('a</think>b</think>c', 'c'),
    ('', ''),
  ],
)
def test_closed_thoughts_are_removed_where_calls_do_not_count(reply, rest):
  assert calls.remove_thoughts(reply) == rest
  written = ''.join(x if 'think' in x else call(query=x) for x in _pieces(reply))
  found = call_formats.HERMES.parse(written)
  assert ''.join(c.arguments['query'] for c in found if isinstance(c, ToolCall)) == rest


def _pieces(reply):
  return [x for x in re.split('(</?think>|[a-e])', reply) if x]


_ANSWERS = {
  qa.extract_answer: '<answer>{}</answer>',
  mathematics.find_boxed: r'\boxed{{{}}}',
  programming.extract_program: '```python\n{}\n```\n',
  games.find_action: '<action>{}</action>',
}


@pytest.mark.parametrize('find', _ANSWERS)
def test_an_answer_in_a_closed_thought_is_none(find):
  right, bet = (_ANSWERS[find].format(x) for x in ('right', 'bet'))
  read = lambda text: (find(text) or '').strip()
  assert not read(f'<think>{bet}</think>no') and not read(f'{bet}</think>no')
  assert read(f'<think>{bet}</think>{right}') == 'right'
  assert read(f'{right}<think>{bet}</think>') == 'right'
  assert read(f'<think>{right}') == 'right'  # It was never closed, as with calls.


def test_a_thought_decides_neither_the_format_nor_the_score():
  task = types.Task('a', [{'role': 'user', 'content': '?'}], ['a'], {})
  say = lambda text: qa.paper_reward(task, [{'role': 'assistant', 'content': text}])
  assert say('<think><answer>a</answer></think>no') == -0.5
  assert say('<think><answer>b</answer></think><answer>a</answer>') == 1.0
