"""Formats of tool calls: what models write is read, and what is broken is explained."""

import itertools
import json
import random
import re

import call_replies
import pytest

from agent_r1_jax.agent import call_parsers, calls, gemma_calls, harmony
from agent_r1_jax.agent.calls import ToolCall


@pytest.mark.parametrize(
  'name, reply, expected',
  [(name, *case) for name, some in call_replies.CASES.items() for case in some],
)
def test_each_reply_gives_its_calls_and_errors(name, reply, expected):
  if expected == 'ab':
    expected = [call_replies.look('a'), call_replies.run('b')]
  found = call_replies.FORMATS[name].parse(reply, call_replies.SCHEMAS)
  assert len(found) == len(expected), found
  for call, right in zip(found, expected):
    if isinstance(right, str):
      assert isinstance(call, calls.CallError)
      assert call.message.startswith('invalid tool call: ') and right in call.message
      assert call.text in reply
    else:
      assert call == right


# Texts that begin as a call does, and are none.
_LOOK_ALIKES = {
  'hermes': '<tool_calls> are written so: ',
  'qwen3_coder': '<tool_calls> or <function> are written so: ',
  'llama3': 'The set {1, 2} and {"name": 3}.\n',
  'mistral': '[TOOL_CALL] or [TOOL_RESULTS]: ',
  'search_r1': '<searched> ',
  'retool': '<codes> ',
  'react': 'Thought: The best Action is to look. Action: none yet.\n',
  'gemma4': '<tool_call|> and call:look{} are written so: ',
  'harmony': '<|channel|>final<|message|>to=functions.look<|end|><|start|>assistant',
}


@pytest.mark.parametrize('name', call_replies.FORMATS)
def test_what_a_reply_says_before_its_calls(name):
  call_format = call_replies.FORMATS[name]
  written = call_format.render(
    call_replies.run('x') if name == 'retool' else call_replies.look('x')
  )
  opening = call_format.openings[0]
  for text in ('', 'So.\n', f'<think>{opening} </think>So.\n', _LOOK_ALIKES[name]):
    for reply in (text + written, f'{text}{written}\n{written}'):
      assert reply[: call_format.parse(reply, call_replies.SCHEMAS)[0].begin] == text


@pytest.mark.parametrize('name', call_replies.FORMATS)
def test_parse_reads_what_render_writes(name):
  texts = ['x', 'é 中 \U0001f600', ' a\n b', 'say "</tool_call>"', '007', 'null', '\\n{']
  texts = [text.strip() for text in texts]
  if name == 'retool':
    written = [call_replies.run(text) for text in texts]
  elif name == 'search_r1':
    written = [call_replies.look(text) for text in texts]
  else:
    values = {'line': 7, 'share': 2.0, 'force': True, 'note': None, 'of': 'b7'}
    values |= {'tags': ['é', '1'], 'options': {'a': 1}, 'more': [None, {'k': 1.5}]}
    written = [ToolCall('edit', {'path': text, **values}) for text in texts]
  replies = [call_replies.FORMATS[name].render(call) for call in written]
  assert (
    call_replies.FORMATS[name].parse('\n'.join(replies), call_replies.SCHEMAS) == written
  )
  for reply, call in zip(replies, written):
    assert call_replies.FORMATS[name].parse(
      f'I look.\n{reply}', call_replies.SCHEMAS
    ) == [call]


@pytest.mark.parametrize(
  'argument, text, value',
  [
    ('path', '007', '007'),
    ('path', 'true', 'true'),
    ('path', '"x"', '"x"'),
    ('line', '7', 7),
    ('line', ' 7 ', 7),
    ('line', 'seven', 'seven'),
    ('line', '9' * 5000, '9' * 5000),
    ('share', '1e-3', 0.001),
    ('force', 'True', True),
    ('note', 'null', None),
    ('note', 'None', None),
    ('note', '12', '12'),
    ('of', '12', 12),
    ('of', '012', '012'),
    ('of', '[1]', '[1]'),
    ('tags', '["a"]', ['a']),
    ('options', '{"a": 1}', {'a': 1}),
    ('more', '{"a": 1}', {'a': 1}),
    ('more', 'a word', 'a word'),
    ('unknown', '3', 3),
    ('more', '[' * 100_000, '[' * 100_000),
  ],
)
def test_text_gets_the_type_of_its_schema(argument, text, value):
  reply = f'<function=edit><parameter={argument}>\n{text}\n</parameter></function>'
  (call,) = call_replies.FORMATS['qwen3_coder'].parse(reply, call_replies.SCHEMAS)
  assert call == ToolCall('edit', {argument: value})


@pytest.mark.parametrize('depth', [calls.MAX_DEPTH, calls.MAX_DEPTH + 1, 700, 985])
@pytest.mark.parametrize('name', ['hermes', 'llama3', 'mistral', 'react', 'qwen3_coder'])
def test_deep_arguments_are_a_malformed_call(name, depth):
  """Else they would end whatever walks them: a validator, a log, a tool's server."""
  # The arguments are the outermost of so many containers.
  deep = '[' * (depth - 1) + ']' * (depth - 1)
  written = {
    'hermes': f'<tool_call>{{"name": "edit", "arguments": {{"x": {deep}}}}}</tool_call>',
    'llama3': f'{{"name": "edit", "parameters": {{"x": {deep}}}}}',
    'mistral': f'[TOOL_CALLS][{{"name": "edit", "arguments": {{"x": {deep}}}}}]',
    'react': f'Action: edit\nAction Input: {{"x": {deep}}}',
    'qwen3_coder': f'<function=edit><parameter=x>{deep}</parameter></function>',
  }
  encoded = json.dumps(f'{{"x": {deep}}}')
  twice = written['hermes'].replace(f'{{"x": {deep}}}', encoded)
  for reply in [written[name]] + ([twice] if name == 'hermes' else []):
    (call,) = call_replies.FORMATS[name].parse(reply, call_replies.SCHEMAS)
    if depth <= calls.MAX_DEPTH:
      assert call == ToolCall('edit', {'x': json.loads(deep)})
    elif name == 'qwen3_coder':
      assert call == ToolCall('edit', {'x': deep})
    else:
      assert isinstance(call, calls.CallError)
      # Beyond about 1,000 some versions of Python's reader of JSON give up by themselves:
      # then a text in JSON stays a text.
      known = 'nested more than 64 deep|recursion' + '|JSON object' * (reply == twice)
      assert re.search(known if depth == 985 else 'nested more', call.message)


