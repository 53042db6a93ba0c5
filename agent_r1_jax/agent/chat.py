"""Encodes messages as tokens, with the tokenizer's own chat template.

A conversation grows by concatenation and is never encoded again:

  encode_prompt(messages) + reply + encode_delta(messages) + reply + ...

A reply is what the policy sampled, including its stop token. The text equals the
template's own rendering, unless the template rewrites the past (Qwen3 drops earlier
thinking): the tokens then stay those that the policy has seen and sampled.

Control tokens ('<|im_end|>', '<tool_call>') come only from the template, from text that
a task marks as `types.ControlText`, and from the policy. Everything else is data: a
question, a passage, a tool's output or description, a simulated user. The name of a
control token in data is encoded as ordinary characters.
"""

from collections.abc import Mapping, Sequence
import functools
import math
from typing import Any

import jinja2
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import automata, call_formats, calls, control_tokens
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.agent import pictures as pictures_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib

# Stands for a reply in a rendering; no template's own text contains it.
_REPLY = 'qzreplyqz'
_PROBE_TOOL = {
  'type': 'function',
  'function': {
    'name': 'probe',
    'description': 'Looks.',
    'parameters': {'type': 'object', 'properties': {}},
  },
}


class TooLongError(ValueError):
  """A text has more characters than the longest tokens could stand for."""


