"""The requests of one episode, and the tokens of them that are trained on.

Each request is matched to the token sequences of the episode so far. If it continues
one, its new messages are appended token by token: the policy sees, and is trained on,
the tokens that it sampled, whatever the client's library made of them.

- It continues a sequence's last reply: the segment continues.
- It continues an earlier reply, or a sequence that is being sampled: the sequence is
  forked and a new segment begins. Replies before the fork are trained on once, in the
  segment where they were sampled.
- It starts a conversation of its own, as a sub-agent does: a new segment.
- It contains replies that the policy never gave, which 'rewritten' counts. After a
  sequence's last reply they are appended like any other message. A changed reply is
  where the request leaves the sequence: a fork, or a new sequence. Examples in the
  episode's first prompt are not counted; examples in a sub-agent's prompt are.

A reply's randomness depends on (seed, draw, task, sample) and on the tokens before it,
not on when it is requested, with two exceptions: identical requests are told apart by
their order, and of several that continue one reply, the first stays in its segment.
"""

import asyncio
import collections
from collections.abc import Callable, Sequence
import contextvars
import functools
import hashlib
import itertools
import json
from typing import Any

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.agent import transcript as transcript_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.host import moments
from agent_r1_jax.serve import branches, replies, requests, sources
from agent_r1_jax.web import http

MAX_TURNS = 'max_turns'  # The error code when the episode is out of replies.


