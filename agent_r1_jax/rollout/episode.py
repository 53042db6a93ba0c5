"""Plays one episode: encodes messages, samples replies, and steps the environment.

`Episode.play` fills in a types.Trajectory.
"""

import asyncio
import collections
from collections.abc import Callable
import copy
import dataclasses
import math
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, scoring
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import transcript as transcript_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.host import moments, thread_pool, workers
from agent_r1_jax.rollout import context as context_lib
from agent_r1_jax.rollout import faults, sockets


class Episode:
  """The state of one episode while it is played.

  Attributes:
    context: Samples the replies; holds the episode's sequence in the engine.
    trajectory: The record of the episode, to which each turn is added.
    env: The environment, or the Player of the episode.
    made: Contains the environment until it is closed. A list, so that only one of two
      threads that want to close it gets it.
    over: Whether the episode has ended: an environment made later is closed at once.
    pending: The tokens of the messages to append before the next reply.
    opening: The index of the trajectory's message with which the context began.
    schemas: The JSON schemas of the tools, for the prompt.
    transcript: Tokens, action mask, log-probs and turns so far.
    status: How the episode ended; None while it goes on.
    unfinished: The text of the last reply, if it ran out of tokens; else None.
    reply: The reply of the last turn; None before the first.
    sampled: Under 'tokens', the number of sampled tokens; shared with all forks.
    value: A search's running total along an episode and its forks.
  """

  def __init__(
    self,
    chat: chat_lib.Chat,
    make_env: Callable[[], env_lib.Env | sockets.Player],
    limits: config_lib.Limits,
    context: context_lib.Context,
    trajectory: types.Trajectory,
  ):
    """Makes no environment yet; `trajectory` has only task, group and sample."""
    self.chat, self.make_env, self.limits = chat, make_env, limits
    self.context, self.trajectory = context, trajectory
    self.env: Any = None
    self.made: list[env_lib.Env | sockets.Player] = []
    self.over = False
    self.pending = types.Prompt()
    self.opening = 0
    self.schemas: list[dict[str, Any]] = []
    self.transcript = transcript_lib.Transcript()
    self.status: types.Status | None = None
    self.unfinished: str | None = None
    self.reply: request_lib.Chunk | None = None
    self.sampled, self.value = collections.Counter(), 0.0

  async def play(self, choice: sockets.Choice | None = None):
    """Plays to the end and completes the trajectory; `choice` selects among candidates.

    Raises:
      workers.LostCallError: The episode was lost through no fault of its own.
    """
    t, abandoned = self.trajectory, collections.Counter()
    thread_pool.abandoned_calls.set(abandoned)
    call_formats.chat_format.set(self.chat.format)
    self.context.restart(0)
    seconds = self.limits.episode_seconds
    chooser = choice.begin(self.context.replica) if choice else None
    try:
      async with asyncio.timeout(None if seconds == math.inf else seconds) as clock:
        task = await self._make_environment()
        if isinstance(self.env, sockets.Player):
          if chooser:
            text = 'choice: the replies to a program are not chosen; leave it out.'
            raise ValueError(text)
          t.status = await self.env.play(self, task)
        else:
          t.status = await self._play_turns(task, chooser)
          scored = t.status in types.BUDGET_STATUSES and self.transcript.turns
          if scored and env_lib.find_method(self.env, 'finish'):
            self.add_reward(await self._call_env('finish', t.status, self.unfinished))
    except faults.EnvironmentFaultError as error:
      t.status, t.error = types.Status.FAILED, str(error)
      t.metrics[f'error/{error.name}'] = 1.0
      t.metrics['timeouts'] = float(isinstance(error.__cause__, workers.CallTimeoutError))
    except TimeoutError:
      if not clock.expired():
        raise
      t.status, t.metrics['timeouts'] = types.Status.FAILED, 1.0
      t.metrics['error/LateEpisode'] = 1.0
      t.error = f'the episode took longer than {seconds:g} seconds (episode_seconds)'
    finally:
      try:
        if chooser:
          t.metrics['sampled_tokens'] = float(chooser.sampled)
          chooser.close()
      finally:
        await self._end()
    if abandoned:
      t.metrics['abandoned_calls'] = float(abandoned.total())
      t.metrics |= {f'abandoned/{name}': float(n) for name, n in abandoned.items()}

  async def _end(self):
    """Closes the sequence and the environment, and completes the trajectory."""
    t = self.trajectory
    self.context.close_all()
    t.segments, t.turns = self.transcript.collect()
    self.over = True
    if await self._close_env():
      t.metrics['close_failed'] = 1.0

  async def _play_turns(
    self, task: types.Task, chooser: sockets.Chooser | None
  ) -> types.Status:
    """Plays turn after turn, or lets `chooser` play; returns the episode's status."""
    await self._reset(task)
    self._end_without_room()
    if chooser:
      self._take_over(await chooser.play(self))
    while self.status is None:
      await self.take_turn()
    return self.status

  def _take_over(self, other: 'Episode'):
    """Becomes a fork of this episode; the rollout returns this one's trajectory."""
    for field in dataclasses.fields(types.Trajectory):
      setattr(self.trajectory, field.name, getattr(other.trajectory, field.name))
    self.env, self.transcript, self.context = other.env, other.transcript, other.context
    self.unfinished, self.status = other.unfinished, other.status

  async def take_turn(self, choose: context_lib.Choose | None = None):
    """Samples one reply and passes it to the environment; sets `status` at the end.

    `choose`, if given, chooses the reply among candidates.
    """
    with moments.watch(moments.Turn(len(self.transcript.turns))):
      await self._take_turn(choose)

  async def _take_turn(self, choose: context_lib.Choose | None):
    t, prompt, transcript = self.trajectory, self.pending, self.transcript
    max_tokens = min(self._room, self.limits.max_turn_tokens)
    with moments.watch(moments.Reply(self.context.length + len(prompt))) as moment:
      reply = await self.context.reply(prompt, max_tokens, choose)
      self.reply = moment.chunk = reply
    self.sampled['tokens'] += len(reply.tokens)
    transcript.add_turn(transcript.passage, prompt, reply)
    scoring.policy_step.set(int(reply.policy_steps[-1]))
    text = self.chat.decode(reply.tokens.tolist())
    t.messages.append({'role': 'assistant', 'content': str(text)})
    if not reply.stopped:
      self.unfinished, self.status = text, types.Status.OUT_OF_TOKENS
      return
    step = self.add_reward(await self._call_env('step', text))
    if step.done:
      self.status = types.Status.DONE
      return
    with faults.of_environment():
      said = faults.copy_messages(step.messages)
      history, t.messages = t.messages[self.opening :], t.messages + said
      if step.fresh:
        self.opening = len(t.messages) - len(said)
        transcript.begin()
        self.context.close()
        self.context.restart(transcript.count - 1)
        await self._encode(self.chat.encode_prompt, step.messages, self.schemas)
      else:
        last, given = int(reply.tokens[-1]), {'history': history, 'tools': self.schemas}
        await self._encode(self.chat.encode_delta, step.messages, last, **given)
    if len(transcript.turns) == self.limits.max_turns:
      self.status = types.Status.OUT_OF_TURNS
    else:
      self._end_without_room()

  @property
  def _room(self) -> int:
    """The most tokens of the next reply."""
    return self.context.slots - self.context.length - len(self.pending)

  def _end_without_room(self):
    """Ends the episode if the next reply has no room.

    It checks before the reply is requested, so that a search never reads the value of a
    state that does not fit a row.
    """
    if self.status is not None or self._room >= 1:
      return
    t, self.status = self.trajectory, types.Status.OUT_OF_TOKENS
    if not self.transcript.turns:
      n, slots = len(self.pending), self.context.slots
      t.error = f'the prompt has {n} tokens, and a row {slots} (slots)'
      t.metrics['prompt_too_long'] = 1.0

  async def fork(self, number: int) -> 'Episode':
    """Returns an independent copy; unless `number` is 0, it samples with other keys."""
    other, t = copy.copy(self), self.trajectory
    other.trajectory = dataclasses.replace(
      t, messages=[*t.messages], metrics={**t.metrics}
    )
    other.env = await self._call_env('clone')
    other.transcript = self.transcript.copy()
    other.context = self.context.fork(number, len(self.transcript.turns))
    return other

  @property
  def text_to_last_reply(self) -> types.Prompt:
    """The context's prompt up to the end of the last reply."""
    # If the last step was `fresh`, its passage has no turn yet.
    return self.transcript.list_played()[-1].segment.prompt

  @property
  def text(self) -> types.Prompt:
    """The prompt of the next reply; at the end, up to the last reply's last token."""
    if self.status is not None:
      return self.text_to_last_reply[:-1]
    return self.transcript.passage.segment.prompt + self.pending

  async def _make_environment(self) -> types.Task:
    """Makes the environment in a thread; returns a copy of the task that it may change.

    A late environment finds the episode over, and the thread closes it at once.
    """

    def make() -> tuple[env_lib.Env | sockets.Player, types.Task]:
      env = self.make_env()
      self.made.append(env)
      if self.over:
        asyncio.run(self._close_env())
      return env, env_lib.copy_containers(self.trajectory.task)

    with faults.of_environment():
      seconds = self.limits.reset_seconds
      self.env, task = await workers.call(
        make, name='make_env', seconds=seconds, field='reset_seconds'
      )
    return task

  async def _reset(self, task: types.Task):
    """Resets the environment and encodes the prompt."""
    t = self.trajectory
    self.transcript.begin()
    if env_lib.find_method(self.env, 'set_seed'):
      first, second = self.context.make_key('environment').tolist()
      await self._call_env('set_seed', first << 32 | second)
    messages = await self._call_env('reset', task)
    with faults.of_environment():
      t.messages = faults.copy_messages(messages)
      self.schemas = [tool.schema for tool in getattr(self.env, 'tools', ())]
      await self._encode(self.chat.encode_prompt, t.messages, self.schemas)

  async def _close_env(self) -> bool:
    """Closes the environment unless another thread does; returns whether that failed."""
    owner = f'Task {self.trajectory.task.id}'
    return await env_lib.close_env(self.made, self.limits.close_seconds, owner)

  async def _call_env(self, kind: str, *args) -> Any:
    """Calls a method of the environment within its time limit."""
    field = 'reset_seconds' if kind in ('set_seed', 'reset') else 'step_seconds'
    t = self.trajectory
    where = f'task {t.task.id}, sample {t.sample}, turn {len(self.transcript.turns)}'
    thread_pool.current_turn.set(where)
    with faults.of_environment():
      method, seconds = getattr(self.env, kind), getattr(self.limits, field)
      return await workers.call_on_user_loop(
        method, *args, name=kind, seconds=seconds, field=field
      )

  def add_reward(self, step: types.Step, turn: types.Turn | None = None) -> types.Step:
    """Adds a step's reward to a turn, and its metrics to the trajectory.

    Without `turn`, adds it to the last turn. Returns the step.
    """
    t = self.trajectory
    with faults.of_environment():
      if not isinstance(step, types.Step):
        text = f'a step is of type {type(step).__name__}, not a Step.'
        raise faults.EnvironmentFaultError(text)
      # Some algorithms learn from the named parts of the reward instead of their sum.
      parts = {n: x for n, x in step.metrics.items() if n.startswith('reward/')}
      for name, value in {'reward': step.reward, **parts}.items():
        if not math.isfinite(value):
          raise faults.EnvironmentFaultError(f'the {name} of a turn is {value}.')
      (turn or self.transcript.turns[-1]).reward += float(step.reward)
      for name, value in step.metrics.items():
        t.metrics[name] = t.metrics.get(name, 0.0) + float(value)
    return step

  async def _encode(self, encode, messages, *args, **kwargs):
    """Encodes the environment's messages; an error counts as the environment's fault."""
    try:
      if any(isinstance(message.get('content'), list) for message in messages):
        # In a thread: the event loop would wait for the process that decodes files.
        await asyncio.to_thread(self.chat.attach, self.pending.tokens, messages)
      self.pending = self.chat.attach(encode(messages, *args, **kwargs), messages)
    except ValueError as error:
      raise faults.EnvironmentFaultError(str(error)) from error
