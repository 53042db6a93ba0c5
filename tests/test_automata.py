"""Automata that are made of text: stop strings against a search, regular expressions."""

import itertools
import json
import os
import re
import subprocess

import numpy as np
import pytest
import tiny

from agent_r1_jax.agent import automata, byte_automata
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.grammars import byte_grammars, compiler, regex_automata


def _ends(stop, *replies):
  """Index of the token that ends each reply, or None."""
  ends = []
  for tokens in replies:
    state, end = 0, None
    for i, token in enumerate(tokens):
      state = int(stop.table[state, stop.classes[token]])
      if stop.ends[state]:
        end = i
        break
    ends.append(end)
  return ends


def _stop(ids, strings=(), token_bytes=()):
  """Of ten tokens, or as many as have bytes."""
  return automata.stop(ids, max(10, len(token_bytes)), strings, token_bytes)


def _search(strings, pieces):
  """The same, by its definition."""
  text = b''
  for i, piece in enumerate(pieces):
    # Only what this piece completes: an earlier match would have ended the reply.
    text += piece
    if any(s.encode() in text for s in strings):
      return i
  return None


class TestStop:
  @pytest.mark.parametrize(
    'strings',
    [
      ['ab'],
      ['aab', 'ab', 'ba'],
      ['abab', 'bb'],
      ['aaaa'],
      ['abcab', 'bca', 'c'],
      ['cabac', 'abab', 'bacab'],
      ['é', 'aé'],
    ],
  )
  def test_strings_are_found_where_a_search_finds_them(self, strings):
    rng = np.random.default_rng(0)
    e = 'é'.encode()
    vocabulary = [b'a', b'b', b'c', b'ab', b'ba', b'aa', b'bcab', b'xa', b'bx']
    vocabulary += [e[:1], e[1:], b'aab', b'ab' + e, b'abababab', b'zzz']
    stop = _stop([], strings, vocabulary)
    replies = rng.integers(0, len(vocabulary), (64, 12))
    expected = [_search(strings, [vocabulary[t] for t in reply]) for reply in replies]
    assert _ends(stop, *replies) == expected
    # Both happen: a reply that ends (after its first token) and one that does not.
    assert any(expected)

  def test_no_stop_string_matches_across_a_control_token(self):
    """The text of a reply shows it, so the string is not there."""
    stop = _stop([], ['ab'], [b'a', b'b', b'', b'ab'])
    assert _ends(stop, (0, 2, 1, 2), (0, 1, 2, 2), (2, 2, 3, 2)) == [None, 1, 2]

  def test_padding_ids_of_the_vocabulary_match_no_stop_string(self):
    """A model's vocabulary may be padded; the last token's text is not theirs."""
    stop = _stop([], ['ab'], [b'a', b'b', b'ab'])
    assert _ends(stop, (7, 3, 3), (0, 5, 1), (9, 0, 1)) == [None, None, 2]

  def test_ids_and_strings_end_a_reply_side_by_side(self):
    stop = _stop([3, 4], ['ab'], [b'a', b'b', b'c', b'', b''])
    assert _ends(stop, (0, 2, 3), (2, 4, 0), (0, 1, 3), (2, 2, 2)) == [2, 1, 1, None]

  def test_ids_alone_need_two_states(self):
    stop = _stop((5, 2))
    assert len(stop.table) == 2 and not stop.restricts
    assert _ends(stop, (1, 2), (5, 1), (0, 1)) == [1, 0, None]

  def test_periodic_strings_of_any_length_take_a_state_a_byte(self):
    strings = ['ab' * 400, 'a' * 100, 'é' * 50]
    goto = byte_automata.build_string_search([s.encode() for s in strings])
    # The empty prefix, those that are not whole strings, and the end; 'a' is shared.
    assert len(goto) == 1 + 799 + 98 + 99 + 1
    vocabulary = [b'ab', b'b', b'a', 'é'.encode(), b'b' + b'ab' * 399]
    stop = _stop([], strings, vocabulary)
    replies = [[0] * 400, [2] * 100, [3] * 50, [1, 2, 4], [0] * 200 + [2] + [0] * 400]
    assert _ends(stop, *replies) == [399, 99, 49, 2, 600]

  def test_stop_refuses_empty_and_long_strings_and_unknown_ids(self):
    with pytest.raises(ValueError, match='2 stop strings have 1,025 bytes'):
      _stop([], ['é' * 512, 'a'], [b'a'])
    with pytest.raises(ValueError, match='stop string is empty'):
      _stop([], ['a', ''], [b'a'])
    with pytest.raises(ValueError, match='need token_bytes'):
      _stop([], ['a'])
    for outside in (-1, 10):
      with pytest.raises(ValueError, match=f'stop id {outside} is not one of 10 tokens'):
        _stop([2, outside])


