"""Formats of tool calls: what models write is read, and what is broken is explained."""

import functools
import itertools
import json
import pathlib
import random
import re
from typing import Any

import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, call_parsers, calls
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent.calls import ToolCall
from agent_r1_jax.grammars import byte_grammars, compiler
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import evaluate, rollout
from agent_r1_jax.train import preflight
from agent_r1_jax.train.plan import setup

_FORMATS = call_formats.FORMATS


@tool_lib.tool
def search(query: str, top_k: int = 5) -> str:
  """Searches.

  Args:
    query: What for.
    top_k: How many.
  """
  return f'found {query}'


@tool_lib.tool
def python(code: str) -> str:
  """Runs code.

  Args:
    code: The code.
  """
  return code


@tool_lib.tool
def edit(
  path: str,
  line: int,
  share: float = 0.5,
  force: bool = False,
  note: str | None = None,
  of: int | str = 0,
  tags: list[str] | None = None,
  options: dict[str, int] | None = None,
  more: Any = None,
) -> str:
  """Edits.

  Args:
    path: The file.
    line: The line.
    share: A number.
    force: Whether.
    note: Why.
    of: An id.
    tags: Words.
    options: Numbers.
    more: Anything.
  """
  return path


_SCHEMAS = [tool.schema for tool in (search, python, edit)]


def look(query):
  return ToolCall('search', {'query': query})


def run(code):
  return ToolCall('python', {'code': code})


def xml(name, **arguments):
  return _FORMATS['qwen3_coder'].render(ToolCall(name, arguments))


_TAGS = 'a("</tool_call>") + "</parameter>"\n</function>;'

