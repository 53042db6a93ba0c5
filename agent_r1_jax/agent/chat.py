"""Encodes messages as tokens, with the tokenizer's own chat template.

A conversation grows by concatenation and is never encoded again:

  encode_prompt(messages) + reply + encode_delta(messages) + reply + ...

A reply is the tokens that the policy sampled, including its stop token. The text equals
the template's own rendering, unless the template rewrites the past (Qwen3 drops earlier
thinking): the tokens then remain those that the policy has seen and sampled.

Control tokens ('<|im_end|>', '<tool_call>') come only from the template, from text that
a task marks as `types.ControlText`, and from the policy. Everything else is data: a
question, a passage, a tool's output or description, a simulated user. In data, the name
of a control token is encoded as ordinary characters.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import automata, control_tokens, template_forms
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.agent import pictures as pictures_lib
from agent_r1_jax.agent import renderer as renderer_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib


class TooLongError(ValueError):
  """A text has more characters than `max_tokens` of the longest tokens could hold."""


class Chat(renderer_lib.Renderer):
  """Renders and encodes messages; decodes replies.

  Tool outputs longer than `max_tool_tokens` are cut, with a mark.

  Assistant messages stand for sampled text (a worked example, a repeated history), so
  control tokens in them are encoded as such, except those that only a template writes:
  those around a user's message, and those that end a reply. Text from `decode` records
  which control tokens were sampled, and exactly these are encoded as control tokens.

  Attributes:
    stop_ids: The ids that end a reply: the template's end of turn, then those of the
      generation config.
    format: How the model writes tool calls.
    detected: The format in which the template writes calls; None if unknown.
    supports_tools: Whether the template describes tools and calls in `format`.
    answer_role: The role in which the template writes tools' answers; None if they are
      written in a user message, in the form of `format` or our own.
  """

  def __init__(
    self,
    tokenizer,
    *,
    stop_strings: Sequence[str] = (),
    pictures: pictures_lib.Reader | None = None,
    **options: Any,
  ):
    """Analyses the template of a tokenizer from `tokenizer.load`.

    `options` are those of config.Chat (see Renderer). `pictures` reads pictures; None if
    the model takes no pictures.

    Raises:
      ValueError: There is no chat template, its turns do not end with a control token, or
        the model takes pictures and the tokenizer lacks their control tokens.
    """
    if not tokenizer.chat_template:
      raise ValueError(
        f'tokenizer {tokenizer.name_or_path} has no chat template; add "chat_template" '
        'to its tokenizer_config.json.'
      )
    form = pictures.form if pictures else pictures_lib.QWEN
    super().__init__(tokenizer, picture_form=form, **options)
    ids = self._control.ids
    self._stops: dict[int, types.Automaton] = {}
    self._longest_token = tokenizer_lib.longest_token(tokenizer)
    self._pictures = pictures
    if pictures and (missing := {*form.tokens} - {*ids}):
      text = f'tokenizer {tokenizer.name_or_path} has no {" ".join(sorted(missing))}'
      raise ValueError(f'{text}, which stand for a picture: add them as special tokens.')
    self._stop_strings = (*stop_strings, *self.format.stop_strings)
    self._end = self._find_end_of_turn()
    prompt = self._apply([template_forms.USER])
    last = [match.start() for match in self._control.pattern.finditer(prompt)]
    self._start = prompt[max(last, default=0) :]
    eos = tokenizer_lib.eos_ids(tokenizer)
    ends = [ids[end] for end in self.format.ends if end in ids] or [ids[self._end]]
    self.stop_ids = tuple(dict.fromkeys([*ends, *eos]))
    frame = self._control.pattern.findall(
      self._apply([template_forms.USER], add_generation_prompt=False)
    )
    names = self._control.names
    self._control.never_sample(
      *(frame if not self.format.ends else ()),  # With `ends`, the policy writes frames.
      *(names[i] for i in self.stop_ids if i in names),
      *(form.tokens if pictures else ()),
    )

  def stop_automaton(self, vocab_size: int) -> types.Automaton:
    """Returns the automaton that ends a reply, cached by vocabulary size."""
    if vocab_size not in self._stops:
      self._stops[vocab_size] = automata.stop(*self.find_stops(vocab_size))
    return self._stops[vocab_size]

  def find_stops(
    self, vocab_size: int, stop_strings: Sequence[str] = ()
  ) -> tuple[list[int], int, Sequence[str], Sequence[bytes]]:
    """Returns the arguments of automata.stop, with additional stop strings."""
    strings = (*self._stop_strings, *stop_strings)
    # A stop string may be a control token, which has no bytes.
    ids = [*self.stop_ids, *(i for s, i in self._control.ids.items() if s in strings)]
    return ids, vocab_size, strings, self.token_bytes if strings else ()

  @functools.cached_property
  def token_bytes(self) -> list[bytes]:
    """The bytes of each of the tokenizer's tokens, from tokenizer.token_bytes."""
    return tokenizer_lib.token_bytes(self.tokenizer)

  def encode_prompt(
    self,
    messages: Sequence[types.Message],
    tools: Sequence[dict] = (),
    *,
    max_tokens: float = math.inf,
    **template_kwargs,
  ) -> np.ndarray:
    """Encodes a complete context and the start of the assistant's turn as int32 [T].

    Raises:
      TooLongError: It certainly has more than `max_tokens`; it is not encoded.
      ValueError: A message has no role or no content, the template rejects the messages,
        or it cannot describe tools and tools_in_prompt is 'refuse'.
    """
    if not messages:
      raise ValueError('a prompt needs at least one message; there is none.')
    try:
      rendered = self._render_prompt(messages, tools, **template_kwargs)
    except ValueError:
      # After a failed call, Mistral's template renders turns only one at a time.
      if all(m.get('role') != 'assistant' for m in messages[1:]):
        raise
      options = {'tools': tools, 'max_tokens': max_tokens, **template_kwargs}
      parts = [ids for ids, _ in self.encode_turns(messages, **options)]
      if messages[-1]['role'] == 'assistant':
        parts.append(self.encode_delta((), history=messages, **options))
      return np.concatenate(parts)
    ids = self._encode(*rendered, max_tokens, first=True)
    return self._insert_pictures(ids, messages)

  def encode_turns(
    self,
    messages: Sequence[types.Message],
    tools: Sequence[dict] = (),
    *,
    max_tokens: float = math.inf,
    **template_kwargs,
  ) -> list[tuple[np.ndarray, bool]]:
    """Encodes a conversation as a rollout would: prompt, reply, delta, reply, ...

    Returns:
      The tokens of each part, int32 [T], and whether it is a reply.
    """
    messages = [*map(messages_lib.check, messages)]
    parts, start = [], 0
    options = {'tools': tools, 'max_tokens': max_tokens, **template_kwargs}
    for i, message in enumerate(messages):
      is_reply = message['role'] == 'assistant'
      # The messages between two replies are encoded together, as in a rollout.
      if not is_reply and i + 1 < len(messages):
        continue
      context = messages[start : i if is_reply else i + 1]
      if parts:
        last = int(parts[-1][0][-1])
        ids = self.encode_delta(context, last, history=messages[:start], **options)
      else:
        ids = self.encode_prompt(context, **options)
      parts.append((ids, False))
      if is_reply:
        parts.append((self.encode_reply(message, max_tokens=max_tokens), True))
      start = i + 1
    return parts

  def encode_delta(
    self,
    messages: Sequence[types.Message],
    last_token: int | None = None,
    *,
    history: Sequence[types.Message] = (),
    tools: Sequence[dict] = (),
    max_tokens: float = math.inf,
    **template_kwargs,
  ) -> np.ndarray:
    """Encodes the text after a reply: the rest of its turn, `messages`, the next start.

    `last_token` is the last token of the reply; None stands for a stop id. If it is not a
    stop id, because a stop string or a limit ended the reply, the template's end of turn
    comes first; it is not an action of the policy.

    `history` has the messages before the reply, and `tools` the prompt's tools: how
    templates write later turns depends on them. Templates get the history's system and
    user messages.

    Returns:
      int32 [T].
    """
    tail, mark = self._render_after_reply(messages, history, tools, **template_kwargs)
    if not tail.startswith((self._end, *self.format.ends)):
      tail = self._end + tail
    ids = self._insert_pictures(self._encode(tail, mark, max_tokens), messages)
    ended = last_token is None or last_token in self.stop_ids
    if last_token is not None and self.format.answer_begin:
      ended = last_token == ids[0]  # There are two ends; compare with the one written.
    return ids[1:] if ended else ids

  def attach(self, ids: np.ndarray, messages: Sequence[types.Message]) -> types.Prompt:
    """Makes a prompt from tokens and the pictures of their messages."""
    return types.Prompt(ids, self.list_pictures(messages))

  def list_pictures(self, messages: Sequence[types.Message]) -> list[np.ndarray]:
    """Reads the pictures of messages, in order, uint8 [H, W, 3] each.

    Raises:
      ValueError: A picture cannot be read, or the model takes no pictures.
    """
    urls = [u for message in messages for u in pictures_lib.find_addresses(message)]
    if urls and self._pictures is None:
      raise ValueError(
        f'a message has a picture, and the model of {self.tokenizer.name_or_path} sees '
        'none: there is no preprocessor_config.json in its directory.'
      )
    return [self._pictures.read(url) for url in urls] if self._pictures else []

  def encode_reply(
    self, reply: str | types.Message, *, max_tokens: float = math.inf
  ) -> np.ndarray:
    """Encodes a reply and its stop token as int32 [T], for supervised training.

    It encodes a message's content. If the message has calls or thoughts, or the prompt
    opens a thought, it encodes the template's rendering, or the chat format's. Sampled
    replies are never encoded again.

    Raises:
      TooLongError: See encode_prompt.
      ValueError: The message has no content, or a call that cannot be read.
    """
    message: types.Message = (
      {'role': 'assistant', 'content': reply} if isinstance(reply, str) else reply
    )
    message = messages_lib.write_text(message)
    ends = [self._control.names.get(i, self._end) for i in self.stop_ids]
    end = ends[0]
    opens = self._start.rstrip().endswith('<think>')
    if message.get('tool_calls') or message.get('reasoning_content') or opens:
      text, mark, found = self._render_reply(message, ends)
      end = found if self.format.ends else end
    else:
      mark = control_tokens.find_unused_mark(message['content'])
      text = self.format.frame(self._control.hide_unsampled(message['content'], mark))
    # Encoded after the end of the prompt, since a tokenizer may treat a text's start
    # differently.
    before = self._encode(self._start, mark)
    ids = self._encode(self._start + text + end, mark, max_tokens)
    if (ids[: len(before)] == before).all():
      return ids[len(before) :]
    return self._encode(text + end, mark, max_tokens)

  def encode_text(self, text: str, *, max_tokens: float = math.inf) -> np.ndarray:
    """Encodes a text with its control tokens, without a template, as int32 [T].

    Adds the tokens that the tokenizer adds to a text, such as a BOS.

    Raises:
      TooLongError: See encode_prompt.
    """
    mark = control_tokens.find_unused_mark(text)
    ids = self._encode(text, mark, max_tokens, first=True)
    before, after = tokenizer_lib.find_affixes(self.tokenizer)
    return np.array([*before, *ids, *after], np.int32)

  def encode_data(self, text: str) -> np.ndarray:
    """Encodes data, such as an answer, and a stop token as int32 [T]."""
    return np.array([*self._encode_plain(text), self.stop_ids[0]], np.int32)

  def decode(self, ids: Sequence[int]) -> types.ControlText:
    """Returns the text of a reply, without the stop token that ended it.

    The text records which control tokens were sampled as such and which were spelled.
    """
    ids = list(ids)
    ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
    return self._control.mark_sampled(ids, self.decode_exactly)

  def decode_exactly(self, ids: Sequence[int]) -> str:
    """Returns the exact text of any tokens, including control tokens, for people.

    The text of a picture's token is empty.
    """
    ids = [i for i in ids if i < types.FIRST_PICTURE_ID]
    return self.tokenizer.decode(ids, skip_special_tokens=False)

  def get_bytes(self, token: int) -> bytes:
    """Returns the bytes of one token, which may be part of a character.

    For a control token they are its name. Without a byte-level tokenizer, tokens are
    complete characters.
    """
    known = self._known_bytes[token] if token < len(self._known_bytes) else b''
    return known or self.decode_exactly([token]).encode()

  @functools.cached_property
  def _known_bytes(self) -> list[bytes]:
    """`token_bytes`; empty if the tokenizer is not byte-level."""
    try:
      return self.token_bytes
    except ValueError:
      return []

  def _find_end_of_turn(self) -> str:
    """Returns the control token that the template writes after a reply."""
    tail, _ = self._render_after_reply([template_forms.USER])
    end = self._control.pattern.match(tail)
    if not end:
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} writes {tail[:20]!r} after '
        'a reply; it must begin with a control token, which the policy samples to stop.'
      )
    return end[0]

  def _insert_pictures(self, ids: np.ndarray, messages) -> np.ndarray:
    """Replaces the renderer's placeholders with the ids of pictures."""
    pictures = self.list_pictures(messages)
    if not pictures or not self._pictures:
      return ids
    places = np.flatnonzero(ids == self._control.ids[self._picture_form.tokens[1]])
    if len(places) != len(pictures):
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} writes {len(places)} of '
        f'{len(pictures)} pictures.'
      )
    shown = [types.make_picture_ids(x, self._pictures.side) for x in pictures]
    first, *others = np.split(ids, places)  # The others begin with a placeholder.
    pieces = [y for x, text in zip(shown, others, strict=True) for y in (x, text[1:])]
    return np.concatenate([first, *pieces]).astype(np.int32)

  def _encode(
    self, text: str, mark: str, max_tokens: float = math.inf, *, first: bool = False
  ) -> np.ndarray:
    """Encodes the renderer's text with its mark."""
    if len(text) > max_tokens * self._longest_token:
      raise TooLongError(
        f'the text has {len(text)} characters, which are more than {max_tokens} tokens'
      )
    return self._control.encode(text, mark, first=first)
