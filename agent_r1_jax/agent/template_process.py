"""Renders a model's chat template in a subprocess, since it may be hostile.

A template is a program that can run forever and use all memory, which the library does
not prevent. So it runs in a subprocess that can be killed. The main process does not even
compile it, because the compiler evaluates constant expressions.
"""

import datetime
import functools
import json
import signal
import threading
from typing import Any

from agent_r1_jax.host import isolated

# The limits of a template per conversation, and the maximum characters that it may write
# for a short one. _CPU_SECONDS is processor time, which may take _WAIT_SECONDS.
_WAIT_SECONDS, _CPU_SECONDS = 120, 3
_MEMORY_MB, _MAX_CHARS = 512, 1_000_000
_CALL = {'type': 'function', 'function': {'name': 'look', 'arguments': {'at': 'it'}}}
_TEST_CONVERSATIONS = (
  [{'role': 'user', 'content': 'x'}],
  [
    {'role': 'system', 'content': 'Look.'},
    {'role': 'user', 'content': 'What is it?'},
    {'role': 'assistant', 'content': '<think>\nSo.\n</think>\n', 'tool_calls': [_CALL]},
    {'role': 'tool', 'name': 'look', 'content': 'It is.'},
    {'role': 'assistant', 'content': 'It is.'},
    {'role': 'user', 'content': 'And now?'},
  ],
)
_TEST_TOKENS: dict[str, Any] = {'bos_token': '<b>', 'eos_token': '<e>'}
TEST_TOOLS: Any = [
  {
    'type': 'function',
    'function': {
      'name': 'look',
      'description': 'Looks.',
      'parameters': {'type': 'object', 'properties': {'at': {'type': 'string'}}},
    },
  }
]


class TemplateProcess:
  """A subprocess that renders a model's chat template.

  Attributes:
    problem: What is wrong with the template; '' if it is fine.
  """

  def __init__(self, template: str):
    """Tests the template on short conversations."""
    self._template, self._lock = template, threading.Lock()
    imports = ['jinja2', 'transformers.utils.chat_template_utils']
    self._render = isolated.in_subprocess(
      _render, seconds=_WAIT_SECONDS, memory_mb=_MEMORY_MB, imports=imports
    )
    _, self.problem = self._ask(None)

  def render(self, *arguments: Any) -> str:
    """Renders one conversation; see tokenizer.render."""
    text, problem = self._ask(arguments)
    if problem:
      raise ValueError(problem)
    return text

  def _ask(self, arguments: Any) -> tuple[str, str]:
    """Returns the text, and the problem or ''."""
    # As JSON, since the subprocess would import other types.
    call = self._template, json.dumps(arguments), _CPU_SECONDS
    try:
      with self._lock:  # All threads share one process.
        text, problem = self._render.call_and_wait(*call)
        return text, problem
    except isolated.FailedError as error:
      return '', str(error)
    except isolated.EndedError as error:
      if error.status == -signal.SIGPROF:
        return '', f'did not end within {_CPU_SECONDS} s of a processor'
      return '', f'ended its process with status {error.status}'
    except TimeoutError:  # The machine is too busy to run it.
      return '', f'gave no answer within {_WAIT_SECONDS} s'


# A run has one or two templates; each keeps its process while it is cached.
find_process = functools.lru_cache(4)(TemplateProcess)


def _render(template: str, arguments: str, seconds: float) -> tuple[str, str]:
  """Renders a conversation in the subprocess, or tests the template.

  `arguments` are those of `_apply` as JSON; null tests the template. After `seconds` of
  processor time the system kills this process.

  Returns:
    The text, and the problem or ''.
  """
  import jinja2

  given = json.loads(arguments)
  try:
    with isolated.limit_processor(seconds):
      return ('', _test(template)) if given is None else (_apply(template, *given), '')
  except MemoryError:
    return '', f'took more than {_MEMORY_MB} MiB'
  except (jinja2.TemplateError, TypeError) as error:
    return '', str(error)


def _apply(template: str, conversations, tools, options: dict[str, Any]) -> str:
  from transformers.utils import chat_template_utils

  if date := options.pop('strftime_now', None):
    # The library turns functions in options into text, but caches compiled templates.
    compiled = chat_template_utils._compile_jinja_template(template)
    now = datetime.datetime.fromisoformat(date)
    compiled.globals['strftime_now'] = lambda form: now.strftime(form)
  (text,), _ = chat_template_utils.render_jinja_template(
    conversations, tools, chat_template=template, **options
  )
  return text


def _test(template: str) -> str:
  """Renders short conversations; returns the problem, or ''."""
  for messages in _TEST_CONVERSATIONS:
    for tools in (None, TEST_TOOLS):
      options = {'add_generation_prompt': True, **_TEST_TOKENS}
      try:
        text = _apply(template, [messages], tools, options)
      except MemoryError:
        raise
      except Exception:
        continue  # A template may reject a conversation.
      if len(text) > _MAX_CHARS:
        return f'wrote more than {_MAX_CHARS} characters'
  return ''