# What an error says stands for the error.
_CASES = {
  'hermes': [
    ('<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"a\\"}"}', [look('a')]),
    ('<tool_call>{"name": "search", "arguments": "a"}</tool_call>', [look('a')]),
    ('<tool_call>{"name": "edit", "arguments": "a"}', ['"arguments" must be a JSON obj']),
    ('<tool_call>{"name": "nobody", "arguments": "a"}', ['"arguments" must be a JSON']),
    (
      '<tool_call>{"name": "search", "arguments": [1]}',
      ['"arguments" must be a JSON ob'],
    ),
  ],
  'llama3': [
    ('{"answer": 42}', []),
    ('{"name": "Ann", "age": 3}', []),
    ('{"name": "search", "parameters": {"query": "a"}}', [look('a')]),
    (' \n{"name": "search", "arguments": {"query": "a"}} done', [look('a')]),
    ('So: <|python_tag|>{"name": "search", "parameters": {"query": "a"}}', [look('a')]),
    ('{"type": "function", "name": "search", "parameters": {"query": "a"}}', [look('a')]),
    (
      '<|python_tag|>{"name": "search", "parameters": {"query": "};"}}; '
      '{"name":"python","parameters":{"code":"{\\"name\\": \\"x\\", "}}',
      [look('};'), run('{"name": "x", ')],
    ),
    ('<|python_tag|>{"name": "now"}', [ToolCall('now', {})]),
    ('{"name": "search", "parameters": "{\\"query\\": \\"é\\"}"}', [look('é')]),
    ('{"name": "search", "parameters": "a"}', [look('a')]),
    ('{"name": "edit", "parameters": "a"}', ['"parameters" must be a JSON object']),
    ('<|python_tag|>print(1)', ['Expecting value']),
    ('{"name": "search", "parameters": {"query": "a"', ["Expecting ',' delimiter"]),
    (
      '{"name": "search", "parameters": {oops}}; {"name": "python", "parameters": "1"}',
      ['property name', run('1')],
    ),
    ('<think>{"name": "python", "parameters": "1"}</think>Hm.', []),
  ],
  'mistral': [
    ('[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a"}}]', [look('a')]),
    (
      'So:[TOOL_CALLS][{"name": "search", "arguments": {"query": "a"}, "id": "abc123XY9"}'
      ', {"name": "python", "parameters": "b"}]',
      'ab',
    ),
    ('[TOOL_CALLS] {"name": "now"}', [ToolCall('now', {})]),
    ('[{"name": "search", "arguments": {"query": "a"}}]', []),
    ('[{"name": "Ann"}, {"name": "Bob", "arguments": {}}]', []),
    ('[TOOL_CALLS] [3]', ['expected a JSON object']),
    (
      '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {oops}, {"name": "now"}]',
      [ToolCall('now', {}), 'property name', ToolCall('now', {})],
    ),
    ('[TOOL_CALLS] [{"name": "search"', ["Expecting ',' delimiter"]),
    (
      '[TOOL_CALLS] oops [TOOL_CALLS] [{"name": "python", "arguments": {"code": "1"}}]',
      ['Expecting value', run('1')],
    ),
    ('<think>[TOOL_CALLS] {"name": "now"}</think>Hm.', []),
    # Objects in the text around a call are no calls.
    ('In {1}, {2} it is [TOOL_CALLS] [{"name": "now"}]', [ToolCall('now', {})]),
    ('[TOOL_CALLS] [{"name": "now"}]\nOf {1}, {2}, {3}.', [ToolCall('now', {})]),
  ],
  'qwen3_coder': [
    ('I would use a <function> here.', []),
    ('So:\n' + xml('search', query='a') + '\n' + xml('python', code='b'), 'ab'),
    (xml('search', query='é 中\n  b\n'), [look('é 中\n  b\n')]),
    (xml('python', code=_TAGS), [run(_TAGS)]),
    (xml('search', query='a').removesuffix('</tool_call>'), [look('a')]),
    (xml('search', query='a').removesuffix('</function>\n</tool_call>'), [look('a')]),
    ('<tool_call>\n<function=search>\n<parameter=query>\na', [look('a')]),
    (xml('search', query='a').removeprefix('<tool_call>'), [look('a')]),
    (xml('search', query='a').replace('</parameter>\n', ''), [look('a')]),
    (xml('search', query='a').replace('\n', ''), [look('a')]),
    (
      '<function=search><parameter=query>\na\n<parameter=top_k>\n3\n</function>',
      [ToolCall('search', {'query': 'a', 'top_k': 3})],
    ),
    (
      xml('search', query='a').replace('</tool_call>', '') + xml('python', code='b'),
      'ab',
    ),
    (xml('now'), [ToolCall('now', {})]),
    ('<tool_call>\n{"name": "search"}\n</tool_call>', ['expected <function=the name>']),
    (
      '<tool_call><function=search>a</function></tool_call>' + xml('python', code='b'),
      ['expected <parameter=a name> or </function>', run('b')],
    ),
    ('<think>' + xml('search', query='a') + '</think>', []),
    ('<think>' + xml('search', query='a'), [look('a')]),
    (
      '<think><function=edit><parameter=path>x</think>' + xml('search', query='a'),
      [look('a')],
    ),
  ],
  'search_r1': [
    ('I search for it. </search>', []),
    ('<think>I need it.</think>\n<search> who is é? </search>', [look('who is é?')]),
    ('<search>a', [look('a')]),
    ('<search>a</search> <search>b</search>', [look('a'), look('b')]),
    ('<search>a <b> </search>', [look('a <b>')]),
    ('<search></search>', [look('')]),
    ('<search>a<search>b</search>', ['expected </search> after the query', look('b')]),
    ('<answer>Paris</answer>', []),
    ('<answer>Paris</answer><search>a</search>', []),
    ('<search>a</search><answer>Paris</answer>', [look('a')]),
    ('<think><answer>x</answer></think><search>a</search>', [look('a')]),
    ('<think>or <search>x</search></think>Paris', []),
  ],
  'retool': [
    ('Use ```python\n1\n```', []),
    ('So <code>\n```python\nif a:\n  "é"\n```\n</code>', [run('if a:\n  "é"')]),
    ('<code>print(1)</code>', [run('print(1)')]),
    ('<code>\n  a\n  b\n</code>', [run('  a\n  b')]),
    ('<code>\n```py\na\n```', [run('a')]),
    ('<code>\n```\na\n</code>', [run('a')]),
    ('<code>a', [run('a')]),
    ('<code>\n```python\nprint("</code>")\n```\n</code>', [run('print("</code>")')]),
    ('<code>a</code> <code>b</code>', [run('a'), run('b')]),
    ('<code>a</code><answer>1</answer><code>b</code>', [run('a')]),
    ('<think><code>a</code></think>1', []),
    ('<think>in <code></think><code>a</code>', [run('a')]),
    ('<think><code>\n```\na</think>\n<code>\n```\nb\n```\n</code>', [run('b')]),
  ],
  'react': [
    ('Thought: I know it.\nFinal Answer: Paris', []),
    ('Paris. No Action: needed', []),
    (
      'Thought: x\nAction: search\nAction Input: {"query": "é"}\nObservation:',
      [look('é')],
    ),
    ('Action: search\nAction Input: "{\\"query\\": \\"a\\"}"', [look('a')]),
    ('Action: search\nAction Input: who: is it\nObservation:', [look('who: is it')]),
    ('Action: search\nAction Input: "who"', [look('who')]),
    ('Action: search\nAction Input: 42', [look('42')]),
    ('Action: `search`\n\nAction Input:\n{\n"query": "a"\n}', [look('a')]),
    ('Action: search[who [b]]', [look('who [b]')]),
    ('Action: python\nAction Input: a = 1\nb = 2\nObservation:', [run('a = 1\nb = 2')]),
    ('Action: now', [ToolCall('now', {})]),
    ('Action: Finish[Paris]', []),
    ('Action: finish\nAction Input: Paris', []),
    ('Action: search[a]\nFinal Answer: b\nAction: search[c]', [look('a')]),
    (
      'Action: search\nAction Input: a\nAction: python\nAction Input: {"code": "b"}',
      [look('a'), run('b')],
    ),
    ('Action: edit\nAction Input: a', ['Action Input must be a JSON object']),
    (
      'Action: search\nAction Input: {"query": a}\nAction: search[b]',
      ['Expecting value', look('b')],
    ),
    ('Action:\nAction Input: a', ['expected the name of a tool']),
    ('<think>\nAction: search[a]\n</think>\nAction: search[b]', [look('b')]),
  ],
}


