"""Tokenizers with the templates of several families, and what chats with them write."""

import pytest

from agent_r1_jax.agent import tokenizer as tokenizer_lib
from experiments import train_tokenizer

TEXT = 'who wrote the book? the search result says it was John Smith in 1984.\n' * 5
OPENING = [
  {'role': 'system', 'content': 'Use the tools.'},
  {'role': 'user', 'content': 'Who wrote it?'},
]
TURNS = [
  (
    'So:\n<tool_call>\n{"name": "search", "arguments": {"query": "it"}}\n</tool_call>',
    [{'role': 'tool', 'content': '  Doc 1.\n\n'}, {'role': 'tool', 'content': ''}],
  ),
  ('It is unclear: mark, reply.', [{'role': 'user', 'content': ' Try again!\n'}]),
  (
    '<tool_call>nonsense',
    [{'role': 'tool', 'name': 'x', 'content': 'Error: é 中文 \U0001f600'}],
  ),
]
TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': name,
      'description': 'Remarks qzmarkqz; replies.',
      'parameters': {'type': 'object', 'properties': {'query': {'type': 'string'}}},
    },
  }
  for name in ('search', 'look')
]
# How Llama 3.1 treats contents: it strips them, and writes a tool's as JSON.
LLAMA = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '<|endoftext|>\n\n' }}
{%- if message.role == 'tool' %}{{- message.content | tojson }}
{%- else %}{{- message.content | trim }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|endoftext|>\n\n' }}{% endif %}
"""


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  path = tmp_path_factory.mktemp('small')
  train_tokenizer.train([TEXT], vocab_size=320, directory=path)
  return tokenizer_lib.load(path)


@pytest.fixture(scope='module', params=['chatml', 'llama', 'qwen2.5', 'qwen3'])
def tokenizer(request, tmp_path_factory):
  if request.param in ('chatml', 'llama'):
    template = LLAMA if request.param == 'llama' else tokenizer_lib.CHATML
    path = tmp_path_factory.mktemp('tokenizer')
    train_tokenizer.train([TEXT], vocab_size=320, directory=path, chat_template=template)
    return tokenizer_lib.load(path)
  return tokenizer_lib.load(
    request.getfixturevalue('data_dir') / 'models' / request.param
  )


def encode(tokenizer, text):
  return tokenizer.encode(text, add_special_tokens=False)


def render(tokenizer, messages, tools=(), **kwargs):
  return tokenizer.apply_chat_template(
    messages,
    tools=list(tools) or None,
    tokenize=False,
    add_generation_prompt=True,
    **kwargs,
  )


def prompt_text(chat, *args):
  return chat.decode_exactly(chat.encode_prompt(*args))


def delta_text(chat, messages):
  return chat.decode_exactly(chat.encode_delta(messages))


def controls(tokenizer, ids):
  return [i for i in ids.tolist() if i in tokenizer.added_tokens_decoder]