def _search_by_prefixes(strings):
  """The automaton by its definition, with a state for each prefix of a string."""
  prefixes = {s[:i] for s in strings for i in range(len(s))}

  def step(text, byte):
    text += bytes([byte])
    if text.endswith(tuple(strings)):
      return None
    return next(text[i:] for i in range(len(text) + 1) if text[i:] in prefixes)

  return step


@pytest.mark.parametrize('seed', range(40))
def test_the_search_is_the_one_by_prefixes(seed):
  """State by state, over strings that overlap, contain and begin each other."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, 9, rng.integers(1, 5))
  strings = [bytes(rng.choice([*b'abc'], n, p=[0.5, 0.4, 0.1]).tolist()) for n in lengths]
  goto, step = byte_automata.build_string_search(strings), _search_by_prefixes(strings)
  states, waiting = {b'': 0}, [b'']
  for text in waiting:
    for byte in b'abcx':
      after, state = step(text, byte), int(goto[states[text], byte])
      if after is None:
        assert state == len(goto) - 1
      elif states.setdefault(after, state) == state and after not in waiting:
        waiting.append(after)
      assert after is None or states[after] == state
  assert sorted([*states.values(), len(goto) - 1]) == [*range(len(goto))]
  assert (goto[-1] == len(goto) - 1).all()


_PIECES = tokenizer_lib.token_bytes(tiny.chat().tokenizer)
_EOS = tiny.chat().tokenizer.eos_token_id


def _encode(text):
  return tiny.chat().tokenizer.encode(text, add_special_tokens=False)


def _walk(automaton, tokens):
  """The state after the tokens; -1 where one of them was forbidden."""
  state = 0
  for token in tokens:
    state = int(automaton.table[state, automaton.classes[token]])
    if state < 0:
      break
  return state


def _random_regex(rng, depth=3):
  """A regular expression over a, b and c, of which Python's is the reference."""
  kind = rng.integers(0, 6 if depth else 2)
  part = lambda: _random_regex(rng, depth - 1)
  if kind < 2:
    return str(rng.choice(['a', 'b', 'c', 'ab', '[bc]', '']))
  if kind < 4:
    return part() + part()
  if kind == 4:
    return f'({part()}|{part()})'
  return f'({part()}){rng.choice(["*", "?", "+", "{0,3}", "{2}"])}'


@pytest.mark.parametrize('seed', range(30))
def test_a_regular_expression_matches_what_pythons_matches(seed):
  """Also where an alternative begins another one, and where a part of a text matches."""
  pattern = _random_regex(np.random.default_rng(seed))
  goto, matches = regex_automata.compile_regex(pattern)
  for length in range(6):
    for letters in itertools.product('abc', repeat=length):
      state, text = 0, ''.join(letters)
      for byte in text.encode():
        state = int(goto[state, byte]) if state >= 0 else -1
      assert (state >= 0 and matches[state]) == bool(re.fullmatch(pattern, text)), text


