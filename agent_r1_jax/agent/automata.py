"""Makes the automata that end replies at stop ids and stop strings.

The engine runs automata in its jitted loop (engine/automaton_guide.py).
grammars/compiler.py makes the automata that restrict replies.

Letters: V tokens of the vocabulary.
"""

from collections.abc import Sequence

from agent_r1_jax import types
from agent_r1_jax.agent import byte_automata

# The maximum total size of a reply's stop strings, which bounds their automaton's states.
MAX_STOP_BYTES = 1024


def stop(
  ids: Sequence[int],
  vocab_size: int,
  strings: Sequence[str] = (),
  token_bytes: Sequence[bytes] = (),
) -> types.Automaton:
  """Makes an automaton that ends a reply at stop ids and stop strings.

  Stop strings are found across token boundaries and inside tokens; the reply ends with
  the token that completes one. They do not match across a control token, which has no
  bytes.

  Args:
    ids: Tokens that end a reply.
    vocab_size: Tokens of the model (V); tokens beyond the tokenizer's have no text.
    strings: Strings that end a reply.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens;
      required with strings.

  Raises:
    ValueError: A string is empty, the strings are too long, token_bytes are missing, or
      an id is beyond the vocabulary.
  """
  check_stop_strings(strings)
  if strings and not token_bytes:
    raise ValueError('Stop strings need token_bytes: the bytes of every token.')
  search = byte_automata.find_any(strings)
  return types.Automaton(
    **byte_automata.lift_to_tokens(search, ids, token_bytes, vocab_size)
  )


def check_stop_strings(strings: Sequence[str]):
  """Raises ValueError if a stop string is empty or they are too long."""
  if not all(strings):
    raise ValueError('A stop string is empty: it would end every reply at once. Drop it.')
  size = sum(len(string.encode()) for string in strings)
  if size > MAX_STOP_BYTES:
    raise ValueError(
      f'stop: {len(strings)} stop strings have {size:,} bytes, and {MAX_STOP_BYTES:,} '
      'are allowed; give fewer or shorter ones (chat.stop_strings, or stop of a request).'
    )
