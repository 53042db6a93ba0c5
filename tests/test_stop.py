"""Stop ids and stop strings, against a search in the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import stop as stop_lib

_advance = jax.jit(stop_lib.advance)


def _ends(stop, *replies):
  """Index of the token that ends each reply of one length, or None; rows side by side."""
  state = jnp.zeros(len(replies), jnp.int32)
  ends = [None] * len(replies)
  for i, tokens in enumerate(np.transpose(replies)):
    state, ended = _advance(stop, state, jnp.asarray(tokens, jnp.int32))
    for b, e in enumerate(np.asarray(ended)):
      ends[b] = i if e and ends[b] is None else ends[b]
  return ends


def _search(strings, pieces):
  """The same, by its definition."""
  text = b''
  for i, piece in enumerate(pieces):
    # Only what this piece completes: an earlier match would have ended the reply.
    text += piece
    if any(s.encode() in text for s in strings):
      return i
  return None


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
def test_strings_are_found_where_a_search_finds_them(strings):
  rng = np.random.default_rng(0)
  e = 'é'.encode()
  vocabulary = [
    b'a',
    b'b',
    b'c',
    b'ab',
    b'ba',
    b'aa',
    b'bcab',
    b'xa',
    b'bx',
    e[:1],
    e[1:],
  ]
  vocabulary += [b'aab', b'ab' + e, b'abababab', b'zzz']
  stop = stop_lib.stop([], strings, vocabulary)
  replies = rng.integers(0, len(vocabulary), (64, 12))
  expected = [_search(strings, [vocabulary[t] for t in reply]) for reply in replies]
  assert _ends(stop, *replies) == expected
  # Both happen: a reply that ends (after its first token) and one that does not.
  assert any(expected)


def test_a_string_across_tokens_inside_a_token_and_overlapping_itself():
  vocabulary = [b'<', b'/ans', b'wer>', b'x</answer>y', b'</ans', b'er>', b'/']
  stop = stop_lib.stop([], ['</answer>'], vocabulary)
  replies = {
    (0, 1, 2, 0): 2,  # across three tokens
    (6, 3, 0, 0): 1,  # inside one
    (4, 4, 2, 0): 2,  # begun twice
    (4, 5, 2, 0): None,  # interrupted
    (0, 0, 1, 2): 3,  # its first character repeated
  }
  assert _ends(stop, *replies) == list(replies.values())


def test_a_control_token_separates():
  """The text of a reply shows it, so the string is not there."""
  stop = stop_lib.stop([], ['ab'], [b'a', b'b', b'', b'ab'])
  assert _ends(stop, (0, 2, 1, 2), (0, 1, 2, 2), (2, 2, 3, 2)) == [None, 1, 2]


def test_tokens_beyond_the_tokenizer_are_no_text():
  """A model's vocabulary may be padded; the last token's text is not theirs."""
  stop = stop_lib.stop([], ['ab'], [b'a', b'b', b'ab'])
  assert _ends(stop, (7, 3, 3), (0, 5, 1), (9, 0, 1)) == [None, None, 2]


def test_ids_and_strings_end_a_reply_side_by_side():
  stop = stop_lib.stop([3, 4], ['ab'], [b'a', b'b', b'c', b'', b''])
  assert _ends(stop, (0, 2, 3), (2, 4, 0), (0, 1, 3), (2, 2, 2)) == [2, 1, 1, None]


def test_ids_alone_need_no_table():
  stop = stop_lib.stop((5, 2))
  assert stop.table is None
  assert _ends(stop, (1, 2), (5, 1), (0, 1)) == [1, 0, None]


def test_without_ids_and_strings_nothing_ends():
  assert _ends(stop_lib.stop(()), (0, 1, 2, 3)) == [None]


def test_with_a_real_vocabulary():
  tokenizer = tiny.chat().tokenizer
  pieces = tokenizer_lib.token_bytes(tokenizer)
  stop = stop_lib.stop(tiny.chat().stop_ids, ['the city', '</answer>'], pieces)
  for text, found in (
    ('name of the city of the river', True),
    ('the  city', False),
    ('answer</answer>', True),
    ('</answer', False),
  ):
    ids = tokenizer.encode(text, add_special_tokens=False)
    (end,) = _ends(stop, ids)
    assert (end is not None) == found
    if found:
      before, upto = (tokenizer.decode(ids[:n]) for n in (end, end + 1))
      strings = ('the city', '</answer>')
      assert any(s in upto for s in strings) and not any(s in before for s in strings)
  assert _ends(stop, [tokenizer.eos_token_id]) == [0]


def test_mistakes_are_named():
  with pytest.raises(ValueError, match='stop string is empty'):
    stop_lib.stop([], ['a', ''], [b'a'])
  with pytest.raises(ValueError, match='need token_bytes'):
    stop_lib.stop([], ['a'])
