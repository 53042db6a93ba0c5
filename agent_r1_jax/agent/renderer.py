"""Renders messages with the tokenizer's own chat template.

Messages that a template drops or rejects get another form (template_forms.py); control
tokens in data become placeholders (control_tokens.py).
"""

from collections.abc import Mapping
import datetime
import functools
from typing import Any

import jinja2

from agent_r1_jax import types
from agent_r1_jax.agent import (
  call_formats,
  calls,
  control_tokens,
  pictures,
  template_forms,
  template_process,
)
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib

# Stands for a reply in a rendering; no template contains it.
_REPLY = 'qzreplyqz'
_MAX_HISTORY = 16  # Maximum number of turns before a reply that a template sees.


class Renderer:
  """Renders messages to text and the mark with which its placeholders begin.

  See chat.Chat for the attributes.
  """

  def __init__(
    self,
    tokenizer,
    *,
    max_tool_tokens: int = 1024,
    tools_in_prompt: str = 'default',
    tool_format: calls.CallFormat | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    date: str = '',
    picture_form: pictures.Form = pictures.QWEN,
  ):
    """Tests the template; `template_kwargs` are arguments of every rendering."""
    self._picture_form = picture_form
    self.tokenizer, self.tools_in_prompt = tokenizer, tools_in_prompt
    # Renderings of one run must not differ from day to day.
    self._options = {'strftime_now': date or str(datetime.date.today())}
    self._options |= {'add_generation_prompt': True, **(template_kwargs or {})}
    self._encode_plain = tokenizer_lib.make_plain_encoder(tokenizer)
    self._control = control_tokens.ControlTokens(
      tokenizer.added_tokens_decoder,
      functools.partial(tokenizer_lib.make_plain_encoder, tokenizer),
    )
    self._output_limit = messages_lib.ToolOutputLimit(
      max_tool_tokens, self._encode_plain, tokenizer.decode
    )
    try:
      described = self._apply([template_forms.USER], template_process.TEST_TOOLS)
    except ValueError:  # It rejects tools.
      described = ''
    writes_tools = described not in ('', self._apply([template_forms.USER]))
    self.detected = call_formats.detect(
      lambda messages: self._apply(messages, add_generation_prompt=False), described
    )
    template_format = self.detected or call_formats.HERMES
    self.format = tool_format or template_format
    self.supports_tools = self.format == template_format and writes_tools
    self._forms = template_forms.TemplateForms(self._apply, self.format)
    self.answer_role = self._forms.answer_role

  def _render_prompt(self, messages, tools=(), **template_kwargs) -> tuple[str, str]:
    """Renders a prompt; tools are described as config.Chat.tools_in_prompt says."""
    if tools and self.tools_in_prompt != 'own' and not self.supports_tools:
      messages, tools = self._describe_tools(messages, tools), ()
    return self._render(messages, tools, **template_kwargs)

  def _describe_tools(self, messages, tools) -> list[types.Message]:
    """Describes tools in the system message, or in the first message without one."""
    if self.tools_in_prompt == 'refuse':
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} knows no tools in the '
        f'format {self.format.name}, and the model would not see them: make '
        "tools_in_prompt 'default' to put them into the system message, or 'own' if the "
        "task's own messages tell of them."
      )
    first, *others = messages
    text = self.format.describe(tools)
    if first.get('role') == 'system':
      texts = first['content'], text
    elif self._writes_system(first):
      return [{'role': 'system', 'content': text}, *messages]
    else:
      texts = text, first['content']
    return [{**first, 'content': types.ControlText('{}\n\n{}').format(*texts)}, *others]

  def _writes_system(self, message: types.Message) -> bool:
    """Whether the template writes a system message before a message."""
    try:
      return _REPLY in self._apply([{'role': 'system', 'content': _REPLY}, message])
    except ValueError:
      return False  # Some templates reject system messages; others drop them.

  def _render_after_reply(
    self, messages, history=(), tools=(), **template_kwargs
  ) -> tuple[str, str]:
    """Renders a conversation with a placeholder as reply; returns the text after it.

    The reply follows the system and user messages, since how templates write later turns
    depends on them. Earlier replies are placeholders too, and tools' answers are left
    out, so that turns alternate for the template. Of many turns the template gets the
    first and the last ones, to bound its cost.
    """
    reply, opening = {'role': 'assistant', 'content': ''}, []
    for message in history:
      if message['role'] in ('system', 'user'):
        opening.append(message)
      elif opening and message['role'] == 'assistant' != opening[-1]['role']:
        opening.append(reply)
    if 'user' not in [message['role'] for message in opening]:
      opening.append(template_forms.USER)
    if opening[-1] is not reply:
      opening.append(reply)
    turns = [i + 1 for i, message in enumerate(opening) if message is reply]
    if len(turns) > _MAX_HISTORY:
      opening[turns[0] : turns[-_MAX_HISTORY]] = []
    word = control_tokens.find_unused_mark(repr((opening, messages)), _REPLY)
    reply['content'] = word
    messages = [*opening, *messages]
    text, mark = self._render(messages, tools, **template_kwargs)
    tail = text.rpartition(word)[2]
    # In Harmony the reply is an argument of a call, which the template then closes.
    tags = self._control.pattern.finditer(tail) if self.format.write else ()
    end = next((tag for tag in tags if tag[0] not in self.format.within), None)
    return tail[end.start() :] if end else tail, mark

  def _render(self, messages, tools=(), **template_kwargs) -> tuple[str, str]:
    """Renders messages, with placeholders for the control tokens in data.

    The template sees everything else unchanged, so it strips, cuts and quotes as usual.
    It gets the tools only if it should describe them.

    Returns:
      The text, and the mark with which its placeholders begin.
    """
    if self.tools_in_prompt == 'own' or not self.supports_tools:
      tools = ()
    options = self._output_limit.cut, self._picture_form
    messages = [messages_lib.write_text(message, *options) for message in messages]
    mark = control_tokens.find_unused_mark(repr((messages, tools)))
    neutral = [self._control.hide_in_message(message, mark) for message in messages]
    tools = self._control.hide(list(tools), mark)
    text = self._apply(self._forms.write(neutral), tools, **template_kwargs)
    return self._picture_form.move(text), mark

  def _apply(self, messages, tools=(), **template_kwargs) -> str:
    """Renders messages unchanged."""
    options = {**self._options, **template_kwargs}
    try:
      return tokenizer_lib.render(self.tokenizer, messages, tools, options)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      roles = ', '.join(str(message['role']) for message in messages)
      raise ValueError(
        f'the chat template of {self.tokenizer.name_or_path} refuses messages of the '
        f'roles {roles}: {error}. Give it messages of other roles, or fix the template.'
      ) from error

  def _render_reply(self, reply: types.Message, ends: list[str]) -> tuple[str, str, str]:
    """Renders a reply with calls or thoughts, up to the last of `ends`.

    Returns:
      The text, the mark of its placeholders, and the end that was found.
    """
    start, before = (
      self._apply([template_forms.USER], add_generation_prompt=opens)
      for opens in (True, False)
    )
    text, mark = self._render([template_forms.USER, reply], add_generation_prompt=False)
    place, end = max((text.rfind(end), end) for end in ends)
    # The start of a reply may be more than the role: an empty thought, in Gemma 4.
    role = before + start[len(before) :].partition('\n')[0] + '\n'
    for begin in (start, role):
      if text.startswith(begin) and place >= len(begin):
        return text[len(begin) : place], mark, end
    hidden = self._control.hide_in_message(reply, mark)
    return self._forms.write_reply(hidden, as_text=True)['content'], mark, ends[0]
