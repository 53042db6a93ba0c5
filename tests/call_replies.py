"""Replies in each format of tool calls, and the calls that they hold."""

from typing import Any

from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent.calls import ToolCall

FORMATS = call_formats.FORMATS


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


SCHEMAS = [tool.schema for tool in (search, python, edit)]


def look(query):
  return ToolCall('search', {'query': query})


def run(code):
  return ToolCall('python', {'code': code})


def xml(name, **arguments):
  return FORMATS['qwen3_coder'].render(ToolCall(name, arguments))


TAGS = 'a("</tool_call>") + "</parameter>"\n</function>;'

# What an error says stands for the error.
HARMONY_CALL = (
  '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x"}'
)
HARMONY_FIRST = ' to=functions.search<|channel|>commentary json<|message|>{"query": "x"}'
HARMONY_THOUGHT = '<|channel|>analysis<|message|>I think.<|end|><|start|>assistant'
CASES = {
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
    (xml('python', code=TAGS), [run(TAGS)]),
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
  'gemma4': [
    ('<|tool_call>call:search{query:<|"|>a<|"|>}<tool_call|>', [look('a')]),
    (
      'So:<|tool_call>call:search{query:<|"|>a<|"|>}<tool_call|>'
      '<|tool_call>call:python{code:<|"|>b<|"|>}<tool_call|>',
      'ab',
    ),
    # No escapes; the end tag of a call may be missing, and keys may have quotes.
    ('<|tool_call>call:search{query:<|"|>}"\\n{<|"|>}', [look('}"\\n{')]),
    ('<|tool_call>call:search{<|"|>query<|"|>: <|"|>a<|"|> }', [look('a')]),
    (
      '<|tool_call>call:edit{line:7,more:[null,{k:1.5}],share:-2e3,tags:[]}',
      [
        ToolCall(
          'edit', {'line': 7, 'more': [None, {'k': 1.5}], 'share': -2e3} | {'tags': []}
        )
      ],
    ),
    ('<|tool_call>call:now{}<tool_call|>', [ToolCall('now', {})]),
    ('<|tool_call>call:search{query:a}<tool_call|>', ['expected a value']),
    ('<|tool_call>call:search{query:<|"|>a}', ['expected a value']),
    ('<|tool_call>call:search{"a"}<tool_call|>', ['expected a name']),
    ('<|tool_call>call:search{a:1 b:2}<tool_call|>', ['expected , or }']),
    ('<|tool_call>{}<tool_call|>', ['expected call:, the name']),
    ('<|channel>thought\n<|tool_call>call:now{}<channel|>Hm.', []),
    ('<|channel>thought\n<channel|>a call:now{} <|tool_response>', []),
  ],
  'harmony': [
    (HARMONY_CALL, [look('x')]),
    (HARMONY_THOUGHT + HARMONY_CALL + '<|call|>', [look('x')]),
    # The recipient of a call may come first, and need not be a function.
    (HARMONY_THOUGHT + HARMONY_FIRST, [look('x')]),
    (' to=search<|channel|>commentary<|message|>{"query": "x"}', [look('x')]),
    ('<|channel|>analysis to=search code<|message|>{"query": "x"}', [look('x')]),
    ('<|channel|>commentary to=functions.now<|message|>', [ToolCall('now', {})]),
    ('<|channel|>commentary to=functions.search<|message|>who', ['Expecting value']),
    ('<|channel|>commentary to=now<|message|>[1]', ['must be a JSON object']),
    (HARMONY_CALL.replace('"x"', 'NaN'), ['not finite']),
    # No calls: texts in channels, a role that is answered, other words.
    (HARMONY_THOUGHT + '<|channel|>final<|message|>to=functions.now {}', []),
    ('<|channel|>commentary to=assistant<|message|>{"query": "x"}', []),
    ('Call search, {"query": "x"}.', []),
    ('<|channel|>', []),
  ],
}
