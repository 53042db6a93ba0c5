"""The formats of tool calls, and the detection of a chat template's format."""

from collections.abc import Callable
import contextvars
import json

from agent_r1_jax import types
from agent_r1_jax.agent import call_parsers, gemma_calls, harmony, template_forms
from agent_r1_jax.agent.call_parsers import write_json
from agent_r1_jax.agent.calls import CallFormat

_TOOLS = (
  'You can call the tools that are described here, one JSON object a line:\n\n'
  '{schemas}\n\n'
)
HERMES = CallFormat(
  'hermes',
  call_parsers.HERMES.parse,
  lambda call: f'<tool_call>\n{write_json(call, "arguments")}\n</tool_call>',
  ('<tool_call>',),
  '</tool_call>',
  types.ControlText(
    _TOOLS
    + 'A call is a JSON object with the name and the arguments of the tool, in two '
    'tags:\n'
    '<tool_call>\n'
    '{{"name": "the name", "arguments": {{"an argument": "its value"}}}}\n'
    '</tool_call>\n'
    'What the tool answers comes in the next message.'
  ),
)
LLAMA3 = CallFormat(
  'llama3',
  call_parsers.LLAMA3.parse,
  lambda call: write_json(call, 'parameters'),
  ('<|python_tag|>', '{'),
  None,
  types.ControlText(
    _TOOLS
    + 'To call one, reply with a JSON object of its name and arguments, and with nothing '
    'else:\n'
    '{{"name": "the name", "parameters": {{"an argument": "its value"}}}}\n'
    'What the tool answers comes in the next message.'
  ),
)
MISTRAL = CallFormat(
  'mistral',
  call_parsers.MISTRAL.parse,
  lambda call: f'[TOOL_CALLS] [{write_json(call, "arguments")}]',
  ('[TOOL_CALLS]',),
  None,
  types.ControlText(
    _TOOLS + 'To call some, reply with a list of objects, each with the name and the '
    'arguments of a tool, after its tag:\n'
    '[TOOL_CALLS] [{{"name": "the name", "arguments": {{"an argument": "its value"}}}}]\n'
    'What the tools answer comes in the next message.'
  ),
)
QWEN3_CODER = CallFormat(
  'qwen3_coder',
  call_parsers.parse_qwen3_coder,
  call_parsers.render_qwen3_coder,
  ('<tool_call>', '<function='),
  '</tool_call>',
  types.ControlText(
    _TOOLS + 'A call names the tool, and each argument with its value:\n'
    '<tool_call>\n'
    '<function=the name>\n'
    '<parameter=an argument>\n'
    'its value\n'
    '</parameter>\n'
    '</function>\n'
    '</tool_call>\n'
    'What the tool answers comes in the next message.'
  ),
)
SEARCH_R1 = CallFormat(
  'search_r1',
  call_parsers.parse_search_r1,
  lambda call: f'<search> {call_parsers.get_only_argument(call)} </search>',
  ('<search>',),
  '</search>',
  types.ControlText(
    'You can search: write what to search for between <search> and </search>, and what '
    'is found comes between <information> and </information>. Search as often as '
    'necessary. When you know the answer, give it between <answer> and </answer>.'
  ),
  answer=types.ControlText('<information>\n{}\n</information>'),
  stop_strings=('</search>', '</answer>'),
  only_tool='search',
)
RETOOL = CallFormat(
  'retool',
  call_parsers.parse_retool,
  lambda call: f'<code>\n```python\n{call_parsers.get_only_argument(call)}\n```\n</code>',
  ('<code>',),
  '</code>',
  types.ControlText(
    'You can run Python code. Write it like this:\n'
    '<code>\n'
    '```python\n'
    'print(1 + 1)\n'
    '```\n'
    '</code>\n'
    'What it prints comes between <interpreter> and </interpreter>. Run code as often as '
    'necessary. When you know the answer, give it between <answer> and </answer>.'
  ),
  answer=types.ControlText('<interpreter>\n{}\n</interpreter>'),
  stop_strings=('</code>', '</answer>'),
  only_tool='python',
)
REACT = CallFormat(
  'react',
  call_parsers.parse_react,
  lambda call: (
    f'Action: {call.name}\nAction Input: {json.dumps(call.arguments, ensure_ascii=False)}'
  ),
  ('Action',),
  '\nObservation:',
  types.ControlText(
    _TOOLS
    + 'Write in this form, and repeat its first three lines as often as necessary:\n'
    'Thought: what to do next\n'
    'Action: the name of the tool\n'
    'Action Input: its arguments, such as {{"an argument": "its value"}}\n'
    'Then comes what the tool answers, after "Observation:". At the end write:\n'
    'Thought: what you found\n'
    'Final Answer: the answer'
  ),
  answer=types.ControlText('Observation: {}'),
  stop_strings=('\nObservation:',),
)
HARMONY = CallFormat(
  'harmony',
  harmony.parse,
  harmony.render,
  ('<|channel|>commentary to=',),
  None,
  types.ControlText(
    _TOOLS + 'To call one, write its name and arguments to the commentary channel:\n'
    '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>'
    '{{"an argument": "its value"}}<|call|>'
  ),
  write=harmony.write,
  ends=('<|return|>', '<|call|>'),
  frame=harmony.frame,
)

GEMMA4 = CallFormat(
  'gemma4',
  gemma_calls.parse,
  gemma_calls.render,
  ('<|tool_call>',),
  gemma_calls.CLOSE,
  types.ControlText(
    _TOOLS + 'A call names the tool and its arguments; texts stand in quotes:\n'
    '<|tool_call>call:NAME{{an argument:<|"|>its value<|"|>,another:3}}<tool_call|>\n'
    'What the tool answers comes after it.'
  ),
  write=gemma_calls.write,
  ends=('<turn|>', gemma_calls.ANSWER),
  within=(gemma_calls.QUOTE, gemma_calls.CLOSE, '<|tool_call>'),
  answer_begin=gemma_calls.ANSWER,
)

_ALL = HERMES, QWEN3_CODER, MISTRAL, LLAMA3, SEARCH_R1, RETOOL, REACT, HARMONY, GEMMA4
FORMATS = {f.name: f for f in _ALL}

# The format of the current episode's chat. Rollouts set it; environments and rewards read
# it, because the script that makes them has no tokenizer.
chat_format: contextvars.ContextVar[CallFormat] = contextvars.ContextVar(
  'chat_format', default=HERMES
)


def detect(
  render: Callable[[list[types.Message]], str], described: str
) -> CallFormat | None:
  """Returns the format in which a chat template writes calls; None if unknown.

  `described` is the template's rendering of a tool.
  """
  call = {'role': 'assistant', 'content': '', 'tool_calls': [template_forms.make_call()]}
  try:
    text = render([template_forms.USER, call, template_forms.make_answer('y')])
  except Exception:  # Templates are third-party programs.
    return None
  for call_format in FORMATS.values():
    if template_forms.SEEN in call_format.parse(text):
      return call_format
  # Some templates write no calls, but write answers or say how to call.
  return HERMES if '<tool_response>' in text or '<tool_call>' in described else None
