"""The grammar of calls: what fits the schemas can be said, nothing else; text is free."""

import asyncio
import functools
import json
from typing import Any, Literal

import numpy as np
import pytest
import tiny

from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import calls as calls_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.grammars import byte_grammars, compiler


@tool_lib.tool
def search(query: str, top_k: int = 5, lang: Literal['en', 'dé', '"'] = 'en') -> str:
  """Searches.

  Args:
    query: What for.
    top_k: How many.
    lang: The language.
  """
  return 'found'


@tool_lib.tool
def search_all(queries: list[str], weights: list[float] | None = None) -> str:
  """Searches for many things: its name begins with that of another.

  Args:
    queries: What for.
    weights: How much each counts.
  """
  return 'found'


@tool_lib.tool
def edit(
  path: str,
  changes: list[dict[str, str]],
  strict: bool,
  by: dict[str, int | None] | None = None,
  note: Any = None,
  limits: list = (),  # pyright: ignore[reportArgumentType]
) -> str:
  """Changes a file.

  Args:
    path: The file.
    changes: What to put where.
    strict: Whether all must be possible.
    by: Who.
    note: Why.
    limits: How far.
  """
  return 'changed'


@tool_lib.tool
def now() -> str:
  """Tells the time."""
  return 'noon'


_NESTED = tool_lib.Tool(
  'order',
  {
    'type': 'function',
    'function': {
      'name': 'order',
      'parameters': {
        'type': 'object',
        'properties': {
          'who': {
            'type': 'object',
            'properties': {
              'name': {'type': 'string'},
              'age': {'type': 'integer', 'description': 'In years.'},
            },
            'required': ['name', 'age'],
          },
          'size': {'enum': [1, 2.5, 'L', None]},
          'tags': {'type': 'array', 'items': {'type': 'string'}, 'minItems': 1},
        },
        'required': ['who'],
      },
    },
  },
  lambda **kwargs: 'ordered',
)
TOOLS = {t.name: t for t in (search, search_all, edit, now, _NESTED)}


class Tokens:
  """A tokenizer's tokens, and a grammar over them, walked on the host."""

  def __init__(self, tokenizer, vocab_size, **kwargs):
    self.tokenizer, self.pieces = tokenizer, tokenizer_lib.token_bytes(tokenizer)
    schemas = [tool.schema for tool in TOOLS.values()]
    self.grammar = compiler.tool_calls(schemas, self.pieces, vocab_size, **kwargs)
    self.classes, self.table = self.grammar.classes, self.grammar.table
    # Where a control token may follow, the text is free.
    self.free = self.table[:, self.classes[tokenizer.eos_token_id]] >= 0
    self.opening = self.pieces.index(b'<tool_call>')

  def walk(self, tokens, state=0):
    for token in tokens:
      state = int(self.table[state, self.classes[token]])
      if state < 0:
        break
    return state

  def encode(self, text):
    return self.tokenizer.encode(text, add_special_tokens=False)

  def text(self, tokens):
    return b''.join(self.pieces[t] for t in tokens).decode(errors='replace')

  @functools.cached_property
  def distance(self):
    """Of every state from free text, in tokens."""
    far = np.where(self.free, 0, 10**6)
    while True:
      nearer = np.where(self.table >= 0, far[self.table], 10**6).min(1) + 1
      nearer = np.minimum(far, nearer)
      if (nearer == far).all():
        return far
      far = nearer

  def completed(self, tokens):
    """The shortest way on until the text is free again."""
    tokens, state = list(tokens), self.walk(tokens)
    while not self.free[state]:
      after = self.table[state]
      best = int(np.argmin(np.where(after >= 0, self.distance[after], 10**6)))
      assert self.distance[after[best]] < self.distance[state]
      # Any token of the class does: take the first.
      tokens.append(int(np.flatnonzero(self.classes == best)[0]))
      state = self.walk(tokens)
    return tokens

  def random_call(self, rng, length):
    """A call of which up to `length` tokens are chosen at random."""
    tokens, state = [self.opening], self.walk([self.opening])
    for _ in range(length):
      if self.free[state]:
        break
      # The class first: otherwise no string would ever end.
      cls = rng.choice(np.flatnonzero(self.table[state] >= 0))
      tokens.append(int(rng.choice(np.flatnonzero(self.classes == cls))))
      state = self.walk(tokens)
      assert state >= 0
    return tokens


@functools.cache
def of_tiny(**kwargs):
  return Tokens(tiny.chat().tokenizer, tiny.VOCAB, **kwargs)


def _assert_fits(text):
  """One call, which its tool accepts."""
  (call,) = call_formats.HERMES.parse(text)
  assert isinstance(call, calls_lib.ToolCall), (text, call)
  result = asyncio.run(tool_lib.call(TOOLS[call.name], call.arguments))
  assert result.ok, (text, result.text)
  known = list(TOOLS[call.name].schema['function']['parameters']['properties'])
  assert [key for key in known if key in call.arguments] == list(call.arguments)
  return call


