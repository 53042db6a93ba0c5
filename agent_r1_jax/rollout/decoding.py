"""How the replies of an episode are sampled, and who chooses among several of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import replica as replica_lib


class Chooser(Protocol):
  """Who chooses in one episode: among candidates of a reply, or of whole turns."""

  @property
  def sampled(self) -> int:
    """The tokens of all candidates so far."""
    ...

  async def play(self, episode: Any) -> Any:
    """Plays an episode that has been reset to its end (rollout/episode.py).

    Returns:
      That episode, or the fork of it whose record counts.
    """
    ...

  def close(self) -> None:
    """Frees the rows of the cache that it took."""
    ...


class Choice(Protocol):
  """How it is chosen, in all episodes: guided/choice.py and guided/search.py."""

  @property
  def rows(self) -> int:
    """The rows of the cache that an episode takes."""
    ...

  def begin(self, replica: replica_lib.Replica) -> Chooser:
    """Returns who chooses in an episode that this replica samples."""
    ...


class Decoding(NamedTuple):
  """How the replies of a rollout are sampled.

  Attributes:
    sampling: Temperature, top-k, top-p, min-p.
    grammar: Restricts the replies to a grammar, which makes the samples off-policy.
    policy: The policy that samples; None is the engine's newest at each decode.
    choice: Samples several candidates and takes one, which makes the episodes off-policy;
      None samples each reply once.
    guides: Guides that the engine was made with, and the state in which each begins.
    routes: Whether a mixture of experts notes which ones compute each token.
  """

  sampling: config_lib.Sampling = config_lib.Sampling()
  grammar: types.Automaton | None = None
  policy: replica_lib.Policy | None = None
  choice: Choice | None = None
  guides: Mapping[guide_lib.Guide, guide_lib.State] = {}
  routes: bool = False


ON_POLICY = Decoding()
