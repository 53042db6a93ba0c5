"""Compiles grammars to automata over tokens: expressions, schemas, tool calls.

The engine runs them in its jitted loop (engine/automaton_guide.py). A grammar may be
untrusted and take hours and all memory, so a separate process compiles it, and is ended
if it needs too much.

Letters: V tokens of the vocabulary.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import byte_automata
from agent_r1_jax.grammars import byte_grammars
from agent_r1_jax.host import isolated

# Limits of a compiling process. Compilation is limited in CPU-seconds, so that a busy
# machine rejects nothing; these seconds only end a process that waits.
_LIMITS = {'seconds': 120.0, 'memory_mb': 1024}
PROCESSES = 2
_compile = isolated.in_subprocess(
  byte_grammars.make_encoded,
  processes=PROCESSES,
  imports=byte_grammars.IMPORTS,
  **_LIMITS,
)


class TooMuchError(ValueError):
  """A grammar needs too much time or memory."""


async def compile_grammar(
  make: Callable, args: Sequence, vocabulary: Sequence, seconds: float | None = None
) -> types.Automaton:
  """Makes an automaton in one of two long-lived processes.

  `make` is a function of byte_grammars.py, or byte_automata.find_any, with these `args`;
  the vocabulary is (stop ids, the bytes of each of the tokenizer's tokens, vocab_size);
  `seconds` are CPU-seconds, PROCESSOR_SECONDS by default.

  Raises:
    ValueError: There is no such automaton, or (TooMuchError) it needs too much.
  """
  with _name_limits():
    seconds = seconds or byte_grammars.PROCESSOR_SECONDS
    text = await _compile(make, args, vocabulary, seconds)
  # Decodes some 100 MB at most.
  return types.Automaton(**await asyncio.to_thread(byte_grammars.decode, text))


def compile_and_wait(make: Callable, args: Sequence, *vocabulary: Any) -> types.Automaton:
  """Like `compile_grammar`, for callers without an event loop."""
  with _name_limits():
    text = _compile.call_and_wait(make, args, vocabulary, byte_grammars.PROCESSOR_SECONDS)
  return types.Automaton(**byte_grammars.decode(text))


@contextlib.contextmanager
def _name_limits() -> Iterator[None]:
  try:
    yield
  except isolated.FailedError as error:
    raise ValueError(str(error).removeprefix('ValueError: ')) from None
  except RecursionError:
    raise ValueError('the grammar is nested too deeply; flatten it.') from None
  except (isolated.EndedError, TimeoutError):
    raise TooMuchError(
      f'the grammar takes more than {byte_grammars.PROCESSOR_SECONDS} s of a processor '
      f'or {_LIMITS["memory_mb"]:,} MB; {byte_automata.HOW_TO_SIMPLIFY}'
    ) from None


def tool_calls(
  schemas: Sequence[Mapping[str, Any]],
  token_bytes: Sequence[bytes],
  vocab_size: int,
  *,
  required: bool = False,
) -> types.Automaton:
  r"""Constrains the tool calls of a reply to Hermes format and to their schemas.

  Text is free until '<tool_call>' is complete, however it is split into tokens. Then
  follows '\n{"name": ..., "arguments": {...}}\n</tool_call>', spaced as json.dumps does,
  with the arguments in the schema's order. Text is free again after it. Control tokens,
  which include stop tokens, are forbidden in a call.

  A call fulfils what agent/tool_schema.py checks. An argument whose schema allows any
  value is a scalar, or a list or an object of scalars. A keyword that json_schema.py
  does not support is refused.

  Args:
    schemas: The tools' schemas, in the OpenAI form.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens.
    vocab_size: Tokens of the model (V); those beyond the tokenizer's count as control
      tokens.
    required: The reply must begin with a call.

  Raises:
    ValueError: There are no tools, a schema has no grammar or needs too many states, time
      or memory, or the vocabulary lacks single bytes.
  """
  return compile_and_wait(
    byte_grammars.tool_calls, [schemas, required], (), token_bytes, vocab_size
  )
