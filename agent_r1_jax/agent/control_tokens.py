"""Distinguishes control tokens from data that spells their names.

In rendered text, an '<|im_end|>' from a passage looks like the template's own. So while
the template renders, placeholders replace the names in data: 'qzmarkqz7zqz' for the
control token with the id 7. For encoding, marks such as 'qzcontrolqz7z' replace the real
control tokens, and each placeholder becomes the name again, in ordinary tokens.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import itertools
import re
from typing import Any

import numpy as np

from agent_r1_jax import types

_MARK, _MARK_END, _CONTROL = 'qzmarkqz', 'zqz', 'qzcontrolqz'


class ControlTokens:
  """The control tokens of a tokenizer.

  Attributes:
    ids: The id of each name.
    names: The name of each id.
    pattern: Matches the names.
  """

  def __init__(
    self,
    tokens: Mapping[int, Any],
    make_encoder: Callable[[str], Callable[[str], list[int]]],
  ):
    """Takes the tokenizer's added tokens, and a function that makes a mark's encoder."""
    self.names = {i: token.content for i, token in tokens.items()}
    self.ids = {name: i for i, name in self.names.items()}
    self.pattern = self._never_sampled = _match_any(self.ids)
    words = [token.content for token in tokens.values() if token.single_word]
    self._control = _match_any(self.ids, words)
    self._make_encoder, self._encode_plain = make_encoder, make_encoder(_CONTROL)

  def never_sample(self, *names: str):
    """Sets the control tokens that only a template writes; initially all of them."""
    self._never_sampled = _match_any(names)

  def hide(self, value: Any, mark: str) -> Any:
    """Replaces control tokens with placeholders in all strings of a value.

    In a ControlText it replaces them in the data parts only.
    """
    return self._hide(value, mark, self.pattern)

  def hide_unsampled(self, value: Any, mark: str) -> Any:
    """Like `hide`, for the policy's text: tokens that it may sample are left alone."""
    return self._hide(value, mark, self._never_sampled)

  def hide_in_message(self, message: types.Message, mark: str) -> types.Message:
    """Hides a message's control tokens, except those that an assistant may sample."""
    hidden = self.hide(message, mark)
    if message['role'] == 'assistant':
      for name in message.keys() & {'content', 'reasoning_content'}:
        hidden[name] = self.hide_unsampled(message[name], mark)
    return hidden

  def _hide(self, value: Any, mark: str, tokens: re.Pattern[str]) -> Any:
    if isinstance(value, types.ControlText):
      parts = enumerate(value.parts)
      return ''.join(self.hide(part, mark) if i % 2 else part for i, part in parts)
    if isinstance(value, str):
      return tokens.sub(lambda match: f'{mark}{self.ids[match[0]]}{_MARK_END}', value)
    if isinstance(value, Mapping):
      hide = lambda inner: self._hide(inner, mark, tokens)
      return {hide(name): hide(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
      return [self._hide(v, mark, tokens) for v in value]
    return value

  def encode(self, text: str, mark: str, *, first: bool = False) -> np.ndarray:
    """Encodes a text in which `mark` begins the placeholders, as int32 [T].

    The text between two control tokens is encoded in one piece, and each control token by
    its settings, so that the tokens match the model's own training. `first` is True if
    nothing comes before the text.
    """
    control = find_unused_mark(text, _CONTROL)
    encode = self._encode_plain if control == _CONTROL else self._make_encoder(control)
    text = self._control.sub(lambda match: f'{control}{self.ids[match[0]]}z', text)
    name = lambda match: self.names[int(match[1])]
    text = re.sub(rf'{mark}(\d+){_MARK_END}', name, text)
    return np.array(encode(text if first else f'{control}z{text}'), np.int32)[not first :]

  def mark_sampled(
    self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]
  ) -> types.ControlText:
    """Decodes tokens, and marks which control tokens are real and which are spelled."""
    text = decode(ids)
    if len(self.pattern.findall(text)) == sum(i in self.names for i in ids):
      return types.ControlText(text)
    pieces, spelt = [], []
    for i in [*ids, -1]:  # -1 flushes the last piece.
      if i < 0 or i in self.names:
        pieces.append((decode(spelt), False))
        pieces.append((self.names.get(i, ''), True))
        spelt = []
      else:
        spelt.append(i)
    return types.ControlText.joined(pieces)


def find_unused_mark(text: str, mark: str = _MARK) -> str:
  """Returns a mark that does not occur in a text."""
  if mark not in text:
    return mark
  found = set(re.findall(rf'{mark}(\d+)', text))
  return next(f'{mark}{i}k' for i in itertools.count() if str(i) not in found)


def _match_any(tokens: Iterable[str], words: Collection[str] = ()) -> re.Pattern[str]:
  """Makes a pattern of control tokens; if one is a prefix of another, the longer matches.

  Tokens in `words` match only as complete words; placeholders count as word boundaries.
  """
  longest_first = sorted(dict.fromkeys(tokens), key=len, reverse=True)
  before, after = rf'(?:(?<!\w)|(?<={_MARK_END}))', rf'(?:(?!\w)|(?={_MARK}))'
  alone = lambda name: before + re.escape(name) + after
  names = [alone(x) if x in words else re.escape(x) for x in longest_first]
  return re.compile('|'.join(names) or '(?!)')
