"""Messages to tokens, through the tokenizer's own chat template.

A conversation grows by concatenation and is never encoded again:

  prompt(messages) + reply + delta(messages) + reply + delta(messages) + ...

where a reply is what the policy sampled, its stop token included. As text this equals the
template's own rendering, unless the template rewrites the past (Qwen3 drops earlier
thinking): then the tokens stay what the policy has seen and sampled.
"""

from collections.abc import Mapping, Sequence
import re
from typing import Any

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import tokenizer as tokenizer_lib

CUT = '\n[output cut]'

# Stand-ins in a rendering. No template's own words contain them.
_REPLY, _MARK = 'qzreplyqz', 'qzmarkqz'


class Chat:
  """Renders and encodes messages; decodes replies.

  What a tool says is data. A control token in it ('<|im_end|>', '<tool_call>') becomes
  ordinary text, and what exceeds `max_tool_tokens` is cut and marked with CUT.

  Attributes:
    stop_ids: The ids that end a reply: the template's end of turn, then the generation
      config's.
  """

  def __init__(
    self,
    tokenizer,
    *,
    max_tool_tokens: int = 1024,
    template_kwargs: Mapping[str, Any] | None = None,
  ):
    """Studies the template.

    Args:
      tokenizer: From `tokenizer.load`.
      max_tool_tokens: Of one tool message, before a template quotes it.
      template_kwargs: For every rendering, such as {'enable_thinking': False}.

    Raises:
      ValueError: No chat template, or one whose turns do not end with a control token.
    """
    if not tokenizer.chat_template:
      raise ValueError(
        f'tokenizer {tokenizer.name_or_path} has no chat template; add "chat_template" '
        'to its tokenizer_config.json.'
      )
    self.tokenizer = tokenizer
    self._template_kwargs = dict(template_kwargs or {})
    self._encode_plain = tokenizer_lib.plain_twin(tokenizer)
    self._control = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
    longest_first = sorted(self._control, key=len, reverse=True)
    self._split = re.compile('(' + '|'.join(map(re.escape, longest_first)) + ')').split
    self._max_tool_tokens = max_tool_tokens
    self._max_kept_tokens = max_tool_tokens - len(self._encode_plain(CUT))
    if self._max_kept_tokens < 1:
      raise ValueError(f'max_tool_tokens={max_tool_tokens} has no room for {CUT!r}.')
    self._end = self._end_of_turn()
    eos = tokenizer_lib.eos_ids(tokenizer)
    self.stop_ids = tuple(dict.fromkeys([self._control[self._end], *eos]))

  def prompt(
    self,
    messages: Sequence[types.Message],
    tools: Sequence[dict] = (),
    **template_kwargs,
  ) -> np.ndarray:
    """Encodes a whole context and the opening of the assistant's turn: int32 [T]."""
    return self._encode(self._render(messages, tools, **template_kwargs))

  def delta(self, messages: Sequence[types.Message], **template_kwargs) -> np.ndarray:
    """Encodes what follows a reply: the rest of its turn, `messages`, the next opening.

    Returns:
      int32 [T], to be fed after the reply's sampled stop token. A reply that ended
      otherwise needs `stop_ids[0]` in between, which is no action of the policy.
    """
    tail = self._after_reply(messages, **template_kwargs)
    tail[0] = tail[0].removeprefix(self._end)
    return self._encode(tail)

  def reply(self, text: str) -> np.ndarray:
    """Encodes a reply and its stop token, for supervised text: int32 [T].

    What the policy sampled is never encoded again; this is for replies of others.
    """
    return np.append(self._encode([text]), self.stop_ids[0]).astype(np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    """The text of a reply, without the stop token that ended it."""
    ids = list(ids)
    return self.text(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

  def text(self, ids: Sequence[int]) -> str:
    """The exact text of any tokens, control tokens included; for people."""
    return self.tokenizer.decode(list(ids), skip_special_tokens=False)

  def _end_of_turn(self) -> str:
    """The control token that the template writes after a reply."""
    tail = self._after_reply([{'role': 'user', 'content': 'x'}])[0]
    end = self._split(tail)[1:2]
    if not any(end) or not tail.startswith(end[0]):
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} writes {tail[:20]!r} after '
        'a reply; it must begin with a control token, which the policy samples to stop.'
      )
    return end[0]

  def _after_reply(self, messages, **template_kwargs) -> list[str]:
    """Renders a conversation with a stand-in reply, and takes what follows it."""
    opening = [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': _REPLY}]
    parts = self._render([*opening, *messages], **template_kwargs)
    return [parts[0].partition(_REPLY)[2], *parts[1:]]

  def _render(self, messages, tools=(), **template_kwargs) -> list[str]:
    """Renders to [template, tool's words, template, tool's words, ..., template].

    A mark on either side of what a tool says finds it again, as the template wrote it
    (Llama 3 quotes it as JSON). The blanks outside the marks are the template's to strip.
    """
    messages = [self._cut(message) for message in messages]
    seen, mark = repr((messages, tools)), _MARK
    while mark in seen:
      mark += 'x'
    text = self.tokenizer.apply_chat_template(
      [_mark(message, mark) for message in messages],
      tools=list(tools) or None,
      tokenize=False,
      add_generation_prompt=True,
      **{**self._template_kwargs, **template_kwargs},
    )
    return text.split(mark)

  def _cut(self, message: types.Message) -> types.Message:
    """Cuts what a tool says to its first tokens.

    Only the first characters, 32 a token, are looked at: 10 MB cost no more than 10 kB.
    """
    if message['role'] != 'tool':
      return message
    text = message['content']
    if not isinstance(text, str):
      raise ValueError(f"a tool message's content must be a string, not {type(text)}.")
    head = text[: 32 * self._max_tool_tokens]
    ids = self._encode_plain(head)
    if len(head) == len(text) and len(ids) <= self._max_tool_tokens:
      return message
    kept = self.tokenizer.decode(ids[: self._max_kept_tokens])
    # Half a character at the end decodes to the replacement character.
    return {**message, 'content': kept.rstrip('\ufffd') + CUT}

  def _encode(self, parts: Sequence[str]) -> np.ndarray:
    """Encodes what `_render` returns: control tokens count in the template's parts only.

    All that lies between two control tokens is encoded in one piece, so that the tokens
    are those of the model's own training.
    """
    ids, plain = [], ''
    for i, part in enumerate(parts):
      pieces = [part] if i % 2 else self._split(part)
      for j, piece in enumerate(pieces):
        if j % 2:
          ids += [*self._encode_plain(plain), self._control[piece]]
          plain = ''
        else:
          plain += piece
    return np.array(ids + self._encode_plain(plain), np.int32)


def _mark(message: types.Message, mark: str) -> types.Message:
  """Puts a mark on either side of what a tool says, inside the blanks around it."""
  if message['role'] != 'tool':
    return message
  text = message['content']
  inner = text.strip()
  before, _, after = text.partition(inner) if inner else (text, '', '')
  return {**message, 'content': before + mark + inner + mark + after}
