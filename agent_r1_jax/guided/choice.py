"""Best-of-K decoding with a critic: of several sampled turns, the episode keeps one.

Each reply is sampled several times, as forks of the episode's sequence. The candidates
are scored, and the environment sees only the chosen one. The critic reads the state in
which a reply's last token is chosen, the last state of a turn that it was trained on.
This needs no tool; the state after the environment's answer would need all tools to run
for every candidate.

  critic = choice.by_value(engine, 'runs/ppo/critic', 'runs/ppo/model', candidates=8)
  evaluate.run(..., decoding=decoding.Decoding(choice=critic))
"""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import functools
import os
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.guided import critic as critic_lib
from agent_r1_jax.guided import implicit_value


class Candidate(NamedTuple):
  """A sampled reply that may be chosen.

  Attributes:
    tokens: The episode's tokens, the reply included, int32.
    reply: The reply.
    value: The critic's value of the state in which the reply's last token is chosen; 0
      without a critic.
  """

  tokens: np.ndarray
  reply: request_lib.Chunk
  value: float


def value(candidate: Candidate) -> float:
  """Scores a candidate by the critic's value."""
  return candidate.value


def mean_logprob(candidate: Candidate) -> float:
  """Scores a candidate by the mean log-prob of the reply's tokens."""
  return float(candidate.reply.logprobs.mean())


class ReplyChoice(NamedTuple):
  """How many candidates to sample for each reply, and which one to choose.

  Attributes:
    candidates: The number of candidates (K). The first is the reply that would be sampled
      without a choice; with K = 1 it is the only one.
    score: Scores a candidate.
    beta: 0 takes the best candidate; otherwise one is sampled in proportion to
      exp(score / beta), uniformly for math.inf.
    critic: The critic. None uses the policy's own value head, if it has one.
    implicit: The odds of the critic if it is a language model, whose value of a reply is
      the reply's log-prob by it (guided/implicit_value.py).
  """

  candidates: int
  score: Callable[[Candidate], float] = value
  beta: float = 0.0
  critic: protocol.Policy | None = None
  implicit: implicit_value.Odds | None = None

  @property
  def rows(self) -> int:
    """The cache rows that an episode takes; the critic has rows of its own."""
    return self.candidates if self.critic is None else 2 * self.candidates

  def begin(self, replica: protocol.AnyReplica) -> 'ReplyChooser':
    """Returns the chooser for one episode that this replica samples."""
    return ReplyChooser(replica, self)


def by_value(
  engine: engine_lib.Engine,
  critic: str | os.PathLike,
  policy: str | os.PathLike,
  *,
  candidates: int,
  beta: float = 0.0,
  **expected: Any,
) -> ReplyChoice:
  """Makes a choice by the values of a critic in a directory.

  Args:
    engine: The engine of the episodes, made with the policy's parameters.
    critic: The critic's directory, or the policy's if it has a value head.
    policy: The policy's directory.
    candidates: See ReplyChoice.
    beta: See ReplyChoice.
    **expected: Required settings of the critic's training, as in critic.load.

  Raises:
    ValueError: The critic does not value this policy's states; see critic.load.
  """
  params, found = critic_lib.load(critic, policy, mesh=engine.mesh, **expected)
  # Candidates differ in length: a longer one delays the reward by its tokens.
  gamma = found['gamma'] if found['step'] == 'token' else 1.0
  shared = os.path.realpath(critic) == os.path.realpath(policy)
  return ReplyChoice(
    candidates,
    lambda c: gamma ** len(c.reply.tokens) * c.value,
    beta,
    None if shared else engine.make_policy(params, 0),
  )


def by_implicit_value(
  engine: engine_lib.Engine,
  critic: str | os.PathLike,
  policy: str | os.PathLike,
  *,
  candidates: int,
  beta: float = 0.0,
) -> ReplyChoice:
  """Makes a choice by the implicit value in a directory; see `by_value`.

  The engine must have been made with the guide FORCED.

  Raises:
    ValueError: The values are of another policy.
  """
  params, odds = implicit_value.load(critic, policy, mesh=engine.mesh)
  return ReplyChoice(candidates, value, beta, engine.make_policy(params, 0), odds)