class EpisodeSource(sources.ReplySource):
  """Answers the requests of one episode with the policy, whatever model they name.

  Attributes:
    metrics: Counts of tool_calls, format_errors, forks, rewritten pasts, and, if any
      occurred, unrestricted requests: a schema or a required call was not enforced.
    refused: The status that a budget gave the episode when it refused a request.
    error: Why the first prompt did not fit.
    reports: The rewards that the program reported, each with its turn.
  """

  def __init__(
    self,
    chat: chat_lib.Chat,
    task: types.Task,
    context: Any,
    transcript: transcript_lib.Transcript,
    max_turns: int,
    max_turn_tokens: int,
  ):
    """Starts with no sequences.

    Args:
      chat: Encodes messages with the policy's tokenizer.
      task: The episode's task.
      context: The episode's Context (rollout/context.py), which makes requests.
      transcript: The episode's transcript; replies are added to it.
      max_turns: The maximum number of replies.
      max_turn_tokens: The maximum number of tokens in a reply.
    """
    super().__init__(context.slots)
    self._chat, self._task, self._context = chat, task, context
    self._transcript = transcript
    self._max_turns, self._max_turn_tokens = max_turns, max_turn_tokens
    self._branches: list[branches.Branch] = []
    self._sampled: dict[request_lib.Generation, branches.Branch] = {}
    # The moments of replies that are being sampled, and what ends each. Requests run in
    # another context than the episode, whose moment should contain theirs.
    self._context_of_moments = contextvars.copy_context()
    self._moments: dict[
      request_lib.Generation, tuple[moments.Reply, Callable[[], None]]
    ] = {}
    self._last_reply_truncated = False
    self._last_turns: dict[str, types.Turn] = {}  # By session.
    self._closed = False
    # Keeps requests that are encoded in threads in order of arrival.
    self._in_order = asyncio.Lock()
    self.metrics = collections.Counter(
      tool_calls=0, format_errors=0, forks=0, rewritten=0
    )
    self.refused: types.Status | None = None
    self.error: str | None = None
    self.reports: list[tuple[types.Turn, types.Step]] = []

  @property
  def status(self) -> types.Status:
    """The episode's status, if its program ended now."""
    return self.refused or (
      types.Status.OUT_OF_TOKENS if self._last_reply_truncated else types.Status.DONE
    )

  async def submit(
    self, api_request: requests.ApiRequest, automata: Sequence[types.Automaton]
  ) -> list[request_lib.Generation]:
    """Begins the replies to a request; see the module.

    Sampling is the training run's: the client's temperature, top_p, seed and the like are
    ignored, and neither a schema nor a required call restricts the reply.
    """
    if api_request.messages is None:
      raise http.RefusedError(400, 'an episode asks for replies to messages only')
    if api_request.json_schema or api_request.required:
      self.metrics['unrestricted'] += 1
    begun = []
    try:
      async with self._in_order:
        for _ in range(api_request.n):
          begun.append(await self._submit_one(api_request, automata))
    except BaseException:
      self.cancel(begun)
      raise
    return begun

  async def _submit_one(self, api_request, automata) -> request_lib.Generation:
    self._check_open()
    if len(self._transcript.turns) + len(self._sampled) >= self._max_turns:
      text = f'the episode has had its {self._max_turns} replies (limits.max_turns)'
      raise http.RefusedError(400, text, MAX_TURNS)
    branch = await self._find(api_request)
    try:
      generation = self._sample(branch, api_request, automata)
    except Exception:
      self._drop(branch)
      raise
    before, branch.sequence = branch.sequence, generation.sequence
    self._close_unused(before)
    self._sampled[generation] = branch
    return generation

  def _sample(
    self, branch: branches.Branch, api_request, automata
  ) -> request_lib.Generation:
    """Begins the pending reply of a sequence."""
    assert branch.pending
    _, _, prompt = branch.pending
    length = len(branch.passage)
    room = self.slots - length - len(prompt)
    if room < 1:
      raise sources.refuse_length(
        f'the prompt has {length + len(prompt)} tokens, and a row {self.slots}'
      )
    parent = branch.sequence
    if parent is not None and len(parent) > length:
      parent = request_lib.Fork(parent, length)
    generation = self._context.submit(
      prompt,
      parent,
      min(room, self._max_turn_tokens, api_request.max_tokens or room),
      branch.key,
      automata=automata,
      top_logprobs=api_request.top_logprobs or 0,
    )
    moment = moments.Reply(length + len(prompt))
    _, end = moments.begin(moment, self._context_of_moments)
    self._moments[generation] = moment, end
    return generation

  def _end_moment(
    self, generation: request_lib.Generation, chunk: request_lib.Chunk | None = None
  ):
    """Ends the moment of a reply, unless it has ended; `chunk` will be trained on."""
    if generation in self._moments:
      moment, end = self._moments.pop(generation)
      moment.chunk = chunk
      end()

  async def count(self, api_request: requests.ApiRequest) -> int:
    """Counts a request's prompt tokens, without starting a reply."""
    tools, messages = _make_comparable(api_request)
    place = branches.find_place(self._branches, tools, messages)
    _, prompt = await self._encode(api_request, place)
    return place.length + len(prompt)

  def note_refusal(self, error: http.RefusedError):
    """Notes that a budget refused a reply, which determines the episode's status."""
    if error.code == MAX_TURNS:
      self.refused = self.refused or types.Status.OUT_OF_TURNS
    elif error.code == sources.TOO_LONG:
      self.refused, self.error = (
        self.refused or types.Status.OUT_OF_TOKENS,
        f'{error} (slots)',
      )

  async def _find(self, api_request: requests.ApiRequest) -> branches.Branch:
    """Finds the sequence that a request continues, or begins one.

    While the messages are being encoded, another reply may end or be dropped; the
    position is then looked up again.
    """
    tools, messages = _make_comparable(api_request)
    find = lambda: branches.find_place(self._branches, tools, messages)
    place = find()
    encoded = await self._encode(api_request, place)
    while place != (place := find()):
      encoded = await self._encode(api_request, place)
    parent, count, length, is_end = place
    if parent is None:
      branch = self._begin(api_request, tools, encoded[1].tokens)
    elif is_end:
      branch = parent
    else:
      branch = self._fork(parent, count, length, encoded[1].tokens)
    branch.pending = messages[count:], *encoded
    branch.session = api_request.session
    return branch

  async def _encode(self, api_request, place) -> tuple[list[types.Message], types.Prompt]:
    """Renders and encodes the messages after a position in a sequence."""
    parent, count, length, _ = place
    given: dict[str, Any] = {'tools': api_request.tools}
    rendered = branches.render(
      api_request.messages[count:], self._task, self._branches, self._chat.format
    )
    if parent is None:
      encode = functools.partial(self._chat.encode_prompt, **given)
    else:
      given['history'] = parent.rendered[:count]
      given['last_token'] = int(parent.passage.tokens[length - 1])
      encode = functools.partial(self._chat.encode_delta, **given)

    def encode_all(messages, **options):
      return self._chat.attach(encode(messages, **options), messages)

    prompt = await sources.encode(self, encode_all, rendered)
    self._check_open()
    return rendered, prompt

  def _begin(self, api_request, tools: str, ids: np.ndarray) -> branches.Branch:
    """Begins a new sequence."""
    # The task's own prompt gets the key of a native environment's first segment.
    contents = lambda messages: [str(m.get('content')) for m in messages]
    same = contents(self._task.messages) == contents(api_request.messages)
    key = self._make_key(ids, own=same)
    passage = self._transcript.begin()
    self._branches.append(branches.Branch(tools, [], [], 0, [], passage, None, *key))
    return self._branches[-1]

  def _fork(
    self, parent: branches.Branch, count: int, length: int, ids: np.ndarray
  ) -> branches.Branch:
    """Begins a sequence with the first messages and tokens of another one."""
    branch = branches.Branch(
      parent.tools,
      parent.messages[:count],
      parent.rendered[:count],
      count,
      [end for end in parent.ends if end[0] <= count],
      self._transcript.fork(parent.passage, length),
      parent.sequence,
      *self._make_key(np.append(parent.passage.tokens[:length], ids)),
    )
    self._branches.append(branch)
    return branch

  def _make_key(
    self, ids: np.ndarray, own: bool = False
  ) -> tuple[np.ndarray, tuple[bytes, int]]:
    """Makes the key of a new sequence, and its identity: its tokens and a number.

    The number is the lowest that no sequence with the same tokens has. So keys are
    unique, and a request that was dropped and is made again gets its old key.
    """
    digest = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).digest()
    taken = {branch.key_id for branch in self._branches}
    number = next(n for n in itertools.count() if (digest, n) not in taken)
    named = (digest.hex(), number) if number or not own else (0,)
    return self._context.make_key(*named), (digest, number)

  def accept(self, generation: request_lib.Generation, reply: replies.Reply):
    """Records a reply that is about to be sent to its client; it will be trained on."""
    branch = self._sampled.pop(generation, None)
    if branch is None or branch.pending is None or self._closed:
      return
    chunk = request_lib.join(generation.chunks)
    self._end_moment(generation, chunk)
    messages, rendered, prompt = branch.pending
    branch.pending = None
    is_first = not self._transcript.turns
    begins_fork = not branch.passage.turns and bool(branch.shared_messages)
    turn = self._transcript.add_turn(branch.passage, prompt, chunk)
    self._last_turns[branch.session] = turn
    text = self._chat.decode(chunk.tokens.tolist())
    branch.messages += [*messages, requests.make_comparable(reply.as_message())]
    branch.rendered += [*rendered, {'role': 'assistant', 'content': text}]
    branch.ends.append((len(branch.messages), len(branch.passage)))
    self._last_reply_truncated = reply.reason == 'length'
    rewritten = [message for message in messages if message['role'] == 'assistant']
    # Replies in the very first prompt are examples.
    self.metrics['rewritten'] += bool(rewritten) and not is_first
    self.metrics['forks'] += begins_fork
    malformed = sum(isinstance(arguments, str) for _, arguments in reply.calls)
    self.metrics['tool_calls'] += len(reply.calls) - malformed
    self.metrics['format_errors'] += malformed

  def close(self, generation: request_lib.Generation):
    """Forgets a reply that its client abandoned; the request can be made again."""
    self._end_moment(generation)
    branch = self._sampled.pop(generation, None)
    if branch is not None:
      self._drop(branch)

  def _drop(self, branch: branches.Branch):
    """Drops a pending request; the same request gets the same reply later."""
    branch.pending = None
    if not branch.passage.turns:
      self._branches.remove(branch)
      self._transcript.drop(branch.passage)
      self._close_unused(branch.sequence)

  def _close_unused(self, sequence: request_lib.Sequence | None):
    """Frees the row of a sequence that no branch uses any longer."""
    if sequence is not None and all(
      branch.sequence is not sequence for branch in self._branches
    ):
      sequence.close()

  def report(self, step: types.Step, session: str):
    """Records a reward that the program reports, for the last reply.

    It is the session's last reply, or the episode's if `session` is empty.

    Raises:
      RefusedError: The episode is over, or has no reply yet.
    """
    self._check_open()
    if not self._transcript.turns:
      raise http.RefusedError(400, 'there is no reply to reward yet')
    turn = self._transcript.turns[-1]
    self.reports.append((self._last_turns.get(session, turn) if session else turn, step))

  def _check_open(self):
    if self._closed:
      raise http.RefusedError(410, 'the episode is over', 'episode_over')

  def end(self):
    """Ends the episode: cancels replies that are being sampled, and frees rows."""
    self._closed = True
    for generation in [*self._sampled]:
      generation.cancel()
    for branch in self._branches:
      if branch.sequence is not None:
        branch.sequence.close()

  def list_messages(self) -> list[types.Message]:
    """Returns the messages of all sequences that have a reply, in transcript order."""
    messages = []
    of_passage = {branch.passage: branch for branch in self._branches}
    for branch in map(of_passage.get, self._transcript.list_played()):
      assert branch
      for message in map(dict, branch.rendered[branch.shared_messages :]):
        message.pop('tool_call_id', None)
        if message['role'] == 'assistant':
          text, calls = str(message['content']), message.pop('tool_calls', ())
          message['content'] = messages_lib.write_calls(text, calls, self._chat.format)
        messages.append(message)
    return messages


def _make_comparable(api_request) -> tuple[str, list[types.Message]]:
  """Puts a request's tools and messages in the form that branches store."""
  if api_request.continue_final_message:
    text = 'a reply of an episode cannot go on from a given beginning (prefill), for all '
    text += 'of it is trained; end with a message of the user'
    raise http.RefusedError(400, text)
  messages = [requests.make_comparable(message) for message in api_request.messages]
  return json.dumps(api_request.tools, sort_keys=True), messages
