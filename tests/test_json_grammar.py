"""What an automaton of a schema lets pass is valid, or the schema is refused by name."""

import enum
import itertools
import json
import re
from typing import Annotated, Literal

import jsonschema
import numpy as np
import pydantic
import pytest

from agent_r1_jax.agent import call_formats, calls, tool_schema
from agent_r1_jax.grammars import byte_grammars, json_texts

_X = {'type': 'object', 'properties': {'x': {'type': 'boolean'}}, 'required': ['x']}
_Y = {'type': 'object', 'properties': {'y': {'type': 'boolean'}}, 'required': ['y']}
_NAMED = {'type': 'object', 'properties': {'a': {'type': 'string'}, 'b': {'const': 3}}}
_TREE = {'type': 'object', 'required': ['n'], 'properties': {'n': {'type': 'integer'}}}
_TREE['properties']['kids'] = {'type': 'array', 'items': {'$ref': '#/$defs/t'}}


def _kind(name, **more):
  return {
    'type': 'object',
    'properties': {'k': {'const': name}, **more},
    'required': ['k'],
  }


_SCHEMAS = [
  {'allOf': [_X, _Y]},
  {'allOf': [_X, {'required': ['y']}], 'additionalProperties': {'type': 'boolean'}},
  {
    'allOf': [
      {**_X, 'additionalProperties': {'type': 'integer'}},
      {'properties': {'z': {}}},
    ]
  },
  {
    'type': 'object',
    'properties': {'a"b\\': {'type': 'null'}, 'é$ .*': {'const': '.*"é'}},
  },
  {
    'type': 'object',
    'properties': {'n': {'type': 'integer', 'minimum': 1, 'maximum': 5}},
  },
  {**_NAMED, 'anyOf': [{'required': ['a']}, {'required': ['b']}]},
  {'enum': [1, 'a', None, 2.5, {'b': '"'}], 'type': ['string', 'null', 'object']},
  {'enum': ['a', 'bb', 'ccc'], 'not': {'const': 'bb'}, 'minLength': 2},
  {'enum': ['<', '>=', '<b> #&~-"\\\t\x7f'], 'type': 'string'},
  {'type': 'object', 'properties': {'<': {'type': 'null'}, 'a > b': {'const': '<'}}},
  {'allOf': [{'enum': ['a', 'bb', 1]}, {'type': 'string'}, {'pattern': '^b'}]},
  {'$ref': '#/$defs/n', 'minimum': 3, '$defs': {'n': {'type': 'integer', 'maximum': 7}}},
  {'$ref': '#/$defs/t', '$defs': {'t': _TREE}},
  {
    'type': 'array',
    'prefixItems': [{'type': 'integer'}, {'type': 'null'}],
    'items': False,
  },
  {'type': 'array', 'prefixItems': [_X, _Y], 'minItems': 1, 'items': {'type': 'null'}},
  {
    'type': 'array',
    'uniqueItems': False,
    'items': {'type': 'integer', 'minimum': -3},
    'minItems': 2,
  },
  {'oneOf': [_kind('a', v={'type': 'integer'}), _kind('b')]},
  {'oneOf': [{'type': 'string', 'maxLength': 2}, {'type': 'null'}, {'const': 7}]},
  {'type': 'object', 'properties': {'a': False, 'b': {'type': 'null'}}},
  {'type': 'object', 'required': ['q'], 'additionalProperties': {'type': 'null'}},
  {'type': 'object', 'maxProperties': 2, 'propertyNames': {'pattern': '^[a-c]+$'}},
  {'required': ['u'], 'properties': {'u': {'type': 'number', 'exclusiveMinimum': 0.5}}},
  {'type': 'object'},
  {},
  *({'type': 'string', 'format': name} for name in json_texts._FORMATS),
  {'type': 'string', 'minLength': 2, 'maxLength': 3},
]
_PATTERNS = [
  *('^.{2}$', '^".*"$', '^[a-z]+-[0-9]+$', 'ab', '^(a|bc)*$', r'\W', r'^\S+$', r'[^\w]$'),
  *(r'(^|\W)b*(a|\W*$)', '^(a*|(b$)+|.)'),
  *('^a|b$', '(^|,)x', r'\d{2,3}$', r'^[^"\\/]*$', r'^\/\u00e9$', '^$', 'a?$'),
]
_SCHEMAS += [{'type': 'string', 'pattern': pattern} for pattern in _PATTERNS]
_SCHEMAS += [
  {'type': 'string', 'pattern': p, 'minLength': 1, 'maxLength': 6}
  for p in _PATTERNS
  if p != '^$'
]