class StateValues:
  """Reads a critic's values of one episode's states; prefills no token twice."""

  def __init__(self, replica: protocol.AnyReplica, critic: protocol.Policy):
    """Reads by `critic`, a policy of the replica's engine, in its cache."""
    self._replica, self._critic = replica, critic
    self._sequences: list[request_lib.Sequence] = []

  async def read(self, sequences: Sequence[types.Prompt]) -> Float[np.ndarray, 'K']:
    """Returns the value of the state after each sequence, float32.

    Prefixes shared with the previous sequences are not computed again.
    """
    # The sampled token is ignored: the value is of the state before it.
    make = functools.partial(
      request_lib.Request, max_tokens=1, sampling=config_lib.GREEDY, policy=self._critic
    )
    chunks = await self._sample([*map(make, sequences)])
    return np.array([chunk.values[0] for chunk in chunks])

  async def read_replies(
    self,
    sequences: Sequence[types.Prompt],
    replies: Sequence[request_lib.Chunk],
    odds: implicit_value.Odds,
  ) -> Float[np.ndarray, 'K']:
    """Returns Σ (log π_φ - c) of each reply; each sequence ends with its reply."""
    requests = []
    for sequence, reply in zip(sequences, replies, strict=True):
      request = request_lib.Request(
        sequence[: -len(reply.tokens)],
        max_tokens=len(reply.tokens),
        policy=self._critic,
        guides={guide_lib.FORCED: guide_lib.forced_state(reply.tokens)},
      )
      requests.append(request)
    said = await self._sample(requests)
    return np.array([float((chunk.logprobs - odds.typical).sum()) for chunk in said])

  async def _sample(self, requests: Sequence[request_lib.Request]) -> Any:
    self.close()
    generations = [self._replica.submit(request) for request in requests]
    self._sequences = [generation.sequence for generation in generations]
    return await asyncio.gather(*generations)

  def close(self):
    """Releases the rows; until others take them, new sequences reuse their prefixes."""
    for sequence in self._sequences:
      sequence.close()
    self._sequences = []


class ReplyChooser:
  """The choices of one episode.

  Attributes:
    sampled: The tokens of all candidates so far.
  """

  def __init__(self, replica: protocol.AnyReplica, choice: ReplyChoice):
    """Chooses among replies that the replica samples."""
    self._replica, self._choice = replica, choice
    critic = choice.critic
    self._values = None if critic is None else StateValues(replica, critic)
    self.sampled = 0

  async def play(self, episode: Any) -> Any:
    """Plays an episode (rollout/episode.py), choosing each reply."""
    while episode.status is None:
      await episode.take_turn(self.reply)
    return episode

  async def reply(self, request: request_lib.Request) -> request_lib.Generation:
    """Samples the candidates of a reply; returns the chosen one, which is complete.

    The next turn continues with the chosen candidate's key, since the randomness of a
    rejected key is spent at the positions of its reply.

    `request` is the first candidate's; the others fork its sequence.
    """
    parent = request.parent
    if isinstance(parent, request_lib.Sequence):
      parent = request_lib.Fork(parent, len(parent))
    requests, length = [request], parent.length if parent else 0
    for i in range(1, self._choice.candidates):
      # The length differs in each turn, and so do the keys.
      key = request_lib.make_key(*request.key.tolist(), length, i)
      requests.append(dataclasses.replace(request, parent=parent, key=key))
    generations = [self._replica.submit(request) for request in requests]
    chosen = None
    try:
      replies = await asyncio.gather(*generations)
      self.sampled += sum(len(reply.tokens) for reply in replies)
      chosen = await self._choose([g.sequence for g in generations], replies, request.key)
      return generations[chosen]
    finally:
      for i, generation in enumerate(generations):
        if i != chosen:
          generation.sequence.close()

  async def _choose(self, sequences, replies, key) -> int:
    if len(sequences) == 1:
      return 0
    values = np.array([reply.values[-1] for reply in replies])
    if self._values is not None and self._choice.implicit:
      prompts = [sequence.prompt for sequence in sequences]
      values = await self._values.read_replies(prompts, replies, self._choice.implicit)
    elif self._values is not None:
      values = await self._values.read([sequence.prompt[:-1] for sequence in sequences])
    scores = np.array(
      [
        self._choice.score(Candidate(sequence.tokens, reply, float(v)))
        for sequence, reply, v in zip(sequences, replies, values, strict=True)
      ]
    )
    chosen = int(np.argmax(scores))
    if self._choice.beta:
      weights = np.exp((scores - scores.max()) / self._choice.beta)
      rng = np.random.default_rng([*key.tolist(), len(sequences[0])])
      chosen = int(rng.choice(len(sequences), p=weights / weights.sum()))
    return chosen

  def close(self):
    """Frees the rows of the critic's sequences."""
    if self._values is not None:
      self._values.close()
