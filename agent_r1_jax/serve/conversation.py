"""The requests of one episode, and the tokens that are trained of them.

Each request is matched to the texts that the episode has so far. Where it goes on from
one of them, its new messages are appended to that text, token by token: what the policy
sampled is what it sees and what is trained, whatever the client's library made of it.

- It goes on from a text's last reply: the segment goes on.
- It goes on from an earlier reply, or the text is being sampled just now: a fork of the
  text begins a new segment. What the policy sampled before the fork is trained in the
  segment where it was sampled, and in no other.
- It begins a text of its own, as a sub-agent does: a new segment.
- It contains replies that the policy never gave, which 'rewritten' counts. After a text's
  last reply they are appended as any other message, and the segment goes on. A reply that
  was changed is where the request leaves the text: a fork, or a text of its own. Examples
  in the episode's first prompt are not counted; those in a sub-agent's prompt are.

A reply's randomness depends on (seed, draw, task, sample) and on the text before it, not
on when it is asked for, with two exceptions: requests for the same text are told apart by
their order, and of several that go on from one reply, the first goes on in its segment.
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

MAX_TURNS = 'max_turns'  # The code of a refusal for want of replies.


class EpisodeSource(sources.ReplySource):
  """The requests of one episode; the policy replies, whatever a request calls it.

  Attributes:
    metrics: Counts of tool_calls, format_errors, forks, rewritten pasts, and, where there
      were any, unrestricted requests: a schema or a required call was not applied.
    refused: The status that a budget gave the episode, when it refused a request.
    error: Why there was no room for the first prompt.
    reports: The rewards that the program reported, with the turn that each belongs to.
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
    """Begins without a text.

    Args:
      chat: Encodes messages with the policy's tokenizer.
      task: The episode's task.
      context: The episode's Context (rollout/context.py), which makes requests.
      transcript: The episode's, to which the replies are added.
      max_turns: The most replies.
      max_turn_tokens: The most tokens of a reply.
    """
    super().__init__(context.slots)
    self._chat, self._task, self._context = chat, task, context
    self._transcript = transcript
    self._max_turns, self._max_turn_tokens = max_turns, max_turn_tokens
    self._branches: list[branches.Branch] = []
    self._sampled: dict[request_lib.Generation, branches.Branch] = {}
    # The moments of replies that are being sampled, and what ends each. The requests
    # come in another context than the episode's, whose moment these are inside.
    self._context_of_moments = contextvars.copy_context()
    self._moments: dict[
      request_lib.Generation, tuple[moments.Reply, Callable[[], None]]
    ] = {}
    self._last_reply_truncated = False
    self._last_turns: dict[str, types.Turn] = {}  # By session.
    self._closed = False
    # Requests whose texts are encoded in a thread stay in the order of their arrival.
    self._in_order = asyncio.Lock()
    self.metrics = collections.Counter(
      tool_calls=0, format_errors=0, forks=0, rewritten=0
    )
    self.refused: types.Status | None = None
    self.error: str | None = None
    self.reports: list[tuple[types.Turn, types.Step]] = []

  @property
  def status(self) -> types.Status:
    """How the episode ended, if its program just ended."""
    return self.refused or (
      types.Status.OUT_OF_TOKENS if self._last_reply_truncated else types.Status.DONE
    )

  async def submit(
    self, api_request: requests.ApiRequest, automata: Sequence[types.Automaton]
  ) -> list[request_lib.Generation]:
    """Begins the replies to a request; see the module.

    The policy is sampled as it is trained: temperature, top_p, seed and the like of the
    client are not used, and neither a schema nor a required call restricts the reply.
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
    before, branch.text = branch.text, generation.text
    self._close_unused(before)
    self._sampled[generation] = branch
    return generation

  def _sample(
    self, branch: branches.Branch, api_request, automata
  ) -> request_lib.Generation:
    """Begins the reply that a text waits for."""
    assert branch.pending
    _, _, prompt = branch.pending
    length = len(branch.passage)
    room = self.slots - length - len(prompt)
    if room < 1:
      raise sources.refuse_length(
        f'the prompt has {length + len(prompt)} tokens, and a row {self.slots}'
      )
    parent = branch.text
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
    """Ends the moment of a reply, of which `chunk` is trained, unless it has ended."""
    if generation in self._moments:
      moment, end = self._moments.pop(generation)
      moment.chunk = chunk
      end()

  async def count(self, api_request: requests.ApiRequest) -> int:
    """Counts the tokens before the reply that a request would get; begins nothing."""
    tools, messages = _make_comparable(api_request)
    place = branches.find_place(self._branches, tools, messages)
    _, prompt = await self._encode(api_request, place)
    return place.length + len(prompt)

  def note_refusal(self, error: http.RefusedError):
    """Notes that a budget refused a reply: that is how the episode ends."""
    if error.code == MAX_TURNS:
      self.refused = self.refused or types.Status.OUT_OF_TURNS
    elif error.code == sources.TOO_LONG:
      self.refused, self.error = (
        self.refused or types.Status.OUT_OF_TOKENS,
        f'{error} (slots)',
      )

  async def _find(self, api_request: requests.ApiRequest) -> branches.Branch:
    """Finds the text that a request goes on from, or begins one.

    While its messages are encoded, a reply may end or be dropped, and the request then
    goes on from another place.
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
    """Renders and encodes the messages after a place in a text."""
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
    """Begins a text of its own."""
    # The key of the task's own prompt is that of a native environment's first segment.
    contents = lambda messages: [str(m.get('content')) for m in messages]
    same = contents(self._task.messages) == contents(api_request.messages)
    key = self._make_key(ids, own=same)
    passage = self._transcript.begin()
    self._branches.append(branches.Branch(tools, [], [], 0, [], passage, None, *key))
    return self._branches[-1]

  def _fork(
    self, parent: branches.Branch, count: int, length: int, ids: np.ndarray
  ) -> branches.Branch:
    """Begins a text with so many messages and tokens of another one."""
    branch = branches.Branch(
      parent.tools,
      parent.messages[:count],
      parent.rendered[:count],
      count,
      [end for end in parent.ends if end[0] <= count],
      self._transcript.fork(parent.passage, length),
      parent.text,
      *self._make_key(np.append(parent.passage.tokens[:length], ids)),
    )
    self._branches.append(branch)
    return branch

  def _make_key(
    self, ids: np.ndarray, own: bool = False
  ) -> tuple[np.ndarray, tuple[bytes, int]]:
    """Makes the key of a new text, and what identifies it: its tokens and a number.

    The number is the lowest that no text of the same tokens has. So a request that was
    dropped and is made again gets its old key, and no two texts have the same.
    """
    digest = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).digest()
    taken = {branch.key_id for branch in self._branches}
    number = next(n for n in itertools.count() if (digest, n) not in taken)
    named = (digest.hex(), number) if number or not own else (0,)
    return self._context.make_key(*named), (digest, number)

  def accept(self, generation: request_lib.Generation, reply: replies.Reply):
    """Notes a reply that its client gets: it will be trained."""
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
    # Before the first reply of all they are examples.
    self.metrics['rewritten'] += bool(rewritten) and not is_first
    self.metrics['forks'] += begins_fork
    malformed = sum(isinstance(arguments, str) for _, arguments in reply.calls)
    self.metrics['tool_calls'] += len(reply.calls) - malformed
    self.metrics['format_errors'] += malformed

  def close(self, generation: request_lib.Generation):
    """Forgets a reply that no client waits for; the request can be asked again."""
    self._end_moment(generation)
    branch = self._sampled.pop(generation, None)
    if branch is not None:
      self._drop(branch)

  def _drop(self, branch: branches.Branch):
    """Drops a request; whoever makes it again gets the same reply."""
    branch.pending = None
    if not branch.passage.turns:
      self._branches.remove(branch)
      self._transcript.drop(branch.passage)
      self._close_unused(branch.text)

  def _close_unused(self, text: request_lib.Text | None):
    """Lets others have the row of a text that nothing goes on from any longer."""
    if text is not None and all(branch.text is not text for branch in self._branches):
      text.close()

  def report(self, step: types.Step, session: str):
    """Takes a reward that the program reports; it belongs to the last reply.

    That is the last one of the session; of all, if it has none.

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
    """Ends the episode: what is being sampled is cancelled, and rows are freed."""
    self._closed = True
    for generation in [*self._sampled]:
      generation.cancel()
    for branch in self._branches:
      if branch.text is not None:
        branch.text.close()

  def list_messages(self) -> list[types.Message]:
    """Returns the messages of all texts that have a reply, in the transcript's order."""
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
  """Makes the tools and messages of a request as those of branches are."""
  if api_request.continue_final_message:
    text = 'a reply of an episode cannot go on from a given beginning (prefill), for all '
    text += 'of it is trained; end with a message of the user'
    raise http.RefusedError(400, text)
  messages = [requests.make_comparable(message) for message in api_request.messages]
  return json.dumps(api_request.tools, sort_keys=True), messages