def call_text(name, arguments):
  data = json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)
  return f'<tool_call>\n{data}\n</tool_call>'


_GOOD = [
  ('search', {'query': ''}),
  ('search', {'query': 'Füße 你好 😀 \\ " \n\t </tool_call> }}', 'top_k': -10}),
  ('search', {'query': 'a', 'lang': 'dé'}),
  ('search', {'query': 'a', 'top_k': 0, 'lang': '"'}),
  ('search_all', {'queries': []}),
  ('search_all', {'queries': ['a', 'b'], 'weights': [0.5, -1, 2e-07, 1e30]}),
  ('search_all', {'queries': ['a'], 'weights': None}),
  ('edit', {'path': 'x', 'changes': [], 'strict': True}),
  (
    'edit',
    {
      'path': 'x',
      'changes': [{'a': 'b', 'c': 'd'}, {}],
      'strict': False,
      'by': {'k': 1, 'l': None},
      'note': {'deep': 1},
      'limits': [1, 'two', None, True],
    },
  ),
  ('now', {}),
  ('order', {'who': {'name': 'Ann', 'age': 3}}),
  ('order', {'who': {'name': 'Ann', 'age': 3}, 'size': 2.5, 'tags': ['x']}),
]
_BAD = [
  '{"name": "find", "arguments": {}}',
  '{"name": "search", "arguments": {}}',
  '{"name": "search", "arguments": {"query": 3}}',
  '{"name": "search", "arguments": {"query": "a", "top_k": 1.5}}',
  '{"name": "search", "arguments": {"query": "a", "top_k": 01}}',
  '{"name": "search", "arguments": {"query": "a", "lang": "fr"}}',
  '{"name": "search", "arguments": {"query": "a", "other": 1}}',
  '{"name": "search", "arguments": {"top_k": 1, "query": "a"}}',
  '{"name": "search",  "arguments": {"query": "a"}}',
  '{"name":"search", "arguments": {"query": "a"}}',
  '{"name": "search", "arguments": {"query": "a\nb"}}',
  '{"name": "search", "arguments": {"query": "\\x"}}',
  '{"name": "search", "arguments": {"queries": ["a"]}}',
  '{"name": "search_all", "arguments": {"queries": ["a",]}}',
  '{"name": "now", "arguments": {}, "more": 1}',
  '{"arguments": {}, "name": "now"}',
  '{"name": "order", "arguments": {"who": {"name": "Ann"}}}',
  '{"name": "order", "arguments": {"who": {"name": "A", "age": 3}, "tags": []}}',
  '{"name": "order", "arguments": {"who": {"name": "A", "age": 3}, "size": 2}}',
]


class TestAutomaton:
  @pytest.mark.parametrize('name, arguments', _GOOD)
  def test_what_fits_can_be_said(self, name, arguments):
    tokens = of_tiny()
    text = call_text(name, arguments)
    _assert_fits(text)
    before = 'I <look> it <tool_ up. '
    for extra in ('', ' done', text):
      state = tokens.walk(tokens.encode(before + text + extra))
      assert state >= 0 and tokens.free[state]

  @pytest.mark.parametrize('body', _BAD)
  def test_what_does_not_fit_cannot(self, body):
    tokens = of_tiny()
    assert tokens.walk(tokens.encode(f'<tool_call>\n{body}\n</tool_call>')) == -1

  def test_the_opening_is_seen_however_it_is_cut(self):
    tokens = of_tiny()
    for opening in (['<tool_call>'], list('<tool_call>'), ['<', '<tool_call>']):
      ids = [t for part in opening for t in tokens.encode(part)]
      assert not tokens.free[tokens.walk(ids)]
      assert tokens.walk([*ids, *tokens.encode('no')]) == -1
    assert tokens.free[tokens.walk(tokens.encode('<tool_calls <tool call> </tool_call>'))]

  def test_a_control_token_ends_no_call_and_separates_the_opening(self):
    tokens = of_tiny()
    end = tokens.tokenizer.eos_token_id
    body = tokens.encode(call_text(*_GOOD[1]))
    for i in range(1, len(body)):
      assert tokens.walk([*body[:i], end]) == -1
      assert tokens.walk([*body[:i], tiny.VOCAB - 1]) == -1  # beyond the tokenizer
    assert tokens.walk([*body, end]) == 0
    half = tokens.encode('<tool_')
    assert not tokens.free[tokens.walk([*half, *tokens.encode('call>')])]
    assert tokens.free[tokens.walk([*half, end, *tokens.encode('call>')])]

  def test_a_token_leads_where_its_bytes_lead(self):
    tokens = of_tiny()
    single = {piece: i for i, piece in enumerate(tokens.pieces) if len(piece) == 1}
    longer = [i for i, piece in enumerate(tokens.pieces) if len(piece) > 1]
    assert longer
    for state in range(len(tokens.table)):
      for token in longer:
        byte_by_byte = [single[bytes([b])] for b in tokens.pieces[token]]
        assert tokens.walk([token], state) == tokens.walk(byte_by_byte, state)

  def test_something_can_always_be_said_and_no_reply_ends(self):
    tokens = of_tiny()
    assert (tokens.table >= 0).any(1).all() and (tokens.table[0] >= 0).all()
    assert not tokens.grammar.ends.any() and tokens.grammar.restricts

  def test_a_required_call_is_said_at_once(self):
    tokens, text = of_tiny(required=True), call_text('now', {})
    assert tokens.free[tokens.walk(tokens.encode(text + ' and so on'))]
    assert tokens.walk(tokens.encode('I call ' + text)) == -1
    assert tokens.walk([tokens.tokenizer.eos_token_id]) == -1

  @pytest.mark.parametrize('length', [0, 3, 12, 30, 80])
  def test_every_prefix_is_one_of_a_call_that_fits(self, length):
    tokens, rng = of_tiny(), np.random.default_rng(length)
    calls = [
      _assert_fits(tokens.text(tokens.completed(tokens.random_call(rng, length))))
      for _ in range(40)
    ]
    if length > 12:
      assert {call.name for call in calls} == set(TOOLS)

  @pytest.mark.parametrize('model', ['qwen2.5', 'qwen3'])
  def test_with_a_real_tokenizer(self, data_dir, model):
    tokens = Tokens(tokenizer_lib.load(data_dir / 'models' / model), 151_936)
    assert tokens.classes.shape == (151_936,)
    for name, arguments in _GOOD:
      text = f'Well. {call_text(name, arguments)}'
      assert tokens.free[tokens.walk(tokens.encode(text))], text
    for body in _BAD:
      text = f'<tool_call>\n{body}\n</tool_call>'
      assert tokens.walk(tokens.encode(text)) == -1, text
    rng = np.random.default_rng(0)
    for length in [2, 10, 40] * 10:
      _assert_fits(tokens.text(tokens.completed(tokens.random_call(rng, length))))