_OF_ONE_VALUE = [
  i
  for i, schema in enumerate(_SCHEMAS)
  if schema.get('pattern') == '^$' or 'bb' in str(schema)
]


def _find_distances(goto, ends):
  """Of each state from the end of a text; no state is without one."""
  far = np.where(ends, 0, 10**6)
  while True:
    nearer = np.minimum(far, np.where(goto >= 0, far[goto], 10**6).min(1) + 1)
    if (nearer == far).all():
      assert (far < 10**6).all()
      return far
    far = nearer


def _walk(rng, automaton, count):
  """Random texts: in each state a random next one; after some bytes the nearest end."""
  goto, ends = automaton.goto[:-1], automaton.stop[:-1] >= 0
  far = _find_distances(goto, ends)
  for _ in range(count):
    state, text, most = 0, bytearray(), int(rng.integers(0, 60))
    while not ends[state] or (rng.random() > 0.2 and len(text) < most):
      fits = np.flatnonzero(goto[state] >= 0)
      if not len(fits):
        break
      if len(text) >= most:
        fits = fits[far[goto[state, fits]] == far[goto[state, fits]].min()]
      state_after = rng.choice(np.unique(goto[state, fits]))
      text.append(int(rng.choice(fits[goto[state, fits] == state_after])))
      state = int(state_after)
    yield text.decode()


def _fits(automaton, text):
  state = 0
  for byte in text.encode():
    state = int(automaton.goto[state, byte]) if state >= 0 else -1
  return state >= 0 and automaton.stop[state] >= 0


@pytest.mark.parametrize('i', range(len(_SCHEMAS)))
def test_what_is_written_is_valid(i):
  schema, said = _SCHEMAS[i], set()
  validator = jsonschema.Draft202012Validator(schema)
  for text in _walk(np.random.default_rng(i), byte_grammars.json_schema(schema), 15):
    validator.validate(json.loads(text))
    said.add(text)
  assert len(said) > (i not in _OF_ONE_VALUE)


def _draw(rng, depth=3):
  """A random schema, of keywords that are supported and some that are not."""
  pick = lambda *values: values[int(rng.integers(len(values)))]
  low, high = sorted(rng.integers(-40, 40, 2).tolist())
  few = int(rng.integers(0, 3))
  part = lambda: _draw(rng, depth - 1)
  name = lambda: pick('a', 'b', 'c', 'x"y')
  scalars = [
    lambda: {
      'type': 'integer',
      'minimum': low,
      pick('maximum', 'exclusiveMaximum'): high,
    },
    lambda: {'type': 'number', pick('exclusiveMinimum', 'maximum'): low / 8},
    lambda: {'type': 'number', 'minimum': low, 'exclusiveMaximum': high / 4},
    lambda: {'type': 'string', 'minLength': few, 'maxLength': few + 2},
    lambda: {'type': 'string', 'pattern': pick(*_PATTERNS), 'maxLength': 3 + few},
    lambda: {'type': pick('null', 'boolean', 'string', 'integer'), 'description': 'x'},
    lambda: {'enum': [low, high, pick('a', None), 'b'], 'type': ['integer', 'string']},
    lambda: {'const': pick(low, 'a', None, True, [1], {'a': 1})},
  ]
  if not depth:
    return pick(*scalars)()
  properties = {name(): part() for _ in range(few + 1)}
  given = {'properties': properties, 'required': [name()][: int(rng.integers(2))]}
  composed = [
    lambda: {'type': 'object', **given},
    lambda: {'type': 'object', **given, 'additionalProperties': pick(False, part())},
    lambda: {
      'allOf': [{'type': 'object', **given}, pick(_X, {'properties': {'a': part()}})]
    },
    lambda: {'anyOf': [part(), part()]},
    lambda: {
      'type': 'object',
      **given,
      'anyOf': [{'required': ['a']}, {'required': ['b']}],
    },
    lambda: {'oneOf': [part(), part()]},
    lambda: {'allOf': [part(), {'anyOf': [part(), part(), {}]}]},
    lambda: {'type': 'array', 'items': part(), 'minItems': few, 'maxItems': few + 1},
    lambda: {'type': 'array', 'prefixItems': [part(), part()], 'maxItems': 3},
    lambda: {'$ref': '#/$defs/d', pick('minimum', 'minLength', 'maxItems', 'minimum'): 2},
    lambda: {'type': 'object', 'additionalProperties': part(), 'maxProperties': 2},
    lambda: {**part(), pick('not', 'if', 'contains'): {'type': 'null'}},
  ]
  return pick(*composed, *scalars)()


