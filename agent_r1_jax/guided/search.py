"""Beams and trees over turns, for environments that can be cloned.

Both read a critic with a value head in the state after the environment's answer, which
tells more than the reply alone. With an implicit value (implicit_value.py) the value of a
state is the sum over the replies so far. The environment says that it can be cloned
by its method `clone`, which returns an independent copy of its state; a copy is never
closed. Rewards are not read: they may know the gold answer.

  decoding.Decoding(choice=search.BeamSearch(2, 4, critic))
  decoding.Decoding(choice=search.TreeSearch(8, 4, critic))
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.guided import choice, implicit_value
from agent_r1_jax.rollout import faults

# Episodes -> the values of their states.
Read = Callable[[Sequence[Any]], Awaitable[np.ndarray]]


class BeamSearch(NamedTuple):
  """A beam search: of the best `width` episodes, each is continued `candidates` times.

  With both 1 it is plain sampling.

  Attributes:
    width: The episodes that are kept after each turn.
    candidates: The turns that are sampled after each of them.
    critic: The critic, a policy of the engine.
    implicit: The odds of a critic that is a language model, as in choice.ReplyChoice.
  """

  width: int
  candidates: int
  critic: protocol.Policy
  implicit: implicit_value.Odds | None = None

  @property
  def rows(self) -> int:
    """The rows of the cache that an episode takes."""
    return (2 * self.candidates + 1) * self.width

  def begin(self, replica: protocol.AnyReplica) -> 'Searcher':
    """Returns who searches in an episode that this replica samples."""
    return Searcher(replica, self)

  async def search(self, root: Any, read: Read) -> Any:
    """Returns the episode of the highest value among those that ended."""
    episodes, values = [root], np.zeros(1)
    while any(episode.status is None for episode in episodes):
      ended = [(v, e) for v, e in zip(values, episodes, strict=True) if e.status]
      opened = [episode for episode in episodes if episode.status is None]
      new = await _extend(opened, range(self.candidates))
      _close(opened)
      found = zip(await read(new), new, strict=True)
      ranked = sorted([*ended, *found], key=lambda pair: -pair[0])
      values, episodes = map(list, zip(*ranked[: self.width], strict=True))
      _close([episode for _, episode in ranked[self.width :]])
    return episodes[0]


@dataclasses.dataclass(eq=False)
class Node:
  """A state after a turn.

  Attributes:
    episode: The episode that has come here.
    value: The critic's value of the state.
    prior: The mean log-prob of the turn.
    children: The turns that were tried here.
    visits: The simulations that came here.
    total: The sum of the values that they found.
  """

  episode: Any
  value: float = 0.0
  prior: float = 0.0
  children: list['Node'] = dataclasses.field(default_factory=list)
  visits: int = 0
  total: float = 0.0

  @property
  def mean(self) -> float:
    """The mean value below."""
    return self.total / max(self.visits, 1)


class TreeSearch(NamedTuple):
  """A tree search in the manner of PPO-MCTS (Liu et al. 2023, arXiv 2309.15028).

  Theirs is over tokens, whose probabilities are known; here turns are sampled. Each
  simulation goes down by Q + c P √N / (1 + n), with P the softmax of the turns' mean
  log-probs, adds one turn, reads the critic after it, and adds this value to all above.
  The episode goes on with the child that was visited most, and keeps what is below. One
  simulation is plain sampling.

  Attributes:
    simulations: How many turns are sampled before each turn of the episode.
    candidates: The most turns that are tried after one state.
    critic: The critic, a policy of the engine.
    implicit: The odds of a critic that is a language model, as in choice.ReplyChoice.
    exploration: The constant c, in units of the critic's values.
  """

  simulations: int
  candidates: int
  critic: protocol.Policy
  implicit: implicit_value.Odds | None = None
  exploration: float = 1.0

  @property
  def rows(self) -> int:
    """The rows of the cache that an episode takes."""
    return 2 * self.simulations + 2

  def begin(self, replica: protocol.AnyReplica) -> 'Searcher':
    """Returns who searches in an episode that this replica samples."""
    return Searcher(replica, self)

  async def search(self, root: Any, read: Read) -> Any:
    """Returns the episode that the most simulations went through."""
    node = Node(root)
    while node.episode.status is None:
      for _ in range(self.simulations):
        await self._simulate(node, read)
      taken = max(node.children, key=lambda child: (child.visits, child.mean))
      _close([node.episode])
      for child in node.children:
        if child is not taken:
          _close(below.episode for below in _walk(child))
      node = taken
    return node.episode

  async def _simulate(self, root: Node, read: Read):
    """Adds a turn below the root and its value to all nodes above it."""
    path = [root]
    while path[-1].episode.status is None:
      node = path[-1]
      if len(node.children) < min(self.candidates, 1 + node.visits):
        (episode,) = await _extend([node.episode], [len(node.children)])
        (value,) = await read([episode])
        node.children.append(
          Node(episode, float(value), float(np.mean(episode.reply.logprobs)))
        )
        path.append(node.children[-1])
        break
      path.append(self._descend(node))
    for node in path:
      node.visits += 1
      node.total += path[-1].value

  def _descend(self, node: Node) -> Node:
    priors = np.exp([child.prior for child in node.children])
    n = np.array([child.visits for child in node.children])
    bonus = self.exploration * priors / priors.sum() * math.sqrt(node.visits) / (1 + n)
    scores = np.array([child.mean for child in node.children]) + bonus
    return node.children[int(np.argmax(scores))]


class Searcher:
  """A search in one episode."""

  def __init__(self, replica: protocol.AnyReplica, search: BeamSearch | TreeSearch):
    """Begins without an episode."""
    self._search = search
    self._values = choice.StateValues(replica, search.critic)
    self._root: Any = None

  @property
  def sampled(self) -> int:
    """The tokens of all turns that were tried."""
    return self._root.sampled['tokens'] if self._root else 0

  async def play(self, episode: Any) -> Any:
    """Searches from an episode that has been reset; returns the one that it ends in.

    Raises:
      faults.EnvironmentFaultError: Its environment cannot be cloned, or raised.
    """
    self._root = episode
    if not env_lib.find_method(episode.env, 'clone'):
      raise faults.EnvironmentFaultError(
        f'search: {type(episode.env).__name__} has no method clone, by which an '
        'environment says that it can be copied; take a choice among replies '
        '(guided/choice.py).'
      )
    return await self._search.search(episode, self._read)

  async def _read(self, episodes: Sequence[Any]) -> np.ndarray:
    odds = self._search.implicit
    if odds is None:
      return await self._values.read([episode.text for episode in episodes])
    texts = [episode.text_to_last_reply for episode in episodes]
    replies = [episode.reply for episode in episodes]
    logprobs = await self._values.read_replies(texts, replies, odds)
    for episode, logprob in zip(episodes, logprobs, strict=True):
      episode.value += logprob
    return np.array([episode.value for episode in episodes])

  def close(self):
    """Frees the rows of the critic's texts."""
    self._values.close()


async def _extend(episodes, numbers) -> list[Any]:
  """Returns, for each of the episodes, forks by these numbers that are a turn longer."""

  async def extend(episode, number):
    fork = await episode.fork(number)
    await fork.take_turn()
    return fork

  try:
    async with asyncio.TaskGroup() as group:
      tasks = [group.create_task(extend(e, i)) for e in episodes for i in numbers]
  except BaseExceptionGroup as error:
    # One error of the environment ends the whole search.
    raise error.exceptions[0] from None
  return [task.result() for task in tasks]


def _walk(node: Node):
  yield node
  for child in node.children:
    yield from _walk(child)


def _close(episodes):
  for episode in episodes:
    episode.context.close()
