"""agent/control_tokens.py: names of control tokens, some of which begin others."""

import itertools
import re

import pytest
import tokenizers

from agent_r1_jax import types
from agent_r1_jax.agent import control_tokens

_IDS = {'<|end|>': 100, '<|end|><|end|>': 101, '<think>': 102, '<think>\n': 103}


def _make_encoder(mark):
  """As tokenizer.make_plain_encoder does, for a tokenizer whose ids are code points."""

  def encode(text):
    pieces = re.split(rf'{mark}(\d*)z', text)
    ids = [[int(x or -1)] if i % 2 else map(ord, x) for i, x in enumerate(pieces)]
    return [*itertools.chain(*ids)]

  return encode


@pytest.mark.parametrize('order', list(itertools.permutations(_IDS))[::5])
def test_the_longer_of_two_tokens_is_meant(order):
  added = {_IDS[name]: tokenizers.AddedToken(name) for name in order}
  tokens = control_tokens.ControlTokens(added, _make_encoder)
  text = 'a<|end|><|end|><|end|>b<think>\n<think>c'
  ids = [97, 101, 100, 98, 103, 102, 99]
  assert tokens.encode(text, 'mark').tolist() == ids
  hidden = tokens.hide(text, 'mark')
  assert hidden == 'amark101zqzmark100zqzbmark103zqzmark102zqzc'
  assert tokens.encode(hidden, 'mark').tolist() == [*map(ord, text)]
  tokens.never_sample('<think>', '<think>\n')
  assert tokens.hide_unsampled(text, 'mark') == text.replace(
    '<think>\n', 'mark103zqz', 1
  ).replace('<think>', 'mark102zqz')
  decode = lambda ids: ''.join(tokens.names.get(i) or chr(i) for i in ids)
  assert tokens.mark_sampled(ids, decode) == types.ControlText(text)


def test_a_mark_is_in_no_text():
  text, marks = '', []
  for _ in range(4):
    marks.append(control_tokens.find_unused_mark(text))
    assert marks[-1] not in text
    text += f' {marks[-1]}'
  assert len(control_tokens.find_unused_mark(marks[0] + 'x' * 10_000)) < 20