@pytest.mark.parametrize('seed', range(24))
def test_random_schemas_are_obeyed_or_refused(seed):
  rng, walked = np.random.default_rng(seed), 0
  while walked < 50:
    schema = _draw(rng)
    schema |= {'$defs': {'d': _draw(rng, 1)}}
    validator = jsonschema.Draft202012Validator(schema)
    try:
      automaton = byte_grammars.json_schema(schema)
    except ValueError as error:
      names = 'oneOf|not|if|contains|.*Properties|prefixItems|nothing'
      assert re.match(f'({names})|the grammar has', str(error)), (error, schema)
      continue
    for text in _walk(rng, automaton, 10):
      assert validator.is_valid(json.loads(text)), (text, schema)
      walked += 1


_OBJECT = {'type': 'object'}


@pytest.mark.parametrize(
  'keyword, schema',
  [
    ('multipleOf', {'type': 'integer', 'multipleOf': 3}),
    ('patternProperties', {**_OBJECT, 'patternProperties': {'^a': {}}}),
    ('oneOf', {'oneOf': [{'type': 'integer'}, {'type': 'number'}]}),
    ('oneOf', {'oneOf': [_X, _OBJECT]}),
    ('oneOf', {'oneOf': [{'type': 'null'}, {'minLength': 2}]}),
    ('oneOf', {'oneOf': [_kind('a'), _kind('a', v={'type': 'null'})]}),
    ('prefixItems', {'allOf': [{'prefixItems': [_X]}, {'items': _X}]}),
    ('not', {'not': {'type': 'string'}}),
    ('if', {**_OBJECT, 'if': {}, 'then': {'required': ['a']}}),
    ('minProperties', {**_NAMED, 'minProperties': 1}),
    ('minProperties', {**_OBJECT, 'minProperties': 2}),
    ('maxProperties', {**_NAMED, 'maxProperties': 1}),
    ('uniqueItems', {'type': 'array', 'uniqueItems': True}),
    ('contains', {'type': 'array', 'contains': {'type': 'null'}}),
    ('dependentRequired', {**_NAMED, 'dependentRequired': {'a': ['b']}}),
    ('dependentSchemas', {**_NAMED, 'dependentSchemas': {'a': _X}}),
    ('dependencies', {**_NAMED, 'dependencies': {'a': ['b']}}),
    ('unevaluatedProperties', {'allOf': [_X], 'unevaluatedProperties': False}),
    ('pattern', {'type': 'string', 'pattern': '^(?=.*a)b'}),
    ('pattern', {'type': 'string', 'pattern': r'\ba'}),
    ('pattern', {'type': 'string', 'pattern': r'(a)\1'}),
    ('pattern', {'type': 'string', 'pattern': '(?i)a'}),
    ('format', {'type': 'string', 'format': 'ipv6'}),
    (r'\$ref', {'$ref': 'https://example.com/a.json'}),
    (r'\$ref', {'$ref': '#/$defs/a'}),
  ],
)
def test_what_is_not_supported_is_refused_by_name(keyword, schema):
  with pytest.raises(ValueError, match=f'^{keyword}'):
    byte_grammars.json_schema({'type': 'array', 'items': schema})
  parameters = {'type': 'object', 'properties': {'a': schema}}
  tool = {'function': {'name': 'f', 'parameters': parameters}}
  if keyword == r'\$ref':
    return
  with pytest.raises(ValueError, match=rf'tool f: .*\({keyword}'):
    byte_grammars.tool_calls([tool], True)


@pytest.mark.parametrize(
  'schema',
  [
    {'allOf': [{'type': 'string'}, {'type': 'null'}]},
    {'type': 'integer', 'minimum': 3, 'maximum': 2},
    {'type': 'string', 'minLength': 3, 'maxLength': 2},
    {
      'type': 'object',
      'properties': {},
      'required': ['a'],
      'additionalProperties': False,
    },
    {'$ref': '#'},
    {'type': 'object', 'properties': {'a': {'$ref': '#'}}, 'required': ['a']},
    {'enum': ['a'], 'type': 'null'},
    {'type': 'array', 'items': False, 'minItems': 1},
    {'type': 'string', 'pattern': '^aaa$', 'maxLength': 2},
  ],
)
def test_a_schema_of_no_value_is_refused(schema):
  with pytest.raises(ValueError, match='nothing can be written|matches no text'):
    byte_grammars.json_schema(schema)