class TestLimits:
  def test_a_long_string_takes_few_states(self):
    """10 for each character, which may have 4 bytes or be escaped; it took 2**n."""
    automaton = byte_grammars.json_schema({'type': 'string', 'maxLength': 1000})
    assert len(automaton.goto) < 10_100

    def read(text):
      state = 0
      for byte in f'"{text}"'.encode():
        state = int(automaton.goto[state, byte]) if state >= 0 else -1
      return state >= 0 and automaton.stop[state] >= 0

    for unit in ('x', '😀', r'\n'):
      assert read(unit * 1000) and not read(unit * 1001) and read(unit * 7)

  def test_an_expression_of_too_many_states_is_refused(self):
    with pytest.raises(ValueError, match='states, and 32,768 are allowed'):
      regex_automata.compile_regex('(a|b)*a(a|b){14}')
    with pytest.raises(ValueError, match='131,07. states, and 65,536 are allowed'):
      regex_automata.compile_regex('(a|b)*a(a|b){16}')

  def test_classes_of_tokens_are_limited_as_they_are_found(self, monkeypatch):
    """Not once all of them are there: each takes a column of all states."""
    monkeypatch.setattr(byte_automata, '_MAX_CELLS', 500)
    search = byte_automata.build_string_search([b'abcdefghi'])
    pieces = [bytes([a, b]) for a in range(97, 117) for b in range(97, 117)]
    assert len(byte_automata.group_tokens(search, pieces[:20])[1]) == 10
    many = byte_automata.build_string_search([bytes(range(97, 117))])
    with pytest.raises(ValueError, match='has 5.. states times classes of tokens, and'):
      byte_automata.group_tokens(many, pieces)

  def test_a_grammar_of_too_many_sets_of_tokens_is_refused(self, monkeypatch):
    monkeypatch.setattr(byte_automata, '_MAX_SETS', 3)
    lift = lambda pattern: byte_automata.lift_to_tokens(
      byte_grammars.regex(pattern), [_EOS], _PIECES, tiny.VOCAB
    )
    assert lift('a*')['table'].dtype == np.int16
    with pytest.raises(ValueError, match='tokens that may follow, and 3'):
      lift('abcd')

  def test_what_takes_too_long_is_killed_in_its_process(self, monkeypatch):
    """The library would compute for hours, and cannot be interrupted."""
    monkeypatch.setattr(byte_grammars, 'PROCESSOR_SECONDS', 1)
    before = _children()
    with pytest.raises(ValueError, match='more than 1 s .* or 1,024 MB'):
      compiler.compile_and_wait(
        byte_grammars.regex, ['(a{1,300}){1,300}'], [_EOS], _PIECES, tiny.VOCAB
      )
    assert _children() <= before  # One of an earlier test may have ended.

  def test_a_grammar_that_is_nested_too_deeply_is_refused(self):
    schema: dict = {'type': 'string'}
    for _ in range(1000):
      schema = {'type': 'array', 'items': schema}
    with pytest.raises(ValueError, match='nested too deeply; flatten it'):
      compiler.compile_and_wait(
        byte_grammars.json_schema, [schema], [_EOS], _PIECES, tiny.VOCAB
      )

  @pytest.mark.parametrize(
    'schema, message',
    [
      ({'type': 'object', 'properties': 3}, r'at \$.properties of response_format: 3 is'),
      ({'type': 'strin'}, r"at \$.type of response_format: 'strin' is"),
      ({'type': 'object', 'required': 'a'}, r'at \$.required of response_format'),
      ({'type': 'string', 'maxLength': -1}, r'at \$.maxLength of response_format: -1 is'),
    ],
  )
  def test_an_invalid_schema_is_refused_by_its_path(self, schema, message):
    with pytest.raises(ValueError, match=message):
      byte_grammars.json_schema(schema)

  def test_an_expression_that_matches_no_text_is_refused(self):
    with pytest.raises(ValueError, match='a.b'):
      regex_automata.compile_regex('a^b')
    with pytest.raises(ValueError, match='matches no text'):
      regex_automata.compile_regex('ca*^b')

  @pytest.mark.parametrize('pattern', ['a)|(b', '(a', '[b-a]', r'\1'])
  def test_a_malformed_expression_is_refused(self, pattern):
    with pytest.raises(ValueError, match='Failed to build DFA'):
      regex_automata.compile_regex(pattern)


