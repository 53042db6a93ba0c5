"""The sequence of an episode in the engine, and the requests that extend it."""

from collections.abc import Awaitable, Callable, Sequence
import copy
import dataclasses

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import protocol
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.rollout import decoding as decoding_lib

# Samples candidates for a request's reply, and returns the chosen one, complete.
Choose = Callable[[request_lib.Request], Awaitable[request_lib.Generation]]


class Context:
  """The sequence of an episode in the engine; each reply extends it.

  Attributes:
    replica: The replica that samples the replies.
    slots: The most tokens of a sequence.
    vocab_size: The size of the policy's vocabulary.
  """

  def __init__(
    self,
    replica: protocol.AnyReplica,
    decoding: decoding_lib.Decoding,
    automata: Sequence[types.Automaton],
    identity: tuple[int | str, ...],
  ):
    """Begins without a sequence.

    `automata` has the automaton that ends replies, then the decoding's grammar, if any.
    Random keys of requests are made from `identity`; see rollout.start.
    """
    self.replica, self._decoding, self._automata = replica, decoding, automata
    self._key_parts = identity
    self.slots, self.vocab_size = replica.sizes.slots, replica.config.vocab_size
    # Whether another context has the same sequence: the next reply must then fork it.
    self._forked = False
    # All contexts of the episode, including forks of forks.
    self._all = [self]
    self._sequence: request_lib.Sequence | None = None
    self._key = self.make_key(0)

  def restart(self, segment: int):
    """Drops the sequence; the next reply begins another, with another random key."""
    self._key, self._sequence = self.make_key(segment), None

  def make_key(self, *parts: int | str) -> np.ndarray:
    """Makes the random key of one of the episode's sequences, uint32 [2]."""
    return request_lib.make_key(*self._key_parts, *parts)

  def fork(self, number: int, turn: int) -> 'Context':
    """Returns a context with the same sequence; unless `number` is 0, with another key.

    The key depends on the turn. If fork 1 of every turn had the same key, a long rejected
    reply and the next turn would share their randomness where their positions overlap.
    """
    other = copy.copy(self)
    other._all.append(other)
    other._forked = True
    if number:
      other._key_parts = (*self._key_parts, turn, number)
      other._key = request_lib.make_key(*self._key.tolist(), turn, number)
    return other

  async def reply(
    self,
    prompt: np.ndarray | types.Prompt,
    max_tokens: int,
    choose: Choose | None = None,
  ) -> request_lib.Chunk:
    """Appends tokens to the sequence and samples the policy's reply, or chooses it."""
    parent = self._sequence
    if self._forked and parent is not None:
      parent = request_lib.Fork(parent, len(parent))
    request = self._make_request(prompt, parent, max_tokens, self._key)
    if choose:
      generation = await choose(request)
      # No other reply uses the chosen key's randomness at later positions.
      self._sequence, self._key = generation.sequence, generation.request.key
      return await generation
    generation = self.replica.submit(request)
    self._sequence, self._forked = generation.sequence, False
    return await generation

  def submit(
    self,
    prompt: types.Prompt,
    parent: request_lib.Sequence | request_lib.Fork | None,
    max_tokens: int,
    key: np.ndarray,
    *,
    automata: Sequence[types.Automaton],
    top_logprobs: int,
  ) -> request_lib.Generation:
    """Requests a reply to any sequence, for a program's endpoint (serve/conversation.py).

    `automata` end the reply instead of the chat's; the decoding's grammar still applies.
    """
    _stops, *grammar = self._automata
    request = self._make_request(prompt, parent, max_tokens, key)
    request = dataclasses.replace(
      request, automata=(*automata, *grammar), top_logprobs=top_logprobs
    )
    return self.replica.submit(request)

  def _make_request(self, prompt, parent, max_tokens, key) -> request_lib.Request:
    return request_lib.Request(
      prompt,
      parent,
      max_tokens=max_tokens,
      sampling=self._decoding.sampling,
      key=key,
      automata=self._automata,
      guides=self._decoding.guides,
      policy=self._decoding.policy,
      replay=self._decoding.replay,
    )

  @property
  def length(self) -> int:
    """The number of tokens of the sequence so far."""
    return 0 if self._sequence is None else len(self._sequence)

  def close_all(self):
    """Closes the sequences of all the episode's contexts, once it is over."""
    for context in self._all:
      context.close()

  def close(self):
    """Marks the sequence as complete, so that its row is the first to be reused."""
    if self._sequence is not None:
      self._sequence.close()