@pytest.mark.parametrize('is_integer', [True, False])
@pytest.mark.parametrize(
  'low, high', [(-12, 7), (3, None), (None, -9), (98, 103), (0, 0)]
)
def test_all_integers_between_bounds_are_written(is_integer, low, high):
  bounds = {'minimum': low, 'maximum': high}
  schema = {'type': 'integer' if is_integer else 'number'}
  schema |= {name: x for name, x in bounds.items() if x is not None}
  automaton = byte_grammars.json_schema(schema)
  for n in range(-150, 151):
    inside = (low is None or n >= low) and (high is None or n <= high)
    assert _fits(automaton, str(n)) == inside, n
    halves = not is_integer and jsonschema.Draft202012Validator(schema).is_valid(n + 0.5)
    assert _fits(automaton, str(n + 0.5)) == halves, n


@pytest.mark.filterwarnings('ignore:Possible')
@pytest.mark.parametrize('pattern', [*_PATTERNS, '[[a&&b]', '[^x~~a]'])
def test_patterns_match_what_pythons_match(pattern):
  automaton = byte_grammars.json_schema({'type': 'string', 'pattern': pattern})
  letters = ['a', 'b', '"', '\\', '-', '7', ',', 'x', '\n', '/']
  for length in range(4):
    for text in map(''.join, itertools.product(letters, repeat=length)):
      # Python's dollar also stands before the last line end.
      found = bool(re.search(re.sub(r'\$', r'\\Z', pattern), text))
      assert _fits(automaton, json.dumps(text)) == found, text


class _Colour(enum.Enum):
  RED, BLUE = 'red', 'blue'


class _Item(pydantic.BaseModel):
  kind: Literal['item']
  name: Annotated[str, pydantic.Field(pattern='^[A-Z]{2}-[0-9]+$', max_length=7)]
  price: float = pydantic.Field(gt=0, le=9.5)
  colour: _Colour = _Colour.RED
  size: tuple[int, int] | None = None


class _Note(pydantic.BaseModel):
  kind: Literal['note']
  stars: int = pydantic.Field(ge=1, le=5)


class _Order(pydantic.BaseModel):
  entries: Annotated[
    list[Annotated[_Item | _Note, pydantic.Field(discriminator='kind')]],
    pydantic.Field(min_length=1, max_length=2),
  ]
  counts: dict[str, Annotated[int, pydantic.Field(ge=0)]]


def test_what_is_written_of_a_pydantic_model_is_one():
  automaton = byte_grammars.json_schema(_Order.model_json_schema())
  orders = [
    _Order.model_validate_json(text)
    for text in _walk(np.random.default_rng(0), automaton, 60)
  ]
  kinds = {type(entry) for order in orders for entry in order.entries}
  assert kinds == {_Item, _Note}


def test_a_tools_call_fulfils_its_schema_too():
  parameters = {
    'type': 'object',
    'properties': {
      'say "hi"': {'allOf': [{'type': 'integer'}, {'minimum': 10, 'maximum': 12}]},
      'code': {'type': 'string', 'pattern': '^[A-Z]{2}$'},
    },
    'required': ['say "hi"'],
  }
  tool = {'function': {'name': 'f', 'parameters': parameters}}
  automaton = byte_grammars.tool_calls([tool], True)
  # A required call, and a free text after it.
  goto, free = automaton.goto, automaton.control >= 0
  far, rng = _find_distances(goto, free), np.random.default_rng(0)
  for _ in range(50):
    state, text = 0, bytearray()
    while not free[state]:
      fits = np.flatnonzero(goto[state] >= 0)
      if len(text) > 90:
        fits = fits[far[goto[state, fits]] == far[goto[state, fits]].min()]
      text.append(int(rng.choice(fits)))
      state = int(goto[state, text[-1]])
    (call,) = call_formats.HERMES.parse(text.decode())
    assert isinstance(call, calls.ToolCall)
    assert tool_schema.find_problem(parameters, call.arguments) is None


def test_optional_properties_share_their_states():
  """Not one chain of states for each property that may be the first."""
  values = {f'property {i}': {'type': 'string'} for i in range(60)}
  automaton = byte_grammars.json_schema({'type': 'object', 'properties': values})
  assert len(automaton.goto) < 60 * 30
  for keys in ([], [0], [59], [3, 7, 58]):
    text = json.dumps({f'property {i}': 'x' for i in keys})
    assert _fits(automaton, text) and not _fits(automaton, text[:-1] + ', }')