def _children(parent=None):
  """The processes for functions that one, by default this one, has started."""
  command = ['ps', '-o', 'pid=,args=', '--ppid', str(parent or os.getpid())]
  lines = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
  return {line.split()[0] for line in lines if 'isolated' in line}


class TestRegex:
  pattern = r'(yes|no|(a|b)+c?) [0-9]{1,3}'

  def _automaton(self):
    return compiler.compile_and_wait(
      byte_grammars.regex, [self.pattern], [_EOS], _PIECES, tiny.VOCAB
    )

  def test_replies_fit_and_end_only_where_they_do(self):
    automaton = self._automaton()
    for text in ('yes 1', 'no 123', 'abba 7', 'bc 00'):
      assert re.fullmatch(self.pattern, text)
      ended = _walk(automaton, [*_encode(text), _EOS])
      assert ended >= 0 and automaton.ends[ended]
      for n in range(len(text)):
        state = _walk(automaton, _encode(text[:n]))
        assert state >= 0 and not automaton.ends[state]
        fits = bool(re.fullmatch(self.pattern, text[:n]))
        assert (_walk(automaton, [*_encode(text[:n]), _EOS]) >= 0) == fits

  @pytest.mark.parametrize('text', ['maybe 1', 'yes1', 'yes 1234', ' yes 1', 'cab 1'])
  def test_a_text_that_does_not_match_is_forbidden(self, text):
    assert _walk(self._automaton(), _encode(text)) == -1

  def test_other_control_tokens_are_forbidden_everywhere(self):
    automaton = self._automaton()
    silent = [t for t, piece in enumerate(_PIECES) if not piece and t != _EOS]
    silent += [tiny.VOCAB - 1]
    held = ~automaton.ends
    assert (automaton.table[held][:, automaton.classes[silent]] == -1).all()

  def test_in_every_state_something_can_be_said(self):
    assert (self._automaton().table >= 0).any(1).all()

  def test_a_random_walk_fits(self):
    automaton, rng = self._automaton(), np.random.default_rng(0)
    said = set()
    for _ in range(50):
      tokens, state = [], 0
      while not automaton.ends[state]:
        fits = np.flatnonzero(automaton.table[state, automaton.classes] >= 0)
        tokens.append(int(rng.choice(fits)))
        state = _walk(automaton, tokens)
      assert tokens[-1] == _EOS
      text = b''.join(_PIECES[t] for t in tokens).decode()
      assert re.fullmatch(self.pattern, text)
      said.add(text)
    assert len(said) > 20


class TestJsonSchema:
  schema = {
    'type': 'object',
    'properties': {'city': {'type': 'string'}, 'size': {'enum': ['S', 'L']}},
    'required': ['city', 'size'],
  }

  @pytest.mark.parametrize(
    'value, fits',
    [
      ({'city': 'Rome', 'size': 'S'}, True),
      ({'city': '', 'size': 'L'}, True),
      ({'city': 'Rome', 'size': 'M'}, False),
      ({'city': 3, 'size': 'S'}, False),
      ({'size': 'S', 'city': 'Rome'}, False),
      ({'city': 'Rome'}, False),
    ],
  )
  def test_a_reply_is_a_value_of_the_schema(self, value, fits):
    automaton = compiler.compile_and_wait(
      byte_grammars.json_schema, [self.schema], [_EOS], _PIECES, tiny.VOCAB
    )
    state = _walk(automaton, [*_encode(json.dumps(value)), _EOS])
    assert (state >= 0) == fits and (not fits or automaton.ends[state])