@pytest.mark.parametrize(
  'schema, values',
  [
    ({'type': 'integer'}, ['3']),
    ({'type': 'array', 'items': {'type': 'integer', 'nullable': True}}, ['[1, null]']),
    ({'enum': ['S', 'L']}, ['"S"']),
    ({'anyOf': [{'type': 'integer'}, {'type': 'boolean'}]}, ['7', 'true']),
    ({'type': ['integer', 'string']}, ['7', '"x"']),
    ({'type': 'object', 'properties': {'a': {'type': 'integer'}}}, ['{"a": 1}']),
  ],
)
@pytest.mark.parametrize('nullable', [True, False])
def test_null_is_a_value_where_a_schema_is_nullable(schema, values, nullable):
  """As get_json_schema writes `| None`; beside every other keyword."""
  parameters = {
    'type': 'object',
    'properties': {'x': schema | {'nullable': nullable}},
    'required': ['x'],
  }
  function = {'name': 'f', 'parameters': parameters}
  goto = byte_grammars.tool_calls([{'function': function}], True).goto

  def fits(value):
    state = 0
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"x": {value}}}}}\n</tool_call>'
    for byte in text.encode():
      state = goto[state, byte] if state >= 0 else -1
    return state >= 0

  assert all(fits(value) for value in values)
  assert fits('null') == nullable and not fits('nul') and not fits('')


class TestMistakes:
  def test_a_broken_schema_is_refused_with_its_tool(self, refused):
    parameters = {'type': 'object', 'properties': 3}
    schema = {'type': 'function', 'function': {'name': 'f', 'parameters': parameters}}
    with refused('tool f: its parameters'):
      compiler.tool_calls([schema], of_tiny().pieces, tiny.VOCAB)

  def test_an_empty_list_of_tools_is_refused(self, refused):
    with refused('schemas is empty'):
      compiler.tool_calls([], of_tiny().pieces, tiny.VOCAB)

  def test_more_tokens_than_the_model_has_are_refused(self, refused):
    with refused('do not belong together'):
      compiler.tool_calls([now.schema], of_tiny().pieces, 100)

  def test_a_vocabulary_without_single_bytes_is_refused(self, refused):
    pieces = [b'' if piece == b'{' else piece for piece in of_tiny().pieces]
    with refused("single bytes [b'{"):
      compiler.tool_calls([now.schema], pieces, tiny.VOCAB)

  @pytest.mark.parametrize(
    'properties', [{'a': {'type': 'string', 'not': {}}}, {'a': {'type': 'colour'}}]
  )
  def test_a_schema_without_a_grammar_is_refused(self, refused, properties):
    parameters = {'type': 'object', 'properties': properties}
    schema = {'type': 'function', 'function': {'name': 'f', 'parameters': parameters}}
    with refused('tool f: its parameters'):
      compiler.tool_calls([schema], of_tiny().pieces, tiny.VOCAB)
