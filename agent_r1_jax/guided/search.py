"""Beams and trees over turns, for environments that can be cloned.

Both read a value-head critic in the state after the environment's answer, which tells
more than the reply alone. With an implicit value (implicit_value.py), a state's value is
the sum over the replies so far. The environment needs a method `clone`, which returns an
independent copy of its state; copies are never closed. Rewards are not read: they may
know the gold answer.

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

# From episodes to the values of their states.
Read = Callable[[Sequence[Any]], Awaitable[np.ndarray]]


class BeamSearch(NamedTuple):
  """Beam search: extends the best `width` episodes by `candidates` turns each.

  With both 1 it is plain sampling.

  Attributes:
    width: The number of episodes kept after each turn.
    candidates: The number of turns sampled after each of them.
    critic: The critic, a policy of the engine.
    implicit: The odds of a critic that is a language model, as in choice.ReplyChoice.
  """

  width: int
  candidates: int
  critic: protocol.Policy
  implicit: implicit_value.Odds | None = None

  @property
  def rows(self) -> int:
    """The cache rows that an episode takes."""
    return (2 * self.candidates + 1) * self.width

  def begin(self, replica: protocol.AnyReplica) -> 'Searcher':
    """Returns the searcher for one episode that this replica samples."""
    return Searcher(replica, self)

  async def search(self, root: Any, read: Read) -> Any:
    """Returns the episode with the highest value among those that ended."""
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
    episode: The episode up to this state.
    value: The critic's value of the state.
    prior: The mean log-prob of the turn.
    children: The turns tried from here.
    visits: The number of simulations that passed through.
    total: The sum of the values they found.
  """

  episode: Any
  value: float = 0.0
  prior: float = 0.0
  children: list['Node'] = dataclasses.field(default_factory=list)
  visits: int = 0
  total: float = 0.0

  @property
  def mean(self) -> float:
    """The mean value found below."""
    return self.total / max(self.visits, 1)


class TreeSearch(NamedTuple):
  """Tree search in the manner of PPO-MCTS (Liu et al. 2023, arXiv 2309.15028).

  PPO-MCTS searches over tokens, whose probabilities are known; here turns are sampled.
  Each simulation descends by Q + c P √N / (1 + n), with P the softmax of the turns' mean
  log-probs, adds one turn, reads the critic after it, and adds this value to all nodes
  above. The episode continues with the most visited child and keeps its subtree. One
  simulation is plain sampling.

  Attributes:
    simulations: The number of turns sampled before each turn of the episode.
    candidates: The maximum number of turns tried from one state.
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
    """The cache rows that an episode takes."""
    return 2 * self.simulations + 2

  def begin(self, replica: protocol.AnyReplica) -> 'Searcher':
    """Returns the searcher for one episode that this replica samples."""
    return Searcher(replica, self)

  async def search(self, root: Any, read: Read) -> Any:
    """Returns the episode with the most simulations."""
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
    """Adds a turn below the root, and its value to all nodes above it."""
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
    """The tokens of all turns tried."""
    return self._root.sampled['tokens'] if self._root else 0

  async def play(self, episode: Any) -> Any:
    """Searches from an episode that has been reset; returns the resulting episode.

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
  """Forks each episode by each number, and plays one turn of each fork."""

  async def extend(episode, number):
    fork = await episode.fork(number)
    await fork.take_turn()
    return fork

  try:
    async with asyncio.TaskGroup() as group:
      tasks = [group.create_task(extend(e, i)) for e in episodes for i in numbers]
  except BaseExceptionGroup as error:
    # One environment error ends the search.
    raise error.exceptions[0] from None
  return [task.result() for task in tasks]


def _walk(node: Node):
  yield node
  for child in node.children:
    yield from _walk(child)


def _close(episodes):
  for episode in episodes:
    episode.context.close()