@pytest.mark.parametrize(
  'name, reply, expected',
  [(name, *case) for name, some in _CASES.items() for case in some],
)
def test_each_reply_gives_its_calls_and_errors(name, reply, expected):
  if expected == 'ab':
    expected = [look('a'), run('b')]
  found = _FORMATS[name].parse(reply, _SCHEMAS)
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
}


@pytest.mark.parametrize('name', _FORMATS)
def test_what_a_reply_says_before_its_calls(name):
  call_format = _FORMATS[name]
  written = call_format.render(run('x') if name == 'retool' else look('x'))
  opening = call_format.openings[0]
  for text in ('', 'So.\n', f'<think>{opening} </think>So.\n', _LOOK_ALIKES[name]):
    for reply in (text + written, f'{text}{written}\n{written}'):
      assert reply[: call_format.parse(reply, _SCHEMAS)[0].begin] == text


@pytest.mark.parametrize('name', _FORMATS)
def test_parse_reads_what_render_writes(name):
  texts = ['x', 'é 中 \U0001f600', ' a\n b', 'say "</tool_call>"', '007', 'null', '\\n{']
  texts = [text.strip() for text in texts]
  if name == 'retool':
    written = [run(text) for text in texts]
  elif name == 'search_r1':
    written = [look(text) for text in texts]
  else:
    values = {'line': 7, 'share': 2.0, 'force': True, 'note': None, 'of': 'b7'}
    values |= {'tags': ['é', '1'], 'options': {'a': 1}, 'more': [None, {'k': 1.5}]}
    written = [ToolCall('edit', {'path': text, **values}) for text in texts]
  replies = [_FORMATS[name].render(call) for call in written]
  assert _FORMATS[name].parse('\n'.join(replies), _SCHEMAS) == written
  for reply, call in zip(replies, written):
    assert _FORMATS[name].parse(f'I look.\n{reply}', _SCHEMAS) == [call]


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
  (call,) = _FORMATS['qwen3_coder'].parse(reply, _SCHEMAS)
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
    (call,) = _FORMATS[name].parse(reply, _SCHEMAS)
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


@pytest.mark.parametrize('name', _FORMATS)
def test_parse_raises_on_no_random_or_cut_reply(name):
  """Also every beginning of a reply, as of one that is still written."""
  rng, kinds = random.Random(0), set()
  replies = [reply for reply, _ in _CASES[name]]
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
    for schemas in ((), _SCHEMAS):
      kinds |= {type(call) for call in _FORMATS[name].parse(reply, schemas)}
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
}


@pytest.mark.parametrize('name', _FORMATS)
def test_parse_reads_each_character_a_bounded_number_of_times(name, monkeypatch):
  """Each character is read a bounded number of times, whatever a reply repeats."""
  parsers = [x for x in vars(call_parsers).values() if type(x) is call_parsers.JsonParser]
  for holder in (call_parsers, *parsers):
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
      found = _FORMATS[name].parse(reply, _SCHEMAS)
      assert 0 < _Counting.read < bound * len(reply), (unit, end)
      malformed = sum(isinstance(call, calls.CallError) for call in found)
      assert malformed <= calls.MAX_MALFORMED


def test_after_many_malformed_calls_no_more_is_read():
  good, bad = _FORMATS['hermes'].render(look('a')), '<tool_call>{</tool_call>'
  found = _FORMATS['hermes'].parse(good + bad * 15 + good)
  assert [found[0], found[-1]] == [look('a')] * 2 and len(found) == 17
  found = _FORMATS['hermes'].parse(good + bad * 16 + good)
  assert found[0] == look('a') and len(found) == 17
  assert all(isinstance(call, calls.CallError) for call in found[1:])


_TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or () %}{% set call = call.function %}CALL{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
_WRITTEN = {
  'hermes': """{{ '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
  {{- call.arguments | tojson + '}\n</tool_call>' }}""",
  'llama3': """{{ '{"name": "' + call.name + '", "parameters": ' }}
  {{- call.arguments | tojson + '}' }}""",
  'qwen3_coder': """{{ '<tool_call>\n<function=' + call.name + '>\n' }}
  {%- for k, v in call.arguments | items %}
  {{- '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{% endfor %}
  {{- '</function>\n</tool_call>' }}""",
}


def _chat(directory, written, **options):
  template = _TEMPLATE.replace('CALL', written)
  tokenizer_lib.train(
    tiny.TEXTS, vocab_size=tiny.VOCAB, directory=directory, chat_template=template
  )
  return chat_lib.Chat(tokenizer_lib.load(directory), **options)


class TestChat:
  @pytest.mark.parametrize('name', _WRITTEN)
  def test_the_format_is_that_of_the_template(self, name, tmp_path):
    chat = _chat(tmp_path, _WRITTEN[name])
    assert chat.format is chat.detected is _FORMATS[name] and chat.supports_tools

  @pytest.mark.parametrize(
    'written', ['', '[{{ call.name }}]', "{{ raise_exception('') }}"]
  )
  def test_a_template_without_a_known_format_is_parsed_as_hermes_and_says_so(
    self, written, tmp_path
  ):
    chat = _chat(tmp_path, written)
    assert (
      chat.detected is None and chat.format is call_formats.HERMES and chat.supports_tools
    )
    said = preflight.describe_tool_prompt(chat, env_lib.ToolEnv([search], lambda *_: 0.0))
    assert said and 'they are parsed as hermes. chat.tool_format changes that.' in said

  @pytest.mark.parametrize('model', ['qwen2.5', 'qwen3'])
  def test_the_templates_of_qwen_are_detected_as_hermes(self, model, data_dir):
    tokenizer = tokenizer_lib.load(data_dir / 'models' / model)
    assert chat_lib.Chat(tokenizer).detected is call_formats.HERMES
    forced = chat_lib.Chat(tokenizer, tool_format=call_formats.LLAMA3)
    prompt = forced.encode_prompt([{'role': 'user', 'content': 'x'}], _SCHEMAS)
    text = forced.decode_exactly(prompt)
    assert '"parameters": {"an argument"' in text and '<tool_call>' not in text

  @pytest.mark.parametrize('name', _FORMATS)
  def test_a_chosen_format_is_described(self, name):
    tokenizer = tiny.chat().tokenizer
    chat = chat_lib.Chat(tokenizer, tool_format=_FORMATS[name])
    assert chat.supports_tools == (name == 'hermes')
    only = {'search_r1': search, 'retool': python}.get(name, edit)
    text = _FORMATS[name].describe([only.schema])
    if only is edit:
      assert '"line": {"type": "integer"' in text
    else:
      with pytest.raises(ValueError, match=f'go to a tool .{only.name}., and the tools'):
        chat.encode_prompt([{'role': 'user', 'content': 'x'}], _SCHEMAS)
    prompt = chat.encode_prompt([{'role': 'user', 'content': 'x'}], [only.schema])
    assert (str(text) in chat.decode_exactly(prompt)) == (name != 'hermes')

  def test_a_stop_string_may_be_a_control_token(self):
    tokenizer = tiny.chat().tokenizer
    chat = chat_lib.Chat(tokenizer, stop_strings=['<|endoftext|>'])
    stops = chat.stop_automaton(tiny.VOCAB)
    (token,) = tokenizer.encode('<|endoftext|>', add_special_tokens=False)
    assert token not in chat.stop_ids
    assert stops.ends[stops.table[0, stops.classes[token]]]

  def test_answers_are_one_message_of_the_user(self):
    chat = chat_lib.Chat(tiny.chat().tokenizer, tool_format=call_formats.REACT)
    answers = [{'role': 'tool', 'content': c} for c in ('a <|im_end|>', 'b')]
    told = [*answers, {'role': 'user', 'content': 'Go on.'}]
    ids = chat.encode_delta(told)
    text = 'user\nObservation: a <|im_end|>\nObservation: b<|im_end|>'
    assert text in chat.decode_exactly(ids)
    assert ids.tolist().count(chat.stop_ids[0]) == 2  # Not the one in the data.


def test_tool_format_is_checked_loaded_and_refused_with_a_grammar(tmp_path):
  assert config_lib.TOOL_FORMATS == ('auto', *_FORMATS)
  with pytest.raises(ValueError, match="tool_format is 'xml'; give one of 'auto', 'herm"):
    config_lib.Chat(tool_format='xml').check()
  model = config_lib.Model(path=tiny.save(tmp_path))
  _, _, chat = setup.load(model, config_lib.Chat(tool_format='react'))
  assert chat.format is call_formats.REACT
  env = env_lib.ToolEnv([search], lambda *_: 0.0)
  sampling, engine = config_lib.Sampling(tool_grammar=True), tiny.engine(_params())
  with pytest.raises(
    ValueError, match='react have no grammar; make it False, or chat.to'
  ):
    evaluate.make_decoding(sampling, engine, chat, env)


@functools.cache
def _params():
  # So that some replies begin with '<'.
  (opening,) = tiny.chat().tokenizer.encode('<', add_special_tokens=False)
  return tiny.params(tiny.config(), likely={opening: 0.5})


_SAID = {
  'search_r1': (
    '<search> [ab]{1,3} </search>|b <answer>[ab]</answer>',
    'found [ab]{1,3}',
  ),
  'react': (
    'Action: search\nAction Input: [ab]{1,3}\nObservation:|Final Answer: [ab]',
    'found [ab]{1,3}',
  ),
  'llama3': (
    '\\{"name": "search", "parameters": \\{"query": "[ab]"\\}\\}|[ab]',
    'found [ab]',
  ),
  'qwen3_coder': (
    '<tool_call>\n<function=search>\n<parameter=query>\n[ab]\n</parameter>\n'
    '<parameter=top_k>\n(x|1)\n</parameter>\n</function>\n</tool_call>|[ab]',
    "found [ab]|Error: search: argument 'top_k': 'x' is not of type 'integer'",
  ),
}


@pytest.mark.parametrize('name', _SAID)
def test_a_policy_that_calls_in_the_format_is_answered(name, tmp_path):
  """From the logits to the reward: nothing but the chat names the format."""
  if name in _WRITTEN:
    chat = _chat(tmp_path, _WRITTEN[name], tools_in_prompt='own')
  else:
    options = {'tool_format': _FORMATS[name], 'tools_in_prompt': 'own'}
    chat = chat_lib.Chat(tiny.chat().tokenizer, **options)
  said, answered = _SAID[name]
  pieces = tokenizer_lib.token_bytes(chat.tokenizer)
  grammar = compiler.compile_and_wait(
    byte_grammars.regex, [said], chat.stop_ids, pieces, tiny.VOCAB
  )
  engine = tiny.engine(_params(), slots=512, bucket=512)
  task = types.Task('t', [{'role': 'user', 'content': 'Who?'}])
  played = tiny.within(
    rollout.collect,
    engine,
    chat,
    [task],
    lambda: env_lib.ToolEnv([search], lambda *_: 1.0),
    samples=6,
    limits=config_lib.Limits(max_turns=3, max_turn_tokens=120),
    decoding=decoding_lib.Decoding(grammar=grammar),
  )
  assert {t.status for t in played} <= {'done', 'max_turns'}
  assert {len(t.turns) for t in played} > {1}
  for t in played:
    tokens = t.segments[0].tokens
    calls_, answers = t.metrics['tool_calls'], t.messages[2::2]
    assert calls_ == len(t.turns) - (t.status == 'done') == len(answers)
    assert all(
      m['role'] == 'tool' and re.fullmatch(answered, m['content']) for m in answers
    )
    assert t.metrics['format_errors'] == 0.0
    # The template's end of turn follows a stop string, and nobody sampled it.
    for turn, following, answer in zip(t.turns, t.turns[1:], answers):
      between = tokens[turn.stop : following.start]
      delta = chat.encode_delta([answer])
      if chat.format.stop_strings:
        delta = np.append(chat.stop_ids[0], delta)
        text = chat.decode_exactly(tokens[turn.start : turn.stop])
        assert text.endswith(chat.format.stop_strings)
      np.testing.assert_array_equal(between, delta)
      assert not t.segments[0].action_mask[turn.stop : following.start].any()


def test_the_documentation_runs():
  text = (pathlib.Path(__file__).parents[1] / 'docs' / 'tools.md').read_text()
  names: dict = {}
  for section in text.split('\n## '):
    title = section.partition('\n')[0]
    if title != 'A shell':  # It has a test of its own.
      for block in re.findall(r'```python\n(.*?)```', section, re.S):
        if not block.startswith('# Needs a sandbox'):
          exec(block, names)
  for name in _FORMATS:
    assert f'| `{name}` ' in text