class Chat:
  """Renders and encodes messages; decodes replies.

  A tool's output is cut to `max_tool_tokens`, and marked as cut.

  A message of the assistant stands for what the policy sampled (a worked example, a
  repeated history), so control tokens in it are encoded as such, except those that only a
  template writes: those around a user's message, and those that end a reply. In text that
  `decode` returned, exactly those are encoded as control tokens that were sampled so.

  Attributes:
    stop_ids: The ids that end a reply: the template's end of turn, then those of the
      generation config.
    format: How the model writes tool calls.
    detected: The format in which the template writes calls; None if it is not known.
    supports_tools: Whether the template describes tools and calls in `format`.
  """

  def __init__(
    self,
    tokenizer,
    *,
    max_tool_tokens: int = 1024,
    tools_in_prompt: str = 'default',
    tool_format: calls.CallFormat | None = None,
    stop_strings: Sequence[str] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    pictures: pictures_lib.Reader | None = None,
  ):
    """Analyses the template of a tokenizer of `tokenizer.load`.

    The options are those of config.Chat; `template_kwargs` are arguments of every
    rendering. `pictures` reads pictures; None if the model sees none.

    Raises:
      ValueError: There is no chat template, its turns do not end with a control token, or
        the tokenizer has no control tokens for pictures that the model sees.
    """
    if not tokenizer.chat_template:
      raise ValueError(
        f'tokenizer {tokenizer.name_or_path} has no chat template; add "chat_template" '
        'to its tokenizer_config.json.'
      )
    self.tokenizer = tokenizer
    self.tools_in_prompt = tools_in_prompt
    self._stops: dict[int, types.Automaton] = {}
    self._template_kwargs = dict(template_kwargs or {})
    self._encode_plain = tokenizer_lib.make_plain_encoder(tokenizer)
    self._longest_token = tokenizer_lib.longest_token(tokenizer)
    ids = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
    self._control = control_tokens.ControlTokens(ids, self._encode_plain)
    self._pictures = pictures
    if pictures and (missing := {*pictures_lib.CONTROL_TOKENS} - {*ids}):
      text = f'tokenizer {tokenizer.name_or_path} has no {" ".join(sorted(missing))}'
      raise ValueError(f'{text}, which stand for a picture: add them as special tokens.')
    self._output_limit = messages_lib.ToolOutputLimit(
      max_tool_tokens, self._encode_plain, tokenizer.decode
    )
    self._choose_format(tool_format)
    self._stop_strings = (*stop_strings, *self.format.stop_strings)
    self._end = self._find_end_of_turn()
    eos = tokenizer_lib.eos_ids(tokenizer)
    self.stop_ids = tuple(dict.fromkeys([ids[self._end], *eos]))
    user = [{'role': 'user', 'content': 'x'}]
    frame = self._control.pattern.findall(self._apply(user, add_generation_prompt=False))
    names = self._control.names
    self._control.never_sample(
      *frame,
      *(names[i] for i in self.stop_ids if i in names),
      *(pictures_lib.CONTROL_TOKENS if pictures else ()),
    )

  def _choose_format(self, tool_format: calls.CallFormat | None):
    self.detected = call_formats.detect(
      lambda messages: self._apply(messages, add_generation_prompt=False)
    )
    template_format = self.detected or call_formats.HERMES
    self.format = tool_format or template_format
    user = [{'role': 'user', 'content': 'x'}]
    writes_tools = self._apply(user) != self._apply(user, [_PROBE_TOOL])
    self.supports_tools = self.format == template_format and writes_tools

  def stop_automaton(
    self, vocab_size: int, stop_strings: Sequence[str] = ()
  ) -> types.Automaton:
    """Returns the automaton that ends a reply, also at the given strings.

    Without these it is cached for each size of the vocabulary.
    """
    if stop_strings:
      return automata.stop(*self.find_stops(vocab_size, stop_strings))
    if vocab_size not in self._stops:
      self._stops[vocab_size] = automata.stop(*self.find_stops(vocab_size))
    return self._stops[vocab_size]

  def find_stops(
    self, vocab_size: int, stop_strings: Sequence[str] = ()
  ) -> tuple[list[int], int, Sequence[str], Sequence[bytes]]:
    """Returns the arguments of automata.stop, with the given strings too."""
    strings = (*self._stop_strings, *stop_strings)
    # A stop string may be a control token, which has no bytes.
    ids = [*self.stop_ids, *(i for s, i in self._control.ids.items() if s in strings)]
    return ids, vocab_size, strings, self.token_bytes if strings else ()

  @functools.cached_property
  def token_bytes(self) -> list[bytes]:
    """The bytes of each of the tokenizer's tokens, as tokenizer.token_bytes has them."""
    return tokenizer_lib.token_bytes(self.tokenizer)

  def encode_prompt(
    self,
    messages: Sequence[types.Message],
    tools: Sequence[dict] = (),
    *,
    max_tokens: float = math.inf,
    **template_kwargs,
  ) -> np.ndarray:
    """Encodes a whole context and the start of the assistant's turn as int32 [T].

    Raises:
      TooLongError: It surely has more than `max_tokens`; it is not encoded.
      ValueError: A message has no role or no content, the template refuses the messages,
        or it cannot describe tools and tools_in_prompt is 'refuse'.
    """
    if not messages:
      raise ValueError('a prompt needs at least one message; there is none.')
    if tools and self.tools_in_prompt == 'own':
      tools = ()
    elif tools and not self.supports_tools:
      messages, tools = self._describe_tools(messages, tools), ()
    ids = self._encode(*self._render(messages, tools, **template_kwargs), max_tokens)
    return self._insert_pictures(ids, messages)

  def encode_delta(
    self,
    messages: Sequence[types.Message],
    last_token: int | None = None,
    *,
    max_tokens: float = math.inf,
    **template_kwargs,
  ) -> np.ndarray:
    """Encodes what follows a reply: the rest of its turn, `messages`, the next start.

    `last_token` is the last token of the reply; None stands for a stop id. If it is none,
    because a stop string or a limit ended the reply, the template's end of turn comes
    first; it is no action of the policy.

    Returns:
      int32 [T].
    """
    tail, mark = self._render_after_reply(messages, **template_kwargs)
    ids = self._encode(tail.removeprefix(self._end), mark, max_tokens)
    ids = self._insert_pictures(ids, messages)
    ended = last_token is None or last_token in self.stop_ids
    return ids if ended else np.append(self.stop_ids[0], ids).astype(np.int32)

  def list_pictures(self, messages: Sequence[types.Message]) -> list[np.ndarray]:
    """Reads the pictures of messages, in their order, uint8 [H, W, 3] each.

    Raises:
      ValueError: One cannot be read, or the model sees none.
    """
    urls = [u for message in messages for u in pictures_lib.find_addresses(message)]
    if urls and self._pictures is None:
      raise ValueError(
        f'a message has a picture, and the model of {self.tokenizer.name_or_path} sees '
        'none: there is no preprocessor_config.json in its directory.'
      )
    return [self._pictures.read(url) for url in urls] if self._pictures else []

  def encode_reply(self, text: str, *, max_tokens: float = math.inf) -> np.ndarray:
    """Encodes a reply and its stop token as int32 [T], for supervised text.

    Replies that the policy sampled are never encoded again.

    Raises:
      TooLongError: See encode_prompt.
    """
    mark = control_tokens.find_unused_mark(text)
    ids = self._encode(self._control.hide_unsampled(text, mark), mark, max_tokens)
    return np.append(ids, self.stop_ids[0]).astype(np.int32)

  def encode_text(self, text: str, *, max_tokens: float = math.inf) -> np.ndarray:
    """Encodes a text without a template, in which control tokens are such, int32 [T].

    Raises:
      TooLongError: See encode_prompt.
    """
    return self._encode(text, control_tokens.find_unused_mark(text), max_tokens)

  def encode_data(self, text: str) -> np.ndarray:
    """Encodes data, such as an answer, and a stop token as int32 [T]."""
    return np.array([*self._encode_plain(text), self.stop_ids[0]], np.int32)

  def decode(self, ids: Sequence[int]) -> types.ControlText:
    """Returns the text of a reply, without the stop token that ended it.

    The text records which control tokens were sampled as such and which were spelt.
    """
    ids = list(ids)
    ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
    return self._control.mark_sampled(ids, self.decode_exactly)

  def decode_exactly(self, ids: Sequence[int]) -> str:
    """Returns the exact text of any tokens, including control tokens, for people.

    That of a picture's token is empty.
    """
    ids = [i for i in ids if i < types.FIRST_PICTURE_ID]
    return self.tokenizer.decode(ids, skip_special_tokens=False)

  def get_bytes(self, token: int) -> bytes:
    """Returns the bytes of one token, which may be a part of a character.

    Those of a control token are its name. A tokenizer that is not byte-level has whole
    characters only.
    """
    known = self._known_bytes[token] if token < len(self._known_bytes) else b''
    return known or self.decode_exactly([token]).encode()

  @functools.cached_property
  def _known_bytes(self) -> list[bytes]:
    """`token_bytes`; nothing if the tokenizer is not byte-level."""
    try:
      return self.token_bytes
    except ValueError:
      return []

  def _find_end_of_turn(self) -> str:
    """Returns the control token that the template writes after a reply."""
    tail, _ = self._render_after_reply([{'role': 'user', 'content': 'x'}])
    end = self._control.pattern.match(tail)
    if not end:
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} writes {tail[:20]!r} after '
        'a reply; it must begin with a control token, which the policy samples to stop.'
      )
    return end[0]

  def _describe_tools(self, messages, tools) -> list[types.Message]:
    """Tells of tools in the system message, or in the first one if there can be none."""
    if self.tools_in_prompt == 'refuse':
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} knows no tools in the '
        f'format {self.format.name}, and the model would not see them: make '
        "tools_in_prompt 'default' to put them into the system message, or 'own' if the "
        "task's own messages tell of them."
      )

    def writes_system(message: types.Message) -> bool:
      try:
        return _REPLY in self._apply([{'role': 'system', 'content': _REPLY}, message])
      except ValueError:
        return False  # The template refuses a system message; others leave it out.

    return messages_lib.add_system(messages, self.format.describe(tools), writes_system)

  def _render_after_reply(self, messages, **template_kwargs) -> tuple[str, str]:
    """Renders a conversation with a placeholder as reply, and returns what follows."""
    opening = [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': _REPLY}]
    text, mark = self._render([*opening, *messages], **template_kwargs)
    return text.partition(_REPLY)[2], mark

  def _render(self, messages, tools=(), **template_kwargs) -> tuple[str, str]:
    """Renders messages; in data, placeholders take the place of control tokens.

    The template sees everything else unchanged, so it strips, cuts and quotes as usual.

    Returns:
      The text, and the mark with which its placeholders begin.
    """
    messages = [
      self._output_limit.apply(messages_lib.check(message)) for message in messages
    ]
    messages = [pictures_lib.write_places(message) for message in messages]
    if self.format.answer:
      messages = messages_lib.join_answers(messages, self.format.answer)
    mark = control_tokens.find_unused_mark(repr((messages, tools)))
    neutral = [self._control.hide_in_message(message, mark) for message in messages]
    tools = self._control.hide(list(tools), mark)
    return self._apply(neutral, tools, **template_kwargs), mark

  def _apply(self, messages, tools=(), **template_kwargs) -> str:
    """Renders messages unchanged."""
    options = {'add_generation_prompt': True, **self._template_kwargs, **template_kwargs}
    try:
      return tokenizer_lib.render(self.tokenizer, messages, tools, options)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      roles = ', '.join(str(message['role']) for message in messages)
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} refuses messages of the '
        f'roles {roles}: {error}. Give it messages of other roles, or fix the template.'
      ) from error

  def _insert_pictures(self, ids: np.ndarray, messages) -> np.ndarray:
    """Puts the ids of pictures into the places that `_render` left for them."""
    pictures = self.list_pictures(messages)
    if not pictures or not self._pictures:
      return ids
    places = np.flatnonzero(ids == self._control.ids[pictures_lib.PLACE])
    if len(places) != len(pictures):
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} writes {len(places)} of '
        f'{len(pictures)} pictures.'
      )
    shown = [types.make_picture_ids(x, self._pictures.side) for x in pictures]
    first, *others = np.split(ids, places)  # Each of the others begins with a place.
    pieces = [y for x, text in zip(shown, others, strict=True) for y in (x, text[1:])]
    return np.concatenate([first, *pieces]).astype(np.int32)

  def _encode(self, text: str, mark: str, max_tokens: float = math.inf) -> np.ndarray:
    """Encodes what `_render` returns."""
    if len(text) > max_tokens * self._longest_token:
      raise TooLongError(
        f'the text has {len(text)} characters, which are more than {max_tokens} tokens'
      )
    return self._control.encode(text, mark)