@pytest.mark.parametrize('name', call_replies.FORMATS)
def test_parse_raises_on_no_random_or_cut_reply(name):
  """Also every beginning of a reply, as of one that is still written."""
  rng, kinds = random.Random(0), set()
  replies = [reply for reply, _ in call_replies.CASES[name]]
  pieces = [
    '<think>',
    '</think>',
    '\n',
    ' ',
    '{',
    '"',
    '[1]',
    '\ud800',
    'null',
    'Action:',
  ]
  pieces += [word for reply in replies for word in re.split(r'(<[^>]*>|\s|:)', reply)]
  tried = [reply[:i] for reply in replies for i in range(len(reply))]
  tried += [''.join(rng.choices(pieces, k=rng.randrange(30))) for _ in range(2000)]
  for reply in tried:
    for schemas in ((), call_replies.SCHEMAS):
      kinds |= {type(call) for call in call_replies.FORMATS[name].parse(reply, schemas)}
  assert kinds <= {ToolCall, calls.CallError} and ToolCall in kinds


class _Counting:
  """A pattern, or a decoder of JSON, that counts the characters which it reads."""

  read = 0

  def __init__(self, inner):
    self.inner = inner

  def search(self, text, start=0):
    found = self.inner.search(text, start)
    _Counting.read += (found.end() if found else len(text)) - start
    return found

  def match(self, text, start=0):
    found = self.inner.match(text, start)
    _Counting.read += found.end() - start if found else 1
    return found

  def raw_decode(self, text, start):
    _Counting.read += len(text) - start  # It may find only there that it is malformed.
    value, end = self.inner.raw_decode(text, start)
    _Counting.read -= len(text) - end
    return value, end


_PIECES = {
  'hermes': ('<tool_call>', '</tool_call>', '{"name":"a","arguments":{', *'{["\\,x'),
  'llama3': ('{"name":"a","parameters":', '<|python_tag|>', '1,', *'{["'),
  'mistral': ('[TOOL_CALLS]', '{"name":"a","arguments":', '1,', *'{["]'),
  'qwen3_coder': (
    *('<tool_call>', '</tool_call>', '<function=f>', '</function>'),
    *('<parameter=a>', '\n<parameter=a>', '</parameter>', 'x'),
  ),
  'search_r1': ('<search>', '</search>', '<answer>', 'x'),
  'retool': ('<code>', '</code>', '```', '```python\n', '<answer>', 'x'),
  'react': ('Action:', 'Action Input:', 'Final Answer', 'a[', *']{"`'),
  'gemma4': ('<|tool_call>', '<tool_call|>', 'call:f{a:', '<|"|>', *'{[1,x'),
  'harmony': ('<|channel|>', '<|message|>', '<|end|>', 'to=f', '<|constrain|>', '{'),
}


@pytest.mark.parametrize('name', call_replies.FORMATS)
def test_parse_reads_each_character_a_bounded_number_of_times(name, monkeypatch):
  """Each character is read a bounded number of times, whatever a reply repeats."""
  parsers = [x for x in vars(call_parsers).values() if type(x) is call_parsers.JsonParser]
  for holder in (call_parsers, gemma_calls, harmony, *parsers):
    for key, value in vars(holder).copy().items():
      if isinstance(value, re.Pattern | json.JSONDecoder):
        monkeypatch.setattr(holder, key, _Counting(value))
  pieces = ['\n', ' ', '<think>', '</think>', *_PIECES[name]]
  # Only a decoder of JSON does not say how far it came.
  bound = 30 if name in ('hermes', 'llama3', 'mistral') else 8
  ends = ['', '</think>x', '</parameter><parameter=', '}', '"']
  for first, second in itertools.product(pieces, repeat=2):
    unit = first + second
    for end in ends:
      reply, _Counting.read = unit * (4000 // len(unit)) + end, 0
      found = call_replies.FORMATS[name].parse(reply, call_replies.SCHEMAS)
      assert 0 < _Counting.read < bound * len(reply), (unit, end)
      malformed = sum(isinstance(call, calls.CallError) for call in found)
      assert malformed <= calls.MAX_MALFORMED


def test_after_many_malformed_calls_no_more_is_read():
  good, bad = (
    call_replies.FORMATS['hermes'].render(call_replies.look('a')),
    '<tool_call>{</tool_call>',
  )
  found = call_replies.FORMATS['hermes'].parse(good + bad * 15 + good)
  assert [found[0], found[-1]] == [call_replies.look('a')] * 2 and len(found) == 17
  found = call_replies.FORMATS['hermes'].parse(good + bad * 16 + good)
  assert found[0] == call_replies.look('a') and len(found) == 17
  assert all(isinstance(call, calls.CallError) for call in found[1:])
