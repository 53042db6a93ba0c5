"""Renders the chat template of a model in a process of its own, since it may be hostile.

A template is a program that can run for ever and take all memory, and the library does
not prevent it. So it runs in a subprocess, which is killed. This process does not even
compile it: a compiler evaluates constant expressions. The subprocess runs this file as a
script (see `_serve`).
"""

import contextlib
import functools
import json
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any
import weakref

# The resources that a model's template may use for a conversation, and the characters
# that it may write for a short one. The seconds are those of a processor, for which it
# gets _WAIT_SECONDS.
_WAIT_SECONDS, _CPU_SECONDS = 120, 3
_TRY_BYTES, _TRY_CHARS = 1 << 29, 1_000_000
_FINE = 'fine'
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
_TEST_TOOLS: Any = [
  {
    'type': 'function',
    'function': {
      'name': 'look',
      'description': 'Looks.',
      'parameters': {'type': 'object', 'properties': {'at': {'type': 'string'}}},
    },
  }
]


class Renderer:
  """A subprocess that renders a model's chat template.

  Attributes:
    problem: What is wrong with the template; '' if nothing is.
  """

  def __init__(self, template: str):
    """Renders short conversations, to find the problem."""
    self._template, self._lock = template, threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None
    text, self.problem = self._ask(None)
    self.problem = self.problem or ('' if text == _FINE else text)

  def render(self, *arguments: Any) -> str:
    """Renders one conversation; see tokenizer.render."""
    text, problem = self._ask(arguments)
    if problem:
      raise ValueError(problem)
    return text

  def _ask(self, arguments: Any) -> tuple[str, str]:
    """Returns the answer to a request, and what went wrong."""
    with self._lock:
      if self._process is None or self._process.poll() is not None:
        self._process = self._start()
      process = self._process
      assert process.stdin and process.stdout
      # It limits its own time; this one is for a machine where it is not even run.
      timer = threading.Timer(_WAIT_SECONDS, process.kill)
      timer.start()
      try:
        process.stdin.write(json.dumps(arguments).encode() + b'\n')
        process.stdin.flush()
        answer = process.stdout.readline()
      except BrokenPipeError:
        answer = b''
      except BaseException:
        # An interrupted wait must not leave its answer to the next request.
        _end(process)
        raise
      finally:
        timer.cancel()
      if answer.endswith(b'\n'):
        return json.loads(answer)
      status = process.wait()
      _end(process)
    if status == -signal.SIGPROF:
      return '', f'did not end within {_CPU_SECONDS} s of a processor'
    return '', f'ended its process with status {status}'

  def _start(self) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
      [sys.executable, '-P', __file__],
      stdin=pipe,
      stdout=pipe,
      stderr=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C lets a run finish its step, which may render.
    )
    weakref.finalize(self, _end, process)
    assert process.stdin
    process.stdin.write(json.dumps(self._template).encode() + b'\n')
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
  """Ends a subprocess that may have ended before."""
  process.kill()
  process.wait()
  for pipe in (process.stdin, process.stdout):
    assert pipe
    with contextlib.suppress(OSError):
      pipe.close()


# A run has one template or two; each has a process for as long as it is here.
find = functools.lru_cache(4)(Renderer)


def _serve() -> None:
  """Renders the template on the first line of stdin, a conversation for each other one.

  A line is JSON: the arguments of a rendering; null tests the template. The answer is a
  line with the text, and what went wrong.
  """
  import resource

  import jinja2
  from transformers.utils import chat_template_utils

  status, memory = pathlib.Path('/proc/self/statm'), _TRY_BYTES
  if status.exists():
    memory += int(status.read_text().split()[0]) * resource.getpagesize()
  resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
  template = json.loads(sys.stdin.readline())

  def render(conversations, tools, options):
    (text,), _ = chat_template_utils.render_jinja_template(
      conversations, tools, chat_template=template, **options
    )
    return text

  for line in sys.stdin:
    # After so much time of a processor the system ends this process.
    signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
    arguments = json.loads(line)
    try:
      answer = (render(*arguments), '') if arguments else (_test_template(render), '')
    except MemoryError:
      answer = '', f'took more than {_TRY_BYTES >> 20} MiB'
    except (jinja2.TemplateError, TypeError) as error:
      answer = '', str(error)
    except Exception as error:
      answer = '', f'{type(error).__name__}: {error}'
    print(json.dumps(answer), flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _test_template(render) -> str:
  """Renders short conversations; returns the problem, or _FINE."""
  for messages in _TEST_CONVERSATIONS:
    for tools in (None, _TEST_TOOLS):
      try:
        text = render([messages], tools, {'add_generation_prompt': True, **_TEST_TOKENS})
      except MemoryError:
        raise
      except Exception:
        continue  # A template may refuse a conversation.
      if len(text) > _TRY_CHARS:
        return f'wrote more than {_TRY_CHARS} characters'
  return _FINE


if __name__ == '__main__':
  _serve()
